// logits_sm90's constants, registers, shared memory, ring and barriers.
#pragma once
#include "indexer/keys.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCERS = 4;  // warps
// L2 policy of decode's keys. Up to KEYS_KEPT_IN_L2 keys take so little of L2 that the next reader may still find them
// there. Of more keys L2 should rather keep the logits, which the top-k reads: keys are evicted first. By a schedule,
// up to KEYS_HALF_KEPT_IN_L2 keys, that goes for half of them.
constexpr bool KEYS_HAVE_POLICY = PAGED && !TOGETHER;
constexpr int64_t KEYS_KEPT_IN_L2 = (SCHEDULED ? 64 : 96) << 10;
constexpr int64_t KEYS_HALF_KEPT_IN_L2 = 256 << 10;
constexpr int UNIT = 64;                        // keys
constexpr int MAX_TILES_COUNTED_BY_WARP = 128;  // of decode: each producer warp then finds the CTA's share for itself
constexpr int ROWS = QUERIES * HEADS;           // columns of wgmma
constexpr int TILE_QUERIES = TOGETHER ? QUERIES * WARPGROUPS : QUERIES;
constexpr int TILE_ROWS = TILE_QUERIES * HEADS;
constexpr int STAGE_BYTES = UNIT * KEY_BYTES, BUFFER_BYTES = TILE_ROWS * QUERY_BYTES;
constexpr int LINE_GROUP = 8 * LINE_BYTES;  // what the swizzle repeats after
constexpr int BUFFERS = 2;
static_assert(HEADS % 32 == 0, "");
static_assert(!SCHEDULED || PAGED && !TOGETHER, "a request is a tile");
static_assert(!PAGED || E5M2_KEYS == MXFP4, "a cache has FP8 keys, e4m3, or MXFP4 keys, which become e5m2");
static_assert(!MXFP4 && !CANDIDATES || PAGED && !TOGETHER && !SCHEDULED && !UNDERWAY, "decode without a schedule");
// Math warpgroups copy the queries of a CTA's first tile, while producers copy keys: they have nothing else to do yet.
constexpr bool MATH_COPIES_FIRST_QUERIES = TOGETHER;

// Copies to the ring become visible to wgmma by a fence.proxy.async. UNDERWAY > 0, where there are many units: once
// copies of UNDERWAY more units are under way, a producer warp waits for those of the oldest one, fences, and arrives
// at its barrier. UNDERWAY 0: the copies themselves arrive, which is sooner, and each math warpgroup fences.
static_assert(STAGES > UNDERWAY * PRODUCERS && STAGES >= PRODUCERS, "");

// Registers of a thread. All warpgroups together must not ask for more than the CTA was given at its launch: the last
// one to ask would wait for ever.
constexpr bool MOVES_REGISTERS = CTAS_PER_SM == 1;
constexpr int PRODUCER_REGISTERS = WARPGROUPS == 4 ? (MXFP4 ? 64 : 32) : WARPGROUPS == 3 ? 80 : 72;
constexpr int MATH_REGISTERS = WARPGROUPS == 2 ? 216 : WARPGROUPS == 3 ? 144 : MXFP4 ? 104 : 112;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(!MOVES_REGISTERS ||
                  128 * (WARPGROUPS * MATH_REGISTERS + PRODUCER_REGISTERS) <= THREADS * LAUNCH_REGISTERS,
              "");

extern __shared__ uint8_t shared[];

// What math warpgroups have to know of a tile.
struct Header {
    int units;      // 0: there are no more tiles
    int first_key;  // of the first unit
    int row;        // the first query's row of the logits
    int count;      // queries
    KeyRange range[TILE_QUERIES];
};

// What stands in shared memory behind the two buffers and the ring.
struct Small {
    float scales[STAGES][UNIT];
    float weights[BUFFERS][TILE_ROWS];
    uint32_t exists[STAGES][2];  // a bit a key: whether the cache has it
    Header header[BUFFERS];
    uint64_t full[STAGES], empty[STAGES], tile_full[BUFFERS], tile_empty[BUFFERS];
};
constexpr int RING_AT = BUFFERS * BUFFER_BYTES, SMALL_AT = RING_AT + STAGES * STAGE_BYTES;

// The buffers begin at a multiple of what the swizzle repeats after; dynamic shared memory may not.
__device__ __forceinline__ uint8_t* aligned_shared() { return shared + (0u - shared_address(shared)) % LINE_GROUP; }
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(aligned_shared() + SMALL_AT); }
// Shared addresses of a buffer's rows of queries, and of a stage's rows of keys.
__device__ __forceinline__ uint32_t buffer_rows(int buffer) {
    return shared_address(aligned_shared()) + buffer * BUFFER_BYTES;
}
__device__ __forceinline__ uint32_t stage_rows(int stage) {
    return shared_address(aligned_shared()) + RING_AT + stage * STAGE_BYTES;
}

// A stage of the ring, and the parity of the current round through the ring.
struct RingPlace {
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

// By a schedule each warp initialises some barriers, in few instructions: it does so by one lane, since the compiler
// loops over the lanes where a barrier's address may differ among them. Otherwise one thread initialises all.
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
