// Part of fp8_sm90: the epilogue. O^T becomes results, or a partial result; partial results are merged.
#pragma once
#include "attention/division/results.cuh"
#include "attention/fp8_sm90/chunks.cuh"
#include "attention/fp8_sm90/values.cuh"

// Stores each warp's part of the denominators. sum_of adds the parts for head `local` of the head tile.
__device__ __forceinline__ void gather_sums(const Role& r, const Output& out) {
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float sum = SUMS == OWN_HEADS ? rows_sum(out.sum[c]) : out.sum[c];
        if (SUMS < OWN_HEADS || r.g == 0) small().across[r.warpgroup][r.warp][sum_head(r, c)] = sum;
    }
    sync_consumers();
}
__device__ __forceinline__ float sum_of(int local) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += small().across[i / 4][i % 4][local];
    return sum;
}

// The factor of O^T that is the same for all heads.
__device__ __forceinline__ float value_scale(const AttentionParams& p) {
    if (E5M2) return 1 << FP4_EXPONENT;
    return PLAIN ? load_call_scale(p.k_scale) : 1.0f;
}

// END LEAVE: weights [partial result][head] of other CTAs' partial results. They are in the space of Q, which is free,
// since the split that merges is the CTA's last one.
static_assert(END != End::LEAVE || MOST_SPLITS * HEADS * 4 <= P_AT, "");
__device__ __forceinline__ float* merge_weights() { return reinterpret_cast<float*>(shared); }

// Combines the denominators of this split with those of `count` partial results of earlier CTAs. Writes statistics,
// and the factors of this O^T (`scale`) and of the partial results (merge_weights).
__device__ __forceinline__ void finish_sums(const AttentionParams& p, const TurnInfo& w, const Role& r, int count,
                                            const PartialResults<8>& partials) {
    Small& sm = small();
    const int local = threadIdx.x, head = w.first_head + local, first = partials.rank - count;
    if (local < HEADS) {
        const float ref = sm.ref[local];
        const float4 nearest = count > 0 ? partials.statistics_of(first, local) : make_float4(ref, 0.0f, 0.0f, 0.0f);
        float top = fmaxf(ref, nearest.x);
#pragma unroll 1
        for (int i = 1; i < count; ++i) top = fmaxf(top, partials.statistics_of(first + i, local).x);
        const float own = exp2_approx(ref - top);
        float sum = own * sum_of(local);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const float4 statistics = i == 0 ? nearest : partials.statistics_of(first + i, local);
            const float weight = exp2_approx(statistics.x - top);
            sum += weight * statistics.y;
            merge_weights()[i * HEADS + local] = weight * statistics.w;
        }
        const HeadResult result = {0.0f, log2_sum_exp(top, sum)};
        float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (head < p.h_q) {
            if (sum != 0.0f) scale *= sink_factor(p, head_at(p, head), result.lse);
            write_statistics(p, query_at(p, w.query, head), head_at(p, head), result);
        }
        sm.scale[local] = own * scale * value_scale(p);
#pragma unroll 1
        for (int i = 0; i < count; ++i) merge_weights()[i * HEADS + local] *= scale;
    }
    sync_consumers();
}

// Writes the statistics of a partial result. For each head it leaves in `scale` the power of two that brings O^T to
// the range of f16; threads may read it after a barrier.
__device__ __forceinline__ void write_partial_statistics(const AttentionParams& p, const Role& r, const Output& out,
                                                         const PartialResults<8>& partials) {
    Small& sm = small();
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        float top = 0.0f;
#pragma unroll
        for (int v = 0; v < 4; ++v)
            top = fmaxf(top, fmaxf(fabsf(out.o[v][element(0, c)]), fabsf(out.o[v][element(1, c)])));
        top = rows_max(top);
        if (r.g == 0) sm.largest[4 * r.warpgroup + r.warp][r.head(c)] = top;
    }
    gather_sums(r, out);
    if (threadIdx.x < HEADS) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) top = fmaxf(top, sm.largest[i][threadIdx.x]);
        const float up = to_f16_range(top);
        sm.scale[threadIdx.x] = up;
        partials.write_statistics(threadIdx.x, sm.ref[threadIdx.x], sum_of(threadIdx.x), 0.0f, value_scale(p) / up);
    }
}

// The chunk of a partial result (chunks.cuh) that this thread holds of its head number `own`.
__device__ __forceinline__ float4 partial_chunk(const Role& r, const Output& out, int own) {
    const float up = small().scale[r.head(own)];
    float words[4];
#pragma unroll
    for (int v = 0; v < 4; ++v)
        words[v] = __uint_as_float(pack_f16x2(out.o[v][element(0, own)] * up, out.o[v][element(1, own)] * up));
    return make_float4(words[0], words[1], words[2], words[3]);
}

// How many chunks of a partial result are used. DENSE: lines beyond the last, in eights, are left out.
__device__ __forceinline__ int chunks_of(const AttentionParams& p, int first_head) {
    return DENSE ? min(HEADS, ceil_div(p.h_q - first_head, 8) * 8) * (D_V / 8) : PartialResults<8>::CHUNKS;
}

// Writes the first `chunks` chunks of a partial result. All consumers have met since its statistics were written.
__device__ __forceinline__ void write_partial_values(const Role& r, const Output& out,
                                                     const PartialResults<8>& partials,
                                                     int chunks = PartialResults<8>::CHUNKS) {
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        if (!DENSE || 256 * c < chunks) partials.write(256 * c + threadIdx.x, partial_chunk(r, out, c));
    }
}

// Writes the partial result of a split, in f16 times a power of two for each head.
__device__ __forceinline__ void write_partial(const AttentionParams& p, const TurnInfo& w, const Role& r,
                                              const Output& out, const PartialResults<8>& partials) {
    write_partial_statistics(p, r, out, partials);
    sync_consumers();
    write_partial_values(r, out, partials, chunks_of(p, w.first_head));
}

// This thread's chunks of a partial result, for COUNT of its heads from number `first` on.
struct Chunks {
    static constexpr int COUNT = OWN_HEADS < 8 ? OWN_HEADS : 8;
    float4 of[COUNT];
};
__device__ __forceinline__ Chunks load_chunks(const PartialResults<8>& partials, int number, int first) {
    Chunks chunks;
#pragma unroll
    for (int c = 0; c < Chunks::COUNT; ++c) chunks.of[c] = partials.chunk_of(number, 256 * (first + c) + threadIdx.x);
    return chunks;
}

// Adds `count` partial results of earlier CTAs to O^T, which has been multiplied by its factors. `chunks` holds the
// first chunks of the first one: they were loaded ahead.
__device__ __forceinline__ void add_partials(const Role& r, int count, const PartialResults<8>& partials,
                                             Chunks& chunks, Output& out) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int first = 0; first < OWN_HEADS; first += Chunks::COUNT) {
            if (i > 0 || first > 0) chunks = load_chunks(partials, partials.rank - count + i, first);
#pragma unroll
            for (int c = 0; c < Chunks::COUNT; ++c) {
                const int own = first + c;
                float v[8] = {};
                add_chunk(v, merge_weights()[i * HEADS + r.head(own)], chunks.of[c]);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    out.o[n][element(0, own)] += v[2 * n];
                    out.o[n][element(1, own)] += v[2 * n + 1];
                }
            }
        }
    }
}

__device__ __forceinline__ void clear(Output& out) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i) out.o[v][i] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < SUMS; ++c) out.sum[c] = 0.0f;
}

// END KEEP: writes the partial result of a split. After an item's last split it sets O^T to the merged result, with
// the same bits as a cluster's merge: the last split's O^T stays in registers and is rounded as the others were. A
// thread reads only what it wrote itself. It loads the chunks of the next heads or split while it adds those before.
__device__ __forceinline__ void merge_segments(const AttentionParams& p, const TurnInfo& w, const Role& r, int split,
                                               Output& out) {
    const int count = p.num_splits, last = count - 1;
    const ClusterResults<8> partials(p.cluster_parts + int64_t(blockIdx.x) * count * PartialResults<8>::STEP, split,
                                     count, 1);
    write_partial_statistics(p, r, out, partials);  // before the branch, so that its code exists once
    if (!w.ends_item) {
        sync_consumers();
        write_partial_values(r, out, partials);
        return;
    }
    float* weights = reinterpret_cast<float*>(shared + P_AT);  // P is not needed any more; the next Q may be under way
    static_assert(MAX_CLUSTER * HEADS * 4 <= P_BYTES, "");
    if (threadIdx.x < HEADS) {
        float weight[MAX_CLUSTER];
        const float scale = partials.weigh(
            threadIdx.x, weight,
            [&](int local, bool write, float ref, float sum, float) {
                const int head = w.first_head + local;
                return finish_merged_head(p, query_at(p, w.query, head), head_at(p, head), write, ref, sum, 0.0f);
            },
            true);
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) {
            if (i < count) weights[i * HEADS + threadIdx.x] = weight[i] * scale;
        }
    }
    Chunks next = load_chunks(partials, 0, 0);
    sync_consumers();
    float4 own_chunks[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) own_chunks[c] = partial_chunk(r, out, c);
#pragma unroll
    for (int first = 0; first < OWN_HEADS; first += Chunks::COUNT) {
        float sum[Chunks::COUNT][8] = {};
        auto add = [&](int i, int c, const float4& chunk) {
            add_chunk(sum[c], weights[i * HEADS + r.head(first + c)], chunk);
        };
#pragma unroll 1
        for (int i = 0; i < last; ++i) {
            const Chunks chunks = next;
            const bool ends = i + 1 == last;
            if (!ends || first + Chunks::COUNT < OWN_HEADS)
                next = load_chunks(partials, ends ? 0 : i + 1, ends ? first + Chunks::COUNT : first);
#pragma unroll
            for (int c = 0; c < Chunks::COUNT; ++c) add(i, c, chunks.of[c]);
        }
#pragma unroll
        for (int c = 0; c < Chunks::COUNT; ++c) {
            add(last, c, own_chunks[first + c]);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                out.o[n][element(0, first + c)] = sum[c][2 * n];
                out.o[n][element(1, first + c)] = sum[c][2 * n + 1];
            }
        }
    }
    sync_consumers();
}

// END MEET: merges this CTA's share of the output from all partial results. The CTAs have met.
__device__ __forceinline__ void merge_partials(const AttentionParams& p, const Query& query, int first_head,
                                               ClusterResults<8> partials) {
    partials.chunks = chunks_of(p, first_head);
    float* weights = reinterpret_cast<float*>(shared);  // in the space of Q, which is not read any more
    static_assert(MAX_CLUSTER * HEADS * 4 <= P_AT, "");
    auto finish = [&](int local, bool write, float ref, float sum, float) {
        const int head = first_head + local;
        return finish_merged_head(p, query_at(p, query, head), head_at(p, head), write, ref, sum, 0.0f);
    };
    auto store = [&](int local, int column, const float (&v)[8]) {
        const int head = first_head + local;
        if (head >= p.h_q) return;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            write_output(p, query_at(p, query, head), head_at(p, head), column + COLUMNS_APART * i, v[2 * i],
                         v[2 * i + 1]);
    };
    partials.merge_share<CONSUMERS>(weights, line_of_chunk, column_of_chunk, finish, sync_consumers, store);
}

// Divides O^T by its denominators, and merges it with the partial results of earlier CTAs.
__device__ __forceinline__ void finish_results(const AttentionParams& p, const TurnInfo& w, const Role& r,
                                               Output& out) {
    const PartialResults<8> partials = {p.cluster_parts, int(blockIdx.x)};
    gather_sums(r, out);
    const bool waits = r.warpgroup == 0 && r.warp == 0;
    const int count = Division::count_earlier(p, w.begins_item, waits, r.lane, small().partials, sync_consumers);
    Chunks chunks = {};  // initialised, or the compiler keeps registers for it in the main loop
    if (count > 0) chunks = load_chunks(partials, partials.rank - count, 0);
    finish_sums(p, w, r, count, partials);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = small().scale[r.head(c)];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            out.o[v][element(0, c)] *= f;
            out.o[v][element(1, c)] *= f;
        }
    }
    if constexpr (END == End::LEAVE) add_partials(r, count, partials, chunks, out);
}

// Writes the output. P is not needed any more: its space is used.
__device__ __forceinline__ void store_results(const AttentionParams& p, const TurnInfo& w, const Role& r,
                                              const Output& out) {
    const int first = 256 * r.warpgroup +
                      16 * r.warp;  // of column block v this thread has columns 2 g and 2 g + 1 of the 16 behind this
    const OutAt results = first_out(p, w.query, w.first_head);
    // END KEEP has this way alone: code that runs once is fetched from memory, so its length costs time.
    const bool wide = p.flags & WIDE_OUT;
    if (END == End::KEEP || wide) {
        // Eight heads at a time go through the space of P, [head][column], so that whole lines of memory are written.
        // Groups of 32 bytes are swizzled from one pair of heads to the next, so that a warp's stores hit all banks.
        constexpr int LINE = 2 * D_V, BUFFERS = P_BYTES / (8 * LINE);
        static_assert(BUFFERS * 8 * LINE == P_BYTES, "");
        const int head = threadIdx.x / 64, column = threadIdx.x % 64 * 8, heads = p.h_q - w.first_head;
        OutAt to = further_out(p, results, head, column);  // moves on by four heads at a time
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            const uint32_t lines = shared_address(shared) + P_AT + j % BUFFERS * 8 * LINE;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    store_shared_4(lines + (2 * r.t + k) * LINE + (2 * (first + 64 * v + 2 * r.g) ^ r.t << 5),
                                   pack_bf16x2(out.o[v][element(0, 2 * j + k)], out.o[v][element(1, 2 * j + k)]));
            }
            sync_consumers();
            Vec16 chunks[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                chunks[i] = load_shared_16(lines + (head + 4 * i) * LINE + (2 * column ^ (head + 4 * i) / 2 << 5));
#pragma unroll
            for (int i = 0; i < 2; ++i, to = further_out(p, to, 4, 0)) {
                if (8 * j + 4 * i + head < heads)
                    store_chunk(place_of_out(p, to), chunks[i], END != End::KEEP || wide);
            }
            if (BUFFERS == 1) sync_consumers();
        }
    } else {
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
            const int head = w.first_head + r.head(c);
            if (head >= p.h_q) continue;
#pragma unroll
            for (int v = 0; v < 4; ++v)
                write_output(p, query_at(p, w.query, head), head_at(p, head), first + 64 * v + 2 * r.g,
                             out.o[v][element(0, c)], out.o[v][element(1, c)]);
        }
    }
}
