// Part of bf16_few_heads_sm90: constants, shared memory, thread roles, and a warpgroup's work.
#pragma once
#include "attention/division/whole.cuh"
#include "attention/role.cuh"
#include "ptx/limits.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared.cuh"
#include "tile/heads.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 4 * WARPGROUP;
// Chosen such that neither producers nor consumers spill.
constexpr int PRODUCER_REGISTERS = QUERIES == 1 && HEADS == 32 ? 48 : 56;
constexpr int BLOCKS = D_QK / 64;  // column blocks
constexpr int BLOCK_BYTES = TILE_ROWS * LINE_BYTES;
constexpr int V_BLOCKS = D_V / 64, STAGES = V_BLOCKS / 2;
constexpr int Q_BLOCK_BYTES = HEADS * LINE_BYTES, Q_BYTES = BLOCKS * Q_BLOCK_BYTES;
constexpr int P_BYTES = HEADS * LINE_BYTES;
constexpr int ROPE_BYTES = (BLOCKS - V_BLOCKS) * BLOCK_BYTES;
constexpr int TILE_BYTES = V_BLOCKS * BLOCK_BYTES + (P_BYTES > ROPE_BYTES ? P_BYTES : ROPE_BYTES);
constexpr int OWN_HEADS = HEADS / 4;  // heads of S^T and O^T that a thread holds (tile/heads.cuh)
constexpr float REF_SLACK = 8.0f;
constexpr int MERGED_WARPGROUPS = QUERIES == 2 ? 1 : 2;  // warpgroups of a CTA that work on the same query
constexpr int O_LINE = D_V + 4;  // floats of a head in the merge; 4 of padding against bank conflicts
static_assert(STAGES == 4, "");

// Named barriers; WARPGROUP_SYNC, PRODUCER_VOTE: + warpgroup.
enum NamedBarrier { WARPGROUP_SYNC = 1, CONSUMER_SYNC = 3, PRODUCER_VOTE = 4 };

// Shared memory: Q of each query, the tile of each consumer warpgroup, and `Small`: barriers and small arrays.
constexpr int Q_AT = 0, TILE_AT = QUERIES * Q_BYTES, SMALL_AT = TILE_AT + 2 * TILE_BYTES;

// A warpgroup's softmax over its rows, for each head. Its sum and its O^T are relative to `ref`.
struct Statistics {
    float ref[HEADS], sum[HEADS], max[HEADS];
};
struct Small {
    uint64_t full[2 * STAGES], empty[2 * STAGES];  // [warpgroup][stage]
    float across[2][2][4][HEADS];                  // exchange between the warps of a warpgroup
    Statistics own[2];
    int multiplying;  // warps of the warpgroup that holds the tensor cores; 0: none does
};
constexpr int SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(HEADS * O_LINE * 4 <= TILE_BYTES, "O^T is stored in the space of the tile");
static_assert(SHARED_BYTES <= SM90_SHARED_BYTES, "");

extern __shared__ __align__(1024) uint8_t shared[];

// --- roles and work -------------------------------------------------------------------------------------------

__device__ __forceinline__ Role consumer_role() {
    const int thread = threadIdx.x;
    return Role::of(thread, uniform(thread / WARPGROUP), thread / 32 % 4);
}
__device__ __forceinline__ uint32_t q_lines(const Role& r) {
    return shared_address(shared) + Q_AT + (QUERIES == 2 ? r.warpgroup * Q_BYTES : 0);
}
__device__ __forceinline__ uint32_t tile_of(const Role& r) {
    return shared_address(shared) + TILE_AT + r.warpgroup * TILE_BYTES;
}
__device__ __forceinline__ void sync_warpgroup(const Role& r) {
    named_barrier_sync(WARPGROUP_SYNC + r.warpgroup, WARPGROUP);
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, 2 * WARPGROUP); }

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// This warpgroup's tiles of a work item: begin, begin + step, ... below end.
struct Work : WorkItem {
    int step;
};

// What a CTA works on: a query, a head tile, and a split of its rows.
struct Place {
    int query, head_tile, split, splits;
};

__device__ __forceinline__ Work find_work(const AttentionParams& p, const Place& place, int warpgroup) {
    Work w;
    w.query = query_by_branch(p, place.query);
    w.first_head = place.head_tile * HEADS;
    w.begin = 0;
    w.end = find_lists(p, w);
    w.step = QUERIES == 2 ? 1 : 2;
    if (QUERIES == 2) {
        // At least one tile, even without rows: O^T is stored in its space, so the warpgroup must own it.
        w.end = max(w.end, 1);
    } else {
        if (place.splits > 1) {
            const int64_t tiles = w.end;
            w.begin = int(tiles * place.split / place.splits);
            w.end = int(tiles * (place.split + 1) / place.splits);
        }
        w.begin += warpgroup;
    }
    return w;
}

// Whether any of the 128 threads of a named barrier passes true.
__device__ __forceinline__ bool any(int barrier, bool mine) { return named_barrier_any(barrier, WARPGROUP, mine); }
