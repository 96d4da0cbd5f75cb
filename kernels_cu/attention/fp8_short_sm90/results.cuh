// Of fp8_short_sm90: what becomes of O^T: results, or partial results and their merge.
#pragma once
#include "attention/division/results.cuh"
#include "attention/fp8_short_sm90/scores.cuh"
#include "attention/fp8_short_sm90/values.cuh"

// The sinks of a CTA's heads to shared memory, -inf where there is none.
__device__ __forceinline__ void load_sinks(const AttentionParams& p, int first_head) {
    const int head = first_head + int(threadIdx.x);
    if (threadIdx.x < HEADS)
        rest().sink[threadIdx.x] = p.sink == nullptr || head >= p.h_q ? -INF : p.sink[head] * LOG2E;
}

// A head's denominator, of which each warp has a part.
__device__ __forceinline__ float sum_of_warps(int local) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += rest().across[i][local];
    return sum;
}

// Denominators to statistics, and to what O^T is multiplied with. MEET: they are kept in `scale`.
__device__ __forceinline__ void finish_heads(const AttentionParams& p, const Item& item) {
    const int local = threadIdx.x, head = item.first_head + local;
    if (local >= HEADS || head >= p.h_q) return;
    const float sum = sum_of_warps(local);
    if constexpr (MEET) {
        rest().scale[local] = sum;
        return;
    }
    const HeadResult result = {0.0f, log2_sum_exp(rest().ref[local], sum)};
    write_statistics(p, item.query, head, result);
    rest().scale[local] = sum == 0.0f ? 0.0f : 1.0f / (sum * (1.0f + exp2_approx(rest().sink[local] - result.lse)));
}

// Results go through the place of Q and P, as bf16 (MEET: f16) [head][column], of which whole lines are written. Stretches of 32 bytes
// change places from one pair of heads to the next, so that a warp's stores meet all banks.
constexpr int RESULT_BYTES = 2 * D_V;  // of a head
static_assert(HEADS * RESULT_BYTES <= ROWS_AT, "");

// O^T times `scale`.
__device__ __forceinline__ void stage_results(const Role& r, const Values2& out) {
    const uint32_t to =
        shared_address(shared) + 2 * r.t * RESULT_BYTES + 256 * r.warpgroup + (32 * r.warp + 4 * r.g ^ r.t << 5);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = rest().scale[r.head(c)];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            const float x = f * out.o[v][element(0, c)], y = f * out.o[v][element(1, c)];
            store_shared_4(to + (c / 2 * 8 + c % 2) * RESULT_BYTES + 128 * v,
                           MEET ? pack_f16x2(x, y) : pack_bf16x2(x, y));
        }
    }
}

// What a thread writes of them: eight columns of every AT_ONCE-th head. Two warps write a head.
constexpr int AT_ONCE = WARPS / 2;
struct StagedLines {
    int first, chunk;
    uint32_t from;
    __device__ __forceinline__ explicit StagedLines(const Role& r)
        : first((4 * r.warpgroup + r.warp) / 2),
          chunk(r.warp % 2 * 32 + r.lane),
          from(shared_address(shared) + first * RESULT_BYTES + (16 * chunk ^ first / 2 % 4 << 5)) {}
    __device__ __forceinline__ Vec16 of(int i) const { return load_shared_16(from + i * RESULT_BYTES); }
};

// Once all have met.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Item& item, const Role& r) {
    const StagedLines staged(r);
    bf16* to = out_of(p, item.query, item.first_head + staged.first, CHUNK * staged.chunk);
    const int heads = min(HEADS, p.h_q - item.first_head) - staged.first;
    if (p.flags & WIDE_OUT) {
#pragma unroll
        for (int i = 0; i < HEADS; i += AT_ONCE) {
            if (i < heads) store_16(to + i * p.out_h, staged.of(i));
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < heads; i += AT_ONCE) store_chunk(to + i * p.out_h, staged.of(i), false);
    }
}

// MEET: leaves a partial result, and merges this CTA's share of the output once those of the cluster are there. All threads
// have met since the last product.
__device__ __forceinline__ void merge_in_cluster(const AttentionParams& p, const Item& item, const Role& r,
                                                 const Values2& out) {
    const int cluster = blockIdx.y * num_head_tiles(p) + blockIdx.x / cluster_size();
    const ClusterResults<8> partials(p, cluster);
    float tops[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        tops[c] = 0.0f;
#pragma unroll
        for (int v = 0; v < 2; ++v)
            tops[c] = fmaxf(tops[c], fmaxf(fabsf(out.o[v][element(0, c)]), fabsf(out.o[v][element(1, c)])));
    }
    write_across(r, tops, [](float x, float y) { return fmaxf(x, y); }, [](float x) { return rows_max(x); });
    meet();
    if (threadIdx.x < HEADS) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) top = fmaxf(top, rest().across[i][threadIdx.x]);
        const float up = to_f16_range(top);
        partials.write_statistics(threadIdx.x, rest().ref[threadIdx.x], rest().scale[threadIdx.x], 0.0f, 1.0f / up);
        rest().scale[threadIdx.x] = up;
    }
    meet();
    stage_results(r, out);
    meet();
    const StagedLines staged(r);
#pragma unroll
    for (int i = 0; i < HEADS; i += AT_ONCE) {
        const Vec16 v = staged.of(i);
        partials.write(
            (staged.first + i) * (D_V / 8) + staged.chunk,
            make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)));
    }
    meet();
    cluster_sync_with_one_fence(threadIdx.x == 0);
    auto finish = [&](int local, bool write, float ref, float sum, float) {
        return finish_merged_head(p, item.query, item.first_head + local, write, ref, sum, 0.0f);
    };
    auto store = [&](int local, int column, const float (&v)[8]) {
        const int head = item.first_head + local;
        if (head >= p.h_q) return;
        const Vec16 packed = {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                              pack_bf16x2(v[6], v[7])};
        store_chunk(out_of(p, item.query, head, column), packed, p.flags & WIDE_OUT);
    };
    partials.merge_share<CTA_THREADS>(
        reinterpret_cast<float*>(shared + ROWS_AT), [](int chunk) { return chunk / (D_V / 8); },
        [](int chunk) { return chunk % (D_V / 8) * 8; }, finish, meet, store);
}
