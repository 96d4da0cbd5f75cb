// What the producer warpgroup of logits_sm90 does without a schedule.
#pragma once
#include "indexer/logits_sm90/queries.cuh"
#include "indexer/logits_sm90/units.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"

// There are no more tiles: a header of 0 units says so. It takes a buffer like any other tile: barriers count
// arrivals, and a warp that arrived without waiting for the buffer would count for another warp's arrival at the tile
// before.
__device__ __forceinline__ void signal_end(int turn, UnitsUnderway& underway, int warp, int lane) {
    wait_for_buffer(turn, underway, lane);
    if (warp == HEADER_WARP && lane == 0) small().header[turn % BUFFERS].units = 0;
    signal_buffer_full(turn % BUFFERS, warp, lane);
}

// `warp_finds_share`: this warp finds the CTA's share, and `share` is not set.
__device__ __forceinline__ void produce(const LogitsParams& p, Share share, bool warp_finds_share) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % 128 / 32);
    if (warp_finds_share) share = share_of_warp<TILE_QUERIES, UNIT>(p, lane);
    const uint64_t policy = KEYS_HAVE_POLICY ? policy_of_keys(p) : 0;
    RingPlace place = {warp, 1};  // the first wait for each stage returns at once
    int ahead = warp;             // units of the tile before this warp's next one
    int turn = 0;                 // number of the tile
    UnitsUnderway underway = {place, 0};
    while (share.count > 0) {
        const QueryTile tile = tile_of<TILE_QUERIES>(p, share.tile);
        KeyRange mine;
        const KeyRange range = range_of_tile(p, tile, lane, mine);
        const Units taken = share.take_tile<UNIT>(range);
        if (taken.count == 0) continue;

        const auto first_key = [&](int u) { return range.begin + (taken.first + u) * UNIT; };
        UnitBlocks next;  // of this warp's next unit, read one unit ahead
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
        const int buffer = turn % BUFFERS;
        wait_for_buffer(turn++, underway, lane);
        if (warp == HEADER_WARP) write_header(p, tile, range, taken, mine, buffer, lane);
        if (!MATH_COPIES_FIRST_QUERIES || turn > 1)
            copy_queries<TILE_QUERIES>(p, tile, 0, buffer, read_thread_index() % 128);
        signal_buffer_full(buffer, warp, lane);
#pragma unroll 1
        while (ahead < taken.count) copy_next();
        ahead -= taken.count;
    }
    underway.signal_all(lane);
    signal_end(turn, underway, warp, lane);
}

// Prefill: a math warpgroup copies its own queries of the CTA's first tile, while producers copy keys. Its 128 threads
// meet before any of them multiplies.
__device__ __forceinline__ void copy_first_queries(const LogitsParams& p, const Share& share, int warpgroup) {
    if (share.count > 0)
        copy_queries<QUERIES>(p, tile_of<TILE_QUERIES>(p, share.tile), warpgroup * QUERIES, 0, threadIdx.x % 128);
    cp_async_wait_all();
    fence_proxy_async();
    named_barrier_sync(1 + warpgroup, 128);
}
