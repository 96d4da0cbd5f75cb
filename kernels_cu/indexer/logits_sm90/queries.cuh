// How logits_sm90 brings a tile's queries, weights and header to one of two buffers.
#pragma once
#include "indexer/logits_sm90/plan.cuh"
#include "ptx/cp_async.cuh"

// As range_of_tile of work.cuh, by a warp: each lane reads the range of one query, which `mine` is set to.
__device__ __forceinline__ KeyRange range_of_tile(const LogitsParams& p, const QueryTile& tile, int lane,
                                                  KeyRange& mine) {
    mine = lane < tile.count ? range_of_query(p, tile.request, tile.first + lane) : KeyRange{0, 0};
    const bool any = mine.begin < mine.end;
    const int begin = __reduce_min_sync(~0u, any ? mine.begin : p.width);
    return {begin / ALIGNED_KEYS * ALIGNED_KEYS, __reduce_max_sync(~0u, any ? mine.end : 0)};
}

// The query and head that stand in a row of a buffer, which is a column of the product. With an even number of queries
// two of them are interleaved: each eight columns have four heads of one and four of the other, and in every second
// eight the two change places:
//
//   columns        0 .. 3             4 .. 7             8 .. 11            12 .. 15
//   query, heads   even q, 0 .. 3     odd q, 0 .. 3      odd q, 4 .. 7      even q, 4 .. 7
//
// Lanes t = 0, 1 of a quad have the first four columns of each eight, lanes 2, 3 the others. So of each lane the sum
// over the even eights is of one query, and the sum over the odd eights of the other (sum_heads).
constexpr int INTERLEAVED = QUERIES % 2 ? 1 : 2;
struct QueryHead {
    int query, head;

    __device__ __forceinline__ static QueryHead of_row(int row) {
        if (INTERLEAVED == 1) return {row / HEADS, row % HEADS};
        const int eight = row % (2 * HEADS) / 8, column = row % 8;
        return {row / (2 * HEADS) * 2 + (column / 4 ^ eight % 2), 4 * eight + column % 4};
    }
};

// Copies COUNT queries of a tile from number `first` on, which is even, and their weights, by 128 threads. Heads and
// queries that do not exist become zeros.
template <int COUNT>
__device__ __forceinline__ void copy_queries(const LogitsParams& p, const QueryTile& tile, int first, int buffer,
                                             int thread) {
    constexpr int ROWS_AT_ONCE = 128 / 8, HEADS_AT_ONCE = ROWS_AT_ONCE / INTERLEAVED;
    const auto [own_query, own_head] = QueryHead::of_row(thread / 8);
    const int chunk = thread % 8, first_row = first * HEADS, count = tile.count - first;
    // MXFP4: words of k in the order in which lanes widen the keys'. Lane t has words 8 t to 8 t + 7 of a key, two for
    // each step s. So a query's word 8 t + 2 s + i goes to word t of chunk 2 s + i.
    constexpr int PARTS = MXFP4 ? 4 : 1, PART_BYTES = 16 / PARTS;
    uint32_t to[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
        to[i] = MXFP4 ? swizzled(buffer_rows(buffer), first_row + thread / 8, chunk % 2 * 4 + i) + chunk / 2 * 4
                      : swizzled(buffer_rows(buffer), first_row + thread / 8, chunk);
    const uint8_t* query_row = p.q8 + tile.request * p.q_request + (tile.first + first + own_query) * p.q_query +
                               own_head * p.q_head + 16 * chunk;
#pragma unroll 1
    for (int query = own_query; query < own_query + COUNT; query += INTERLEAVED) {
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
        query_row += INTERLEAVED * p.q_query;
    }
    const uint32_t weights = shared_address(&small().weights[buffer][first_row]);
    const float* w = p.w + tile.row(p, first) * p.w_stride;
#pragma unroll
    for (int row = thread; row < COUNT * HEADS; row += 128) {
        const auto [query, head] = QueryHead::of_row(row);
        cp_async_4(weights + 4 * row, w + query * p.w_stride + head, query < count && head < p.heads);
    }
}

// The producer warp that writes headers. By a schedule the last one, which may have fewer units than others.
constexpr int HEADER_WARP = SCHEDULED ? PRODUCERS - 1 : 0;

// Writes a tile's header, by a warp. `mine` is the range of the lane's query, if there is one.
__device__ __forceinline__ void write_header(const LogitsParams& p, const QueryTile& tile, const KeyRange& range,
                                             const Units& taken, const KeyRange& mine, int buffer, int lane) {
    Header& h = small().header[buffer];
    if (lane == 0) h.units = taken.count, h.first_key = range.begin + taken.first * UNIT;
    if (lane == 1) h.row = int(tile.row(p, 0)), h.count = tile.count;
    if (lane < TILE_QUERIES) h.range[lane] = mine;
}

// `warp` has written its part of a buffer, and started its copies to it.
__device__ __forceinline__ void signal_buffer_full(int buffer, int warp, int lane) {
    const uint32_t full = shared_address(&small().tile_full[buffer]);
    if (warp == HEADER_WARP) {
        __syncwarp();
        mbarrier_arrive_for_warp(full, lane);
    }
    mbarrier_arrive_after_copies(full);
}
