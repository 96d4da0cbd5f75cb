// What the producer warpgroup of logits_sm90 does by a schedule (schedule.cuh).
#pragma once
#include "indexer/logits_sm90/producer.cuh"
#include "indexer/schedule.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"

// The CTA's part of the schedule, a word a lane of each warp that reads it. It is read before the launch before has
// ended. What it says is checked: a schedule of another batch gives wrong logits, but touches nothing beyond the
// arrays.
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

    // The keys of the share's tile number `tile`, less than SCHEDULE_REQUESTS.
    __device__ __forceinline__ KeyRange range(const LogitsParams& p, int tile) const {
        return {0, max(0, min(tile == 0 ? of(3) : of(4), p.width))};
    }

    // The block of the share's unit number u, less than SCHEDULE_BLOCKS. The unit begins at `key`.
    __device__ __forceinline__ KeyBlock block(const LogitsParams& p, int u, int key, int end) const {
        const int block = of(SCHEDULE_BLOCKS_AT + u);
        return {key < end ? block : -1, key - divide(key, p.table.block_size) * int(p.table.block_size.value)};
    }

  private:
    __device__ __forceinline__ int of(int i) const { return __shfl_sync(~0u, word, i); }
};
static_assert(UNIT == SCHEDULE_UNIT && SCHEDULE_REQUESTS == 2, "");

// Fills a buffer with a tile's queries, weights and header, by the 4 warps of a warpgroup. The warp that writes the
// header also reads which keys each query sees.
__device__ __forceinline__ void fill_buffer(const LogitsParams& p, const QueryTile& tile, const KeyRange& range,
                                            const Units& taken, int buffer) {
    const int thread = threadIdx.x % 128, warp = uniform(thread / 32), lane = thread % 32;
    copy_queries<TILE_QUERIES>(p, tile, 0, buffer, thread);
    if (warp == HEADER_WARP) {
        const KeyRange mine = p.queries == 1      ? range
                              : lane < tile.count ? range_of_query(p, tile.request, lane)
                                                  : KeyRange{0, 0};
        write_header(p, tile, range, taken, mine, buffer, lane);
    }
    signal_buffer_full(buffer, warp, lane);
}

// A math warpgroup fills the buffer of the share's first tile, while the producer copies keys.
__device__ __forceinline__ void fill_first_buffer(const LogitsParams& p, const Scheduled& schedule) {
    Share share = schedule.share(p);
    if (share.count <= 0) return;
    const QueryTile tile = {share.tile, 0, min(p.queries, TILE_QUERIES)};
    const KeyRange range = schedule.range(p, 0);
    const Units taken = share.take_tile<UNIT>(range);
    wait_for_earlier_kernels();
    fill_buffer(p, tile, range, taken, 0);
}

// As `produce`, by a schedule. Each warp copies its first unit before it does anything else.
__device__ __forceinline__ void produce_scheduled(const LogitsParams& p, const Scheduled& schedule) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x % 128 / 32);
    const uint64_t policy = policy_of_keys(p);
    Share share = schedule.share(p);
    RingPlace place = {warp, 1};  // the first wait for each stage returns at once
    int ahead = warp;             // units of the tile before this warp's next one
    int before = 0;               // units of the share in tiles before
    int turn = 0;                 // number of the tile
    UnitsUnderway underway = {place, 0};
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
        const bool told = number < SCHEDULE_REQUESTS;  // the schedule has the tile's range, and its first blocks
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
                    wait_for_buffer(turn, underway, lane);
                    fill_buffer(p, tile, range, taken, turn % BUFFERS);
                }
                ++turn;
            }
            if (ahead >= taken.count) break;
            next = find(ahead);
        }
        ahead -= taken.count;
        before += taken.count;
    }
    if (UNDERWAY) underway.signal_all(lane);
    signal_end(turn, underway, warp, lane);
}
