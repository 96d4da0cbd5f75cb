// Converts positions in a request to slots of the paged cache, or to rows of a prefill's workspace.
//
//   grid     a CTA takes a few consecutive tokens, which mostly belong to one request
//   CTA      256 threads walk each token's row of k entries. A thread takes 2 x 4 entries at a time: two 16-byte
//            loads, eight look-ups that are under way together, two 16-byte stores. The first loads of a row are under
//            way while its request is looked up
//   table    STAGED > 0: the request's row of the block table is copied to shared memory, anew whenever the request
//            changes. A warp's look-ups then cost a few bank conflicts, where scattered reads of global memory cost up
//            to 32 cache lines. STAGED 0 reads global memory: for small batches, where the copy costs more than it
//            saves, and for rows wider than STAGED
//   counts   a row's valid entries: a sum over each warp, then an atomic add in shared memory
//   ends     the place behind a row's last valid entry: a maximum over each warp, then an atomic maximum
//
// TO_FRONT 1: a row's valid entries go to its front, in their order, and are counted; -1 stands behind them. A turn
// takes 2048 entries of a row: each warp 256 neighbours, lane l of it entries l, l + 32, ... So a warp's loads are of
// neighbours, as are its stores, whatever the width and the gaps. Ballots tell how many of the warp's valid entries
// stand before each, and the sums of the warps before it how many of the CTA's. There are two sets of sums, so that one
// barrier a turn is enough. It also orders all reads of a turn before its writes, so that a row may be written in place:
// entries never move backwards.
//
// Shared memory (static): 4 * STAGED bytes, and 4 bytes a token, with TO_FRONT 64 bytes.
#include "rows/block_table.cuh"

// The launcher declares the same fields.
struct ConvertParams {
    BlockTable table;
    const int32_t* req_id;          // [num_tokens]
    const int32_t* positions;       // [num_tokens, k]
    const int32_t* prefill_ids;     // [num_tokens], or null
    const int32_t* prefill_starts;  // [num_prefills], or null
    int32_t* out;                   // [num_tokens, k]
    int32_t* counts;                // [num_tokens], or null
    int32_t* ends;                  // [num_tokens], or null; counts or ends is null
    const uint8_t* is_valid;        // [num_tokens]: where it is 0, so is the count or end; or null
    int64_t positions_stride;       // items
    int64_t out_stride;
    int32_t num_tokens, k, num_prefills;
    int32_t rows;         // tokens of a CTA
    int32_t aligned;      // every row starts at a multiple of 16 bytes, in and out
    const int32_t* most;  // [num_tokens], with TO_FRONT: how many entries a row keeps, negative as 0; or null: all
};

constexpr int THREADS = 256, WIDE = 4, LOADS = 2;

#if STAGED > 0
__shared__ int32_t staged[STAGED];
#endif

// Where a token's entries are looked up.
struct Lookup {
    // The request's row of the block table; null for a prefill, and for a request that does not exist.
    const int32_t* blocks;
    int32_t start;  // the first workspace row of a prefill, else -1
};

// Makes slots of positions. All reads of the block table are under way before the first one is used.
template <int N>
__device__ __forceinline__ void find_slots(const ConvertParams& p, const Lookup& in, int32_t (&entries)[N]) {
    if (in.start >= 0) {
#pragma unroll
        for (int32_t& entry : entries) {
            const bool exists = find_position(p.table, entry).column >= 0 && entry <= 0x7fffffff - in.start;
            entry = exists ? in.start + entry : -1;
        }
        return;
    }
    int32_t block[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Position at = find_position(p.table, entries[i]);
        block[i] = -1;
        if (in.blocks != nullptr && at.column >= 0) block[i] = in.blocks[at.column];
        entries[i] = at.offset;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) entries[i] = slot_in_block(p.table, block[i], entries[i]);
}

// `staged_request` is the request whose row of the block table is in shared memory. Called by the CTA.
__device__ __forceinline__ Lookup lookup_of(const ConvertParams& p, int token, int32_t& staged_request) {
    if (p.prefill_ids != nullptr) {
        const int32_t prefill = p.prefill_ids[token];
        if (prefill >= 0) return {nullptr, prefill < p.num_prefills ? p.prefill_starts[prefill] : -1};
    }
    const int32_t request = p.req_id[token];
    if (!has_request(p.table, request)) return {nullptr, -1};
    const int32_t* row = p.table.blocks + request * p.table.stride;
#if STAGED > 0
    if (request != staged_request) {
        __syncthreads();  // no thread still reads the previous row
        for (int i = threadIdx.x; i < p.table.width; i += THREADS) staged[i] = row[i];
        __syncthreads();
        staged_request = request;
    }
    return {staged, -1};
#else
    return {row, -1};
#endif
}

#if TO_FRONT

constexpr int WARPS = THREADS / 32;
constexpr int IN_TURN = LOADS * WIDE;  // entries that a thread takes

__shared__ int32_t warp_sums[2][WARPS];  // valid entries of each warp, of two turns

// The lanes whose entry is a slot.
__device__ __forceinline__ uint32_t lanes_with_slot(int32_t entry) { return __ballot_sync(~0u, entry >= 0); }

// Entries `begin`, `begin` + 32, ... of the `left` entries that stand at `from`; -1 behind them.
__device__ __forceinline__ void load_turn(const int32_t* from, int begin, int left, int32_t (&entries)[IN_TURN]) {
#pragma unroll
    for (int i = 0; i < IN_TURN; ++i) entries[i] = begin + 32 * i < left ? from[begin + 32 * i] : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) convert(const __grid_constant__ ConvertParams p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * p.rows, rows = min(p.rows, p.num_tokens - first);
    const int own = 32 * IN_TURN * warp + lane;  // the first entry that the thread takes
    int32_t staged_request = -1;
    int set = 0;

    for (int row = 0; row < rows; ++row) {
        const int token = first + row;
        const int32_t* from = p.positions + token * p.positions_stride + own;
        int32_t* to = p.out + token * p.out_stride;
        int32_t entries[IN_TURN];
        load_turn(from, 0, p.k - own, entries);
        const Lookup in = lookup_of(p, token, staged_request);
        const int most = p.most == nullptr ? p.k : max(p.most[token], 0);
        int count = 0;
        for (int begin = 0; begin < p.k; begin += THREADS * IN_TURN, set ^= 1) {
            find_slots(p, in, entries);
            int sum_of_warp = 0;
#pragma unroll
            for (const int32_t entry : entries) sum_of_warp += __popc(lanes_with_slot(entry));
            if (lane == 0) warp_sums[set][warp] = sum_of_warp;
            __syncthreads();
            int place = count;  // of the next 32 entries' first slot
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                const int sum = warp_sums[set][i];
                if (i < warp) place += sum;
                count += sum;
            }
#pragma unroll
            for (const int32_t entry : entries) {
                const uint32_t lanes = lanes_with_slot(entry);
                const int mine = place + __popc(lanes & ((1u << lane) - 1));
                if (entry >= 0 && mine < most) to[mine] = entry;
                place += __popc(lanes);
            }
            load_turn(from, begin + THREADS * IN_TURN, p.k - own, entries);
        }
        count = min(count, most);
        for (int behind = count + threadIdx.x; behind < p.k; behind += THREADS) to[behind] = -1;
        if (threadIdx.x == 0) p.counts[token] = count;
    }
}

#else

__shared__ int32_t found[MAX_TOKENS_PER_BLOCK];  // each row's count or end

// The entries that a thread takes at a time: WIDE neighbours from `begin` on, then WIDE neighbours WIDE * THREADS
// entries further on, and so on. Entries behind the row's end are -1.
__device__ __forceinline__ void load_entries(const ConvertParams& p, const int32_t* from, int begin,
                                             int32_t (&entries)[LOADS * WIDE]) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int at = begin + i * WIDE * THREADS;
        const int4 v = at < p.k ? *reinterpret_cast<const int4*>(from + at) : int4{-1, -1, -1, -1};
        entries[WIDE * i] = v.x, entries[WIDE * i + 1] = v.y, entries[WIDE * i + 2] = v.z, entries[WIDE * i + 3] = v.w;
    }
}

__device__ __forceinline__ void store_entries(const ConvertParams& p, int32_t* to, int begin,
                                              const int32_t (&entries)[LOADS * WIDE]) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int at = begin + i * WIDE * THREADS;
        const int32_t* e = entries + WIDE * i;
        if (at < p.k) *reinterpret_cast<int4*>(to + at) = {e[0], e[1], e[2], e[3]};
    }
}

// Valid entries that a thread has found in a row, and the place behind the last of them.
struct Found {
    int count = 0, end = 0;

    __device__ __forceinline__ void see(int32_t slot, int at) {
        if (slot < 0) return;
        ++count;
        end = at + 1;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) convert(const __grid_constant__ ConvertParams p) {
    const bool asked = p.counts != nullptr || p.ends != nullptr;  // for counts or ends
    if (threadIdx.x < MAX_TOKENS_PER_BLOCK) found[threadIdx.x] = 0;
    if (asked) __syncthreads();
    const int first = blockIdx.x * p.rows, rows = min(p.rows, p.num_tokens - first);
    int32_t staged_request = -1;

    for (int row = 0; row < rows; ++row) {
        const int32_t* from = p.positions + (first + row) * p.positions_stride;
        int32_t* to = p.out + (first + row) * p.out_stride;
        int32_t entries[LOADS * WIDE];
        if (p.aligned) load_entries(p, from, WIDE * threadIdx.x, entries);
        const Lookup in = lookup_of(p, first + row, staged_request);
        Found mine;
        if (p.aligned) {
            for (int begin = WIDE * threadIdx.x; begin < p.k; begin += LOADS * WIDE * THREADS) {
                find_slots(p, in, entries);
                store_entries(p, to, begin, entries);
#pragma unroll
                for (int i = 0; i < LOADS * WIDE; ++i) {
                    mine.see(entries[i], begin + i / WIDE * WIDE * THREADS + i % WIDE);
                }
                load_entries(p, from, begin + LOADS * WIDE * THREADS, entries);
            }
        } else {
            for (int at = threadIdx.x; at < p.k; at += THREADS) {
                int32_t slot[1] = {from[at]};
                find_slots(p, in, slot);
                to[at] = slot[0];
                mine.see(slot[0], at);
            }
        }
        if (p.counts != nullptr) {
            const int count = __reduce_add_sync(~0u, mine.count);
            if (threadIdx.x % 32 == 0) atomicAdd(found + row, count);
        } else if (p.ends != nullptr) {
            const int end = __reduce_max_sync(~0u, mine.end);
            if (threadIdx.x % 32 == 0) atomicMax(found + row, end);
        }
    }
    if (!asked) return;
    __syncthreads();
    if (threadIdx.x < rows) {
        const int token = first + threadIdx.x;
        const bool counts = p.is_valid == nullptr || p.is_valid[token];
        (p.ends == nullptr ? p.counts : p.ends)[token] = counts ? found[threadIdx.x] : 0;
    }
}

#endif

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
