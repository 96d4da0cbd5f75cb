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
// Shared memory (static): 4 * STAGED bytes, and 4 bytes a token.
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
    int32_t rows;     // tokens of a CTA
    int32_t aligned;  // every row starts at a multiple of 16 bytes, in and out
};

constexpr int THREADS = 256, WIDE = 4, LOADS = 2;

#if STAGED > 0
__shared__ int32_t staged[STAGED];
#endif
__shared__ int32_t found[MAX_TOKENS_PER_BLOCK];  // each row's count or end

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

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
