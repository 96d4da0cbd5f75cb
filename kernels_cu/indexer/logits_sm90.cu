// The indexer's logits on Hopper: wgmma on e4m3, keys in rows, or in a paged cache.
//
//   grid        as many CTAs as the GPU runs at a time; each takes an equal share of the units of keys (work.cuh)
//   tile        TILE_QUERIES queries and the units of their keys that fall into the CTA's share
//   unit        64 keys: a stage of the ring
//
//   producer warpgroup   a tile: queries, weights and what the tile is to one of two slots, by all four warps
//                        its units, each warp every fourth: keys and scales to the ring by cp.async
//                                 | queries, keys: 128-byte swizzle
//                                 v
//   math warpgroups      keys x (queries x heads): one wgmma group of 4 steps, both operands in shared memory
//                        sum: relu, times the head's weight, in float32, over a lane's heads
//                        finish, behind the next unit's product: sums over the four lanes of a quad, each lane is left
//                        with one key of every second query; times the key's scale, to the logits
//
// TOGETHER (prefill): each math warpgroup has QUERIES queries of its own, and both work on every unit. Otherwise they
// have the same queries and take turns with the units.
//
// Shared memory: two slots of 128 bytes a query and head, STAGES stages of 64 keys of 128 bytes and their scales.
#include "indexer/keys.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

#ifndef TURNS
#define TURNS 0
#endif
#ifndef RELU_ADD
#define RELU_ADD 1
#endif
#ifndef DIAG
#define DIAG 0
#endif
#ifndef UNDERWAY
#define UNDERWAY 0
#endif
#ifndef PRODUCERS
#define PRODUCERS 4
#endif
#ifndef SUMS
#define SUMS 1
#endif
#ifndef BULK
#define BULK 0
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef PREFETCH
#define PREFETCH 1
#endif

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int UNIT = 64;
constexpr int ROWS = QUERIES * HEADS;  // columns of wgmma
constexpr int TILE_QUERIES = TOGETHER ? QUERIES * WARPGROUPS : QUERIES;
constexpr int TILE_ROWS = TILE_QUERIES * HEADS;
constexpr int STAGE_BYTES = UNIT * KEY_BYTES, SLOT_BYTES = TILE_ROWS * KEY_BYTES;
constexpr int LINE_GROUP = 8 * LINE_BYTES;  // what the swizzle repeats after
constexpr int SLOTS = 2;
constexpr int PART_QUERIES = QUERIES / PARTS, PART_ROWS = PART_QUERIES * HEADS;
constexpr int ITEMS = 2 * PART_QUERIES;          // sums of a lane: of two keys
constexpr int MINE = ceil_div(PART_QUERIES, 2);  // queries whose logits a lane stores
static_assert(PARTS == 1 || QUERIES % 4 == 0, "");
constexpr int MATH_REGISTERS = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 152 : 104;
static_assert(HEADS % 32 == 0 && STAGES >= PRODUCERS && STAGES > UNDERWAY * PRODUCERS, "");

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

__device__ __forceinline__ void init_barriers() {
    Small& sm = small();
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared_address(&sm.full[i]), UNDERWAY ? 1 : 33);
        mbarrier_init(shared_address(&sm.empty[i]), 4 * (TOGETHER ? WARPGROUPS : 1) * WARP_ARRIVALS);
    }
    for (int i = 0; i < SLOTS; ++i) {
        mbarrier_init(shared_address(&sm.slot_full[i]), 32 * PRODUCERS + 1);
        mbarrier_init(shared_address(&sm.slot_empty[i]), 4 * WARPGROUPS * WARP_ARRIVALS);
    }
    mbarrier_init_fence();
}

// --- producer -------------------------------------------------------------------------------------------------

// As range_of_tile, by a warp; `mine` is the range of the lane's query, if it has one.
__device__ __forceinline__ KeyRange range_of_tile(const LogitsParams& p, const QueryTile& tile, int lane,
                                                  KeyRange& mine) {
    mine = lane < tile.count ? range_of_query(p, tile.request, tile.first + lane) : KeyRange{0, 0};
    const bool any = mine.begin < mine.end;
    const int begin = __reduce_min_sync(~0u, any ? mine.begin : p.width);
    return {begin / ALIGNED_KEYS * ALIGNED_KEYS, __reduce_max_sync(~0u, any ? mine.end : 0)};
}

// Queries and weights of a tile; heads and queries that do not exist are zeros.
__device__ __forceinline__ void copy_queries(const LogitsParams& p, const QueryTile& tile, int slot, int thread) {
    const uint32_t rows = shared_address(aligned_shared()) + slot * SLOT_BYTES;
    const uint8_t* q8 = p.q8 + tile.request * p.q_request + tile.first * p.q_query;
#if BULK
#pragma unroll 4
    for (int item = thread; item < TILE_ROWS * 32; item += 32 * PRODUCERS) {
        const int row = item / 32, word = item % 32, query = row / HEADS, head = row % HEADS;
        const int chunk = word / 16 * 4 + word % 4;  // of k in the order of load_keys
        cp_async_4(swizzled(rows, row, chunk) + word / 4 % 4 * 4,
                   q8 + query * p.q_query + head * p.q_head + 4 * word, query < tile.count && head < p.heads);
    }
#else
#pragma unroll 4
    for (int item = thread; item < TILE_ROWS * 8; item += 32 * PRODUCERS) {
        const int row = item / 8, chunk = item % 8, query = row / HEADS, head = row % HEADS;
        cp_async_16(swizzled(rows, row, chunk), q8 + query * p.q_query + head * p.q_head + 16 * chunk,
                    query < tile.count && head < p.heads);
    }
#endif
    const uint32_t weights = shared_address(small().weights[slot]);
    const float* w = p.w + tile.row(p, 0) * p.w_stride;
#pragma unroll 4
    for (int row = thread; row < TILE_ROWS; row += 32 * PRODUCERS) {
        const int query = row / HEADS, head = row % HEADS;
        cp_async_4(weights + 4 * row, w + query * p.w_stride + head, query < tile.count && head < p.heads);
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

#if BULK
// A unit's keys and scales to a stage: runs of keys of a block in bulk. Of keys that do not exist anything may be there.
__device__ __forceinline__ void copy_unit(const LogitsParams& p, const UnitBlocks& blocks, int first, int end,
                                          int stage, int lane) {
    Small& sm = small();
    const int block_size = int(p.table.block_size.value), run = min(UNIT, block_size & -block_size);
    const uint32_t full = shared_address(&sm.full[stage]);
    const uint32_t to = shared_address(aligned_shared()) + RING_AT + stage * STAGE_BYTES;
    KeyPlace place[2];
    bool starts[2];
    int runs = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        place[half] = place_of_key(p, blocks.at[half], first + 32 * half + lane, end);
        const bool exists = place[half].data >= 0;
        const uint32_t all = __ballot_sync(~0u, exists);
        if (lane == 0) sm.exists[stage][half] = all;
        starts[half] = exists && (32 * half + lane) % run == 0;
        runs += __popc(__ballot_sync(~0u, starts[half]));
        cp_async_4(shared_address(&sm.scales[stage][32 * half + lane]), place[half].scale, exists);
    }
    if (lane == 0) mbarrier_arrive_expecting(full, runs * run * KEY_BYTES);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (starts[half])
            copy_in_bulk(to + (32 * half + lane) * KEY_BYTES, p.keys + place[half].data, run * KEY_BYTES, full);
    }
    mbarrier_arrive_after_copies(full);
}
#else
// A unit's keys and scales to a stage. Keys that do not exist are zeros.
__device__ __forceinline__ void copy_unit(const LogitsParams& p, const UnitBlocks& blocks, int first, int end,
                                          int stage, int lane) {
    Small& sm = small();
    const int row = lane / 8, chunk = lane % 8;  // of four rows that the warp copies at a time
    const uint32_t to = shared_address(aligned_shared()) + RING_AT + stage * STAGE_BYTES + row * LINE_BYTES;
    const uint32_t to_chunk[2] = {to + swizzle(row, chunk), to + swizzle(row + 4, chunk)};
    const uint32_t scales = shared_address(sm.scales[stage]) + 4 * lane;
    const auto copy_row = [&](int i, const uint8_t* from, bool exists) {
        cp_async_16(to_chunk[i % 2] + 4 * i * LINE_BYTES, from + 16 * chunk, exists);
    };
    uint32_t exists[2] = {~0u, ~0u};
    if constexpr (!PAGED) {
        const uint8_t* from = p.keys + (first + row) * p.key_stride;
#pragma unroll
        for (int i = 0; i < 16; ++i) copy_row(i, from + 4 * i * p.key_stride, first + 4 * i + row < end);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            cp_async_4(scales + 128 * i, p.scales + first + 32 * i + lane, first + 32 * i + lane < end);
    } else if (p.table.block_size.value % UNIT == 0) {  // a unit stands in one block
        const KeyBlock at = {__shfl_sync(~0u, blocks.at[0].block, 0), __shfl_sync(~0u, blocks.at[0].offset, 0)};
        const KeyPlace place = place_of_key(p, at, first, end);
        const bool there = place.data >= 0;
        const uint8_t* from = p.keys + place.data + row * KEY_BYTES;
#pragma unroll
        for (int i = 0; i < 16; ++i) copy_row(i, from + 4 * i * KEY_BYTES, there);
#pragma unroll
        for (int i = 0; i < 2; ++i) cp_async_4(scales + 128 * i, place.scale + 32 * i + lane, there);
        if (!there) exists[0] = exists[1] = 0;
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const KeyPlace place = place_of_key(p, blocks.at[half], first + 32 * half + lane, end);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int64_t from = __shfl_sync(~0u, place.data, 4 * i + row);
                copy_row(8 * half + i, p.keys + from, from >= 0);
            }
            cp_async_4(scales + 128 * half, place.scale, place.data >= 0);
            exists[half] = __ballot_sync(~0u, place.data >= 0);
        }
    }
    if (lane == 0) {
        sm.exists[stage][0] = exists[0];
        sm.exists[stage][1] = exists[1];
        if (!UNDERWAY) mbarrier_arrive(shared_address(&sm.full[stage]));
    }
    if (UNDERWAY) {
        cp_async_commit();
    } else {
        mbarrier_arrive_after_copies(shared_address(&sm.full[stage]));
    }
}

#endif

// Units of a warp whose copies are under way, oldest first.
struct Underway {
    Place oldest;
    int count;

    // Tell of the oldest, whose copies are done.
    __device__ __forceinline__ void tell(int lane) {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&small().full[oldest.stage]));
        oldest.advance(PRODUCERS);
        --count;
    }
    __device__ __forceinline__ void started_one(int lane) {
        if (++count <= UNDERWAY) return;
        cp_async_wait<UNDERWAY>();
        tell(lane);
    }
    __device__ __forceinline__ void finish(int lane) {
        if (count == 0) return;
        cp_async_wait<0>();
        while (count > 0) tell(lane);
    }
};

__device__ __forceinline__ void produce(const LogitsParams& p, Share share) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % 128 / 32);
    if (warp >= PRODUCERS) return;
    Place place = {warp, 1};  // the first wait for each stage returns at once
    int ahead = warp;         // units before this warp's next one
    int turn = 0;
    Underway underway = {place, 0};
    const auto wait_for_slot = [&] {
        const uint32_t empty = shared_address(&sm.slot_empty[turn % SLOTS]), parity = turn / SLOTS % 2 ^ 1;
        if (UNDERWAY && !__all_sync(~0u, mbarrier_done(empty, parity))) underway.finish(lane);
        mbarrier_wait(empty, parity);
    };
    while (share.count > 0) {
        const QueryTile tile = tile_of<TILE_QUERIES>(p, share.tile);
        KeyRange mine;
        const KeyRange range = range_of_tile(p, tile, lane, mine);
        const int unit = share.unit, units = min(share.count, units_in<UNIT>(range) - unit);
        share = {share.tile + 1, 0, share.count - units};
        if (units <= 0) continue;

        const int slot = turn % SLOTS;
        wait_for_slot();
        copy_queries(p, tile, slot, threadIdx.x % 128);
        if (warp == 0) {
            Header& h = sm.header[slot];
            if (lane == 0) h.units = units, h.first_key = range.begin + unit * UNIT;
            if (lane == 1) h.row = int(tile.row(p, 0)), h.count = tile.count;
            if (lane < TILE_QUERIES) h.range[lane] = mine;
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&sm.slot_full[slot]));
        }
        mbarrier_arrive_after_copies(shared_address(&sm.slot_full[slot]));
        ++turn;

        const auto first_key = [&](int u) { return range.begin + (unit + u) * UNIT; };
        UnitBlocks next;
        next.find(p, tile.request, first_key(ahead), range.end, lane);
#pragma unroll 1
        for (; ahead < units; ahead += PRODUCERS) {
            const UnitBlocks blocks = next;
            next.find(p, tile.request, first_key(ahead + PRODUCERS), range.end, lane);
            mbarrier_wait(shared_address(&sm.empty[place.stage]), place.round);
            copy_unit(p, blocks, first_key(ahead), range.end, place.stage, lane);
            if (UNDERWAY) underway.started_one(lane);
            place.advance(PRODUCERS);
        }
        ahead -= units;
    }
    if (UNDERWAY) underway.finish(lane);
    if (warp == 0) {
        wait_for_slot();
        Header& h = sm.header[turn % SLOTS];
        if (lane == 0) h.units = 0;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&sm.slot_full[turn % SLOTS]));
    }
    mbarrier_arrive_after_copies(shared_address(&sm.slot_full[turn % SLOTS]));
}

// --- math -----------------------------------------------------------------------------------------------------

// 2 relu(x); NaN stays.
__device__ __forceinline__ float twice_relu(float x) { return RELU_ADD ? x + fabsf(x) : max_or_nan(x, 0.0f); }
constexpr float WEIGHT_FACTOR = RELU_ADD ? 0.5f : 1.0f;

// The heads' weights of a lane.
#if SUMS
// A column of B for mma, of 16 heads a step: even columns are the weights in bfloat16, odd ones what that rounded off.
struct Weights {
    uint32_t b[ROWS / 16][2];

    __device__ __forceinline__ void load(uint32_t weights, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < ROWS / 8; ++i) {
            const Vec8 two = load_shared_8(weights + 4 * (8 * i + 2 * t));
            const float w0 = __uint_as_float(two.x), w1 = __uint_as_float(two.y);
            const uint32_t high = pack_bf16x2(w0, w1);
            b[i / 2][i % 2] = g % 2 ? pack_bf16x2(w0 - bf16_low(high), w1 - bf16_high(high)) : high;
        }
    }
};
#else
struct Weights {
    float w[ROWS / 4];  // of columns 8 j + 2 t + k: 2 j + k

    __device__ __forceinline__ void load(uint32_t weights, int lane) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; i += 2) {
            const Vec8 two = load_shared_8(weights + 4 * (4 * i + 2 * (lane % 4)));
            w[i] = __uint_as_float(two.x) * WEIGHT_FACTOR;
            w[i + 1] = __uint_as_float(two.y) * WEIGHT_FACTOR;
        }
    }
};
#endif

// Turns of two math warpgroups at the tensor cores.
constexpr int FIRST_TURN = 1;
__device__ __forceinline__ void take_turn(int warpgroup) {
    if (TURNS) named_barrier_sync(FIRST_TURN + warpgroup, 256);
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
    if (TURNS) named_barrier_arrive(FIRST_TURN + (warpgroup ^ 1), 256);
}

// c = keys x (queries x heads). TURNS == 2: the other warpgroup's turn comes when a quarter is left.
__device__ __forceinline__ void multiply(float (&c)[PART_ROWS / 2], uint64_t keys, uint64_t queries, int warpgroup) {
    take_turn(warpgroup);
    wgmma_fence();
    wgmma_e4m3<Sum::SET>(c, keys, queries);
#pragma unroll
    for (int step = 1; step < 4; ++step) {
        if (TURNS == 2 && step == 3) wgmma_commit();
        wgmma_e4m3<Sum::ADD>(c, wgmma_further(keys, 32 * step), wgmma_further(queries, 32 * step));
    }
    wgmma_commit();
    if (TURNS == 2) wgmma_wait<1>();
    pass_turn(warpgroup);
}

#if SUMS
#if BULK
// Keys g and g + 8 of a warp as A: step 2 h + s has words 2 s and 2 s + 1 of chunk 4 h + t.
__device__ __forceinline__ void load_keys(uint32_t (&a)[4][4], uint32_t stage, int warp, int lane) {
    const uint32_t from = stage + (16 * warp + lane / 4) * KEY_BYTES + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Vec16 v = load_shared_16(from + 8 * i * KEY_BYTES + 64 * h);
            a[2 * h][i] = v.x;
            a[2 * h][i + 2] = v.y;
            a[2 * h + 1][i] = v.z;
            a[2 * h + 1][i + 2] = v.w;
        }
    }
}
__device__ __forceinline__ void multiply(float (&c)[PART_ROWS / 2], const uint32_t (&a)[4][4], uint64_t queries) {
    wgmma_fence();
    wgmma_e4m3<Sum::SET>(c, a[0], queries);
#pragma unroll
    for (int step = 1; step < 4; ++step) wgmma_e4m3<Sum::ADD>(c, a[step], wgmma_further(queries, 32 * step));
    wgmma_commit();
}
#endif

// Sums over all heads: of query i / 2, key g + 8 (i % 2).
__device__ __forceinline__ void sum_heads(const float (&c)[PART_ROWS / 2], const Weights& w, int part, float (&sums)[ITEMS]) {
    constexpr int STEPS = HEADS / 16;
    float d[PART_QUERIES][4];
#pragma unroll
    for (int q = 0; q < PART_QUERIES; ++q) d[q][0] = d[q][1] = d[q][2] = d[q][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < (DIAG == 1 ? 1 : STEPS); ++i) {
#pragma unroll
        for (int q = 0; q < PART_QUERIES; ++q) {
            const int step = q * STEPS + i, of_all = part * PART_QUERIES * STEPS + step;
            uint32_t a[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = pack_relu_bf16x2(c[8 * step + 2 * j], c[8 * step + 2 * j + 1]);
            mma_m16n8k16(d[q], a, w.b[of_all][0], w.b[of_all][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) sums[i] = d[i / 2][2 * (i % 2)] + d[i / 2][2 * (i % 2) + 1];
}

// Lane t gets the sum of query 2 * pair + t / 2, key g + 8 (t % 2).
__device__ __forceinline__ float sum_of_quad(const float (&sums)[ITEMS], int pair, int t) {
    const float first = t % 2 ? sums[4 * pair + 1] : sums[4 * pair];
    if (2 * pair + 1 >= PART_QUERIES) return first;
    const float second = t % 2 ? sums[4 * pair + 3] : sums[4 * pair + 2];
    return t / 2 ? second : first;
}
#else
// Sums over a lane's heads: of query i / 2, key g + 8 (i % 2).
__device__ __forceinline__ void sum_heads(const float (&c)[PART_ROWS / 2], const Weights& weights, int part, float (&sums)[ITEMS]) {
    const auto& w = weights.w;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        sums[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < (DIAG == 1 ? 2 : HEADS / 4); ++j) {
            const int column = i / 2 * HEADS / 4 + j;  // of this lane
            sums[i] = fmaf(twice_relu(c[column / 2 * 4 + 2 * (i % 2) + column % 2]), w[part * PART_ROWS / 4 + column], sums[i]);
        }
    }
}

// Sums over the quad: lane t gets that of query 2 * pair + t / 2, key g + 8 (t % 2).
__device__ __forceinline__ float sum_of_quad(const float (&sums)[ITEMS], int pair, int t) {
    if (2 * pair + 1 < PART_QUERIES) {
        const float four[4] = {sums[4 * pair], sums[4 * pair + 1], sums[4 * pair + 2], sums[4 * pair + 3]};
        return quad_sum_of_mine(four, t);
    }
    // The same order of additions; lanes t and t ^ 2 get the same.
    const float low = sums[4 * pair] + __shfl_xor_sync(~0u, sums[4 * pair], 2);
    const float high = sums[4 * pair + 1] + __shfl_xor_sync(~0u, sums[4 * pair + 1], 2);
    return (t % 2 ? high : low) + __shfl_xor_sync(~0u, t % 2 ? low : high, 1);
}
#endif

// What a lane stores: a key of every second query from `first` on.
struct Results {
    float* out;             // of query `first`
    const KeyRange* range;  // in shared memory
    int count;              // queries
};

// A unit's sums, before those over quads.
struct Unfinished {
    float sums[ITEMS];
    float scale;
    int key, asked;  // asked: -1 where the cache does not have the key
};

__device__ __forceinline__ void finish(const LogitsParams& p, const Unfinished& u, int part, const Results& results, int t) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const float logit = sum_of_quad(u.sums, i, t) * u.scale;
        const int of_all = part * MINE + i;
        if (of_all < results.count && u.key < p.width)
            results.out[2 * of_all * p.out_stride + u.key] = results.range[2 * of_all].has(u.asked) ? logit : -INF;
    }
}

__device__ __forceinline__ void compute(const LogitsParams& p, int warpgroup) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
    const int my_key = 16 * warp + lane / 4 + 8 * (t % 2);  // of a unit
    const uint32_t base = shared_address(aligned_shared());
    const int own_queries = TOGETHER ? warpgroup * QUERIES : 0;
    Place place = {TOGETHER ? 0 : warpgroup, 0};
    int ahead = place.stage;  // units before this warpgroup's next one
    if (TURNS && warpgroup == 1) pass_turn(1);

    for (int turn = 0;; ++turn) {
        const int slot = turn % SLOTS;
        mbarrier_wait(shared_address(&sm.slot_full[slot]), turn / SLOTS % 2);
        const Header& h = sm.header[slot];
        const int units = uniform(h.units), first_key = h.first_key;
        if (units == 0) break;
        Weights w;
        w.load(shared_address(&sm.weights[slot][own_queries * HEADS]), lane);
        const int first = own_queries + t / 2;
        const int count = ceil_div(min(h.count - first, QUERIES - t / 2), 2);  // of every second
        const Results results = {p.out + (h.row + first) * p.out_stride, &h.range[first], count};
        const uint64_t queries =
            wgmma_operand(base + slot * SLOT_BYTES + own_queries * HEADS * KEY_BYTES, LINE_GROUP, 16);
        fence_proxy_async();

#if PARTS == 2
        // One part's sums behind the other's product.
        static_assert(TOGETHER && !TURNS, "");
        float first_part[PART_ROWS / 2], second_part[PART_ROWS / 2] = {};
        Unfinished unit = {};
        unit.key = p.width;
        const uint64_t more_queries = wgmma_further(queries, PART_ROWS * KEY_BYTES);
#pragma unroll 1
        for (int u = 0; u < units; ++u) {
            mbarrier_wait(shared_address(&sm.full[place.stage]), place.round);
            if (!UNDERWAY) fence_proxy_async();
            const uint64_t keys = wgmma_operand(base + RING_AT + place.stage * STAGE_BYTES, LINE_GROUP, 16);
            multiply(first_part, keys, queries, warpgroup);
            wgmma_wait<1>();  // the part before has ended; the compiler does not see it
            opaque_all(second_part);
            sum_heads(second_part, w, 1, unit.sums);
            finish(p, unit, 1, results, t);
            multiply(second_part, keys, more_queries, warpgroup);
            unit.scale = sm.scales[place.stage][my_key];
            unit.key = unit.asked = first_key + u * UNIT + my_key;
            if (PAGED && !(sm.exists[place.stage][warp / 2] >> my_key % 32 & 1)) unit.asked = -1;
            wgmma_wait<1>();
            opaque_all(first_part);
            sum_heads(first_part, w, 0, unit.sums);
            finish(p, unit, 0, results, t);
            wgmma_wait<0>();
            opaque_all(second_part);
            __syncwarp();
            mbarrier_arrive_for_warp(shared_address(&sm.empty[place.stage]), lane);
            place.advance(1);
        }
        sum_heads(second_part, w, 1, unit.sums);
        finish(p, unit, 1, results, t);
#else
        Unfinished before = {};
        before.key = p.width;
        constexpr int EVERY = TOGETHER ? 1 : WARPGROUPS;
#pragma unroll 1
        for (; ahead < units; ahead += EVERY) {
            float c[ROWS / 2];
            mbarrier_wait(shared_address(&sm.full[place.stage]), place.round);
#if BULK
            uint32_t a[4][4];
            load_keys(a, base + RING_AT + place.stage * STAGE_BYTES, warp, lane);
            multiply(c, a, queries);
#else
            if (!UNDERWAY) fence_proxy_async();
            multiply(c, wgmma_operand(base + RING_AT + place.stage * STAGE_BYTES, LINE_GROUP, 16), queries, warpgroup);
#endif
            finish(p, before, 0, results, t);
            before.scale = sm.scales[place.stage][my_key];
            before.key = first_key + ahead * UNIT + my_key;
            before.asked = before.key;
            if (PAGED && !(sm.exists[place.stage][warp / 2] >> my_key % 32 & 1)) before.asked = -1;
#if BULK
            __syncwarp();
            mbarrier_arrive_for_warp(shared_address(&sm.empty[place.stage]), lane);
            wgmma_wait<0>();
#else
            wgmma_wait<0>();
            __syncwarp();
            mbarrier_arrive_for_warp(shared_address(&sm.empty[place.stage]), lane);
#endif
            sum_heads(c, w, 0, before.sums);
            place.advance(EVERY);
        }
        ahead -= units;
        finish(p, before, 0, results, t);
#endif
        __syncwarp();
        mbarrier_arrive_for_warp(shared_address(&sm.slot_empty[slot]), lane);
    }
    if (TURNS && warpgroup == 0) take_turn(0);
}

// Lengths and block table to L2: reading them is the first thing to do, one after the other. CTAs share the table.
__device__ __forceinline__ void prefetch_table(const LogitsParams& p) {
    const int thread = threadIdx.x, of_row = ceil_div(p.table.width, 32);
    const int64_t lines = int64_t(p.requests) * of_row, first = lines * blockIdx.x / gridDim.x;
    if (thread < p.requests) prefetch_to_l2(p.ends + (p.lens_stride ? thread * p.lens_stride : thread));
    if (first + thread < lines * (blockIdx.x + 1) / gridDim.x) {
        const int64_t line = first + thread, request = line / of_row;
        prefetch_to_l2(p.table.blocks + request * p.table.stride + 32 * (line - request * of_row));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    logits_sm90(const __grid_constant__ LogitsParams p) {
    let_next_kernel_start();
    if (threadIdx.x == 0) init_barriers();
    if (PREFETCH && PAGED) prefetch_table(p);
    wait_for_earlier_kernels();
    const Share share = share_of_cta<THREADS, TILE_QUERIES, UNIT>(p);  // synchronizes the CTA
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == WARPGROUPS) {
        if (CTAS_PER_SM == 1) decrease_registers_to<40>();
        produce(p, share);
        clean_rows<128, TILE_QUERIES, UNIT>(p, threadIdx.x % 128);
    } else {
        if (CTAS_PER_SM == 1) increase_registers_to<MATH_REGISTERS>();
        compute(p, warpgroup);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = LINE_GROUP + SMALL_AT + int(sizeof(Small));
