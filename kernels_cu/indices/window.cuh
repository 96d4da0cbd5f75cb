// The positions that a query token's sliding window has.
#pragma once
#include "ptx/types.cuh"

struct Window {
    int64_t first;
    int32_t length;
};

// The window of a token at `position` of a sequence of `seq_len` tokens, which has rows from position `floor` on, and of
// whose image `left` positions stand before the token and `right` behind it. At most `most` positions.
__device__ __forceinline__ Window window_of(int32_t position, int32_t seq_len, int32_t window, int64_t floor,
                                            int32_t left, int32_t right, int32_t most) {
    const int64_t reach = window - 1, more = left - reach;
    int64_t first = position - reach - (more > 0 ? more : 0);
    if (first < 0) first = 0;
    if (first < floor) first = floor;
    const int64_t behind = int64_t(position) + right + 1, end = behind < seq_len ? behind : seq_len;
    const int64_t length = end - first;
    return {first, length < 0 ? 0 : length < most ? int32_t(length) : most};
}
