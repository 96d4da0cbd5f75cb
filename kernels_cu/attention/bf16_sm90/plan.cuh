// Of bf16_sm90: constants, shared memory, and what a work item is.
#pragma once
#include "attention/division/results.cuh"
#include "attention/division/whole.cuh"
#include "attention/role.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzle.cuh"

constexpr int LINES = 64;  // of Q, S and O: the heads of a work item, and padding
static_assert(HEADS <= LINES && HEADS % 16 == 0 && TILE_ROWS == 64, "whole warps have only padding");
constexpr int BLOCKS = D_QK / 64;  // column blocks of 64 values: 64 swizzled lines of 128 bytes
constexpr int BLOCK_BYTES = TILE_ROWS * LINE_BYTES;
constexpr int TILE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr bool P_OVER_ROPE = D_QK > D_V;
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
constexpr Values ITEMS = HALF_ITEMS ? Values::F16 : Values::BF16;
// References are this far below the logit that set them. float16: P is at most 2^15 then, and the smallest that is not
// 0 is 2^-31 of P at the reference.
constexpr float REF_BELOW = HALF_ITEMS ? 7.0f : 0.0f;
constexpr float REF_SLACK = 8.0f + REF_BELOW, PEAK = 0.0625f;

// Named barriers; P_READY: + tile.
enum NamedBarrier { P_READY = 1, CONSUMER_SYNC = 3, PRODUCER_SYNC = 4 };

// Shared memory: Q, two tiles, P of each (D_QK 512), what a kernel needs besides (K::EXTRA_BYTES), and the rest.
constexpr int Q_AT = 0, TILE_AT = TILE_BYTES, P_AT = 3 * TILE_BYTES;
constexpr int EXTRA_AT = P_AT + (P_OVER_ROPE ? 0 : 2 * BLOCK_BYTES);

struct Small {
    uint64_t full[2][2], empty[2][2][2], q_full, q_empty;
    // What Q is of: the number of a work item, -1 behind the last, and its list's length, 0 without a valid entry.
    int work, length;
    int follows[2];     // what follows a tile's pair (Follows)
    uint32_t found[4];  // by each producer warp: which of 32 tiles have a valid entry, or where a list ends
    union {
        uint8_t valid[2][TILE_ROWS];  // whether a row of a tile is valid
        // Bf16_grouped_sm90: for each query, a bit for each row of a tile that counts twice.
        uint64_t twice[2][8];
    };
    float ref[2][LINES];     // what P_w is relative to
    float sum[2][2][LINES];  // at the end, alternating between work items: sums and maxima of each warpgroup's tiles
    float max[2][2][LINES];
};

extern __shared__ __align__(1024) uint8_t shared[];

template <typename K>
__device__ __forceinline__ Small& small() {
    return *reinterpret_cast<Small*>(shared + EXTRA_AT + K::EXTRA_BYTES);
}
template <typename K>
constexpr int SHARED_BYTES = EXTRA_AT + K::EXTRA_BYTES + int(sizeof(Small));

__device__ __forceinline__ uint32_t tile_address(int tile) {
    return shared_address(shared) + TILE_AT + tile * TILE_BYTES;
}
__device__ __forceinline__ uint32_t p_address(int tile) {
    return P_OVER_ROPE ? tile_address(tile) + 8 * BLOCK_BYTES : shared_address(shared) + P_AT + tile * BLOCK_BYTES;
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, CONSUMERS); }

struct Work {
    Query query;
    int head_tile, length, pairs;  // entries of the list, pairs of tiles
    int number;                    // of a query group, which has no query of its own
    int first;                     // of a split: the first of the entries
    const int32_t* list;           // in clusters: all entries of the list, and how many they are
    int listed;
};

__device__ __forceinline__ int num_pairs(int length) { return (length + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS); }

// Whether region `region` of a tile holds the RoPE columns too, over which P of the tile is stored.
constexpr __device__ bool has_rope(int tile, int region) { return P_OVER_ROPE && region != tile; }

// How tiles without a valid entry are passed over, and what the consumers are told: behind this pair come more, or may
// come; none; the pair is none, the work item has ended with the one before.
enum class Skips { NONE, MARKED, VOTED };
enum Follows { MORE = 0, LAST = 1, ENDED = 2 };

// Whether its barriers also cover the validity of the tile's rows, which the warpgroup that computes S of the tile
// reads; before it multiplies if pairs are voted on, as there may be none.
template <typename K>
constexpr __device__ bool has_validity(int tile, int region) {
    return region == (K::SKIPS == Skips::VOTED ? 0 : tile);
}
