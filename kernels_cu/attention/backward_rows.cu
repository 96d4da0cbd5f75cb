// Adds up what queries contribute to the gradients of rows: the last kernel of a chunk of queries in the backward, and in
// the gradients of the indexer's loss.
//
//   grid   x range of RANGE_ROWS rows
//   CTA    threads that own eight columns each; their sums are float32 in shared memory, RANGE_ROWS rows
//
// For THREADS queries at a time, each thread finds where its query's list enters the range and leaves it. The
// contributions to the range that they have together, in the order of the queries, are listed in shared memory, LISTED
// at a time; then all threads add them one after the other, with the loads of AT_ONCE under way. So a sum is always taken
// in the same order, wherever a chunk begins.
//
// Columns of contributions lie as contributions.cuh says.
#include "ptx/convert.cuh"
#include "tile/contributions.cuh"
#include "tile/warp.cuh"

constexpr int OWNERS = D_QK / 8, WARPS = ceil_div(OWNERS, 32), THREADS = 32 * WARPS;
constexpr int LISTED = 256, AT_ONCE = D_QK < 512 ? 16 : 8;

// cupy_mla/cuda/row_sums.py declares the same fields.
struct BackwardRowsParams {
    const bf16* contributions;         // [queries, topk, blocks, D_QK]
    const int32_t* rows;               // [queries, topk], ascending
    const int32_t* starts;             // [queries, ranges + 1]
    const float* total;                // [s_kv, D_QK] what there is already, or null
    void* out;                         // [s_kv, D_QK] float32 or bfloat16
    int64_t total_stride, out_stride;  // items
    int32_t queries, topk, blocks, ranges, s_kv;
    int32_t wide;     // out is float32
    int32_t aligned;  // rows of out and total allow accesses of two values
};

struct Item {
    int contribution, row;
};

constexpr int SUMS_BYTES = RANGE_ROWS * D_QK * 4;
constexpr int SHARED_BYTES = SUMS_BYTES + LISTED * int(sizeof(Item));
extern __shared__ __align__(16) uint8_t shared[];
__shared__ int warp_sums[WARPS];

// The sums of a thread's eight columns of a row: two places, so that neighbours meet all banks.
__device__ __forceinline__ float4* sums_of(int row) {
    return reinterpret_cast<float4*>(shared) + row * (2 * OWNERS) + threadIdx.x;
}
__device__ __forceinline__ Item* items() { return reinterpret_cast<Item*>(shared + SUMS_BYTES); }

__device__ __forceinline__ void add(int row, const Vec16& v) {
    float4 *first = sums_of(row), *second = first + OWNERS;
    float4 a = *first, b = *second;
    a.x += bf16_low(v.x), a.y += bf16_high(v.x), a.z += bf16_low(v.y), a.w += bf16_high(v.y);
    b.x += bf16_low(v.z), b.y += bf16_high(v.z), b.z += bf16_low(v.w), b.w += bf16_high(v.w);
    *first = a, *second = b;
}

// Add `count` listed contributions to this thread's columns.
__device__ __forceinline__ void add_listed(const BackwardRowsParams& p, int count) {
    const bf16* from = p.contributions + 8 * threadIdx.x;
#pragma unroll 1
    for (int base = 0; base < count; base += AT_ONCE) {
        Vec16 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (base + i < count)
                v[i] = *reinterpret_cast<const Vec16*>(from + int64_t(items()[base + i].contribution) * D_QK);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (base + i < count) add(items()[base + i].row, v[i]);
    }
}

// Two neighbouring sums from and to memory.
__device__ __forceinline__ float2 load_two(const float* from, bool aligned) {
    return aligned ? *reinterpret_cast<const float2*>(from) : make_float2(from[0], from[1]);
}
__device__ __forceinline__ void store_two(const BackwardRowsParams& p, int64_t at, float x, float y) {
    if (p.wide) {
        store_pair(static_cast<float*>(p.out) + at, x, y, p.aligned);
    } else {
        store_pair(static_cast<bf16*>(p.out) + at, x, y, p.aligned);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_rows(const __grid_constant__ BackwardRowsParams p) {
    const int range = blockIdx.x, first_row = range * RANGE_ROWS, rows = min(RANGE_ROWS, p.s_kv - first_row);
    const bool owner = threadIdx.x < OWNERS;
    for (int row = 0; owner && row < rows; ++row) {
        float v[8] = {};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            if (p.total == nullptr) continue;
            const float* from = p.total + (first_row + row) * p.total_stride;
            const float2 two = load_two(from + contributed_column(8 * threadIdx.x + 2 * pair), p.aligned);
            v[2 * pair] = two.x, v[2 * pair + 1] = two.y;
        }
        sums_of(row)[0] = make_float4(v[0], v[1], v[2], v[3]);
        sums_of(row)[OWNERS] = make_float4(v[4], v[5], v[6], v[7]);
    }
#pragma unroll 1
    for (int base = 0; base < p.queries; base += THREADS) {
        const int query = base + threadIdx.x;
        int start = 0, count = 0, total;
        if (query < p.queries) {
            const int32_t* starts = p.starts + int64_t(query) * (p.ranges + 1) + range;
            start = starts[0];
            count = (starts[1] - start) * p.blocks;
        }
        const int before = cta_sum_before(count, warp_sums, total);
#pragma unroll 1
        for (int from = 0; from < total; from += LISTED) {
            const int entries = query * p.topk + start;
            for (int i = max(0, from - before); i < min(count, from + LISTED - before); ++i) {
                const int entry = entries + i / p.blocks;
                items()[before + i - from] = {entry * p.blocks + i % p.blocks, p.rows[entry] - first_row};
            }
            __syncthreads();
            if (owner) add_listed(p, min(total - from, LISTED));
            __syncthreads();
        }
        __syncthreads();  // before warp_sums are written again
    }
    for (int row = 0; owner && row < rows; ++row) {
        const float4 a = sums_of(row)[0], b = sums_of(row)[OWNERS];
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            store_two(p, (first_row + row) * p.out_stride + contributed_column(8 * threadIdx.x + 2 * pair),
                      v[2 * pair], v[2 * pair + 1]);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
