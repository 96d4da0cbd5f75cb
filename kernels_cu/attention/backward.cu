// The backward of sparse attention on mma.sync, for every GPU from sm_80 on: dQ, and what a query contributes to the
// gradient of each of its rows. backward_lists.cu has sorted its list; backward_rows.cu adds up what rows get.
//
//   grid   x query * head blocks + head block
//   CTA    8 warps: a query, HEADS heads, all its rows in tiles of TILE_ROWS. Q and dO lie in shared memory; so does a
//          tile of rows at a time, which are K and, with their first D_V columns, V.
//
//   wait for the tile
//   warps 0-3  S = Q.K^T             warps 4-7  dP = dO.V^T
//                  <--- dP, float32, through shared memory
//              P = exp2(S * scale - lse),  dS = sm_scale * P * (sigma * dP + e);  dS and sigma * P to shared memory, bf16
//   all warps  dQ += dS.K            a warp has all heads x 64 + 8 columns
//   copies of the next tile begin
//   all warps  C = dS^T.Q + (sigma * P)^T.dO    all rows of the tile x 64 + 8 columns; written as bf16
//
// sigma and e are numbers of a head: sigma = 1 / (1 + exp(sink - lse)), e = d_lse - sigma * sum(out * dO). They are found
// while the first tile comes.
//
// Rows beyond the list's end are zeros, and so is their P. Heads beyond the last one are zeros, their lse is infinite.
// Sums over rows, columns and heads have one order, so bits follow from the query's own arguments.
//
// Shared memory, bytes: Q 2 * HEADS * D_QK, dO 2 * HEADS * D_V, a tile 2 * TILE_ROWS * D_QK; dP 4, dS and P 2 each, times
// HEADS * TILE_ROWS; 12 * HEADS. 64 heads of 576: with 16 rows 166,656, with 32 rows 193,280.
#include "attention/contributions.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "rows/chunk.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

// cupy_mla/cuda/backward.py declares the same fields.
struct BackwardParams {
    const bf16* q;          // [queries, h_q, D_QK]
    const bf16* kv;         // [s_kv, D_QK]
    const bf16* out;        // [queries, h_q, D_V]
    const bf16* dout;       // the same
    const float* lse;       // [queries, h_q]
    const float* d_lse;     // the same, or null
    const float* sink;      // [h_q], or null
    const int32_t* rows;    // [queries, topk] valid entries
    const int32_t* counts;  // [queries] how many they are
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
};

constexpr int WARPS = CONTRIBUTING_WARPS, THREADS = 32 * WARPS;
constexpr int M_TILES = HEADS / 16, ROW_TILES = TILE_ROWS / 16;                        // mma tiles of heads, of rows
constexpr int SCORE_GROUPS = 4 / M_TILES, SCORE_TILES = TILE_ROWS / 8 / SCORE_GROUPS;  // n tiles of a score warp
constexpr int V_TILES = V_COLUMNS / 8, TILES = V_TILES + ROPE_COLUMNS / 8;             // n tiles of a warp's columns
static_assert(M_TILES * SCORE_GROUPS == 4 && (SCORE_TILES == 1 || SCORE_TILES % 2 == 0), "");

constexpr int QK_BYTES = 2 * D_QK, V_BYTES = 2 * D_V;  // of a line
constexpr int Q_AT = 0, DOUT_AT = Q_AT + HEADS * QK_BYTES, TILE_AT = DOUT_AT + HEADS * V_BYTES,
              DP_AT = TILE_AT + TILE_ROWS * QK_BYTES, DS_AT = DP_AT + 4 * HEADS * TILE_ROWS,
              P_AT = DS_AT + 2 * HEADS * TILE_ROWS, HEADS_AT = P_AT + 2 * HEADS * TILE_ROWS,
              SHARED_BYTES = HEADS_AT + 12 * HEADS;
static_assert(SHARED_BYTES <= SHARED_LIMIT && DOUT_AT % 128 == 0 && TILE_AT % 128 == 0 && DP_AT % 128 == 0, "");

extern __shared__ __align__(128) uint8_t shared[];

// Numbers of the CTA's heads: lse in base 2, sigma, e.
__device__ __forceinline__ float* head_numbers(int kind) {
    return reinterpret_cast<float*>(shared + HEADS_AT) + kind * HEADS;
}

// The address of a 16-byte chunk of a line of Q or the tile (BYTES = QK_BYTES) or dO.
template <int BYTES>
__device__ __forceinline__ uint32_t chunk_of(int at, int line, int chunk) {
    return shared_address(shared) + at + line * BYTES + swizzle(line, chunk);
}

// The address of 8 rows of a head in dS or P, whose lines are short: eight neighbouring lines meet all banks.
__device__ __forceinline__ uint32_t weights_of(int at, int head, int chunk) {
    constexpr int BYTES = 2 * TILE_ROWS, CHUNKS = BYTES / 16;
    return shared_address(shared) + at + head * BYTES + (chunk ^ (head / (8 / CHUNKS) % CHUNKS)) * 16;
}

// Start to copy LINES lines of BYTES bytes, each by as many threads. `from(line)`: null for zeros.
template <int LINES, int BYTES, typename From>
__device__ __forceinline__ void bring(int at, bool aligned, From from) {
    constexpr int TOGETHER = THREADS / LINES;
    const int line = threadIdx.x / TOGETHER;
    const bf16* values = from(line);
#pragma unroll 4
    for (int chunk = threadIdx.x % TOGETHER; chunk < BYTES / 16; chunk += TOGETHER) {
        const uint32_t to = chunk_of<BYTES>(at, line, chunk);
        if (aligned) {
            cp_async_16(to, values + CHUNK * chunk, values != nullptr);
        } else {
            store_shared_16(to, values == nullptr ? Vec16{} : load_chunk(values + CHUNK * chunk, false));
        }
    }
}

struct Item {
    int query, block, first_head, count;
    const int32_t* rows;
};

__device__ __forceinline__ void bring_tile(const BackwardParams& p, const Item& item, int tile) {
    bring<TILE_ROWS, QK_BYTES>(TILE_AT, p.aligned, [&](int line) {
        const int entry = tile * TILE_ROWS + line;
        return entry < item.count ? p.kv + item.rows[entry] * p.kv_row : nullptr;
    });
    cp_async_commit();
}

__device__ __forceinline__ void bring_heads(const BackwardParams& p, const Item& item) {
    bring<HEADS, QK_BYTES>(Q_AT, p.aligned, [&](int line) {
        const int head = item.first_head + line;
        return head < p.h_q ? p.q + item.query * p.q_token + head * p.q_head : nullptr;
    });
    bring<HEADS, V_BYTES>(DOUT_AT, p.aligned, [&](int line) {
        const int head = item.first_head + line;
        return head < p.h_q ? p.dout + item.query * p.dout_token + head * p.dout_head : nullptr;
    });
    cp_async_commit();
}

// The dot product of eight packed values each.
__device__ __forceinline__ float dot(const Vec16& a, const Vec16& b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += bf16_low(x[i]) * bf16_low(y[i]) + bf16_high(x[i]) * bf16_high(y[i]);
    return sum;
}

// Find the numbers of every head, a warp a head, and leave what the sink's gradient needs. dO is there.
__device__ __forceinline__ void find_head_numbers(const BackwardParams& p, const Item& item) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int line = warp; line < HEADS; line += WARPS) {
        const int head = item.first_head + line;
        float lse = INF, sigma = 0.0f, e = 0.0f;
        if (head < p.h_q) {
            const bf16* out = p.out + item.query * p.out_token + head * p.out_head;
            float delta = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                delta += dot(load_chunk(out + CHUNK * (lane + 32 * i), p.aligned),
                             load_shared_16(chunk_of<V_BYTES>(DOUT_AT, line, lane + 32 * i)));
#pragma unroll
            for (int step = 1; step < 32; step *= 2) delta += __shfl_xor_sync(~0u, delta, step);
            lse = p.lse[item.query * p.lse_token + head * p.lse_head];
            sigma = 1.0f;
            if (p.sink != nullptr) {
                const float sink = p.sink[head * p.sink_stride];
                sigma = 1.0f / (1.0f + exp2_approx((sink - lse) * LOG2E));
                if (lane == 0)
                    p.sink_terms[int64_t(item.query) * p.h_q + head] =
                        delta / (1.0f + exp2_approx((lse - sink) * LOG2E));
            }
            e = (p.d_lse == nullptr ? 0.0f : p.d_lse[item.query * p.d_lse_token + head * p.d_lse_head]) -
                sigma * delta;
        }
        if (lane == 0) head_numbers(0)[line] = lse * LOG2E, head_numbers(1)[line] = sigma, head_numbers(2)[line] = e;
    }
}

// --- products -------------------------------------------------------------------------------------------------

using Scores = float[SCORE_TILES][4];

// A score warp's part of lines.rows^T: 16 heads from `head` on, SCORE_TILES n tiles from row `row` on.
template <int BYTES>
__device__ __forceinline__ void multiply_scores(int lines_at, int head, int row, Scores& s) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < SCORE_TILES; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = 0.0f;
#pragma unroll 4
    for (int chunk = 0; chunk < BYTES / 16; chunk += 4) {
        uint32_t a[2][4], b[2][2 * SCORE_TILES];  // two steps of k
#pragma unroll
        for (int k = 0; k < 2; ++k)
            ldmatrix_x4(a[k], chunk_of<BYTES>(lines_at, head + lane % 16, chunk + 2 * k + lane / 16));
        if constexpr (SCORE_TILES == 1) {
            uint32_t both[4];
            ldmatrix_x4(both, chunk_of<QK_BYTES>(TILE_AT, row + lane % 8, chunk + lane / 8));
#pragma unroll
            for (int k = 0; k < 2; ++k) b[k][0] = both[2 * k], b[k][1] = both[2 * k + 1];
        } else {
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int j = 0; j < SCORE_TILES; j += 2) {
                    const int line = row + 8 * j + lane / 16 * 8 + lane % 8;
                    uint32_t two[4];
                    ldmatrix_x4(two, chunk_of<QK_BYTES>(TILE_AT, line, chunk + 2 * k + lane / 8 % 2));
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[k][2 * j + i] = two[i];
                }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int j = 0; j < SCORE_TILES; ++j) mma_m16n8k16(s[j], a[k], b[k][2 * j], b[k][2 * j + 1]);
    }
}

// S or dP of a tile, and from both dS and sigma * P, in shared memory.
__device__ __forceinline__ void find_weights(const BackwardParams& p, const Item& item, int tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int part = warp % 4, head = part % M_TILES * 16, row = part / M_TILES * SCORE_TILES * 8;
    float4* dp = reinterpret_cast<float4*>(shared + DP_AT) + part * SCORE_TILES * 32 + lane;
    Scores s;
    if (warp < 4) {
        multiply_scores<QK_BYTES>(Q_AT, head, row, s);
    } else {
        multiply_scores<V_BYTES>(DOUT_AT, head, row, s);
#pragma unroll
        for (int j = 0; j < SCORE_TILES; ++j) dp[32 * j] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
    }
    __syncthreads();
    if (warp < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int line = head + g + 8 * i;
            const float lse = head_numbers(0)[line], sigma = head_numbers(1)[line], e = head_numbers(2)[line];
#pragma unroll
            for (int j = 0; j < SCORE_TILES; ++j) {
                const float4 four = dp[32 * j];
                const float of_dp[2] = {i == 0 ? four.x : four.z, i == 0 ? four.y : four.w};
                float ds[2], weight[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const bool there = tile * TILE_ROWS + row + 8 * j + 2 * t + k < item.count;
                    const float probability = there ? exp2_approx(s[j][2 * i + k] * p.scale_log2 - lse) : 0.0f;
                    ds[k] = p.scale * probability * (sigma * of_dp[k] + e);
                    weight[k] = sigma * probability;
                }
                store_shared_4(weights_of(DS_AT, line, row / 8 + j) + 4 * t, pack_bf16x2(ds[0], ds[1]));
                store_shared_4(weights_of(P_AT, line, row / 8 + j) + 4 * t, pack_bf16x2(weight[0], weight[1]));
            }
        }
    }
    __syncthreads();
}

// B operands of n tiles j and j + 1 of the warp's columns, from 16 lines of k. Of RoPE's one tile: twice the same.
template <int BYTES>
__device__ __forceinline__ void load_columns(int at, int line, int j, uint32_t (&b)[4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunk = j == V_TILES ? D_V / 8 + warp : warp * V_TILES + j + lane / 16;
    ldmatrix_x4_trans(b, chunk_of<BYTES>(at, line + lane / 8 % 2 * 8 + lane % 8, chunk));
}

using Gradient = float[M_TILES][TILES][4];

// dQ += dS.K
__device__ __forceinline__ void multiply_dq(Gradient& dq) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < ROW_TILES; ++k) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], weights_of(DS_AT, 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < TILES; j += 2) {
            uint32_t b[4];
            load_columns<QK_BYTES>(TILE_AT, 16 * k, j, b);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_m16n8k16(dq[m][j], a[m], b[0], b[1]);
                if (j + 1 < TILES) mma_m16n8k16(dq[m][j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// The A operand of dS^T or P^T: 16 rows from 16 * `m` on, 16 heads from `head` on.
__device__ __forceinline__ void load_transposed(int at, int m, int head, uint32_t (&a)[4]) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(a, weights_of(at, head + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
}

// C of the tile's rows from 16 * `m` on, which are written where the list has them.
__device__ __forceinline__ void contribute(const BackwardParams& p, const Item& item, int tile, int m) {
    float c[TILES][4];
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[j][i] = 0.0f;
#pragma unroll
    for (int head = 0; head < HEADS; head += 16) {
        uint32_t ds[4], weight[4];
        load_transposed(DS_AT, m, head, ds);
        load_transposed(P_AT, m, head, weight);
#pragma unroll
        for (int j = 0; j < TILES; j += 2) {
            uint32_t b[4];
            load_columns<QK_BYTES>(Q_AT, head, j, b);
            mma_m16n8k16(c[j], ds, b[0], b[1]);
            if (j + 1 < TILES) mma_m16n8k16(c[j + 1], ds, b[2], b[3]);
            if (j == V_TILES) continue;
            load_columns<V_BYTES>(DOUT_AT, head, j, b);
            mma_m16n8k16(c[j], weight, b[0], b[1]);
            mma_m16n8k16(c[j + 1], weight, b[2], b[3]);
        }
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int entry = tile * TILE_ROWS + 16 * m + g + 8 * i;
        if (entry >= item.count) continue;
        bf16* to = p.contributions + ((int64_t(item.query) * p.topk + entry) * p.blocks + item.block) * D_QK;
#pragma unroll
        for (int j = 0; j < V_TILES; j += 4) {
            uint32_t v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] = pack_bf16x2(c[j + k][2 * i], c[j + k][2 * i + 1]);
            store_16(to + V_COLUMNS * warp + 16 * t + 2 * j, {v[0], v[1], v[2], v[3]});
        }
        if (TILES > V_TILES)
            store_pair(to + D_V + ROPE_COLUMNS * warp + 2 * t, c[TILES - 1][2 * i], c[TILES - 1][2 * i + 1], true);
    }
}

__device__ __forceinline__ void write_dq(const BackwardParams& p, const Item& item, const Gradient& dq) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = item.first_head + 16 * m + g + 8 * i;
            if (head >= p.h_q) continue;
            const int64_t line = item.query * p.dq_token + head * p.dq_head;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const int column = j == V_TILES ? D_V + ROPE_COLUMNS * warp : V_COLUMNS * warp + 8 * j;
                const int64_t at = line + column + 2 * t;
                const float x = dq[m][j][2 * i], y = dq[m][j][2 * i + 1];
                if (p.wide) {
                    store_pair(static_cast<float*>(p.dq) + at, x, y, p.aligned_dq);
                } else {
                    store_pair(static_cast<bf16*>(p.dq) + at, x, y, p.aligned_dq);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const __grid_constant__ BackwardParams p) {
    Item item;
    item.query = blockIdx.x / p.blocks, item.block = blockIdx.x % p.blocks, item.first_head = HEADS * item.block;
    item.rows = p.rows + int64_t(item.query) * p.topk, item.count = p.counts[item.query];
    Gradient dq;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) dq[m][j][i] = 0.0f;
    if (item.count > 0) {
        bring_heads(p, item);
        bring_tile(p, item, 0);
        cp_async_wait<1>();
        __syncthreads();
        find_head_numbers(p, item);
    } else if (p.sink_terms != nullptr && threadIdx.x < HEADS && item.first_head + threadIdx.x < p.h_q) {
        p.sink_terms[int64_t(item.query) * p.h_q + item.first_head + threadIdx.x] = 0.0f;
    }
    const int tiles = ceil_div(item.count, TILE_ROWS);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<0>();
        __syncthreads();
        find_weights(p, item, tile);
        multiply_dq(dq);
        __syncthreads();
        if (tile + 1 < tiles) bring_tile(p, item, tile + 1);
#pragma unroll 1
        for (int m = 0; m < ROW_TILES; ++m) contribute(p, item, tile, m);
    }
    write_dq(p, item, dq);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
