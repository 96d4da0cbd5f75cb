// Part of portable: the epilogue of a split. Score warps write statistics and the factors of O; then output warps
// write O.
//
//   one split an item   its result is the item's
//   equal splits        each writes a partial result for combine.cu
//   shares              the last split of an item waits for the CTAs that have the earlier ones, merges their partial
//                       results with its own, and writes the item's result; an earlier split writes a partial result
//                       (division/share_partials.cuh)
#pragma once
#include "attention/division/partials.cuh"
#include "attention/division/results.cuh"
#include "attention/division/share_partials.cuh"
#include "attention/portable/softmax.cuh"
#include "attention/portable/values.cuh"
#include "rows/call_scale.cuh"

// --- partial results of shares ------------------------------------------------------------------------------------

// A CTA has two places for partial results: one for other CTAs, and one (`merged`) for O of the split with which it
// merges other CTAs' partial results. (In registers, O would spill during the merge.)
__device__ __forceinline__ PartialResults<4> partial_of(const AttentionParams& p, int cta, bool merged) {
    return {p.cluster_parts, 2 * cta + merged};
}
__device__ __forceinline__ float4 statistics_of(const PartialResults<4>& partial, int head) {
    return partial.statistics_of(partial.rank, head);
}

// The factor of a partial result's sums.
__device__ __forceinline__ float weight_of(float ref, float top) {
    return ref == -INF ? 0.0f : exp2_approx(ref - top);
}

// Waits for the partial results of the item's earlier splits. The score warps call.
__device__ __forceinline__ void wait_for_earlier_splits(const AttentionParams& p) {
    const Role r = Role::here();
    if (r.warp == 0) {
        const int count = wait_for_partials(p, blockIdx.x, r.lane);
        if (r.lane == 0) small().partials = count;
    }
    named_barrier_sync(SCORE_SYNC, SCORE_THREADS);
}

// --- statistics, by score warps -----------------------------------------------------------------------------------

// Finishes the heads: writes statistics to memory, and the factors of O for the output warps.
__device__ __forceinline__ void finish_heads(const AttentionParams& p, const Softmax& state) {
    const Role r = Role::here();
    Small& sm = small();
    const bool writes = r.t == 0 && (!ALL_WARPS_GET_SUMS || r.slice() == 0);
    const int cta = blockIdx.x;
    if (in_shares(p) && sm.ends_item && sm.work.begin > 0) wait_for_earlier_splits(p);
    const int count = sm.partials;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        float sum = quad_sum(i == 0 ? state.sum[0] : state.sum[1]);
        const float ref = i == 0 ? state.ref[0] : state.ref[1];
        float top = ref, max = i == 0 ? state.max[0] : state.max[1];
        const int local = r.own_tile() * 16 + r.g + 8 * i, head = first_head() + local;
        if (!writes) continue;
        if (!sm.ends_item) {
            partial_of(p, cta, false).write_statistics(local, ref, sum, max);
            sm.factor[local] = 1.0f;
            continue;
        }
#pragma unroll 1
        for (int other = cta - count; other < cta; ++other) {
            const float4 statistics = statistics_of(partial_of(p, other, false), local);
            top = fmaxf(top, statistics.x);
            max = fmaxf(max, statistics.z);
        }
        const float own = weight_of(ref, top);
        sum *= own;
#pragma unroll 1
        for (int other = cta - count; other < cta; ++other) {
            const float4 statistics = statistics_of(partial_of(p, other, false), local);
            sum += weight_of(statistics.x, top) * statistics.y;
        }
        const HeadResult result = {max, log2_sum_exp(top, sum)};
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (SCALE_OF_CALL) factor *= load_call_scale(p.k_scale);
        if (head < p.h_q) {
            if (in_shares(p) || p.num_splits == 1) {
                if (sum != 0.0f) factor *= sink_factor(p, head_at(p, head), result.lse);
                if constexpr (DENSE) {
                    write_statistics(p, query_at(p, sm.work.query, head), head_at(p, head), result);
                } else {
                    write_statistics(p, sm.work.query, head, result);
                }
            } else {
                write_partial_statistics(p, partial_index(p, blockIdx.y, sm.work.query, head), result);
            }
        }
        sm.top[local] = top;
        sm.factor[local] = own * factor;
        sm.factor_of_partials[local] = factor;
    }
}

// --- O, by output warps -------------------------------------------------------------------------------------------

// Writes this thread's columns of a head: two of every eight.
template <typename Write>
__device__ __forceinline__ void write_columns(const float (&o)[V_TILES][4], int i, float factor, Write write) {
#pragma unroll
    for (int v = 0; v < V_TILES; ++v) write(8 * v, o[v][2 * i] * factor, o[v][2 * i + 1] * factor);
}

// Writes O of m tile m. `factor`: of heads g and g + 8.
__device__ __forceinline__ void write_tile(const AttentionParams& p, int m, const float (&o)[V_TILES][4],
                                           const float (&factor)[2]) {
    const Role r = Role::here();
    const Query query = small().work.query;
    const int column = 64 * r.warp + 2 * r.t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = first_head() + 16 * m + r.g + 8 * i;
        if (head >= p.h_q) continue;
        if (p.num_splits > 1 && !in_shares(p)) {
            float* to = partial_out(p, partial_index(p, blockIdx.y, query, head)) + column;
            write_columns(o, i, factor[i],
                          [&](int at, float x, float y) { *reinterpret_cast<float2*>(to + at) = make_float2(x, y); });
            continue;
        }
        bf16* to = out_of(p, query_at(p, query, head), head_at(p, head), column);
        if (p.flags & ALIGNED_OUT) {
            write_columns(o, i, factor[i],
                          [&](int at, float x, float y) { *reinterpret_cast<uint32_t*>(to + at) = pack_items(x, y); });
        } else {
            write_columns(o, i, factor[i], [&](int at, float x, float y) {
                const uint32_t packed = pack_items(x, y);
                to[at] = bf16(packed), to[at + 1] = bf16(packed >> 16);
            });
        }
    }
}

__device__ __forceinline__ void write_results(const AttentionParams& p, const Output& o) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const int head = 16 * m + Role::here().g;
        write_tile(p, m, o[m], {small().factor[head], small().factor[head + 8]});
    }
}

// Writes O as a partial result. Chunk (8 m + v) * OUTPUT_THREADS + thread holds this thread's values of m tile m and
// columns 8 v.
__device__ __forceinline__ void write_partial(const PartialResults<4>& partial, const Output& o) {
    const int thread = read_thread_index();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int v = 0; v < V_TILES; ++v)
            partial.write((m * V_TILES + v) * OUTPUT_THREADS + thread,
                          make_float4(o[m][v][0], o[m][v][1], o[m][v][2], o[m][v][3]));
    }
}

// Merges the item's partial results, this CTA's last. A thread reads what it wrote itself, or what its counterpart in
// another CTA wrote.
__device__ __forceinline__ void merge_partials(const AttentionParams& p) {
    const Role r = Role::here();
    const Small& sm = small();
    const int cta = blockIdx.x;
#pragma unroll 1
    for (int m = 0; m < M_TILES; ++m) {
        const int head = 16 * m + r.g;
        float o[V_TILES][4] = {};
#pragma unroll 1
        for (int other = cta - sm.partials; other <= cta; ++other) {
            const PartialResults<4> partial = partial_of(p, other, other == cta);
            float4 chunks[V_TILES];
#pragma unroll
            for (int v = 0; v < V_TILES; ++v)
                chunks[v] = partial.chunk_of(partial.rank, (m * V_TILES + v) * OUTPUT_THREADS + int(threadIdx.x));
            float weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int local = head + 8 * i;
                weight[i] = other == cta ? sm.factor[local]
                                         : weight_of(statistics_of(partial, local).x, sm.top[local]) *
                                               sm.factor_of_partials[local];
            }
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) {
                o[v][0] += weight[0] * chunks[v].x;
                o[v][1] += weight[0] * chunks[v].y;
                o[v][2] += weight[1] * chunks[v].z;
                o[v][3] += weight[1] * chunks[v].w;
            }
        }
        write_tile(p, m, o, {1.0f, 1.0f});
    }
}

// Writes a split's O as a result or a partial result; merges partial results if the split ends a cut item.
__device__ __forceinline__ void finish_output(const AttentionParams& p, const Output& o) {
    if (small().ends_item && small().partials == 0) {
        write_results(p, o);
        return;
    }
    const bool merges = small().ends_item;
    write_partial(partial_of(p, blockIdx.x, merges), o);
    if (merges) {
        merge_partials(p);
    } else {
        named_barrier_sync(OUTPUT_SYNC, OUTPUT_THREADS);
        if (read_thread_index() == 0) announce_partial(p, blockIdx.x, small().work.begin == 0);
    }
}
