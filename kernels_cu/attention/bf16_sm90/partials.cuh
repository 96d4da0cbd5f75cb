// Part of bf16_sm90: partial results for merge.cuh, as f16 times a power of two for each line.
#pragma once
#include "attention/bf16_sm90/chunks.cuh"
#include "attention/bf16_sm90/results.cuh"
#include "attention/division/merge.cuh"

// The number of warps whose lines are not all padding.
__device__ __forceinline__ int num_used_warps(const AttentionParams& p, const Work& w) {
    return min(HEADS / 16, ceil_div(p.h_q - w.head_tile * HEADS, 16));
}

// Writes this CTA's partial result. `largest` is shared memory for the largest |O| of each line in each warpgroup's
// columns.
template <typename Total>
__device__ __forceinline__ void write_partial(const PartialResults<8>& partials, float (&largest)[2][LINES],
                                              int used_warps, int warpgroup, int warp, int lane, Total total_of,
                                              const float (&o)[128]) {
    const int line = 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = 0.0f;
#pragma unroll
        for (int j = 0; j < 32; ++j) top = fmaxf(top, fmaxf(fabsf(o[4 * j + 2 * i]), fabsf(o[4 * j + 2 * i + 1])));
        top = quad_max(top);
        if (lane % 4 == 0) largest[warpgroup][line + 8 * i] = top;
    }
    sync_consumers();
    if (warp >= used_warps) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float up = to_f16_range(fmaxf(largest[0][line + 8 * i], largest[1][line + 8 * i]));
        const LineTotal total = total_of(i);
        if (warpgroup == 0 && lane % 4 == 0)
            partials.write_statistics(line + 8 * i, total.ref, total.sum, total.max, 1.0f / up);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float words[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float* two = &o[4 * (4 * n + k) + 2 * i];
                words[k] = __uint_as_float(pack_f16x2(two[0] * up, two[1] * up));
            }
            partials.write(chunk_of(warpgroup, warp, lane, i, n), make_float4(words[0], words[1], words[2], words[3]));
        }
    }
}

// Writes this CTA's partial result, and merges its share of the output of cluster `index`.
template <typename K, typename Total>
__device__ __forceinline__ void merge_cluster(const typename K::Params& p, const Work& w, int index, int warpgroup,
                                              int warp, int lane, Total total_of, const float (&o)[128]) {
    const int warps = num_used_warps(p, w);
    const ClusterResults<8> partials(p, index, warps * CHUNKS_OF_WARP);
    // Both are in the space of Q.
    auto& largest = *reinterpret_cast<float (*)[2][LINES]>(shared);
    auto* weights = reinterpret_cast<float*>(shared + sizeof(largest));
    write_partial(partials, largest, warps, warpgroup, warp, lane, total_of, o);
    auto finish = [&](int local, bool write, float ref, float sum, float max) {
        const Line line = K::line_at(p, w, w.head_tile * HEADS + local);
        return finish_merged_head(p, line.query, line.head, write, ref, sum, max);
    };
    auto store = [&](int local, int column, const float (&v)[8]) {
        const Line line = K::line_at(p, w, w.head_tile * HEADS + local);
        if (line.head >= p.h_q) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) write_output(p, line.query, line.head, column + 8 * i, v[2 * i], v[2 * i + 1]);
    };
    partials.merge<CONSUMERS>(weights, line_of_chunk, column_of_chunk, finish, [] { sync_consumers(); }, store);
}
