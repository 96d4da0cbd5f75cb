// Part of fp8_sm90: constants, shared memory, thread roles, and the turns of a CTA.
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
// EXPAND: there are FP4 rows, in the cache (FP4) or in an extra cache beside one of V41_FP8 (FP4_EXTRA). The consumer
// warps expand their codes to bytes.
constexpr bool FP4 = CODE_BITS == 4, FP4_EXTRA = EXTRA_ROWS != 0, EXPAND = FP4 || FP4_EXTRA;
// A scale covers at most 64 columns. Then K is multiplied by its scales, too.
constexpr bool FINE_SCALES = E8M0_SCALES || FP4;
// A row in shared memory is a byte for each value, then RoPE, then its scales. An FP4 row has that form once it is
// expanded. It is copied to COPIED_AT bytes behind the row's begin, so that its codes end where the expanded bytes
// will end.
constexpr int COPIED_AT = FP4 ? D_NOPE / 2 : 0, EXTRA_COPIED_AT = D_V / 2;
constexpr int CODES_AT = FP4 ? COPIED_AT : EXTRA_COPIED_AT;
constexpr int ROPE_AT = COPIED_AT + ROPE_OFFSET, SCALES_AT = COPIED_AT + (SCALES_APART ? ROW_STRIDE : SCALE_OFFSET);
constexpr int FP4_SCALES = 32;           // bytes
constexpr bool E5M2 = FP4 && !HAS_ROPE;  // FP4 codes become e5m2 bytes, else e4m3 bytes
constexpr int FP4_EXPONENT =
    E5M2 ? 7 : 0;  // K and V are 2^-7 of their values, so that the factors of the codes fit f16
#if EXTRA_ROWS
using ExtraRow = Fp4Row<EXTRA_ROW_STRIDE, EXTRA_SCALE_OFFSET, EXTRA_SCALE_STRIDE>;
constexpr int EXTRA_STRIDE = EXTRA_ROW_STRIDE;
static_assert(D_NOPE == D_V && SCALES_AT == D_V, "rows of both caches have their scales behind 512 codes");
#else
using ExtraRow = Row;  // not used
constexpr int EXTRA_STRIDE = ROW_STRIDE;
#endif
constexpr int SCALES_BEHIND = Row::SCALES_BEHIND, EXTRA_SCALES_BEHIND = ExtraRow::SCALES_BEHIND;
constexpr bool COPY_SCALES = SCALES_BEHIND > 0 || EXTRA_SCALES_BEHIND > 0;  // scales are copied apart from their row
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
using Division = DivisionOf<THREADS>;
constexpr End END = Division::END;
constexpr bool ONE_TURN = Division::ONE_TURN, FOUND_EARLY = Division::FOUND_EARLY && !DENSE;
constexpr bool INTERLEAVED = Division::EQUAL_SPLITS && INTERLEAVE_TILES;  // an item's splits take its tiles in turn
// Whether the consumers find the ends of the lists of the CTA's first FIRST_TURNS turns. With V4_FP8 full lists would
// take 1 to 4 % longer, with segments 1 to 2 %.
constexpr bool CONSUMERS_FIND_ENDS = (FLOAT_SCALES || ROPE_CODED) && END != End::KEEP && !DENSE;
constexpr int FIRST_TURNS = 4;
// COPIERS producer warps copy WARP_ROWS rows each of a stage. With four copiers a stage is full sooner; with one fewer
// instructions are issued.
constexpr int STAGE_ROWS = 16, COPIERS = DIVISION == CLUSTERS ? 4 : 1, WARP_ROWS = STAGE_ROWS / COPIERS;
constexpr int TILE_STAGES = TILE_ROWS / STAGE_ROWS;
// The consumers take the tiles of a split in units of one tile or of two. In units of two, a tile without rows
// completes an odd number. Units of two take fewer instructions.
constexpr int UNIT_TILES = Division::EQUAL_SPLITS ? 1 : 2;
constexpr int UNIT_STAGES = UNIT_TILES * TILE_STAGES;
// Rows of 576 e4m3 are stored in pairs with 16 bytes of padding behind each pair, so that one copy can bring both
// rows. STRIDE is then half of a pair.
constexpr bool PAIRED = PLAIN && ROW_STRIDE % LINE_BYTES == 64;
constexpr int EXPANDED_BYTES = SCALES_AT + FP4_SCALES;
constexpr int STRIDE = PAIRED   ? ROW_STRIDE + 8
                       : EXPAND ? EXPANDED_BYTES + (EXPANDED_BYTES / 16 % 2 == 0) * 16
                                : Row::STAGED_BYTES;
constexpr int STAGE_BYTES = STAGE_ROWS * STRIDE;
// Rows of a stage that have the same distance as in the cache: one copy brings them if they are neighbours there.
constexpr int RUN_ROWS = PAIRED ? 2 : STRIDE == ROW_STRIDE ? WARP_ROWS : 1;
constexpr int NOPE_BLOCKS = D_NOPE / 64, Q_BLOCKS = D_QK / 64;  // column blocks of 64; RoPE is the last
constexpr int HEADS_BLOCK_BYTES = HEADS * LINE_BYTES;  // a swizzled line for each head: a column block of Q, or P
// A chunk is the columns under one scale. If the kernel serves FP4 rows, chunks are as theirs.
constexpr int CHUNK_COLUMNS = EXPAND ? 16 : SCALE_TILE;
constexpr int CHUNKS = EXPAND ? D_NOPE / 16 : NUM_SCALES > 0 ? NUM_SCALES : 1;
constexpr int OWN_HEADS = HEADS / 4;  // heads of S^T and O^T that a thread holds (tile/heads.cuh)
// Denominators that a thread accumulates: those of all its heads, over its own rows. With 64 heads registers do not
// suffice: then those of two heads, over the rows of eight lanes.
constexpr int SUMS = HEADS == 64 ? 2 : OWN_HEADS;
// The least scale; smaller ones count as this. So neither the quotient of two scales nor P^T / r of a row of zeros
// overflows.
constexpr float LEAST_SCALE = 0x1p-60f;
constexpr int LEAST_EXPONENT = 127 - 60;
constexpr uint32_t MAX_P = 0x7800;  // 2^15 as f16
constexpr float REF_NONE = -1e30f;
// When a reference rises, the largest P^T becomes 2^HEADROOM, far above the smallest f16.
constexpr float HEADROOM = 8.0f;
static_assert((PAIRED ? 2 : 1) * STRIDE / 16 % 2 == 1, "ldmatrix reads eight rows from all banks");

// Named barriers; WARPGROUP_SYNC and P_READY: + warpgroup.
enum NamedBarrier { P_READY = 1, WARPGROUP_SYNC = 3, CONSUMER_SYNC = 5, PRODUCER_SYNC = 6 };

// Q is copied in eight groups of heads with gaps between them. So the same 32 bytes of heads of four groups are in
// different banks.
constexpr int GROUP_HEADS = HEADS / 8, GROUP_GAP = 32;

// Shared memory: Q, P of each warpgroup's tile, the ring, and `Small`: barriers and small arrays.
constexpr int Q_AT = 0, P_AT = Q_BLOCKS * HEADS_BLOCK_BYTES + 1024;
// The output is staged in the space of P, eight heads at a time.
constexpr int P_BYTES = HEADS < 32 ? 8 * 2 * D_V : 2 * HEADS_BLOCK_BYTES, RING_AT = P_AT + P_BYTES;
static_assert(Q_BLOCKS * HEADS_BLOCK_BYTES + 7 * GROUP_GAP <= P_AT && P_AT % 1024 == 0, "lines of P are swizzled");

// What the producers tell the consumers about a turn. Two are kept: of this turn and of the next.
struct TurnInfo {
    Query query;
    int first_head;
    bool begins_item, ends_item;  // no split of the item comes before, or after
#if DENSE
    int first_row, last_end;  // the split's first row in the request; the end of the rows that the last token sees
    int step;
#endif
};

template <int STAGES>
struct alignas(16) SmallOf {
    uint64_t full[STAGES], empty[STAGES];
    float ref[HEADS];  // references of P^T and O^T
    // If `raised`: O^T is multiplied by this before P of that warpgroup's tile is multiplied.
    float factor[2][HEADS];
    float across[2][4][HEADS];             // exchange between the warps of a warpgroup
    float scale[HEADS];                    // at the end: what O^T is multiplied by
    float largest[8][HEADS];               // the largest |O^T| in each warp's columns, for partial results
    uint16_t ratio[2][CHUNKS][TILE_ROWS];  // f16, scale / r
    uint64_t q_full, q_empty, ends_known;
    float q_max[8], logit_scale;
    uint32_t raised[2];
    uint32_t marks[STAGES];  // marks.cuh
    // Number of an item's tiles up to its last one with a valid entry. first_ends: found by each consumer warp for the
    // first turns. ends: found by each producer warp for a later turn.
    int first_ends[FIRST_TURNS][8], ends[4];
    TurnInfo turn_infos[2];
#if DENSE
    int seen[HEADS], step;  // request_lines.cuh
#endif
    int partials;  // number of earlier CTAs' partial results
    Division::State division;
};

// The stages of the ring: as many whole tiles as fit.
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

// `uniform` tells the compiler which values are the same in a warp; `opaque` keeps it from hoisting the others.
__device__ __forceinline__ Role consumer_role() {
    const uint32_t thread = opaque(threadIdx.x);
    return Role::of(thread, uniform(thread / WARPGROUP), uniform(thread / 32 % 4));
}
// The same for code that runs rarely: what follows from the lane is computed anew there, so that it occupies no
// registers in the main loop.
__device__ __forceinline__ Role rare_role(const Role& r) { return Role::of(read_thread_index(), r.warpgroup, r.warp); }
__device__ __forceinline__ void sync_warpgroup(const Role& r) {
    named_barrier_sync(WARPGROUP_SYNC + r.warpgroup, WARPGROUP);
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, CONSUMERS); }

// A turn in the producer warps. `turn`: its number in this CTA. `stage`: the number of its first stage.
struct Work : Division::Turn {
    int turn;
    uint32_t stage;
};

__device__ __forceinline__ TurnInfo turn_info_of(const Work& w) {
#if DENSE
    const int first_row = w.first_row + w.begin * TILE_ROWS;
    return {w.query, w.first_head, w.begin == 0, w.ends_item, first_row, w.last_end, w.step};
#else
    return {w.query, w.first_head, w.begin == 0, w.ends_item};
#endif
}

// With rows of PLAIN_FP8 q may be e4m3, too.
__device__ __forceinline__ bool has_e4m3_q(const AttentionParams& p) { return PLAIN && p.flags & E4M3_Q; }
__device__ __forceinline__ int bytes_of_q(const AttentionParams& p) { return D_QK * (has_e4m3_q(p) ? 1 : 2); }

__device__ __forceinline__ int num_turns(const AttentionParams& p) { return Division::num_turns(p, small().division); }

__device__ __forceinline__ Work find_work(const AttentionParams& p, int turn) {
    return Division::find_turn<Work>(p, small().division, turn);
}

// Where a row of a stage begins.
__device__ __forceinline__ int row_offset(int row) { return row * STRIDE - (PAIRED ? row % 2 * 8 : 0); }

// Stages are numbered through all turns of the CTA. These give a stage's place in the ring, and the parity of its
// phase.
__device__ __forceinline__ int place_of(uint32_t stage) { return stage % STAGES; }
__device__ __forceinline__ uint32_t phase_of(uint32_t stage) { return stage / STAGES & 1; }
__device__ __forceinline__ uint32_t stage_address(uint32_t stage) {
    return shared_address(shared) + RING_AT + place_of(stage) * STAGE_BYTES;
}
