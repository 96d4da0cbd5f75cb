// What a schedule says of a CTA's share of paged logits, one word a lane of a warp: the request in which the share begins,
// the first unit there, and how many units the share has; where the keys of that request end, and of the next one; the
// blocks of the share's first units, as far as they belong to these two requests.
#pragma once
#include "ptx/types.cuh"

constexpr int SCHEDULE_REQUESTS = 2, SCHEDULE_WORDS = 32, SCHEDULE_BLOCKS_AT = 3 + SCHEDULE_REQUESTS,
              SCHEDULE_BLOCKS = SCHEDULE_WORDS - SCHEDULE_BLOCKS_AT;
constexpr int SCHEDULE_UNIT = 64;  // keys
