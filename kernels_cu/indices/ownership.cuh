// Which tokens of a request lie on which rank: token i lies on rank (i / interleave) % number of ranks.
#pragma once
#include "rows/block_table.cuh"

// cupy_mla/cuda/structs.py declares the same fields.
struct Ownership {
    Divisor interleave;
    Divisor turn;  // once around the ranks: interleave times their number
    int32_t rank;
};

// How many of a request's first `length` tokens lie on the rank.
__device__ __forceinline__ int32_t local_length(const Ownership& o, int32_t length) {
    const int32_t interleave = int32_t(o.interleave.value);
    const int32_t turns = divide(max(length, 0), o.turn);
    const int64_t rest = max(length, 0) - int64_t(turns) * o.turn.value - int64_t(o.rank) * interleave;
    return turns * interleave + int32_t(min(max(rest, int64_t(0)), int64_t(interleave)));
}

// A token's number among the rank's tokens. -1: the token lies on another rank, or the entry names none.
__device__ __forceinline__ int32_t local_position(const Ownership& o, int32_t position) {
    if (position < 0) return -1;
    const int32_t interleave = int32_t(o.interleave.value), turn = divide(position, o.turn);
    const int32_t in_turn = position - turn * int32_t(o.turn.value), rank = divide(in_turn, o.interleave);
    return rank == o.rank ? turn * interleave + in_turn - rank * interleave : -1;
}

// The position in the request of the rank's token number `local`, which is not negative.
__device__ __forceinline__ int32_t global_position(const Ownership& o, int32_t local) {
    const int32_t interleave = int32_t(o.interleave.value), turn = divide(local, o.interleave);
    return turn * int32_t(o.turn.value) + o.rank * interleave + local - turn * interleave;
}
