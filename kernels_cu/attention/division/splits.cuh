// Splits: the CTAs of a cluster take the splits of a work item and merge their results, as in clusters. Where an item has
// more splits than a cluster has CTAs, those lie along gridDim.y, and each cluster leaves a partial result for
// combine.cu. Tiles of heads lie along gridDim.z. The kernel, which needs these numbers besides, finds its turn itself.
//
//   gridDim.x   | cluster of query 0 | cluster of query 1 | ...
//   gridDim.y   |   splits 0 .. 3    |   splits 0 .. 3    |
//               |   splits 4 .. 7    |   splits 4 .. 7    |
#pragma once
#include "attention/division/turn.cuh"

struct Splits : FromGrid {
    static constexpr End END = End::COMBINE;
    using Turn = TurnOf<TILES_IN_TURN>;
    static constexpr bool ONE_TURN = true, EQUAL_SPLITS = true;
};
