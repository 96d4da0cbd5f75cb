// The indexer's logits on Hopper: wgmma on e4m3, sums over heads in float32; keys in rows, or in a paged cache.
//
//   grid   as many CTAs as the GPU runs at a time, each with an equal share of the units of keys (work.cuh)
//   tile   TILE_QUERIES queries and those units of their keys that fall into the CTA's share
//   unit   64 keys: a stage of the ring
//
//   producer warpgroup        queries, weights and what the tile is, by all four warps: to one of two slots (those of a
//                             CTA's first tile are copied by math warpgroups, which have nothing else to do yet)
//                             keys and scales, each warp every fourth unit: to the ring
//                               |
//                               | cp.async, 128-byte swizzle
//                               v
//   WARPGROUPS of math   A B A B     A: keys x (queries x heads), one wgmma group of 4 steps, both operands in shared
//                          A B A B      memory; behind it, the logits of the unit before are stored
//                        time ->     B: relu, and the sums over heads in float32
//
// While one math warpgroup sums, others multiply. TOGETHER (prefill): each has QUERIES queries of its own, and all work
// on every unit. Otherwise they have the same queries and take turns with the units.
//
// A lane has a quarter of the heads of each query, for keys g and g + 8; what the lanes of a quad have is added up so
// that each ends with the logits of one key, for every second query. The columns of two queries stand in an order that
// makes half of these exchanges simple (QueryHead).
//
// MXFP4: the ring holds codes. Each math warpgroup widens the keys of its unit to e4m3 (rows/mxfp4.cuh says what is exact),
// in registers: as A operands. A lane has a quarter of a key's 128 values, those of one group, which stand side by side: of
// each it gives an eighth to every step of k. The order of k is free as long as both operands agree: copy_queries stores
// the queries' words in it. Codes are free for the next unit before the multiplication begins.
//
// CANDIDATES: a query token sees blocks of 8 keys of its own (work.cuh), found in a list. A tile has one query.
//
// COMPACT rows of results start at the first key that their query sees; what it does not see has no place in them.
//
// SCHEDULED: a schedule (schedule.cuh) tells a CTA its share and where the share's first keys stand. The producer has
// read it, and copies these keys, as soon as the launch before has ended. Without one it has to read lengths and block
// table first. A call by a schedule is short, and much of its time is what a CTA does once: so its producer has few
// instructions, and what is rare stands behind the rest.
//
// Shared memory: two slots of 128 bytes a query and head, STAGES stages of 64 keys of 128 bytes (MXFP4: 64) and their scales.
#include "indexer/keys.cuh"
#include "indexer/schedule.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCERS = 4;  // warps
// Decode's keys leave L2 before the logits that the top-k reads, unless all keys together take so little of it that the
// next reader finds them there. By a schedule, half of the keys of a call in between leave it first.
constexpr bool KEYS_HAVE_POLICY = PAGED && !TOGETHER;
constexpr int64_t KEPT_KEYS = (SCHEDULED ? 64 : 96) << 10;
constexpr int64_t HALF_KEPT_KEYS = 256 << 10;
constexpr int UNIT = 64;
constexpr int WARPS_TILES = 128;       // up to so many tiles of decode, each producer warp counts its share for itself
constexpr int ROWS = QUERIES * HEADS;  // columns of wgmma
constexpr int TILE_QUERIES = TOGETHER ? QUERIES * WARPGROUPS : QUERIES;
constexpr int TILE_ROWS = TILE_QUERIES * HEADS;
constexpr int STAGE_BYTES = UNIT * KEY_BYTES, SLOT_BYTES = TILE_ROWS * QUERY_BYTES;
constexpr int LINE_GROUP = 8 * LINE_BYTES;  // what the swizzle repeats after
constexpr int SLOTS = 2;
static_assert(HEADS % 32 == 0, "");
static_assert(!SCHEDULED || PAGED && !TOGETHER, "a request is a tile");
static_assert(!MXFP4 && !CANDIDATES || PAGED && !TOGETHER && !SCHEDULED && !UNDERWAY, "decode without a schedule");
// Math warpgroups, which have nothing else to do yet, copy a CTA's first queries, while producers copy keys.
constexpr bool FILLS_FIRST = TOGETHER;

// Copies to the ring become visible to wgmma by a fence. Where there are many units, a producer warp waits for the
// copies of a unit when UNDERWAY more are under way, fences and tells; otherwise the copies themselves tell, which is
// sooner, and each math warpgroup fences (UNDERWAY 0).
static_assert(STAGES > UNDERWAY * PRODUCERS && STAGES >= PRODUCERS, "");

// Registers of a thread. More than the CTA was given at its launch would never come free: the last warpgroup that asks
// would wait for ever.
constexpr bool MOVES_REGISTERS = CTAS_PER_SM == 1;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 4 ? (MXFP4 ? 64 : 32) : WARPGROUPS == 3 ? 80 : 72;
constexpr int MATH_REGISTERS = WARPGROUPS == 2 ? 216 : WARPGROUPS == 3 ? 144 : MXFP4 ? 104 : 112;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(!MOVES_REGISTERS ||
                  128 * (WARPGROUPS * MATH_REGISTERS + PRODUCER_REGISTERS) <= THREADS * LAUNCH_REGISTERS,
              "");

extern __shared__ uint8_t shared[];

// What the producer tells of a tile.
struct Header {
    int units;      // 0: there are no more tiles
    int first_key;  // of the first unit
    int row;        // of the logits, of the first query
    int count;      // queries
    KeyRange range[TILE_QUERIES];
};

struct Small {
    float scales[STAGES][UNIT];
    float weights[SLOTS][TILE_ROWS];
    uint32_t exists[STAGES][2];  // a bit a key
    Header header[SLOTS];
    uint64_t full[STAGES], empty[STAGES], slot_full[SLOTS], slot_empty[SLOTS];
};
constexpr int RING_AT = SLOTS * SLOT_BYTES, SMALL_AT = RING_AT + STAGES * STAGE_BYTES;

__device__ __forceinline__ uint8_t* aligned_shared() { return shared + (0u - shared_address(shared)) % LINE_GROUP; }
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(aligned_shared() + SMALL_AT); }
__device__ __forceinline__ uint32_t slot_rows(int slot) {
    return shared_address(aligned_shared()) + slot * SLOT_BYTES;
}
__device__ __forceinline__ uint32_t stage_rows(int stage) {
    return shared_address(aligned_shared()) + RING_AT + stage * STAGE_BYTES;
}

// A place in the ring, and the parity of its current round.
struct Place {
    int stage;
    uint32_t round;

    __device__ __forceinline__ void advance(int by) {
        stage += by;
        if (stage >= STAGES) {
            stage -= STAGES;
            round ^= 1;
        }
    }
};

// By a schedule each warp makes some, in few instructions: a barrier's address has to be the same for a warp, or the
// compiler goes from lane to lane. Otherwise one thread makes all.
__device__ __forceinline__ void init_barriers() {
    constexpr int MAKERS = SCHEDULED ? THREADS / 32 : 1;
    Small& sm = small();
    const int maker = SCHEDULED ? uniform(threadIdx.x / 32) : 0;
    if ((SCHEDULED ? threadIdx.x % 32 : threadIdx.x) != 0) return;
#pragma unroll(SCHEDULED ? 1 : STAGES)
    for (int i = maker; i < STAGES; i += MAKERS) {
        mbarrier_init(shared_address(&sm.full[i]), WARP_ARRIVALS + (UNDERWAY ? 0 : 32));
        mbarrier_init(shared_address(&sm.empty[i]), 4 * (TOGETHER ? WARPGROUPS : 1) * WARP_ARRIVALS);
    }
#pragma unroll(SCHEDULED ? 1 : SLOTS)
    for (int i = maker; i < SLOTS; i += MAKERS) {
        mbarrier_init(shared_address(&sm.slot_full[i]), WARP_ARRIVALS + 32 * PRODUCERS);
        mbarrier_init(shared_address(&sm.slot_empty[i]), 4 * WARPGROUPS * WARP_ARRIVALS);
    }
    mbarrier_init_fence();
}

// --- producer -------------------------------------------------------------------------------------------------

// What the schedule says of this CTA, to each warp that reads it, before the launch before has ended. A schedule of
// another batch gives wrong logits, but nothing beyond the arrays is touched.
struct Scheduled {
    int word;

    __device__ __forceinline__ void read(const LogitsParams& p, int lane) {
        word = int(load_relaxed(p.schedule + blockIdx.x * p.schedule_stride + lane));
    }
    __device__ __forceinline__ Share share(const LogitsParams& p) const {
        const Share share = {of(0), of(1), of(2)};
        const bool exists =
            uint32_t(share.tile) < uint32_t(p.requests) && uint32_t(share.place) < ceil_div(range(p, 0).end, UNIT);
        return exists ? share : Share{0, 0, 0};
    }

    // Of the share's tile number `tile`, which is one of SCHEDULE_REQUESTS.
    __device__ __forceinline__ KeyRange range(const LogitsParams& p, int tile) const {
        return {0, max(0, min(tile == 0 ? of(3) : of(4), p.width))};
    }

    // The block of the share's unit number u, one of SCHEDULE_BLOCKS; the unit begins at `key`.
    __device__ __forceinline__ KeyBlock block(const LogitsParams& p, int u, int key, int end) const {
        const int block = of(SCHEDULE_BLOCKS_AT + u);
        return {key < end ? block : -1, key - divide(key, p.table.block_size) * int(p.table.block_size.value)};
    }

  private:
    __device__ __forceinline__ int of(int i) const { return __shfl_sync(~0u, word, i); }
};
static_assert(UNIT == SCHEDULE_UNIT && SCHEDULE_REQUESTS == 2, "");

// As range_of_tile, by a warp; `mine` is the range of the lane's query, if it has one.
__device__ __forceinline__ KeyRange range_of_tile(const LogitsParams& p, const QueryTile& tile, int lane,
                                                  KeyRange& mine) {
    mine = lane < tile.count ? range_of_query(p, tile.request, tile.first + lane) : KeyRange{0, 0};
    const bool any = mine.begin < mine.end;
    const int begin = __reduce_min_sync(~0u, any ? mine.begin : p.width);
    return {begin / ALIGNED_KEYS * ALIGNED_KEYS, __reduce_max_sync(~0u, any ? mine.end : 0)};
}

// What stands in a row of a slot. Two queries share the 8 columns that a product's accumulators have of each row, in
// turn, so that a lane's sums over the even eights and the odd ones are of different queries (sum_heads).
constexpr int GROUP = QUERIES % 2 ? 1 : 2;
struct QueryHead {
    int query, head;

    __device__ __forceinline__ static QueryHead of_row(int row) {
        if (GROUP == 1) return {row / HEADS, row % HEADS};
        const int eight = row % (2 * HEADS) / 8, column = row % 8;
        return {row / (2 * HEADS) * 2 + (column / 4 ^ eight % 2), 4 * eight + column % 4};
    }
};

// COUNT queries of a tile from number `first` on, which is even, and their weights, by 128 threads. Heads and queries
// that do not exist are zeros.
template <int COUNT>
__device__ __forceinline__ void copy_queries(const LogitsParams& p, const QueryTile& tile, int first, int slot,
                                             int thread) {
    constexpr int ROWS_AT_ONCE = 128 / 8, HEADS_AT_ONCE = ROWS_AT_ONCE / GROUP;
    const auto [own_query, own_head] = QueryHead::of_row(thread / 8);
    const int chunk = thread % 8, first_row = first * HEADS, count = tile.count - first;
    // MXFP4: words of k in the order in which lanes have those of keys. Word 8 t + 2 s + i, of which lane t has the keys',
    // is word t of chunk 2 s + i.
    constexpr int PARTS = MXFP4 ? 4 : 1, PART_BYTES = 16 / PARTS;
    uint32_t to[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
        to[i] = MXFP4 ? swizzled(slot_rows(slot), first_row + thread / 8, chunk % 2 * 4 + i) + chunk / 2 * 4
                      : swizzled(slot_rows(slot), first_row + thread / 8, chunk);
    const uint8_t* query_row = p.q8 + tile.request * p.q_request + (tile.first + first + own_query) * p.q_query +
                               own_head * p.q_head + 16 * chunk;
#pragma unroll 1
    for (int query = own_query; query < own_query + COUNT; query += GROUP) {
        const uint8_t* from = query_row;
#pragma unroll
        for (int i = 0; i < HEADS; i += HEADS_AT_ONCE) {
            const bool exists = query < count && own_head + i < p.heads;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if constexpr (MXFP4) {
                    cp_async_4(to[part], from + part * PART_BYTES, exists);
                } else {
                    cp_async_16(to[part], from, exists);
                }
                to[part] += ROWS_AT_ONCE * LINE_BYTES;
            }
            from += HEADS_AT_ONCE * p.q_head;
        }
        query_row += GROUP * p.q_query;
    }
    const uint32_t weights = shared_address(&small().weights[slot][first_row]);
    const float* w = p.w + tile.row(p, first) * p.w_stride;
#pragma unroll
    for (int row = thread; row < COUNT * HEADS; row += 128) {
        const auto [query, head] = QueryHead::of_row(row);
        cp_async_4(weights + 4 * row, w + query * p.w_stride + head, query < count && head < p.heads);
    }
}

// Where the keys `lane` and `lane` + 32 of a unit are to be looked for.
struct UnitBlocks {
    KeyBlock at[2];

    __device__ __forceinline__ void find(const LogitsParams& p, int request, int first, int end, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) at[i] = block_of_key(p, request, first + 32 * i + lane, end);
    }
};

__device__ __forceinline__ uint64_t policy_of_keys(const LogitsParams& p) {
    const int64_t keys = int64_t(p.requests) * p.width;
    if (SCHEDULED && keys > KEPT_KEYS && keys <= HALF_KEPT_KEYS) return evict_half_first();
    return keys <= KEPT_KEYS ? evict_normal() : evict_first();
}

// A unit's keys and scales to a stage. Keys that do not exist are zeros.
__device__ __forceinline__ void copy_unit(const LogitsParams& p, const UnitBlocks& blocks, int first, int end,
                                          int stage, int lane, uint64_t policy) {
    Small& sm = small();
    constexpr int CHUNKS = KEY_BYTES / 16, ROWS_AT_ONCE = 32 / CHUNKS, TIMES = UNIT / ROWS_AT_ONCE;
    const int row = lane / CHUNKS, chunk = lane % CHUNKS;  // of the rows that the warp copies at a time
    const uint32_t to = stage_rows(stage) + row * KEY_BYTES;
    const uint32_t to_chunk[2] = {to + (MXFP4 ? 16 * chunk : swizzle(row, chunk)),
                                  to + (MXFP4 ? 16 * chunk : swizzle(row + 4, chunk))};
    const uint32_t scales = shared_address(sm.scales[stage]) + 4 * lane;
    const auto copy_row = [&](int i, const uint8_t* from, bool exists) {
        const uint32_t there = to_chunk[i % 2] + i * ROWS_AT_ONCE * KEY_BYTES;
        if constexpr (KEYS_HAVE_POLICY) {
            cp_async_16(there, from + 16 * chunk, exists, policy);
        } else {
            cp_async_16(there, from + 16 * chunk, exists);
        }
    };
    uint32_t exists[2] = {~0u, ~0u};
    if constexpr (!PAGED) {
        const uint8_t* from = p.keys + (first + row) * p.key_stride;
#pragma unroll
        for (int i = 0; i < 16; ++i) copy_row(i, from + 4 * i * p.key_stride, first + 4 * i + row < end);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            cp_async_4(scales + 128 * i, p.scales + first + 32 * i + lane, first + 32 * i + lane < end);
    } else if (SCHEDULED || !CANDIDATES && p.table.block_size.value % UNIT == 0) {  // a unit stands in one block
        const KeyBlock at =
            SCHEDULED ? blocks.at[0]
                      : KeyBlock{__shfl_sync(~0u, blocks.at[0].block, 0), __shfl_sync(~0u, blocks.at[0].offset, 0)};
        const KeyPlace place = place_of_key(p, at, first, end);
        const bool there = place.data >= 0;
        const uint8_t* from = p.keys + place.data + row * KEY_BYTES;
#pragma unroll
        for (int i = 0; i < TIMES; ++i) copy_row(i, from + i * ROWS_AT_ONCE * KEY_BYTES, there);
#pragma unroll
        for (int i = 0; i < 2; ++i) cp_async_4(scales + 128 * i, place.scale + 32 * i + lane, there);
        if (!there) exists[0] = exists[1] = 0;
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyPlace place = place_of_key(p, blocks.at[half], first + 32 * half + lane, end);
#pragma unroll
            for (int i = 0; i < TIMES / 2; ++i) {
                const int64_t from = __shfl_sync(~0u, place.data, i * ROWS_AT_ONCE + row);
                copy_row(TIMES / 2 * half + i, p.keys + from, from >= 0);
            }
            cp_async_4(scales + 128 * half, place.scale, place.data >= 0);
            exists[half] = __ballot_sync(~0u, place.data >= 0);
        }
    }
    if (lane == 0) {
        sm.exists[stage][0] = exists[0];
        sm.exists[stage][1] = exists[1];
    }
}

// How a producer warp tells that units are there.
struct Underway {
    Place oldest;
    int count;

    // The copies of a unit were started.
    __device__ __forceinline__ void add(int stage, int lane) {
        if constexpr (UNDERWAY == 0) {
            const uint32_t full = shared_address(&small().full[stage]);
            mbarrier_arrive_for_warp(full, lane);
            mbarrier_arrive_after_copies(full);
        } else {
            cp_async_commit();
            if (++count <= UNDERWAY) return;
            cp_async_wait<UNDERWAY>();
            tell(lane);
        }
    }
    __device__ __forceinline__ void tell_all(int lane) {
        if (count == 0) return;
        cp_async_wait<0>();
        while (count > 0) tell(lane);
    }

  private:
    // The oldest unit's copies are done.
    __device__ __forceinline__ void tell(int lane) {
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_for_warp(shared_address(&small().full[oldest.stage]), lane);
        oldest.advance(PRODUCERS);
        --count;
    }
};

// Wait until the slot of tile number `turn` is free; `underway` may hold what frees it.
__device__ __forceinline__ void wait_for_slot(int turn, Underway& underway, int lane) {
    const uint32_t empty = shared_address(&small().slot_empty[turn % SLOTS]), parity = turn / SLOTS % 2 ^ 1;
    if (UNDERWAY && !__all_sync(~0u, mbarrier_done(empty, parity))) underway.tell_all(lane);
    mbarrier_wait(empty, parity);
}

// The producer warp that writes headers. By a schedule, the one that has the fewest units.
constexpr int HEADER_WARP = SCHEDULED ? PRODUCERS - 1 : 0;

// What a tile of queries is; `mine` is the range of the lane's query, if it has one.
__device__ __forceinline__ void write_header(const LogitsParams& p, const QueryTile& tile, const KeyRange& range,
                                             const Units& taken, const KeyRange& mine, int slot, int lane) {
    Header& h = small().header[slot];
    if (lane == 0) h.units = taken.count, h.first_key = range.begin + taken.first * UNIT;
    if (lane == 1) h.row = int(tile.row(p, 0)), h.count = tile.count;
    if (lane < TILE_QUERIES) h.range[lane] = mine;
}

// Tell that `warp` has filled its part of a slot.
__device__ __forceinline__ void tell_of_slot(int slot, int warp, int lane) {
    const uint32_t full = shared_address(&small().slot_full[slot]);
    if (warp == HEADER_WARP) {
        __syncwarp();
        mbarrier_arrive_for_warp(full, lane);
    }
    mbarrier_arrive_after_copies(full);
}

// There are no more tiles. No warp may tell of a slot twice before another one did once.
__device__ __forceinline__ void tell_of_end(int turn, Underway& underway, int warp, int lane) {
    wait_for_slot(turn, underway, lane);
    if (warp == HEADER_WARP && lane == 0) small().header[turn % SLOTS].units = 0;
    tell_of_slot(turn % SLOTS, warp, lane);
}

__device__ __forceinline__ void produce(const LogitsParams& p, Share share, bool by_warp) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % 128 / 32);
    if (by_warp) share = share_of_warp<TILE_QUERIES, UNIT>(p, lane);
    const uint64_t policy = KEYS_HAVE_POLICY ? policy_of_keys(p) : 0;
    Place place = {warp, 1};  // the first wait for each stage returns at once
    int ahead = warp;         // units before this warp's next one
    int turn = 0;
    Underway underway = {place, 0};
    while (share.count > 0) {
        const QueryTile tile = tile_of<TILE_QUERIES>(p, share.tile);
        KeyRange mine;
        const KeyRange range = range_of_tile(p, tile, lane, mine);
        const Units taken = share.take_tile<UNIT>(range);
        if (taken.count == 0) continue;

        const auto first_key = [&](int u) { return range.begin + (taken.first + u) * UNIT; };
        UnitBlocks next;
        const auto copy_next = [&]() {
            const UnitBlocks blocks = next;
            next.find(p, tile.request, first_key(ahead + PRODUCERS), range.end, lane);
            mbarrier_wait(shared_address(&sm.empty[place.stage]), place.round);
            copy_unit(p, blocks, first_key(ahead), range.end, place.stage, lane, policy);
            underway.add(place.stage, lane);
            place.advance(PRODUCERS);
            ahead += PRODUCERS;
        };
        next.find(p, tile.request, first_key(ahead), range.end, lane);
        const int slot = turn % SLOTS;
        wait_for_slot(turn++, underway, lane);
        if (warp == HEADER_WARP) write_header(p, tile, range, taken, mine, slot, lane);
        if (!FILLS_FIRST || turn > 1) copy_queries<TILE_QUERIES>(p, tile, 0, slot, read_thread_index() % 128);
        tell_of_slot(slot, warp, lane);
#pragma unroll 1
        while (ahead < taken.count) copy_next();
        ahead -= taken.count;
    }
    underway.tell_all(lane);
    tell_of_end(turn, underway, warp, lane);
}

// By a schedule: fills a slot with a tile of queries, and tells of it, by the 4 warps of a warpgroup. The last warp
// reads what the queries see.
__device__ __forceinline__ void fill_slot(const LogitsParams& p, const QueryTile& tile, const KeyRange& range,
                                          const Units& taken, int slot) {
    const int thread = threadIdx.x % 128, warp = uniform(thread / 32), lane = thread % 32;
    copy_queries<TILE_QUERIES>(p, tile, 0, slot, thread);
    if (warp == HEADER_WARP) {
        const KeyRange mine = p.queries == 1      ? range
                              : lane < tile.count ? range_of_query(p, tile.request, lane)
                                                  : KeyRange{0, 0};
        write_header(p, tile, range, taken, mine, slot, lane);
    }
    tell_of_slot(slot, warp, lane);
}

// Prefill: a math warpgroup copies its own queries of the first tile, while producers copy keys.
__device__ __forceinline__ void copy_first_queries(const LogitsParams& p, const Share& share, int warpgroup) {
    if (share.count > 0)
        copy_queries<QUERIES>(p, tile_of<TILE_QUERIES>(p, share.tile), warpgroup * QUERIES, 0, threadIdx.x % 128);
    cp_async_wait_all();
    fence_proxy_async();
    named_barrier_sync(1 + warpgroup, 128);
}

// The first tile of a share is filled in by a warpgroup of math, which has nothing else to do yet.
__device__ __forceinline__ void fill_first_slot(const LogitsParams& p, const Scheduled& schedule) {
    Share share = schedule.share(p);
    if (share.count <= 0) return;
    const QueryTile tile = {share.tile, 0, min(p.queries, TILE_QUERIES)};
    const KeyRange range = schedule.range(p, 0);
    const Units taken = share.take_tile<UNIT>(range);
    wait_for_earlier_kernels();
    fill_slot(p, tile, range, taken, 0);
}

// `produce` by a schedule. The first of a warp's units is copied before anything else is done.
__device__ __forceinline__ void produce_scheduled(const LogitsParams& p, const Scheduled& schedule) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % 128 / 32);
    const uint64_t policy = policy_of_keys(p);
    Share share = schedule.share(p);
    Place place = {warp, 1};  // the first wait for each stage returns at once
    int ahead = warp;         // units before this warp's next one
    int before = 0;           // units of the share before the tile's
    int turn = 0;
    Underway underway = {place, 0};
    const auto copy = [&](const UnitBlocks& at) {
        copy_unit(p, at, 0, 0, place.stage, lane, policy);
        underway.add(place.stage, lane);
        place.advance(PRODUCERS);
        ahead += PRODUCERS;
    };
    const int key = (share.place + warp) * UNIT, end = schedule.range(p, 0).end;
    const UnitBlocks first = {schedule.block(p, warp, key, end)};
    wait_for_earlier_kernels();
    if (warp < share.count && key < end) copy(first);
#pragma unroll 1
    for (int number = 0; share.count > 0 && share.tile < p.requests; ++number) {
        const bool told = number < SCHEDULE_REQUESTS;
        const QueryTile tile = {share.tile, 0, min(p.queries, TILE_QUERIES)};
        KeyRange range;
        if (__builtin_expect(told, true)) {
            range = schedule.range(p, number);
        } else {
            KeyRange mine;
            range = range_of_tile(p, tile, lane, mine);
        }
        const Units taken = share.take_tile<UNIT>(range);
        if (taken.count == 0) continue;

        const auto find = [&](int u) -> UnitBlocks {
            const int key = (taken.first + u) * UNIT;
            if (__builtin_expect(told && before + u < SCHEDULE_BLOCKS, true))
                return {schedule.block(p, before + u, key, range.end)};
            return {block_of_key(p, tile.request, key, range.end)};
        };
        UnitBlocks next = find(ahead);
        bool begins = true;
#pragma unroll 1
        while (true) {
            if (ahead < taken.count && !(begins && number == 0)) {
                mbarrier_wait(shared_address(&sm.empty[place.stage]), place.round);
                copy(next);
            }
            if (begins) {
                begins = false;
                if (number > 0) {
                    wait_for_slot(turn, underway, lane);
                    fill_slot(p, tile, range, taken, turn % SLOTS);
                }
                ++turn;
            }
            if (ahead >= taken.count) break;
            next = find(ahead);
        }
        ahead -= taken.count;
        before += taken.count;
    }
    if (UNDERWAY) underway.tell_all(lane);
    tell_of_end(turn, underway, warp, lane);
}

// --- math -----------------------------------------------------------------------------------------------------

constexpr int EVERY = TOGETHER ? 1 : WARPGROUPS;  // units from one of a warpgroup to its next one
constexpr bool LOOKS_FOR_WHOLE = !COMPACT;        // for units that all queries see, to store them without looking

// The weights of a lane's columns.
struct Weights {
    float of[ROWS / 8][2];

    __device__ __forceinline__ void load(uint32_t weights, int lane) {
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const Vec8 two = load_shared_8(weights + 4 * (8 * i + 2 * (lane % 4)));
            of[i][0] = __uint_as_float(two.x);
            of[i][1] = __uint_as_float(two.y);
        }
    }
};

// c = keys x (queries x heads), to be waited for.
__device__ __forceinline__ void multiply(float (&c)[ROWS / 2], uint64_t keys, uint64_t queries) {
    wgmma_fence();
    wgmma_e4m3<Sum::SET>(c, keys, queries);
#pragma unroll
    for (int step = 1; step < 4; ++step)
        wgmma_e4m3<Sum::ADD>(c, wgmma_further(keys, 32 * step), wgmma_further(queries, 32 * step));
    wgmma_commit();
}

// The keys of a unit as A operands, from their codes in a stage.
struct WidenedKeys {
    uint32_t a[4][4];
    float scale;  // of the key that the lane stores

    __device__ __forceinline__ void load(int stage, int warp, int lane, int t) {
        const Small& sm = small();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 16 * warp + lane / 4 + 8 * i;
            const Vec16 codes = load_shared_16(stage_rows(stage) + row * KEY_BYTES + 16 * t);
            const uint32_t scales = load_shared_4(shared_address(&sm.scales[stage][row]));
            const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w}, largest = largest_scale(scales);
            const Magnitudes of = magnitudes_of(largest - (scales >> 8 * t & 255));
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const Vec8 values = widen_e2m1_8(words[step], of);
                a[step][i] = values.x;
                a[step][2 + i] = values.y;
            }
            if (t % 2 == i) scale = factor_of_scales(largest);
        }
    }
};

__device__ __forceinline__ void multiply(float (&c)[ROWS / 2], const WidenedKeys& keys, uint64_t queries) {
    wgmma_fence();
    wgmma_e4m3<Sum::SET>(c, keys.a[0], queries);
#pragma unroll
    for (int step = 1; step < 4; ++step) wgmma_e4m3<Sum::ADD>(c, keys.a[step], wgmma_further(queries, 32 * step));
    wgmma_commit();
}

// Sums over the lane's heads, of a pair of queries; key g, then g + 8. One query of a pair: the two sums, and the same
// again. Two queries whose columns take turns: first of query t / 2 its heads in the even eights, then of the other one
// its heads in the odd eights. Both have the same heads in a lane's sum, in the same order, as one query alone has.
constexpr int PAIRS = ceil_div(QUERIES, 2);
using Sums = float[PAIRS][4];

__device__ __forceinline__ void sum_heads(const float (&c)[ROWS / 2], const Weights& w, Sums& sums) {
    float of_key[QUERIES][2] = {};
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) {
        const int q = GROUP == 2 ? i / (HEADS / 4) * 2 + i % 2 : i / (HEADS / 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float& sum = of_key[q][j / 2];
            sum = fmaf(max_or_nan(c[4 * i + j], 0.0f), w.of[i][j % 2], sum);
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const auto &even = of_key[2 * i], &odd = of_key[min(2 * i + 1, QUERIES - 1)];
        sums[i][0] = even[0], sums[i][1] = even[1], sums[i][2] = odd[0], sums[i][3] = odd[1];
    }
}

// Of a pair: the sum that lane t stores.
__device__ __forceinline__ float sum_of_lane(const float (&sums)[4], int t) {
    if constexpr (GROUP == 1) return quad_sum_of_mine(sums, t);
    const float first = sums[0] + __shfl_xor_sync(~0u, sums[2], 2),
                second = sums[1] + __shfl_xor_sync(~0u, sums[3], 2);
    const bool odd = t % 2 != 0;
    return (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 1);
}

// The key of a unit that a thread stores.
__device__ __forceinline__ int key_of_thread(uint32_t thread) {
    return 16 * (thread / 32 % 4) + thread % 32 / 4 + 8 * (thread % 2);
}

// What a lane stores: lane t has key g + 8 (t % 2) of every unit, of every second query from t / 2 on. A unit's logits
// are stored behind the product of the warpgroup's next one.
struct Results {
    const Header& h;
    int own_queries;
    float* out;   // of query t / 2 and the lane's key, in unit `ahead` - EVERY
    Units whole;  // all keys of these are seen by all queries; in other units each key is looked at

    __device__ __forceinline__ Results(const LogitsParams& p, const Header& h, int own_queries, int my_key, int t,
                                       int ahead)
        : h(h), own_queries(own_queries) {
        const int key = h.first_key + my_key + (ahead - EVERY) * UNIT;
        out = p.out + (h.row + own_queries + t / 2) * p.out_stride + key;
        whole = {0, 0};  // by the unit EVERY further on
        if constexpr (LOOKS_FOR_WHOLE) {
            int begin = 0, end = h.count - own_queries < QUERIES ? 0 : p.width;
#pragma unroll
            for (int i = 0; i < QUERIES; ++i) {
                const KeyRange seen = h.range[own_queries + i];
                begin = max(begin, seen.begin), end = min(end, seen.end);
            }
            const int first = ceil_div(max(begin - h.first_key, 0), UNIT);
            whole.first = uniform(first + EVERY);
            whole.count = uniform(max(min((end - h.first_key) / UNIT, h.units) - first, 0));
        }
    }

    // Stores the logits of the warpgroup's unit before unit `ahead`, if there was one.
    __device__ __forceinline__ void store(const LogitsParams& p, const float (&logits)[PAIRS], int ahead, int t) {
        const int u = ahead - EVERY;
        if (LOOKS_FOR_WHOLE && uint32_t(ahead - whole.first) < uint32_t(whole.count)) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (QUERIES % 2 && t / 2 + 2 * i >= QUERIES) continue;
                out[2 * i * p.out_stride] = logits[i];
            }
        } else if (u >= 0) {
            const int key = h.first_key + u * UNIT + key_of_thread(read_thread_index());
            const int first = own_queries + t / 2;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (QUERIES % 2 && first + 2 * i >= own_queries + QUERIES || first + 2 * i >= h.count) continue;
                const KeyRange seen = h.range[first + 2 * i];
                float* to = out + 2 * i * p.out_stride;
                if constexpr (COMPACT) {
                    if (seen.has(key) && key - seen.begin < p.compact_width) *(to - seen.begin) = logits[i];
                } else {
                    if (key < p.width) *to = seen.has(key) ? logits[i] : -INF;
                }
            }
        }
        out += EVERY * UNIT;
    }
};

// x itself, in a form that the compiler keeps in a register instead of computing it anew wherever it is used: the loop
// over units has few instructions to spare beside its sums. With more pairs there are no registers to keep it in.
template <typename T>
__device__ __forceinline__ T kept(T x, int lane) {
    return PAIRS == 1 ? __shfl_sync(~0u, x, lane) : x;
}

__device__ __forceinline__ uint64_t kept_operand(uint64_t operand) {
    return PAIRS == 1 ? operand >> 32 << 32 | uint32_t(uniform(int(uint32_t(operand)))) : operand;
}

__device__ __forceinline__ uint32_t uniform_kept(uint32_t x) { return PAIRS == 1 ? uint32_t(uniform(int(x))) : x; }

constexpr int EMPTY_BEHIND_FULL = 8 * STAGES;  // bytes from a stage's barrier in `full` to the one in `empty`

__device__ __forceinline__ void compute(const LogitsParams& p, int warpgroup) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = kept(lane % 4, lane);
    const int my_key = key_of_thread(threadIdx.x);
    const int own_queries = TOGETHER ? warpgroup * QUERIES : 0;
    const uint64_t first_stage = kept_operand(wgmma_operand(stage_rows(0), LINE_GROUP, 16));
    const uint32_t first_full = uniform_kept(shared_address(&sm.full[0]));
    const uint32_t scales = kept(shared_address(&sm.scales[0][my_key]), lane);
    Place place = {TOGETHER ? 0 : warpgroup, 0};
    int ahead = place.stage;  // units before this warpgroup's next one
    for (int turn = 0;; ++turn) {
        const int slot = turn % SLOTS;
        mbarrier_wait(shared_address(&sm.slot_full[slot]), turn / SLOTS % 2);
        const Header& h = sm.header[slot];
        const int units = uniform(h.units);
        if (units == 0) return;
        Weights w;
        w.load(shared_address(&sm.weights[slot][own_queries * HEADS]), lane);
        Results results(p, h, own_queries, my_key, t, ahead);
        const uint64_t queries =
            kept_operand(wgmma_operand(slot_rows(slot) + own_queries * HEADS * QUERY_BYTES, LINE_GROUP, 16));
        fence_proxy_async();

        float logits[PAIRS] = {};  // of the unit before
#pragma unroll 1
        while (ahead < units) {
            const uint32_t full = first_full + 8 * place.stage;
            mbarrier_wait(full, place.round);
            float c[ROWS / 2], scale;
            bool exists;
            if constexpr (MXFP4) {
                WidenedKeys keys;
                keys.load(place.stage, warp, lane, t);
                scale = keys.scale;
                exists = sm.exists[place.stage][warp / 2] >> my_key % 32 & 1;
                __syncwarp();
                mbarrier_arrive_elected<EMPTY_BEHIND_FULL>(full);
                multiply(c, keys, queries);
                results.store(p, logits, ahead, t);
                wgmma_wait<0>();
            } else {
                if (!UNDERWAY) fence_proxy_async();
                multiply(c, wgmma_operand_number(first_stage, place.stage, STAGE_BYTES), queries);
                results.store(p, logits, ahead, t);
                wgmma_wait<0>();
                scale = __uint_as_float(load_shared_4(scales + place.stage * UNIT * 4));
                exists = !PAGED || sm.exists[place.stage][warp / 2] >> my_key % 32 & 1;
                __syncwarp();
                mbarrier_arrive_elected<EMPTY_BEHIND_FULL>(full);
            }
            Sums sums;
            sum_heads(c, w, sums);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float sum = sum_of_lane(sums[i], t);
                logits[i] = exists ? sum * scale : -INF;
            }
            place.advance(EVERY);
            ahead += EVERY;
        }
        results.store(p, logits, ahead, t);
        ahead -= units;
        __syncwarp();
        mbarrier_arrive_elected<0>(shared_address(&sm.slot_empty[slot]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    logits_sm90(const __grid_constant__ LogitsParams p) {
    // Beside three math warpgroups and more no CTA of the next launch has room: those of a top-k would all start on the SMs that
    // are free first. So they start when every CTA has copied its last keys.
    constexpr bool STARTS_NEXT_LATE = WARPGROUPS >= 3 && !TOGETHER;
    if constexpr (!STARTS_NEXT_LATE) let_next_kernel_start();
    if constexpr (!SCHEDULED) init_barriers();
    const int warpgroup = uniform(threadIdx.x / 128);
    Share share = {};
    Scheduled schedule = {};
    bool by_warp = false;
    if constexpr (SCHEDULED) {
        if (warpgroup == WARPGROUPS || warpgroup == 0) schedule.read(p, threadIdx.x % 32);
        init_barriers();
    } else {
        by_warp = UNDERWAY == 0 && num_tiles<TILE_QUERIES>(p) <= WARPS_TILES;
        if (by_warp) __syncthreads();
        wait_for_earlier_kernels();
        if (!by_warp) share = share_of_cta<THREADS, TILE_QUERIES, UNIT>(p);  // synchronizes the CTA
    }
    if (warpgroup < WARPGROUPS) {
        if constexpr (SCHEDULED) {
            __syncthreads();
            if (warpgroup == 0) fill_first_slot(p, schedule);
        }
        if constexpr (FILLS_FIRST) copy_first_queries(p, share, warpgroup);
        if constexpr (MOVES_REGISTERS) increase_registers_to<MATH_REGISTERS>();
        compute(p, warpgroup);
        return;
    }
    if constexpr (MOVES_REGISTERS) decrease_registers_to<PRODUCER_REGISTERS>();
    if constexpr (SCHEDULED) {
        __syncthreads();
        produce_scheduled(p, schedule);  // which waits for earlier kernels; math warpgroups wait for what it copies
    } else {
        produce(p, share, by_warp);
    }
    if constexpr (STARTS_NEXT_LATE) let_next_kernel_start();
    if constexpr (COMPACT) {
        clean_compact_rows<128>(p, threadIdx.x % 128);
    } else if (!SCHEDULED || __builtin_expect(p.clean, false)) {
        clean_rows<128, TILE_QUERIES, UNIT>(p, threadIdx.x % 128);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = LINE_GROUP + SMALL_AT + int(sizeof(Small));
