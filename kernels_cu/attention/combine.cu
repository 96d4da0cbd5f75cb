// Merges the partial results of a query's splits: out = sum_i 2^(lse_i - lse) out_i, lse = log2 sum_i 2^lse_i.
//
//   grid   x query, y head
//   CTA    D_V / 4 threads with 4 output columns each; the loads of AT_ONCE splits are in flight at a time
//
// Splits are added in their order, so the bits do not depend on which of them finished first.
#include "attention/division/results.cuh"
#include "attention/params.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int THREADS = D_V / 4, AT_ONCE = 8;

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ AttentionParams p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Query q = query_by_branch(p, blockIdx.x);
    const int head = blockIdx.y;
    const int64_t first = int64_t(q.index) * p.h_q + head, step = int64_t(p.num_queries) * p.h_q;
    const float* lses = p.part_lse + first;
    const float* partials = p.part_out + first * D_V + 4 * threadIdx.x;

    float top = -INF, sum = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int base = 0; base < p.num_splits; base += AT_ONCE) {
        float lse[AT_ONCE];
        Vec16 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t at = (base + i) * step;
            const bool here = base + i < p.num_splits;
            v[i] = load_in_order_16(partials + at * D_V, here);
            lse[i] = load_in_order(lses + at, here, -INF);
        }
        float new_top = top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) new_top = fmaxf(new_top, lse[i]);
        // No branches here, so that no load waits for an lse.
        const float old = top == -INF ? 0.0f : exp2_approx(top - new_top);
        top = new_top;
        sum *= old;
#pragma unroll
        for (int k = 0; k < 4; ++k) o[k] *= old;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool there = lse[i] != -INF;  // an empty split has not written part_out
            const float weight = there ? exp2_approx(lse[i] - top) : 0.0f;
            sum += weight;
            o[0] += there ? weight * __uint_as_float(v[i].x) : 0.0f;
            o[1] += there ? weight * __uint_as_float(v[i].y) : 0.0f;
            o[2] += there ? weight * __uint_as_float(v[i].z) : 0.0f;
            o[3] += there ? weight * __uint_as_float(v[i].w) : 0.0f;
        }
    }
    float max = -INF;
    if (p.part_max != nullptr && threadIdx.x == 0) {
        for (int i = 0; i < p.num_splits; ++i) max = fmaxf(max, p.part_max[first + i * step]);
    }
    const HeadResult r = {max, log2_sum_exp(top, sum)};
    const float factor = sum == 0.0f ? 0.0f : sink_factor(p, head, r.lse) / sum;
    const int column = 4 * threadIdx.x;
    write_output(p, q, head, column, o[0] * factor, o[1] * factor);
    write_output(p, q, head, column + 2, o[2] * factor, o[3] * factor);
    if (threadIdx.x == 0) write_statistics(p, q, head, r);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
