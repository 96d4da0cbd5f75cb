// Part of portable: constants, shared memory, and thread roles.
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
constexpr int V_STEPS = D_V / 16 / SLICES;     // a score warp's steps of 16 columns: among the first D_V columns,
constexpr int STEPS = D_QK / 16 / SLICES;      // and among all columns
constexpr int Q_IN_REGISTERS = STEPS - Q_IN_SHARED;     // steps whose Q is in registers
constexpr int V_TILES = D_V / OUTPUT_WARPS / 8;         // mma column tiles of an output warp
constexpr int WARP_ROWS = TILE_ROWS / OUTPUT_WARPS;     // rows of a tile that an output warp copies
constexpr int LOOKUP_TILES = 8;                         // tiles whose rows it looks up at once, a row a lane
constexpr int SCANNED = 16;                             // list entries that a score thread scans at once, 32 apart
constexpr int TILES_OF_LOAD = 32 / TILE_ROWS;           // tiles that one such load of a warp covers,
constexpr int SCANNED_TILES = SCANNED * TILES_OF_LOAD;  // and that all of them cover
constexpr bool SEPARATE_ODD_STEPS =
    GROUP_TILES * N_TILES <= 2;                        // odd steps have accumulators of their own: two chains of mma
constexpr bool ALL_WARPS_GET_SUMS = GROUP_TILES == 1;  // every warp of a group gets the sums of all its heads
constexpr bool QUANTIZED = Row::QUANTIZED;             // rows are widened: e4m3 or e2m1
constexpr bool FOLDED = Row::FOLDED_SCALES > 0;        // float32 scales are applied to S and P, not to rows
constexpr int SCALE_COLUMNS = NUM_SCALES > 0 ? SCALE_TILE : 8;
static_assert(WARP_ROWS <= ROWS_AT_ONCE && (ALL_WARPS_GET_SUMS || (GROUP_TILES == 2 && SLICES == 2)), "");
static_assert(!FOLDED || NUM_SCALES == 4, "a score warp has one scale or two");

// --- variants that measurements chose ---------------------------------------------------------------------------

// P.V of a tile begins once S of the next tile is multiplied, so that the two do not slow each other.
constexpr bool PV_AFTER_NEXT_QK = !QUANTIZED && TILE_ROWS > 16 && HEADS == 64;
// A CTA begins its next split while it writes the results of this one. On an H200 that is up to 6 % faster. But it is
// 2 to 3 % slower for bf16 rows of width 576 in small tiles, and 1 to 2 % for FP8 rows in large tiles, except V32_FP8
// with 64 heads.
constexpr bool OVERLAP_SPLITS =
    QUANTIZED ? TILE_ROWS == 16 || (FOLDED && HEADS == 64) : HEADS < 64 || TILE_ROWS > 16 || D_QK == D_V;
constexpr bool LOAD_NEXT_Q_EARLY = OVERLAP_SPLITS && !QUANTIZED;  // Q of the next split too
// Here (and only here) ptxas finds that the loop over tiles is the same for all threads of an output warp, and puts it
// into uniform registers. bf16 rows of width 576 then take 3 to 4 % longer in small tiles. So that fact is hidden from
// ptxas.
constexpr bool HIDE_UNIFORM_LOOP = !OVERLAP_SPLITS && !QUANTIZED;
constexpr bool MASK_IF_NEEDED = PV_AFTER_NEXT_QK;  // by a branch, which costs more than it saves in small tiles
// Where registers are short, the sums and maxima of the softmax wait in shared memory while they are not used.
constexpr bool SUMS_IN_SHARED = !FOLDED && TILE_ROWS > 16 && HEADS == 64;

// --- numbers of the softmax ---------------------------------------------------------------------------------------

// A reference rises when a logit is this far above it.
constexpr float REF_SLACK = 8.0f;
// When a logit sets a reference, the reference is this far below the logit. FOLDED: P is f16 until it is multiplied by
// scales and rounded to bf16, because two roundings to bf16 would be too coarse. P is then at most 2^15, which fits
// f16, and the smallest P above 0 is 2^-31 of P at the reference.
constexpr float REF_BELOW = FOLDED || HALF_ITEMS ? 7.0f : 0.0f;
// FOLDED: a scale counts as at least this fraction of the scale before it, so that their ratio stays finite.
constexpr float LEAST_RATIO = 0x1p-64f;
__device__ __forceinline__ float least_scale(float first, float second) { return fmaxf(second, first * LEAST_RATIO); }

// --- rows of two layouts ------------------------------------------------------------------------------------------

// FoundRow: the address of a row that was looked up. EXTRA_ROWS: of a row of either cache.
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

// In this order: a ring of tiles, a ring of raw rows (in their form in the cache), parts of S, P, a part of Q, and
// `Small`: barriers and small arrays. Fragments are stored as threads hold them: 16 bytes a lane, 512 a warp.
constexpr int FRAGMENT_BYTES = 512;
constexpr int STAGE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int RAW_ROWS_BYTES = WARP_ROWS * Row::STAGED_BYTES;  // of an output warp and a tile
constexpr int RAW_BYTES = QUANTIZED ? OUTPUT_WARPS * RAW_ROWS_BYTES : 0;
constexpr int PART_BYTES = N_TILES * FRAGMENT_BYTES;  // the part of S, one m tile, that a score warp gives to others
constexpr int PART_BUFFER = SCORE_WARPS * PART_BYTES;
constexpr int PART_BUFFERS =
    (TILE_ROWS > 16 ? QUANTIZED && D_QK > D_V : !QUANTIZED) && HEADS > 32 ? 1 : 2;  // one buffer where space is short
constexpr int P_BYTES = M_TILES * K_TILES * FRAGMENT_BYTES;
constexpr int Q_BYTES = SCORE_WARPS * Q_IN_SHARED * GROUP_TILES * FRAGMENT_BYTES;
constexpr int VALID_TILES = 2 * LOOKUP_TILES;
constexpr int MARKED_TILES = 32 * 32;                     // tiles of a split that have a mark: 32 words of bits
constexpr int MARK_BYTES = DENSE ? 4 : MARKED_TILES / 8;  // DENSE has none

template <int STAGES>
struct SmallOf {
    uint64_t tile_full[STAGES];
    FoundRow rows[LOOKUP_TILES][TILE_ROWS];            // addresses of the rows of the next tiles
    float rescale[2][HEADS];                           // factors of O before a tile is added
    float factor[HEADS];                               // factors of O in the end
    alignas(4) uint8_t rescaled[2][SCORE_WARPS];       // some rescale of a score warp is not 1; read as a word
    alignas(2) uint8_t valid[VALID_TILES][TILE_ROWS];  // a row's list entry is valid; two are read at once
#if EXTRA_ROWS
    bool of_extra[OUTPUT_WARPS][VALID_TILES];  // a warp's rows of a tile are the extra cache's
#endif
    float4 sums[SUMS_IN_SHARED ? SCORE_THREADS : 1];  // sums and maxima of a score warp's threads
    alignas(16) int ends[SCORE_WARPS];  // number of tiles up to the last one that each score warp has marked
    WorkItem work, next;                // of this split and of the next
    int expected;                       // tiles of this split, as known when its first rows are copied
    int tiles;                          // tiles of this split that are worked on
    int turn;                           // number of this split in the CTA
    // Bytes that are written at the same time share a word: ptxas reads neighbouring bytes, too, which racecheck
    // reports as a race.
    alignas(4) uint8_t stage;       // stage of this split's first tile,
    uint8_t phase;                  // and the phase of that stage
    bool restarted;                 // this split was restarted
    bool ends_item;                 // this split is the last of its item
    alignas(4) uint8_t next_stage;  // of the next split
    uint8_t next_phase;
    bool restarts;  // this split must be restarted
    bool skips;     // some tiles before its last one are skipped
    alignas(4) bool next_ends_item;
    int first_marked;  // plays the part of w.begin: marked tiles of the extra list then begin at w.main_tiles
    alignas(4) uint8_t marks[MARK_BYTES];         // a bit a tile: it has a valid entry; read by words
    float logit_scale;                            // SCALE_OF_CALL: factor of the logits
    int partials;                                 // number of other CTAs' partial results to merge
    float top[HEADS], factor_of_partials[HEADS];  // merge: reference, and factor of every O relative to it
    Share<THREADS> share;
    // FOLDED: scales of a stage's rows, and the ratio of a score warp's two scales; two rows are read at a time.
    alignas(8) float scale[FOLDED ? STAGES : 1][FOLDED ? NUM_SCALES : 1][TILE_ROWS];
    alignas(8) float ratio[FOLDED ? STAGES : 1][FOLDED ? 2 : 1][TILE_ROWS];
};

// The stages of both rings: as many as fit.
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
              "a stage for each kind of warp, and one for copies");
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

// How many tiles rows come ahead. When P.V of a tile is done,
constexpr int WIDENED_BEFORE = 2;  // QUANTIZED: rows of the tile this far ahead are widened,
constexpr int COPIED_BEFORE =
    QUANTIZED ? WIDENED_BEFORE + RAW_STAGES : STAGES - 1;  // and rows of the tile this far ahead copied
constexpr int STAGED_BEFORE =
    QUANTIZED ? WIDENED_BEFORE : COPIED_BEFORE;  // tiles that fill stages before the first P.V
static_assert(COPIED_BEFORE <= LOOKUP_TILES && LOOKUP_TILES <= 8 && LOOKUP_TILES * WARP_ROWS <= 32, "");

extern __shared__ __align__(128) uint8_t shared[];
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// The address of a tile.
__device__ __forceinline__ uint32_t stage_address(int stage) { return shared_address(shared) + stage * STAGE_BYTES; }

// QUANTIZED: the address of an output warp's raw rows of a tile.
__device__ __forceinline__ uint32_t raw_rows(int warp, int stage) {
    return shared_address(shared) + RAW_AT + stage * RAW_BYTES + warp * RAW_ROWS_BYTES;
}

// The address of a lane's fragment of P: m tile m, 16 rows of k step k.
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

// --- thread roles -------------------------------------------------------------------------------------------------

// A thread's role. It is computed anew wherever it is used: %tid is read by volatile asm, so that nothing derived from
// it occupies registers. Output warps are the CTA's first warps, so warp number % 8 is the number among warps of the
// same kind.
struct Role {
    int warp, lane, g, t;  // warp: among those of its kind

    static __device__ __forceinline__ Role here() {
        const uint32_t thread = read_thread_index(), lane = thread % 32;
        return {int(thread / 32 % OUTPUT_WARPS), int(lane), int(lane / 4), int(lane % 4)};
    }
    // For a score warp: its slice of the columns, and its group.
    __device__ __forceinline__ int slice() const { return warp % SLICES; }
    __device__ __forceinline__ int group() const { return warp / SLICES; }
    // The number among the CTA's m tiles of this warp's m tile m. It computes the softmax of its m tile 0.
    __device__ __forceinline__ int tile_of_cta(int m) const {
        return group() * GROUP_TILES + (ALL_WARPS_GET_SUMS ? m : m ^ slice());
    }
    __device__ __forceinline__ int own_tile() const { return tile_of_cta(0); }
    // For an output warp: the row of a tile that a lane looks up, and which of the next tiles it is in.
    __device__ __forceinline__ int lookup_row() const { return warp * WARP_ROWS + lane % WARP_ROWS; }
    __device__ __forceinline__ int lookup_tile() const { return lane / WARP_ROWS; }
};

__device__ __forceinline__ int first_head() { return small().work.first_head; }
