// What a schedule says of a CTA's share of paged logits, one word a lane of a warp: the request that it begins in, the
// first unit there, how many units it has, where that request's keys end and where the next one's do, and the blocks of
// the first units, as far as these are the two requests'.
#pragma once
#include "ptx/types.cuh"

constexpr int SCHEDULE_REQUESTS = 2, SCHEDULE_WORDS = 32, SCHEDULE_BLOCKS_AT = 3 + SCHEDULE_REQUESTS,
              SCHEDULE_BLOCKS = SCHEDULE_WORDS - SCHEDULE_BLOCKS_AT;
constexpr int SCHEDULE_UNIT = 64;  // keys
