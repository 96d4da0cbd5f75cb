// Part of bf16_few_heads_sm90: the epilogue. Each warpgroup stores its O^T over its tile. From there a CTA merges the
// O^T of its query, or each CTA of a cluster merges a share of the columns.
#pragma once
#include "attention/bf16_few_heads_sm90/scores.cuh"
#include "attention/division/merge.cuh"
#include "attention/division/results.cuh"
#include "ptx/cluster.cuh"

// Stores O^T, [head][column] float32, over the warpgroup's tile, and its statistics in `own`.
__device__ __forceinline__ void store_output(const Role& r, const Softmax& state,
                                             const float (&o)[V_BLOCKS][HEADS / 2]) {
    Small& sm = small();
    float* to = reinterpret_cast<float*>(shared + TILE_AT + r.warpgroup * TILE_BYTES) + r.head(0) * O_LINE + r.row(0);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const int head = r.head(c);
        const float sum = rows_sum(state.sum[c]), max = rows_max(state.max[c]);
        if (r.g == 0) {
            sm.across[r.warpgroup][0][r.warp][head] = sum;
            sm.across[r.warpgroup][1][r.warp][head] = max;
            if (r.warp == 0) sm.own[r.warpgroup].ref[head] = state.ref[c];
        }
#pragma unroll
        for (int v = 0; v < V_BLOCKS; ++v) {
#pragma unroll
            for (int i = 0; i < 2; ++i) to[(c / 2 * 8 + c % 2) * O_LINE + 64 * v + 8 * i] = o[v][element(i, c)];
        }
    }
    sync_warpgroup(r);
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float (&sums)[4][HEADS] = sm.across[r.warpgroup][0], (&maxima)[4][HEADS] = sm.across[r.warpgroup][1];
        sm.own[r.warpgroup].sum[head] = (sums[0][head] + sums[1][head]) + (sums[2][head] + sums[3][head]);
        sm.own[r.warpgroup].max[head] =
            fmaxf(fmaxf(maxima[0][head], maxima[1][head]), fmaxf(maxima[2][head], maxima[3][head]));
    }
}

// The barrier of the threads that merge together: a warpgroup, or all consumers of the CTA.
__device__ __forceinline__ void sync_writers(const Role& r) {
    if (QUERIES == 2) {
        sync_warpgroup(r);
    } else {
        sync_consumers();
    }
}

// Returns the factor of a head's merged O^T. Writes its statistics if `write`.
__device__ __forceinline__ float finish_head(const AttentionParams& p, const Work& w, int head, bool write,
                                             const HeadResult& result, float sum) {
    const bool whole = p.num_splits == 1;
    if (write && whole) write_statistics(p, w.query, head, result);
    if (write && !whole) write_partial_statistics(p, partial_index(p, blockIdx.y, w.query, head), result);
    if (sum == 0.0f) return 0.0f;
    return whole ? 1.0f / sum * sink_factor(p, head, result.lse) : 1.0f / sum;
}

// Writes four neighbouring columns of a head's result.
__device__ __forceinline__ void write_columns(const AttentionParams& p, const Work& w, int head, int column,
                                              const float (&v)[4]) {
    if (p.num_splits > 1) {
        const int64_t at = partial_index(p, blockIdx.y, w.query, head);
        *reinterpret_cast<float4*>(partial_out(p, at) + column) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (p.flags & WIDE_OUT) {
        const Vec8 packed = {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3])};
        *reinterpret_cast<Vec8*>(out_of(p, w.query, head, column)) = packed;
    } else {
        write_output(p, w.query, head, column, v[0], v[1]);
        write_output(p, w.query, head, column + 2, v[2], v[3]);
    }
}

// A head's factors in the merge: a weight for each warpgroup's O^T, and a factor for their sum.
struct HeadWeights {
    float of[MERGED_WARPGROUPS], scale;
};

// Merges the O^T of the warpgroups that work on the same query.
//   finish(head, ref, max, sum)   takes the statistics of a head of the head tile, and returns a factor of O^T
//   write(head, column, v)        takes four neighbouring columns
template <typename Finish, typename Write>
__device__ __forceinline__ void merge_warpgroups(const Role& r, int heads, Finish finish, Write write) {
    constexpr int WRITERS = MERGED_WARPGROUPS * WARPGROUP, HEADS_AT_ONCE = WRITERS / (D_V / 4);
    const int first = QUERIES == 2 ? r.warpgroup : 0, thread = threadIdx.x % WRITERS;
    auto* weights = reinterpret_cast<HeadWeights*>(shared + Q_AT + first * Q_BYTES);  // in the space of Q
    const Statistics* own = small().own + first;
    if (thread < heads) {
        float ref = -INF, max = -INF, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MERGED_WARPGROUPS; ++i) {
            ref = fmaxf(ref, own[i].ref[thread]);
            max = fmaxf(max, own[i].max[thread]);
        }
#pragma unroll
        for (int i = 0; i < MERGED_WARPGROUPS; ++i) {
            const float weight = rescale_factor(own[i].ref[thread], ref);
            weights[thread].of[i] = weight;
            sum += weight * own[i].sum[thread];
        }
        weights[thread].scale = finish(thread, ref, max, sum);
    }
    sync_writers(r);
    const int column = thread % (D_V / 4) * 4;
    const uint8_t* o = shared + TILE_AT + first * TILE_BYTES + column * 4;
#pragma unroll 4
    for (int head = thread / (D_V / 4); head < heads; head += HEADS_AT_ONCE) {
        float v[4] = {};
#pragma unroll
        for (int i = 0; i < MERGED_WARPGROUPS; ++i) {
            const float4 o4 = *reinterpret_cast<const float4*>(o + i * TILE_BYTES + head * O_LINE * 4);
            const float weight = weights[head].of[i];
            add_chunk(v, weight, o4);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] *= weights[head].scale;
        write(head, column, v);
    }
}

// Writes the results of this CTA's query.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Work& w, const Role& r) {
    merge_warpgroups(
        r, min(HEADS, p.h_q - w.first_head),
        [&](int head, float ref, float max, float sum) {
            return finish_head(p, w, w.first_head + head, true, {max, log2_sum_exp(ref, sum)}, sum);
        },
        [&](int head, int column, const float (&v)[4]) { write_columns(p, w, w.first_head + head, column, v); });
}

// Writes the CTA's partial result for its cluster, and merges its share of the output. A chunk is four columns of a
// head.
__device__ __forceinline__ void write_cluster_results(const AttentionParams& p, const Work& w, const Role& r,
                                                      int ctas) {
    const ClusterResults<4> partials(p, blockIdx.y * (gridDim.x / ctas) + blockIdx.x / ctas);
    merge_warpgroups(
        r, HEADS,
        [&](int head, float ref, float max, float sum) {
            partials.write_statistics(head, ref, sum, max);
            return 1.0f;
        },
        [&](int head, int column, const float (&v)[4]) {
            partials.write(head * (D_V / 4) + column / 4, make_float4(v[0], v[1], v[2], v[3]));
        });
    auto head_of = [](int chunk) { return chunk / (D_V / 4); };
    auto column_of = [](int chunk) { return chunk % (D_V / 4) * 4; };
    auto finish = [&](int local, bool write, float ref, float sum, float max) {
        const int head = w.first_head + local;
        return head < p.h_q ? finish_head(p, w, head, write, {max, log2_sum_exp(ref, sum)}, sum) : 0.0f;
    };
    auto store = [&](int local, int column, const float (&v)[4]) {
        if (w.first_head + local < p.h_q) write_columns(p, w, w.first_head + local, column, v);
    };
    auto weights = reinterpret_cast<float*>(shared + Q_AT);  // in the space of Q
    static_assert(MAX_CLUSTER * HEADS * 4 <= Q_BYTES, "");
    partials.merge<2 * WARPGROUP>(weights, head_of, column_of, finish, sync_consumers, store);
}
