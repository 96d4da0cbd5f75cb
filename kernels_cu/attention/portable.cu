// Sparse attention on mma.sync, for every GPU from sm_80 on: decode and prefill, every cache layout.
//
// A CTA works on a split of a work item at a time: one query, HEADS heads, some of its rows, in tiles of TILE_ROWS. It
// has one split, whose result combine.cu merges with the others', or an equal share of all rows of the launch
// (shares.cuh). Two kinds of warps work on neighbouring tiles at the same time:
//
//   4 score warps    S = Q.K^T and softmax. They form GROUPS groups, each with HEADS / GROUPS heads. A warp of a group
//                    multiplies its share of the columns, then the warps add their parts of S through shared memory. Q
//                    is held in registers, its last slices in shared memory. 64 heads: each of the two warps of a group
//                    gets the sums of half of the group's heads. Fewer heads: all warps get all.
//   8 output warps   O += P.V, all heads x 64 columns each. They also bring the rows of later tiles.
//
//   tile             output warps           score warps                                          output warps
//                    rows  -->              S parts --> exchange --> S --> P, rescale factors --> O
//                             tile_full[stage]      P_EMPTY[tile % 2]               P_FULL[tile % 2]
//
//   tile_full[stage]   mbarrier: all rows of a stage are there, as bf16
//   P_EMPTY + i        named: output warps have read buffer i of P; all score warps have left their parts of S
//   P_FULL + i         named: score warps have written buffer i of P; all output warps are done with the tile before
//   S_DONE + i         named: score warps have multiplied S of a tile (where P.V of the tile before waits for that)
//   OUTPUTS            named: output warps are done with a tile
//   SCORES + i         named: score warps of group i have read each other's parts of S (where these have one buffer)
//   FOUND              named: score warps know the split's tiles, and the next split; later, how many partial results
//                      of other CTAs there are
//   CUT_OFF            named: output warps know the split's tiles, and the next split
//   FINAL              named: score warps have left the final factors of the heads
//   TURN               named: all warps are done with a split, or leave it to begin anew; all know the next
//
// What stands beside what. 163 KB, bf16: all warps share the tensor cores, and score warps, which have more to do, are
// slowed by P.V; so P.V waits for S of the next tile and runs beside its softmax. Elsewhere P.V begins when P is there.
//
// From a split to the next (NEXT_EARLY). While P.V is still multiplied, a score thread finds the next split. When O is
// complete, output warps start to copy the next split's first rows, then they write O; score warps write statistics,
// then they load the next Q (bf16 rows).
//
// Output warps look up where their rows of the next NOTED_TILES tiles are, a lane a row, and note the addresses in
// shared memory: looked up tile by tile, that chain of dependent instructions took longer than a tile's products.
//
// bf16 rows are copied (cp.async) into the stage of a tile that all output warps are done with. FP8 rows are copied as
// they lie in the cache into a ring that each output warp has for its own rows, some tiles ahead. From there the warp
// widens them to bf16, once, after P.V of the tile two before has freed the stage. UE8M0 scales: scaled, which is exact.
// NVFP4: scaled, which is exact. PLAIN_FP8: not scaled, which is exact; the call's scale is a factor on logits and on results.
// V32_FP8: not scaled, for a value times a float32 would be rounded. A score warp scales S where the columns of a scale
// end: ((S_0 * c_0 / c_1) + S_1) * c_1. An output warp, whose columns have one scale, multiplies P by it; P is
// float16 until then, so that it is rounded to bf16 once. That rounding is the same for all columns of a scale, and the
// errors of few rows do not cancel: in a split of one tile, what P lost by the rounding is multiplied too.
//
// References (what logits are relative to) rise when a logit is REF_SLACK above; that is rare, and O is rescaled then.
//
// List entries that are invalid are not read: their rows are zeros in the stage and their logits become -inf. Tiles in
// which no entry is valid are passed over: while the first rows of a split come, score warps look at all its entries
// and mark the tiles that have a valid one. The n-th marked tile then is tile n of the loops, which know nothing of it:
// only where output warps ask for list entries, once in NOTED_TILES tiles, they look up which tiles come. A mark is a
// bit. Only the first MARKED_TILES of a split have one, for more do not fit; those behind are worked on up to the last
// that has a valid entry.
//
// The rows that come meanwhile are those of the list's first COPIED_BEFORE tiles. If there is one among them that is
// passed over, and marked ones behind it, the split begins anew: all warps leave it and take it again, and now the
// first marked tiles are brought. What has come in vain stays in its stages, which count as used.
//
// EXTRA_ROWS: rows of the extra cache are of another layout, V41_FP4 or V41_FP4_SPLIT. A tile has rows of one cache: which
// one is noted with their addresses, and copies and widening go by it.
//
// DENSE: rows come from a block table. A query is a request, and its heads are the request's lines: its query tokens times
// their heads, which share its rows. All tiles are worked on; in those that not all tokens see in full, logits of lines
// that do not see a row become -inf.
#include "attention/division/partials.cuh"
#include "attention/division/results.cuh"
#include "attention/division/shares.cuh"
#include "attention/division/turn.cuh"
#include "attention/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "rows/fp4_row.cuh"
#include "rows/items.cuh"
#include "rows/nvfp4.cuh"
#include "rows/place.cuh"
#include "rows/quantize.cuh"
#include "rows/scales.cuh"
#include "tile/ring.cuh"
#include "tile/softmax.cuh"
#include "tile/staged_rows.cuh"
#include "tile/warp.cuh"

constexpr int SCORE_WARPS = 4, OUTPUT_WARPS = 8;
constexpr int SCORE_THREADS = 32 * SCORE_WARPS, OUTPUT_THREADS = 32 * OUTPUT_WARPS;
constexpr int THREADS = SCORE_THREADS + OUTPUT_THREADS;
constexpr int GROUPS = HEADS >= 32 ? 2 : 1, SLICES = SCORE_WARPS / GROUPS;
constexpr int M_TILES = HEADS / 16, GROUP_TILES = M_TILES / GROUPS;    // mma row tiles of the CTA, of a group
constexpr int N_TILES = TILE_ROWS / 8, K_TILES = TILE_ROWS / 16;       // a tile's rows as columns of S, as k of P.V
constexpr bool FP8 = Row::QUANTIZED, FOLDED = Row::FOLDED_SCALES > 0;  // FP8: or e2m1
constexpr int V_STEPS = D_V / 16 / SLICES;              // a score warp's slices of 16 columns among the first D_V
constexpr int STEPS = D_QK / 16 / SLICES;               // all its slices
constexpr int Q_IN_REGISTERS = STEPS - Q_IN_SHARED;     // slices of Q in registers
constexpr int V_TILES = D_V / OUTPUT_WARPS / 8;         // mma column tiles of an output warp
constexpr int COPIED_ROWS = TILE_ROWS / OUTPUT_WARPS;   // rows of a tile that an output warp brings
constexpr int NOTED_TILES = 8;                          // tiles whose rows a warp looks up at once, a lane a row
constexpr bool ODD_APART = GROUP_TILES * N_TILES <= 2;  // S of odd steps has registers of its own
constexpr bool ALL_GET_ALL = GROUP_TILES == 1;          // every warp of a group gets all sums
// P.V of a tile begins when S of the next is multiplied, so the two do not slow each other.
constexpr bool PV_BEHIND_QK = !FP8 && TILE_ROWS > 16 && HEADS == 64;
// A CTA begins its next split while it writes the results of this one. Measured on an H200: up to 6 % faster, but 2 to
// 3 % slower for bf16 rows of width 576 in small tiles, and 1 to 2 % for FP8 rows in large ones, except V32_FP8 with 64
// heads.
constexpr bool NEXT_EARLY =
    FP8 ? TILE_ROWS == 16 || (FOLDED && HEADS == 64) : HEADS < 64 || TILE_ROWS > 16 || D_QK == D_V;
// Here ptxas finds that an output warp's loop is the same for all its threads. With the loop in uniform registers,
// which it then takes, bf16 rows of width 576 take 3 to 4 % longer in small tiles. It finds that nowhere else.
constexpr bool TILES_DIVERGENT = !NEXT_EARLY && !FP8;
constexpr bool NEXT_Q_EARLY = NEXT_EARLY && !FP8;  // Q of the next split too
constexpr bool MASK_IF_NEEDED = PV_BEHIND_QK;      // a branch, which costs more than it saves in small tiles
// Where registers are short, the softmax's sums and maxima are in shared memory while they are not used.
constexpr bool SUMS_IN_SHARED = !FOLDED && TILE_ROWS > 16 && HEADS == 64;
constexpr int SCALE_COLUMNS = NUM_SCALES > 0 ? SCALE_TILE : 8;
constexpr int STAGED_SCALES = SCALES_APART ? ROW_STRIDE : SCALE_OFFSET;  // of a row in the staging area
constexpr float REF_SLACK = 8.0f;
// V32_FP8: P is multiplied by scales and then rounded to bf16, and is held in f16 until then: rounded to bf16 twice, it
// would be too coarse. References are this far below the logit that set them. So P is at most 2^15, which f16 can hold,
// and the smallest that is not 0 is 2^-31 of P at the reference.
constexpr float REF_BELOW = FOLDED || HALF_ITEMS ? 7.0f : 0.0f;
constexpr float LEAST_RATIO = 0x1p-64f;  // a scale of which the one before is more times as large counts as larger
static_assert(COPIED_ROWS <= ROWS_AT_ONCE && (ALL_GET_ALL || (GROUP_TILES == 2 && SLICES == 2)), "");
static_assert(!FOLDED || NUM_SCALES == 4, "one or two scales a score warp");

#if EXTRA_ROWS
using ExtraRow = Fp4Row<EXTRA_ROW_STRIDE, EXTRA_SCALE_OFFSET, EXTRA_SCALE_STRIDE>;
static_assert(ExtraRow::STAGED_BYTES <= Row::STAGED_BYTES && D_NOPE == D_V && D_QK == D_V, "");
// A row of either cache.
struct NotedRow {
    const uint8_t *data, *scale_bytes;
};
#else
using NotedRow = Row;
#endif

enum NamedBarrier {
    P_EMPTY = 1,
    P_FULL = 3,
    OUTPUTS = 5,
    FINAL = 6,
    SCORES = 7,
    FOUND = 9,
    S_DONE = 10,
    TURN = 12,
    CUT_OFF = 13
};

// Shared memory: tiles, rows as they are in the cache, parts of S, P, slices of Q, and the rest. Fragments lie as
// threads hold them.
constexpr int STAGE_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int RAW_ROWS_BYTES = COPIED_ROWS * Row::STAGED_BYTES;  // of an output warp and a tile
constexpr int RAW_BYTES = FP8 ? OUTPUT_WARPS * RAW_ROWS_BYTES : 0;
constexpr int PARTS = ALL_GET_ALL ? 1 : GROUP_TILES - 1;  // m tiles that a score warp gives to others
constexpr int PART_BYTES = PARTS * N_TILES * 512;         // of a warp
constexpr int PART_BUFFER = SCORE_WARPS * PART_BYTES;
constexpr int PART_BUFFERS =
    (TILE_ROWS > 16 ? FP8 && D_QK > D_V : !FP8) && HEADS > 32 ? 1 : 2;  // one where space is short
constexpr int P_BYTES = M_TILES * K_TILES * 512;
constexpr int Q_BYTES = SCORE_WARPS * Q_IN_SHARED * GROUP_TILES * 512;
constexpr int VALID_TILES = 2 * NOTED_TILES;
// Entries that a score thread looks at together, tiles of a warp's load, and of all its loads; tiles that have a mark.
constexpr int LOOKS = 16, TILES_OF_LOOK = 32 / TILE_ROWS, LOOKED_TILES = LOOKS * TILES_OF_LOOK, MARKED_TILES = 32 * 32;

template <int STAGES>
struct SmallOf {
    uint64_t tile_full[STAGES];
    NotedRow rows[NOTED_TILES][TILE_ROWS];        // where the rows of coming tiles are in memory
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
    int brought, tiles;                 // of this split: the first of how many come; worked on
    int turn;                           // splits of this CTA that are done
    // Bytes that are written at one time stand in one word: ptxas reads those beside, too, which racecheck takes for a
    // race.
    alignas(4) uint8_t stage;       // where this split's first tile goes,
    uint8_t phase;                  // and the phase of that stage
    bool again, ends_item;          // it has begun anew; it is the last of its item
    alignas(4) uint8_t next_stage;  // of the next split
    uint8_t next_phase;
    bool anew, holes;  // this split is to begin anew; some of its tiles are passed over
    alignas(4) bool next_ends_item;
    int first_marked;  // w.begin, as it were: with it, marked tiles of the extra list begin at w.main_tiles
    alignas(4) uint8_t marks[DENSE ? 4 : MARKED_TILES / 8];  // bits of tiles; a lane reads a word
    float logit_scale;                                       // SCALE_OF_CALL: what logits are multiplied by
    int partials;                                 // partial results of other CTAs that are merged with the split's
    float top[HEADS], factor_of_partials[HEADS];  // of the merge: reference, and factor of all O relative to it
    Share<THREADS> share;
    // Of V32_FP8, read two at a time: scales, and ratios of a score warp's two scales.
    alignas(8) float scale[FOLDED ? STAGES : 1][FOLDED ? NUM_SCALES : 1][TILE_ROWS];
    alignas(8) float ratio[FOLDED ? STAGES : 1][FOLDED ? 2 : 1][TILE_ROWS];
};

// Stages of tiles and of rows as they are in the cache: as many as fit.
template <int STAGES, int RAW_STAGES>
__host__ __device__ constexpr int shared_bytes() {
    return STAGES * STAGE_BYTES + RAW_STAGES * RAW_BYTES + PART_BUFFERS * PART_BUFFER + 2 * P_BYTES + Q_BYTES +
           int(sizeof(SmallOf<STAGES>));
}
constexpr int MOST_STAGES = 6, MOST_RAW_STAGES = 4;
template <int N>
struct BytesOfStages {
    static constexpr int VALUE = shared_bytes<N, FP8 ? 2 : 0>();
};
constexpr int STAGES = most_stages<BytesOfStages, SHARED_LIMIT, FP8 ? (TILE_ROWS > 16 ? 2 : 3) : MOST_STAGES>();
template <int N>
struct BytesOfRawStages {
    static constexpr int VALUE = shared_bytes<STAGES, N>();
};
constexpr int RAW_STAGES = FP8 ? most_stages<BytesOfRawStages, SHARED_LIMIT, MOST_RAW_STAGES>() : 1;
static_assert(FP8 ? STAGES >= 2 && RAW_STAGES >= 2 : STAGES >= 3, "one for each kind of warp, and one for copies");
static_assert(FP8 || TILE_ROWS > 16 || STAGES >= 4, "with three stages of 16 rows 64 heads take 6 % longer");
constexpr int WIDENED_BEFORE = 2;  // tiles from P.V to those that are widened behind it
constexpr int COPIED_BEFORE = FP8 ? WIDENED_BEFORE + RAW_STAGES : STAGES - 1;  // tiles from P.V to copies behind it
constexpr int STAGED_BEFORE = FP8 ? WIDENED_BEFORE : COPIED_BEFORE;  // tiles that a split's begin brings to stages
static_assert(COPIED_BEFORE <= NOTED_TILES && NOTED_TILES <= 8 && NOTED_TILES * COPIED_ROWS <= 32, "");
using Small = SmallOf<STAGES>;
constexpr int RAW_AT = STAGES * STAGE_BYTES, PARTS_AT = RAW_AT + RAW_STAGES * RAW_BYTES,
              P_AT = PARTS_AT + PART_BUFFERS * PART_BUFFER, Q_AT = P_AT + 2 * P_BYTES, SMALL_AT = Q_AT + Q_BYTES,
              SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(SHARED_BYTES <= SHARED_LIMIT, "");
// Swizzled tiles start at multiples of 128 bytes; everything else is read in pieces of up to 16 bytes.
static_assert(STAGE_BYTES % 128 == 0 && RAW_ROWS_BYTES % 16 == 0 && Row::STAGED_BYTES % 16 == 0, "");
static_assert(RAW_AT % 16 == 0 && PARTS_AT % 16 == 0 && P_AT % 16 == 0 && Q_AT % 16 == 0, "");
static_assert(SMALL_AT % alignof(Small) == 0 && TILE_ROWS % 2 == 0, "");

extern __shared__ __align__(128) uint8_t shared[];
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// --- who a thread is ------------------------------------------------------------------------------------------

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
};

__device__ __forceinline__ int first_head() { return small().work.first_head; }

#if DENSE
// The query token and the head of a request's line `head`.
__device__ __forceinline__ int token_of(const AttentionParams& p, int head) { return divide(head, dense(p).heads); }
__device__ __forceinline__ Query query_at(const AttentionParams& p, const Query& request, int head) {
    return {request.index, request.b, token_of(p, head)};
}
__device__ __forceinline__ int head_at(const AttentionParams& p, int head) {
    return head - token_of(p, head) * int(dense(p).heads.value);
}
#else
__device__ __forceinline__ const Query& query_at(const AttentionParams&, const Query& query, int) { return query; }
__device__ __forceinline__ const int& head_at(const AttentionParams&, const int& head) { return head; }
#endif

// Where a tile is.
__device__ __forceinline__ uint32_t stage_address(int stage) { return shared_address(shared) + stage * STAGE_BYTES; }

// FP8: where an output warp's rows of a tile are, as they lie in the cache.
__device__ __forceinline__ uint32_t raw_rows(int warp, int stage) {
    return shared_address(shared) + RAW_AT + stage * RAW_BYTES + warp * RAW_ROWS_BYTES;
}

// What a lane has of P of m tile m and 16 rows.
__device__ __forceinline__ uint32_t p_fragment(int buffer, int m, int k, int lane) {
    return shared_address(shared) + P_AT + buffer * P_BYTES + (m * K_TILES + k) * 512 + lane * 16;
}

// V32_FP8: the second of a score warp's two scales.
__device__ __forceinline__ float least_scale(float first, float second) { return fmaxf(second, first * LEAST_RATIO); }

// --- rows in --------------------------------------------------------------------------------------------------

// Whether the launch's rows are divided into shares (shares.cuh). If not, a CTA has one split: grid x = query * head
// tiles + head tile, y = split.
__device__ __forceinline__ bool in_shares(const AttentionParams& p) { return p.ready != nullptr; }

// How many turns this CTA has.
__device__ __forceinline__ int num_turns(const AttentionParams& p) {
    return in_shares(p) ? small().share.num_items() : 1;
}

__device__ __forceinline__ bool has_next(const AttentionParams& p) { return small().turn + 1 < num_turns(p); }

// Find this CTA's split number `turn`, as the next. One thread calls.
__device__ __forceinline__ void find_split(const AttentionParams& p, int turn) {
    Small& sm = small();
    WorkItem& w = sm.next;
    const int item = in_shares(p) ? sm.share.last_item() - turn : int(blockIdx.x), head_tiles = num_head_tiles(p);
    sm.next_ends_item = true;
    if (!in_shares(p)) {
        find_item(p, w, item / head_tiles, item % head_tiles, blockIdx.y, p.num_splits);
        return;
    }
    find_item(p, w, query_of_item(p, item), head_tile_of_item(p, item), 0, 1);
    const Boundary begin = sm.share.begin, end = sm.share.end;
    if (item == begin.item) w.begin = 2 * begin.pair;
    if (item == end.item) {
        w.end = 2 * end.pair;
        sm.next_ends_item = false;
    }
}

// Go on to the next split, or to the same one where that begins anew. Returns whether there is one. Output warps call
// (OUTPUT), and score warps.
template <bool OUTPUT>
__device__ __forceinline__ bool take_next_split(const AttentionParams& p) {
    Small& sm = small();
    const bool sets = OUTPUT && read_thread_index() == 0;
    if (!NEXT_EARLY && sets && has_next(p)) find_split(p, sm.turn + 1);
    named_barrier_sync(TURN, THREADS);
    if (sets) {
        sm.stage = sm.next_stage, sm.phase = sm.next_phase;
        sm.again = sm.anew;
        if (!sm.anew) {
            ++sm.turn;
            sm.work = sm.next;
            sm.ends_item = sm.next_ends_item;
            sm.partials = 0;
        }
        sm.brought = sm.anew ? sm.tiles : sm.work.end - sm.work.begin;
    }
    named_barrier_sync(TURN, THREADS);
    return sm.turn < num_turns(p);
}

// A CTA has two places for partial results: for what it leaves to another CTA, and for O of the split with which it
// merges what others have left. (Merged in registers, O would spill.)
__device__ __forceinline__ PartialResults<4> partial_of(const AttentionParams& p, int cta, bool merged) {
    return {p.cluster_parts, 2 * cta + merged};
}
__device__ __forceinline__ float4 statistics_of(const PartialResults<4>& partial, int head) {
    return partial.statistics_of(partial.rank, head);
}

// The marks of 32 tiles of a split, those of word `lane`.
__device__ __forceinline__ uint32_t marks_of(const Split& w, int lane) {
    return 32 * lane < w.end - w.begin ? reinterpret_cast<const uint32_t*>(small().marks)[lane] : 0;
}

// How many of a split's first `end` tiles are marked, or are behind those that have a mark. A warp calls.
__device__ __forceinline__ int count_marked(const Split& w, int end) {
    const int lane = Role::here().lane, left = end - 32 * lane;
    const uint32_t marks = left <= 0 ? 0 : left < 32 ? marks_of(w, lane) & ((1u << left) - 1) : marks_of(w, lane);
    return __reduce_add_sync(~0u, __popc(marks)) + max(end - MARKED_TILES, 0);
}

// Which tile of a split its marked tile number `n` is; one behind the split if there are not so many. A warp calls.
__device__ __forceinline__ int find_marked(const Split& w, int n) {
    const int lane = Role::here().lane;
    const uint32_t marks = marks_of(w, lane);
    const int up_to = inclusive_sum(__popc(marks), lane), before = up_to - __popc(marks);
    const int behind = n - __shfl_sync(~0u, up_to, 31);
    int word = 0, bit = 0;
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
        if (__shfl_sync(~0u, before, word + step) <= n) word += step;
    }
    const uint32_t bits = __shfl_sync(~0u, marks, word);
    n -= __shfl_sync(~0u, before, word);
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) {
        const int count = __popc(bits >> bit & ((1 << step) - 1));
        if (count <= n) bit += step, n -= count;
    }
    return behind < 0 ? 32 * word + bit : MARKED_TILES + behind;
}

// The list entry of a row of an output warp; -1 where there is none. A lane has row lane % COPIED_ROWS of the warp's,
// of tile `count` + lane / COPIED_ROWS of the split. `holes`: of the marked ones. DENSE: the row's block.
__device__ __forceinline__ int32_t load_entries(const AttentionParams& p, const WorkItem& w, int count, bool holes) {
    const Role r = Role::here();
    const int n = count + r.lane / COPIED_ROWS;
#if DENSE
    const int tile = w.begin + n, at = tile * TILE_ROWS + r.warp * COPIED_ROWS + r.lane % COPIED_ROWS;
    if (tile >= w.end || at >= w.main_length) return -1;
    return load_block(dense(p), w.query.b, w.first_row + at);
#else
    return load_entry(p, w, w.begin + (holes ? find_marked(w, n) : n), r.warp * COPIED_ROWS + r.lane % COPIED_ROWS);
#endif
}

// The row that an entry of a tile names.
__device__ __forceinline__ NotedRow find_noted(const AttentionParams& p, const WorkItem& w, int tile, int32_t entry) {
#if EXTRA_ROWS
    if (!is_valid(p, w, tile, entry)) return {nullptr, nullptr};
    if (tile < w.main_tiles) {
        const Row row = Row::of_slot(p.main, entry);
        return {row.data, row.scales()};
    }
    const ExtraRow row = ExtraRow::of_slot(p.extra, entry);
    return {row.data, row.scales()};
#else
    return find_row(p, w, tile, entry);
#endif
}

// Look up where an output warp's rows of tiles `count` .. `count` + NOTED_TILES - 1 of the split are, and which are
// valid. `entry`: what load_entries gave for them.
__device__ __forceinline__ void note_rows(const AttentionParams& p, const WorkItem& w, int count, int32_t entry,
                                          bool holes) {
    const Role r = Role::here();
    Small& sm = small();
    const int i = r.lane / COPIED_ROWS, row = r.warp * COPIED_ROWS + r.lane % COPIED_ROWS;
#if DENSE
    const Row from = row_in_block<Row>(dense(p), entry, w.first_row + (w.begin + count + i) * TILE_ROWS + row);
#else
    const int tile = (holes ? sm.first_marked : w.begin) + count + i;
    const NotedRow from = find_noted(p, w, tile, entry);
#endif
    __syncwarp();
    if (i < NOTED_TILES) {
        sm.rows[i][row] = from;
        sm.valid[(count + i) % VALID_TILES][row] = from.data != nullptr;
#if EXTRA_ROWS
        if (r.lane % COPIED_ROWS == 0) sm.of_extra[r.warp][(count + i) % VALID_TILES] = tile >= w.main_tiles;
#endif
    }
    __syncwarp();
}

// The same. Returns the entries of the tiles behind, which are on their way.
__device__ __forceinline__ int32_t note_and_load(const AttentionParams& p, const WorkItem& w, int count, int32_t entry,
                                                 bool holes) {
    note_rows(p, w, count, entry, holes);
    return load_entries(p, w, count + NOTED_TILES, holes);
}

// Look the first tiles of a split up again, when it is known which tiles are passed over. Returns the entries of those
// behind.
__device__ __forceinline__ int32_t note_marked(const AttentionParams& p, const WorkItem& w) {
    int32_t entry = -1;
#pragma unroll 1
    for (int count = 0; count <= NOTED_TILES; count += NOTED_TILES) {
        if (count > 0) note_rows(p, w, 0, entry, true);
        entry = load_entries(p, w, count, true);
    }
    return entry;
}

// A score thread's list entries of LOOKED_TILES tiles, which are 32 apart.
using Looks = int32_t[LOOKS];

// Where a lane's entries of tiles `first` .. of a split begin, as if the lists were one, of whole tiles.
__device__ __forceinline__ int first_look(const WorkItem& w, int first) {
    return (w.begin + first) * TILE_ROWS + Role::here().lane;
}

// Ask for the entries of tiles `first` .. of a split; -1 where there are none.
__device__ __forceinline__ void load_looks(const AttentionParams& p, const WorkItem& w, int first, Looks& looks) {
#pragma unroll
    for (int32_t& look : looks) look = -1;
    if (w.end - w.begin <= first) return;
    const int row = first_look(w, first), main_rows = w.main_tiles * TILE_ROWS, end = w.end * TILE_ROWS;
    const int32_t* main = list_of(p.main, w.query) + row;
    const int left = min(w.main_length, end) - row;
#pragma unroll
    for (int i = 0; i < LOOKS; ++i) {
        if (32 * i < left) looks[i] = main[32 * i];
    }
    if (w.end <= w.main_tiles) return;
    const int32_t* extra = list_of(p.extra, w.query) + row - main_rows;
    const int before = main_rows - row, extra_left = min(w.extra_length + main_rows, end) - row;
#pragma unroll
    for (int i = 0; i < LOOKS; ++i) {
        if (32 * i >= before && 32 * i < extra_left) looks[i] = extra[32 * i];
    }
}

// Which of the tiles `first` .. have a valid entry, a bit each. `looks`: what load_looks gave. A warp calls.
__device__ __forceinline__ uint32_t find_valid(const AttentionParams& p, const WorkItem& w, int first,
                                               const Looks& looks) {
    const int main_left = w.main_tiles * TILE_ROWS - first_look(w, first);
    const auto slots_of = [](const Source& source) { return uint32_t(min(source.num_slots, int64_t(1) << 31)); };
    const uint32_t main_slots = slots_of(p.main), extra_slots = slots_of(p.extra);
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < LOOKS; ++i) {
        if (uint32_t(looks[i]) < (32 * i < main_left ? main_slots : extra_slots)) mine |= 1u << i * TILES_OF_LOOK;
    }
    return __reduce_or_sync(~0u, mine << Role::here().lane / TILE_ROWS);
}

// Mark tiles `first` .. of the split. Returns how many tiles there are up to the last marked one. A warp calls.
__device__ __forceinline__ int mark_tiles(int first, uint32_t marks) {
    const int lane = Role::here().lane;
    if (first < MARKED_TILES && lane < LOOKED_TILES / 8) small().marks[first / 8 + lane] = marks >> 8 * lane;
    return marks == 0 ? 0 : first + 32 - __clz(marks);
}

// Wait for the first tiles that a split's begin brings to the stages.
__device__ __forceinline__ void wait_for_first_tiles(int count) {
    int stage = small().stage, phase = small().phase;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        mbarrier_wait(shared_address(&small().tile_full[stage]), phase);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// Find which tiles of this split are worked on, and return how many. `valid`: what find_valid gave for this warp's
// first tiles. Score warps call.
//
// -1 if the split begins anew. The tiles that have come in vain are waited for here: once CUT_OFF is passed, the next
// ones may come to their stages. So it is where fewer tiles are worked on than come. DENSE: all tiles are worked on.
__device__ __forceinline__ int find_tiles(const AttentionParams& p, uint32_t valid) {
    constexpr int ROUND = SCORE_WARPS * LOOKED_TILES;
    static_assert(MARKED_TILES % ROUND == 0 && ROUND % 32 == 0, "");
    const Role r = Role::here();
    Small& sm = small();
    const WorkItem& w = sm.work;
    const int all = w.end - w.begin;
#if DENSE
    if (r.warp == 0 && r.lane == 0) {
        sm.tiles = all;
        sm.holes = sm.anew = false;
        sm.next_stage = (sm.stage + uint32_t(all)) % STAGES;
        sm.next_phase = sm.phase ^ ((sm.stage + uint32_t(all)) / STAGES & 1);
    }
    return uniform(all);
#endif
    int end = 0;
#pragma unroll 1
    for (int begin = 0; begin < all; begin += ROUND) {
        const int first = begin + r.warp * LOOKED_TILES;
        if (begin > 0) {
            Looks looks;
            load_looks(p, w, first, looks);
            valid = find_valid(p, w, first, looks);
        }
        end = max(end, mark_tiles(first, valid));
    }
    if (r.lane == 0) sm.ends[r.warp] = end;
    named_barrier_sync(FOUND, SCORE_THREADS);
    end = max(max(sm.ends[0], sm.ends[1]), max(sm.ends[2], sm.ends[3]));
    const int tiles = count_marked(w, end), main_tiles = count_marked(w, w.main_tiles - w.begin);
    const int staged = min(sm.brought, STAGED_BEFORE);
    const bool anew = !sm.again && ~sm.marks[0] & ((1 << min(tiles, COPIED_BEFORE)) - 1);
    if (anew || tiles < staged) wait_for_first_tiles(staged);
    if (r.warp == 0 && r.lane == 0) {
        sm.tiles = tiles;
        sm.holes = tiles < end;
        sm.first_marked = w.main_tiles - main_tiles;
        sm.anew = anew;
        const uint32_t behind = sm.stage + (anew ? staged : max(tiles, staged));
        sm.next_stage = behind % STAGES;
        sm.next_phase = sm.phase ^ (behind / STAGES & 1);
    }
    return anew ? -1 : uniform(tiles);
}

// Whether an output warp's rows of tile `count` of the split are the extra cache's, of its layout.
__device__ __forceinline__ bool is_of_extra(int warp, int count) {
#if EXTRA_ROWS
    return small().of_extra[warp][count % VALID_TILES];
#else
    return false;
#endif
}

// Start the copies of an output warp's rows of tile `count` of the split.
__device__ __forceinline__ void copy_rows(const AttentionParams& p, int count, int stage) {
    const Role r = Role::here();
    const int row = r.lane / 8;
    if (COPIED_ROWS < ROWS_AT_ONCE && row >= COPIED_ROWS) return;
    const NotedRow from = small().rows[count % NOTED_TILES][r.warp * COPIED_ROWS + row];
#if EXTRA_ROWS
    const uint32_t to = raw_rows(r.warp, stage) + row * Row::STAGED_BYTES;
    if (is_of_extra(r.warp, count)) {
        copy_quantized<EXTRA_ROW_STRIDE, ExtraRow::SCALES_BEHIND>(to, from.data, from.scale_bytes, r.lane);
    } else {
        copy_quantized<ROW_STRIDE, Row::SCALES_BEHIND>(to, from.data, from.scale_bytes, r.lane);
    }
    return;
#else
    if constexpr (FP8) {
        copy_to_stage(from, raw_rows(r.warp, stage), row, r.lane, true);
    } else {
        copy_to_stage(from, stage_address(stage), r.warp * COPIED_ROWS + row, r.lane, p.flags & ALIGNED_ROWS);
    }
#endif
}

// bf16: copy the rows of a tile, which its stage then waits for.
__device__ __forceinline__ void copy_tile(const AttentionParams& p, int count, int stage) {
    copy_rows(p, count, stage);
    const uint32_t full = shared_address(&small().tile_full[stage]);
    if (p.flags & ALIGNED_ROWS) {
        mbarrier_arrive_after_copies(full);
    } else {
        mbarrier_arrive(full);
    }
}

// e2m1: widen an output warp's rows of a tile, which have been copied. NOPE values of a row are e2m1; scales begin at byte
// SCALES_AT of the copy.
template <int NOPE, int SCALES_AT>
__device__ __forceinline__ void widen_fp4_rows(uint32_t from, int stage) {
    const Role r = Role::here();
    const int first = r.warp * COPIED_ROWS;
    // A lane widens chunks `lane` and 32 + lane of each row. V4_NVFP4: the last ones are bf16 columns.
    constexpr int CHUNKS = NOPE / 8, TILE_CHUNKS = 2, PARTS_OF_ROW = D_V / 256, AT_ONCE = NOPE < D_V ? 1 : 2;
#pragma unroll
    for (int begin = 0; begin < COPIED_ROWS; begin += AT_ONCE) {
        Vec16 values[AT_ONCE][PARTS_OF_ROW];
        uint32_t scales[AT_ONCE][PARTS_OF_ROW];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const uint32_t line = from + (begin + i) * Row::STAGED_BYTES;
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                if (chunk < CHUNKS) {
                    values[i][part].x = load_shared_4(line + 4 * chunk);
                    scales[i][part] = load_shared_byte(line + SCALES_AT + place_of_scale(chunk / TILE_CHUNKS));
                } else {
                    values[i][part] = load_shared_16(line + int(ROPE_OFFSET) + 16 * (chunk - CHUNKS));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                if (chunk < CHUNKS)
                    values[i][part] = dequantize_nvfp4_8(values[i][part].x, e4m3_to_float(scales[i][part]));
                store_shared_16(chunk_address(stage_address(stage), first + begin + i, chunk), values[i][part]);
            }
        }
    }
}

// Say that an output warp's rows of a stage are there.
__device__ __forceinline__ void announce_rows(int stage) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&small().tile_full[stage]), Role::here().lane);
}

#if CODE_BITS == 4

// Widen an output warp's rows of a tile, and say that they are there.
__device__ __forceinline__ void widen_own_rows(int raw_stage, int stage) {
    static_assert(D_QK == D_V ? D_NOPE + D_ROPE == D_V : D_NOPE == D_V && ROPE_CODED && D_QK - D_V == 64, "");
    const Role r = Role::here();
    const uint32_t from = raw_rows(r.warp, raw_stage);
    widen_fp4_rows<D_NOPE, STAGED_SCALES>(from, stage);
    if (D_QK > D_V && r.lane / 8 < COPIED_ROWS) {  // e4m3, a chunk a lane
        const uint32_t codes = from + r.lane / 8 * Row::STAGED_BYTES + int(ROPE_OFFSET) + r.lane % 8 * 8;
        store_shared_16(chunk_address(stage_address(stage), r.warp * COPIED_ROWS + r.lane / 8, D_V / 8 + r.lane % 8),
                        dequantize_8(load_shared_8(codes), 1.0f));
    }
    announce_rows(stage);
}

#else

// Rare: what stands under a scale of 0 in a lane's row becomes zeros, NaN too: SCALE_COLUMNS bytes from `at` on. All lanes
// of the warp call.
__device__ __forceinline__ void clear_under_zero(uint32_t at, bool zero) {
#pragma unroll 1
    for (int i = 0; zero && i < SCALE_COLUMNS; i += 16) store_shared_16(at + i, {0, 0, 0, 0});
    __syncwarp();
}

// FP8: widen an output warp's rows of a tile, which have been copied, and say that they are there.
__device__ __forceinline__ void widen_own_rows(int raw_stage, int stage) {
    const Role r = Role::here();
    Small& sm = small();
    const uint32_t from = raw_rows(r.warp, raw_stage);
    const int first = r.warp * COPIED_ROWS;
    // A lane widens a chunk of 8 values of each part of V. Where the chunks do not fill the last part (V4_FP8), its other
    // lanes have the chunks of the bf16 columns.
    constexpr int CHUNKS = (D_NOPE < D_V ? D_NOPE : D_V) / 8, PARTS_OF_ROW = D_V / 256, AT_ONCE = FOLDED ? 2 : 1;
    constexpr bool ROPE_WITH = D_NOPE < D_V;
    constexpr bool END = D_QK > D_V, END_CODED = D_NOPE > D_V;  // there are columns behind V, bf16 ones or e4m3
    static_assert(!ROPE_WITH || CHUNKS + D_ROPE / 8 == 32 * PARTS_OF_ROW, "");
    static_assert(!END || D_QK - D_V == 64, "a chunk a lane");
    // Loaded first: the columns behind V, a chunk a lane, and V32_FP8's scales.
    const int end_row = r.lane / 8 % COPIED_ROWS, end_chunk = r.lane % 8;
    const int scale_row = r.lane / 4 % COPIED_ROWS, number = r.lane % 4;
    Vec16 end;
    float scale;
    if (END_CODED) {
        end = dequantize_8(load_shared_8(from + end_row * Row::STAGED_BYTES + D_V + 8 * end_chunk), 1.0f);
    } else if (END) {
        end = load_shared_16(from + end_row * Row::STAGED_BYTES + int(ROPE_OFFSET) + 16 * end_chunk);
    }
    if (FOLDED) {
        const uint32_t line = from + scale_row * Row::STAGED_BYTES;
        scale = __uint_as_float(load_shared_4(line + int(SCALE_OFFSET) + 4 * number));
        const bool zero = is_zero(scale);
        if (__builtin_expect(__any_sync(~0u, zero), 0))
            clear_under_zero(line + SCALE_COLUMNS * number, zero && r.lane < 4 * COPIED_ROWS);
    }
#pragma unroll
    for (int begin = 0; begin < COPIED_ROWS; begin += AT_ONCE) {
        Vec8 codes[AT_ONCE][PARTS_OF_ROW], more[AT_ONCE];
        uint32_t scales[AT_ONCE][PARTS_OF_ROW];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const uint32_t line = from + (begin + i) * Row::STAGED_BYTES;
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                const bool rope = ROPE_WITH && chunk >= CHUNKS;
                const uint32_t at = line + (rope ? int(ROPE_OFFSET) + 16 * (chunk - CHUNKS) : 8 * chunk);
                codes[i][part] = load_shared_8(at);
                if (ROPE_WITH && part == PARTS_OF_ROW - 1) more[i] = load_shared_8(at + (rope ? 8 : 0));
                if (NUM_SCALES > 0 && !FOLDED)
                    scales[i][part] = load_shared_byte(line + STAGED_SCALES + chunk / (SCALE_COLUMNS / 8));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                const Vec8 c = codes[i][part];
                Vec16 values = dequantize_8(c, FOLDED || SCALE_OF_CALL ? 1.0f : ue8m0_to_float(scales[i][part]));
                if (ROPE_WITH && chunk >= CHUNKS) values = {c.x, c.y, more[i].x, more[i].y};
                store_shared_16(chunk_address(stage_address(stage), first + begin + i, chunk), values);
            }
        }
    }
    if (END && r.lane / 8 < COPIED_ROWS)
        store_shared_16(chunk_address(stage_address(stage), first + end_row, CHUNKS + end_chunk), end);
    if constexpr (FOLDED) {
        const float next = least_scale(scale, __shfl_down_sync(~0u, scale, 1));
        if (r.lane < 4 * COPIED_ROWS) {
            sm.scale[stage][number][first + scale_row] = scale;
            if (SLICES == 2 && number % 2 == 0)
                sm.ratio[stage][number / 2][first + scale_row] = next > 0.0f ? __fdividef(scale, next) : 0.0f;
        }
    }
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&sm.tile_full[stage]), r.lane);
}

#endif

// --- Q --------------------------------------------------------------------------------------------------------

// Two values of Q as bf16. ALIGNED: at a multiple of 4 bytes.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t load_q_pair(const bf16* q) {
    return ALIGNED ? *reinterpret_cast<const uint32_t*>(q) : q[0] | uint32_t(q[1]) << 16;
}
// The same of e4m3, wherever they are.
template <bool>
__device__ __forceinline__ uint32_t load_q_pair(const uint8_t* q) {
    float v[4];
    e4m3x4_to_float(q[0] | uint32_t(q[1]) << 8, v);
    return pack_bf16x2(v[0], v[1]);
}

// Where fragment (step, m) of a score warp's Q in shared memory is, for this lane.
__device__ __forceinline__ uint32_t q_fragment(const Role& r, int step, int m) {
    return shared_address(shared) + Q_AT +
           (((r.warp * Q_IN_SHARED + step - Q_IN_REGISTERS) * GROUP_TILES + m) * 32 + r.lane) * 16;
}

using QRegisters = uint32_t[Q_IN_REGISTERS][GROUP_TILES][4];

// Load a score warp's Q into registers and shared memory. Heads beyond h_q repeat the last one, so that no load stands
// behind a branch: they are all on their way at once. Item: bf16, or uint8_t of e4m3.
template <typename Item, bool ALIGNED>
__device__ __forceinline__ void load_q(const AttentionParams& p, const WorkItem& w, QRegisters& q) {
    const Role r = Role::here();
    const Item* lines[GROUP_TILES][2];
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = w.first_head + 16 * r.tile_of_cta(m) + r.g + 8 * i;
            const int line = min(head, p.h_q - 1);
            lines[m][i] = q_of<Item>(p, query_at(p, w.query, line), head_at(p, line)) + 2 * r.t;
        }
    }
    const int columns = r.slice() * (D_V / SLICES), last_columns = D_V + r.slice() * ((D_QK - D_V) / SLICES);
    const auto load = [&](int step, int m, uint32_t (&a)[4]) {
        const int column = step < V_STEPS ? columns + 16 * step : last_columns + 16 * (step - V_STEPS);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = load_q_pair<ALIGNED>(lines[m][i % 2] + column + i / 2 * 8);
    };
    constexpr int AT_ONCE = 3;
#pragma unroll
    for (int begin = Q_IN_REGISTERS; begin < STEPS; begin += AT_ONCE) {
        uint32_t a[AT_ONCE][GROUP_TILES][4];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int m = 0; m < GROUP_TILES; ++m) {
                if (begin + i < STEPS) load(begin + i, m, a[i][m]);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int m = 0; m < GROUP_TILES; ++m) {
                if (begin + i < STEPS)
                    store_shared_16(q_fragment(r, begin + i, m), {a[i][m][0], a[i][m][1], a[i][m][2], a[i][m][3]});
            }
        }
    }
#pragma unroll
    for (int step = 0; step < Q_IN_REGISTERS; ++step) {
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) load(step, m, q[step][m]);
        if (!ALIGNED && step % AT_ONCE == 0) __syncwarp();  // half words on their way take a register each
    }
}

// C += A.B of 16 columns of k.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (HALF_ITEMS) {
        mma_m16n8k16_f16(c, a, b0, b1);
    } else {
        mma_m16n8k16(c, a, b0, b1);
    }
}

// --- S = Q.K^T ------------------------------------------------------------------------------------------------

using Scores = float[GROUP_TILES][N_TILES][4];

template <typename T>
__device__ __forceinline__ void clear(T& acc) {
#pragma unroll
    for (auto& row : acc) {
#pragma unroll
        for (auto& c : row) c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
}

// B fragments of one slice for a tile's rows.
using Slice = uint32_t[N_TILES / 2][4];

// Where a score warp's slices of the rows are.
struct KPlace {
    uint32_t columns, last_columns;

    static __device__ __forceinline__ KPlace of(uint32_t stage) {
        const Role r = Role::here();
        const int row = r.lane / 16 * 8 + r.lane % 8, half = r.lane / 8 % 2;
        return {chunk_address(stage, row, half) + r.slice() * (2 * D_V / SLICES),
                chunk_address(stage, row, r.slice() * 2 * (STEPS - V_STEPS) + half) + 2 * D_V};
    }
    __device__ __forceinline__ void load(Slice& b, int step) const {
        const int i = step < V_STEPS ? step : step - V_STEPS;
        const uint32_t at = ((step < V_STEPS ? columns : last_columns) ^ (i % 4 * 32)) + i / 4 * 128;
#pragma unroll
        for (int pair = 0; pair < N_TILES / 2; ++pair) ldmatrix_x4(b[pair], at + pair * 16 * ROW_BYTES);
    }
};

// The A fragment of a step and an m tile.
__device__ __forceinline__ void take_q(const QRegisters& q, int step, int m, uint32_t (&a)[4]) {
    if (step < Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = q[step < Q_IN_REGISTERS ? step : 0][m][i];
    } else {
        const Vec16 v = load_shared_16(q_fragment(Role::here(), step, m));
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
}

// V32_FP8: what S is multiplied with when the columns of a score warp's scale number `number` are done, for the rows
// of this thread's columns of S.
__device__ __forceinline__ float2 fold_factor(int stage, int number, int row) {
    const Small& sm = small();
    const int slice = Role::here().slice();
    if (SLICES == 4) return *reinterpret_cast<const float2*>(&sm.scale[stage][slice][row]);
    if (number == 0) return *reinterpret_cast<const float2*>(&sm.ratio[stage][slice][row]);
    const float2 first = *reinterpret_cast<const float2*>(&sm.scale[stage][2 * slice][row]);
    const float2 second = *reinterpret_cast<const float2*>(&sm.scale[stage][2 * slice + 1][row]);
    return make_float2(least_scale(first.x, second.x), least_scale(first.y, second.y));
}

__device__ __forceinline__ void fold_scale(int stage, int number, Scores& s) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        const float2 by = fold_factor(stage, number, 8 * n + 2 * Role::here().t);
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) {
            s[m][n][0] *= by.x;
            s[m][n][1] *= by.y;
            s[m][n][2] *= by.x;
            s[m][n][3] *= by.y;
        }
    }
}

__device__ __forceinline__ void add(const Scores& more, Scores& s) {
#pragma unroll
    for (int m = 0; m < GROUP_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] += more[m][n][i];
        }
    }
}

// A warp's part of S.
__device__ __forceinline__ void multiply_qk(int stage, const QRegisters& q, Scores& s) {
    constexpr int SCALE_STEPS = FOLDED ? SCALE_COLUMNS / 16 : STEPS + 1;
    const KPlace k = KPlace::of(stage_address(stage));
    Slice b[2];
    Scores odd;  // where so few mma are independent of each other: of odd steps
    k.load(b[0], 0);
    clear(s);
    clear(odd);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const Slice& now = b[step % 2];
        if (step + 1 < STEPS) k.load(b[(step + 1) % 2], step + 1);
#pragma unroll
        for (int m = 0; m < GROUP_TILES; ++m) {
            uint32_t a[4];
            take_q(q, step, m, a);
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                multiply(ODD_APART && step % 2 ? odd[m][n] : s[m][n], a, now[n / 2][n % 2 * 2],
                         now[n / 2][n % 2 * 2 + 1]);
        }
        const bool folds = step < V_STEPS && step % SCALE_STEPS == SCALE_STEPS - 1;
        if (ODD_APART && (folds || step == STEPS - 1)) {
            add(odd, s);
            clear(odd);
        }
        if (folds) fold_scale(stage, step / SCALE_STEPS, s);
    }
}

// --- the sums of all parts of S -------------------------------------------------------------------------------

__device__ __forceinline__ float4* part_of(const Role& r, int warp, int buffer) {
    return reinterpret_cast<float4*>(shared + PARTS_AT + buffer % PART_BUFFERS * PART_BUFFER + warp * PART_BYTES) +
           r.lane;
}

// Leave what the other warps of the group need of this warp's part.
__device__ __forceinline__ void leave_part(const Scores& s, int buffer) {
    const Role r = Role::here();
    float4* to = part_of(r, r.warp, buffer);
    if constexpr (ALL_GET_ALL) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) to[32 * n] = make_float4(s[0][n][0], s[0][n][1], s[0][n][2], s[0][n][3]);
    } else {
        constexpr int OTHER = GROUP_TILES - 1;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            to[32 * n] = make_float4(s[OTHER][n][0], s[OTHER][n][1], s[OTHER][n][2], s[OTHER][n][3]);
    }
}

using OwnScores = float[N_TILES][4];

// The sums of this warp's own m tile, in the same order in all warps.
__device__ __forceinline__ void add_parts(const Scores& s, int buffer, OwnScores& own) {
    const Role r = Role::here();
    if constexpr (ALL_GET_ALL) {
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            const float4* from = part_of(r, r.group() * SLICES + i, buffer);
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                const float4 v = from[32 * n];
                own[n][0] = i == 0 ? v.x : own[n][0] + v.x;
                own[n][1] = i == 0 ? v.y : own[n][1] + v.y;
                own[n][2] = i == 0 ? v.z : own[n][2] + v.z;
                own[n][3] = i == 0 ? v.w : own[n][3] + v.w;
            }
        }
    } else {
        const float4* from = part_of(r, r.warp ^ 1, buffer);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            const float4 v = from[32 * n];
            own[n][0] = s[0][n][0] + v.x;
            own[n][1] = s[0][n][1] + v.y;
            own[n][2] = s[0][n][2] + v.z;
            own[n][3] = s[0][n][3] + v.w;
        }
    }
}

// --- softmax --------------------------------------------------------------------------------------------------

// Softmax of a thread's two heads (rows g and g + 8 of its own m tile), base 2. `sum` covers this thread's columns
// only.
struct Softmax {
    float ref[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, max[2] = {-INF, -INF};

    __device__ __forceinline__ void put_down() const {
        const Role r = Role::here();
        Small& sm = small();
        if (SUMS_IN_SHARED) sm.sums[32 * r.warp + r.lane] = make_float4(sum[0], sum[1], max[0], max[1]);
    }
    __device__ __forceinline__ void take_up() {
        const Role r = Role::here();
        const Small& sm = small();
        if (SUMS_IN_SHARED) {
            const float4 v = sm.sums[32 * r.warp + r.lane];
            sum[0] = v.x, sum[1] = v.y, max[0] = v.z, max[1] = v.w;
        }
    }
};

// Two numbers of P as shared memory holds them.
__device__ __forceinline__ uint32_t pack_p(float x, float y) { return FOLDED ? pack_f16x2(x, y) : pack_items(x, y); }

// A tile's softmax of a score warp: own sums become P in shared memory, and the factors with which O is brought to the
// new references.
struct Probabilities {
    OwnScores s;
    float top[2], rescale[2];

#if DENSE
    // -inf where a line does not see a row of the split's tile `tile`.
    __device__ __forceinline__ void hide(const DenseParams& p, int tile) {
        const WorkItem& w = small().work;
        const int least_end = w.last_end - (p.causal ? p.tokens - 1 : 0);  // of the first token
        const int first = w.first_row + (w.begin + tile) * TILE_ROWS;
        const bool whole = first <= least_end - TILE_ROWS && (p.window == 0 || first >= w.last_end - p.window);
        if (whole || p.tokens == 1) return;
        const Role r = Role::here();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int line = first_head() + 16 * r.own_tile() + r.g + 8 * i;
            const Seen seen = seen_of_length(p, w.last_end, token_of(p, line));
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int row = first + 8 * n + 2 * r.t + j;
                    if (row < seen.begin || row >= seen.end) s[n][2 * i + j] = -INF;
                }
            }
        }
    }
#endif

    // Scale the logits, -inf where a row is not valid. Find the highest.
    __device__ __forceinline__ void mask(const AttentionParams& p, int tile) {
        const float scale_log2 = SCALE_OF_CALL ? small().logit_scale : p.scale_log2;
        const uint8_t* valid = small().valid[tile % VALID_TILES];
        const Role r = Role::here();
        const bool masked = !MASK_IF_NEEDED || !__all_sync(~0u, valid[r.lane % TILE_ROWS]);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] *= scale_log2;
        }
        if (masked) {
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                const uint32_t both = *reinterpret_cast<const uint16_t*>(valid + 8 * n + 2 * r.t);
#pragma unroll
                for (int i = 0; i < 4; ++i) s[n][i] = (i % 2 ? both >> 8 : both & 1) ? s[n][i] : -INF;
            }
        }
#if DENSE
        hide(dense(p), tile);
#endif
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[i] = -INF;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) top[i] = fmaxf(top[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            top[i] = quad_max(top[i]);
        }
    }

    // Raise the references where needed. Logits become P.
    __device__ __forceinline__ void exponentiate(Softmax& state) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            state.max[i] = fmaxf(state.max[i], top[i]);
            const float ref = top[i] - REF_BELOW > state.ref[i] + REF_SLACK ? top[i] - REF_BELOW : state.ref[i];
            const float base = finite_reference(ref);
            rescale[i] = ref == state.ref[i] ? 1.0f : exp2_approx(state.ref[i] - base);
            state.ref[i] = ref;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) {
                s[n][2 * i] = exp2_approx(s[n][2 * i] - base);
                s[n][2 * i + 1] = exp2_approx(s[n][2 * i + 1] - base);
            }
        }
    }

    // P to shared memory.
    __device__ __forceinline__ void write(int buffer, Softmax& state) const {
        const Role r = Role::here();
        Small& sm = small();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) sum += s[n][2 * i] + s[n][2 * i + 1];
            state.sum[i] = state.sum[i] * rescale[i] + sum;
            if (r.t == 0 && (!ALL_GET_ALL || r.slice() == 0))
                sm.rescale[buffer][r.own_tile() * 16 + r.g + 8 * i] = rescale[i];
        }
        const bool rescaled = __any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f);
        if (r.lane == 0) sm.rescaled[buffer][r.warp] = rescaled;
#pragma unroll
        for (int k = 0; k < K_TILES; ++k) {
            if (ALL_GET_ALL && k % SLICES != r.slice()) continue;
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = pack_p(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
            store_shared_16(p_fragment(buffer, r.own_tile(), k, r.lane), {a[0], a[1], a[2], a[3]});
        }
    }
};

// What the sums of a partial result are multiplied with.
__device__ __forceinline__ float weight_of(float ref, float top) {
    return ref == -INF ? 0.0f : exp2_approx(ref - top);
}

// In shares: wait for the partial results of the item's splits before this one. The score warps call.
__device__ __forceinline__ void wait_for_earlier_splits(const AttentionParams& p) {
    const Role r = Role::here();
    if (r.warp == 0) {
        const int count = wait_for_partials(p, blockIdx.x, r.lane);
        if (r.lane == 0) small().partials = count;
    }
    named_barrier_sync(FOUND, SCORE_THREADS);
}

// What becomes of the heads: statistics to memory, the factors of O to the output warps.
__device__ __forceinline__ void finish_heads(const AttentionParams& p, const Softmax& state) {
    const Role r = Role::here();
    Small& sm = small();
    const bool writes = r.t == 0 && (!ALL_GET_ALL || r.slice() == 0);
    const int cta = blockIdx.x;
    if (in_shares(p) && sm.ends_item && sm.work.begin > 0) wait_for_earlier_splits(p);
    const int count = sm.partials;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        float sum = quad_sum(i == 0 ? state.sum[0] : state.sum[1]);
        const float ref = i == 0 ? state.ref[0] : state.ref[1];
        float top = ref, max = i == 0 ? state.max[0] : state.max[1];
        const int local = r.own_tile() * 16 + r.g + 8 * i, head = first_head() + local;
        if (!writes) continue;
        if (!sm.ends_item) {
            partial_of(p, cta, false).write_statistics(local, ref, sum, max);
            sm.factor[local] = 1.0f;
            continue;
        }
#pragma unroll 1
        for (int other = cta - count; other < cta; ++other) {
            const float4 statistics = statistics_of(partial_of(p, other, false), local);
            top = fmaxf(top, statistics.x);
            max = fmaxf(max, statistics.z);
        }
        const float own = weight_of(ref, top);
        sum *= own;
#pragma unroll 1
        for (int other = cta - count; other < cta; ++other) {
            const float4 statistics = statistics_of(partial_of(p, other, false), local);
            sum += weight_of(statistics.x, top) * statistics.y;
        }
        const HeadResult result = {max, log2_sum_exp(top, sum)};
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (SCALE_OF_CALL) factor *= load_call_scale(p.k_scale);
        if (head < p.h_q) {
            if (in_shares(p) || p.num_splits == 1) {
                if (sum != 0.0f) factor *= sink_factor(p, head_at(p, head), result.lse);
#if DENSE
                write_statistics(p, query_at(p, sm.work.query, head), head_at(p, head), result);
#else
                write_statistics(p, sm.work.query, head, result);
#endif
            } else {
                write_partial_statistics(p, partial_index(p, blockIdx.y, sm.work.query, head), result);
            }
        }
        sm.top[local] = top;
        sm.factor[local] = own * factor;
        sm.factor_of_partials[local] = factor;
    }
}

__device__ __forceinline__ void load_q(const AttentionParams& p, const WorkItem& w, QRegisters& q) {
    if (SCALE_OF_CALL && p.flags & E4M3_Q) {
        load_q<uint8_t, false>(p, w, q);
    } else if (p.flags & ALIGNED_Q) {
        load_q<bf16, true>(p, w, q);
    } else {
        load_q<bf16, false>(p, w, q);
    }
}

// Load Q, and look at this warp's first tiles: what find_valid gives. DENSE: load Q.
__device__ __forceinline__ uint32_t load_q_and_look(const AttentionParams& p, const WorkItem& w, QRegisters& q) {
    const int first = Role::here().warp * LOOKED_TILES;
    load_q(p, w, q);
#if DENSE
    return 0;
#endif
    Looks looks;
    load_looks(p, w, first, looks);
    return find_valid(p, w, first, looks);
}

// NEXT_Q_EARLY: `q` and `valid`, what load_q_and_look gave, are kept from a split to the next.
__device__ __forceinline__ void run_score_warp(const AttentionParams& p, QRegisters& q, uint32_t& valid) {
    if (NEXT_EARLY && read_thread_index() == OUTPUT_THREADS && has_next(p)) find_split(p, small().turn + 1);
    if (!NEXT_Q_EARLY || small().turn == 0) valid = load_q_and_look(p, small().work, q);
    Softmax softmax;
    softmax.put_down();
    const int tiles = find_tiles(p, valid);
    named_barrier_arrive(CUT_OFF, THREADS);
    if (tiles < 0) return;
    int stage = small().stage, phase = small().phase;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2;
        mbarrier_wait(shared_address(&small().tile_full[stage]), phase);
        Scores s;
        multiply_qk(stage, q, s);
        if (PV_BEHIND_QK) named_barrier_arrive(S_DONE + buffer, THREADS);
        if (PART_BUFFERS == 1) named_barrier_sync(SCORES + Role::here().group(), SCORE_THREADS / GROUPS);
        leave_part(s, buffer);
        named_barrier_sync(P_EMPTY + buffer, THREADS);
        Probabilities probabilities;
        add_parts(s, buffer, probabilities.s);
        probabilities.mask(p, tile);
        softmax.take_up();
        probabilities.exponentiate(softmax);
        probabilities.write(buffer, softmax);
        named_barrier_arrive(P_FULL + buffer, THREADS);
        softmax.put_down();
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    softmax.take_up();
    finish_heads(p, softmax);
    named_barrier_arrive(FINAL, THREADS);
    if (NEXT_Q_EARLY && has_next(p)) valid = load_q_and_look(p, small().next, q);
}

// --- O += P.V -------------------------------------------------------------------------------------------------

using Output = float[M_TILES][V_TILES][4];

// Bring O to the references of a tile.
__device__ __forceinline__ void rescale_output(int buffer, Output& o) {
    if (*reinterpret_cast<const uint32_t*>(small().rescaled[buffer]) == 0) return;
    const Role r = Role::here();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float by = small().rescale[buffer][16 * m + r.g + 8 * i];
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) o[m][v][2 * i] *= by, o[m][v][2 * i + 1] *= by;
        }
    }
}

// P of m tile m and 16 rows as shared memory holds it.
__device__ __forceinline__ void load_p_tile(int buffer, int m, int k, uint32_t (&a)[4]) {
    const Vec16 v = load_shared_16(p_fragment(buffer, m, k, Role::here().lane));
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
}

// P of 16 rows as A fragments. V32_FP8: times the scale of the warp's columns.
__device__ __forceinline__ void load_p(int stage, int buffer, int k, uint32_t (&a)[M_TILES][4]) {
    const Role r = Role::here();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) load_p_tile(buffer, m, k, a[m]);
    if constexpr (FOLDED) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 scale = *reinterpret_cast<const float2*>(
                &small().scale[stage][r.warp * 64 / SCALE_COLUMNS][16 * k + 8 * half + 2 * r.t]);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    const float2 p = f16x2_to_float(a[m][i]);
                    a[m][i] = pack_bf16x2(p.x * scale.x, p.y * scale.y);
                }
            }
        }
    }
}

// `wait` returns when products may begin.
template <typename Wait>
__device__ __forceinline__ void multiply_pv(int stage, int buffer, Output& o, Wait wait) {
    const Role r = Role::here();
    const uint32_t first =
        chunk_address(stage_address(stage), r.lane / 8 % 2 * 8 + r.lane % 8, r.warp * V_TILES + r.lane / 16);
    uint32_t a[M_TILES][4], b[2][4];
    ldmatrix_x4_trans(b[0], first);
    load_p(stage, buffer, 0, a);
    wait();
#pragma unroll
    for (int k = 0; k < K_TILES; ++k) {
        if (FOLDED && k > 0) load_p(stage, buffer, k, a);
#pragma unroll
        for (int v = 0; v < V_TILES; v += 2) {
            const int now = v / 2 % 2;
            const bool last = v + 2 == V_TILES, goes_on = last && k + 1 < K_TILES;  // to the next 16 rows
            if (!last) ldmatrix_x4_trans(b[1 - now], (first ^ ((v + 2) * 16)) + k * 16 * ROW_BYTES);
            if (goes_on) ldmatrix_x4_trans(b[1 - now], first + (k + 1) * 16 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                multiply(o[m][v], a[m], b[now][0], b[now][1]);
                multiply(o[m][v + 1], a[m], b[now][2], b[now][3]);
                if (!FOLDED && goes_on) load_p_tile(buffer, m, k + 1, a[m]);
            }
        }
    }
}

// V32_FP8: what P times scale lost when load_p rounded it, times V. An m tile at a time, with few registers.
__device__ __forceinline__ void multiply_lost(int stage, int buffer, Output& o) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll 1
        for (int k = 0; k < K_TILES; ++k) {
            const Role r = Role::here();
            const Vec16 v = load_shared_16(p_fragment(buffer, m, k, r.lane));
            uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = f16x2_to_float(a[i]);
                const float2 scale = *reinterpret_cast<const float2*>(
                    &small().scale[stage][r.warp * 64 / SCALE_COLUMNS][16 * k + i / 2 * 8 + 2 * r.t]);
                const float x = p.x * scale.x, y = p.y * scale.y;
                const uint32_t rounded = pack_bf16x2(x, y);
                a[i] = pack_bf16x2(x - bf16_low(rounded), y - bf16_high(rounded));
            }
            const uint32_t first = chunk_address(stage_address(stage), 16 * k + r.lane / 8 % 2 * 8 + r.lane % 8,
                                                 r.warp * V_TILES + r.lane / 16);
#pragma unroll
            for (int v = 0; v < V_TILES; v += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, first ^ (v * 16));
                multiply(o[m][v], a, b[0], b[1]);
                multiply(o[m][v + 1], a, b[2], b[3]);
            }
        }
        __syncwarp();
    }
}

// Write a head's columns that this thread has: two of every eight.
template <typename Write>
__device__ __forceinline__ void write_columns(const float (&o)[V_TILES][4], int i, float factor, Write write) {
#pragma unroll
    for (int v = 0; v < V_TILES; ++v) write(8 * v, o[v][2 * i] * factor, o[v][2 * i + 1] * factor);
}

// Write O of m tile m. `factor`: of its heads g and g + 8.
__device__ __forceinline__ void write_tile(const AttentionParams& p, int m, const float (&o)[V_TILES][4],
                                           const float (&factor)[2]) {
    const Role r = Role::here();
    const Query query = small().work.query;
    const int column = 64 * r.warp + 2 * r.t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = first_head() + 16 * m + r.g + 8 * i;
        if (head >= p.h_q) continue;
        if (p.num_splits > 1 && !in_shares(p)) {
            float* to = partial_out(p, partial_index(p, blockIdx.y, query, head)) + column;
            write_columns(o, i, factor[i],
                          [&](int at, float x, float y) { *reinterpret_cast<float2*>(to + at) = make_float2(x, y); });
            continue;
        }
        bf16* to = out_of(p, query_at(p, query, head), head_at(p, head), column);
        if (p.flags & ALIGNED_OUT) {
            write_columns(o, i, factor[i],
                          [&](int at, float x, float y) { *reinterpret_cast<uint32_t*>(to + at) = pack_items(x, y); });
        } else {
            write_columns(o, i, factor[i], [&](int at, float x, float y) {
                const uint32_t packed = pack_items(x, y);
                to[at] = bf16(packed), to[at + 1] = bf16(packed >> 16);
            });
        }
    }
}

__device__ __forceinline__ void write_results(const AttentionParams& p, const Output& o) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        const int head = 16 * m + Role::here().g;
        write_tile(p, m, o[m], {small().factor[head], small().factor[head + 8]});
    }
}

// --- in shares ------------------------------------------------------------------------------------------------

// Write O as it is. Chunk (8 m + v) * OUTPUT_THREADS + thread has what a thread has of m tile m and columns 8 v.
__device__ __forceinline__ void write_partial(const PartialResults<4>& partial, const Output& o) {
    const int thread = read_thread_index();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int v = 0; v < V_TILES; ++v)
            partial.write((m * V_TILES + v) * OUTPUT_THREADS + thread,
                          make_float4(o[m][v][0], o[m][v][1], o[m][v][2], o[m][v][3]));
    }
}

// Merge the item's partial results, this CTA's last. A thread reads what it or its like have written.
__device__ __forceinline__ void merge_partials(const AttentionParams& p) {
    const Role r = Role::here();
    const Small& sm = small();
    const int cta = blockIdx.x;
#pragma unroll 1
    for (int m = 0; m < M_TILES; ++m) {
        const int head = 16 * m + r.g;
        float o[V_TILES][4] = {};
#pragma unroll 1
        for (int other = cta - sm.partials; other <= cta; ++other) {
            const PartialResults<4> partial = partial_of(p, other, other == cta);
            float4 chunks[V_TILES];
#pragma unroll
            for (int v = 0; v < V_TILES; ++v)
                chunks[v] = partial.chunk_of(partial.rank, (m * V_TILES + v) * OUTPUT_THREADS + int(threadIdx.x));
            float weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int local = head + 8 * i;
                weight[i] = other == cta ? sm.factor[local]
                                         : weight_of(statistics_of(partial, local).x, sm.top[local]) *
                                               sm.factor_of_partials[local];
            }
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) {
                o[v][0] += weight[0] * chunks[v].x;
                o[v][1] += weight[0] * chunks[v].y;
                o[v][2] += weight[1] * chunks[v].z;
                o[v][3] += weight[1] * chunks[v].w;
            }
        }
        write_tile(p, m, o, {1.0f, 1.0f});
    }
}

// What becomes of a split's O.
__device__ __forceinline__ void finish_output(const AttentionParams& p, const Output& o) {
    if (small().ends_item && small().partials == 0) {
        write_results(p, o);
        return;
    }
    const bool merges = small().ends_item;
    write_partial(partial_of(p, blockIdx.x, merges), o);
    if (merges) {
        merge_partials(p);
    } else {
        named_barrier_sync(OUTPUTS, OUTPUT_THREADS);
        if (read_thread_index() == 0) announce_partial(p, blockIdx.x, small().work.begin == 0);
    }
}

// --- output warps ---------------------------------------------------------------------------------------------

// FP8: widen the rows of tile `count` into `stage`, and start to copy those that come RAW_STAGES tiles later.
__device__ __forceinline__ void bring_tile(const AttentionParams& p, int count, int tiles, int stage) {
    const int raw_stage = count % RAW_STAGES;
    cp_async_wait<RAW_STAGES - 1>();
    __syncwarp();
#if EXTRA_ROWS
    const int warp = Role::here().warp;
    if (is_of_extra(warp, count)) {
        constexpr int SCALES_AT = EXTRA_SCALE_OFFSET < 0 ? EXTRA_ROW_STRIDE : EXTRA_SCALE_OFFSET;
        widen_fp4_rows<D_V, SCALES_AT>(raw_rows(warp, raw_stage), stage);
        announce_rows(stage);
    } else {
        widen_own_rows(raw_stage, stage);
    }
#else
    widen_own_rows(raw_stage, stage);
#endif
    if (count + RAW_STAGES < tiles) copy_rows(p, count + RAW_STAGES, raw_stage);
    cp_async_commit();
}

// Start to copy the first of a split's `tiles` tiles, which are looked up, the first one to stage `stage`. FP8: copies
// that nobody needs may still be on their way.
__device__ __forceinline__ void start_copies(const AttentionParams& p, int tiles, int stage) {
    if constexpr (FP8) {
        cp_async_wait<0>();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < RAW_STAGES; ++i) {
            if (i < tiles) copy_rows(p, i, i);
            cp_async_commit();
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < min(tiles, STAGES - 1); ++i) copy_tile(p, i, (stage + i) % STAGES);
    }
}

// `entries`: of the tiles that are looked up next. Kept where the split begins anew, and (NEXT_EARLY) from a split to
// the next, whose copies are begun here.
__device__ __forceinline__ void run_output_warp(const AttentionParams& p, int32_t& entries) {
    const int brought = small().brought;
    int stage = small().stage;
    if (!NEXT_EARLY || small().turn == 0 || small().again) {
        if (!small().again)
            entries = note_and_load(p, small().work, 0, load_entries(p, small().work, 0, false), false);
        start_copies(p, brought, stage);
    }
    if constexpr (FP8) {
#pragma unroll 1
        for (int i = 0; i < min(brought, WIDENED_BEFORE); ++i) bring_tile(p, i, brought, (stage + i) % STAGES);
    }
    named_barrier_sync(CUT_OFF, THREADS);  // while the first rows and Q come
    int tiles = small().tiles;
    if (TILES_DIVERGENT) tiles += read_thread_index() / THREADS;  // 0, which ptxas does not know
    if (small().holes && !small().again) entries = note_marked(p, small().work);
    if (small().anew) return;
    if (PV_BEHIND_QK && tiles > 0) named_barrier_sync(S_DONE, THREADS);
    if (tiles > 0) named_barrier_arrive(P_EMPTY, THREADS);
    if (tiles > 1) named_barrier_arrive(P_EMPTY + 1, THREADS);
    Output o;
    clear(o);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2;
        if ((tile + COPIED_BEFORE) % NOTED_TILES == 0)
            entries = note_and_load(p, small().work, tile + COPIED_BEFORE, entries, small().holes);
        named_barrier_sync(P_FULL + buffer, THREADS);
        if (!FP8 && tile + COPIED_BEFORE < tiles)
            copy_tile(p, tile + COPIED_BEFORE, stage == 0 ? STAGES - 1 : stage - 1);
        rescale_output(buffer, o);
        multiply_pv(stage, buffer, o, [&] {
            if (PV_BEHIND_QK && tile + 1 < tiles) named_barrier_sync(S_DONE + (tile + 1) % 2, THREADS);
        });
        if (tile + 2 < tiles) named_barrier_arrive(P_EMPTY + buffer, THREADS);
        if constexpr (FP8) {
            if (tile + WIDENED_BEFORE < tiles) {
                if (STAGES == 2) named_barrier_sync(OUTPUTS, OUTPUT_THREADS);
                bring_tile(p, tile + WIDENED_BEFORE, tiles, (stage + WIDENED_BEFORE) % STAGES);
            }
        }
        if (++stage == STAGES) stage = 0;
    }
    if constexpr (FOLDED) {
        if (tiles == 1) multiply_lost(small().stage, 0, o);
    }
    // The next split's first rows are on their way before this one's results are written.
    if (NEXT_EARLY && has_next(p)) entries = load_entries(p, small().next, 0, false);
    named_barrier_sync(FINAL, THREADS);
    if (NEXT_EARLY && has_next(p)) {
        const WorkItem& next = small().next;
        entries = note_and_load(p, next, 0, entries, false);
        start_copies(p, next.end - next.begin, small().next_stage);
    }
    finish_output(p, o);
}

// --- the kernel -----------------------------------------------------------------------------------------------

#if DENSE
using Params = DenseParams;
#else
using Params = AttentionParams;
#endif

// grid: x = query * head tiles + head tile, y = split; in shares: x = CTAs among which all rows are divided
extern "C" __global__ void __launch_bounds__(THREADS, 1) portable(const __grid_constant__ Params p) {
    Small& sm = small();
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage)
            mbarrier_init(shared_address(&sm.tile_full[stage]), (FP8 ? WARP_ARRIVALS : 32) * OUTPUT_WARPS);
    }
    if (in_shares(p)) {
        find_share_early(p, blockIdx.x, sm.share);
        find_share(p, blockIdx.x, sm.share);
        __syncthreads();
    }
    // What the splits have in common is in shared memory: registers are short.
    if (threadIdx.x == 0) {
        sm.turn = -1;
        if (SCALE_OF_CALL) sm.logit_scale = p.scale_log2 * load_call_scale(p.q_scale) * load_call_scale(p.k_scale);
        sm.next_stage = sm.next_phase = 0;
        sm.anew = false;
        if (NEXT_EARLY && num_turns(p) > 0) find_split(p, 0);
    }
    if (threadIdx.x < OUTPUT_THREADS) {
        int32_t entries;
        while (take_next_split<true>(p)) run_output_warp(p, entries);
    } else {
        QRegisters q;
        uint32_t valid;
        while (take_next_split<false>(p)) run_score_warp(p, q, valid);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
