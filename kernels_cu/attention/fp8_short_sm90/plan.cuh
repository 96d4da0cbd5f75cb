// Part of fp8_short_sm90: constants and shared memory.
#pragma once
#include "attention/fp8_sm90/softmax.cuh"

constexpr int TILES = 4, WARPS = 4 * TILES, CTA_THREADS = 32 * WARPS;
constexpr int ROWS_AT = Q_BLOCKS * HEADS_BLOCK_BYTES;
static_assert(HAS_ROPE && E8M0_SCALES && Q_BLOCKS == 8 && TILES * HEADS_BLOCK_BYTES <= ROWS_AT,
              "V4_FP8; P fits the space of Q");

struct alignas(16) Rest {
    uint64_t full[WARPS];                          // a warp's rows have arrived
    uint32_t valid[WARPS];                         // a bit for each row of a warp
    float q_max[WARPS], across[WARPS][HEADS];      // exchange between warps
    float ref[HEADS], scale[HEADS], sink[HEADS];   // references; factors of O^T; sinks in base 2
    uint16_t ratio[TILES][CHUNKS + 1][TILE_ROWS];  // scale / r as f16; the last chunk is loaded, but not used
};
constexpr int REST_AT = ROWS_AT + TILES * TILE_ROWS * STRIDE, CTA_BYTES = REST_AT + int(sizeof(Rest));
static_assert(CTA_BYTES <= SM90_SHARED_BYTES, "");
__device__ __forceinline__ Rest& rest() { return *reinterpret_cast<Rest*>(shared + REST_AT); }
__device__ __forceinline__ void sync_cta() { named_barrier_sync(CONSUMER_SYNC, CTA_THREADS); }

struct Item {
    Query query;
    int first_head;
};
