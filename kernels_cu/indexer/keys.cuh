// Loads of indexer keys: where a key stands, and its way from global memory into fragments of mma's A operand.
//
// A warp has 16 or 32 keys. Lane l looks up where key l % 16 (or l) stands. Lane 4 g + t then loads the 16-byte chunks
// t and t + 4 of keys g, g + 8, and so on. The order of k is free as long as both operands agree. So mma step 2 h + s,
// of 32 values, takes words 2 s and 2 s + 1 of chunk 4 h + t from lane t: k = 4 t + e is value 64 h + 16 t + 8 s + e,
// and k = 16 + 4 t + e is the value 4 further on.
//
// MXFP4 keys are widened to e5m2 after they are loaded (rows/mxfp4.cuh says what is exact): there a chunk of 16 values
// is 8 bytes of codes.
#pragma once
#include "indexer/work.cuh"
#include "rows/mxfp4.cuh"

// The block of a key, from the block table, which is read some time before the key.
struct KeyBlock {
    int32_t block;   // -1: the table has no block for the key, or the key is behind the tile's end
    int32_t offset;  // of the key in the block
};

// `end` is where the tile's keys end.
__device__ __forceinline__ KeyBlock block_of_key(const LogitsWork& p, int request, int key, int end) {
    if constexpr (!PAGED) return {};
    if (key >= end) return {-1, 0};
    int row = request, position = key;
    if constexpr (CANDIDATES) {
        const int32_t candidate = p.candidates[request * p.candidates_stride + key / CANDIDATE_BLOCK];
        row = p.req_id[request];
        position = candidate * CANDIDATE_BLOCK + key % CANDIDATE_BLOCK;
        const bool exists = uint32_t(candidate) <= 0x7fffffffu / CANDIDATE_BLOCK && position < p.ends[request];
        if (!exists || !has_request(p.table, row)) return {-1, 0};
    }
    const Position at = find_position(p.table, position);
    return {at.column < 0 ? -1 : p.table.blocks[row * p.table.stride + at.column], at.offset};
}

// Where a key stands. Lanes exchange offsets, not pointers: the compiler does not know that a pointer from another
// lane points to global memory.
struct KeyPlace {
    int64_t data;        // bytes from LogitsParams::keys; -1: there is no key
    const float* scale;  // MXFP4: four bytes of scales
};

__device__ __forceinline__ KeyPlace place_of_key(const LogitsParams& p, const KeyBlock& at, int key, int end) {
    if constexpr (PAGED) {
        if (uint32_t(at.block) >= uint32_t(p.num_blocks)) return {-1, nullptr};
        const auto place =
            place_in_block(at.block * p.key_stride, at.offset, p.table.block_size.value, int64_t(ROW_STRIDE));
        return {place.data, reinterpret_cast<const float*>(p.keys + place.scales)};
    }
    return key < end ? KeyPlace{key * p.key_stride, p.scales + key} : KeyPlace{-1, nullptr};
}

__device__ __forceinline__ Vec16 load_chunk_of_key(const uint8_t* from) {
    if constexpr (ALIGNED) return *reinterpret_cast<const Vec16*>(from);
    const auto* w = reinterpret_cast<const uint32_t*>(from);
    return {w[0], w[1], w[2], w[3]};
}

// MXFP4: eight bytes of codes.
__device__ __forceinline__ Vec8 load_codes_of_key(const uint8_t* from) {
    if constexpr (ALIGNED) return *reinterpret_cast<const Vec8*>(from);
    const auto* w = reinterpret_cast<const uint32_t*>(from);
    return {w[0], w[1]};
}

// A lane's part of a warp's 8 * ROWS keys. Chunks of a key that does not exist keep what they held before.
template <int ROWS>
struct Keys {
    Vec16 chunk[ROWS][2];  // [i]: chunks t and t + 4 of key g + 8 i
    float scale;           // of the key that this lane looked up
    bool exists;           // whether that key does

    // `at` is the block of key `mine`, the warp's key number lane % (8 * ROWS).
    __device__ __forceinline__ void load(const LogitsParams& p, const KeyBlock& at, int mine, int end) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const KeyPlace place = place_of_key(p, at, mine, end);
        exists = place.data >= 0;
        if constexpr (MXFP4) {
            load_mxfp4(p.keys, place, lane);
            return;
        }
        scale = exists ? *place.scale : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t from = __shfl_sync(~0u, place.data, g + 8 * i);
            if (from >= 0) {
                chunk[i][0] = load_chunk_of_key(p.keys + from + 16 * t);
                chunk[i][1] = load_chunk_of_key(p.keys + from + 16 * t + 64);
            }
        }
    }

  private:
    __device__ __forceinline__ void load_mxfp4(const uint8_t* keys, const KeyPlace& place, int lane) {
        const int g = lane / 4, t = lane % 4;
        const uint32_t scales = exists ? *reinterpret_cast<const uint32_t*>(place.scale) : 0;
        Vec8 codes[ROWS][2] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int64_t from = __shfl_sync(~0u, place.data, g + 8 * i);
            if (from >= 0) {
                codes[i][0] = load_codes_of_key(keys + from + 8 * t);
                codes[i][1] = load_codes_of_key(keys + from + 8 * t + 32);
            }
        }
        scale = factor_of_scales(largest_scale(scales));
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const uint32_t of_key = __shfl_sync(~0u, scales, g + 8 * i), largest = largest_scale(of_key);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Magnitudes of = magnitudes_of(largest - (of_key >> (2 * half + t / 2) * 8 & 255));
                const Vec8 low = widen_e2m1_8(codes[i][half].x, of), high = widen_e2m1_8(codes[i][half].y, of);
                chunk[i][half] = {low.x, low.y, high.x, high.y};
            }
        }
    }
};
