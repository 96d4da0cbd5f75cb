// Keys on their way into fragments of mma's and wgmma's A operand, straight from global memory.
//
// A warp has 16 keys, or 32. Lane l looks up where key l % 16 (or l) stands. Lane 4 g + t then reads of keys g, g + 8,
// ... their 16-byte chunks t and t + 4. The order of k is free as long as both operands agree: in mma step 2 h + s, of 32
// values, k = 4 t + e and 16 + 4 t + e are values 64 h + 16 t + 8 s + e and + 4 + e: words 2 s and 2 s + 1 of chunk
// 4 h + t.
#pragma once
#include "indexer/work.cuh"

// A key and its scale. `data` is null where there is none.
struct KeyPlace {
    const uint8_t* data;
    const float* scale;
};

__device__ __forceinline__ KeyPlace place_of_key(const LogitsParams& p, int request, int key) {
    if constexpr (PAGED) {
        KeyPlace place = {nullptr, nullptr};
        with_block_of(p.table, request, key, p.keys, p.key_stride, p.num_blocks,
                      [&](const uint8_t* block, int offset) {
                          const auto at = place_in_block(block, offset, p.table.block_size.value, ROW_STRIDE);
                          place = {at.data, reinterpret_cast<const float*>(at.scales)};
                      });
        return place;
    }
    return key < p.width ? KeyPlace{p.keys + key * p.key_stride, p.scales + key} : KeyPlace{nullptr, nullptr};
}

__device__ __forceinline__ Vec16 load_chunk_of_key(const uint8_t* from) {
    if constexpr (ALIGNED) return *reinterpret_cast<const Vec16*>(from);
    const auto* w = reinterpret_cast<const uint32_t*>(from);
    return {w[0], w[1], w[2], w[3]};
}

// What a lane has of 8 * ROWS keys.
template <int ROWS>
struct Keys {
    Vec16 chunk[ROWS][2];  // of key g + 8 i, chunks t and t + 4
    float scale;           // of the key that this lane looked up
    bool exists;           // that key

    __device__ __forceinline__ void load(const LogitsParams& p, int request, int first, int end) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, mine = first + lane % (8 * ROWS);
        const KeyPlace place = mine < end ? place_of_key(p, request, mine) : KeyPlace{nullptr, nullptr};
        exists = place.data != nullptr;
        scale = exists ? *place.scale : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const uint8_t* from = shuffle_pointer(place.data, g + 8 * i);
            chunk[i][0] = chunk[i][1] = {0, 0, 0, 0};
            if (from != nullptr) {
                chunk[i][0] = load_chunk_of_key(from + 16 * t);
                chunk[i][1] = load_chunk_of_key(from + 16 * t + 64);
            }
        }
    }
};
