// Keys on their way into fragments of mma's and wgmma's A operand, straight from global memory.
//
// A warp has 16 keys, or 32. Lane l looks up where key l % 16 (or l) stands. Lane 4 g + t then reads of keys g, g + 8,
// ... their 16-byte chunks t and t + 4. The order of k is free as long as both operands agree: in mma step 2 h + s, of 32
// values, k = 4 t + e and 16 + 4 t + e are values 64 h + 16 t + 8 s + e and + 4 + e: words 2 s and 2 s + 1 of chunk
// 4 h + t.
#pragma once
#include "indexer/work.cuh"

// Where to look for a key: what stands in the block table, which is read some time before it is needed.
struct KeyBlock {
    int32_t block;   // -1: the table has none, or nobody sees the key
    int32_t offset;  // in it
};

__device__ __forceinline__ KeyBlock block_of_key(const LogitsParams& p, int request, int key, int end) {
    if constexpr (!PAGED) return {};
    if (key >= end) return {-1, 0};
    const Position at = find_position(p.table, key);
    return {at.column < 0 ? -1 : p.table.blocks[request * p.table.stride + at.column], at.offset};
}

// A key and its scale. `data` is null where there is none.
struct KeyPlace {
    const uint8_t* data;
    const float* scale;
};

__device__ __forceinline__ KeyPlace place_of_key(const LogitsParams& p, const KeyBlock& at, int key, int end) {
    if constexpr (PAGED) {
        if (uint32_t(at.block) >= uint32_t(p.num_blocks)) return {nullptr, nullptr};
        const uint8_t* block = p.keys + at.block * p.key_stride;
        const auto place = place_in_block(block, at.offset, p.table.block_size.value, ROW_STRIDE);
        return {place.data, reinterpret_cast<const float*>(place.scales)};
    }
    return key < end ? KeyPlace{p.keys + key * p.key_stride, p.scales + key} : KeyPlace{nullptr, nullptr};
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

    // `at` is the block of key `mine`, number lane % (8 * ROWS) of them.
    __device__ __forceinline__ void load(const LogitsParams& p, const KeyBlock& at, int mine, int end) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const KeyPlace place = place_of_key(p, at, mine, end);
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
