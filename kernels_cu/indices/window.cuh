// The positions of a query token's sliding window.
#pragma once
#include "ptx/types.cuh"

struct Window {
    int64_t first;
    int32_t length;
};

// The window of a token at `position`: the last `window` positions up to its own. Where the token belongs to an image,
// with `left` positions before it and `right` behind it, the window reaches over the whole image. It is cut to
// positions from `floor` on, of which the sequence has rows, to the sequence's `seq_len` tokens, and to `most`
// positions.
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
