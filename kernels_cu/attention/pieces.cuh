// How blocks that stay share out the pieces of work of a call: queries times head tiles, or groups of queries.
#pragma once
#include "attention/params.cuh"

// Calls `act` with what `find` returns for each piece of a worker, unless that is negative: nothing to do there.
//
// Workers take pieces to and fro, so that of pieces in order of length none has the longest of each round. A warp's lanes
// look at 32 pieces at once: to wait for memory at each piece would cost 1 us of about 30. All of the warp calls.
template <typename Workers, typename Find, typename Do>
__device__ __forceinline__ void for_each_piece(int total, int worker, Workers workers, Find find, Do act) {
#pragma unroll 1
    for (int n = 0; n * workers() < total; n += 32) {
        const int lane = threadIdx.x % 32;
        const int piece = (n + lane) * workers() + (lane % 2 == 0 ? worker : workers() - 1 - worker);
        int mine = piece < total ? find(piece) : -1;
#pragma unroll 1
        while (const uint32_t left = __ballot_sync(~0u, mine >= 0)) {
            const int first = __ffs(left) - 1, found = __shfl_sync(~0u, mine, first);
            if (threadIdx.x % 32 == first) mine = -1;
            act(found);
        }
    }
}

// For `for_each_piece`: number `piece` of the queries' head tiles, in the order that the call wants, unless it is done.
__device__ __forceinline__ int find_tile(const AttentionParams& p, int piece, int head_tiles) {
    const int n = piece / head_tiles, query = p.order == nullptr ? n : p.order[n];
    const bool done = p.flags & SOME_DONE && p.main.lengths[query / p.s_q] < 0;
    return done ? -1 : query * head_tiles + piece % head_tiles;
}
