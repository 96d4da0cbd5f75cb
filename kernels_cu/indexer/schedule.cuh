// The line of a schedule that tells a CTA its share of the units of paged logits. It has a word for each lane of a
// warp:
//
//   0        the request in which the share begins
//   1        the share's first unit in that request
//   2        how many units the share has
//   3, 4     where the keys end of that request, and of the next one
//   5 .. 31  the blocks of the share's first units, as far as they belong to these two requests
#pragma once
#include "ptx/types.cuh"

constexpr int SCHEDULE_WORDS = 32, SCHEDULE_REQUESTS = 2;
constexpr int SCHEDULE_BLOCKS_AT = 3 + SCHEDULE_REQUESTS, SCHEDULE_BLOCKS = SCHEDULE_WORDS - SCHEDULE_BLOCKS_AT;
constexpr int SCHEDULE_UNIT = 64;  // keys
