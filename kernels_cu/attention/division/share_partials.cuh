// Partial results of shares. A CTA that has the begin of an item, or a middle, leaves one; the CTA that has the item's
// end merges those of the shares just before its own. It waits for CTAs of lower numbers alone. Those have been
// started, so this cannot hang. Partial results are merged in the order of shares: the bits do not depend on who was
// first.
//
// ready[share] says that a partial result is there. It holds the run's nonce, so that what an earlier user of the
// memory left there says nothing, and is cleared by the CTA that merges, so that a captured graph can be run again.
#pragma once
#include "attention/params.cuh"
#include "ptx/global.cuh"

// What is added to the nonce in ready[share].
enum Ready { IS_LEFT = 1, BEGINS_ITEM = 2 };

// Say that a share's partial result is there. The threads that wrote it must have met this one.
__device__ __forceinline__ void announce_partial(const AttentionParams& p, int share, bool begins_item) {
    store_release(p.ready + share, p.nonce + IS_LEFT + (begins_item ? BEGINS_ITEM : 0));
}

// Wait for the partial results of the item that began before a share, and return how many there are: those of the
// shares just before. One warp calls.
__device__ __forceinline__ int wait_for_partials(const AttentionParams& p, int share, int lane) {
    int count = 0;
#pragma unroll 1
    for (;;) {
        const int before = share - 1 - count - lane;
        const uint64_t state = (before < 0 ? 0 : load_acquire(p.ready + before)) - p.nonce;
        const bool left = state == IS_LEFT || state == IS_LEFT + BEGINS_ITEM;
        const uint32_t missing = __ballot_sync(~0u, !left);
        const uint32_t first = __ballot_sync(~0u, left && state != IS_LEFT);
        const int next = __ffs(first), run = missing == 0 ? 32 : __ffs(missing) - 1;
        if (next != 0 && next <= run) {
            count += next;
            break;
        }
        if (run == 32) count += 32;
    }
    for (int i = lane; i < count; i += 32) p.ready[share - 1 - i] = 0;
    return count;
}
