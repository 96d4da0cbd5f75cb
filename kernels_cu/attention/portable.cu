// Sparse attention on mma.sync, for every GPU from sm_80 on, prefill and decode, every cache layout.
//
// One block: one query, 16 * M_TILES heads, one split of its index list, in steps of 32 rows. Warps come in pairs:
//
//   pair (group, m)    16 heads and, of every step, the 32 / GROUPS rows of its group
//     warp half 0      Q.K over the even slices of 16 of D_QK     output columns   0 .. 255
//     warp half 1      Q.K over the odd slices                    output columns 256 .. 511
//
//   Q stays in registers (72 a thread), so do the accumulators (128 a thread); shared memory holds rows only.
//
//   a step   all warps    wait for the step's rows; start the copies of the next ones
//                         FP8: widen the staged rows into the bf16 tile, which is exact; float32 scales stay apart
//            a warp       S_half = Q_half . K_half^T           ldmatrix + mma
//            a pair       S = S_0 + S_1 through shared memory  (both halves then hold all of S)
//            a warp       online softmax, P in registers       (computed by both, no P exchange)
//                         O += P . V of its columns            ldmatrix.trans + mma
//            float32 scales (V32_FP8) are folded into S, tile by tile of Q.K, and into a copy of P for each tile of V's
//            columns, so no scaled row is ever rounded to 16 bits; power-of-two scales (V4_FP8) widen exactly
//   at the end            groups merge through shared memory; the block writes out or its partial result
//
// Shared memory, D_QK 576 (99 KB is the limit of sm_86, 89 and 120):
//            bf16: 2 stages of 32 rows 73,728   FP8: tile 36,864 + 2 stages of 656 x 32 41,984
//            partial S 2 KB a warp at 32 rows a group (16,384 for 8 warps), validity of 4 steps 512, scales 512
// Registers: 255; some compilers spill a few words of softmax state once a step (bound asserted by the compile test).
//
// Entries that are invalid are not read: their rows are zeros in the tile and their logits become -inf.
#include "attention/params.cuh"
#include "rows/reader.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/finish.cuh"
#include "tile/quad.cuh"

constexpr int M_TILES = HEADS / 16, GROUPS = HEADS == 64 ? 1 : 2;
constexpr int WARPS = 2 * M_TILES * GROUPS;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = TILE_ROWS / GROUPS;   // rows of a step that a pair works on
constexpr int N_TILES = ROWS / 8;          // mma column tiles of S
constexpr int K_STEPS = D_QK / 16 / 2;     // mma steps of a warp's half of Q.K
constexpr int V_TILES = D_V / 2 / 8;       // mma column tiles of a warp's half of O
constexpr int WARP_ROWS = TILE_ROWS / WARPS;  // rows a warp gathers
constexpr int VALID_RING = 4;
constexpr int PREFETCH = Rows::FOLDED_SCALES ? 1 : 2;  // fragments that ldmatrix is ahead of mma
static_assert(WARP_ROWS % ROWS_AT_ONCE == 0, "a warp gathers four rows at once");

constexpr int TILE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = Rows::QUANTIZED ? TILE_ROWS * Rows::STAGED_BYTES : TILE_BYTES;
constexpr int STAGES = 2;
constexpr int TILE_AT = STAGES * STAGE_BYTES;  // quantized layouts: the tile stands behind the stages
constexpr int EXCHANGE_AT = TILE_AT + (Rows::QUANTIZED ? TILE_BYTES : 0);
constexpr int EXCHANGE_BYTES = N_TILES * 32 * 16;  // a warp's partial S
constexpr int VALID_AT = EXCHANGE_AT + WARPS * EXCHANGE_BYTES;
constexpr int SCALES_AT = VALID_AT + VALID_RING * TILE_ROWS * 4;  // [Rows::FOLDED_SCALES][TILE_ROWS] float32
constexpr int SHARED_BYTES = SCALES_AT + Rows::FOLDED_SCALES * TILE_ROWS * 4;
static_assert(M_TILES * 16 * D_V * 4 <= EXCHANGE_AT || GROUPS == 1, "groups merge in the space of the rows");

extern __shared__ __align__(128) uint8_t shared[];

// --- who a thread is ------------------------------------------------------------------------------------------

// Made anew wherever it is used: %tid is read through a volatile asm, so that nothing derived from it stays in
// registers, which Q and O fill.
struct Role {
    int warp, lane, group, m, half;
    int g, t;  // place in mma fragments: row g (and g + 8), columns 2t, 2t + 1

    static __device__ __forceinline__ Role here() {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        Role r;
        r.warp = thread / 32;
        r.lane = thread % 32;
        r.group = r.warp / (2 * M_TILES);
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

// A block's query and its steps: those of the main list, then those of the extra list. In shared memory, because
// registers are full and it is looked at only between steps.
struct Work {
    Query query;
    int main_length, extra_length, main_steps, begin, end;
};
__shared__ Work work;

__device__ __forceinline__ Work find_work(const AttentionParams& p, Query q, int split) {
    Work s;
    s.query = q;
    s.main_length = list_length(p.main, q.b);
    s.extra_length = p.extra.topk == 0 ? 0 : list_length(p.extra, q.b);
    s.main_steps = (s.main_length + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t total = s.main_steps + (s.extra_length + TILE_ROWS - 1) / TILE_ROWS;
    s.begin = int(total * split / p.num_splits);
    s.end = int(total * (split + 1) / p.num_splits);
    return s;
}

// The entry of the index list for the row of `step` that this lane is to look after; -1 where there is none.
__device__ __forceinline__ int32_t load_index(const AttentionParams& p, int step) {
    const Role r = Role::here();
    if (r.lane >= WARP_ROWS || step >= work.end) return -1;
    const bool extra = step >= work.main_steps;
    const Source& source = extra ? p.extra : p.main;
    const int entry = (extra ? step - work.main_steps : step) * TILE_ROWS + r.warp * WARP_ROWS + r.lane;
    if (entry >= (extra ? work.extra_length : work.main_length)) return -1;
    const int32_t slot = source.indices[work.query.b * source.index_stride_b + work.query.s * source.index_stride_s + entry];
    return slot >= 0 && slot < source.num_slots ? slot : -1;
}

// Start the copies of a step's rows into its stage and note which are valid. Lane i < WARP_ROWS brings the slot of the
// warp's row i.
__device__ __forceinline__ void gather_step(const AttentionParams& p, int step, int32_t slot) {
    const Role r = Role::here();
    if (step < work.end) {
        const Source& source = step >= work.main_steps ? p.extra : p.main;
        const uint32_t stage = shared_address(shared) + (step - work.begin) % STAGES * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i += ROWS_AT_ONCE) {
            const int row = i + r.lane / 8;
            const int32_t at = __shfl_sync(~0u, slot, row);
            const Rows from = at >= 0 ? Rows::row_of(source, at) : Rows::none();
            from.copy(stage, r.warp * WARP_ROWS + row, r.lane, p.flags & ALIGNED_ROWS);
        }
        if (r.lane < WARP_ROWS) {
            auto* valid = reinterpret_cast<int32_t*>(shared + VALID_AT) + (step - work.begin) % VALID_RING * TILE_ROWS;
            valid[r.warp * WARP_ROWS + r.lane] = slot >= 0;
        }
    }
    cp_async_commit();
}

// --- Q --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_q_pair(const bf16* q, bool aligned) {
    return aligned ? *reinterpret_cast<const uint32_t*>(q) : q[0] | uint32_t(q[1]) << 16;
}

// A warp's half of Q as mma A fragments; heads beyond h_q are zeros.
__device__ __forceinline__ void load_q(const AttentionParams& p, Query query, uint32_t (&q)[K_STEPS][4]) {
    const Role r = Role::here();
    const int head = r.head(p);
    const bf16* row = p.q + query.b * p.q_b + query.s * p.q_s + head * p.q_h;
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

// Where a warp's fragments of K are. Matrices of one ldmatrix: rows 0-7 of the two chunks of a slice, then rows 8-15 of
// them. Slice k of this warp is chunks 4k + 2 half and the next; 4k changes the swizzled address by a constant, or by a
// flip of its bit 6.
struct KFragments {
    uint32_t even, odd;

    static __device__ __forceinline__ KFragments of(uint32_t tile) {
        const Role r = Role::here();
        const int row = r.group * ROWS + r.lane / 16 * 8 + r.lane % 8;
        const uint32_t even = chunk_address(tile, row, r.lane / 8 % 2 + 2 * r.half);
        return {even, even ^ 64};
    }

    // Of slice k, the fragments of column tiles 2 pair and 2 pair + 1.
    __device__ __forceinline__ void load(uint32_t (&b)[4], int k, int pair) const {
        ldmatrix_x4(b, (k % 2 ? odd : even) + k / 2 * 128 + pair * 16 * ROW_BYTES);
    }
};

// Multiply `TURNS` fragments that `load(b, turn)` brings, PREFETCH turns ahead of `multiply(b, turn)`.
template <int TURNS, typename Load, typename Multiply>
__device__ __forceinline__ void prefetched(Load load, Multiply multiply) {
    uint32_t b[PREFETCH + 1][4];
#pragma unroll
    for (int turn = 0; turn < PREFETCH; ++turn) load(b[turn], turn);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        if (turn + PREFETCH < TURNS) load(b[(turn + PREFETCH) % (PREFETCH + 1)], turn + PREFETCH);
        multiply(b[turn % (PREFETCH + 1)], turn);
    }
}

__device__ __forceinline__ float2 folded_scales(const Role& r, int tile, int n) {
    auto* scales = reinterpret_cast<const float2*>(shared + SCALES_AT + (tile * TILE_ROWS + r.group * ROWS) * 4);
    return scales[4 * n + r.t];
}

__device__ __forceinline__ void clear(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0.0f; }

// A warp's half of S: 16 heads x ROWS rows over every second slice of 16 of D_QK.
__device__ __forceinline__ void multiply_qk(uint32_t tile, const uint32_t (&q)[K_STEPS][4], float (&s)[N_TILES][4]) {
    const KFragments fragments = KFragments::of(tile);
    constexpr int PAIRS = N_TILES / 2;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) clear(s[n]);
    if constexpr (Rows::FOLDED_SCALES == 0) {
        prefetched<K_STEPS * PAIRS>(
            [&](uint32_t(&b)[4], int turn) { fragments.load(b, turn / PAIRS, turn % PAIRS); },
            [&](uint32_t(&b)[4], int turn) {
                mma_m16n8k16(s[turn % PAIRS * 2], q[turn / PAIRS], b[0], b[1]);
                mma_m16n8k16(s[turn % PAIRS * 2 + 1], q[turn / PAIRS], b[2], b[3]);
            });
        return;
    }
    // The sum over a scale's values, then times the scale; RoPE, which has none, comes last and is added as it is.
    constexpr int TILE_STEPS = SCALE_TILE == 0 ? 1 : SCALE_TILE / 32, NOPE_STEPS = D_NOPE / 32;
    const Role r = Role::here();
    float part[2][4];
    prefetched<PAIRS * K_STEPS>(
        [&](uint32_t(&b)[4], int turn) { fragments.load(b, turn % K_STEPS, turn / K_STEPS); },
        [&](uint32_t(&b)[4], int turn) {
            const int pair = turn / K_STEPS, k = turn % K_STEPS;
            const bool rope = k >= NOPE_STEPS, first = !rope && k % TILE_STEPS == 0, last = !rope && (k + 1) % TILE_STEPS == 0;
            if (first) {
                clear(part[0]);
                clear(part[1]);
            }
            mma_m16n8k16(rope ? s[2 * pair] : part[0], q[k], b[0], b[1]);
            mma_m16n8k16(rope ? s[2 * pair + 1] : part[1], q[k], b[2], b[3]);
            if (!last) return;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 scale = folded_scales(r, k / TILE_STEPS, 2 * pair + i);
                s[2 * pair + i][0] += part[i][0] * scale.x;
                s[2 * pair + i][1] += part[i][1] * scale.y;
                s[2 * pair + i][2] += part[i][2] * scale.x;
                s[2 * pair + i][3] += part[i][3] * scale.y;
            }
        });
}

// Both warps of a pair end up with the sum of their halves. The step's __syncthreads lets the space be used again.
__device__ __forceinline__ void add_halves(float (&s)[N_TILES][4]) {
    const Role r = Role::here();
    auto* mine = reinterpret_cast<float4*>(shared + EXCHANGE_AT + r.warp * EXCHANGE_BYTES) + r.lane;
    auto* other = reinterpret_cast<const float4*>(shared + EXCHANGE_AT + (r.warp ^ 1) * EXCHANGE_BYTES) + r.lane;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) mine[32 * n] = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
    named_barrier_sync(1 + r.warp / 2, 64);
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

// Logits of invalid rows to -inf, the others to base 2.
__device__ __forceinline__ void scale_and_mask(const AttentionParams& p, int ring, float (&s)[N_TILES][4]) {
    const Role r = Role::here();
    auto* valid = reinterpret_cast<const int2*>(shared + VALID_AT + (ring * TILE_ROWS + r.group * ROWS) * 4) + r.t;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const int2 v = valid[4 * n];
        s[n][0] = v.x ? s[n][0] * p.scale_log2 : -INF;
        s[n][1] = v.y ? s[n][1] * p.scale_log2 : -INF;
        s[n][2] = v.x ? s[n][2] * p.scale_log2 : -INF;
        s[n][3] = v.y ? s[n][3] * p.scale_log2 : -INF;
    }
}

// What is subtracted in the exponent: the maximum, but 0 while there is no valid row (-inf - -inf is NaN).
__device__ __forceinline__ float finite_max(float max) { return max == -INF ? 0.0f : max; }

// S becomes P = 2^(S - max); the accumulators follow when a maximum rises.
__device__ __forceinline__ void update_softmax(Softmax& state, float (&s)[N_TILES][4], float (&o)[V_TILES][4]) {
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = -INF;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        top = fmaxf(state.max[i], quad_max(top));
        const float base = finite_max(top);
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

// P as mma A fragments, times the folded scales of one tile of V's columns where there are such.
__device__ __forceinline__ void round_p(int scale_tile, const float (&s)[N_TILES][4], uint32_t (&prob)[N_TILES / 2][4]) {
    const Role r = Role::here();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (Rows::FOLDED_SCALES > 0) scale = folded_scales(r, scale_tile, n);
        prob[n / 2][n % 2 * 2] = pack_bf16x2(s[n][0] * scale.x, s[n][1] * scale.y);
        prob[n / 2][n % 2 * 2 + 1] = pack_bf16x2(s[n][2] * scale.x, s[n][3] * scale.y);
    }
}

__device__ __forceinline__ void multiply_pv(uint32_t tile, const float (&s)[N_TILES][4], float (&o)[V_TILES][4]) {
    const Role r = Role::here();
    // Matrices of one ldmatrix: a chunk of rows 0-7 and of rows 8-15, then the next chunk of them. Chunk v further on,
    // the swizzled address differs by a flip of its bits 5 and 6 and a constant.
    const uint32_t first =
        chunk_address(tile, r.group * ROWS + r.lane / 8 % 2 * 8 + r.lane % 8, r.half * V_TILES + r.lane / 16);
    constexpr int PARTS = Rows::FOLDED_SCALES == 0 ? 1 : Rows::FOLDED_SCALES / 2;  // scales of a half of the columns
    constexpr int PART_TILES = V_TILES / PARTS, TURNS = N_TILES / 2 * PART_TILES / 2;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        uint32_t prob[N_TILES / 2][4];
        round_p(r.half * PARTS + part, s, prob);
        const int begin = part * PART_TILES;
        prefetched<TURNS>(
            [&](uint32_t(&b)[4], int turn) {
                const int k = turn / (PART_TILES / 2), v = begin + turn % (PART_TILES / 2) * 2;
                ldmatrix_x4_trans(b, (first ^ (v % 8 * 16)) + v / 8 * 128 + k * 16 * ROW_BYTES);
            },
            [&](uint32_t(&b)[4], int turn) {
                const int k = turn / (PART_TILES / 2), v = begin + turn % (PART_TILES / 2) * 2;
                mma_m16n8k16(o[v], prob[k], b[0], b[1]);
                mma_m16n8k16(o[v + 1], prob[k], b[2], b[3]);
            });
    }
}

// --- results out ----------------------------------------------------------------------------------------------

// Add the other groups' results to those of group 0: all of them through the space that held the rows.
__device__ __forceinline__ void merge_groups(Softmax& state, float (&o)[V_TILES][4]) {
    const Role r = Role::here();
    auto* space = reinterpret_cast<float4*>(shared) + (r.m * 2 + r.half) * V_TILES * 32 + r.lane;
    auto* stats = reinterpret_cast<float4*>(shared + EXCHANGE_AT) + (r.m * 2 + r.half) * 32 + r.lane;
#pragma unroll 1
    for (int group = 1; group < GROUPS; ++group) {
        __syncthreads();
        if (r.group == group) {
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) space[32 * v] = make_float4(o[v][0], o[v][1], o[v][2], o[v][3]);
            *stats = make_float4(state.max[0], state.max[1], state.sum[0], state.sum[1]);
        }
        __syncthreads();
        if (r.group != 0) continue;
        const float4 other = *stats;
        float mine[2], theirs[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float their_max = i ? other.y : other.x, top = fmaxf(state.max[i], their_max);
            mine[i] = exp2_approx(state.max[i] - finite_max(top));
            theirs[i] = exp2_approx(their_max - finite_max(top));
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

// The results of a thread's two heads: final ones, or a split's partial ones for combine.cu.
__device__ __forceinline__ void write_results(
    const AttentionParams& p, Query q, int split, const Softmax& state, const float (&o)[V_TILES][4]) {
    const Role r = Role::here();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(state.sum[i]);
        const int head = r.head(p) + 8 * i;
        if (head >= p.h_q) continue;
        const HeadResult result = {state.max[i], sum == 0.0f ? -INF : state.max[i] + log2_approx(sum)};
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
        const int64_t at = (int64_t(split) * p.num_queries + q.index) * p.h_q + head;
        if (writes_statistics) {
            p.part_lse[at] = result.lse;
            if (p.part_max != nullptr) p.part_max[at] = result.max;
        }
        if (result.lse == -INF) continue;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v)
            *reinterpret_cast<float2*>(p.part_out + at * D_V + column + 8 * v) =
                make_float2(o[v][2 * i] * factor, o[v][2 * i + 1] * factor);
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x = query * head tiles + head tile, y = split
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) portable(const __grid_constant__ AttentionParams p) {
    const int head_tiles = (p.h_q + 16 * M_TILES - 1) / (16 * M_TILES);
    if (threadIdx.x == 0) work = find_work(p, query_of(p, blockIdx.x / head_tiles), blockIdx.y);
    __syncthreads();

    constexpr int AHEAD = Rows::QUANTIZED ? 2 : 1;  // steps whose copies are under way
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) gather_step(p, work.begin + i, load_index(p, work.begin + i));
    int32_t next = load_index(p, work.begin + AHEAD);

    uint32_t q[K_STEPS][4];
    load_q(p, work.query, q);
    float o[V_TILES][4];
#pragma unroll
    for (int v = 0; v < V_TILES; ++v) clear(o[v]);
    Softmax softmax;

#pragma unroll 1
    for (int step = work.begin; step < work.end; ++step) {
        const int i = step - work.begin;
        const uint32_t stage = shared_address(shared) + i % STAGES * STAGE_BYTES;
        const uint32_t tile = Rows::QUANTIZED ? shared_address(shared) + TILE_AT : stage;
        cp_async_wait<AHEAD - 1>();
        __syncthreads();
        if constexpr (Rows::QUANTIZED) {
            Rows::dequantize<TILE_ROWS, THREADS>(stage, tile, shared_address(shared) + SCALES_AT);
            __syncthreads();
        }
        gather_step(p, step + AHEAD, next);
        next = load_index(p, step + AHEAD + 1);

        float s[N_TILES][4];
        multiply_qk(tile, q, s);
        add_halves(s);
        scale_and_mask(p, i % VALID_RING, s);
        update_softmax(softmax, s, o);
        multiply_pv(tile, s, o);
    }
    cp_async_wait<0>();
    if constexpr (GROUPS > 1) merge_groups(softmax, o);
    if (Role::here().group == 0) write_results(p, work.query, blockIdx.y, softmax, o);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
