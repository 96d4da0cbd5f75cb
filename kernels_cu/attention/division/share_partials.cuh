// Partial results of shares. A CTA whose share has an item's begin or middle, but not its end, writes a partial
// result. The CTA with the item's end merges those of the shares just before its own. It waits only for CTAs of lower
// numbers, which have been started before it, so it cannot hang. Partial results are merged in the order of the
// shares, so that the bits do not depend on which CTA was first.
//
// ready[share] says that a partial result is written. It holds the run's nonce, so that old contents of the memory
// mean nothing. The CTA that merges clears it, so that a captured graph can run again.
#pragma once
#include "attention/params.cuh"
#include "ptx/global.cuh"

// What is added to the nonce in ready[share]. BEGINS_ITEM: the share has the item's begin, so no earlier share has a
// part of it.
enum Ready { WRITTEN = 1, BEGINS_ITEM = 2 };

// Says that a share's partial result is written. The threads that wrote it must have met this one.
__device__ __forceinline__ void announce_partial(const AttentionParams& p, int share, bool begins_item) {
    store_release(p.ready + share, p.nonce + WRITTEN + (begins_item ? BEGINS_ITEM : 0));
}

// Waits for the partial results of the item in which this share begins, and returns how many there are. They are those
// of the shares just before. One warp calls; each lane polls one share.
__device__ __forceinline__ int wait_for_partials(const AttentionParams& p, int share, int lane) {
    int count = 0;
#pragma unroll 1
    for (;;) {
        const int before = share - 1 - count - lane;
        const uint64_t state = (before < 0 ? 0 : load_acquire(p.ready + before)) - p.nonce;
        const bool left = state == WRITTEN || state == WRITTEN + BEGINS_ITEM;
        const uint32_t missing = __ballot_sync(~0u, !left);
        const uint32_t first = __ballot_sync(~0u, left && state != WRITTEN);
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
