// Sparse attention of FP8 rows on Hopper, 32 or 64 heads of a query at a time: wgmma with KV rows from registers.
//
// Rows stay in shared memory as they lie in the cache; no tile of 16-bit rows is ever written. The consumer warps
// widen a row's bytes on their way into the A operand. In both products the M side is KV rows or value columns:
//
//   S^T = K . Q^T     64 rows x heads       a thread reads 16 bytes of its two rows; columns of Q are permuted to
//                                           match
//   O^T = V^T . P^T   512 columns x heads   ldmatrix.trans of byte pairs, which prmt puts in order
//
//   warpgroup 0 (consumer)          warpgroup 1 (consumer)          warpgroup 2 (producer)
//     S_2 = K_2 . Q^T                 softmax, P_1 published          rows by bulk copies into a ring of
//     O += V_1 . P_1   columns        O += V_1 . P_1   columns        STAGES x 16 rows, as stages are released
//     softmax, P_2     0 .. 255       S_3 = K_3 . Q^T  256 .. 511
//     O += V_2 . P_2                  O += V_2 . P_2
//     S_4 = ...                       softmax, P_3 ...
//
//   Warpgroup w computes S of every second tile of 64 rows. Both multiply every P with their half of the value
//   columns. So the softmax of one runs beside the products of the other.
//
// e4m3 is exact in f16. Scales: r of a row is a power of two at or above its largest scale. Value columns are widened
// to f16 as e4m3 * (scale / r), and r goes into the exponent of P^T = 2^(logit + log2 r - ref). P^T fits f16 too,
// because ref is a reference for that sum, which rises when a P^T passes MAX_P. The denominator adds P^T / r.
//   V32_FP8: S^T is exact: between chunks of 128 columns it is multiplied by scale_c / scale_c+1. RoPE in bfloat16.
//   V4_FP8:  all scales are powers of two: K is widened to e4m3 * (scale / r) too, which is exact. RoPE becomes f16
//            divided by r and goes back to where it lay in the ring; as a value column it needs no more.
// Q is f16 times a power of two that brings its largest value to 2^13 .. 2^14.
//
// Instructions issued beside wgmma take turns with it: float32 arithmetic takes issue slots from it, the others wait
// until it leaves some (uniform instructions cost nothing). So the time of large batches is the number of
// instructions.
//
// How work is divided over CTAs is the business of attention/division, which DIVISION chooses from: whole items, clusters,
// shares, segments or teams. A CTA asks it for its turns, each a split of a work item, and gives it the result of each.
// Where a division has equal splits, the tiles of V32 rows are dealt out to them in turn.
//
// Only tiles in which an entry is valid are copied and multiplied. Each producer warp looks at all entries of a tile
// before it copies its rows, and passes the tile over if none is valid. So nobody knows beforehand how many tiles a split
// has: a tile says whether more may follow (`Follows`), and if none did although more might have, a tile that holds
// nothing but the end of the split comes last. Where the lists end is found early, so that the next Q and its rows can
// be asked for: of the CTA's first splits by the consumers while they wait for Q, of later ones by the producer warps.
// V4_FP8, whose lists are shorter, and END KEEP: by the producer warps, after a few tiles without rows.
//
//   full[stage]          copies done          COPIERS warps: bulk copies, and one arrival for `marks`; V4_FP8: 32 more
//                                             after the copies of scales
//   empty[stage]         stage released       the 8 consumer warps
//   q_full               Q has come           bulk copies, and one arrival for `attended`
//   q_empty              Q released           the 8 consumer warps, after the last product with it
//   ends_known           first splits' ends   the 8 consumer warps
//   P_READY + w          named: P of warpgroup w's tile is published: its 128 threads arrive, the other 128 wait
//   WARPGROUP_SYNC + w   named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC        named: all 256 consumer threads
//   PRODUCER_SYNC        named: the 128 producer threads, who find a split's end
//
// Shared memory, HEADS 64, V32_FP8: Q 73,728, and 1,024 for the gaps with which it comes; two P of heads x 64 f16,
// 16,384; 12 stages of 16 rows x 656, 125,952; the rest 6,928. V4_FP8: Q 65,536; rows of 592.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch.
// What was tried, what bounds it: docs/kernels/fp8_sm90.md.
#include "attention/division/division.cuh"
#include "attention/division/list_end.cuh"
#include "attention/division/merge.cuh"
#include "attention/division/results.cuh"
#include "attention/role.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/limits.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "rows/chunk.cuh"
#include "tile/bulk_row.cuh"
#include "tile/heads.cuh"
#include "tile/ring.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr bool V32 = Row::FOLDED_SCALES != 0;  // else V4_FP8
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
using Division = DivisionOf<THREADS>;
constexpr End END = Division::END;
constexpr bool ONE_TURN = Division::ONE_TURN, FOUND_EARLY = Division::FOUND_EARLY;
constexpr bool IN_TURN =
    Division::EQUAL_SPLITS && TILES_IN_TURN;  // an item's tiles are dealt out to its splits in turn
// Whether the consumers find the ends of the lists of a CTA's first turns. Full lists of V4_FP8 would take 1 to 4 %
// longer, segments 1 to 2 %.
constexpr bool CONSUMERS_LOOK = V32 && END != End::KEEP;
constexpr int FIRST_TURNS = 4;  // so many turns
// COPIERS producer warps copy WARP_ROWS rows each of a stage. With four a stage is full sooner; one takes fewer
// instructions.
constexpr int STAGE_ROWS = 16, COPIERS = DIVISION == CLUSTERS ? 4 : 1, WARP_ROWS = STAGE_ROWS / COPIERS;
constexpr int TILE_STAGES = TILE_ROWS / STAGE_ROWS;
// The tiles of a split are counted in units of one tile, or of two: a tile without rows is added to an odd number.
// Pairs take fewer instructions.
constexpr int UNIT_TILES = Division::EQUAL_SPLITS ? 1 : 2;
constexpr int UNIT_STAGES = UNIT_TILES * TILE_STAGES;
constexpr int STRIDE = Row::STAGED_BYTES, STAGE_BYTES = STAGE_ROWS * STRIDE;
constexpr int NOPE_BLOCKS = D_NOPE / 64, Q_BLOCKS = NOPE_BLOCKS + 1;  // column blocks of 64; the last is RoPE
constexpr int LINES_BYTES = HEADS * LINE_BYTES;  // a swizzled line for each head: a column block of Q, or a P
constexpr int CHUNKS = V32 ? 4 : NOPE_BLOCKS;    // ranges of columns with a scale of their own
constexpr int OWN_HEADS = HEADS / 4;             // of S^T and O^T in a thread (tile/heads.cuh)
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
static_assert(STRIDE / 16 % 2 == 1, "ldmatrix reads eight rows from all banks");

// Named barriers; WARPGROUP_SYNC and P_READY: + warpgroup.
enum NamedBarrier { P_READY = 1, WARPGROUP_SYNC = 3, CONSUMER_SYNC = 5, PRODUCER_SYNC = 6 };

// Q comes in eight groups of heads, with gaps between them: the same 32 bytes of heads of four groups are in all banks.
constexpr int GROUP_HEADS = HEADS / 8, GROUP_GAP = 32;

// Shared memory: Q, P of each warpgroup's tile, the ring, and the rest.
constexpr int Q_AT = 0, P_AT = Q_BLOCKS * LINES_BYTES + 1024, RING_AT = P_AT + 2 * LINES_BYTES;
static_assert(Q_BLOCKS * LINES_BYTES + 7 * GROUP_GAP <= P_AT && P_AT % 1024 == 0, "lines of P are swizzled");

// What the consumers are told of a split: two `turn`s of the CTA are kept.
struct Attended {
    Query query;
    int first_head;
    bool begins_item, ends_item;
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

// --- who and what ---------------------------------------------------------------------------------------------

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

__device__ __forceinline__ int num_turns(const AttentionParams& p) { return Division::num_turns(p, small().division); }

__device__ __forceinline__ Work find_work(const AttentionParams& p, int turn) {
    return Division::find_turn<Work>(p, small().division, turn);
}

// Stages are numbered over all work items. Where stage number `stage` is in the ring, and the parity of its phase.
__device__ __forceinline__ int place_of(uint32_t stage) { return stage % STAGES; }
__device__ __forceinline__ uint32_t phase_of(uint32_t stage) { return stage / STAGES & 1; }
__device__ __forceinline__ uint32_t stage_address(uint32_t stage) {
    return shared_address(shared) + RING_AT + place_of(stage) * STAGE_BYTES;
}

// --- producer --------------------------------------------------------------------------------------------------

// The slots of both caches that entries can name.
struct Slots {
    uint32_t main, extra;

    __device__ __forceinline__ explicit Slots(const AttentionParams& p)
        : main(nameable_slots(p.main)), extra(nameable_slots(p.extra)) {}
    __device__ __forceinline__ uint32_t of(const Work& w, int tile) const {
        return tile >= w.main_tiles ? extra : main;
    }
};

// As find_row of lists.cuh, with the source chosen once. That spills less here, and more in few_heads_sm90.cu.
__device__ __forceinline__ Row row_of_entry(const AttentionParams& p, const Work& w, int tile, int32_t entry,
                                            uint32_t slots) {
    return uint32_t(entry) < slots ? Row::of_slot(tile >= w.main_tiles ? p.extra : p.main, entry) : Row::none();
}

// The marks of a stage: a bit a row, if it is valid, and what follows its tile. With several copiers a byte for each.
constexpr uint32_t ALL_VALID = COPIERS == 1 ? 0xffff : 0x0f0f0f0f;
__device__ __forceinline__ int valid_bit(int row) { return row / WARP_ROWS * 8 + row % WARP_ROWS; }
__device__ __forceinline__ void store_marks(int place, int copier, uint32_t marks) {
    uint32_t& word = small().marks[place];
    if (COPIERS == 1) {
        word = marks;
    } else {
        reinterpret_cast<uint8_t*>(&word)[copier] = uint8_t(marks);
    }
}

// What follows a tile in its split: anything, one tile at most, none; or this is none, but the end of the split.
enum Follows : uint32_t { ANYTHING = 0, ONE_AT_MOST = 1 << WARP_ROWS, NONE = 2 << WARP_ROWS, ENDED = 3 << WARP_ROWS };
constexpr uint32_t FOLLOWS = 3 << WARP_ROWS;

// The number in a tile of the i-th of COPIERS stages that producer warp `warp` copies rows of.
__device__ __forceinline__ int stage_of_copier(int i, int warp) { return COPIERS == 1 ? warp : i; }

// Starts the copies of a warp's 16 rows of the tile that begins with stage `first`. Lane l < 16 holds row l % WARP_ROWS
// of those in stage l / WARP_ROWS. `follows()` says what follows the tile, once copies have started.
template <typename Act>
__device__ __forceinline__ void copy_tile(const Row& row, uint32_t first, int warp, int lane, Act follows) {
    Small& sm = small();
    const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
    uint32_t next;
#pragma unroll
    for (int i = 0; i < COPIERS; ++i) {
        const uint32_t stage = first + stage_of_copier(i, warp);
        const int place = place_of(stage);
        const uint32_t to = stage_address(stage) + warp % COPIERS * WARP_ROWS * STRIDE;
        const uint32_t full = shared_address(&sm.full[place]);
        mbarrier_wait(shared_address(&sm.empty[place]), phase_of(stage) ^ 1);
        if (stage >= STAGES) fence_proxy_async();  // between what was read there and bulk copies to the same place
        if (lane / WARP_ROWS == i) {
            const uint32_t own = to + lane % WARP_ROWS * STRIDE;
            copy_in_bulk(own, row_or_zeros<ROW_STRIDE>(row.data, lane), ROW_STRIDE, full);
            if (SCALES_APART) cp_async_8(own + ROW_STRIDE, row.scales(), row.data != nullptr);
        }
        __syncwarp();
        if (i == 0) next = follows();
        const uint32_t valid_here = valid >> WARP_ROWS * i & (1 << WARP_ROWS) - 1;
        if (lane == 0) store_marks(place, warp % COPIERS, valid_here | next);
        mbarrier_arrive_expecting_for_warp(full, WARP_ROWS * ROW_STRIDE, lane);
        if (SCALES_APART) mbarrier_arrive_after_copies(full);
    }
}

// Where a head of Q comes to.
__device__ __forceinline__ uint32_t raw_q(int head) {
    return shared_address(shared) + Q_AT + head * D_QK * 2 + head / GROUP_HEADS * GROUP_GAP;
}

// Bulk copies of Q into the space where load_q will store it again in the order of multiply_qk. One warp calls.
__device__ __forceinline__ void copy_q(const AttentionParams& p, const Query& query, int first_head, int lane) {
    const bf16* q = q_of(p, query, first_head);
    const uint32_t full = shared_address(&small().q_full);
    const int heads = min(HEADS, p.h_q - first_head);
    const int each = p.q_h == D_QK ? GROUP_HEADS : 1;  // heads of one copy
    if (lane == 0) mbarrier_arrive_expecting(full, heads * D_QK * 2);
    __syncwarp();
    for (int head = lane * each; head < heads; head += 32 * each)
        copy_in_bulk(raw_q(head), q + head * p.q_h, min(each, heads - head) * D_QK * 2, full);
}

// The Q of a turn, once the turn before has released its own. Later splits of an item have it.
__device__ __forceinline__ void fetch_q(const AttentionParams& p, const Work& w, int lane) {
    if (w.turn > 0) mbarrier_wait(shared_address(&small().q_empty), (w.turn - 1) & 1);
    if (Division::split_of(p, w.turn) > 0) {
        if (lane == 0) mbarrier_arrive(shared_address(&small().q_full));
        return;
    }
    copy_q(p, w.query, w.first_head, lane);
}

// END KEEP: the first Q of a CTA. A consumer warp asks for it, while the producer warps ask for list entries.
__device__ __forceinline__ void fetch_first_q(const AttentionParams& p, int lane) {
    const int head_tiles = num_head_tiles(p);
    copy_q(p, query_by_branch(p, blockIdx.x / head_tiles), blockIdx.x % head_tiles * HEADS, lane);
}

// The index lists of a query. As load_entry of turn.cuh, with as few instructions as possible: they take turns with
// wgmma.
struct Entries {
    const int32_t *main, *extra;

    __device__ __forceinline__ Entries(const AttentionParams& p, const Work& w)
        : main(list_of(p.main, w.query)), extra(list_of(p.extra, w.query) - w.main_tiles * TILE_ROWS) {}
    // The entry of a row of a tile, -1 where there is none.
    __device__ __forceinline__ int32_t of(const Work& w, int tile, int row) const {
        const bool second = tile >= w.main_tiles;
        const int at = tile * TILE_ROWS + row;
        int32_t entry = -1;
        if (tile < w.end && at < (second ? w.main_tiles * TILE_ROWS + w.extra_length : w.main_length))
            entry = (second ? extra : main)[at];
        return entry;
    }
};

// The rows of a tile of which lane `lane` of producer warp `warp` looks at the entries, i = 0, 1. The first 16 lanes'
// first ones are those that the warp copies.
__device__ __forceinline__ int row_of_lane(int warp, int lane, int i) {
    const int owner = (warp + lane / 16 + 2 * i) % 4;
    return STAGE_ROWS * stage_of_copier(lane % 16 / WARP_ROWS, owner) + owner % COPIERS * WARP_ROWS + lane % WARP_ROWS;
}

// Whether any of a tile's entries is valid. All lanes of the warp call.
__device__ __forceinline__ bool has_valid(const int32_t (&entries)[2], uint32_t slots) {
    return __any_sync(~0u, min(uint32_t(entries[0]), uint32_t(entries[1])) < slots);
}

// Finds the ends of the lists of the CTA's first turns, at once. The consumers call, while Q is on its way: the eight warps
// share the turns, two or more look at one.
__device__ __forceinline__ void find_first_ends(const AttentionParams& p, const Work& only) {
    static_assert(FIRST_TURNS == 4, "two warps look at a turn");
    Small& sm = small();
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, turns = min(num_turns(p), FIRST_TURNS);
    const int warps = turns <= 1 ? 8 : turns == 2 ? 4 : 2;  // of a turn
    const int turn = warp / warps, rank = warp % warps;
    if (turn < turns) {
        Lists lists;
        if constexpr (ONE_TURN) {
            lists = only;
        } else {
            lists.query = query_by_branch(p, Division::find_query(p, small().division, turn));
            find_lists(p, lists);
        }
        if (FOUND_EARLY) wait_for_earlier_kernels();
        const int end = find_end<8, true>(p, lists, 32 * rank + lane, 32 * warps);
        if (lane < 8 / warps) sm.first_ends[turn][rank + lane * warps] = end;
    }
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&sm.ends_known), lane);
}

// A split's tiles up to the end that WARPS warps have found. A warp calls.
template <int WARPS>
__device__ __forceinline__ int count_to_end(const Work& w, int lane, const int (&ends)[WARPS]) {
    const int tiles = __reduce_max_sync(~0u, ends[lane % WARPS]) - w.begin;
    return min(w.count(), IN_TURN ? ceil_div(max(tiles, 0), w.step) : max(tiles, 0));
}

// Each of the four producer warps copies 16 rows of every tile that has a valid entry. List entries are loaded AHEAD
// tiles before their rows: under load they take 2,000 cycles. Warp 0 also fetches Q in the meantime. Returns the stage
// behind the split.
__device__ __forceinline__ int copy_rows(const AttentionParams& p, const Work& w, int warp, int lane) {
    constexpr int AHEAD = 2;
    const Entries list(p, w);
    const Slots slots(p);
    int count = w.count();
    auto find_count = [&] {
        const int end = find_end<CONSUMERS_LOOK ? 4 : 2, false>(p, w, 32 * warp + lane, WARPGROUP);
        if (lane == 0) small().ends[warp] = end;
        named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
        count = count_to_end(w, lane, small().ends);
        named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
    };
    if (CONSUMERS_LOOK && w.turn >= FIRST_TURNS) find_count();
    const int rows[2] = {row_of_lane(warp, lane, 0), row_of_lane(warp, lane, 1)};
    int32_t entries[AHEAD][2];
    auto load_entries = [&](int i, int n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) entries[i][j] = list.of(w, w.tile(n), rows[j]);
    };
    if (FOUND_EARLY && w.turn == 0) {
        wait_for_earlier_kernels();
        let_next_kernel_start();
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_entries(i, i);
    if (warp == 0) {
        if (END != End::KEEP || w.turn > 0) fetch_q(p, w, lane);
        if (lane == 0) {
            small().attended[w.turn % 2] = {w.query, w.first_head, w.begin == 0, w.ends_item};
            mbarrier_arrive(shared_address(&small().q_full));
        }
    }
    uint32_t stage = w.stage;
    bool ended = false;  // the consumers know that no tile follows
#pragma unroll 1
    for (int first = 0; first <= count; first += AHEAD) {
        const uint32_t stage_before = stage;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int n = first + i, tile = w.tile(n);
            if (n > count) break;
            const bool copied = has_valid(entries[i], slots.of(w, tile));  // behind the split there is no entry
            const Row row = row_of_entry(p, w, tile, entries[i][0], slots.of(w, tile));
            load_entries(i, n + AHEAD);
            auto know_end = [&] {  // what the consumers have found, once the first copies are under way
                if (!CONSUMERS_LOOK || i > 0 || n > 0 || w.turn >= FIRST_TURNS) return;
                mbarrier_wait(shared_address(&small().ends_known), 0);
                count = count_to_end(w, lane, small().first_ends[w.turn]);
            };
            if (!copied) {
                know_end();
                if (n < count || ended) continue;
            }
            // The consumers take the tiles of a unit together: one without rows completes the last unit.
            const bool completes = UNIT_TILES == 1 || (stage - w.stage) % UNIT_STAGES != 0;
            copy_tile(row, stage, warp, lane, [&] {
                if (copied) know_end();
                const bool is_tile = n < count || (UNIT_TILES > 1 && completes);
                ended = completes && n + 1 >= count;
                const bool last_of_warpgroup = UNIT_TILES > 1 && completes ? ended : n + 2 >= count;
                return !is_tile ? ENDED : ended ? NONE : last_of_warpgroup ? ONE_AT_MOST : ANYTHING;
            });
            stage += TILE_STAGES;
        }
        const int next = first + AHEAD;
        if (!CONSUMERS_LOOK && stage == stage_before && next < count && count == w.count()) {
            find_count();
            count = max(count, next);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) load_entries(i, next + i);  // again: meanwhile they need no registers
        }
    }
    return stage;
}

// --- Q --------------------------------------------------------------------------------------------------------

// Column blocks 2 n and 2 n + 1 of Q hold columns 128 n .. + 127: each has 64 of them for itself, or they share them.
__device__ __forceinline__ bool are_alone(int n) { return n >= D_NOPE / 128; }

// In multiply_qk, k = 16 i + 2 t + e (e = 0, 1) is what thread t holds as item 4 i + e of a row's columns, 8 further
// item 4 i + 2 + e. So word t of chunk 4 half + k of a head's line is word k of the eight columns from
//   128 n + 32 t + 16 odd + 8 half  in block 2 n + odd, where two share columns,
//   64 block + 16 t + 8 half        in a block that is alone.
// A thread takes all t and k of a head, a half and several blocks, so that it stores 16 bytes at a time. Of V32_FP8's
// last block, the ninth, it takes T_OF_LAST of the four t.
struct QPart {
    int head, half, odd, last_t;
};
constexpr int T_OF_LAST = HEADS / 32;

// The loads and the stores of eight lanes meet all banks: two halves of heads that are in four groups (raw_q) and in
// lines that are swizzled in four ways. So do stores of less than 16 bytes, as every eight lanes have another last_t.
__device__ __forceinline__ QPart q_part(const Role& r) {
    const int i = r.lane / 2 % 4, eight = r.lane / 8, group = (i ^ eight) + r.warp % 2 * 4;
    QPart part;
    part.head = group * GROUP_HEADS + i + r.warp / 2 % (HEADS / 32) * 4;
    part.half = r.lane % 2;
    part.odd = r.warpgroup;
    part.last_t = ((r.warpgroup * (64 / HEADS) + r.warp / 2 % (64 / HEADS)) ^ eight) % (128 / HEADS) * T_OF_LAST;
    return part;
}

template <int WORDS>
__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&x)[WORDS]) {
    if constexpr (WORDS == 4) store_shared_16(to, {x[0], x[1], x[2], x[3]});
    if constexpr (WORDS == 2) store_shared_8(to, {x[0], x[1]});
    if constexpr (WORDS == 1) store_shared_4(to, x[0]);
}

// Stores the columns of TS successive t, times `factor`, a pair of powers of two. `line` is where they go in the half's
// first chunk of column block 0; the swizzle makes that of chunk k line ^ 16 k.
template <int TS>
__device__ __forceinline__ void store_q(uint32_t line, int block, const Vec16 (&columns)[TS], uint32_t factor,
                                        bool f16) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        uint32_t words[TS];
#pragma unroll
        for (int t = 0; t < TS; ++t) {
            const Vec16& v = columns[t];
            const uint32_t scaled = multiply_bf16x2(k < 2 ? (k == 0 ? v.x : v.y) : (k == 2 ? v.z : v.w), factor);
            words[t] = f16 ? bf16x2_to_f16x2(scaled) : scaled;
        }
        store_shared((line ^ (k << 4)) + block * LINES_BYTES, words);
    }
}

// The largest of the magnitudes in `top` and in the columns. Signs are of no meaning.
template <int TS>
__device__ __forceinline__ uint32_t largest_bits(uint32_t top, const Vec16 (&columns)[TS]) {
#pragma unroll
    for (int t = 0; t < TS; ++t) {
        const Vec16& v = columns[t];
        top = max_abs_bf16x2(top, max_abs_bf16x2(max_abs_bf16x2(v.x, v.y), max_abs_bf16x2(v.z, v.w)));
    }
    return top;
}

// Q in place, to f16 and in the order of multiply_qk. Returns what a logit is to be multiplied with.
__device__ __forceinline__ float load_q(const AttentionParams& p, int turn, const Attended& w, const Role& r) {
    constexpr int PAIRS = HEADS / 16;  // of column blocks, of which a thread has one block each
    static_assert(Q_BLOCKS * 64 == D_QK && Q_BLOCKS == (V32 ? 9 : 8), "");
    const QPart part = q_part(r);
    auto pair = [&](int i) { return i * (64 / HEADS) + r.warp / 2 % (64 / HEADS); };
    const uint32_t raw = raw_q(part.head) + 16 * part.half;
    mbarrier_wait(shared_address(&small().q_full), turn & 1);
    Vec16 columns[PAIRS][4], last[T_OF_LAST];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const bool alone = are_alone(pair(i));
        const uint32_t from = raw + 256 * pair(i) + (alone ? 128 : 32) * part.odd;
#pragma unroll
        for (int t = 0; t < 4; ++t) columns[i][t] = load_shared_16(from + (alone ? 32 : 64) * t);
    }
#pragma unroll
    for (int t = 0; V32 && t < T_OF_LAST; ++t) last[t] = load_shared_16(raw + 128 * 8 + 32 * (part.last_t + t));
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) top = largest_bits(top, columns[i]);
    if (V32) top = largest_bits(top, last);
    const bool is_there = part.head < p.h_q - w.first_head;
    if (!is_there) top = 0;
    top &= 0x7fff7fff;
    // Positive numbers are ordered as their bits are.
    top = __reduce_max_sync(~0u, larger_half(top));
    if (r.lane == 0) small().q_max[4 * r.warpgroup + r.warp] = __uint_as_float(top << 16);
    sync_consumers();
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) max = fmaxf(max, small().q_max[i]);
    const int exponent = int(__float_as_uint(max) >> 23) - 127;
    const int shift = exponent == 128 || max == 0.0f ? 0 : min(13 - exponent, 100);  // an infinity stays one
    // Heads that do not exist: whatever was there becomes zeros and NaN, which raise no reference.
    const uint32_t factor = is_there ? power_of_two_bf16x2(shift + 127) : 0;
    const uint32_t line = swizzled(shared_address(shared) + Q_AT, part.head, 4 * part.half);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) store_q(line + part.odd * LINES_BYTES, 2 * pair(i), columns[i], factor, true);
    if (V32) store_q(line + 4 * part.last_t, 8, last, factor, false);
    const float logit_scale = p.scale_log2 * __uint_as_float(uint32_t(127 - shift) << 23);
    return logit_scale == 0.0f ? 0x1p-120f : logit_scale;  // times -inf that is still -inf
}

// --- S^T ------------------------------------------------------------------------------------------------------

// The scales of a thread's two rows, g and g + 8 of its warp's stage: r, and scale / r as f16, both rows in a word, of
// chunk t and (V4_FP8) t + 4.
struct RowScales {
    float r[2], logit[2];  // S^T times `logit` are the logits
    uint32_t ratio[V32 ? 1 : 2];
};

// V32_FP8: a row's scales, none below LEAST_SCALE.
__device__ __forceinline__ void load_v32_scales(uint32_t row, float (&scale)[4]) {
    const Vec16 v = load_shared_16(row + SCALE_OFFSET);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float x = __uint_as_float(words[c]);
        scale[c] = x < LEAST_SCALE ? LEAST_SCALE : x;  // a NaN stays one
    }
}

// V4_FP8: the exponent, biased by 127, of one of a row's scales.
__device__ __forceinline__ int v4_exponent(const Vec8& bytes, int chunk) {
    return (chunk < 4 ? bytes.x : bytes.y) >> (chunk % 4 * 8) & 0xff;
}

// 16 e4m3 of each of a thread's two rows: four steps of k.
struct Bytes {
    Vec16 x, y;
};

// Widens them to A operands. V4_FP8: times the f16 pairs `ratio`.
__device__ __forceinline__ void widen_bytes(const Bytes& bytes, const uint32_t (&ratio)[2], uint32_t (&a)[4][4]) {
    const Vec16 &x = bytes.x, &y = bytes.y;
    const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            e4m3x4_to_f16x2(words[row][i], a[i][row], a[i][row + 2]);
            if (!V32) {
                a[i][row] = multiply_f16x2(a[i][row], ratio[row]);
                a[i][row + 2] = multiply_f16x2(a[i][row + 2], ratio[row]);
            }
        }
    }
}

__device__ __forceinline__ uint64_t q_operand() {
    return wgmma_operand(opaque(shared_address(shared) + Q_AT), 1024, 16);
}

// Starts four steps of k against column block `block` of Q. SUM: whether the first of them sets S or adds.
template <Values VALUES, Sum SUM>
__device__ __forceinline__ void start_qk(uint64_t q, int block, const uint32_t (&a)[4][4], float (&s)[HEADS / 2]) {
    wgmma_fence();
    wgmma<VALUES, SUM, Major::K>(s, a[0], wgmma_further(q, block * LINES_BYTES));
#pragma unroll
    for (int i = 1; i < 4; ++i)
        wgmma<VALUES, Sum::ADD, Major::K>(s, a[i], wgmma_further(q, block * LINES_BYTES + 32 * i));
    wgmma_commit();
}

__device__ __forceinline__ void scale_rows(float (&s)[HEADS / 2], float x, float y) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) s[i] *= i % 4 < 2 ? x : y;
}

// 16 values of a row's RoPE: words 2 i and 2 i + 1 for step i of k.
__device__ __forceinline__ void load_rope(uint32_t row, int t, uint32_t (&words)[8]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        const Vec16 v = load_shared_16(row + ROPE_OFFSET + 16 * (2 * t + b));
        words[4 * b] = v.x, words[4 * b + 1] = v.y, words[4 * b + 2] = v.z, words[4 * b + 3] = v.w;
    }
}

// V4_FP8: stores it where it was, in the order of load_columns: of 16 columns the even ones, then the odd ones.
__device__ __forceinline__ void store_rope(uint32_t row, int t, const uint32_t (&words)[8]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint32_t bytes = odd ? 0x7632 : 0x5410;
        store_shared_16(row + ROPE_OFFSET + 16 * (2 * t + odd),
                        {__byte_perm(words[0], words[1], bytes), __byte_perm(words[2], words[3], bytes),
                         __byte_perm(words[4], words[5], bytes), __byte_perm(words[6], words[7], bytes)});
    }
}

// RoPE of two rows as A operands.
__device__ __forceinline__ void arrange_rope(const uint32_t (&rope)[2][8], uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) a[i][row] = rope[row][2 * i], a[i][row + 2] = rope[row][2 * i + 1];
    }
}

// A thread's bytes of NoPE column block `block`.
__device__ __forceinline__ Bytes load_block(uint32_t row, int t, int block) {
    const uint32_t at =
        row + (block < D_NOPE / 128 * 2 ? 128 * (block / 2) + 16 * (2 * t + block % 2) : 64 * block + 16 * t);
    return {load_shared_16(at), load_shared_16(at + 8 * STRIDE)};
}

// Below, bytes are loaded and widened for the column block after next while wgmma works.

__device__ __forceinline__ RowScales multiply_qk_v32(uint32_t row, int t, float logit_scale, float (&s)[HEADS / 2]) {
    const uint32_t none[2] = {0, 0};
    const uint64_t q = q_operand();
    uint32_t a[2][4][4];
    Bytes bytes = load_block(row, t, 0);
    float scale[2][4];
    load_v32_scales(row, scale[0]);
    load_v32_scales(row + 8 * STRIDE, scale[1]);
    widen_bytes(bytes, none, a[0]);
    bytes = load_block(row, t, 1);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (c == 0) {
            start_qk<Values::F16, Sum::SET>(q, 0, a[0], s);
        } else {
            start_qk<Values::F16, Sum::ADD>(q, 2 * c, a[0], s);
        }
        widen_bytes(bytes, none, a[1]);
        if (c < 3) bytes = load_block(row, t, 2 * c + 2);
        start_qk<Values::F16, Sum::ADD>(q, 2 * c + 1, a[1], s);
        wgmma_wait<1>();
        if (c < 3) {
            widen_bytes(bytes, none, a[0]);
            bytes = load_block(row, t, 2 * c + 3);
        } else {
            uint32_t rope[2][8];
            load_rope(row, t, rope[0]);
            load_rope(row + 8 * STRIDE, t, rope[1]);
            arrange_rope(rope, a[0]);
        }
        const float x = c < 3 ? scale[0][c] * reciprocal_approx(scale[0][(c + 1) % 4]) : scale[0][3];
        const float y = c < 3 ? scale[1][c] * reciprocal_approx(scale[1][(c + 1) % 4]) : scale[1][3];
        wgmma_wait<0>();
        scale_rows(s, x, y);
    }
    start_qk<Values::BF16, Sum::ADD>(q, NOPE_BLOCKS, a[0], s);
    RowScales result;
    float ratio[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int exponent =
            __float_as_uint(fmaxf(fmaxf(scale[i][0], scale[i][1]), fmaxf(scale[i][2], scale[i][3]))) >> 23;
        const float own = t < 2 ? (t == 0 ? scale[i][0] : scale[i][1]) : (t == 2 ? scale[i][2] : scale[i][3]);
        result.r[i] = power_of_two(exponent);
        result.logit[i] = logit_scale;
        ratio[i] = own * inverse_power_of_two(exponent);
    }
    result.ratio[0] = pack_f16x2(ratio[0], ratio[1]);
    wgmma_wait<0>();
    return result;
}

__device__ __forceinline__ RowScales multiply_qk_v4(uint32_t row, int t, float logit_scale, float (&s)[HEADS / 2]) {
    const uint64_t q = q_operand();
    uint32_t rope[2][8], ratio[4][2];  // of columns 128 c + 32 t .. + 31, pairs of f16
    RowScales result;
    float own[2][2];
    Bytes bytes = load_block(row, t, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_rope(row + i * 8 * STRIDE, t, rope[i]);
        const Vec8 scales = load_shared_8(row + i * 8 * STRIDE + ROW_STRIDE);
        uint32_t top = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) top = max_abs_bf16x2(top, rope[i][k]);
        top = max(top & 0x7fff, top >> 16 & 0x7fff);
        top = max(top, __shfl_xor_sync(~0u, top, 1));
        top = max(top, __shfl_xor_sync(~0u, top, 2));
        int exponent = int(top >> 7) - 14;  // RoPE / r stays below 2^15
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) exponent = max(exponent, v4_exponent(scales, c));
        const bool nan = exponent == 255;
        exponent = min(max(exponent, LEAST_EXPONENT), 253);
        result.r[i] = nan ? __uint_as_float(0x7fffffffu) : power_of_two(exponent);
        result.logit[i] = logit_scale * result.r[i];
        if (result.logit[i] == 0.0f) result.logit[i] = logit_scale;  // times -inf that is still -inf
        auto ratio_of = [&](int biased) { return power_of_two(max(biased - exponent + 127, 0)); };
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint32_t biased =
                c < 3 ? (c < 2 ? scales.x : scales.y) >> (16 * (c % 2) + t / 2 * 8) & 0xff : scales.y >> 16 & 0xff;
            const float f = ratio_of(biased);
            ratio[c][i] = pack_f16x2(f, f);
        }
        own[0][i] = ratio_of(scales.x >> 8 * t & 0xff);
        own[1][i] = ratio_of(scales.y >> 8 * t & 0xff);
        const uint32_t inverse = power_of_two_bf16x2(254 - exponent);
#pragma unroll
        for (int k = 0; k < 8; ++k) rope[i][k] = bf16x2_to_f16x2(multiply_bf16x2(rope[i][k], inverse));
        store_rope(row + i * 8 * STRIDE, t, rope[i]);
    }
    uint32_t a[2][4][4];
    arrange_rope(rope, a[0]);
    start_qk<Values::F16, Sum::SET>(q, NOPE_BLOCKS, a[0], s);
#pragma unroll
    for (int block = 0; block < NOPE_BLOCKS; ++block) {
        uint32_t (&buffer)[4][4] = a[(block + 1) % 2];
        widen_bytes(bytes, ratio[block / 2], buffer);
        if (block + 1 < NOPE_BLOCKS) bytes = load_block(row, t, block + 1);
        start_qk<Values::F16, Sum::ADD>(q, block, buffer, s);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < (V32 ? 1 : 2); ++k) result.ratio[k] = pack_f16x2(own[k][0], own[k][1]);
    return result;
}

// S^T of the tile whose first stage is `stage`, which has come: each warp its 16 rows. Rows that are not valid will get
// a P of 0.
__device__ __forceinline__ RowScales multiply_qk(const Role& r, uint32_t stage, float logit_scale,
                                                 float (&s)[HEADS / 2]) {
    stage += r.warp;
    const uint32_t row = stage_address(stage) + r.g * STRIDE;
    RowScales scales;
    if constexpr (V32) {
        scales = multiply_qk_v32(row, r.t, logit_scale, s);
    } else {
        scales = multiply_qk_v4(row, r.t, logit_scale, s);
    }
    const uint32_t valid = small().marks[place_of(stage)];
    if ((valid & ALL_VALID) != ALL_VALID) {
        const float mask = logit_scale < 0.0f ? INF : -INF;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (valid >> valid_bit(r.g + 8 * i) & 1) continue;
#pragma unroll
            for (int c = 0; c < OWN_HEADS; ++c) s[element(i, c)] = mask;
        }
    }
    return scales;
}

// --- softmax --------------------------------------------------------------------------------------------------

// Of 2 HALF values each half of the lanes, chosen by a bit of g, keeps HALF, combined from both halves.
template <int HALF, typename Combine>
__device__ __forceinline__ void share_values(float (&v)[OWN_HEADS], bool high, int distance, Combine combine) {
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
        const float first = v[c], second = v[c + HALF];
        v[c] = combine(high ? second : first, __shfl_xor_sync(~0u, high ? first : second, distance));
    }
}

// Combines values of lanes with the same t until a thread has SUMS of them, of heads sum_head(r, 0), sum_head(r, 1) ...
template <typename Combine>
__device__ __forceinline__ void combine_lanes(const Role& r, float (&v)[OWN_HEADS], Combine combine) {
    if constexpr (SUMS < OWN_HEADS) {
        share_values<OWN_HEADS / 2>(v, r.g & 4, 16, combine);
        share_values<OWN_HEADS / 4>(v, r.g & 2, 8, combine);
        share_values<OWN_HEADS / 8>(v, r.g & 1, 4, combine);
    }
}
__device__ __forceinline__ void add_lanes(const Role& r, float (&v)[OWN_HEADS]) {
    combine_lanes(r, v, [](float x, float y) { return x + y; });
}
__device__ __forceinline__ int sum_head(const Role& r, int c) {
    return SUMS == OWN_HEADS ? r.head(c) : 2 * r.lane + c;
}

// References rise to the tile's largest logit + log2 r. O^T and sums so far are to be multiplied by `factor`. Rare.
__device__ __forceinline__ void raise_references(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2]) {
    Small& sm = small();
    const float log2_r[2] = {log2_approx(scales.r[0]), log2_approx(scales.r[1])};  // exact
    float tops[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c)
        tops[c] =
            fmaxf(s[element(0, c)] * scales.logit[0] + log2_r[0], s[element(1, c)] * scales.logit[1] + log2_r[1]);
    combine_lanes(r, tops, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float top = SUMS == OWN_HEADS ? rows_max(tops[c]) : tops[c];
        if (SUMS < OWN_HEADS || r.g == 0) sm.across[r.warpgroup][r.warp][sum_head(r, c)] = top;
    }
    sync_warpgroup(r);
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float (&of_warps)[4][HEADS] = sm.across[r.warpgroup];
        const float old = sm.ref[head];
        const float top =
            fmaxf(fmaxf(of_warps[0][head], of_warps[1][head]), fmaxf(of_warps[2][head], of_warps[3][head]));
        const float to = fmaxf(old, top - HEADROOM);
        sm.ref[head] = to;
        sm.factor[r.warpgroup][head] = exp2_approx(old - to);
    }
    sync_warpgroup(r);
}

// Stores a row's ratios, each quad those of its row, where load_columns reads them: those of a thread's four of 16
// rows stand side by side.
__device__ __forceinline__ void store_ratios(const Role& r, const RowScales& scales) {
    Small& sm = small();
    const int place = 16 * r.warp + r.g / 2 * 4 + r.g % 2;  // of row g; that of row g + 8 is two further
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sm.ratio[r.warpgroup][r.t][place + 2 * i] = uint16_t(scales.ratio[0] >> 16 * i);
        if constexpr (!V32) {
            if (r.t < 3) sm.ratio[r.warpgroup][r.t + 4][place + 2 * i] = uint16_t(scales.ratio[1] >> 16 * i);
        }
    }
}

// P^T = r 2^(logit - ref) to shared memory, rounded. `sums` gets the sums of P^T / r. Returns true if a value is above
// MAX_P.
__device__ __forceinline__ bool store_p(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2],
                                        float (&sums)[OWN_HEADS]) {
    // Line = head, chunk = eight rows.
    const int line = r.lane % 8 + r.lane / 16 * 8, chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(shared_address(shared) + P_AT + r.warpgroup * LINES_BYTES, line, chunk);
    float2 refs[HEADS / 8];  // loaded all at once, or each would wait behind the stores before it
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) refs[j] = *reinterpret_cast<const float2*>(&small().ref[r.head(2 * j)]);
    uint32_t top = 0, rounded[2][2];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 ref = refs[j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = exp2_approx(fmaf(s[4 * j + 2 * i], scales.logit[i], -ref.x));
            const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], scales.logit[i], -ref.y));
            sums[2 * j] = i == 0 ? x : sums[2 * j] + x;
            sums[2 * j + 1] = i == 0 ? y : sums[2 * j + 1] + y;
            rounded[j % 2][i] = pack_f16x2(x * scales.r[i], y * scales.r[i]);
            top = max_f16x2(top, rounded[j % 2][i]);
        }
        if (j % 2 == 1)
            stmatrix_x4_trans(to + (j - 1) * 1024, rounded[0][0], rounded[0][1], rounded[1][0], rounded[1][1]);
    }
    return larger_half(top) > MAX_P;
}

// S^T of one of this warpgroup's tiles becomes P^T and is published. `sums` gets what this thread's rows add to
// denominators. P^T is computed with the references as they are; before the `first` tile of a split there are none. In
// the rare case that they are too low, they rise, P^T is computed again, and the function returns true.
__device__ __forceinline__ bool softmax_tile(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2],
                                             float (&sums)[OWN_HEADS], bool first) {
    store_ratios(r, scales);
    if (first) raise_references(rare_role(r), scales, s);
    const bool too_large = store_p(r, scales, s, sums);
    fence_proxy_async();
    const bool raised = named_barrier_any(WARPGROUP_SYNC + r.warpgroup, WARPGROUP, too_large);
    if (raised) {
        raise_references(rare_role(r), scales, s);
        store_p(r, scales, s, sums);
        fence_proxy_async();
    }
    if (threadIdx.x % WARPGROUP == 0) small().raised[r.warpgroup] = raised;
    if (raised) sync_warpgroup(r);
    named_barrier_arrive(P_READY + r.warpgroup, CONSUMERS);
    return raised;
}

// --- O^T ------------------------------------------------------------------------------------------------------

// A thread's share of O^T, four column blocks of 64 value columns, and of the denominators.
struct Output {
    float o[4][HEADS / 2], sum[SUMS];
};

// References were raised for P of a tile of warpgroup `owner`: O^T and sums follow.
__device__ __forceinline__ void follow_references(const Role& r, int owner, Output& out) {
    const Small& sm = small();
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = sm.factor[owner][r.head(c)];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            out.o[v][element(0, c)] *= f;
            out.o[v][element(1, c)] *= f;
        }
    }
#pragma unroll
    for (int c = 0; c < SUMS; ++c) out.sum[c] *= sm.factor[owner][sum_head(r, c)];
}

// The bytes of two rows (2 t and 2 t + 1 of eight) in columns 2 g and 2 g + 1 become a pair of f16 for each column.
__device__ __forceinline__ void widen_pair(uint32_t bytes, uint32_t ratio, uint32_t& even, uint32_t& odd) {
    e4m3x4_to_f16x2(__byte_perm(bytes, 0, 0x3120), even, odd);
    even = multiply_f16x2(even, ratio);
    odd = multiply_f16x2(odd, ratio);
}

// 16 rows and this warp's 16 columns of column blocks 2 i and 2 i + 1 as they come from shared memory, and the rows'
// ratios.
struct Columns {
    uint32_t bytes[4];
    Vec8 ratio[V32 ? 1 : 2];  // of the thread's four rows: for both column blocks, or for each
    uint32_t rope[4];         // V4_FP8: the last column block's A operand
};

// Where the ratios for P of warpgroup `owner` begin that a thread reads: those of its warpgroup's first chunk.
__device__ __forceinline__ uint32_t own_ratios(const Role& r, int owner) {
    return shared_address(&small().ratio[owner][(V32 ? 2 : 4) * r.warpgroup][4 * r.t]);
}

// Its ratios for step k of a chunk, the `chunk`-th of its warpgroup.
__device__ __forceinline__ Vec8 load_ratios(uint32_t ratios, int chunk, int k) {
    return load_shared_8(ratios + 2 * (TILE_ROWS * chunk + 16 * k));
}

__device__ __forceinline__ Columns load_columns(const Role& r, uint32_t stage, uint32_t ratios, int k, int i) {
    const uint32_t rows = stage_address(stage) + r.lane % 16 * STRIDE, second = r.lane / 16;
    const uint32_t from = rows + 256 * r.warpgroup + 64 * second + 16 * r.warp;
    Columns c;
    if constexpr (V32) {
        ldmatrix_x4_trans(c.bytes, from + 128 * i);
        c.ratio[0] = load_ratios(ratios, i, k);
    } else {
        // The last column block is RoPE, which has no ratios: those before are loaded, and not used.
        ldmatrix_x4_trans(c.bytes, i == 0 || (r.warpgroup == 1 && second) ? from : from + 128);
        c.ratio[0] = load_ratios(ratios, 2 * i, k);
        c.ratio[1] = load_ratios(ratios, i == 0 ? 1 : 3 - r.warpgroup, k);
        if (i == 1)
            ldmatrix_x4_trans(c.rope, stage_address(stage) + (r.lane / 16 * 8 + r.lane % 8) * STRIDE + ROPE_OFFSET +
                                          32 * r.warp + r.lane / 8 % 2 * 16);
    }
    return c;
}

// Widens them to A operands.
__device__ __forceinline__ void widen_columns(const Role& r, const Columns& c, int i, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const Vec8& ratio = c.ratio[V32 ? 0 : v];
        widen_pair(c.bytes[2 * v], ratio.x, a[v][0], a[v][1]);
        widen_pair(c.bytes[2 * v + 1], ratio.y, a[v][2], a[v][3]);
    }
    if (!V32 && i == 1) {
        // Chosen here, or the compiler chooses behind the fence, between two wgmma, and serialises them.
#pragma unroll
        for (int n = 0; n < 4; ++n) a[1][n] = opaque(r.warpgroup == 1 ? c.rope[n] : a[1][n]);
    }
}

// O^T += V^T . P^T of the tile of warpgroup `owner` whose first stage is `stage`, two column blocks at a time. Stages
// are released one by one. `meanwhile` runs beside the first products.
template <typename Act>
__device__ __forceinline__ void multiply_pv(const Role& r, uint32_t stage, int owner, bool raised, Output& out,
                                            Act meanwhile) {
    if (raised) follow_references(rare_role(r), owner, out);
    const uint64_t prob = wgmma_operand(opaque(shared_address(shared) + P_AT) + owner * LINES_BYTES, 1024, 16);
    const uint32_t ratios = opaque(own_ratios(r, owner));  // or each of them has an address in registers
    uint32_t a[2][2][4];
    Columns columns = load_columns(r, stage, ratios, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (k > 0) wgmma_wait<1>();
            widen_columns(r, columns, i, a[i]);
            if (i == 0) {
                columns = load_columns(r, stage + k, ratios, k, 1);
            } else {
                release_reads();
                mbarrier_arrive_for_warp(shared_address(&small().empty[place_of(stage + k)]), r.lane);
                if (k < 3) columns = load_columns(r, stage + k + 1, ratios, k + 1, 0);
            }
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < 2; ++v)
                wgmma<Values::F16, Sum::ADD, Major::K>(out.o[2 * i + v], a[i][v], wgmma_further(prob, 32 * k));
            wgmma_commit();
        }
        if (k == 0) meanwhile();
    }
    wgmma_wait<0>();
}

// --- results --------------------------------------------------------------------------------------------------

// Stores each warp's denominators; sum_of adds those of all warps for head `local` of the head tile.
__device__ __forceinline__ void gather_sums(const Role& r, const Output& out) {
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float sum = SUMS == OWN_HEADS ? rows_sum(out.sum[c]) : out.sum[c];
        if (SUMS < OWN_HEADS || r.g == 0) small().across[r.warpgroup][r.warp][sum_head(r, c)] = sum;
    }
    sync_consumers();
}
__device__ __forceinline__ float sum_of(int local) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += small().across[i / 4][i % 4][local];
    return sum;
}

// END LEAVE: what the partial results of other CTAs are multiplied with, [partial result][head]. In the space of Q: a
// CTA merges at its last split.
static_assert(MOST_SPLITS * HEADS * 4 <= P_AT, "");
__device__ __forceinline__ float* merge_weights() { return reinterpret_cast<float*>(shared); }

// Denominators, with those of `count` partial results of the CTAs before, to statistics, and to the factors that O^T
// and these are multiplied with.
__device__ __forceinline__ void finish_sums(const AttentionParams& p, const Attended& w, const Role& r, int count,
                                            const PartialResults<8>& partials) {
    Small& sm = small();
    const int local = threadIdx.x, head = w.first_head + local, first = partials.rank - count;
    if (local < HEADS) {
        const float ref = sm.ref[local];
        const float4 nearest = count > 0 ? partials.statistics_of(first, local) : make_float4(ref, 0.0f, 0.0f, 0.0f);
        float top = fmaxf(ref, nearest.x);
#pragma unroll 1
        for (int i = 1; i < count; ++i) top = fmaxf(top, partials.statistics_of(first + i, local).x);
        const float own = exp2_approx(ref - top);
        float sum = own * sum_of(local);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const float4 statistics = i == 0 ? nearest : partials.statistics_of(first + i, local);
            const float weight = exp2_approx(statistics.x - top);
            sum += weight * statistics.y;
            merge_weights()[i * HEADS + local] = weight * statistics.w;
        }
        const HeadResult result = {0.0f, log2_sum_exp(top, sum)};
        float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (head < p.h_q) {
            if (sum != 0.0f) scale *= sink_factor(p, head, result.lse);
            write_statistics(p, w.query, head, result);
        }
        sm.scale[local] = own * scale;
#pragma unroll 1
        for (int i = 0; i < count; ++i) merge_weights()[i * HEADS + local] *= scale;
    }
    sync_consumers();
}

// Makes O^T a partial result: its statistics are written, and the power of two that brings each head's O^T to the range
// of f16 stands in `scale`, for threads that have met.
__device__ __forceinline__ void write_partial_statistics(const Role& r, const Output& out,
                                                         const PartialResults<8>& partials) {
    Small& sm = small();
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        float top = 0.0f;
#pragma unroll
        for (int v = 0; v < 4; ++v)
            top = fmaxf(top, fmaxf(fabsf(out.o[v][element(0, c)]), fabsf(out.o[v][element(1, c)])));
        top = rows_max(top);
        if (r.g == 0) sm.largest[4 * r.warpgroup + r.warp][r.head(c)] = top;
    }
    gather_sums(r, out);
    if (threadIdx.x < HEADS) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) top = fmaxf(top, sm.largest[i][threadIdx.x]);
        const float up = to_f16_range(top);
        sm.scale[threadIdx.x] = up;
        partials.write_statistics(threadIdx.x, sm.ref[threadIdx.x], sum_of(threadIdx.x), 0.0f, 1.0f / up);
    }
}

// A thread's values of a partial result, of its head number `own`: chunk 256 own + threadIdx.x, columns 2 g and 2 g + 1
// of 16, of four column blocks.
__device__ __forceinline__ float4 partial_chunk(const Role& r, const Output& out, int own) {
    const float up = small().scale[r.head(own)];
    float words[4];
#pragma unroll
    for (int v = 0; v < 4; ++v)
        words[v] = __uint_as_float(pack_f16x2(out.o[v][element(0, own)] * up, out.o[v][element(1, own)] * up));
    return make_float4(words[0], words[1], words[2], words[3]);
}

// Writes its values. All consumers have met since its statistics were written.
__device__ __forceinline__ void write_partial_values(const Role& r, const Output& out,
                                                     const PartialResults<8>& partials) {
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) partials.write(256 * c + threadIdx.x, partial_chunk(r, out, c));
}

// Writes the partial result of a split, in f16 times a power of two for each head.
__device__ __forceinline__ void write_partial(const Role& r, const Output& out, const PartialResults<8>& partials) {
    write_partial_statistics(r, out, partials);
    sync_consumers();
    write_partial_values(r, out, partials);
}

// A thread's values of a partial result for some of its heads, from number `first` on.
struct Chunks {
    static constexpr int COUNT = 8;
    float4 of[COUNT];
};
__device__ __forceinline__ Chunks load_chunks(const PartialResults<8>& partials, int number, int first) {
    Chunks chunks;
#pragma unroll
    for (int c = 0; c < Chunks::COUNT; ++c) chunks.of[c] = partials.chunk_of(number, 256 * (first + c) + threadIdx.x);
    return chunks;
}

// Adds `count` partial results of the CTAs before to O^T, which has been multiplied with its factors. The first values
// of the first one were asked for before.
__device__ __forceinline__ void add_partials(const Role& r, int count, const PartialResults<8>& partials,
                                             Chunks& chunks, Output& out) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int first = 0; first < OWN_HEADS; first += Chunks::COUNT) {
            if (i > 0 || first > 0) chunks = load_chunks(partials, partials.rank - count + i, first);
#pragma unroll
            for (int c = 0; c < Chunks::COUNT; ++c) {
                const int own = first + c;
                float v[8] = {};
                add_chunk(v, merge_weights()[i * HEADS + r.head(own)], chunks.of[c]);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    out.o[n][element(0, own)] += v[2 * n];
                    out.o[n][element(1, own)] += v[2 * n + 1];
                }
            }
        }
    }
}

__device__ __forceinline__ void clear(Output& out) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i) out.o[v][i] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < SUMS; ++c) out.sum[c] = 0.0f;
}

// END KEEP: writes the partial result of a split. After an item's last one O^T becomes the sum of all, as a cluster
// merges them: that of the last split stays in registers, rounded as the others are. A thread reads what it has written
// itself, the values of the next heads or split while it adds those before.
__device__ __forceinline__ void merge_segments(const AttentionParams& p, const Attended& w, const Role& r, int split,
                                               Output& out) {
    const int count = p.num_splits, last = count - 1;
    const ClusterResults<8> partials(p.cluster_parts + int64_t(blockIdx.x) * count * PartialResults<8>::STEP, split,
                                     count, 1);
    write_partial_statistics(r, out, partials);  // its code stands here once, for all splits
    if (!w.ends_item) {
        sync_consumers();
        write_partial_values(r, out, partials);
        return;
    }
    float* weights = reinterpret_cast<float*>(shared + P_AT);  // no P is read any more; the next Q may be on its way
    static_assert(MAX_CLUSTER * HEADS * 4 <= 2 * LINES_BYTES, "");
    if (threadIdx.x < HEADS) {
        float weight[MAX_CLUSTER];
        const float scale = partials.weigh(
            threadIdx.x, weight,
            [&](int local, bool write, float ref, float sum, float) {
                return finish_merged_head(p, w.query, w.first_head + local, write, ref, sum, 0.0f);
            },
            true);
#pragma unroll
        for (int i = 0; i < MAX_CLUSTER; ++i) {
            if (i < count) weights[i * HEADS + threadIdx.x] = weight[i] * scale;
        }
    }
    Chunks next = load_chunks(partials, 0, 0);
    sync_consumers();
    float4 own_chunks[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) own_chunks[c] = partial_chunk(r, out, c);
#pragma unroll
    for (int first = 0; first < OWN_HEADS; first += Chunks::COUNT) {
        float sum[Chunks::COUNT][8] = {};
        auto add = [&](int i, int c, const float4& chunk) {
            add_chunk(sum[c], weights[i * HEADS + r.head(first + c)], chunk);
        };
#pragma unroll 1
        for (int i = 0; i < last; ++i) {
            const Chunks chunks = next;
            const bool ends = i + 1 == last;
            if (!ends || first + Chunks::COUNT < OWN_HEADS)
                next = load_chunks(partials, ends ? 0 : i + 1, ends ? first + Chunks::COUNT : first);
#pragma unroll
            for (int c = 0; c < Chunks::COUNT; ++c) add(i, c, chunks.of[c]);
        }
#pragma unroll
        for (int c = 0; c < Chunks::COUNT; ++c) {
            add(last, c, own_chunks[first + c]);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                out.o[n][element(0, first + c)] = sum[c][2 * n];
                out.o[n][element(1, first + c)] = sum[c][2 * n + 1];
            }
        }
    }
    sync_consumers();
}

// END MEET: merges partial results of a query's heads, this CTA's share of the output. The CTAs have met.
__device__ __forceinline__ void merge_partials(const AttentionParams& p, const Query& query, int first_head,
                                               const ClusterResults<8>& partials) {
    float* weights = reinterpret_cast<float*>(shared);  // in the space of Q, which is not read any more
    static_assert(MAX_CLUSTER * HEADS * 4 <= P_AT, "");
    auto head_of = [](int chunk) { return chunk / 256 / 2 * 8 + chunk % 4 * 2 + chunk / 256 % 2; };
    auto finish = [&](int local, bool write, float ref, float sum, float) {
        return finish_merged_head(p, query, first_head + local, write, ref, sum, 0.0f);
    };
    auto column_of = [](int chunk) {
        const int thread = chunk % 256;
        return thread / 128 * 256 + thread % 128 / 32 * 16 + thread % 32 / 4 * 2;
    };
    auto store = [&](int local, int column, const float (&v)[8]) {
        const int head = first_head + local;
        if (head >= p.h_q) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) write_output(p, query, head, column + 64 * i, v[2 * i], v[2 * i + 1]);
    };
    partials.merge_share<CONSUMERS>(weights, head_of, column_of, finish, sync_consumers, store);
}

// Turns O^T into results, with the partial results of the CTAs before.
__device__ __forceinline__ void finish_results(const AttentionParams& p, const Attended& w, const Role& r,
                                               Output& out) {
    const PartialResults<8> partials = {p.cluster_parts, int(blockIdx.x)};
    gather_sums(r, out);
    const bool waits = r.warpgroup == 0 && r.warp == 0;
    const int count = Division::count_earlier(p, w.begins_item, waits, r.lane, small().partials, sync_consumers);
    Chunks chunks = {};  // set in any case, or they have registers in the loop
    if (count > 0) chunks = load_chunks(partials, partials.rank - count, 0);
    finish_sums(p, w, r, count, partials);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = small().scale[r.head(c)];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            out.o[v][element(0, c)] *= f;
            out.o[v][element(1, c)] *= f;
        }
    }
    if constexpr (END == End::LEAVE) add_partials(r, count, partials, chunks, out);
}

// Writes results. Before, no P is read any more.
__device__ __forceinline__ void store_results(const AttentionParams& p, const Attended& w, const Role& r,
                                              const Output& out) {
    const int first = 256 * r.warpgroup + 16 * r.warp;  // of column block v this thread holds 2 g and 2 g + 1 of 16
    bf16* results = out_of(p, w.query, w.first_head);
    // END KEEP: there is one way. Code that runs once comes from memory, so it takes time by its length.
    const bool wide = p.flags & WIDE_OUT;
    if (END == End::KEEP || wide) {
        // Eight heads at a time through the space of P, [head][column], from where whole lines are written. Stretches
        // of 32 bytes change places from one pair of heads to the next, so that a warp's stores meet all banks.
        constexpr int LINE = 2 * D_V, BUFFERS = HEADS / 32;
        static_assert(BUFFERS * 8 * LINE == 2 * LINES_BYTES, "");
        const int head = threadIdx.x / 64, column = threadIdx.x % 64 * 8, heads = p.h_q - w.first_head;
        bf16* to = results + head * p.out_h + column;  // of this head and every fourth one behind it
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            const uint32_t lines = shared_address(shared) + P_AT + j % BUFFERS * 8 * LINE;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    store_shared_4(lines + (2 * r.t + k) * LINE + (2 * (first + 64 * v + 2 * r.g) ^ r.t << 5),
                                   pack_bf16x2(out.o[v][element(0, 2 * j + k)], out.o[v][element(1, 2 * j + k)]));
            }
            sync_consumers();
            Vec16 chunks[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                chunks[i] = load_shared_16(lines + (head + 4 * i) * LINE + (2 * column ^ (head + 4 * i) / 2 << 5));
#pragma unroll
            for (int i = 0; i < 2; ++i, to += 4 * p.out_h) {
                if (8 * j + 4 * i + head < heads) store_chunk(to, chunks[i], END != End::KEEP || wide);
            }
            if (BUFFERS == 1) sync_consumers();
        }
    } else {
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
            const int head = w.first_head + r.head(c);
            if (head >= p.h_q) continue;
#pragma unroll
            for (int v = 0; v < 4; ++v)
                write_output(p, w.query, head, first + 64 * v + 2 * r.g, out.o[v][element(0, c)],
                             out.o[v][element(1, c)]);
        }
    }
}

// --- a work item ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void release_q(const Role& r) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&small().q_empty), r.lane);
}

// Waits for a tile's rows, those of this warp's stage, and returns what follows the tile.
__device__ __forceinline__ uint32_t wait_for_tile(const Role& r, uint32_t stage) {
    const int place = place_of(stage + r.warp);
    mbarrier_wait(shared_address(&small().full[place]), phase_of(stage + r.warp));
    return small().marks[place] & FOLLOWS;
}

// Releases a tile that nothing is read of. Its stages may have come at different times.
__device__ __forceinline__ void pass_tile(const Role& r, uint32_t stage) {
#pragma unroll 1
    for (int k = 0; k < TILE_STAGES; ++k) {
        const int place = place_of(stage + k);
        mbarrier_wait(shared_address(&small().full[place]), phase_of(stage + k));
        __syncwarp();  // no lane is still to see that phase
        mbarrier_arrive_for_warp(shared_address(&small().empty[place]), r.lane);
    }
}

// What a division does with O^T (division.cuh).
struct Results {
    static constexpr int VALUES = 8;
    const AttentionParams& p;
    const Attended& w;
    const Role& r;
    Output& out;

    __device__ __forceinline__ bool begins_item() const { return w.begins_item; }
    __device__ __forceinline__ bool ends_item() const { return w.ends_item; }
    __device__ __forceinline__ bool is_first_warp() const { return r.warpgroup == 0 && r.warp == 0; }
    __device__ __forceinline__ int lane() const { return r.lane; }
    __device__ __forceinline__ void sync() const { sync_consumers(); }
    __device__ __forceinline__ void write(const PartialResults<8>& partials) const { write_partial(r, out, partials); }
    __device__ __forceinline__ void merge(const ClusterResults<8>& partials) const {
        merge_partials(p, w.query, w.first_head, partials);
    }
    __device__ __forceinline__ void keep(int split) const { merge_segments(p, w, r, split, out); }
    __device__ __forceinline__ void finish() const {
        finish_results(p, w, r, out);
        store();
    }
    __device__ __forceinline__ void store() const { store_results(p, w, r, out); }
};

// Tile after tile: this warpgroup's next S, then the product with the other's tile, then the softmax of its own.
// Returns the stage behind the split.
__device__ __forceinline__ int attend(const AttentionParams& p, int turn, int stage, const Role& r,
                                      const Attended& known) {
    const Attended& w = ONE_TURN ? known : small().attended[turn % 2];
    float logit_scale;
    if (Division::split_of(p, turn) == 0) {
        logit_scale = load_q(p, turn, w, r);
        if (END == End::KEEP) small().logit_scale = logit_scale;  // all threads have the same
    } else {
        mbarrier_wait(shared_address(&small().q_full), turn & 1);
        logit_scale = small().logit_scale;
    }
    if (threadIdx.x < HEADS) small().ref[threadIdx.x] = REF_NONE;
    fence_proxy_async();
    sync_consumers();

    Output out;
    clear(out);
    const int other = 1 - r.warpgroup;
    auto multiply_other = [&](uint32_t stage) {
        named_barrier_sync(P_READY + other, CONSUMERS);
        multiply_pv(r, stage, other, small().raised[other], out, [] {});
    };
    const int first = stage;
    stage += TILE_STAGES * r.warpgroup;  // the first of this warpgroup's tile
    // What follows this warpgroup's last tile, and the last one of both; whether the other's last one is still to be
    // multiplied.
    uint32_t follows = ANYTHING, last;
    bool other_is_left = false;
#pragma unroll 1
    for (;; stage += 2 * TILE_STAGES) {
        if (stage != first) {  // a tile of the other stands before it
            last = wait_for_tile(r, stage - TILE_STAGES);
            if (last & NONE) {  // or ENDED
                other_is_left = last == NONE;
                break;
            }
        }
        last = wait_for_tile(r, stage);
        if (last == ENDED) {
            other_is_left = stage != first;
            stage += TILE_STAGES;
            break;
        }
        follows = last;
        float s[HEADS / 2], sums[OWN_HEADS];
        const RowScales scales = multiply_qk(r, stage, logit_scale, s);
        if (follows != ANYTHING) release_q(r);
        if (stage != first) multiply_other(stage - TILE_STAGES);
        const bool raised = softmax_tile(r, scales, s, sums, stage == first);
        multiply_pv(r, stage, r.warpgroup, raised, out, [&] {
            add_lanes(r, sums);
#pragma unroll
            for (int c = 0; c < SUMS; ++c) out.sum[c] += sums[c];
        });
        if (follows == NONE) {
            stage += TILE_STAGES;
            break;
        }
    }
    // Now `stage` is behind the split.
    if (follows == ANYTHING) release_q(r);
    if (last == ENDED) pass_tile(r, stage - TILE_STAGES);
    if (other_is_left) multiply_other(stage - (last == ENDED ? 2 : 1) * TILE_STAGES);
    // Of clusters, what is derived from the lane has no registers in the loop.
    const Role rare = DIVISION == CLUSTERS ? rare_role(r) : r;
    Division::end_turn(p, small().division, turn, Results{p, w, rare, out});
    return stage;
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x CTAs among which the work items are divided; in clusters x a cluster an item.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane of each warp: the lanes of a warp would take turns, 40 cycles each
        for (int stage = threadIdx.x / 32; stage < STAGES; stage += THREADS / 32) {
            mbarrier_init(shared_address(&sm.full[stage]), COPIERS * (WARP_ARRIVALS + (SCALES_APART ? 32 : 0)));
            mbarrier_init(shared_address(&sm.empty[stage]), 8 * WARP_ARRIVALS);
        }
        if (threadIdx.x == 0) {
            mbarrier_init(shared_address(&sm.q_full), 2);
            mbarrier_init(shared_address(&sm.q_empty), 8 * WARP_ARRIVALS);
            mbarrier_init(shared_address(&sm.ends_known), 8 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    const int cta = blockIdx.x;
    Division::begin(p, sm.division, cta);
    __syncthreads();
    if (Division::is_idle(sm.division)) return;
    Work only;  // if ONE_TURN: found while an earlier kernel runs, unless that may write lengths
    if constexpr (ONE_TURN) {
        if (!Division::HAS_WAITED && has_lengths(p)) wait_for_earlier_kernels();
        only = find_work(p, 0);
    }
    if (!FOUND_EARLY || has_lengths(p)) wait_for_earlier_kernels();
    static_assert(Division::SCRATCH_BYTES <= 2 * LINES_BYTES, "the space of P, to which no bulk copies come");
    Division::finish(p, sm.division, cta, reinterpret_cast<uint16_t*>(shared + P_AT));
    if (!FOUND_EARLY) let_next_kernel_start();
    int stage = 0;
    if (threadIdx.x >= CONSUMERS) {
        decrease_registers_to<40>();
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) {
            Work w = ONE_TURN ? only : find_work(p, turn);
            w.turn = turn;
            w.stage = stage;
            stage = copy_rows(p, w, uniform(threadIdx.x / 32 % 4), threadIdx.x % 32);
        }
        Division::leave();
    } else {
        increase_registers_to<232>();
        Attended known;  // if ONE_TURN
        if constexpr (ONE_TURN) known = {only.query, only.first_head, only.begin == 0, true};
        if (END == End::KEEP && uniform(threadIdx.x / 32) == 0 && num_turns(p) > 0) fetch_first_q(p, threadIdx.x);
        if (threadIdx.x == 0) Division::join(p, sm.division);
        if (CONSUMERS_LOOK) find_first_ends(p, only);
        if (FOUND_EARLY) wait_for_earlier_kernels();
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) stage = attend(p, turn, stage, consumer_role(), known);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
