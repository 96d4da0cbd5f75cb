// What backward.cu and backward_sm90.cu share: their parameter struct, the numbers of heads, and how results are
// stored.
#pragma once
#include "ptx/arithmetic.cuh"
#include "rows/chunk.cuh"
#include "tile/contributions.cuh"
#include "tile/warp.cuh"

constexpr int CONTRIBUTING_WARPS = 8;
constexpr int V_COLUMNS = D_V / CONTRIBUTING_WARPS;  // of a warp, among the first D_V
constexpr int ROPE_COLUMNS = (D_QK - D_V) / CONTRIBUTING_WARPS;
static_assert(V_COLUMNS == 64 && (ROPE_COLUMNS == 8 || ROPE_COLUMNS == 0), "");

// cupy_mla/cuda/backward.py declares the same fields.
struct BackwardParams {
    const bf16* q;          // [queries, h_q, D_QK]
    const bf16* kv;         // [s_kv, D_QK]
    const bf16* out;        // [queries, h_q, D_V]
    const bf16* dout;       // the same
    const float* lse;       // [queries, h_q]
    const float* d_lse;     // the same, or null
    const float* sink;      // [h_q], or null
    const int32_t* rows;    // [queries, topk] valid entries; of a group, the union from its first query on
    const int32_t* counts;  // [queries] their number, or OF_ITEM_BEFORE
    const uint8_t* listed;  // the same shape as rows, bit n: query n of the group lists the row; if GROUPED
    void* dq;               // [queries, h_q, D_QK] float32 or bfloat16
    bf16* contributions;    // [queries, topk, blocks, D_QK]
    float* sink_terms;      // [queries, h_q]: what is subtracted from a sink's gradient; or null
    int64_t q_token, q_head, kv_row, out_token, out_head, dout_token, dout_head;  // items, as all strides
    int64_t lse_token, lse_head, d_lse_token, d_lse_head, dq_token, dq_head, sink_stride;
    int32_t h_q, topk, blocks;
    float scale, scale_log2;  // sm_scale, and times log2(e)
    int32_t wide;             // dq is float32
    int32_t aligned;          // rows of q, kv, out and dout start at multiples of 16 bytes
    int32_t aligned_dq;       // rows of dq allow stores of two values
    int32_t lines_dq;         // rows of dq are bfloat16 and allow stores of 16 bytes
};

// A query and head of the call; `head` is beyond the call's heads where there is none.
struct Line {
    int query, head;
};

// What a CTA works on: a block of HEADS heads of a query, and the query's valid entries. GROUPED: all heads of one or
// several neighbouring queries, and the union of their lists; line n is head n % h_q of query n / h_q.
struct Item {
    int query, block, queries, count;
    const int32_t* rows;

    static __device__ __forceinline__ Item of_cta(const BackwardParams& p) {
        const int query = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks, count = p.counts[query];
        int queries = 1;
        if (GROUPED)
            while (query + queries < gridDim.x && p.counts[query + queries] == OF_ITEM_BEFORE) ++queries;
        return {query, block, queries, count, p.rows + int64_t(query) * p.topk};
    }
    __device__ __forceinline__ Line line(const BackwardParams& p, int n) const {
        if (!GROUPED) return {query, HEADS * block + n};
        const int of_query = n / p.h_q;
        return {query + of_query, of_query < queries ? n - of_query * p.h_q : p.h_q};
    }
    __device__ __forceinline__ const bf16* row(const BackwardParams& p, int entry) const {
        return entry < count ? p.kv + rows[entry] * p.kv_row : nullptr;
    }
    __device__ __forceinline__ const bf16* q(const BackwardParams& p, int n) const {
        const Line at = line(p, n);
        return at.head < p.h_q ? p.q + at.query * p.q_token + at.head * p.q_head : nullptr;
    }
    __device__ __forceinline__ const bf16* dout(const BackwardParams& p, int n) const {
        const Line at = line(p, n);
        return at.head < p.h_q ? p.dout + at.query * p.dout_token + at.head * p.dout_head : nullptr;
    }
    // Where this item's contribution to an entry's row is stored.
    __device__ __forceinline__ bf16* contribution(const BackwardParams& p, int entry) const {
        return p.contributions + ((int64_t(query) * p.topk + entry) * p.blocks + block) * D_QK;
    }
};

// The dot product of eight packed values.
__device__ __forceinline__ float dot(const Vec16& a, const Vec16& b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += bf16_low(x[i]) * bf16_low(y[i]) + bf16_high(x[i]) * bf16_high(y[i]);
    return sum;
}

// The numbers of the CTA's heads (backward.cu). P of a head is 0 if its lse is infinite.
struct HeadNumbers {
    float lse[HEADS], sigma[HEADS], e[HEADS];  // lse in base 2
};

// Computes the numbers of every head, a warp a head, with the loads of AT_ONCE heads in flight. Also writes the head's
// term of the sink's gradient. `dout(line, chunk)` loads a 16-byte chunk of dO. `aligned`: rows of out start at
// multiples of 16 bytes.
template <typename Dout>
__device__ __forceinline__ void find_head_numbers(const BackwardParams& p, const Item& item, HeadNumbers& numbers,
                                                  bool aligned, Dout dout) {
    constexpr int OF_WARP = HEADS / CONTRIBUTING_WARPS, AT_ONCE = OF_WARP < 4 ? OF_WARP : 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = warp * OF_WARP; first < (warp + 1) * OF_WARP; first += AT_ONCE) {
        Vec16 out[AT_ONCE][2] = {};
        float lse[AT_ONCE], d_lse[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const Line at = item.line(p, first + i);
            lse[i] = INF, d_lse[i] = 0.0f;
            if (at.head >= p.h_q) continue;
            const bf16* from = p.out + at.query * p.out_token + at.head * p.out_head + CHUNK * lane;
            out[i][0] = load_chunk(from, aligned), out[i][1] = load_chunk(from + 32 * CHUNK, aligned);
            lse[i] = p.lse[at.query * p.lse_token + at.head * p.lse_head];
            if (p.d_lse != nullptr) d_lse[i] = p.d_lse[at.query * p.d_lse_token + at.head * p.d_lse_head];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int line = first + i;
            const Line at = item.line(p, line);
            float delta = dot(out[i][0], dout(line, lane)) + dot(out[i][1], dout(line, lane + 32)), sigma = 1.0f;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) delta += __shfl_xor_sync(~0u, delta, step);
            if (p.sink != nullptr && at.head < p.h_q) {
                const float sink = p.sink[at.head * p.sink_stride];
                sigma = 1.0f / (1.0f + exp2_approx((sink - lse[i]) * LOG2E));
                if (lane == 0)
                    p.sink_terms[int64_t(at.query) * p.h_q + at.head] =
                        delta / (1.0f + exp2_approx((lse[i] - sink) * LOG2E));
            }
            if (lane == 0) {
                numbers.lse[line] = lse[i] * LOG2E;
                numbers.sigma[line] = sigma;
                numbers.e[line] = d_lse[i] - sigma * delta;
            }
        }
    }
}

// Writes 0 as the sink terms of an item without rows.
__device__ __forceinline__ void leave_no_terms(const BackwardParams& p, const Item& item) {
    if (p.sink_terms == nullptr || threadIdx.x >= HEADS) return;
    const Line at = item.line(p, threadIdx.x);
    if (at.head < p.h_q) p.sink_terms[int64_t(at.query) * p.h_q + at.head] = 0.0f;
}

// dS and sigma * P of a logit and its dP. Both are 0 where there is no row, whose P might be infinite.
struct Weights {
    float ds, p;
};
__device__ __forceinline__ Weights weights_from(const BackwardParams& p, bool there, float logit, float dp, float lse,
                                                float sigma, float e) {
    const float probability = there ? exp2_approx(logit * p.scale_log2 - lse) : 0.0f;
    return {p.scale * probability * (sigma * dp + e), sigma * probability};
}

// Stores two neighbouring values of dQ of a head.
__device__ __forceinline__ void store_dq(const BackwardParams& p, const Line& of, int column, float x, float y) {
    const int64_t at = of.query * p.dq_token + of.head * p.dq_head + column;
    if (p.wide) {
        store_pair(static_cast<float*>(p.dq) + at, x, y, p.aligned_dq);
    } else {
        store_pair(static_cast<bf16*>(p.dq) + at, x, y, p.aligned_dq);
    }
}
