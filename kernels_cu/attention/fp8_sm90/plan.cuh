// Of fp8_sm90: constants, shared memory, who a thread is, and the turns of a CTA.
#pragma once
#include "attention/division/division.cuh"
#include "attention/division/merge.cuh"
#include "attention/role.cuh"
#include "ptx/limits.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "rows/chunk.cuh"
#include "rows/e2m1.cuh"
#include "rows/fp4_row.cuh"
#include "tile/heads.cuh"
#include "tile/ring.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

// The scales of a row: float32 (V32_FP8, V32_NOPE_FP8), UE8M0, which are powers of two (V4_FP8, V41_FP8), e4m3 (FP4),
// or one of the call (PLAIN). HAS_ROPE: the last 64 values are bfloat16.
constexpr bool FLOAT_SCALES = Row::FOLDED_SCALES != 0, E8M0_SCALES = SCALE_E8M0 != 0, PLAIN = SCALE_OF_CALL != 0;
constexpr bool HAS_ROPE = D_ROPE > 0 && !ROPE_CODED;
// Rows of the cache, or those of an extra cache beside one of V41_FP8, are FP4: the consumer warps EXPAND them.
constexpr bool FP4 = CODE_BITS == 4, FP4_EXTRA = EXTRA_ROWS != 0, EXPAND = FP4 || FP4_EXTRA;
// Chunks are of 64 columns at most: K is multiplied by their scales, too.
constexpr bool FINE_SCALES = E8M0_SCALES || FP4;
// A row in shared memory has a byte for each value, RoPE, and its scales. Of an FP4 row that is so once it is expanded:
// what is copied begins so far behind the row's begin that its codes end where the bytes will.
constexpr int COPIED_AT = FP4 ? D_NOPE / 2 : 0, EXTRA_COPIED_AT = D_V / 2;
constexpr int CODES_AT = FP4 ? COPIED_AT : EXTRA_COPIED_AT;
constexpr int ROPE_AT = COPIED_AT + ROPE_OFFSET, SCALES_AT = COPIED_AT + (SCALES_APART ? ROW_STRIDE : SCALE_OFFSET);
constexpr int FP4_SCALES = 32;           // bytes of an FP4 row's scales
constexpr bool E5M2 = FP4 && !HAS_ROPE;  // they become e5m2 bytes, else e4m3
constexpr int FP4_EXPONENT =
    E5M2 ? 7 : 0;  // K and V are 2^-7 of their numbers: f16 holds what codes are multiplied by
#if EXTRA_ROWS
using ExtraRow = Fp4Row<EXTRA_ROW_STRIDE, EXTRA_SCALE_OFFSET, EXTRA_SCALE_STRIDE>;
constexpr int EXTRA_STRIDE = EXTRA_ROW_STRIDE;
static_assert(D_NOPE == D_V && SCALES_AT == D_V, "rows of both caches have their scales behind 512 codes");
#else
using ExtraRow = Row;  // there are none
constexpr int EXTRA_STRIDE = ROW_STRIDE;
#endif
constexpr int SCALES_BEHIND = Row::SCALES_BEHIND, EXTRA_SCALES_BEHIND = ExtraRow::SCALES_BEHIND;
constexpr bool COPY_SCALES = SCALES_BEHIND > 0 || EXTRA_SCALES_BEHIND > 0;  // by themselves
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
using Division = DivisionOf<THREADS>;
constexpr End END = Division::END;
constexpr bool ONE_TURN = Division::ONE_TURN, FOUND_EARLY = Division::FOUND_EARLY && !DENSE;
constexpr bool IN_TURN =
    Division::EQUAL_SPLITS && TILES_IN_TURN;  // an item's tiles are dealt out to its splits in turn
// Whether the consumers find the ends of the lists of a CTA's first turns. Full lists of V4_FP8 would take 1 to 4 %
// longer, segments 1 to 2 %.
constexpr bool CONSUMERS_LOOK = (FLOAT_SCALES || ROPE_CODED) && END != End::KEEP && !DENSE;
constexpr int FIRST_TURNS = 4;  // so many turns
// COPIERS producer warps copy WARP_ROWS rows each of a stage. With four a stage is full sooner; one takes fewer
// instructions.
constexpr int STAGE_ROWS = 16, COPIERS = DIVISION == CLUSTERS ? 4 : 1, WARP_ROWS = STAGE_ROWS / COPIERS;
constexpr int TILE_STAGES = TILE_ROWS / STAGE_ROWS;
// The tiles of a split are counted in units of one tile, or of two: a tile without rows is added to an odd number.
// Pairs take fewer instructions.
constexpr int UNIT_TILES = Division::EQUAL_SPLITS ? 1 : 2;
constexpr int UNIT_STAGES = UNIT_TILES * TILE_STAGES;
// Rows of 576 e4m3 stand in pairs, with 16 bytes behind each: those of a pair may come by one copy. STRIDE is then the half
// of a pair.
constexpr bool PAIRED = PLAIN && ROW_STRIDE % LINE_BYTES == 64;
constexpr int EXPANDED_BYTES = SCALES_AT + FP4_SCALES;
constexpr int STRIDE = PAIRED   ? ROW_STRIDE + 8
                       : EXPAND ? EXPANDED_BYTES + (EXPANDED_BYTES / 16 % 2 == 0) * 16
                                : Row::STAGED_BYTES;
constexpr int STAGE_BYTES = STAGE_ROWS * STRIDE;
// Rows of a stage that stand behind each other as in the cache.
constexpr int RUN_ROWS = PAIRED ? 2 : STRIDE == ROW_STRIDE ? WARP_ROWS : 1;
constexpr int NOPE_BLOCKS = D_NOPE / 64, Q_BLOCKS = D_QK / 64;  // column blocks of 64; behind those of NoPE is RoPE
constexpr int LINES_BYTES = HEADS * LINE_BYTES;  // a swizzled line for each head: a column block of Q, or a P
// Columns of a range with a scale of its own, and ranges. Where FP4 rows may be, all are as theirs.
constexpr int CHUNK_COLUMNS = EXPAND ? 16 : SCALE_TILE;
constexpr int CHUNKS = EXPAND ? D_NOPE / 16 : NUM_SCALES > 0 ? NUM_SCALES : 1;
constexpr int OWN_HEADS = HEADS / 4;  // of S^T and O^T in a thread (tile/heads.cuh)
// Denominators in a thread: of all its heads, over its own rows. With 64 heads there are no registers for that: of two
// heads, over the rows of eight lanes.
constexpr int SUMS = HEADS == 64 ? 2 : OWN_HEADS;
// Smaller scales count as this one, so that neither a quotient of two scales nor P^T / r of a row of zeros overflows.
constexpr float LEAST_SCALE = 0x1p-60f;
constexpr int LEAST_EXPONENT = 127 - 60;
constexpr uint32_t MAX_P = 0x7800;  // 2^15 as f16
constexpr float REF_NONE = -1e30f;
// A raised reference brings the largest P^T to 2^HEADROOM, far from f16's least values.
constexpr float HEADROOM = 8.0f;
static_assert((PAIRED ? 2 : 1) * STRIDE / 16 % 2 == 1, "ldmatrix reads eight rows from all banks");

// Named barriers; WARPGROUP_SYNC and P_READY: + warpgroup.
enum NamedBarrier { P_READY = 1, WARPGROUP_SYNC = 3, CONSUMER_SYNC = 5, PRODUCER_SYNC = 6 };

// Q comes in eight groups of heads, with gaps between them: the same 32 bytes of heads of four groups are in all banks.
constexpr int GROUP_HEADS = HEADS / 8, GROUP_GAP = 32;

// Shared memory: Q, P of each warpgroup's tile, the ring, and the rest.
constexpr int Q_AT = 0, P_AT = Q_BLOCKS * LINES_BYTES + 1024;
// Results leave through the space of P, eight heads at a time.
constexpr int P_BYTES = HEADS < 32 ? 8 * 2 * D_V : 2 * LINES_BYTES, RING_AT = P_AT + P_BYTES;
static_assert(Q_BLOCKS * LINES_BYTES + 7 * GROUP_GAP <= P_AT && P_AT % 1024 == 0, "lines of P are swizzled");

// What the consumers are told of a split: two `turn`s of the CTA are kept.
struct Attended {
    Query query;
    int first_head;
    bool begins_item, ends_item;
#if DENSE
    int first_row, last_end;  // of the request: the split's first row; the end of what its last token sees
    int step;
#endif
};

template <int STAGES>
struct alignas(16) SmallOf {
    uint64_t full[STAGES], empty[STAGES];
    float ref[HEADS];  // what P^T and O^T are relative to
    // Of P of each warpgroup's tile: O^T before it is multiplied by this, if `raised`.
    float factor[2][HEADS];
    float across[2][4][HEADS];             // between the warps of a warpgroup
    float scale[HEADS];                    // at the end: of O^T
    float largest[8][HEADS];               // |O^T| of a partial result, in each warp's columns
    uint16_t ratio[2][CHUNKS][TILE_ROWS];  // f16, scale / r
    uint64_t q_full, q_empty, ends_known;
    float q_max[8], logit_scale;
    uint32_t raised[2];
    uint32_t marks[STAGES];  // which rows are valid, and what follows the tile
    // Tiles of an item up to the last one with rows: what each consumer warp has found for the CTA's first splits, and
    // each producer warp for a later one.
    int first_ends[FIRST_TURNS][8], ends[4];
    Attended attended[2];
#if DENSE
    int seen[HEADS], step;  // request_lines.cuh
#endif
    int partials;  // results that are merged
    Division::State division;
};

// Stages of the ring: whole tiles, as many as there is space for.
template <int STAGES>
struct SharedBytes {
    static constexpr int VALUE = RING_AT + STAGES * STAGE_BYTES + int(sizeof(SmallOf<STAGES>));
};
constexpr int STAGES = most_stages<SharedBytes, SM90_SHARED_BYTES, 64, TILE_STAGES>();
constexpr int SMALL_AT = RING_AT + STAGES * STAGE_BYTES;
static_assert(STAGES >= 3 * TILE_STAGES, "three tiles");
using Small = SmallOf<STAGES>;
constexpr int SHARED_BYTES = SharedBytes<STAGES>::VALUE;

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// `uniform` tells the compiler what a warp agrees on; `opaque` keeps the rest from being hoisted.
__device__ __forceinline__ Role consumer_role() {
    const uint32_t thread = opaque(threadIdx.x);
    return Role::of(thread, uniform(thread / WARPGROUP), uniform(thread / 32 % 4));
}
// The same, for what runs rarely or once: nothing that is derived from its lane stays in registers of the loop.
__device__ __forceinline__ Role rare_role(const Role& r) { return Role::of(read_thread_index(), r.warpgroup, r.warp); }
__device__ __forceinline__ void sync_warpgroup(const Role& r) {
    named_barrier_sync(WARPGROUP_SYNC + r.warpgroup, WARPGROUP);
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, CONSUMERS); }

// A turn as the producers see it. `turn` counts the CTA's earlier ones, `stage` the stages that they took.
struct Work : Division::Turn {
    int turn;
    uint32_t stage;
};

__device__ __forceinline__ Attended attended_of(const Work& w) {
#if DENSE
    const int first_row = w.first_row + w.begin * TILE_ROWS;
    return {w.query, w.first_head, w.begin == 0, w.ends_item, first_row, w.last_end, w.step};
#else
    return {w.query, w.first_head, w.begin == 0, w.ends_item};
#endif
}

// Over rows of PLAIN_FP8 q may be e4m3, too.
__device__ __forceinline__ bool has_e4m3_q(const AttentionParams& p) { return PLAIN && p.flags & E4M3_Q; }
__device__ __forceinline__ int bytes_of_q(const AttentionParams& p) { return D_QK * (has_e4m3_q(p) ? 1 : 2); }

__device__ __forceinline__ int num_turns(const AttentionParams& p) { return Division::num_turns(p, small().division); }

__device__ __forceinline__ Work find_work(const AttentionParams& p, int turn) {
    return Division::find_turn<Work>(p, small().division, turn);
}

// Where a row of a stage begins.
__device__ __forceinline__ int row_offset(int row) { return row * STRIDE - (PAIRED ? row % 2 * 8 : 0); }

// Stages are numbered over all work items. Where stage number `stage` is in the ring, and the parity of its phase.
__device__ __forceinline__ int place_of(uint32_t stage) { return stage % STAGES; }
__device__ __forceinline__ uint32_t phase_of(uint32_t stage) { return stage / STAGES & 1; }
__device__ __forceinline__ uint32_t stage_address(uint32_t stage) {
    return shared_address(shared) + RING_AT + place_of(stage) * STAGE_BYTES;
}
