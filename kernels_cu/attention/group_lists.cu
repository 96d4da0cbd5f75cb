// The union of the index lists of neighbouring queries, ascending, with a bit for each row and query: a block a group.
//
// Row numbers are looked at in windows of 65,536, the size of the bitmaps in shared memory, one for each query. Of very many
// rows the first window is an eighth of that: enough to judge lists that share little.
//
//   insert   each entry in the window sets its bit; one that finds it set is noted as a duplicate
//   count    rows of the union before each word of the bitmaps: a warp its share of the words, then the warps
//   judge    lists that share too little, or repeat too much, are left to another kernel, the sooner the better
//   write    the rows of the union and who does not list them: a warp 256 row numbers at a time, a lane 8 of them
//   repeat   a duplicate marks its row as `twice`; rows listed more often yet are appended, in order
//
// In which order threads find duplicates does not reach the results: they set bits, or are sorted.
//
// Threads and shared memory are as many as there are queries, so that an SM always has 16 of them at work: 228 KB hold no
// more. Bytes for each query: bitmap 8,192, rows on their way or to be appended 2,048, duplicates 1,536; and 4,096 for counts.
#include "attention/grouped.cuh"

constexpr int THREADS = 128 * QUERIES, WARPS = THREADS / 32;
constexpr int WORDS = 2048;  // of a bitmap
constexpr int MOST_DUPLICATES = 384 * QUERIES, MOST_APPENDED = 128 * QUERIES;  // of a window
constexpr int ROUNDS = QUERIES < 8 ? 8 / QUERIES : 1;  // of list entries, one a query, that a thread asks for at once
constexpr int ENOUGH = 128;  // entries seen before a window that is not the last is judged
constexpr int MANY = 8;      // rows of the cache for an entry of a list, from which the first window is a small one

// Duplicates that are appended, unsorted and sorted: (row in the window) * MAX_QUERIES + query.
struct Again {
    uint32_t found[MOST_APPENDED], sorted[MOST_APPENDED];
};

struct Shared {
    uint32_t bits[QUERIES][WORDS];
    uint16_t before[WORDS];  // rows of the union before a word, in the warp's share
    union {
        uint16_t staged[WARPS][256];  // a warp's rows on their way: `excluded` and the row's place among 256
        Again again;
    };
    uint32_t duplicates[MOST_DUPLICATES];
    int rows[32], entries[32], first[32];  // of a warp's share: rows, bits in all bitmaps, rows before it
    int length[QUERIES];  // of the lists
    int num_duplicates, num_found;
    int num_rows, num_entries;  // of the window, of the windows so far
};

extern __shared__ __align__(16) uint8_t shared[];
__device__ __forceinline__ Shared& sm() { return *reinterpret_cast<Shared*>(shared); }

// The sum over a warp's lanes before this one.
__device__ __forceinline__ int sum_before(int x, int lane) {
    int sum = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - x;
}

struct Group {
    const GroupedParams& p;
    int first_query, queries;  // those that there are
    int words, share;          // of a bitmap those of the window, and of them a warp's
    int32_t* rows;
    uint8_t* excluded;
    uint32_t* twice;
};

__device__ __forceinline__ const int32_t* list_of(const Group& g, int query) {
    return g.p.main.indices + (g.first_query + query) * g.p.main.index_stride_b;
}

__device__ __forceinline__ uint32_t any_query(int word) {
    uint32_t bits = 0;
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) bits |= sm().bits[q][word];
    return bits;
}

__device__ __forceinline__ void insert(const Group& g, int32_t begin, uint32_t span) {
    for (int i = threadIdx.x; i < g.words; i += THREADS) {
#pragma unroll
        for (int q = 0; q < QUERIES; ++q) sm().bits[q][i] = 0;
    }
    if (threadIdx.x == 0) sm().num_duplicates = sm().num_found = 0;
    __syncthreads();
    for (int at = threadIdx.x; at < g.p.main.topk; at += ROUNDS * THREADS) {
        int32_t entries[ROUNDS * QUERIES];
#pragma unroll
        for (int i = 0; i < ROUNDS * QUERIES; ++i) {
            const int q = i % QUERIES, entry = at + i / QUERIES * THREADS;
            entries[i] = begin - 1;
            if (entry < sm().length[q]) entries[i] = list_of(g, q)[entry];
        }
#pragma unroll
        for (int i = 0; i < ROUNDS * QUERIES; ++i) {
            const uint32_t row = uint32_t(entries[i]) - begin;  // in the window
            if (row >= span) continue;
            const uint32_t bit = 1u << (row % 32);
            if ((atomicOr(&sm().bits[i % QUERIES][row / 32], bit) & bit) == 0) continue;
            const int n = atomicAdd(&sm().num_duplicates, 1);
            if (n < MOST_DUPLICATES) sm().duplicates[n] = row * MAX_QUERIES + i % QUERIES;
        }
    }
    __syncthreads();
}

// Fills before, rows, entries and first.
__device__ __forceinline__ void count(const Group& g, int warp, int lane) {
    int rows = 0, entries = 0;
    for (int i = 0; i < g.share; i += 32) {
        const int word = warp * g.share + i + lane;
        const bool mine = i + lane < g.share && word < g.words;
        int here = 0;
        if (mine) {
            uint32_t bits = 0;
#pragma unroll
            for (int q = 0; q < QUERIES; ++q) {
                const uint32_t own = sm().bits[q][word];
                bits |= own;
                entries += __popc(own);
            }
            here = __popc(bits);
        }
        const int before = rows + sum_before(here, lane);
        if (mine) sm().before[word] = before;
        rows = __shfl_sync(~0u, before + here, 31);
    }
    entries = __shfl_sync(~0u, sum_before(entries, lane) + entries, 31);
    if (lane == 0) {
        sm().rows[warp] = rows;
        sm().entries[warp] = entries;
    }
    __syncthreads();
    if (warp == 0) {
        rows = lane < WARPS ? sm().rows[lane] : 0;
        entries = lane < WARPS ? sm().entries[lane] : 0;
        const int before = sum_before(rows, lane), others = sum_before(entries, lane);
        sm().first[lane] = before;
        if (lane == 31) {
            sm().num_rows = before + rows;
            sm().num_entries += others + entries + sm().num_duplicates;
        }
    }
    __syncthreads();
}

// Bits 8 i of x, i = 0 .. 3, as the lowest four of a word.
__device__ __forceinline__ uint32_t gather_bits(uint32_t x) { return (x & 0x01010101) * 0x01020408 >> 24; }

// The window's rows and who does not list them, to `end`, ...
__device__ __forceinline__ void write_rows(const Group& g, int32_t begin, int end, int warp, int lane) {
    uint16_t* staged = sm().staged[warp];
    for (int word = 8 * warp; word < g.words; word += 8 * WARPS) {
        uint32_t low = 0, high = 0, any = 0;  // a byte a query
#pragma unroll
        for (int q = 0; q < QUERIES; ++q) {
            const uint32_t own = sm().bits[q][word + lane / 4] >> (lane % 4 * 8) & 0xff;
            any |= own;
            (q < 4 ? low : high) |= own << (q % 4 * 8);
        }
        int to = sum_before(__popc(any), lane);
        const int count = __shfl_sync(~0u, to + __popc(any), 31);
        if (count == 0) continue;
        for (; any != 0; any &= any - 1, ++to) {
            const int k = __ffs(any) - 1;
            uint32_t listed = gather_bits(low >> k);
            if (QUERIES > 4) listed |= gather_bits(high >> k) << 4;
            staged[to] = (~listed & 0xff) << 8 | (8 * lane + k);
        }
        __syncwarp();
        const int first = end + sm().first[word / g.share] + sm().before[word];
        for (int i = lane; i < count; i += 32) {
            const uint32_t row = staged[i];
            g.rows[first + i] = begin + 32 * word + (row & 0xff);
            g.excluded[first + i] = row >> 8;
        }
        __syncwarp();
    }
}

// The bits of tiles that begin with rows from `begin` to `end` - 1.
__device__ __forceinline__ void clear_twice(const Group& g, int begin, int end) {
    for (int i = num_tiles(begin) * 2 * QUERIES + threadIdx.x; i < num_tiles(end) * 2 * QUERIES; i += THREADS) g.twice[i] = 0;
}

// Duplicates mark their row as `twice`; what finds that done goes to `found`.
__device__ __forceinline__ void mark_duplicates(const Group& g, int end) {
    uint32_t bit[MOST_DUPLICATES / THREADS], was[MOST_DUPLICATES / THREADS];
#pragma unroll
    for (int n = 0; n < MOST_DUPLICATES / THREADS; ++n) {  // so that a thread waits for all its atomics together
        was[n] = bit[n] = 0;
        if (n * THREADS + threadIdx.x >= sm().num_duplicates) continue;
        const uint32_t key = sm().duplicates[n * THREADS + threadIdx.x], row = key / MAX_QUERIES;
        const int word = row / 32;
        const int i = end + sm().first[word / g.share] + sm().before[word] + __popc(any_query(word) & ((1u << (row % 32)) - 1));
        bit[n] = 1u << (i % 32);
        was[n] = atomicOr(g.twice + (i / 64 * QUERIES + key % MAX_QUERIES) * 2 + i / 32 % 2, bit[n]);
    }
#pragma unroll
    for (int n = 0; n < MOST_DUPLICATES / THREADS; ++n) {
        if ((was[n] & bit[n]) == 0) continue;
        const int to = atomicAdd(&sm().num_found, 1);
        if (to < MOST_APPENDED) sm().again.found[to] = sm().duplicates[n * THREADS + threadIdx.x];
    }
    __syncthreads();
}

// A warp finds the place of one at a time.
__device__ __forceinline__ void sort_found(int warp, int lane) {
    const int n = sm().num_found;
    for (int i = warp; i < n; i += WARPS) {
        const uint32_t key = sm().again.found[i];
        int place = 0;
        for (int j = lane; j < n; j += 32) place += sm().again.found[j] < key || (sm().again.found[j] == key && j < i);
        place = __reduce_add_sync(~0u, place);
        if (lane == 0) sm().again.sorted[place] = key;
    }
    __syncthreads();
}

// Writes the group's union; returns its rows, or 0 for a group that is left.
__device__ __forceinline__ int unite(Group& g) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t slots = min(g.p.main.num_slots, int64_t(0x7fffffff));
    int rows = 0;
    if (threadIdx.x == 0) sm().num_entries = 0;
    if (threadIdx.x < QUERIES) sm().length[threadIdx.x] = threadIdx.x < g.queries ? call_length(g.p, g.first_query + threadIdx.x) : 0;
    for (int64_t begin = 0; begin < slots; begin += 32 * g.words) {
        g.words = begin == 0 && slots >= int64_t(MANY) * g.p.main.topk ? WORDS / 8 : min(WORDS, int((slots - begin + 1023) / 1024) * 32);
        g.share = (g.words + WARPS - 1) / WARPS;
        insert(g, begin, min(slots - begin, int64_t(32 * g.words)));
        count(g, warp, lane);
        const int first = rows, end = rows + sm().num_rows;
        const bool judged = sm().num_entries >= ENOUGH || begin + 32 * g.words >= slots;
        if (sm().num_duplicates > MOST_DUPLICATES || (judged && end > g.p.most * sm().num_entries)) return 0;
        write_rows(g, begin, first, warp, lane);
        clear_twice(g, first, end);
        const bool repeated = sm().num_duplicates > 0;
        __syncthreads();
        rows = end;
        if (!repeated) continue;
        mark_duplicates(g, first);
        const int again = sm().num_found;
        if (again > MOST_APPENDED) return 0;
        sort_found(warp, lane);
        clear_twice(g, end, end + again);
        for (int i = threadIdx.x; i < again; i += THREADS) {
            g.rows[end + i] = begin + sm().again.sorted[i] / MAX_QUERIES;
            g.excluded[end + i] = ~(1u << sm().again.sorted[i] % MAX_QUERIES);
        }
        rows = end + again;
        __syncthreads();
    }
    return rows;
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / QUERIES) group_lists(const __grid_constant__ GroupedParams p) {
    const int index = blockIdx.x, first = (p.first_group + index) * QUERIES;
    Group g = {p, first, min(QUERIES, p.num_queries - first), 0, 0, p.rows + int64_t(index) * p.capacity,
               p.excluded + int64_t(index) * p.capacity,
               reinterpret_cast<uint32_t*>(p.twice + int64_t(index) * num_tiles(p.capacity) * QUERIES)};
    const int rows = unite(g);
    if (threadIdx.x == 0) p.group_lengths[index] = rows;
    if (threadIdx.x < g.queries) p.left[first + threadIdx.x] = rows > 0 ? -1 : call_length(p, first + threadIdx.x);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
