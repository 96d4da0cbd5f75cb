// Packs new tokens into a paged KV cache; compiled for one layout (constants: cupy_mla/layouts.py).
//
//   one warp     one token
//   a lane       16 consecutive values of the latent row: 32 bytes in, 16 bytes of e4m3 out (or 32 of bf16)
//                a quantization tile is 8 lanes (V32_FP8, 128 values) or 4 lanes (V4_FP8, 64 values), whose largest
//                magnitude meets by shuffles
//   RoPE         V32_FP8 and BF16: from k_pe, lanes 0-7 copy 16 bytes each; V4_FP8: the last 4 lanes of the row itself
//
// No shared memory; 8 tokens a block. Slots that are negative or beyond the cache are skipped.
#include "ptx/convert.cuh"

struct Params {
    const bf16* latent;      // [num_tokens, 512]
    const bf16* rope;        // [num_tokens, 64], null where the latent row holds it
    uint8_t* cache;
    const int64_t* slots;    // [num_tokens]
    int64_t latent_stride;   // items
    int64_t rope_stride;
    int64_t block_stride;    // bytes
    int64_t row_stride;
    int64_t num_slots;
    int32_t block_size;
    int32_t num_tokens;
    int32_t power_of_two;    // V32_FP8: round scales up to powers of two
    int32_t flags;           // which arrays allow 16-byte accesses
};

constexpr int ALIGNED_LATENT = 1, ALIGNED_ROPE = 2, ALIGNED_CACHE = 4;
constexpr int LATENT = 512, VALUES = 16, TOKENS_PER_BLOCK = 8;
constexpr float E4M3_MAX = 448.0f, AMAX_FLOOR = 1e-4f;

// Eight bf16 from anywhere.
__device__ __forceinline__ Vec16 load_8(const bf16* from, bool aligned) {
    if (aligned) return *reinterpret_cast<const Vec16*>(from);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = from[2 * i] | uint32_t(from[2 * i + 1]) << 16;
    return {w[0], w[1], w[2], w[3]};
}

__device__ __forceinline__ void store_8(uint8_t* to, const Vec16& v, bool aligned) {
    if (aligned) {
        *reinterpret_cast<Vec16*>(to) = v;
        return;
    }
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) reinterpret_cast<bf16*>(to)[i] = bf16(w[i / 2] >> (16 * (i % 2)));
}

// div.rn.f32 and nothing flushed to zero: the bytes must be those of any other writer.
__device__ __forceinline__ float divide(float a, float b) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

// The exponent of the smallest power of two that is not below x; x is normal.
__device__ __forceinline__ int ceil_log2(float x) {
    const uint32_t bits = __float_as_uint(x);
    return int(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(exponent + 127) << 23); }

__device__ __forceinline__ void unpack(const Vec16& v, float* to) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = bf16_low(w[i]);
        to[2 * i + 1] = bf16_high(w[i]);
    }
}

// The largest magnitude among the 16 values of each of LANES neighbouring lanes; NaN is left aside.
template <int LANES>
__device__ __forceinline__ float tile_amax(const float (&v)[VALUES]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) amax = fmaxf(amax, fabsf(v[i]));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    return amax;
}

__device__ __forceinline__ Vec16 quantize(const float (&v)[VALUES], float scale) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        w[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) w[i] |= float_to_e4m3(divide(v[4 * i + j], scale)) << (8 * j);
    }
    return {w[0], w[1], w[2], w[3]};
}

#if NUM_SCALES == 0

__device__ __forceinline__ void store_token(const Params& p, uint8_t*, int, uint8_t* row, int lane, Vec16 lo, Vec16 hi) {
    const bool aligned = p.flags & ALIGNED_CACHE;
    store_8(row + 32 * lane, lo, aligned);
    store_8(row + 32 * lane + 16, hi, aligned);
}

#elif SCALE_OFFSET >= 0

__device__ __forceinline__ void store_token(const Params& p, uint8_t*, int, uint8_t* row, int lane, Vec16 lo, Vec16 hi) {
    float v[VALUES];
    unpack(lo, v);
    unpack(hi, v + 8);
    constexpr int TILE_LANES = SCALE_TILE / VALUES;
    const float ratio = divide(tile_amax<TILE_LANES>(v), E4M3_MAX);
    const float scale = p.power_of_two ? power_of_two(ceil_log2(fmaxf(ratio, AMAX_FLOOR)))
                                       : fmaxf(ratio, 1.17549435e-38f /* FLT_MIN */);
    *reinterpret_cast<Vec16*>(row + VALUES * lane) = quantize(v, scale);
    if (lane % TILE_LANES == 0) *reinterpret_cast<float*>(row + SCALE_OFFSET + 4 * (lane / TILE_LANES)) = scale;
}

#else

__device__ __forceinline__ void store_token(
    const Params& p, uint8_t* block, int offset, uint8_t* row, int lane, Vec16 lo, Vec16 hi) {
    float v[VALUES];
    unpack(lo, v);
    unpack(hi, v + 8);
    constexpr int TILE_LANES = SCALE_TILE / VALUES, NOPE_LANES = D_NOPE / VALUES;
    const float amax = tile_amax<TILE_LANES>(v);
    const int exponent = max(-127, min(128, ceil_log2(divide(fmaxf(amax, AMAX_FLOOR), E4M3_MAX))));
    uint8_t* scales = block + int64_t(p.block_size) * ROW_STRIDE + int64_t(offset) * SCALE_STRIDE;
    if (lane < NOPE_LANES) {
        *reinterpret_cast<Vec16*>(row + VALUES * lane) = quantize(v, power_of_two(exponent));
        if (lane % TILE_LANES == 0) scales[lane / TILE_LANES] = uint8_t(exponent + 127);
    } else {
        uint8_t* to = row + ROPE_OFFSET + 32 * (lane - NOPE_LANES);
        *reinterpret_cast<Vec16*>(to) = lo;
        *reinterpret_cast<Vec16*>(to + 16) = hi;
        if (lane == NOPE_LANES) scales[NUM_SCALES] = 0;
    }
}

#endif

extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK) pack_tokens(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % 32;
    const int token = blockIdx.x * TOKENS_PER_BLOCK + threadIdx.x / 32;
    if (token >= p.num_tokens) return;
    const int64_t slot = p.slots[token];
    if (slot < 0 || slot >= p.num_slots) return;

    const bf16* latent = p.latent + token * p.latent_stride + VALUES * lane;
    const Vec16 lo = load_8(latent, p.flags & ALIGNED_LATENT), hi = load_8(latent + 8, p.flags & ALIGNED_LATENT);
    uint8_t* block = p.cache + slot / p.block_size * p.block_stride;
    const int offset = int(slot % p.block_size);
    uint8_t* row = block + offset * p.row_stride;
    if (p.rope != nullptr && lane < D_ROPE / 8) {
        const Vec16 v = load_8(p.rope + token * p.rope_stride + 8 * lane, p.flags & ALIGNED_ROPE);
        store_8(row + ROPE_OFFSET + 16 * lane, v, p.flags & ALIGNED_CACHE);
    }
    store_token(p, block, offset, row, lane, lo, hi);
}
