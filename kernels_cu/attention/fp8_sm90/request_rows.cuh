// Part of fp8_sm90, dense attention: how the producer warps copy a request's rows, which the block table names.
#pragma once
#include "attention/fp8_sm90/producer.cuh"

static_assert(!EXPAND, "");

// There are no lists whose ends the consumers could find.
__device__ __forceinline__ void find_first_ends(const AttentionParams&, const Work&) {}

// Rows of a stage that are neighbours in the cache come by one copy, if they have the same distance in shared memory.
// Returns how many rows this lane copies: its own and those after it, or 0 if a lane before copies its row. All lanes
// call.
__device__ __forceinline__ int run_of(const Row& row, int lane) {
    if (RUN_ROWS == 1) return 1;
    const uint64_t place = reinterpret_cast<uint64_t>(row.data), before = __shfl_up_sync(~0u, place, 1);
    const bool first = lane % RUN_ROWS == 0 || place == 0 || place != before + ROW_STRIDE;
    const uint32_t behind = (__ballot_sync(~0u, first) >> lane) >> 1;  // the later lanes that begin a run
    return first ? max(__ffs(behind), 1) : 0;
}

// Each of the four producer warps copies 16 rows of every tile. It looks blocks up AHEAD tiles before it copies their
// rows. Warp 0 also starts the turn (begin_turn). Returns the number of the stage after the split's last one.
__device__ __forceinline__ int copy_rows(const AttentionParams& p, const Work& w, int warp, int lane) {
    constexpr int AHEAD = 2;
    const DenseParams& d = dense(p);
    const int32_t* table = d.table.blocks + w.query.b * d.table.stride;
    const int count = w.count(), step = w.step * TILE_ROWS;
    const int tiles = max(ceil_div(count, UNIT_TILES) * UNIT_TILES, 1);  // with empty ones that complete a unit
    const int end = w.first_row + min(w.end * TILE_ROWS, w.main_length);
    // Lanes 0 .. 15 have a row each.
    const int own =
        STAGE_ROWS * stage_of_copier(lane / WARP_ROWS, warp) + warp % COPIERS * WARP_ROWS + lane % WARP_ROWS;
    auto load = [&](int row) {
        int32_t block = -1;
        if (lane < 16 && uint32_t(row) < uint32_t(end)) block = table[divide(row, d.table.block_size)];
        return block;
    };
    int first = w.first_row + w.begin * TILE_ROWS;  // of the tile
    int32_t blocks[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) blocks[i] = load(first + i * step + own);
    if (warp == 0) begin_turn(p, w, lane);
    // Every line sees rows all_from .. all_to - 1.
    const int all_from = d.window > 0 ? w.last_end - d.window : 0, all_to = w.last_end - (d.causal ? d.tokens - 1 : 0);
    uint32_t stage = w.stage;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n, first += step, stage += TILE_STAGES) {
        const Row row = row_in_block<Row>(d, blocks[0], first + own);
        blocks[0] = blocks[1];
        blocks[1] = load(first + AHEAD * step + own);
        copy_tile(row, run_of(row, lane), false, stage, warp, lane, [&] {
            const uint32_t some = first < all_from || first + TILE_ROWS > all_to ? SOME : 0;
            const uint32_t follows = n + 2 < tiles ? ANYTHING : n + 1 < tiles ? ONE_AT_MOST : NONE;
            return count == 0 ? uint32_t(ENDED) : follows | some;
        });
    }
    return stage;
}
