// Of logits_sm90: what the producer warpgroup does, without a schedule.
#pragma once
#include "indexer/logits_sm90/queries.cuh"
#include "indexer/logits_sm90/units.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"

// There are no more tiles. No warp may tell of a buffer twice before another one did once.
__device__ __forceinline__ void tell_of_end(int turn, Underway& underway, int warp, int lane) {
    wait_for_buffer(turn, underway, lane);
    if (warp == HEADER_WARP && lane == 0) small().header[turn % BUFFERS].units = 0;
    tell_of_buffer(turn % BUFFERS, warp, lane);
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
        const int buffer = turn % BUFFERS;
        wait_for_buffer(turn++, underway, lane);
        if (warp == HEADER_WARP) write_header(p, tile, range, taken, mine, buffer, lane);
        if (!FILLS_FIRST || turn > 1) copy_queries<TILE_QUERIES>(p, tile, 0, buffer, read_thread_index() % 128);
        tell_of_buffer(buffer, warp, lane);
#pragma unroll 1
        while (ahead < taken.count) copy_next();
        ahead -= taken.count;
    }
    underway.tell_all(lane);
    tell_of_end(turn, underway, warp, lane);
}

// Prefill: a math warpgroup copies its own queries of the first tile, while producers copy keys.
__device__ __forceinline__ void copy_first_queries(const LogitsParams& p, const Share& share, int warpgroup) {
    if (share.count > 0)
        copy_queries<QUERIES>(p, tile_of<TILE_QUERIES>(p, share.tile), warpgroup * QUERIES, 0, threadIdx.x % 128);
    cp_async_wait_all();
    fence_proxy_async();
    named_barrier_sync(1 + warpgroup, 128);
}
