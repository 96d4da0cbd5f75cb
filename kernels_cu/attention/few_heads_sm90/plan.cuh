// Of few_heads_sm90: constants, shared memory, who a thread is, and the rings.
#pragma once
#include "attention/division/division.cuh"
#include "attention/role.cuh"
#include "ptx/fence.cuh"
#include "ptx/limits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/fragments.cuh"
#include "tile/heads.cuh"
#include "tile/ring.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

// Several consumer warpgroups: while one waits, the others multiply. 32 heads take the registers of two.
static_assert(CONSUMERS == (HEADS == 32 ? 2 : 3), "");
constexpr int REGISTERS = CONSUMERS == 2 ? 232 : 152, PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 56;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP, THREADS = CONSUMER_THREADS + WARPGROUP;
using Work = DivisionOf<THREADS>::Turn;  // a cluster has a split of an item, and each of its CTAs a part of it
constexpr int V_TILES = D_V / 64, NOPE_BLOCKS = D_NOPE / 64;  // mma tiles of a warp's value columns; column blocks
constexpr int Q_BLOCK_BYTES = HEADS * LINE_BYTES, Q_BYTES = D_QK / 64 * Q_BLOCK_BYTES;
constexpr int P_BYTES = HEADS * LINE_BYTES;
constexpr int OWN_HEADS = HEADS / 4;  // of S^T and O^T in a thread (tile/heads.cuh)
constexpr float REF_SLACK = 8.0f;     // the terms of a sum stay below 2^REF_SLACK

// Named barriers; WARPGROUP_SYNC: + warpgroup.
enum NamedBarrier { WARPGROUP_SYNC = 1, CONSUMER_SYNC = 4 };

// Half of O^T as warpgroups exchange it. Four columns more a line spread the heads over the banks.
constexpr int HALF_LINE = D_V / 2 + 4, EXCHANGE_BYTES = HEADS * HALF_LINE * 4;

// Shared memory: Q, P of each warpgroup, the rings, and the rest.
constexpr int Q_AT = 0, P_AT = Q_BYTES, RING_AT = P_AT + CONSUMERS * P_BYTES;

// A head's softmax over some rows, relative to `ref` like its O^T.
struct Statistics {
    float ref, sum, max;
};
template <int STAGES>
struct SmallOf {
    uint64_t full[4][2 * STAGES], empty[4][STAGES];
    uint32_t told[4][STAGES];              // a bit for each row of a stage that is valid; or NO_TILE
    float ref[CONSUMERS][HEADS];           // what a warpgroup's sums and O^T are relative to
    float rise[CONSUMERS][HEADS];          // 2^(last reference - reference)
    float across[CONSUMERS][2][4][HEADS];  // between the warps of a warpgroup: sums, and largest logits
    float weight[CONSUMERS][HEADS];        // of a warpgroup's O^T in the CTA's result
    float scale[HEADS];                    // of the CTA's result in the end
};
// Stages of each ring: as many as there is space for.
template <int STAGES>
struct SharedBytes {
    static constexpr int VALUE = RING_AT + 4 * STAGES * STAGE_BYTES + int(sizeof(SmallOf<STAGES>));
};
constexpr int STAGES = most_stages<SharedBytes, SM90_SHARED_BYTES, 64>();
constexpr int RING_BYTES = STAGES * STAGE_BYTES, SMALL_AT = RING_AT + 4 * RING_BYTES;
using Small = SmallOf<STAGES>;
constexpr int SHARED_BYTES = SharedBytes<STAGES>::VALUE;

// What the producer warps say of the stages of a tile that is not there: no more tiles are left of the split.
constexpr uint32_t NO_TILE = 1 << STAGE_ROWS;

// Once all rows are read, the rings hold O^T in float32, [head][column]: the halves that warpgroups 0 and 1 exchange,
// and those that warpgroup 2 gives them.
constexpr int EXCHANGE_AT = RING_AT;
static_assert(EXCHANGE_AT + 2 * (CONSUMERS - 1) * EXCHANGE_BYTES <= SMALL_AT, "");

extern __shared__ __align__(1024) uint8_t shared[];

// --- who and what ---------------------------------------------------------------------------------------------

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

__device__ __forceinline__ Role consumer_role() {
    const uint32_t thread = threadIdx.x;
    return Role::of(thread, thread / WARPGROUP, thread / 32 % 4);
}
// The same. What is derived from the lane is found anew, not kept in registers from where it was used before.
__device__ __forceinline__ Role anew(const Role& r) { return Role::of_lane(opaque(r.lane), r.warpgroup, r.warp); }
__device__ __forceinline__ uint32_t q_lines() { return shared_address(shared) + Q_AT; }
__device__ __forceinline__ uint32_t p_lines(const Role& r) {
    return shared_address(shared) + P_AT + r.warpgroup * P_BYTES;
}
__device__ __forceinline__ void sync_warpgroup(const Role& r) {
    named_barrier_sync(WARPGROUP_SYNC + r.warpgroup, WARPGROUP);
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, CONSUMER_THREADS); }

// --- the rings ------------------------------------------------------------------------------------------------

// Stages of a ring are numbered over all tiles: stage number n is in place n % STAGES, as fill n / STAGES of it. The fills
// of a place have two barriers in turn. The parity of a barrier tells its next fill from the one before, but not from an
// earlier one. A warpgroup takes every CONSUMERS-th tile, and bulk copies may be done in any order: where it waits for a
// fill, the fill of the same place before it may still be under way. The one before that is done: it was released before
// the second stage of the warpgroup's last tile was filled.
static_assert(STAGES >= 2 * CONSUMERS - 1, "that stage is 2 * CONSUMERS - 1 before the first of the next tile");
__device__ __forceinline__ uint32_t full_barrier(int quarter, uint32_t number) {
    return shared_address(&small().full[quarter][number / STAGES % 2 * STAGES + number % STAGES]);
}

// Wait for the rows of a stage.
__device__ __forceinline__ void wait_for_stage(int quarter, uint32_t number) {
    mbarrier_wait(full_barrier(quarter, number), number / STAGES / 2 % 2);
}

// Wait until the fill before has been released. That returns at once for the first one.
__device__ __forceinline__ void wait_for_place(int quarter, uint32_t number) {
    mbarrier_wait(shared_address(&small().empty[quarter][number % STAGES]), (number / STAGES + 1) % 2);
    if (number >= STAGES) fence_proxy_async();  // between what was read there and bulk copies to the same place
}
