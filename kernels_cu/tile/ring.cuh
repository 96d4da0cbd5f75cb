// How many stages a ring in shared memory has.
#pragma once

// The largest number of stages that fits: MOST, MOST - STEP, ... such that Bytes<stages>::VALUE is at most LIMIT. STEP
// if none fits.
template <template <int> class Bytes, int LIMIT, int MOST, int STEP = 1>
__host__ __device__ constexpr int most_stages() {
    if constexpr (Bytes<MOST>::VALUE <= LIMIT || MOST <= STEP) {
        return MOST;
    } else {
        return most_stages<Bytes, LIMIT, MOST - STEP, STEP>();
    }
}
