// Makes the union of the index lists of a query group, in ascending order, and notes for each row which queries list
// it. A CTA works on one group at a time.
//
// Row numbers are worked on in windows of 65,536, the size of a bitmap in shared memory; there is one bitmap for each
// query. If the cache has very many rows, the first window is an eighth of that: it suffices to reject groups whose
// lists share little.
//
//   insert   each entry in the window sets its bit; an entry whose bit is set already is noted as a duplicate
//   count counts the union's rows before each word of the bitmaps: within each warp's share of words, then over warps
//   judge    groups whose lists share too little or repeat too much are left to another kernel, as early as possible
//   write    writes the union's rows and the queries that do not list them: a warp 256 row numbers at a time, a lane 8
//   repeat   a duplicate marks its row as `twice`; rows listed more often than twice are appended, in order
//
// Results do not depend on the order in which threads find duplicates: duplicates set bits, or are sorted.
//
// Threads and shared memory grow with the group's queries, so that an SM always works on 16 queries: 228 KB hold no
// more. Bytes for each query: bitmap 8,192, staged or appended rows 2,048, duplicates 1,536; and 4,096 a group for
// counts.
#include "attention/grouped.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 128 * QUERIES, WARPS = THREADS / 32;
constexpr int WORDS = 2048;                                                  // of a bitmap
constexpr int MAX_DUPLICATES = 384 * QUERIES, MAX_APPENDED = 128 * QUERIES;  // of a window
// How many entries of each query's list a thread loads at a time.
constexpr int ROUNDS = QUERIES < 8 ? 8 / QUERIES : 1;
constexpr int ENOUGH = 128;  // entries that must be seen before a group is judged, unless it is the last window
constexpr int MANY = 8;      // the first window is small if the cache has this many rows for each list entry

// Duplicates to be appended, as found, and sorted: (row in the window) * MAX_QUERIES + query.
struct Appended {
    uint32_t found[MAX_APPENDED], sorted[MAX_APPENDED];
};

struct Shared {
    uint32_t bits[QUERIES][WORDS];
    uint16_t before[WORDS];  // rows of the union before a word, within the warp's share
    union {
        uint16_t staged[WARPS][256];  // of a warp's 256 row numbers: `excluded`, and the number's low byte
        Appended appended;
    };
    uint32_t duplicates[MAX_DUPLICATES];
    int rows[32], entries[32], first[32];  // for each warp's share: rows, bits in all bitmaps, rows before it
    int length[QUERIES];                   // length of each query's list
    int num_duplicates, num_found;
    int num_rows, num_entries;  // rows of this window; entries in all windows so far
};

extern __shared__ __align__(16) uint8_t shared[];
__device__ __forceinline__ Shared& sm() { return *reinterpret_cast<Shared*>(shared); }

// The sum over the lanes before this one.
__device__ __forceinline__ int sum_before(int x, int lane) { return inclusive_sum(x, lane) - x; }

struct Group {
    const GroupedParams& p;
    int first_query, queries;  // the call's last group may have fewer than QUERIES
    int words, share;          // words of a bitmap in the window, and a warp's share of them
    int32_t* rows;
    uint8_t* excluded;
    uint32_t* twice;
};

__device__ __forceinline__ const int32_t* list_of_query(const Group& g, int query) {
    return g.p.main.indices + (g.first_query + query) * g.p.main.index_stride_b;
}

// The union of a word over all queries' bitmaps.
__device__ __forceinline__ uint32_t any_query(int word) {
    uint32_t bits = 0;
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) bits |= sm().bits[q][word];
    return bits;
}

// Sets the bits of the window of `span` rows that begins with row `begin`, and notes duplicates.
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
            if (entry < sm().length[q]) entries[i] = list_of_query(g, q)[entry];
        }
#pragma unroll
        for (int i = 0; i < ROUNDS * QUERIES; ++i) {
            const uint32_t row = uint32_t(entries[i]) - begin;  // in the window
            if (row >= span) continue;
            const uint32_t bit = 1u << (row % 32);
            if ((atomicOr(&sm().bits[i % QUERIES][row / 32], bit) & bit) == 0) continue;
            const int n = atomicAdd(&sm().num_duplicates, 1);
            if (n < MAX_DUPLICATES) sm().duplicates[n] = row * MAX_QUERIES + i % QUERIES;
        }
    }
    __syncthreads();
}

// Fills `before`, `rows`, `entries`, `first`, and the window's counts.
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

// Packs the lowest bit of each byte of x into four bits.
__device__ __forceinline__ uint32_t gather_bits(uint32_t x) { return (x & 0x01010101) * 0x01020408 >> 24; }

// Writes the window's rows, and which queries do not list them, to the union from index `end` on.
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

// Clears the `twice` words of the tiles that begin with rows `begin` .. end - 1 of the union.
__device__ __forceinline__ void clear_twice(const Group& g, int begin, int end) {
    for (int i = num_tiles(begin) * 2 * QUERIES + threadIdx.x; i < num_tiles(end) * 2 * QUERIES; i += THREADS)
        g.twice[i] = 0;
}

// Duplicates mark their row as `twice`. If it is marked already, the duplicate goes to `found`.
__device__ __forceinline__ void mark_duplicates(const Group& g, int end) {
    uint32_t bit[MAX_DUPLICATES / THREADS], was[MAX_DUPLICATES / THREADS];
#pragma unroll
    for (int n = 0; n < MAX_DUPLICATES / THREADS; ++n) {  // a thread waits for all its atomics together
        was[n] = bit[n] = 0;
        if (n * THREADS + threadIdx.x >= sm().num_duplicates) continue;
        const uint32_t key = sm().duplicates[n * THREADS + threadIdx.x], row = key / MAX_QUERIES;
        const int word = row / 32;
        const int i =
            end + sm().first[word / g.share] + sm().before[word] + __popc(any_query(word) & ((1u << (row % 32)) - 1));
        bit[n] = 1u << (i % 32);
        was[n] = atomicOr(g.twice + (i / 64 * QUERIES + key % MAX_QUERIES) * 2 + i / 32 % 2, bit[n]);
    }
#pragma unroll
    for (int n = 0; n < MAX_DUPLICATES / THREADS; ++n) {
        if ((was[n] & bit[n]) == 0) continue;
        const int to = atomicAdd(&sm().num_found, 1);
        if (to < MAX_APPENDED) sm().appended.found[to] = sm().duplicates[n * THREADS + threadIdx.x];
    }
    __syncthreads();
}

// Sorts `found` into `sorted`. A warp finds the place of one duplicate at a time.
__device__ __forceinline__ void sort_found(int warp, int lane) {
    const int n = sm().num_found;
    for (int i = warp; i < n; i += WARPS) {
        const uint32_t key = sm().appended.found[i];
        int place = 0;
        for (int j = lane; j < n; j += 32)
            place += sm().appended.found[j] < key || (sm().appended.found[j] == key && j < i);
        place = __reduce_add_sync(~0u, place);
        if (lane == 0) sm().appended.sorted[place] = key;
    }
    __syncthreads();
}

// Writes the group's union. Returns its number of rows; 0 if the group is left to another kernel.
__device__ __forceinline__ int unite(Group& g) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t slots = min(g.p.main.num_slots, int64_t(0x7fffffff));
    int rows = 0;
    if (threadIdx.x == 0) sm().num_entries = 0;
    if (threadIdx.x < QUERIES)
        sm().length[threadIdx.x] = threadIdx.x < g.queries ? call_length(g.p, g.first_query + threadIdx.x) : 0;
    for (int64_t begin = 0; begin < slots; begin += 32 * g.words) {
        g.words = begin == 0 && slots >= int64_t(MANY) * g.p.main.topk
                      ? WORDS / 8
                      : min(WORDS, int((slots - begin + 1023) / 1024) * 32);
        g.share = (g.words + WARPS - 1) / WARPS;
        insert(g, begin, min(slots - begin, int64_t(32 * g.words)));
        count(g, warp, lane);
        const int first = rows, end = rows + sm().num_rows;
        const bool judged = sm().num_entries >= ENOUGH || begin + 32 * g.words >= slots;
        if (sm().num_duplicates > MAX_DUPLICATES || (judged && end > g.p.most * sm().num_entries)) return 0;
        write_rows(g, begin, first, warp, lane);
        clear_twice(g, first, end);
        const bool repeated = sm().num_duplicates > 0;
        __syncthreads();
        rows = end;
        if (!repeated) continue;
        mark_duplicates(g, first);
        const int more = sm().num_found;
        if (more > MAX_APPENDED) return 0;
        sort_found(warp, lane);
        clear_twice(g, end, end + more);
        for (int i = threadIdx.x; i < more; i += THREADS) {
            g.rows[end + i] = begin + sm().appended.sorted[i] / MAX_QUERIES;
            g.excluded[end + i] = ~(1u << sm().appended.sorted[i] % MAX_QUERIES);
        }
        rows = end + more;
        __syncthreads();
    }
    return rows;
}

// grid: as many CTAs as run at a time, which take groups in turn.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    group_lists(const __grid_constant__ GroupedParams p) {
    for (int index = blockIdx.x; index < p.num_groups; index += gridDim.x) {
        const int first = (p.first_group + index) * QUERIES;
        Group g = {p,
                   first,
                   min(QUERIES, p.num_queries - first),
                   0,
                   0,
                   p.rows + int64_t(index) * p.capacity,
                   p.excluded + int64_t(index) * p.capacity,
                   reinterpret_cast<uint32_t*>(p.twice + int64_t(index) * num_tiles(p.capacity) * QUERIES)};
        const int rows = unite(g);
        if (threadIdx.x == 0) p.group_lengths[index] = rows;
        if (threadIdx.x < g.queries) p.left[first + threadIdx.x] = rows > 0 ? -1 : call_length(p, first + threadIdx.x);
        __syncthreads();  // every thread has read what the next group overwrites
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
