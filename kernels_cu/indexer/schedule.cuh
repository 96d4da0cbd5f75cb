// What a schedule says of a CTA's share of paged logits, one word a lane of a warp: the request that it begins in, the
// first unit there, how many units it has, where the request's keys end, and the blocks of the first units.
#pragma once
#include "ptx/types.cuh"

constexpr int SCHEDULE_WORDS = 32, SCHEDULE_BLOCKS_AT = 4, SCHEDULE_BLOCKS = SCHEDULE_WORDS - SCHEDULE_BLOCKS_AT;
constexpr int SCHEDULE_UNIT = 64;  // keys
