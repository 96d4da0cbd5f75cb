// Part of bf16_sm90: constants, shared memory, and the struct of a work item.
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

constexpr int LINES = 64;  // of Q, S and O: a work item's heads, and padding
static_assert(HEADS <= LINES && HEADS % 16 == 0 && TILE_ROWS == 64, "padding begins with a warp");
constexpr int BLOCKS = D_QK / 64;  // column blocks: 64 swizzled lines of 64 values, 128 bytes
constexpr int BLOCK_BYTES = TILE_ROWS * LINE_BYTES;
constexpr int TILE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr bool P_OVER_ROPE = D_QK > D_V;
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + WARPGROUP;
constexpr Values ITEMS = HALF_ITEMS ? Values::F16 : Values::BF16;
// When a logit sets the reference, the reference is this far below the logit. With float16, P is then at most 2^15,
// and the smallest P above 0 is 2^-31 of P at the reference.
constexpr float REF_BELOW = HALF_ITEMS ? 7.0f : 0.0f;
constexpr float REF_SLACK = 8.0f + REF_BELOW, PEAK = 0.0625f;

// Named barriers; P_READY: + tile.
enum NamedBarrier { P_READY = 1, CONSUMER_SYNC = 3, PRODUCER_SYNC = 4 };

// Shared memory: Q, two tiles, P of each (D_QK 512), what a kernel needs in addition (K::EXTRA_BYTES), and `Small`:
// barriers and small arrays.
constexpr int Q_AT = 0, TILE_AT = TILE_BYTES, P_AT = 3 * TILE_BYTES;
constexpr int EXTRA_AT = P_AT + (P_OVER_ROPE ? 0 : 2 * BLOCK_BYTES);

struct Small {
    uint64_t full[2][2], empty[2][2][2], q_full, q_empty;
    // The work item whose Q has come: its number, -1 after the last one; and the length of its list, 0 if no entry is
    // valid.
    int work, length;
    int follows[2];     // for each tile: what follows its pair (Follows)
    uint32_t found[4];  // exchange between producer warps: which of 32 tiles have a valid entry, or a list's end
    union {
        uint8_t valid[2][TILE_ROWS];  // whether a row of a tile is valid
        // bf16_grouped_sm90: for each query, a bit for each row of a tile that counts twice.
        uint64_t twice[2][8];
    };
    float ref[2][LINES];     // reference of P_w
    float sum[2][2][LINES];  // [turn][warpgroup]: sums and maxima at the end of a work item; turns alternate
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
    int number;                    // of the work item; of a query group, which has no query of its own
    int first;                     // the split's first entry
    const int32_t* list;           // in clusters: the whole list and its length; dense: `listed` is RowsOf::seen
    int listed;
};

__device__ __forceinline__ int num_pairs(int length) { return (length + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS); }

// Whether region `region` of a tile also holds the RoPE columns, over which the tile's P is stored.
constexpr __device__ bool has_rope(int tile, int region) { return P_OVER_ROPE && region != tile; }

// How tiles without a valid entry are skipped: not at all; single tiles are marked before they are copied; or the
// producer warps vote on each pair.
enum class Skips { NONE, MARKED, VOTED };
// What the consumers are told of a pair: more pairs may follow; it is the last one; or it is no pair, and the work
// item has ended with the one before.
enum Follows { MORE = 0, LAST = 1, ENDED = 2 };

// Whether the `full` barrier of this region also covers the validity of the tile's rows. The warpgroup that computes S
// of the tile reads validity after it has waited for that region. With VOTED that is region 0, for which it waits
// before it multiplies: there may be nothing to multiply.
template <typename K>
constexpr __device__ bool has_validity(int tile, int region) {
    return region == (K::SKIPS == Skips::VOTED ? 0 : tile);
}
