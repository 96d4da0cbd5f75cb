// How the logits' work is divided: queries form tiles, a tile's keys form units, and CTAs share the units of all
// tiles.
//
//   tile    a few neighbouring queries of one request (keys in rows are one request), and the keys from the first to
//           the last that any of these queries sees
//   unit    UNIT neighbouring keys of a tile
//   list    the places of all tiles, one tile after the other: a place for each unit and, with keys in rows, some more
//           for each tile, since it costs time to begin one (at the tip of a causal triangle tiles are many and short)
//   share   the neighbouring places that one CTA has; shares are equal, as far as places are whole
//
//   list    | b u u u u u | b u u | b u u u u u u u | ...      b: to begin a tile, u: a unit
//   shares  |---- CTA 0 ----|---- CTA 1 ----|---- CTA 2 ----|
//
// Lengths are read on the device; the host knows only the number of tiles. A logit does not depend on the share that
// it falls into.
//
// CANDIDATES (paged keys): a query token takes the place of a request. It sees candidate blocks of 8 of its request's
// keys: key number 8 c + i stands at position 8 * candidates[c] + i. The last candidate block may reach beyond the
// request's end; keys there do not exist.
#pragma once
#include "rows/block_table.cuh"
#include "rows/place.cuh"
#include "tile/warp.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct LogitsWork {
    BlockTable table;           // of paged keys
    const int32_t* starts;      // [queries]; null for paged keys
    const int32_t* ends;        // [queries], or context lengths, [requests] or [requests, queries]
    int64_t lens_stride;        // items; 0: `ends` are context lengths [requests]
    int32_t requests, queries;  // queries of a request; keys in rows: one request
    int32_t width;              // of the rows of logits: keys, or the longest context
    int32_t all_chosen;         // queries that see at most so many keys need no logits; 0: all queries need them
    const int32_t* candidates;  // CANDIDATES: [requests, width / 8] numbers of blocks of 8 keys, -1 behind the last
    const int32_t* req_id;      // CANDIDATES: [requests] rows of the block table; `ends` are [requests]
    int64_t candidates_stride;  // items
};

struct LogitsParams : LogitsWork {
    const uint8_t* q8;                   // [requests, queries, heads, 128]
    const uint8_t* keys;                 // [width, 128], or the paged cache
    const float* scales;                 // [width]; null for paged keys
    const float* w;                      // [requests * queries, heads]
    float* out;                          // [requests * queries, width]
    const int32_t* schedule;             // [grid, SCHEDULE_WORDS] (schedule.cuh); null: each CTA finds its share
    int64_t q_request, q_query, q_head;  // bytes
    int64_t w_stride, out_stride;        // items
    int64_t key_stride;                  // bytes from row to row, or from block to block
    int64_t schedule_stride;             // items
    int32_t heads;
    int32_t num_blocks;
    int32_t clean;          // write -inf for keys that a query does not see
    int32_t compact_width;  // of COMPACT rows, which start at the first key that their query sees
    int32_t e5m2_queries;   // whether they are e5m2, else e4m3; for logits_sm90 they are what keys are
    int32_t unused;
};

constexpr int QUERY_BYTES = 128, KEY_BYTES = ROW_STRIDE;
constexpr int CANDIDATE_BLOCK = 8;  // keys

struct KeyRange {
    int begin, end;

    __device__ __forceinline__ bool has(int key) const { return begin <= key && key < end; }
};

// The keys that a query sees; none if it needs no logits.
__device__ __forceinline__ KeyRange range_of_query(const LogitsWork& p, int request, int query) {
    int begin = 0, end;
    if constexpr (CANDIDATES) {
        const int keys = max(0, min(p.ends[request], p.width));
        return {0, ceil_div(keys, CANDIDATE_BLOCK) * CANDIDATE_BLOCK};  // `width` is a multiple of the block, too
    } else if constexpr (PAGED) {
        end = p.lens_stride == 0 ? p.ends[request] - p.queries + query + 1 : p.ends[request * p.lens_stride + query];
    } else {
        begin = max(p.starts[query], 0), end = p.ends[query];
    }
    end = max(0, min(end, p.width));
    return {begin, end - begin <= p.all_chosen ? begin : end};
}

struct QueryTile {
    int request, first, count;  // queries `first` to `first + count - 1` of the request

    // The row of logits of the tile's query number i.
    __device__ __forceinline__ int64_t row(const LogitsWork& p, int i) const {
        return int64_t(request) * p.queries + first + i;
    }
};

template <int TILE_SIZE>
__device__ __forceinline__ int num_tiles(const LogitsWork& p) {
    return p.requests * ceil_div(p.queries, TILE_SIZE);
}

template <int TILE_SIZE>
__device__ __forceinline__ QueryTile tile_of(const LogitsWork& p, int number) {
    const int of_request = ceil_div(p.queries, TILE_SIZE);
    const int request = of_request == 1 ? number : number / of_request;
    const int first = (number - request * of_request) * TILE_SIZE;
    return {request, first, min(TILE_SIZE, p.queries - first)};
}

// The keys of a tile. They begin at a multiple of ALIGNED_KEYS. So 32-byte sectors of the logits are written whole,
// and keys that stand together in a block are read together.
constexpr int ALIGNED_KEYS = 16;
template <int TILE_SIZE>
__device__ __forceinline__ KeyRange range_of_tile(const LogitsWork& p, const QueryTile& tile) {
    constexpr bool SMALL = TILE_SIZE <= 16;  // loads for all queries are under way together
    KeyRange all = {p.width, 0};
#pragma unroll(SMALL ? TILE_SIZE : 1)
    for (int i = 0; i < (SMALL ? TILE_SIZE : tile.count); ++i) {
        const KeyRange one = range_of_query(p, tile.request, tile.first + min(i, tile.count - 1));
        if (one.begin < one.end) all = {min(all.begin, one.begin), max(all.end, one.end)};
    }
    return {all.begin / ALIGNED_KEYS * ALIGNED_KEYS, all.end};
}

// The keys of a tile that its units cover: the kernels write a logit, or -inf, for each of them and each query.
template <int UNIT>
__device__ __forceinline__ KeyRange covered(const LogitsWork& p, const KeyRange& range) {
    if (range.begin >= range.end) return {0, 0};
    return {range.begin, min(p.width, range.begin + ceil_div(range.end - range.begin, UNIT) * UNIT)};
}

template <int UNIT>
__device__ __forceinline__ int units_in(const KeyRange& range) {
    return range.begin < range.end ? ceil_div(range.end - range.begin, UNIT) : 0;
}

// To begin a tile takes about as long as so many keys.
constexpr int KEYS_OF_BEGIN = PAGED ? 0 : 128;

// The places of a tile in the list: BEGIN_PLACES, then one a unit.
template <int UNIT>
constexpr int BEGIN_PLACES = ceil_div(KEYS_OF_BEGIN, UNIT);

template <int UNIT>
__device__ __forceinline__ int places_in(const KeyRange& range) {
    return range.begin < range.end ? BEGIN_PLACES<UNIT> + units_in<UNIT>(range) : 0;
}

struct Units {
    int first, count;  // of a tile
};

// A CTA's share: `count` places of the list, from place number `place` of tile number `tile` on.
struct Share {
    int tile, place, count;

    // Takes from the share what it has of the tile, whose keys are `range`: the share then begins at the next tile.
    // Returns the units among that.
    template <int UNIT>
    __device__ __forceinline__ Units take_tile(const KeyRange& range) {
        constexpr int BEGIN = BEGIN_PLACES<UNIT>;
        const int end = min(place + count, places_in<UNIT>(range)), first = max(place - BEGIN, 0);
        const Units units = {first, max(end - BEGIN, first) - first};
        *this = {tile + 1, 0, count - (end - place)};
        return units;
    }
};

// `begin` is the place where share number i begins, and number i - 1 ends, of so many shares of `total` places.
struct EqualShares {
    __device__ __forceinline__ static int64_t begin(int64_t total, int i, int shares) { return total * i / shares; }
};

// This CTA's share. Each thread counts the places of some neighbouring tiles; the one whose tiles have the share's
// first place finds the tile. Called by the CTA.
template <int THREADS, int TILE_SIZE, int UNIT, typename Shares = EqualShares>
__device__ __forceinline__ Share share_of_cta(const LogitsWork& p) {
    __shared__ int64_t warp_sums[THREADS / 32];
    __shared__ Share share;
    const int tiles = num_tiles<TILE_SIZE>(p), of_thread = ceil_div(tiles, THREADS);
    const int first = threadIdx.x * of_thread, last = min(first + of_thread, tiles);
    const auto places_of = [&](int tile) {
        return places_in<UNIT>(range_of_tile<TILE_SIZE>(p, tile_of<TILE_SIZE>(p, tile)));
    };
    int64_t mine = 0;
    for (int tile = first; tile < last; ++tile) mine += places_of(tile);
    if (threadIdx.x == 0) share = {0, 0, 0};
    int64_t total;
    const int64_t before = cta_sum_before(mine, warp_sums, total), end = before + mine;
    const int64_t begin = Shares::begin(total, blockIdx.x, gridDim.x);
    const int64_t stop = Shares::begin(total, blockIdx.x + 1, gridDim.x);
    if (before <= begin && begin < end && begin < stop) {
        int tile = first;
        int64_t place = begin - before;
        for (int places = places_of(tile); place >= places; places = places_of(tile)) {
            place -= places;
            ++tile;
        }
        share = {tile, int(place), int(stop - begin)};
    }
    __syncthreads();
    return share;
}

// The same for few tiles, by one warp. There are fewer than 2^31 places, since no GPU's memory holds the logits of
// more units.
template <int TILE_SIZE, int UNIT>
__device__ __forceinline__ Share share_of_warp(const LogitsWork& p, int lane) {
    const int tiles = num_tiles<TILE_SIZE>(p), of_lane = ceil_div(tiles, 32);
    const int first = min(lane * of_lane, tiles), last = min(first + of_lane, tiles);
    const auto places_of = [&](int tile) {
        return places_in<UNIT>(range_of_tile<TILE_SIZE>(p, tile_of<TILE_SIZE>(p, tile)));
    };
    const auto share_of = [&](uint32_t total) {
        const uint32_t each = total / gridDim.x, more = total - each * gridDim.x;
        return Share{0, int(blockIdx.x * each + min(blockIdx.x, more)), int(each + (blockIdx.x < more))};
    };
    if (tiles == 1) return share_of(places_of(0));

    int mine = 0;
    for (int tile = first; tile < last; ++tile) mine += places_of(tile);
    const int end = inclusive_sum(mine, lane);
    Share share = share_of(__shfl_sync(~0u, end, 31));
    const int source = __ffs(__ballot_sync(~0u, share.place < end)) - 1;
    if (source < 0 || share.count == 0) return {0, 0, 0};
    share.place -= __shfl_sync(~0u, end - mine, source);
    share.tile = source * of_lane;
    if (of_lane > 1) {
        for (int places = places_of(share.tile); share.place >= places; places = places_of(share.tile)) {
            share.place -= places;
            ++share.tile;
        }
    }
    return share;
}

// Calls act(tile, its keys, its first unit in the share, its number of units there) for each tile of the share.
template <int TILE_SIZE, int UNIT, typename Act>
__device__ __forceinline__ void for_tiles(const LogitsWork& p, Share share, Act act) {
    while (share.count > 0) {
        const QueryTile tile = tile_of<TILE_SIZE>(p, share.tile);
        const KeyRange range = range_of_tile<TILE_SIZE>(p, tile);
        const Units units = share.take_tile<UNIT>(range);
        if (units.count > 0) act(tile, range, units.first, units.count);
    }
}

// Writes -inf behind the logits of COMPACT rows, if asked.
template <int THREADS>
__device__ __forceinline__ void clean_compact_rows(const LogitsParams& p, int thread) {
    if (!p.clean) return;
    for (int row = blockIdx.x; row < p.queries; row += gridDim.x) {
        const KeyRange range = range_of_query(p, 0, row);
        float* to = p.out + row * p.out_stride;
        for (int i = max(range.end - range.begin, 0) + thread; i < p.compact_width; i += THREADS) to[i] = -INF;
    }
}

// Writes -inf for the keys that no unit covers, if asked. THREADS threads of each CTA work on every gridDim-th row.
template <int THREADS, int TILE_SIZE, int UNIT>
__device__ __forceinline__ void clean_rows(const LogitsParams& p, int thread) {
    if (!p.clean) return;
    const int rows = p.requests * p.queries;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const int request = row / p.queries, first = (row - request * p.queries) / TILE_SIZE * TILE_SIZE;
        const QueryTile tile = {request, first, min(TILE_SIZE, p.queries - first)};
        const KeyRange written = covered<UNIT>(p, range_of_tile<TILE_SIZE>(p, tile));
        float* to = p.out + row * p.out_stride;
        for (int key = thread; key < written.begin; key += THREADS) to[key] = -INF;
        for (int key = written.end + thread; key < p.width; key += THREADS) to[key] = -INF;
    }
}
