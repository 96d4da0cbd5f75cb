// Adds up what queries contribute to the gradients of rows. It is the last kernel for a chunk of queries, in the
// backward of attention and in that of the indexer's loss.
//
//   grid   x range of RANGE_ROWS rows
//   CTA    a warp a row, whose lanes own D_QK / 32 columns each; their sums are float32 in registers
//
// The CTA takes THREADS queries at a time; each thread finds where its query's sorted list enters the range and where
// it leaves it. All contributions to the range are then listed in shared memory in the order of the queries, LISTED at
// a time. Each warp picks those to its row from the list, and adds them one after the other, with the loads of AT_ONCE
// in flight. So a sum always has the same order, wherever a chunk of queries begins.
//
// The order of a contribution's columns: tile/contributions.cuh.
#include "ptx/convert.cuh"
#include "tile/contributions.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 32 * RANGE_ROWS, LISTED = 1024, AT_ONCE = 4;
constexpr int VECTORS = D_QK / 256, REST = D_QK % 256 / 32;  // a lane's values: vectors of eight, and the rest
constexpr int VALUES = 8 * VECTORS + REST;
static_assert(REST == 0 || REST == 2 || REST == 4, "");

// cupy_mla/cuda/row_sums.py declares the same fields.
struct BackwardRowsParams {
    const bf16* contributions;         // [queries, topk, blocks, D_QK]
    const int32_t* rows;               // [queries, topk], ascending
    const int32_t* starts;             // [queries, ranges + 1]
    const float* total;                // [s_kv, D_QK] the sum of earlier chunks, or null
    void* out;                         // [s_kv, D_QK] float32 or bfloat16
    int64_t total_stride, out_stride;  // items
    int32_t queries, topk, blocks, ranges, s_kv;
    int32_t wide;     // out is float32
    int32_t aligned;  // rows of out and total allow accesses of two values
};

struct Item {
    int contribution, row;
};
__shared__ Item items[LISTED];
__shared__ int warp_sums[RANGE_ROWS];

// The index in a contribution of a lane's value i.
__device__ __forceinline__ int place_of(int i, int lane) {
    return i < 8 * VECTORS ? i / 8 * 256 + 8 * lane + i % 8 : 256 * VECTORS + REST * lane + i % 8;
}

// A lane's values of a contribution, in pairs.
struct Values {
    uint32_t pairs[VALUES / 2];
};
__device__ __forceinline__ Values load_values(const BackwardRowsParams& p, int contribution, int lane) {
    const bf16* from = p.contributions + int64_t(contribution) * D_QK;
    Values v;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Vec16 x = *reinterpret_cast<const Vec16*>(from + place_of(8 * i, lane));
        v.pairs[4 * i] = x.x, v.pairs[4 * i + 1] = x.y, v.pairs[4 * i + 2] = x.z, v.pairs[4 * i + 3] = x.w;
    }
    const bf16* rest = from + place_of(8 * VECTORS, lane);
    if (REST == 2) v.pairs[VALUES / 2 - 1] = *reinterpret_cast<const uint32_t*>(rest);
    if (REST == 4) {
        const Vec8 x = *reinterpret_cast<const Vec8*>(rest);
        v.pairs[VALUES / 2 - 2] = x.x, v.pairs[VALUES / 2 - 1] = x.y;
    }
    return v;
}

// Adds the listed contributions to this warp's row.
__device__ __forceinline__ void add_listed(const BackwardRowsParams& p, int count, int lane, float (&sums)[VALUES]) {
    const int row = threadIdx.x / 32;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
        const Item item = base + lane < count ? items[base + lane] : Item{0, -1};
        uint32_t mine = __ballot_sync(~0u, item.row == row);
#pragma unroll 1
        while (mine != 0) {
            Values v[AT_ONCE];
            uint32_t left = mine;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, left &= left - 1)
                if (left != 0) v[i] = load_values(p, __shfl_sync(~0u, item.contribution, __ffs(left) - 1), lane);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i, mine &= mine - 1) {
                if (mine == 0) break;
#pragma unroll
                for (int k = 0; k < VALUES / 2; ++k)
                    sums[2 * k] += bf16_low(v[i].pairs[k]), sums[2 * k + 1] += bf16_high(v[i].pairs[k]);
            }
        }
    }
}

// Loads and stores of two neighbouring sums.
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
    const int range = blockIdx.x, first_row = range * RANGE_ROWS, lane = threadIdx.x % 32;
    const int row = first_row + threadIdx.x / 32;
    const bool adds = p.total != nullptr && row < p.s_kv;
    float sums[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i += 2) {
        const int column = contributed_column(place_of(i, lane));
        const float2 two =
            adds ? load_two(p.total + row * p.total_stride + column, p.aligned) : make_float2(0.0f, 0.0f);
        sums[i] = two.x, sums[i + 1] = two.y;
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
                items[before + i - from] = {entry * p.blocks + i % p.blocks, p.rows[entry] - first_row};
            }
            __syncthreads();
            add_listed(p, min(total - from, LISTED), lane, sums);
            __syncthreads();
        }
        __syncthreads();  // warp_sums are read before they are written again
    }
    if (row >= p.s_kv) return;
#pragma unroll
    for (int i = 0; i < VALUES; i += 2)
        store_two(p, row * p.out_stride + contributed_column(place_of(i, lane)), sums[i], sums[i + 1]);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
