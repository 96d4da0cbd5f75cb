// Merges the partial results of split rows:  out = sum_i 2^(lse_i - lse) out_i,  lse = log2 sum_i 2^lse_i.
//
//   grid    one block a query and head
//   block   128 threads, 4 output columns each; every thread reads all part_lse of its head (L1 serves it)
//
// Splits are added in their order, so the bits do not depend on who finished first.
#include "attention/params.cuh"
#include "tile/finish.cuh"

extern "C" __global__ void __launch_bounds__(128) combine_splits(const __grid_constant__ Params p) {
    const Query q = query_of(p, blockIdx.x / p.h_q);
    const int head = blockIdx.x % p.h_q;
    const int64_t first = int64_t(q.index) * p.h_q + head, step = int64_t(p.num_queries) * p.h_q;

    float top = -INF, max = -INF;
    for (int i = 0; i < p.num_splits; ++i) {
        top = fmaxf(top, p.part_lse[first + i * step]);
        if (p.part_max != nullptr) max = fmaxf(max, p.part_max[first + i * step]);
    }
    float sum = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < p.num_splits; ++i) {
        const int64_t at = first + i * step;
        const float lse = p.part_lse[at];
        if (lse == -INF) continue;  // an empty split, whose part_out was never written
        const float weight = exp2_approx(lse - top);
        const Vec16 v = *reinterpret_cast<const Vec16*>(p.part_out + at * D_V + 4 * threadIdx.x);
        sum += weight;
        o[0] += weight * __uint_as_float(v.x);
        o[1] += weight * __uint_as_float(v.y);
        o[2] += weight * __uint_as_float(v.z);
        o[3] += weight * __uint_as_float(v.w);
    }
    const HeadResult r = {max, sum == 0.0f ? -INF : top + log2_approx(sum)};
    const float factor = sum == 0.0f ? 0.0f : sink_factor(p, head, r.lse) / sum;
    write_output(p, q, head, 4 * threadIdx.x, o[0] * factor, o[1] * factor);
    write_output(p, q, head, 4 * threadIdx.x + 2, o[2] * factor, o[3] * factor);
    if (threadIdx.x == 0) write_statistics(p, q, head, r);
}
