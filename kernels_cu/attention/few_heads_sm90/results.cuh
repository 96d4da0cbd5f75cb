// Of few_heads_sm90: what becomes of O^T: results, or partial results and their merge.
#pragma once
#include "attention/division/merge.cuh"
#include "attention/division/results.cuh"
#include "attention/few_heads_sm90/products.cuh"

// Stores the sums (and maxima) of each warp's rows.
__device__ __forceinline__ void store_statistics(const Role& r, const Softmax& state) {
    float (&across)[2][4][HEADS] = small().across[r.warpgroup];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float sum = rows_sum(state.sum[c]), max = rows_max(state.max[c]);
        if (r.g == 0) {
            across[0][r.warp][r.head(c)] = sum;
            across[1][r.warp][r.head(c)] = max;
        }
    }
}

// Merges the warpgroups' softmax of a head, and finds what their O^T is multiplied with.
__device__ __forceinline__ Statistics merge_statistics(int head) {
    Small& sm = small();
    float ref = -INF, sum = 0.0f, max = -INF;
#pragma unroll
    for (int wg = 0; wg < CONSUMERS; ++wg) ref = fmaxf(ref, sm.ref[wg][head]);
#pragma unroll
    for (int wg = 0; wg < CONSUMERS; ++wg) {
        const float weight = sm.weight[wg][head] = rescale_factor(sm.ref[wg][head], ref);
        const float (&across)[2][4][HEADS] = sm.across[wg];
        sum += weight * ((across[0][0][head] + across[0][1][head]) + (across[0][2][head] + across[0][3][head]));
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) max = fmaxf(max, across[1][warp][head]);
    }
    return {ref, sum, max};
}

// Writes a head's statistics if `write`, and returns what its O^T is multiplied with in the end.
__device__ __forceinline__ float finish_head(const AttentionParams& p, const WorkItem& w, int head, bool write,
                                             float ref, float sum, float max) {
    const int global_head = w.first_head + head;
    if (global_head >= p.h_q || sum == 0.0f && !write) return 0.0f;
    const HeadResult result = {max, log2_sum_exp(ref, sum)};
    if (write && p.num_splits == 1) write_statistics(p, w.query, global_head, result);
    if (write && p.num_splits > 1)
        write_partial_statistics(p, partial_index(p, blockIdx.y, w.query, global_head), result);
    if (sum == 0.0f) return 0.0f;
    return (p.num_splits == 1 ? sink_factor(p, global_head, result.lse) : 1.0f) / sum;
}

// Four columns of a head, times `f`.
__device__ __forceinline__ void write_columns(const AttentionParams& p, const WorkItem& w, int head, int column,
                                              float4 v, float f) {
    const int global_head = w.first_head + head;
    if (global_head >= p.h_q) return;
    v = make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
    if (p.num_splits > 1) {
        const int64_t at = partial_index(p, blockIdx.y, w.query, global_head);
        *reinterpret_cast<float4*>(partial_out(p, at) + column) = v;
    } else {
        if (p.flags & WIDE_OUT) {
            bf16* out = p.out + w.query.b * p.out_b + w.query.s * p.out_s + global_head * p.out_h + column;
            *reinterpret_cast<Vec8*>(out) = {pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w)};
        } else {
            write_output(p, w.query, global_head, column, v.x, v.y);
            write_output(p, w.query, global_head, column + 2, v.z, v.w);
        }
    }
}

// A thread's place in half `half` of the columns, which warpgroups 0 and 1 (`by` 0) or warpgroup 2 (`by` 1) give.
__device__ __forceinline__ float* given_half(const Role& r, int by, int half) {
    auto* columns = reinterpret_cast<float*>(shared + EXCHANGE_AT + (2 * by + half) * EXCHANGE_BYTES);
    return columns + 2 * r.t * HALF_LINE + pv_column(r.warp, r.g, 0);
}
// Word 2 half + k of the columns of head c.
__device__ __forceinline__ float4& four_columns(float* half, int c, int k) {
    return *reinterpret_cast<float4*>(half + (c / 2 * 8 + c % 2) * HALF_LINE + 128 * k);
}

// Stores half `HALF` of a warpgroup's columns.
template <int HALF>
__device__ __forceinline__ void give_half(float* to, const float (&o)[V_TILES][HEAD_TILES][4]) {
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float (&first)[HEAD_TILES][4] = o[4 * HALF + 2 * k];
            const float (&second)[HEAD_TILES][4] = o[4 * HALF + 2 * k + 1];
            four_columns(to, c, k) = make_float4(at(first, 0, c), at(first, 1, c), at(second, 0, c), at(second, 1, c));
        }
    }
}

// Warpgroup HALF merges half `HALF` of the columns of all warpgroups, and calls act(c, k, where a value may stay,
// value).
template <int HALF, typename Act>
__device__ __forceinline__ void merge_half(const Role& r, bool third_has_rows,
                                           const float (&o)[V_TILES][HEAD_TILES][4], Act act) {
    const Small& sm = small();
    float *both = given_half(r, 0, HALF), *third = given_half(r, 1, HALF);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const int head = r.head(c);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float a = sm.weight[HALF][head], b = sm.weight[1 - HALF][head];
            const float (&first)[HEAD_TILES][4] = o[4 * HALF + 2 * k];
            const float (&second)[HEAD_TILES][4] = o[4 * HALF + 2 * k + 1];
            float4& four = four_columns(both, c, k);
            float4 v = four;
            v = make_float4(a * at(first, 0, c) + b * v.x, a * at(first, 1, c) + b * v.y,
                            a * at(second, 0, c) + b * v.z, a * at(second, 1, c) + b * v.w);
            if (CONSUMERS == 3 && third_has_rows) {
                const float w = sm.weight[CONSUMERS - 1][head];
                const float4 x = four_columns(third, c, k);
                v = make_float4(v.x + w * x.x, v.y + w * x.y, v.z + w * x.z, v.w + w * x.w);
            }
            act(c, k, four, v);
        }
    }
}

// Writes the CTA's result, [half][head][column] in shared memory.
__device__ __forceinline__ void write_merged(const AttentionParams& p, const WorkItem& w) {
#pragma unroll 4
    for (int i = threadIdx.x; i < HEADS * D_V / 4; i += CONSUMER_THREADS) {
        const int head = i / (D_V / 4), column = i % (D_V / 4) * 4;
        const auto* v = reinterpret_cast<const float4*>(shared + EXCHANGE_AT + column / 256 * EXCHANGE_BYTES +
                                                        (head * HALF_LINE + column % 256) * 4);
        write_columns(p, w, head, column, *v, small().scale[head]);
    }
}

// Merges the warpgroups of a CTA, then the CTAs of a cluster.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Work& w, const Role& r,
                                              const Softmax& state, const float (&o)[V_TILES][HEAD_TILES][4]) {
    Small& sm = small();
    sync_consumers();  // all rows have been read
    store_statistics(r, state);
    const bool third_has_rows = w.count() > 2;
    if (r.warpgroup < 2 || third_has_rows) {
        if (r.warpgroup != 1) give_half<1>(given_half(r, r.warpgroup / 2, 1), o);
        if (r.warpgroup != 0) give_half<0>(given_half(r, r.warpgroup / 2, 0), o);
    }
    sync_consumers();
    const ClusterResults<4> partials(p, (blockIdx.y * p.num_queries + w.query.index) * gridDim.z + blockIdx.z);
    const int head = threadIdx.x;
    if (head < HEADS) {
        const Statistics merged = merge_statistics(head);
        if (partials.ctas > 1) {
            partials.write_statistics(head, merged.ref, merged.sum, merged.max);
        } else {
            sm.scale[head] = finish_head(p, w, head, true, merged.ref, merged.sum, merged.max);
        }
    }
    sync_consumers();
    // Chunk 128 (4 c + q) + thread: word q of the columns of head c of a thread of warpgroup 0 or 1.
    auto keep = [&](int c, int k, float4& place, float4 v) {
        if (partials.ctas > 1) {
            partials.write(128 * (4 * c + 2 * r.warpgroup + k) + threadIdx.x % WARPGROUP, v);
        } else {
            place = v;
        }
    };
    if (r.warpgroup == 0) {
        merge_half<0>(r, third_has_rows, o, keep);
    } else if (r.warpgroup == 1) {
        merge_half<1>(r, third_has_rows, o, keep);
    }
    if (partials.ctas == 1) {
        sync_consumers();
        write_merged(p, w);
        return;
    }
    auto head_of = [](int chunk) { return chunk / 512 / 2 * 8 + chunk % 4 * 2 + chunk / 512 % 2; };
    auto finish = [&](int head, bool write, float ref, float sum, float max) {
        return finish_head(p, w, head, write, ref, sum, max);
    };
    auto column_of = [](int chunk) { return pv_column(chunk % 128 / 32, chunk % 32 / 4, chunk / 128 % 4); };
    auto weights = reinterpret_cast<float*>(shared);  // in the space of Q
    static_assert(MAX_CLUSTER * HEADS * 4 <= Q_BYTES, "");
    auto store = [&](int head, int column, const float (&v)[4]) {
        write_columns(p, w, head, column, make_float4(v[0], v[1], v[2], v[3]), 1.0f);
    };
    partials.merge<CONSUMER_THREADS>(weights, head_of, column_of, finish, sync_consumers, store);
}
