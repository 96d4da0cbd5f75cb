// The backward of sparse attention on mma.sync, for every GPU from sm_80 on. It computes dQ, and what a query
// contributes to the gradient of each of its rows. Before it, backward_lists.cu has sorted the query's list; after it,
// backward_rows.cu adds up the contributions to each row.
//
//   grid   x query * head blocks + head block
//   CTA    8 warps: a query, HEADS heads, all its rows in tiles of TILE_ROWS. Shared memory holds Q, dO, and one tile
//          at a time. The tile's rows are K; their first D_V columns are V.
//
//   wait for the tile
//   warps 0-3  S = Q.K^T             warps 4-7  dP = dO.V^T
//                  <--- dP, float32, through shared memory
//              P = exp2(S * scale - lse),  dS = sm_scale * P * (sigma * dP + e);  stored: dS, sigma * P as bf16
//   all warps  dQ += dS.K            a warp has all heads x 64 + 8 columns
//   start copies of the next tile
//   all warps  C = dS^T.Q + (sigma * P)^T.dO    contributions of all rows x 64 + 8 columns, written as bf16
//
// Each head has two numbers: sigma = 1 / (1 + exp(sink - lse)), e = d_lse - sigma * sum(out * dO). They are computed
// while the first tile is copied.
//
// Rows beyond the list's end are zeros, and so is their P. Heads beyond the last are zeros, and their lse is infinite.
// Sums over rows, columns and heads have a fixed order, so a query's bits depend on its own arguments only.
//
// Shared memory, bytes: Q 2 * HEADS * D_QK, dO 2 * HEADS * D_V, a tile 2 * TILE_ROWS * D_QK; dP 4, dS and P 2 each,
// times HEADS * TILE_ROWS; 12 * HEADS. 64 heads of 576: with 16 rows 166,656, with 32 rows 193,280.
#include "attention/backward.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "tile/swizzle.cuh"

constexpr int WARPS = CONTRIBUTING_WARPS, THREADS = 32 * WARPS;
constexpr int M_TILES = HEADS / 16, ROW_TILES = TILE_ROWS / 16;                        // mma tiles of heads, of rows
constexpr int SCORE_GROUPS = 4 / M_TILES, SCORE_TILES = TILE_ROWS / 8 / SCORE_GROUPS;  // n tiles of a score warp
constexpr int V_TILES = V_COLUMNS / 8, TILES = V_TILES + ROPE_COLUMNS / 8;             // n tiles of a warp's columns
static_assert(M_TILES * SCORE_GROUPS == 4 && (SCORE_TILES == 1 || SCORE_TILES % 2 == 0), "");

constexpr int QK_BYTES = 2 * D_QK, V_BYTES = 2 * D_V;  // of a line
constexpr int Q_AT = 0, DOUT_AT = Q_AT + HEADS * QK_BYTES, TILE_AT = DOUT_AT + HEADS * V_BYTES,
              DP_AT = TILE_AT + TILE_ROWS * QK_BYTES, DS_AT = DP_AT + 4 * HEADS * TILE_ROWS,
              P_AT = DS_AT + 2 * HEADS * TILE_ROWS, HEADS_AT = P_AT + 2 * HEADS * TILE_ROWS,
              SHARED_BYTES = HEADS_AT + int(sizeof(HeadNumbers));
static_assert(SHARED_BYTES <= SHARED_LIMIT && DOUT_AT % 128 == 0 && TILE_AT % 128 == 0 && DP_AT % 128 == 0, "");

constexpr int CTAS = 2 * SHARED_BYTES <= 163 * 1024 ? 2 : 1;  // of an SM

extern __shared__ __align__(128) uint8_t shared[];

__device__ __forceinline__ HeadNumbers& numbers() { return *reinterpret_cast<HeadNumbers*>(shared + HEADS_AT); }

// The address of a 16-byte chunk of a line of Q or the tile (BYTES = QK_BYTES) or dO.
template <int BYTES>
__device__ __forceinline__ uint32_t chunk_of(int at, int line, int chunk) {
    return shared_address(shared) + at + line * BYTES + swizzle(line, chunk);
}

// The address of 8 rows of a head in dS or P. Their lines are short; eight neighbouring lines hit all banks.
__device__ __forceinline__ uint32_t weights_of(int at, int head, int chunk) {
    constexpr int BYTES = 2 * TILE_ROWS, CHUNKS = BYTES / 16;
    return shared_address(shared) + at + head * BYTES + (chunk ^ (head / (8 / CHUNKS) % CHUNKS)) * 16;
}

// Starts to copy LINES lines of BYTES bytes; an equal number of threads copies each line. `from(line)` is a line's
// address, null for zeros.
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

__device__ __forceinline__ void bring_tile(const BackwardParams& p, const Item& item, int tile) {
    bring<TILE_ROWS, QK_BYTES>(TILE_AT, p.aligned, [&](int line) { return item.row(p, tile * TILE_ROWS + line); });
    cp_async_commit();
}

__device__ __forceinline__ void bring_heads(const BackwardParams& p, const Item& item) {
    bring<HEADS, QK_BYTES>(Q_AT, p.aligned, [&](int line) { return item.q(p, line); });
    bring<HEADS, V_BYTES>(DOUT_AT, p.aligned, [&](int line) { return item.dout(p, line); });
    cp_async_commit();
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

// Computes S and dP of a tile, and from them dS and sigma * P in shared memory.
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
            const float lse = numbers().lse[line], sigma = numbers().sigma[line], e = numbers().e[line];
#pragma unroll
            for (int j = 0; j < SCORE_TILES; ++j) {
                const float4 four = dp[32 * j];
                const float of_dp[2] = {i == 0 ? four.x : four.z, i == 0 ? four.y : four.w};
                Weights w[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const bool there = tile * TILE_ROWS + row + 8 * j + 2 * t + k < item.count;
                    w[k] = weights_from(p, there, s[j][2 * i + k], of_dp[k], lse, sigma, e);
                }
                store_shared_4(weights_of(DS_AT, line, row / 8 + j) + 4 * t, pack_bf16x2(w[0].ds, w[1].ds));
                store_shared_4(weights_of(P_AT, line, row / 8 + j) + 4 * t, pack_bf16x2(w[0].p, w[1].p));
            }
        }
    }
    __syncthreads();
}

// Loads B operands of n tiles j and j + 1 of the warp's columns, for 16 lines of k. RoPE has one n tile, which is
// loaded twice.
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

// Loads the A operand of dS^T or P^T: 16 rows from 16 * `m` on, 16 heads from `head` on.
__device__ __forceinline__ void load_transposed(int at, int m, int head, uint32_t (&a)[4]) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(a, weights_of(at, head + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
}

// Computes C of the tile's rows 16 * `m` .. + 15, and writes it for rows that the list has.
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
        bf16* to = item.contribution(p, entry);
        uint32_t pairs[V_TILES];
#pragma unroll
        for (int j = 0; j < V_TILES; ++j) pairs[j] = pack_bf16x2(c[j][2 * i], c[j][2 * i + 1]);
        store_contribution(to + V_COLUMNS * warp, t, pairs);
        if (TILES > V_TILES)  // column 8 * warp + 2 t of RoPE's
            store_pair(to + D_V + place_of_pair(warp, t), c[TILES - 1][2 * i], c[TILES - 1][2 * i + 1], true);
    }
}

__device__ __forceinline__ void write_dq(const BackwardParams& p, const Item& item, const Gradient& dq) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Line line = item.line(p, 16 * m + g + 8 * i);
            if (line.head >= p.h_q) continue;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const int column = j == V_TILES ? D_V + ROPE_COLUMNS * warp : V_COLUMNS * warp + 8 * j;
                store_dq(p, line, column + 2 * t, dq[m][j][2 * i], dq[m][j][2 * i + 1]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) backward(const __grid_constant__ BackwardParams p) {
    const Item item = Item::of_cta(p);
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
        find_head_numbers(p, item, numbers(), p.aligned,
                          [](int line, int chunk) { return load_shared_16(chunk_of<V_BYTES>(DOUT_AT, line, chunk)); });
    } else {
        leave_no_terms(p, item);
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
