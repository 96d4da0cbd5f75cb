// Sparse attention on mma.sync, for every GPU from sm_80 on: decode and prefill, every cache layout.
//
// A CTA: one query, HEADS heads, one split of its index lists, in tiles of 32 rows. Warps come in pairs:
//
//   pair (share, m)    16 heads, and of every tile the 32 / SHARES rows of its row share
//     warp half 0      Q.K over the even slices of 16 of D_QK     output columns   0 .. 255
//     warp half 1      Q.K over the odd slices                    output columns 256 .. 511
//
//   Q stays in registers (72 a thread), so do the accumulators (128 a thread). Shared memory holds rows only.
//
//   for each tile  all warps   wait for the tile's rows; start the copies of the next ones
//                              FP8: widen the staged rows into the bf16 tile, which is exact; float32 scales stay
//                              apart
//                  a warp      S_half = Q_half . K_half^T           ldmatrix + mma
//                  a pair      S = S_0 + S_1 through shared memory  (then both warps hold all of S)
//                  a warp      online softmax, P in registers       (both warps compute it, P is not exchanged)
//                              O += P . V of its columns            ldmatrix.trans + mma
//                  V32_FP8: float32 scales are folded into S, one scale after the other, and into a copy of P for each
//                  scale of V's columns, so that no scaled row is ever rounded to 16 bits. V4_FP8: scales are powers
//                  of two, and widening is exact
//   at the end     row shares merge through shared memory; the CTA writes the output or its partial result
//
// Barriers: __syncthreads between tiles; PAIR_SUMS + pair, 64 threads: both halves of S are in shared memory.
//
// Shared memory, D_QK 576 (99 KB is the limit of sm_86, 89 and 120):
//                  bf16: 2 stages of 32 rows 73,728   FP8: tile 36,864 + 2 stages of 656 x 32 41,984
//                  partial S 2 KB a warp at 32 rows a share (16,384 for 8 warps), validity of 4 tiles 512, scales 512
// Registers: 255. Some compilers spill a few words of softmax state once a tile (the compile test asserts the bound).
//
// List entries that are invalid are not read: their rows are zeros in the tile and their logits become -inf.
#include "attention/params.cuh"
#include "attention/results.cuh"
#include "attention/work.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "tile/softmax.cuh"
#include "tile/staged_rows.cuh"
#include "tile/warp.cuh"

constexpr int M_TILES = HEADS / 16, SHARES = HEADS == 64 ? 1 : 2;
constexpr int WARPS = 2 * M_TILES * SHARES;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = TILE_ROWS / SHARES;              // rows of a tile that a pair works on
constexpr int N_TILES = ROWS / 8;                     // mma column tiles of S
constexpr int K_STEPS = D_QK / 16 / 2;                // mma steps of a warp's half of Q.K
constexpr int V_TILES = D_V / 2 / 8;                  // mma column tiles of a warp's half of O
constexpr int WARP_ROWS = TILE_ROWS / WARPS;          // rows that a warp copies
constexpr int STAGES = 2, VALID_RING = 4;             // tiles whose rows, and whose validity, are held
constexpr int PREFETCH = Row::FOLDED_SCALES ? 1 : 2;  // fragments that ldmatrix is ahead of mma
constexpr int COPIES_AHEAD = Row::QUANTIZED ? 2 : 1;  // tiles whose copies are under way
static_assert(WARP_ROWS % ROWS_AT_ONCE == 0, "a warp copies four rows at once");

constexpr int PAIR_SUMS = 1;  // named barriers PAIR_SUMS + pair

constexpr int TILE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = Row::QUANTIZED ? TILE_ROWS * Row::STAGED_BYTES : TILE_BYTES;
// Shared memory, in bytes: stages, the tile of widened rows (FP8; bf16 rows are used where they are staged), halves of
// S (float4 [WARPS][N_TILES][32]), validity (int32 [VALID_RING][TILE_ROWS]), scales (float32
// [FOLDED_SCALES][TILE_ROWS]).
constexpr int HALF_BYTES = N_TILES * 32 * 16;
constexpr int TILE_AT = STAGES * STAGE_BYTES;
constexpr int HALVES_AT = TILE_AT + (Row::QUANTIZED ? TILE_BYTES : 0);
constexpr int VALID_AT = HALVES_AT + WARPS * HALF_BYTES;
constexpr int SCALES_AT = VALID_AT + VALID_RING * TILE_ROWS * 4;
constexpr int SHARED_BYTES = SCALES_AT + Row::FOLDED_SCALES * TILE_ROWS * 4;
static_assert(M_TILES * 16 * D_V * 4 <= HALVES_AT || SHARES == 1, "row shares merge in the space of the rows");

extern __shared__ __align__(128) uint8_t shared[];

// --- who a thread is ------------------------------------------------------------------------------------------

// Computed anew wherever it is used: %tid is read through a volatile asm, so that nothing derived from it stays in
// registers, which Q and O fill.
struct Role {
    int warp, lane, share, m, half;
    int g, t;  // place in mma fragments: row g (and g + 8), columns 2t, 2t + 1

    static __device__ __forceinline__ Role here() {
        const int thread = read_thread_index();
        Role r;
        r.warp = thread / 32;
        r.lane = thread % 32;
        r.share = r.warp / (2 * M_TILES);
        r.m = r.warp / 2 % M_TILES;
        r.half = r.warp % 2;
        r.g = r.lane / 4;
        r.t = r.lane % 4;
        return r;
    }

    // The head of fragment row g; that of row g + 8 is 8 more.
    __device__ __forceinline__ int head(const AttentionParams& p) const {
        const int head_tiles = (p.h_q + 16 * M_TILES - 1) / (16 * M_TILES);
        return int(blockIdx.x) % head_tiles * 16 * M_TILES + 16 * m + g;
    }
};

// --- rows in --------------------------------------------------------------------------------------------------

// The CTA's query and split. In shared memory, because registers are full and it is looked at only between tiles.
__shared__ Split work;

__device__ __forceinline__ Split find_work(const AttentionParams& p, Query q, int split) {
    Split w;
    w.query = q;
    const int64_t tiles = find_lists(p, w);
    w.begin = int(tiles * split / p.num_splits);
    w.end = int(tiles * (split + 1) / p.num_splits);
    return w;
}

// The slot of the row of `tile` that this lane copies; -1 where there is none.
__device__ __forceinline__ int32_t load_slot(const AttentionParams& p, int tile) {
    const Role r = Role::here();
    if (r.lane >= WARP_ROWS || tile >= work.end) return -1;
    const bool extra = tile >= work.main_tiles;
    const Source& source = extra ? p.extra : p.main;
    const int entry = (extra ? tile - work.main_tiles : tile) * TILE_ROWS + r.warp * WARP_ROWS + r.lane;
    if (entry >= (extra ? work.extra_length : work.main_length)) return -1;
    const int32_t slot = list_of(source, work.query)[entry];
    return slot >= 0 && slot < source.num_slots ? slot : -1;
}

// Start the copies of a tile's rows into its stage and note which rows are valid. Lane i < WARP_ROWS passes the slot
// of the warp's row i.
__device__ __forceinline__ void copy_tile(const AttentionParams& p, int tile, int32_t slot) {
    const Role r = Role::here();
    if (tile < work.end) {
        const Source& source = tile >= work.main_tiles ? p.extra : p.main;
        const uint32_t stage = shared_address(shared) + (tile - work.begin) % STAGES * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i += ROWS_AT_ONCE) {
            const int row = i + r.lane / 8;
            const int32_t at = __shfl_sync(~0u, slot, row);
            const Row from = at >= 0 ? Row::of_slot(source, at) : Row::none();
            copy_to_stage(from, stage, r.warp * WARP_ROWS + row, r.lane, p.flags & ALIGNED_ROWS);
        }
        if (r.lane < WARP_ROWS) {
            auto* valid = reinterpret_cast<int32_t*>(shared + VALID_AT) + (tile - work.begin) % VALID_RING * TILE_ROWS;
            valid[r.warp * WARP_ROWS + r.lane] = slot >= 0;
        }
    }
    cp_async_commit();
}

// --- Q --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_q_pair(const bf16* q, bool aligned) {
    return aligned ? *reinterpret_cast<const uint32_t*>(q) : q[0] | uint32_t(q[1]) << 16;
}

// A warp's half of Q as A fragments of mma. Heads beyond h_q are zeros.
__device__ __forceinline__ void load_q(const AttentionParams& p, Query query, uint32_t (&q)[K_STEPS][4]) {
    const Role r = Role::here();
    const int head = r.head(p);
    const bf16* row = q_of(p, query, head);
    const bool here = head < p.h_q, below = head + 8 < p.h_q, aligned = p.flags & ALIGNED_Q;
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
        const int column = 16 * (2 * k + r.half) + 2 * r.t;
        q[k][0] = here ? load_q_pair(row + column, aligned) : 0;
        q[k][1] = below ? load_q_pair(row + 8 * p.q_h + column, aligned) : 0;
        q[k][2] = here ? load_q_pair(row + column + 8, aligned) : 0;
        q[k][3] = below ? load_q_pair(row + 8 * p.q_h + column + 8, aligned) : 0;
    }
}

// --- S = Q.K^T ------------------------------------------------------------------------------------------------

// Where a warp's fragments of K are. The matrices of one ldmatrix: rows 0-7 of the two chunks of a slice, then rows
// 8-15 of them. Slice k of this warp is chunks 4k + 2 half and the next; 4k changes the swizzled address by a
// constant, or flips its bit 6.
struct KFragments {
    uint32_t even, odd;

    static __device__ __forceinline__ KFragments of(uint32_t tile) {
        const Role r = Role::here();
        const int row = r.share * ROWS + r.lane / 16 * 8 + r.lane % 8;
        const uint32_t even = chunk_address(tile, row, r.lane / 8 % 2 + 2 * r.half);
        return {even, even ^ 64};
    }

    // The fragments of column tiles 2 pair and 2 pair + 1 in slice k.
    __device__ __forceinline__ void load(uint32_t (&b)[4], int k, int pair) const {
        ldmatrix_x4(b, (k % 2 ? odd : even) + k / 2 * 128 + pair * 16 * ROW_BYTES);
    }
};

// For ROUNDS fragments, load(b, round) PREFETCH rounds ahead of multiply(b, round).
template <int ROUNDS, typename Load, typename Multiply>
__device__ __forceinline__ void prefetched(Load load, Multiply multiply) {
    uint32_t b[PREFETCH + 1][4];
#pragma unroll
    for (int round = 0; round < PREFETCH; ++round) load(b[round], round);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        if (round + PREFETCH < ROUNDS) load(b[(round + PREFETCH) % (PREFETCH + 1)], round + PREFETCH);
        multiply(b[round % (PREFETCH + 1)], round);
    }
}

__device__ __forceinline__ float2 folded_scales(const Role& r, int tile, int n) {
    auto* scales = reinterpret_cast<const float2*>(shared + SCALES_AT + (tile * TILE_ROWS + r.share * ROWS) * 4);
    return scales[4 * n + r.t];
}

__device__ __forceinline__ void clear(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0.0f; }

// A warp's half of S: 16 heads x ROWS rows over every second slice of 16 of D_QK.
__device__ __forceinline__ void multiply_qk(uint32_t tile, const uint32_t (&q)[K_STEPS][4], float (&s)[N_TILES][4]) {
    const KFragments fragments = KFragments::of(tile);
    constexpr int PAIRS = N_TILES / 2;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) clear(s[n]);
    if constexpr (Row::FOLDED_SCALES == 0) {
        prefetched<K_STEPS * PAIRS>(
            [&](uint32_t (&b)[4], int round) { fragments.load(b, round / PAIRS, round % PAIRS); },
            [&](uint32_t (&b)[4], int round) {
                mma_m16n8k16(s[round % PAIRS * 2], q[round / PAIRS], b[0], b[1]);
                mma_m16n8k16(s[round % PAIRS * 2 + 1], q[round / PAIRS], b[2], b[3]);
            });
        return;
    }
    // The sum over the columns of a scale is multiplied by the scale. RoPE has no scale: it comes last and is added as
    // it is.
    constexpr int SCALE_STEPS = SCALE_TILE == 0 ? 1 : SCALE_TILE / 32, NOPE_STEPS = D_NOPE / 32;
    const Role r = Role::here();
    float partial[2][4];
    prefetched<PAIRS * K_STEPS>(
        [&](uint32_t (&b)[4], int round) { fragments.load(b, round % K_STEPS, round / K_STEPS); },
        [&](uint32_t (&b)[4], int round) {
            const int pair = round / K_STEPS, k = round % K_STEPS;
            const bool rope = k >= NOPE_STEPS, first = !rope && k % SCALE_STEPS == 0,
                       last = !rope && (k + 1) % SCALE_STEPS == 0;
            if (first) {
                clear(partial[0]);
                clear(partial[1]);
            }
            mma_m16n8k16(rope ? s[2 * pair] : partial[0], q[k], b[0], b[1]);
            mma_m16n8k16(rope ? s[2 * pair + 1] : partial[1], q[k], b[2], b[3]);
            if (!last) return;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 scale = folded_scales(r, k / SCALE_STEPS, 2 * pair + i);
                s[2 * pair + i][0] += partial[i][0] * scale.x;
                s[2 * pair + i][1] += partial[i][1] * scale.y;
                s[2 * pair + i][2] += partial[i][2] * scale.x;
                s[2 * pair + i][3] += partial[i][3] * scale.y;
            }
        });
}

// Both warps of a pair get the sum of their halves. The __syncthreads of the next tile frees the space.
__device__ __forceinline__ void add_halves(float (&s)[N_TILES][4]) {
    const Role r = Role::here();
    auto* mine = reinterpret_cast<float4*>(shared + HALVES_AT + r.warp * HALF_BYTES) + r.lane;
    auto* other = reinterpret_cast<const float4*>(shared + HALVES_AT + (r.warp ^ 1) * HALF_BYTES) + r.lane;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) mine[32 * n] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
    named_barrier_sync(PAIR_SUMS + r.warp / 2, 64);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const float4 v = other[32 * n];
        s[n][0] += v.x;
        s[n][1] += v.y;
        s[n][2] += v.z;
        s[n][3] += v.w;
    }
}

// --- softmax --------------------------------------------------------------------------------------------------

// Running softmax of a thread's two heads (rows g and g + 8), base 2. `sum` covers this thread's columns only.
struct Softmax {
    float max[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f};
};

// Logits of invalid rows become -inf, the others are brought to base 2.
__device__ __forceinline__ void scale_and_mask(const AttentionParams& p, int ring, float (&s)[N_TILES][4]) {
    const Role r = Role::here();
    auto* valid = reinterpret_cast<const int2*>(shared + VALID_AT + (ring * TILE_ROWS + r.share * ROWS) * 4) + r.t;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const int2 v = valid[4 * n];
        s[n][0] = v.x ? s[n][0] * p.scale_log2 : -INF;
        s[n][1] = v.y ? s[n][1] * p.scale_log2 : -INF;
        s[n][2] = v.x ? s[n][2] * p.scale_log2 : -INF;
        s[n][3] = v.y ? s[n][3] * p.scale_log2 : -INF;
    }
}

// S becomes P = 2^(S - max). Accumulators are rescaled when a maximum rises.
__device__ __forceinline__ void update_softmax(Softmax& state, float (&s)[N_TILES][4], float (&o)[V_TILES][4]) {
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = -INF;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        top = fmaxf(state.max[i], quad_max(top));
        const float base = finite_reference(top);
        rescale[i] = exp2_approx(state.max[i] - base);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            s[n][2 * i] = exp2_approx(s[n][2 * i] - base);
            s[n][2 * i + 1] = exp2_approx(s[n][2 * i + 1] - base);
            sum += s[n][2 * i] + s[n][2 * i + 1];
        }
        state.sum[i] = state.sum[i] * rescale[i] + sum;
        state.max[i] = top;
    }
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            o[v][0] *= rescale[0];
            o[v][1] *= rescale[0];
            o[v][2] *= rescale[1];
            o[v][3] *= rescale[1];
        }
    }
}

// --- O += P.V -------------------------------------------------------------------------------------------------

// P as A fragments of mma, times the folded scales (if any) of the columns of V that share scale number `scale_index`.
__device__ __forceinline__ void round_p(int scale_index, const float (&s)[N_TILES][4],
                                        uint32_t (&prob)[N_TILES / 2][4]) {
    const Role r = Role::here();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (Row::FOLDED_SCALES > 0) scale = folded_scales(r, scale_index, n);
        prob[n / 2][n % 2 * 2] = pack_bf16x2(s[n][0] * scale.x, s[n][1] * scale.y);
        prob[n / 2][n % 2 * 2 + 1] = pack_bf16x2(s[n][2] * scale.x, s[n][3] * scale.y);
    }
}

__device__ __forceinline__ void multiply_pv(uint32_t tile, const float (&s)[N_TILES][4], float (&o)[V_TILES][4]) {
    const Role r = Role::here();
    // The matrices of one ldmatrix: a chunk of rows 0-7 and of rows 8-15, then the next chunk of them. v chunks
    // further on, the swizzled address differs by flips of its bits 4 to 6 and a constant.
    const uint32_t first =
        chunk_address(tile, r.share * ROWS + r.lane / 8 % 2 * 8 + r.lane % 8, r.half * V_TILES + r.lane / 16);
    constexpr int SCALES = Row::FOLDED_SCALES == 0 ? 1 : Row::FOLDED_SCALES / 2;  // of half of the columns
    constexpr int SCALE_TILES = V_TILES / SCALES, ROUNDS = N_TILES / 2 * SCALE_TILES / 2;
#pragma unroll
    for (int scale = 0; scale < SCALES; ++scale) {
        uint32_t prob[N_TILES / 2][4];
        round_p(r.half * SCALES + scale, s, prob);
        const int begin = scale * SCALE_TILES;
        prefetched<ROUNDS>(
            [&](uint32_t (&b)[4], int round) {
                const int k = round / (SCALE_TILES / 2), v = begin + round % (SCALE_TILES / 2) * 2;
                ldmatrix_x4_trans(b, (first ^ (v % 8 * 16)) + v / 8 * 128 + k * 16 * ROW_BYTES);
            },
            [&](uint32_t (&b)[4], int round) {
                const int k = round / (SCALE_TILES / 2), v = begin + round % (SCALE_TILES / 2) * 2;
                mma_m16n8k16(o[v], prob[k], b[0], b[1]);
                mma_m16n8k16(o[v + 1], prob[k], b[2], b[3]);
            });
    }
}

// --- results out ----------------------------------------------------------------------------------------------

// Adds the results of the other row shares to those of share 0, one share after the other, through the space of the
// rows.
__device__ __forceinline__ void merge_shares(Softmax& state, float (&o)[V_TILES][4]) {
    const Role r = Role::here();
    auto* space = reinterpret_cast<float4*>(shared) + (r.m * 2 + r.half) * V_TILES * 32 + r.lane;
    auto* stats = reinterpret_cast<float4*>(shared + HALVES_AT) + (r.m * 2 + r.half) * 32 + r.lane;
#pragma unroll 1
    for (int share = 1; share < SHARES; ++share) {
        __syncthreads();
        if (r.share == share) {
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) space[32 * v] = make_float4(o[v][0], o[v][1], o[v][2], o[v][3]);
            *stats = make_float4(state.max[0], state.max[1], state.sum[0], state.sum[1]);
        }
        __syncthreads();
        if (r.share != 0) continue;
        const float4 other = *stats;
        float mine[2], theirs[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float their_max = i ? other.y : other.x, top = fmaxf(state.max[i], their_max);
            mine[i] = exp2_approx(state.max[i] - finite_reference(top));
            theirs[i] = exp2_approx(their_max - finite_reference(top));
            state.max[i] = top;
            state.sum[i] = state.sum[i] * mine[i] + (i ? other.w : other.z) * theirs[i];
        }
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            const float4 w = space[32 * v];
            o[v][0] = o[v][0] * mine[0] + w.x * theirs[0];
            o[v][1] = o[v][1] * mine[0] + w.y * theirs[0];
            o[v][2] = o[v][2] * mine[1] + w.z * theirs[1];
            o[v][3] = o[v][3] * mine[1] + w.w * theirs[1];
        }
    }
}

// The results of a thread's two heads: the output, or the partial result of a split for combine.cu.
__device__ __forceinline__ void write_results(const AttentionParams& p, Query q, int split, const Softmax& state,
                                              const float (&o)[V_TILES][4]) {
    const Role r = Role::here();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(state.sum[i]);
        const int head = r.head(p) + 8 * i;
        if (head >= p.h_q) continue;
        const HeadResult result = {state.max[i], log2_sum_exp(state.max[i], sum)};
        const bool writes_statistics = r.half == 0 && r.t == 0;
        const int column = r.half * (D_V / 2) + 2 * r.t;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (p.num_splits == 1) {
            if (sum != 0.0f) factor *= sink_factor(p, head, result.lse);
#pragma unroll
            for (int v = 0; v < V_TILES; ++v)
                write_output(p, q, head, column + 8 * v, o[v][2 * i] * factor, o[v][2 * i + 1] * factor);
            if (writes_statistics) write_statistics(p, q, head, result);
            continue;
        }
        const int64_t at = partial_index(p, split, q, head);
        if (writes_statistics) write_partial_statistics(p, at, result);
        if (result.lse == -INF) continue;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v)
            *reinterpret_cast<float2*>(partial_out(p, at) + column + 8 * v) =
                make_float2(o[v][2 * i] * factor, o[v][2 * i + 1] * factor);
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x = query * head tiles + head tile, y = split
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    portable(const __grid_constant__ AttentionParams p) {
    const int head_tiles = (p.h_q + 16 * M_TILES - 1) / (16 * M_TILES);
    if (threadIdx.x == 0) work = find_work(p, query_of(p, blockIdx.x / head_tiles), blockIdx.y);
    __syncthreads();

#pragma unroll
    for (int i = 0; i < COPIES_AHEAD; ++i) copy_tile(p, work.begin + i, load_slot(p, work.begin + i));
    int32_t next = load_slot(p, work.begin + COPIES_AHEAD);

    uint32_t q[K_STEPS][4];
    load_q(p, work.query, q);
    float o[V_TILES][4];
#pragma unroll
    for (int v = 0; v < V_TILES; ++v) clear(o[v]);
    Softmax softmax;

#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) {
        const int i = tile - work.begin;
        const uint32_t stage = shared_address(shared) + i % STAGES * STAGE_BYTES;
        const uint32_t rows = Row::QUANTIZED ? shared_address(shared) + TILE_AT : stage;
        cp_async_wait<COPIES_AHEAD - 1>();
        __syncthreads();
        if constexpr (Row::QUANTIZED) {
            dequantize_stage<TILE_ROWS, THREADS>(stage, rows, shared_address(shared) + SCALES_AT);
            __syncthreads();
        }
        copy_tile(p, tile + COPIES_AHEAD, next);
        next = load_slot(p, tile + COPIES_AHEAD + 1);

        float s[N_TILES][4];
        multiply_qk(rows, q, s);
        add_halves(s);
        scale_and_mask(p, i % VALID_RING, s);
        update_softmax(softmax, s, o);
        multiply_pv(rows, s, o);
    }
    cp_async_wait<0>();
    if constexpr (SHARES > 1) merge_shares(softmax, o);
    if (Role::here().share == 0) write_results(p, work.query, blockIdx.y, softmax, o);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
