// Merges the partial results of dense_sm90.cu. Of the shares that have a part of an item, the one with its begin says
// that it is cut; a line of the item is merged over all of them:
//
//   out = sum_i 2^(ref_i - ref) O_i / sum_i 2^(ref_i - ref) sum_i
//
//   grid   x share, y LINES_OF_CTA of the 64 lines of the item that it begins and does not end, if there is one
//   CTA    a line has two groups of 64 threads, which take every second partial result; a thread has a chunk of each,
//          8 columns of the line
//
// Partial results are added in the order of shares: the bits do not depend on who was first.
#include "attention/dense_partials.cuh"

constexpr int LINES_OF_CTA = 2, GROUPS = 2, LINE_THREADS = 64, COMBINERS = LINES_OF_CTA * GROUPS * LINE_THREADS;
constexpr int AT_ONCE = 8;  // chunks of a thread whose loads are under way at a time
static_assert(GROUPS == 2, "one adds what the other has left");

struct Weight {
    float ref, factor;  // of a line in a partial result: what it is relative to, and the scale of its values
};

__shared__ Weight weights[LINES_OF_CTA][MOST_PARTIALS];
__shared__ float left[LINES_OF_CTA][8][LINE_THREADS];

__device__ __forceinline__ Boundary begin_of(const int4& share) { return {share.x, share.y}; }
__device__ __forceinline__ Boundary end_of(const int4& share) { return {share.z, share.w}; }

// How many shares behind share `first` have a part of the item with which that one ends. All lanes of a warp call.
__device__ __forceinline__ int count_behind(const DenseParams& p, int first, int item, int lane) {
#pragma unroll 1
    for (int base = first + 1;; base += 32) {
        const int share = base + lane;
        const bool last = share >= int(gridDim.x) - 1 || end_of(__ldcg(p.plan + share)).item != item;
        const uint32_t lasts = __ballot_sync(~0u, last);
        if (lasts != 0) return base + __ffs(lasts) - 1 - first;
    }
}

// Chunk `n` of the 64 of a line.
__device__ __forceinline__ int chunk_of_line(int line, int n) {
    return chunk_of(n / 4 % 2, line / 16, line % 8 * 4 + n % 4, line / 8 % 2, n / 8);
}

extern "C" __global__ void __launch_bounds__(COMBINERS) dense_combine(const __grid_constant__ DenseParams p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int first = blockIdx.x;
    const int4 share = __ldcg(p.plan + first);
    const int item = end_of(share).item;
    if (end_of(share).pair == 0 || (begin_of(share).item == item && begin_of(share).pair > 0)) return;

    const int lane = threadIdx.x % 32, thread = threadIdx.x % LINE_THREADS;
    const int mine = threadIdx.x / (GROUPS * LINE_THREADS), group = threadIdx.x / LINE_THREADS % GROUPS;
    const int line = blockIdx.y * LINES_OF_CTA + mine;  // of the item
    const int request = query_of_item(p, item);
    const Line of = line_of_request(p, request, head_tile_of_item(p, item) * LINES + line);
    const int count = 1 + count_behind(p, first, item, lane);
    auto partial = [&](int i) { return partial_of(p, first + i, i + 1 < count); };

    // Each warp finds the line's sums, and the first one of a line writes the weights.
    float ref = -INF, sum = 0.0f;
    const bool is_padding = of.head >= p.h_q;
    for (int i = lane; i < count && !is_padding; i += 32) {
        const PartialResults<8> from = partial(i);
        const float4 statistics = from.statistics_of(from.rank, line);
        const float higher = fmaxf(ref, statistics.x);
        sum = sum * rescale_factor(ref, higher) + statistics.y * rescale_factor(statistics.x, higher);
        ref = higher;
        if (threadIdx.x % (GROUPS * LINE_THREADS) < 32) weights[mine][i] = {statistics.x, statistics.w};
    }
    const float highest = rows_max(quad_max(ref));
    sum = rows_sum(quad_sum(sum * rescale_factor(ref, highest)));
    __syncthreads();

    float o[8] = {};
    const int chunk = chunk_of_line(line, thread);
#pragma unroll 1
    for (int i = group; i < count && !is_padding; i += GROUPS * AT_ONCE) {
        float4 chunks[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            chunks[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i + GROUPS * k < count) {
                const PartialResults<8> from = partial(i + GROUPS * k);
                chunks[k] = from.chunk_of(from.rank, chunk);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (i + GROUPS * k >= count) break;
            const Weight weight = weights[mine][i + GROUPS * k];
            add_chunk(o, rescale_factor(weight.ref, highest) * weight.factor, chunks[k]);
        }
    }
    if (group == 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) left[mine][i][thread] = o[i];
    }
    __syncthreads();
    if (group == 1 || is_padding) return;
    const float lse = log2_sum_exp(highest, sum);
    const float factor = sum == 0.0f ? 0.0f : sink_factor(p, of.head, lse) / sum;
    const int column = column_of_chunk(chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float x = o[2 * i] + left[mine][2 * i][thread], y = o[2 * i + 1] + left[mine][2 * i + 1][thread];
        write_output(p, of.query, of.head, column + 8 * i, x * factor, y * factor);
    }
    if (thread == 0) write_statistics(p, of.query, of.head, {highest, lse});
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = COMBINERS;
extern "C" __device__ int kernel_shared_bytes = 0;
