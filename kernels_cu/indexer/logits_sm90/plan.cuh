// Of logits_sm90: constants, registers, shared memory, the ring and its barriers.
#pragma once
#include "indexer/keys.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCERS = 4;  // warps
// Decode's keys leave L2 before the logits that the top-k reads, unless all keys together take so little of it that
// the next reader finds them there. By a schedule, half of the keys of a call in between leave it first.
constexpr bool KEYS_HAVE_POLICY = PAGED && !TOGETHER;
constexpr int64_t KEPT_KEYS = (SCHEDULED ? 64 : 96) << 10;
constexpr int64_t HALF_KEPT_KEYS = 256 << 10;
constexpr int UNIT = 64;
constexpr int WARPS_TILES = 128;       // up to so many tiles of decode, each producer warp counts its share for itself
constexpr int ROWS = QUERIES * HEADS;  // columns of wgmma
constexpr int TILE_QUERIES = TOGETHER ? QUERIES * WARPGROUPS : QUERIES;
constexpr int TILE_ROWS = TILE_QUERIES * HEADS;
constexpr int STAGE_BYTES = UNIT * KEY_BYTES, BUFFER_BYTES = TILE_ROWS * QUERY_BYTES;
constexpr int LINE_GROUP = 8 * LINE_BYTES;  // what the swizzle repeats after
constexpr int BUFFERS = 2;
static_assert(HEADS % 32 == 0, "");
static_assert(!SCHEDULED || PAGED && !TOGETHER, "a request is a tile");
static_assert(!MXFP4 && !CANDIDATES || PAGED && !TOGETHER && !SCHEDULED && !UNDERWAY, "decode without a schedule");
// Math warpgroups, which have nothing else to do yet, copy a CTA's first queries, while producers copy keys.
constexpr bool FILLS_FIRST = TOGETHER;

// Copies to the ring become visible to wgmma by a fence. Where there are many units, a producer warp waits for the
// copies of a unit when UNDERWAY more are under way, fences and tells; otherwise the copies themselves tell, which is
// sooner, and each math warpgroup fences (UNDERWAY 0).
static_assert(STAGES > UNDERWAY * PRODUCERS && STAGES >= PRODUCERS, "");

// Registers of a thread. More than the CTA was given at its launch would never come free: the last warpgroup that asks
// would wait for ever.
constexpr bool MOVES_REGISTERS = CTAS_PER_SM == 1;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 4 ? (MXFP4 ? 64 : 32) : WARPGROUPS == 3 ? 80 : 72;
constexpr int MATH_REGISTERS = WARPGROUPS == 2 ? 216 : WARPGROUPS == 3 ? 144 : MXFP4 ? 104 : 112;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(!MOVES_REGISTERS ||
                  128 * (WARPGROUPS * MATH_REGISTERS + PRODUCER_REGISTERS) <= THREADS * LAUNCH_REGISTERS,
              "");

extern __shared__ uint8_t shared[];

// What the producer tells of a tile.
struct Header {
    int units;      // 0: there are no more tiles
    int first_key;  // of the first unit
    int row;        // of the logits, of the first query
    int count;      // queries
    KeyRange range[TILE_QUERIES];
};

struct Small {
    float scales[STAGES][UNIT];
    float weights[BUFFERS][TILE_ROWS];
    uint32_t exists[STAGES][2];  // a bit a key
    Header header[BUFFERS];
    uint64_t full[STAGES], empty[STAGES], tile_full[BUFFERS], tile_empty[BUFFERS];
};
constexpr int RING_AT = BUFFERS * BUFFER_BYTES, SMALL_AT = RING_AT + STAGES * STAGE_BYTES;

__device__ __forceinline__ uint8_t* aligned_shared() { return shared + (0u - shared_address(shared)) % LINE_GROUP; }
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(aligned_shared() + SMALL_AT); }
__device__ __forceinline__ uint32_t buffer_rows(int buffer) {
    return shared_address(aligned_shared()) + buffer * BUFFER_BYTES;
}
__device__ __forceinline__ uint32_t stage_rows(int stage) {
    return shared_address(aligned_shared()) + RING_AT + stage * STAGE_BYTES;
}

// A place in the ring, and the parity of its current round.
struct Place {
    int stage;
    uint32_t round;

    __device__ __forceinline__ void advance(int by) {
        stage += by;
        if (stage >= STAGES) {
            stage -= STAGES;
            round ^= 1;
        }
    }
};

// By a schedule each warp makes some, in few instructions: a barrier's address has to be the same for a warp, or the
// compiler goes from lane to lane. Otherwise one thread makes all.
__device__ __forceinline__ void init_barriers() {
    constexpr int MAKERS = SCHEDULED ? THREADS / 32 : 1;
    Small& sm = small();
    const int maker = SCHEDULED ? uniform(threadIdx.x / 32) : 0;
    if ((SCHEDULED ? threadIdx.x % 32 : threadIdx.x) != 0) return;
#pragma unroll(SCHEDULED ? 1 : STAGES)
    for (int i = maker; i < STAGES; i += MAKERS) {
        mbarrier_init(shared_address(&sm.full[i]), WARP_ARRIVALS + (UNDERWAY ? 0 : 32));
        mbarrier_init(shared_address(&sm.empty[i]), 4 * (TOGETHER ? WARPGROUPS : 1) * WARP_ARRIVALS);
    }
#pragma unroll(SCHEDULED ? 1 : BUFFERS)
    for (int i = maker; i < BUFFERS; i += MAKERS) {
        mbarrier_init(shared_address(&sm.tile_full[i]), WARP_ARRIVALS + 32 * PRODUCERS);
        mbarrier_init(shared_address(&sm.tile_empty[i]), 4 * WARPGROUPS * WARP_ARRIVALS);
    }
    mbarrier_init_fence();
}
