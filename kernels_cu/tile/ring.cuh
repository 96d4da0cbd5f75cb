// The ring of stages in shared memory.
#pragma once

// The most stages whose shared memory, Bytes<stages>::VALUE, is at most LIMIT: MOST, or some STEP fewer; STEP if nothing
// else is left.
template <template <int> class Bytes, int LIMIT, int MOST, int STEP = 1>
__host__ __device__ constexpr int most_stages() {
    if constexpr (Bytes<MOST>::VALUE <= LIMIT || MOST <= STEP) {
        return MOST;
    } else {
        return most_stages<Bytes, LIMIT, MOST - STEP, STEP>();
    }
}
