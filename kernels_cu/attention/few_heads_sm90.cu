// Sparse attention of few heads on Hopper, V32_FP8 and bf16 rows, decode and prefill: rows go from the ring into
// registers.
//
// Heads are the N side of the products, 8, 16 or 32 of them, so nothing is padded to 64. Rows or value columns are the
// M side and come from registers, widened on the way (tile/fragments.cuh). So shared memory holds rows as they lie in
// the cache and nothing else:
//
//   S^T = K . Q^T     a warp: 16 rows x heads        A = its own rows            d / 16 steps of m16n8k16
//   O^T = V^T . P^T   a warp: 128 columns x heads    A = pairs of rows a column  8 mma tiles x 4 steps
//
//   4 producer warps       each a quarter of every tile of 64 rows, by bulk copies, as far ahead as its ring of STAGES x
//                          8 rows reaches. Each looks at all entries of a tile: tiles in which none is valid are left
//                          out, by all four alike
//   CONSUMERS warpgroups   (3; 2 for 32 heads) take tiles in turn, each with a softmax of its own:
//     S^T                  V32_FP8: the 128 columns of one scale after the other, times the row's float32 scale, so
//                          that no scaled value is ever rounded
//     P^T                  to shared memory. V32_FP8: f16, a copy for each scale, relative to a reference for each
//                          head and scale
//     vote                 if a value is far above its reference, references rise, O^T follows, and P^T is computed
//                          again
//     O^T += V^T . P^T     quarter after quarter; each stage is released when it has been read
//
//   While one warpgroup waits, the others multiply. At the end they merge their O^T in shared memory.
//
// DIVISION SPLITS: the CTAs of a cluster merge their results (merge.cuh). Splits that do not fit a cluster lie along
// gridDim.y and are merged by combine.cu.
//
// DIVISION SHARES: all rows of the call are divided evenly over the CTAs, each of which works on several splits. The
// warpgroups then merge in the space of Q and P, while the producer warps fill the rings with the next split's rows.
//
//   full[quarter][..]       copies done          bulk copies, and one arrival for `told`; two barriers a stage
//   empty[quarter][stage]   stage released       the 4 warps of the warpgroup that has the tile
//   WARPGROUP_SYNC + w      named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC           named: all consumer threads
//
// Products are mma.sync: wgmma with A in registers takes a warpgroup 60 cycles or more whatever N is, and its fences
// keep the next fragments from being widened in the meantime.
//
// Shared memory: Q heads x D_QK x 2; P CONSUMERS x copies x heads x 128; 4 rings of STAGES x 8 staged rows of 656
// bytes (bf16: 2 x D_QK + 16); statistics and mbarriers.
// Registers: 152 (32 heads: 232) a consumer thread, 56 (40) a producer thread, together 512 x 128 (384 x 168):
// setmaxnreg hands out no more than the launch had.
// What was tried, what bounds it: docs/kernels/few_heads_sm90.md.
#include "attention/division/division.cuh"
#include "attention/division/merge.cuh"
#include "attention/division/results.cuh"
#include "attention/role.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/limits.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "tile/bulk_row.cuh"
#include "tile/fragments.cuh"
#include "tile/heads.cuh"
#include "tile/ring.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

// Several consumer warpgroups: while one waits, the others multiply. 32 heads take the registers of two.
static_assert(CONSUMERS == (HEADS == 32 ? 2 : 3), "");
constexpr int REGISTERS = CONSUMERS == 2 ? 232 : 152, PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 56;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP, THREADS = CONSUMER_THREADS + WARPGROUP;
using Division = DivisionOf<THREADS>;
// The rows of the call are divided into shares. Else a cluster has a split of an item, and each of its CTAs a part of it.
constexpr bool IN_SHARES = Division::END == End::LEAVE;
constexpr int V_TILES = D_V / 64, NOPE_BLOCKS = D_NOPE / 64;  // mma tiles of a warp's value columns; column blocks
constexpr int Q_BLOCK_BYTES = HEADS * LINE_BYTES, Q_BYTES = D_QK / 64 * Q_BLOCK_BYTES;
constexpr int P_COPIES = FOLDED ? Row::FOLDED_SCALES : 1, P_BYTES = HEADS * LINE_BYTES;
constexpr int OWN_HEADS = HEADS / 4;  // of S^T and O^T in a thread (tile/heads.cuh)
constexpr int UNROLLED_COPIES = HEADS == 32 ? 2 : 4;
constexpr bool KEEPS_MAX = !FOLDED;  // prefill asks for the largest logits
constexpr float REF_SLACK = 8.0f;    // the terms of a sum stay below 2^REF_SLACK, ...
constexpr float P_LIMIT = 32768.0f;  // ... and values that are rounded to f16 below this

static_assert(!IN_SHARES || FOLDED, "decode");

// Named barriers; WARPGROUP_SYNC: + warpgroup.
enum NamedBarrier { WARPGROUP_SYNC = 1, CONSUMER_SYNC = 4 };

// Shared memory: Q, P of each warpgroup, the rings, and the rest.
constexpr int Q_AT = 0, P_AT = Q_BYTES, RING_AT = P_AT + CONSUMERS * P_COPIES * P_BYTES;

// A head's softmax over some rows, relative to `ref` like its O^T.
struct Statistics {
    float ref, sum, max;
};
template <int STAGES>
struct SmallOf {
    uint64_t full[4][2 * STAGES], empty[4][STAGES];
    uint32_t told[4][STAGES];  // a bit for each row of a stage that is valid; or NO_TILE
    float q_scale[HEADS];      // from S^T to logits in base 2
    // What a warpgroup's sums (0), and the columns of each scale in its O^T (1 ..), are relative to.
    float ref[CONSUMERS][1 + P_COPIES][HEADS];
    float rise[CONSUMERS][1 + P_COPIES][HEADS];       // 2^(last reference - reference)
    float chunk_factor[CONSUMERS][P_COPIES][HEADS];   // 2^(ref - reference of a scale)
    float across[CONSUMERS][1 + P_COPIES][4][HEADS];  // between the warps of a warpgroup
    float weight[CONSUMERS][4][HEADS];                // of a warpgroup's columns 128 k .. in the CTA's result
    float scale[HEADS];                               // of the CTA's result in the end
    float own[HEADS];                                 // in shares: of it, among the partial results that are merged
    int partials;                                     // in shares: how many partial results of other CTAs are merged
    Division::State division;
};
// Stages of each ring: as many as there is space for.
template <int STAGES>
struct SharedBytes {
    static constexpr int VALUE = RING_AT + 4 * STAGES * STAGE_BYTES + int(sizeof(SmallOf<STAGES>));
};
constexpr int STAGES = most_stages<SharedBytes, SM90_SHARED_BYTES, 64>();
constexpr int RING_BYTES = STAGES * STAGE_BYTES, SMALL_AT = RING_AT + 4 * RING_BYTES;
using Small = SmallOf<STAGES>;
constexpr int SHARED_BYTES = SharedBytes<STAGES>::VALUE;

// What the producer warps say of the stages of a tile that is not there: no more tiles are left of the split.
// The bits from TILES_BIT on say how many there were.
constexpr uint32_t NO_TILE = 1 << STAGE_ROWS;
constexpr int TILES_BIT = STAGE_ROWS + 1;

// Once all rows are read, the rings hold O^T in float32, [head][column]: the halves that warpgroups 0 and 1 exchange,
// and those that warpgroup 2 gives them. Four columns more a line spread the heads over the banks. In shares they stand in
// the space of Q and P, where warpgroup 2 gives its own when the others have been read, and behind them the weights of
// other CTAs' partial results, [partial result][head].
constexpr int HALF_LINE = D_V / 2 + 4, EXCHANGE_AT = IN_SHARES ? Q_AT : RING_AT,
              EXCHANGE_BYTES = HEADS * HALF_LINE * 4;
constexpr int WEIGHTS_AT = EXCHANGE_AT + 2 * EXCHANGE_BYTES;
static_assert(EXCHANGE_AT + 2 * (IN_SHARES ? 1 : CONSUMERS - 1) * EXCHANGE_BYTES <= (IN_SHARES ? RING_AT : SMALL_AT),
              "");
static_assert(!IN_SHARES || WEIGHTS_AT + MOST_SHARES * HEADS * 4 <= RING_AT, "");

extern __shared__ __align__(1024) uint8_t shared[];

// --- who and what ---------------------------------------------------------------------------------------------

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

__device__ __forceinline__ Role consumer_role() {
    const uint32_t thread = threadIdx.x;
    return Role::of(thread, thread / WARPGROUP, thread / 32 % 4);
}
// The same. What is derived from the lane is found anew, not kept in registers from where it was used before.
__device__ __forceinline__ Role anew(const Role& r) { return Role::of_lane(opaque(r.lane), r.warpgroup, r.warp); }
__device__ __forceinline__ uint32_t q_lines() { return shared_address(shared) + Q_AT; }
__device__ __forceinline__ uint32_t p_lines(const Role& r) {
    return shared_address(shared) + P_AT + r.warpgroup * P_COPIES * P_BYTES;
}
__device__ __forceinline__ void sync_warpgroup(const Role& r) {
    named_barrier_sync(WARPGROUP_SYNC + r.warpgroup, WARPGROUP);
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, CONSUMER_THREADS); }

// --- the rings ------------------------------------------------------------------------------------------------

// Stages of a ring are numbered over all tiles: stage number n is in place n % STAGES, as fill n / STAGES of it. The fills
// of a place have two barriers in turn. The parity of a barrier tells its next fill from the one before, but not from an
// earlier one. A warpgroup takes every CONSUMERS-th tile, and bulk copies may be done in any order: where it waits for a
// fill, the fill of the same place before it may still be under way. The one before that is done: it was released before
// the second stage of the warpgroup's last tile was filled.
static_assert(STAGES >= 2 * CONSUMERS - 1, "that stage is 2 * CONSUMERS - 1 before the first of the next tile");
__device__ __forceinline__ uint32_t full_barrier(int quarter, uint32_t number) {
    return shared_address(&small().full[quarter][number / STAGES % 2 * STAGES + number % STAGES]);
}

// Wait for the rows of a stage.
__device__ __forceinline__ void wait_for_stage(int quarter, uint32_t number) {
    mbarrier_wait(full_barrier(quarter, number), number / STAGES / 2 % 2);
}

// Wait until the fill before has been released. That returns at once for the first one.
__device__ __forceinline__ void wait_for_place(int quarter, uint32_t number) {
    mbarrier_wait(shared_address(&small().empty[quarter][number % STAGES]), (number / STAGES + 1) % 2);
    if (number >= STAGES) fence_proxy_async();  // between what was read there and bulk copies to the same place
}

// --- producer --------------------------------------------------------------------------------------------------

// Starts the copy of a row by the lane that has it. Rows of bf16 leave L2 first.
__device__ __forceinline__ void copy_own_row(uint32_t to, const Row& row, int lane, uint32_t full) {
    const uint8_t* data = row_or_zeros<COPIED_BYTES>(row.data, lane);
    if constexpr (FOLDED) {
        copy_in_bulk(to, data, COPIED_BYTES, full);
    } else {
        copy_in_bulk(to, data, COPIED_BYTES, full, evict_first());
    }
}

using Work = Division::Turn;

__device__ __forceinline__ int num_turns(const AttentionParams& p) { return Division::num_turns(p, small().division); }

// The list entries of tile `tile` at every 16th row, from a producer warp's own quarter on.
struct TileEntries {
    int32_t of[4];

    __device__ __forceinline__ TileEntries(const AttentionParams& p, const Work& w, int i, int quarter, int row) {
#pragma unroll
        for (int k = 0; k < 4; ++k) of[k] = load_entry(p, w, w.tile(i), (quarter + k) % 4 * 16 + row);
    }
    __device__ __forceinline__ bool any_valid(const AttentionParams& p, const Work& w, int i) const {
        const uint32_t least = min(min(uint32_t(of[0]), uint32_t(of[1])), min(uint32_t(of[2]), uint32_t(of[3])));
        return least < uint32_t(w.tile(i) >= w.main_tiles ? p.extra.num_slots : p.main.num_slots);
    }
};

// The consumers are told of a stage, to which so many bytes come. The warp calls.
__device__ __forceinline__ void tell(int quarter, uint32_t number, uint32_t what, int bytes, int lane) {
    const uint32_t full = full_barrier(quarter, number);
    __syncwarp();
    if (lane == 0) small().told[quarter][number % STAGES] = what;
    mbarrier_arrive_expecting_for_warp(full, bytes, lane);
}

// A producer warp copies rows 16 `quarter` .. + 15 of every tile in which an entry is valid. Lane l holds row l % 16 of
// one tile or (l >= 16) of the next. `number`: of the next stage.
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, const Work& w, int quarter, uint32_t& number) {
    const int lane = threadIdx.x % 32, my_row = lane % 16, my_tile = lane / 16;
    const uint32_t ring = shared_address(shared) + RING_AT + quarter * RING_BYTES;
    int copied = 0;
    TileEntries entries(p, w, my_tile, quarter, my_row);
#pragma unroll 1
    for (int pair = 0; pair < w.count(); pair += 2) {
        const uint32_t filled = __ballot_sync(~0u, entries.any_valid(p, w, pair + my_tile));
        const Row row = find_row(p, w, w.tile(pair + my_tile), entries.of[0]);
        const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
        entries = TileEntries(p, w, pair + 2 + my_tile, quarter, my_row);
        copied += ((filled & 0xffff) != 0) + (filled >> 16 != 0);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            if ((filled >> i / 2 * 16 & 0xffff) == 0) continue;
            wait_for_place(quarter, number);
            if (lane / STAGE_ROWS == i)
                copy_own_row(ring + number % STAGES * STAGE_BYTES + lane % STAGE_ROWS * STAGED, row, lane,
                             full_barrier(quarter, number));
            tell(quarter, number, valid >> STAGE_ROWS * i & (1 << STAGE_ROWS) - 1, STAGE_ROWS * COPIED_BYTES, lane);
            ++number;
        }
    }
    // Each consumer warpgroup that may wait for one more tile is told that there is none.
    const int told = min(copied + CONSUMERS, w.count());
#pragma unroll 1
    for (int i = 2 * copied; i < 2 * told; ++i, ++number) {
        wait_for_place(quarter, number);
        tell(quarter, number, NO_TILE | copied << TILES_BIT, 0, lane);
    }
}

// The power of two that brings the largest |q| of a head to just below 2^14, so that f16 holds all that counts, and
// its inverse.
struct QScale {
    float up, down;
};
__device__ __forceinline__ QScale q_scale_of(uint32_t largest) {
    const int exponent = min(140 - int(largest >> 7), 126);
    return {__uint_as_float(uint32_t(127 + exponent) << 23), __uint_as_float(uint32_t(127 - exponent) << 23)};
}

// Q to shared memory, each warp a head at a time, in the order of the fragments: a line a head, in column blocks of
// 64. Heads beyond the last are zeros.
__device__ __forceinline__ void load_q(const AttentionParams& p, const WorkItem& w, const Role& r) {
    constexpr int FOURS = D_QK / 4, EACH = ceil_div(FOURS, 32);
    if (r.warpgroup >= 2) {
        sync_consumers();
        return;
    }
    const int first = 4 * r.warpgroup + r.warp;
    const bf16* q = q_of(p, w.query, w.first_head) + 4 * r.lane;
    Vec8 v[HEADS / 8][EACH];
#pragma unroll
    for (int k = 0; k < HEADS / 8; ++k) {
        const int head = first + 8 * k;
        const bool here = w.first_head + head < p.h_q;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            v[k][i] = {0, 0};
            if (here && r.lane + 32 * i < FOURS) v[k][i] = *reinterpret_cast<const Vec8*>(q + head * p.q_h + 128 * i);
        }
    }
#pragma unroll
    for (int k = 0; k < HEADS / 8; ++k) {
        const int head = first + 8 * k;
        QScale scale = {1.0f, 1.0f};
        if (FOLDED) {
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                most = max_bf16x2(most, max_bf16x2(abs_bf16x2(v[k][i].x), abs_bf16x2(v[k][i].y)));
            scale = q_scale_of(__reduce_max_sync(~0u, larger_half(most)));
        }
        if (r.lane == 0) small().q_scale[head] = scale.down * p.scale_log2;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int n = r.lane + 32 * i;
            if (n >= FOURS) break;
            const bool rope = n >= D_NOPE / 4, narrow = FOLDED && !rope;
            const int item = q_item(n % 16, rope || !FOLDED);
            const float x = bf16_low(v[k][i].x) * scale.up, y = bf16_high(v[k][i].x) * scale.up;
            const float z = bf16_low(v[k][i].y) * scale.up, u = bf16_high(v[k][i].y) * scale.up;
            const uint32_t to = swizzled(q_lines() + n / 16 * Q_BLOCK_BYTES, head, item / 8) + item % 8 * 2;
            store_shared_4(to, narrow ? pack_f16x2(x, y) : pack_bf16x2(x, y));
            store_shared_4(to ^ 16, narrow ? pack_f16x2(z, u) : pack_bf16x2(z, u));
        }
    }
    sync_consumers();
}

// --- products -------------------------------------------------------------------------------------------------

// B operands of a step of k, from lines of 128 bytes, one a head: two fragments for every 8 heads. `place` is this
// lane's address in the first step.
constexpr int HEAD_TILES = HEADS / 8;
struct HeadFragments {
    uint32_t b[HEAD_TILES][2];
};
__device__ __forceinline__ uint32_t head_fragments_place(uint32_t lines, int lane) {
    const int line = lane % 8 + (HEADS > 8 ? lane / 16 * 8 : 0), chunk = lane / 8 % 2;
    return swizzled(lines, line, chunk);
}
__device__ __forceinline__ HeadFragments load_head_fragments(uint32_t place, int step) {
    HeadFragments f;
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j += 2) {
        uint32_t four[4];
        ldmatrix_x4(four, (place ^ (step << 5)) + j * 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (j + i / 2 < HEAD_TILES) f.b[j + i / 2][i % 2] = four[i];
        }
    }
    return f;
}

// acc += A . B^T over 16 of k, all heads. NARROW: in float16.
template <bool NARROW>
__device__ __forceinline__ void multiply(float (&acc)[HEAD_TILES][4], const uint32_t (&a)[4], const HeadFragments& f) {
#pragma unroll
    for (int j = 0; j < HEAD_TILES; ++j) {
        if (NARROW) {
            mma_m16n8k16_f16(acc[j], a, f.b[j][0], f.b[j][1]);
        } else {
            mma_m16n8k16(acc[j], a, f.b[j][0], f.b[j][1]);
        }
    }
}

// acc += 16 rows times a column block of Q. Q's fragments are read a step ahead; `f` are those of the first step.
template <bool NARROW>
__device__ __forceinline__ void multiply_block(uint32_t q_place, HeadFragments f, const uint32_t (&a)[4][4],
                                               float (&acc)[HEAD_TILES][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        HeadFragments next;
        if (step < 3) next = load_head_fragments(q_place, step + 1);
        multiply<NARROW>(acc, a[step], f);
        if (step < 3) f = next;
    }
}

__device__ __forceinline__ void clear(float (&acc)[HEAD_TILES][4]) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) acc[i / 4][i % 4] = 0.0f;
}

// V32_FP8: the scales of chunk `k` of a thread's two rows.
struct TwoScales {
    float x, y;
};
__device__ __forceinline__ TwoScales load_scales(uint32_t row, int k) {
    if constexpr (!FOLDED) return {1.0f, 1.0f};
    row += int(SCALE_OFFSET) + 4 * k;
    return {__uint_as_float(load_shared_4(row)), __uint_as_float(load_shared_4(row + STAGED))};
}

// S^T of a warp's 16 rows. SUMS sums run beside one another. V32_FP8: those of different scales, each then added times
// its scale. Loops stay loops: a batch of one pays for every instruction fetched.
__device__ __forceinline__ void multiply_qk(const Role& r, uint32_t row, float (&s)[HEAD_TILES][4]) {
    constexpr int SUMS = HEADS == 32 ? 1 : 2, EACH = FOLDED ? 2 : 1;
    constexpr int BLOCK_BYTES = FOLDED ? 64 : 128;
    const uint32_t q = head_fragments_place(q_lines(), r.lane);
    const uint32_t q_rope = q + NOPE_BLOCKS * Q_BLOCK_BYTES;
    uint32_t a[4][4];
    const QkRaw rope = load_qk(row, ROPE_OFFSET, true, r.t);
    HeadFragments f = load_head_fragments(q_rope, 0);
    QkRaw raw = load_qk(row, 0, !FOLDED, r.t);  // always a column block ahead
    clear(s);
    qk_wide(rope, a);
    multiply_block<false>(q_rope, f, a, s);
#pragma unroll 1
    for (int first = 0; first < NOPE_BLOCKS; first += SUMS * EACH) {
        float sum[SUMS][HEAD_TILES][4];
        TwoScales scales[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) clear(sum[i]);
#pragma unroll
        for (int i = 0; i < SUMS * EACH; ++i) {
            const int block = first + i % SUMS * EACH + i / SUMS;
            if (NOPE_BLOCKS % (SUMS * EACH) != 0 && block >= NOPE_BLOCKS) break;
            f = load_head_fragments(q + block * Q_BLOCK_BYTES, 0);
            qk_nope(raw, a);
            const int next =
                i + 1 < SUMS * EACH ? first + (i + 1) % SUMS * EACH + (i + 1) / SUMS : first + SUMS * EACH;
            raw = load_qk(row, min(next, NOPE_BLOCKS - 1) * BLOCK_BYTES, !FOLDED, r.t);
            if (i == SUMS * EACH - 1) {
#pragma unroll
                for (int k = 0; k < SUMS; ++k) scales[k] = load_scales(row, first / EACH + k);
            }
            multiply_block<FOLDED>(q + block * Q_BLOCK_BYTES, f, a, sum[i % SUMS]);
        }
#pragma unroll
        for (int k = 0; k < SUMS; ++k) {
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) {
                const float scale = FOLDED ? (i % 4 / 2 == 0 ? scales[k].x : scales[k].y) : 1.0f;
                s[i / 4][i % 4] += sum[k][i / 4][i % 4] * scale;
            }
        }
    }
}

// O^T += V^T . P^T, and release of the tile, whose two stages of each quarter stand at `place` in the rings.
__device__ __forceinline__ void multiply_pv(const Role& r, const uint32_t (&place)[2],
                                            float (&o)[V_TILES][HEAD_TILES][4]) {
    const uint32_t p = head_fragments_place(p_lines(r) + (FOLDED ? r.warp * P_BYTES : 0), r.lane);
    const uint32_t ring = shared_address(shared) + RING_AT;
    StagedRows rows = {{ring + place[0] * STAGE_BYTES, ring + place[1] * STAGE_BYTES}};
    uint32_t empty = shared_address(small().empty[0]) + 8 * (r.lane == 0 ? place[0] : place[1]);
    PvRaw raw = load_pv(rows, r.warp, r.g, r.t);
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
        const HeadFragments f = load_head_fragments(p, quarter);
        const PvRaw mine = raw;
        const StagedRows here = rows;
        if (quarter < 3) {
            rows = {{rows.stage[0] + RING_BYTES, rows.stage[1] + RING_BYTES}};
            raw = load_pv(rows, r.warp, r.g, r.t);
        }
        for_pv_fragments(mine, here, r.warp, r.g, r.t, [&](int q, const uint32_t (&a)[2][4]) {
            multiply<FOLDED>(o[2 * q], a[0], f);
            multiply<FOLDED>(o[2 * q + 1], a[1], f);
        });
        release_reads();
        mbarrier_arrive_for_warp_at_two(empty, r.lane);
        empty += 8 * STAGES;
    }
}

// --- softmax --------------------------------------------------------------------------------------------------

// The softmax of a thread's heads. V32_FP8: the columns of a scale in O^T are relative to that scale's reference.
using Softmax = HeadsSoftmax<OWN_HEADS>;

// The element of row (S^T) or column (O^T) i of a thread's two and its c-th head.
template <typename T>
__device__ __forceinline__ T& at(T (&acc)[HEAD_TILES][4], int i, int c) {
    return acc[c / 2][2 * i + c % 2];
}

// References rise to the tile's maxima; sums and O^T follow. The whole warpgroup calls.
__device__ __forceinline__ void raise_references(const Role& r, uint32_t row, const float (&s)[HEAD_TILES][4],
                                                 Softmax& state, float (&o)[V_TILES][HEAD_TILES][4]) {
    constexpr int REFS = FOLDED ? 1 + P_COPIES : 1;
    Small& sm = small();
    float (&across)[1 + P_COPIES][4][HEADS] = sm.across[r.warpgroup];
    float (&refs)[1 + P_COPIES][HEADS] = sm.ref[r.warpgroup], (&rise)[1 + P_COPIES][HEADS] = sm.rise[r.warpgroup];
#pragma unroll 1
    for (int k = 0; k < REFS; ++k) {
        const TwoScales scales = k == 0 ? TwoScales{1.0f, 1.0f} : load_scales(row, k - 1);
        const float x = log2_approx(scales.x), y = log2_approx(scales.y);
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
            const float top = rows_max(fmaxf(at(s, 0, c) + x, at(s, 1, c) + y));
            if (r.g == 0) across[k][r.warp][r.head(c)] = top;
        }
    }
    sync_warpgroup(r);
#pragma unroll 1
    for (int i = threadIdx.x % WARPGROUP; i < REFS * HEADS; i += WARPGROUP) {
        const int k = i / HEADS, head = i % HEADS;
        const float from = refs[k][head];
        const float low = fmaxf(across[k][0][head], across[k][1][head]);
        const float to = fmaxf(fmaxf(from, low), fmaxf(across[k][2][head], across[k][3][head]));
        refs[k][head] = to;
        rise[k][head] = rescale_factor(from, to);
    }
    sync_warpgroup(r);
    if constexpr (FOLDED) {
#pragma unroll 1
        for (int i = threadIdx.x % WARPGROUP; i < P_COPIES * HEADS; i += WARPGROUP) {
            const int k = i / HEADS, head = i % HEADS;
            const float to = refs[1 + k][head];
            sm.chunk_factor[r.warpgroup][k][head] = to == -INF ? 0.0f : exp2_approx(refs[0][head] - to);
        }
    }
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const int head = 8 * j + 2 * r.t;
        const float2 ref = *reinterpret_cast<const float2*>(&refs[0][head]);
        const float2 f = *reinterpret_cast<const float2*>(&rise[0][head]);
        state.ref[2 * j] = ref.x;
        state.ref[2 * j + 1] = ref.y;
        state.sum[2 * j] *= f.x;
        state.sum[2 * j + 1] *= f.y;
        const float2 by = FOLDED ? *reinterpret_cast<const float2*>(&rise[1 + r.warp % P_COPIES][head]) : f;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            o[v][j][0] *= by.x;
            o[v][j][1] *= by.y;
            o[v][j][2] *= by.x;
            o[v][j][3] *= by.y;
        }
    }
    sync_warpgroup(r);
}

// P^T of the logits `s` to shared memory, and the sums of a thread's rows. Line = head, chunk = eight rows. True where
// a reference is too low for a value.
__device__ __forceinline__ bool store_p(const Role& r, uint32_t row, const float (&s)[HEAD_TILES][4],
                                        const Softmax& state, float (&sums)[OWN_HEADS]) {
    bool high = false;
    float e[HEAD_TILES][4];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float x = at(s, 0, c), y = at(s, 1, c), base = state.ref[c] == -INF ? 0.0f : state.ref[c];
        high |= fmaxf(x, y) > state.ref[c] + REF_SLACK;
        at(e, 0, c) = exp2_approx(x - base);
        at(e, 1, c) = exp2_approx(y - base);
        sums[c] = at(e, 0, c) + at(e, 1, c);
    }
    const int line = r.lane % 8 + (HEADS > 8 ? r.lane / 16 * 8 : 0), chunk = 2 * r.warp + r.lane / 8 % 2;
    uint32_t to = swizzled(p_lines(r), line, chunk);
    float top = 0.0f;
#pragma unroll UNROLLED_COPIES
    for (int copy = 0; copy < P_COPIES; ++copy, to += P_BYTES) {
        const TwoScales scales = load_scales(row, copy);
        uint32_t rounded[HEADS / 4];
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 f = {1.0f, 1.0f};
            if (FOLDED)
                f = *reinterpret_cast<const float2*>(&small().chunk_factor[r.warpgroup][copy][8 * j + 2 * r.t]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float scale = i == 0 ? scales.x : scales.y;
                const float x = e[j][2 * i] * (scale * f.x), y = e[j][2 * i + 1] * (scale * f.y);
                top = fmaxf(top, fmaxf(x, y));
                rounded[2 * j + i] = FOLDED ? pack_f16x2(x, y) : pack_bf16x2(x, y);
            }
        }
        if constexpr (HEADS == 8) {
            stmatrix_x2_trans(to, rounded[0], rounded[1]);
        } else {
#pragma unroll
            for (int j = 0; j < HEADS / 8; j += 2)
                stmatrix_x4_trans(to + j * 1024, rounded[2 * j], rounded[2 * j + 1], rounded[2 * j + 2],
                                  rounded[2 * j + 3]);
        }
    }
    return high || (FOLDED && top > P_LIMIT);
}

// S^T to P^T in shared memory; the warpgroup has met when this returns. `first`: its first tile, without references
// yet.
__device__ __forceinline__ void softmax_tile(const Role& r, bool first, const bool (&valid)[2], uint32_t row,
                                             float (&s)[HEAD_TILES][4], Softmax& state,
                                             float (&o)[V_TILES][HEAD_TILES][4]) {
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 f = *reinterpret_cast<const float2*>(&small().q_scale[8 * j + 2 * r.t]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s[j][2 * i] = valid[i] ? s[j][2 * i] * f.x : -INF;
            s[j][2 * i + 1] = valid[i] ? s[j][2 * i + 1] * f.y : -INF;
        }
    }
    float sums[OWN_HEADS];
    sync_warpgroup(r);  // the previous tile's P^T has been read
    bool raise = first;
#pragma unroll 1
    while (true) {
        if (__builtin_expect(raise, 0)) raise_references(r, row, s, state, o);
        const bool high = named_barrier_any(WARPGROUP_SYNC + r.warpgroup, WARPGROUP, store_p(r, row, s, state, sums));
        if (raise || !high) break;
        raise = true;
    }
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        state.sum[c] += sums[c];
        if (KEEPS_MAX) state.max[c] = fmaxf(state.max[c], fmaxf(at(s, 0, c), at(s, 1, c)));
    }
}

// --- a query's tiles ------------------------------------------------------------------------------------------

// Releases the two stages of each quarter at `place`. The warpgroup must have met.
__device__ __forceinline__ void release_stages(const Role& r, const uint32_t (&place)[2]) {
    uint32_t empty = shared_address(small().empty[0]) + 8 * (r.lane == 0 ? place[0] : place[1]);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter, empty += 8 * STAGES) mbarrier_arrive_for_warp_at_two(empty, r.lane);
}

// Where the two stages of a tile stand in each ring. `number`: of the first one, counted over all tiles.
struct TilePlace {
    uint32_t stage[2];

    __device__ __forceinline__ TilePlace(uint32_t number) : stage{number % STAGES, (number + 1) % STAGES} {}
    __device__ __forceinline__ StagedRows rows(int quarter) const {
        const uint32_t ring = shared_address(shared) + RING_AT + quarter * RING_BYTES;
        return {{ring + stage[0] * STAGE_BYTES, ring + stage[1] * STAGE_BYTES}};
    }
};

// Returns how many places for tiles the split took in the rings, after `before` of earlier splits. Places and what is
// derived from the lane are found anew after each product, or they would be kept in memory in the meantime.
__device__ __forceinline__ int attend(const Work& w, const Role& r, uint32_t before, Softmax& state,
                                      float (&o)[V_TILES][HEAD_TILES][4]) {
    const uint32_t begin = 2 * (before + r.warpgroup), end = 2 * (before + w.count());
#pragma unroll 1
    for (uint32_t number = begin; number < end; number += 2 * CONSUMERS) {
        TilePlace place(number);
        const uint32_t row = place.rows(r.warp).qk_row(r.g);
        const uint32_t told = shared_address(small().told[r.warp]);
        wait_for_stage(r.warp, number);
        wait_for_stage(r.warp, number + 1);
        const uint32_t of_stage = load_shared_4(told + 4 * place.stage[0]);
        if (of_stage & NO_TILE) {
            sync_warpgroup(r);  // all quarters have it
            release_stages(r, place.stage);
            return min(int(of_stage >> TILES_BIT) + CONSUMERS, w.count());
        }
        float s[HEAD_TILES][4];
        multiply_qk(anew(r), row, s);
        place = TilePlace(opaque(number));
        const FirstRow first = first_qk_row(r.g);
        const uint32_t rows_valid =
            load_shared_4(told + 4 * (first.stage == 0 ? place.stage[0] : place.stage[1])) >> first.row;
        const bool valid[2] = {(rows_valid & 1) != 0, (rows_valid & 2) != 0};
        softmax_tile(anew(r), number == begin, valid, row, s, state, o);
        multiply_pv(anew(r), TilePlace(opaque(number)).stage, o);
    }
    return w.count();
}

// --- results --------------------------------------------------------------------------------------------------

// Stores the sums (and maxima) of each warp's rows.
__device__ __forceinline__ void store_statistics(const Role& r, const Softmax& state) {
    float (&across)[1 + P_COPIES][4][HEADS] = small().across[r.warpgroup];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float sum = rows_sum(state.sum[c]), max = KEEPS_MAX ? rows_max(state.max[c]) : 0.0f;
        if (r.g == 0) {
            across[0][r.warp][r.head(c)] = sum;
            if (KEEPS_MAX) across[1][r.warp][r.head(c)] = max;
        }
    }
}

// Merges the warpgroups' softmax of a head, and finds what their columns 128 k .. are multiplied with. A thread for
// each head and k.
__device__ __forceinline__ Statistics merge_statistics(int k, int head) {
    Small& sm = small();
    float ref = -INF, sum = 0.0f, max = -INF;
#pragma unroll
    for (int wg = 0; wg < CONSUMERS; ++wg) ref = fmaxf(ref, sm.ref[wg][0][head]);
#pragma unroll
    for (int wg = 0; wg < CONSUMERS; ++wg) {
        const float own = sm.ref[wg][0][head];
        sm.weight[wg][k][head] = rescale_factor(sm.ref[wg][FOLDED ? 1 + k % P_COPIES : 0][head], ref);
        const float (&across)[1 + P_COPIES][4][HEADS] = sm.across[wg];
        sum += rescale_factor(own, ref) *
               ((across[0][0][head] + across[0][1][head]) + (across[0][2][head] + across[0][3][head]));
        if (KEEPS_MAX) {
#pragma unroll
            for (int warp = 0; warp < 4; ++warp) max = fmaxf(max, across[1][warp][head]);
        }
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
    return columns + 2 * r.t * HALF_LINE + pv_column(r.warp, r.g, 0) / (FOLDED ? 2 : 1);
}
// Word 2 half + k of the columns of head c. The words of a half stand side by side as they do in a row.
__device__ __forceinline__ float4& four_columns(float* half, int c, int k) {
    return *reinterpret_cast<float4*>(half + (c / 2 * 8 + c % 2) * HALF_LINE + (FOLDED ? 4 : 128) * k);
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
            const float a = sm.weight[HALF][r.warp][head], b = sm.weight[1 - HALF][r.warp][head];
            const float (&first)[HEAD_TILES][4] = o[4 * HALF + 2 * k];
            const float (&second)[HEAD_TILES][4] = o[4 * HALF + 2 * k + 1];
            float4& four = four_columns(both, c, k);
            float4 v = four;
            v = make_float4(a * at(first, 0, c) + b * v.x, a * at(first, 1, c) + b * v.y,
                            a * at(second, 0, c) + b * v.z, a * at(second, 1, c) + b * v.w);
            if (CONSUMERS == 3 && third_has_rows) {
                const float w = sm.weight[CONSUMERS - 1][r.warp][head];
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
        const int half = FOLDED ? column / 8 % 2 : column / 256,
                  at = FOLDED ? column / 16 * 8 + column % 8 : column % 256;
        const auto* v = reinterpret_cast<const float4*>(shared + EXCHANGE_AT + half * EXCHANGE_BYTES +
                                                        (head * HALF_LINE + at) * 4);
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
    if (threadIdx.x < 4 * HEADS) {
        const int k = threadIdx.x / HEADS, head = threadIdx.x % HEADS;
        const Statistics merged = merge_statistics(k, head);
        if (k == 0 && partials.ctas > 1) partials.write_statistics(head, merged.ref, merged.sum, merged.max);
        if (k == 0 && partials.ctas == 1)
            sm.scale[head] = finish_head(p, w, head, true, merged.ref, merged.sum, merged.max);
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

// --- results of shares ----------------------------------------------------------------------------------------

// Where a thread's word 2 half + k of the columns of head c stands in a partial result: chunk 128 (4 c + 2 half + k) +
// thread.
__device__ __forceinline__ int chunk_of(const Role& r, int c, int k) {
    return 128 * (4 * c + 2 * r.warpgroup + k) + threadIdx.x % WARPGROUP;
}

// o += weight * v, of a head's columns in two mma tiles.
__device__ __forceinline__ void add_columns(float (&first)[HEAD_TILES][4], float (&second)[HEAD_TILES][4], int c,
                                            float own, float weight, float4 v) {
    at(first, 0, c) = own * at(first, 0, c) + weight * v.x;
    at(first, 1, c) = own * at(first, 1, c) + weight * v.y;
    at(second, 0, c) = own * at(second, 0, c) + weight * v.z;
    at(second, 1, c) = own * at(second, 1, c) + weight * v.w;
}

// Warpgroup HALF adds what warpgroup `other` has given of its half of the columns. `first`: its own columns do not have
// their weight yet.
template <int HALF>
__device__ __forceinline__ void add_half(const Role& r, int other, bool first, float (&o)[V_TILES][HEAD_TILES][4]) {
    const Small& sm = small();
    float* given = given_half(r, 0, HALF);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float own = first ? sm.weight[HALF][r.warp][r.head(c)] : 1.0f;
        const float weight = sm.weight[other][r.warp][r.head(c)];
#pragma unroll
        for (int k = 0; k < 2; ++k)
            add_columns(o[4 * HALF + 2 * k], o[4 * HALF + 2 * k + 1], c, own, weight, four_columns(given, c, k));
    }
}

// The columns of warpgroup HALF, with `count` partial results of the CTAs before, to shared memory; or as a partial
// result to the CTA whose share ends the item.
template <int HALF>
__device__ __forceinline__ void finish_half(const Role& r, bool ends_item, int count,
                                            const PartialResults<4>& partials, float (&o)[V_TILES][HEAD_TILES][4]) {
    auto columns_of = [&](int c, int k) {
        float (&first)[HEAD_TILES][4] = o[4 * HALF + 2 * k];
        float (&second)[HEAD_TILES][4] = o[4 * HALF + 2 * k + 1];
        return make_float4(at(first, 0, c), at(first, 1, c), at(second, 0, c), at(second, 1, c));
    };
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const float* weights = reinterpret_cast<const float*>(shared + WEIGHTS_AT) + i * HEADS;
        float4 chunks[OWN_HEADS][2];  // all loads are under way at a time
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
#pragma unroll
            for (int k = 0; k < 2; ++k) chunks[c][k] = partials.chunk_of(partials.rank - count + i, chunk_of(r, c, k));
        }
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
            const float own = i == 0 ? small().own[r.head(c)] : 1.0f, weight = weights[r.head(c)];
#pragma unroll
            for (int k = 0; k < 2; ++k)
                add_columns(o[4 * HALF + 2 * k], o[4 * HALF + 2 * k + 1], c, own, weight, chunks[c][k]);
        }
    }
    float* to = given_half(r, 0, HALF);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (ends_item) {
                four_columns(to, c, k) = columns_of(c, k);
            } else {
                partials.write(chunk_of(r, c, k), columns_of(c, k));
            }
        }
    }
}

// A head's softmax over the rows of the CTA and those of `count` partial results before, to the head's statistics, the
// weights of all, and the scale of their sum.
__device__ __forceinline__ void finish_shared_head(const AttentionParams& p, const Work& w, int head,
                                                   const Statistics& own, int count,
                                                   const PartialResults<4>& partials) {
    Small& sm = small();
    auto* weights = reinterpret_cast<float*>(shared + WEIGHTS_AT) + head;
    const int first = partials.rank - count;
    float top = own.ref;
#pragma unroll 1
    for (int i = 0; i < count; ++i) top = fmaxf(top, partials.statistics_of(first + i, head).x);
    sm.own[head] = rescale_factor(own.ref, top);
    float sum = sm.own[head] * own.sum;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const float4 theirs = partials.statistics_of(first + i, head);
        const float weight = rescale_factor(theirs.x, top);
        weights[i * HEADS] = weight;
        sum += weight * theirs.y;
    }
    sm.scale[head] = finish_head(p, w, head, true, top, sum, -INF);
}

// Merges the warpgroups of a CTA, and writes the results or leaves a partial result. The rings are not touched.
__device__ __forceinline__ void write_shared_results(const AttentionParams& p, const Work& w, const Role& r,
                                                     const Softmax& state, float (&o)[V_TILES][HEAD_TILES][4]) {
    Small& sm = small();
    const PartialResults<4> partials = {p.cluster_parts, int(blockIdx.x)};
    const bool begins_item = w.begin == 0, merges = w.ends_item && !begins_item;
    sync_consumers();  // Q and P have been read
    store_statistics(r, state);
    if (r.warpgroup == 0) give_half<1>(given_half(r, 0, 1), o);
    if (r.warpgroup == 1) give_half<0>(given_half(r, 0, 0), o);
    if (merges && r.warpgroup == 2 && r.warp == 0) {
        const int count = Division::wait_for_earlier(p, r.lane);
        if (r.lane == 0) sm.partials = count;
    }
    sync_consumers();
    const int count = merges ? sm.partials : 0;
    if (threadIdx.x < 4 * HEADS) {
        const int k = threadIdx.x / HEADS, head = threadIdx.x % HEADS;
        const Statistics merged = merge_statistics(k, head);
        if (k == 0 && !w.ends_item) partials.write_statistics(head, merged.ref, merged.sum, -INF);
        if (k == 0 && w.ends_item) finish_shared_head(p, w, head, merged, count, partials);
    }
    sync_consumers();
    if (r.warpgroup == 0) add_half<0>(r, 1, true, o);
    if (r.warpgroup == 1) add_half<1>(r, 0, true, o);
    if (w.count() > 2) {
        sync_consumers();
        if (r.warpgroup == 2) {
            give_half<0>(given_half(r, 0, 0), o);
            give_half<1>(given_half(r, 0, 1), o);
        }
        sync_consumers();
        if (r.warpgroup == 0) add_half<0>(r, 2, false, o);
        if (r.warpgroup == 1) add_half<1>(r, 2, false, o);
    }
    if (r.warpgroup == 0) finish_half<0>(r, w.ends_item, count, partials, o);
    if (r.warpgroup == 1) finish_half<1>(r, w.ends_item, count, partials, o);
    sync_consumers();
    if (w.ends_item) {
        write_merged(p, w);
    } else if (threadIdx.x == 0) {
        Division::announce(p, begins_item);
    }
}

// Before a CTA's next split: nothing is left of the one before.
__device__ __forceinline__ void clear_references() {
#pragma unroll 1
    for (int i = threadIdx.x; i < CONSUMERS * (1 + P_COPIES) * HEADS; i += CONSUMER_THREADS)
        (&small().ref[0][0][0])[i] = -INF;
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x a cluster a query, y splits beyond those of a cluster, z head tiles. In shares: x CTAs, a share each.
extern "C" __global__ void __launch_bounds__(THREADS, 1) few_heads_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane of each warp: the lanes of a warp would take turns
#pragma unroll 1
        for (int i = threadIdx.x / 32; i < 4 * STAGES; i += THREADS / 32) {
            mbarrier_init(shared_address(&sm.full[0][0] + 2 * i), WARP_ARRIVALS);
            mbarrier_init(shared_address(&sm.full[0][0] + 2 * i + 1), WARP_ARRIVALS);
            mbarrier_init(shared_address(&sm.empty[0][0] + i), 4 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < CONSUMERS * (1 + P_COPIES) * HEADS; i += THREADS) (&sm.ref[0][0][0])[i] = -INF;
    Division::begin(p, sm.division, blockIdx.x);
    __syncthreads();
    const int ctas = cluster_size(), rank = cluster_rank();
    if (!IN_SHARES && has_lengths(p)) wait_for_earlier_kernels();
    Work w;
    if constexpr (!IN_SHARES) {
        const int split = blockIdx.y * ctas + rank, splits = p.num_splits * ctas;
        find_equal_split(p, w, cluster_index(), blockIdx.z, [&] { return split; }, [&] { return splits; });
    }
    wait_for_earlier_kernels();
    static_assert(Division::SCRATCH_BYTES <= RING_AT - Q_AT, "the space of Q and P, to which no bulk copies come");
    Division::finish(p, sm.division, blockIdx.x, reinterpret_cast<uint16_t*>(shared + Q_AT));
    let_next_kernel_start();
    if (threadIdx.x >= CONSUMER_THREADS) {
        decrease_registers_to<PRODUCER_REGISTERS>();
        uint32_t number = 0;
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) {
            if constexpr (IN_SHARES) w = Division::find_turn<Work>(p, small().division, turn);
            copy_tiles(p, w, threadIdx.x / 32 % 4, number);
        }
        if (!IN_SHARES && ctas > 1) cluster_sync_with_one_fence(false);  // cluster barriers count every thread
    } else {
        increase_registers_to<REGISTERS>();
        const Role r = consumer_role();
        uint32_t before = 0;
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) {
            if constexpr (IN_SHARES) {
                w = Division::find_turn<Work>(p, small().division, turn);
                if (turn > 0) {
                    sync_consumers();  // the results have been read, from where Q goes
                    clear_references();
                }
            }
            Softmax state;
            state.clear();
            load_q(p, w, r);
            float o[V_TILES][HEAD_TILES][4];
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) clear(o[v]);
            before += attend(w, r, before, state, o);
            if constexpr (IN_SHARES) {
                write_shared_results(p, w, r, state, o);
            } else {
                write_results(p, w, r, state, o);
            }
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
