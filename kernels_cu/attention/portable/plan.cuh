// Of portable: constants, shared memory, and who a thread is.
#pragma once
#include "attention/division/find_share.cuh"
#include "attention/division/turn.cuh"
#include "ptx/registers.cuh"
#include "rows/fp4_row.cuh"
#include "rows/place.cuh"
#include "tile/ring.cuh"
#include "tile/staged_rows.cuh"

constexpr int SCORE_WARPS = 4, OUTPUT_WARPS = 8;
constexpr int SCORE_THREADS = 32 * SCORE_WARPS, OUTPUT_THREADS = 32 * OUTPUT_WARPS;
constexpr int THREADS = SCORE_THREADS + OUTPUT_THREADS;
constexpr int GROUPS = HEADS >= 32 ? 2 : 1;    // of score warps; each has HEADS / GROUPS heads,
constexpr int SLICES = SCORE_WARPS / GROUPS;   // and each of its warps a slice of the columns
constexpr int M_TILES = HEADS / 16;            // mma row tiles of the CTA,
constexpr int GROUP_TILES = M_TILES / GROUPS;  // and of a group
constexpr int N_TILES = TILE_ROWS / 8;         // a tile's rows as columns of S,
constexpr int K_TILES = TILE_ROWS / 16;        // and as k of P.V
constexpr int V_STEPS = D_V / 16 / SLICES;     // steps of 16 columns of a score warp, among the first D_V columns,
constexpr int STEPS = D_QK / 16 / SLICES;      // and all
constexpr int Q_IN_REGISTERS = STEPS - Q_IN_SHARED;     // steps whose Q is in registers
constexpr int V_TILES = D_V / OUTPUT_WARPS / 8;         // mma column tiles of an output warp
constexpr int WARP_ROWS = TILE_ROWS / OUTPUT_WARPS;     // rows of a tile that an output warp brings
constexpr int LOOKUP_TILES = 8;                         // tiles whose rows it looks up at once, a lane a row
constexpr int SCANNED = 16;                             // list entries that a score thread looks at together, 32 apart
constexpr int TILES_OF_LOAD = 32 / TILE_ROWS;           // tiles of such a load of a warp,
constexpr int SCANNED_TILES = SCANNED * TILES_OF_LOAD;  // and of all of them
constexpr bool ODD_APART = GROUP_TILES * N_TILES <= 2;  // odd steps add to an S of their own: two chains of mma
constexpr bool ALL_GET_ALL = GROUP_TILES == 1;          // every warp of a group gets the sums of all its heads
constexpr bool QUANTIZED = Row::QUANTIZED;              // rows are widened: e4m3 or e2m1
constexpr bool FOLDED = Row::FOLDED_SCALES > 0;         // rows are widened unscaled: float32 scales go to S and P
constexpr int SCALE_COLUMNS = NUM_SCALES > 0 ? SCALE_TILE : 8;
static_assert(WARP_ROWS <= ROWS_AT_ONCE && (ALL_GET_ALL || (GROUP_TILES == 2 && SLICES == 2)), "");
static_assert(!FOLDED || NUM_SCALES == 4, "one or two scales a score warp");

// --- what was measured to be faster in some variants ------------------------------------------------------------

// P.V of a tile begins when S of the next is multiplied, so the two do not slow each other.
constexpr bool PV_BEHIND_QK = !QUANTIZED && TILE_ROWS > 16 && HEADS == 64;
// A CTA begins its next split while it writes the results of this one. Measured on an H200: up to 6 % faster, but 2 to
// 3 % slower for bf16 rows of width 576 in small tiles, and 1 to 2 % for FP8 rows in large ones, except V32_FP8 with
// 64 heads.
constexpr bool NEXT_EARLY =
    QUANTIZED ? TILE_ROWS == 16 || (FOLDED && HEADS == 64) : HEADS < 64 || TILE_ROWS > 16 || D_QK == D_V;
constexpr bool NEXT_Q_EARLY = NEXT_EARLY && !QUANTIZED;  // Q of the next split too
// Here ptxas finds that an output warp's loop is the same for all its threads. With the loop in uniform registers,
// which it then takes, bf16 rows of width 576 take 3 to 4 % longer in small tiles. It finds that nowhere else.
constexpr bool TILES_DIVERGENT = !NEXT_EARLY && !QUANTIZED;
constexpr bool MASK_IF_NEEDED = PV_BEHIND_QK;  // a branch, which costs more than it saves in small tiles
// Where registers are short, the softmax's sums and maxima are in shared memory while they are not used.
constexpr bool SUMS_IN_SHARED = !FOLDED && TILE_ROWS > 16 && HEADS == 64;

// --- numbers of the softmax ---------------------------------------------------------------------------------------

// References rise when a logit is this far above.
constexpr float REF_SLACK = 8.0f;
// FOLDED: P is multiplied by scales and then rounded to bf16, and is held in f16 until then: rounded to bf16 twice, it
// would be too coarse. References are this far below the logit that set them. So P is at most 2^15, which f16 can
// hold, and the smallest that is not 0 is 2^-31 of P at the reference.
constexpr float REF_BELOW = FOLDED || HALF_ITEMS ? 7.0f : 0.0f;
// FOLDED: a scale counts as at least this part of the one before, so that their ratio stays finite.
constexpr float LEAST_RATIO = 0x1p-64f;
__device__ __forceinline__ float least_scale(float first, float second) { return fmaxf(second, first * LEAST_RATIO); }

// --- rows of two layouts ------------------------------------------------------------------------------------------

// FoundRow: where a row was looked up to be. EXTRA_ROWS: a row of either cache.
#if EXTRA_ROWS
using ExtraRow = Fp4Row<EXTRA_ROW_STRIDE, EXTRA_SCALE_OFFSET, EXTRA_SCALE_STRIDE>;
constexpr int EXTRA_SCALES_OF_COPY = EXTRA_SCALE_OFFSET < 0 ? EXTRA_ROW_STRIDE : EXTRA_SCALE_OFFSET;  // in a raw row
static_assert(ExtraRow::STAGED_BYTES <= Row::STAGED_BYTES && D_NOPE == D_V && D_QK == D_V, "");
struct FoundRow {
    const uint8_t *data, *scale_bytes;
};
#else
using FoundRow = Row;
#endif

// --- shared memory ------------------------------------------------------------------------------------------------

// In this order: a ring of tiles, a ring of raw rows (as they lie in the cache), parts of S, P, a part of Q, and what
// is small. Fragments lie as threads hold them: 16 bytes a lane, 512 a warp.
constexpr int FRAGMENT_BYTES = 512;
constexpr int STAGE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int RAW_ROWS_BYTES = WARP_ROWS * Row::STAGED_BYTES;  // of an output warp and a tile
constexpr int RAW_BYTES = QUANTIZED ? OUTPUT_WARPS * RAW_ROWS_BYTES : 0;
constexpr int PART_BYTES = N_TILES * FRAGMENT_BYTES;  // S of the m tile that a score warp gives to others
constexpr int PART_BUFFER = SCORE_WARPS * PART_BYTES;
constexpr int PART_BUFFERS =
    (TILE_ROWS > 16 ? QUANTIZED && D_QK > D_V : !QUANTIZED) && HEADS > 32 ? 1 : 2;  // one where space is short
constexpr int P_BYTES = M_TILES * K_TILES * FRAGMENT_BYTES;
constexpr int Q_BYTES = SCORE_WARPS * Q_IN_SHARED * GROUP_TILES * FRAGMENT_BYTES;
constexpr int VALID_TILES = 2 * LOOKUP_TILES;
constexpr int MARKED_TILES = 32 * 32;                     // of a split, that have a mark: a lane's word of bits each
constexpr int MARK_BYTES = DENSE ? 4 : MARKED_TILES / 8;  // DENSE has none

template <int STAGES>
struct SmallOf {
    uint64_t tile_full[STAGES];
    FoundRow rows[LOOKUP_TILES][TILE_ROWS];       // where the rows of coming tiles are in memory
    float rescale[2][HEADS];                      // of O, before a tile
    float factor[HEADS];                          // of O, in the end
    alignas(4) uint8_t rescaled[2][SCORE_WARPS];  // a score warp's heads have factors other than 1; read as a word
    alignas(2) uint8_t valid[VALID_TILES][TILE_ROWS];  // a row's list entry names one; two are read at once
#if EXTRA_ROWS
    bool of_extra[OUTPUT_WARPS][VALID_TILES];  // a warp's rows of a tile are the extra cache's
#endif
    float4 sums[SUMS_IN_SHARED ? SCORE_THREADS : 1];  // sums and maxima of a score warp's threads
    alignas(16) int ends[SCORE_WARPS];  // tiles up to the last one that a score warp has marked; read all at once
    WorkItem work, next;                // of this split and of the next
    int expected;                       // tiles of this split, as far as is known when its first rows are asked for
    int tiles;                          // and those that are worked on
    int turn;                           // splits of this CTA that are done
    // Bytes that are written at one time stand in one word: ptxas reads those beside, too, which racecheck takes for a
    // race.
    alignas(4) uint8_t stage;       // where this split's first tile goes,
    uint8_t phase;                  // and the phase of that stage
    bool restarted;                 // this split has begun anew
    bool ends_item;                 // it is the last of its item
    alignas(4) uint8_t next_stage;  // of the next split
    uint8_t next_phase;
    bool restarts;  // this split is to begin anew
    bool skips;     // some tiles before its last one are passed over
    alignas(4) bool next_ends_item;
    int first_marked;  // w.begin, as it were: with it, marked tiles of the extra list begin at w.main_tiles
    alignas(4) uint8_t marks[MARK_BYTES];         // bits of tiles; a lane reads a word
    float logit_scale;                            // SCALE_OF_CALL: what logits are multiplied by
    int partials;                                 // partial results of other CTAs that are merged with the split's
    float top[HEADS], factor_of_partials[HEADS];  // of the merge: reference, and factor of all O relative to it
    Share<THREADS> share;
    // FOLDED, read two at a time: scales, and ratios of a score warp's two scales.
    alignas(8) float scale[FOLDED ? STAGES : 1][FOLDED ? NUM_SCALES : 1][TILE_ROWS];
    alignas(8) float ratio[FOLDED ? STAGES : 1][FOLDED ? 2 : 1][TILE_ROWS];
};

// Stages of both rings: as many as fit.
template <int STAGES, int RAW_STAGES>
__host__ __device__ constexpr int shared_bytes() {
    return STAGES * STAGE_BYTES + RAW_STAGES * RAW_BYTES + PART_BUFFERS * PART_BUFFER + 2 * P_BYTES + Q_BYTES +
           int(sizeof(SmallOf<STAGES>));
}
template <int N>
struct BytesOfStages {
    static constexpr int VALUE = shared_bytes<N, QUANTIZED ? 2 : 0>();
};
constexpr int MOST_STAGES = !QUANTIZED ? 6 : TILE_ROWS > 16 ? 2 : 3, MOST_RAW_STAGES = 4;
constexpr int STAGES = most_stages<BytesOfStages, SHARED_LIMIT, MOST_STAGES>();
template <int N>
struct BytesOfRawStages {
    static constexpr int VALUE = shared_bytes<STAGES, N>();
};
constexpr int RAW_STAGES = QUANTIZED ? most_stages<BytesOfRawStages, SHARED_LIMIT, MOST_RAW_STAGES>() : 1;
static_assert(QUANTIZED ? STAGES >= 2 && RAW_STAGES >= 2 : STAGES >= 3,
              "one for each kind of warp, and one for copies");
static_assert(QUANTIZED || TILE_ROWS > 16 || STAGES >= 4, "with three stages of 16 rows 64 heads take 6 % longer");

using Small = SmallOf<STAGES>;
constexpr int RAW_AT = STAGES * STAGE_BYTES, PARTS_AT = RAW_AT + RAW_STAGES * RAW_BYTES,
              P_AT = PARTS_AT + PART_BUFFERS * PART_BUFFER, Q_AT = P_AT + 2 * P_BYTES, SMALL_AT = Q_AT + Q_BYTES,
              SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(SHARED_BYTES <= SHARED_LIMIT, "");
// Swizzled tiles start at multiples of 128 bytes; everything else is read in pieces of up to 16 bytes.
static_assert(STAGE_BYTES % 128 == 0 && RAW_ROWS_BYTES % 16 == 0 && Row::STAGED_BYTES % 16 == 0, "");
static_assert(RAW_AT % 16 == 0 && PARTS_AT % 16 == 0 && P_AT % 16 == 0 && Q_AT % 16 == 0, "");
static_assert(SMALL_AT % alignof(Small) == 0 && TILE_ROWS % 2 == 0, "");

// How far ahead of P.V rows come, in tiles. When P.V of a tile is done,
constexpr int WIDENED_BEFORE = 2;  // QUANTIZED: the rows of this one behind it are widened,
constexpr int COPIED_BEFORE = QUANTIZED ? WIDENED_BEFORE + RAW_STAGES : STAGES - 1;  // and of this one copied
constexpr int STAGED_BEFORE = QUANTIZED ? WIDENED_BEFORE : COPIED_BEFORE;  // tiles in stages before the first P.V
static_assert(COPIED_BEFORE <= LOOKUP_TILES && LOOKUP_TILES <= 8 && LOOKUP_TILES * WARP_ROWS <= 32, "");

extern __shared__ __align__(128) uint8_t shared[];
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// Where a tile is.
__device__ __forceinline__ uint32_t stage_address(int stage) { return shared_address(shared) + stage * STAGE_BYTES; }

// QUANTIZED: where an output warp's raw rows of a tile are.
__device__ __forceinline__ uint32_t raw_rows(int warp, int stage) {
    return shared_address(shared) + RAW_AT + stage * RAW_BYTES + warp * RAW_ROWS_BYTES;
}

// What a lane has of P of m tile m and 16 rows.
__device__ __forceinline__ uint32_t p_fragment(int buffer, int m, int k, int lane) {
    return shared_address(shared) + P_AT + buffer * P_BYTES + (m * K_TILES + k) * FRAGMENT_BYTES + lane * 16;
}

// Named barriers (the picture in portable.cu); P_EMPTY, P_FULL, S_DONE: + buffer; GROUP_SYNC: + group.
enum NamedBarrier {
    P_EMPTY = 1,
    P_FULL = 3,
    OUTPUT_SYNC = 5,
    FACTORS_KNOWN = 6,
    GROUP_SYNC = 7,
    SCORE_SYNC = 9,
    S_DONE = 10,
    NEXT_SPLIT = 12,
    TILES_KNOWN = 13
};

// --- who a thread is ----------------------------------------------------------------------------------------------

// Computed anew wherever it is used: %tid is read through a volatile asm, so that nothing derived from it stays in
// registers. The output warps come first: warp number % 8 is the number among a warp's kind.
struct Role {
    int warp, lane, g, t;  // warp: among those of its kind

    static __device__ __forceinline__ Role here() {
        const uint32_t thread = read_thread_index(), lane = thread % 32;
        return {int(thread / 32 % OUTPUT_WARPS), int(lane), int(lane / 4), int(lane % 4)};
    }
    // Of a score warp.
    __device__ __forceinline__ int slice() const { return warp % SLICES; }
    __device__ __forceinline__ int group() const { return warp / SLICES; }
    // Which of the CTA's m tiles its m tile m is. Number 0 is that whose softmax it computes.
    __device__ __forceinline__ int tile_of_cta(int m) const {
        return group() * GROUP_TILES + (ALL_GET_ALL ? m : m ^ slice());
    }
    __device__ __forceinline__ int own_tile() const { return tile_of_cta(0); }
    // Of an output warp: the row of a tile that a lane looks up, and how many tiles behind the first.
    __device__ __forceinline__ int lookup_row() const { return warp * WARP_ROWS + lane % WARP_ROWS; }
    __device__ __forceinline__ int lookup_tile() const { return lane / WARP_ROWS; }
};

__device__ __forceinline__ int first_head() { return small().work.first_head; }
