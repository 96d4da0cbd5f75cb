// Of bf16_few_heads_sm90: what becomes of O^T. Each warpgroup stores its own in the space of its tile; a CTA merges
// those of its query from there, or every CTA of a cluster a share of the columns.
#pragma once
#include "attention/bf16_few_heads_sm90/scores.cuh"
#include "attention/division/merge.cuh"
#include "attention/division/results.cuh"
#include "ptx/cluster.cuh"

// Stores O^T, [head][column] float32, over the warpgroup's tile, and its statistics.
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

// Waits for the threads that merge together: a warpgroup, or the consumers of the CTA.
__device__ __forceinline__ void sync_writers(const Role& r) {
    if (QUERIES == 2) {
        sync_warpgroup(r);
    } else {
        sync_consumers();
    }
}

// Returns the factor of a head's merged O^T, and writes its statistics if `write`.
__device__ __forceinline__ float finish_head(const AttentionParams& p, const Work& w, int head, bool write,
                                             const HeadResult& result, float sum) {
    const bool whole = p.num_splits == 1;
    if (write && whole) write_statistics(p, w.query, head, result);
    if (write && !whole) write_partial_statistics(p, partial_index(p, blockIdx.y, w.query, head), result);
    if (sum == 0.0f) return 0.0f;
    return whole ? 1.0f / sum * sink_factor(p, head, result.lse) : 1.0f / sum;
}

// Four neighbouring columns of a head's result.
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

// What is done with a head's O^T: the weight of each warpgroup's, and a factor for their sum.
struct HeadWeights {
    float of[SHARERS], scale;
};

// Merges the warpgroups of this CTA that share the query, and writes the results.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int WRITERS = SHARERS * WARPGROUP, HEADS_AT_ONCE = WRITERS / (D_V / 4);
    const int first = QUERIES == 2 ? r.warpgroup : 0, thread = threadIdx.x % WRITERS;
    auto* weights = reinterpret_cast<HeadWeights*>(shared + Q_AT + first * Q_BYTES);  // in the space of Q
    const Statistics* own = small().own + first;
    if (thread < HEADS && w.first_head + thread < p.h_q) {
        float ref = -INF, max = -INF, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) {
            ref = fmaxf(ref, own[i].ref[thread]);
            max = fmaxf(max, own[i].max[thread]);
        }
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) {
            const float weight = rescale_factor(own[i].ref[thread], ref);
            weights[thread].of[i] = weight;
            sum += weight * own[i].sum[thread];
        }
        const HeadResult result = {max, log2_sum_exp(ref, sum)};
        weights[thread].scale = finish_head(p, w, w.first_head + thread, true, result, sum);
    }
    sync_writers(r);
    const int column = thread % (D_V / 4) * 4;
    const uint8_t* o = shared + TILE_AT + first * TILE_BYTES + column * 4;
#pragma unroll 4
    for (int head = thread / (D_V / 4); head < min(HEADS, p.h_q - w.first_head); head += HEADS_AT_ONCE) {
        float v[4] = {};
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) {
            const float4 o4 = *reinterpret_cast<const float4*>(o + i * TILE_BYTES + head * O_LINE * 4);
            const float weight = weights[head].of[i];
            add_chunk(v, weight, o4);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] *= weights[head].scale;
        write_columns(p, w, w.first_head + head, column, v);
    }
}

// Merges the warpgroups of a cluster and writes this CTA's share of the results. Source i is warpgroup i % 2 of CTA
// i / 2 of the cluster.
__device__ __forceinline__ void write_cluster_results(const AttentionParams& p, const Work& w, int rank, int ctas) {
    constexpr int WRITERS = 2 * WARPGROUP;
    const int sources = 2 * ctas, thread = threadIdx.x;
    const uint32_t own = shared_address(&small().own), o = shared_address(shared) + TILE_AT;
    auto* gathered = reinterpret_cast<Statistics*>(shared + Q_AT);

    for (int i = thread; i < sources * 3 * HEADS; i += WRITERS) {
        const int source = i / (3 * HEADS), word = i % (3 * HEADS);
        const uint32_t from = cluster_address(own + source % 2 * sizeof(Statistics) + 4 * word, source / 2);
        reinterpret_cast<float*>(gathered + source)[word] = load_cluster_float(from);
    }
    sync_consumers();
    // A chunk is four columns of a head. If there are more threads than chunks, several threads share the sources of a
    // chunk.
    const int chunks = HEADS * D_V / 4, share = ceil_div(chunks, ctas);
    int sharers = 1;
    while (2 * sharers <= min(sources, 8) && 2 * sharers * share <= WRITERS) sharers *= 2;
    const int sharer = thread % sharers, first = rank * share, end = min(chunks, first + share);
#pragma unroll 1
    for (int chunk = first + thread / sharers;
         chunk < first + ceil_div(share, WRITERS / sharers) * (WRITERS / sharers); chunk += WRITERS / sharers) {
        const int head = chunk / (D_V / 4) % HEADS, column = chunk % (D_V / 4) * 4, global_head = w.first_head + head;
        float ref = -INF, max = -INF, sum = 0.0f, v[4] = {};
        for (int i = 0; i < sources; ++i) {
            ref = fmaxf(ref, gathered[i].ref[head]);
            max = fmaxf(max, gathered[i].max[head]);
        }
#pragma unroll 1
        for (int i = sharer; i < sources; i += 4 * sharers) {
            float4 o4[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int source = min(i + k * sharers, sources - 1);
                o4[k] = load_cluster_float4(
                    cluster_address(o + source % 2 * TILE_BYTES + (head * O_LINE + column) * 4, source / 2));
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int source = min(i + k * sharers, sources - 1);
                const float weight =
                    i + k * sharers < sources ? rescale_factor(gathered[source].ref[head], ref) : 0.0f;
                sum += weight * gathered[source].sum[head];
                add_chunk(v, weight, o4[k]);
            }
        }
        for (int step = 1; step < sharers; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] += __shfl_xor_sync(~0u, v[k], step);
        }
        if (sharer != 0 || chunk >= end || global_head >= p.h_q) continue;
        const HeadResult result = {max, log2_sum_exp(ref, sum)};
        const float scale = finish_head(p, w, global_head, column == 0, result, sum);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] *= scale;
        write_columns(p, w, global_head, column, v);
    }
}
