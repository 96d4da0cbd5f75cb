// Quantizes the indexer's queries: applies the rotary embedding if asked, rounds to e4m3 under one scale a token and
// head, and multiplies the heads' weights by these scales. MXFP4: rounds to e2m1 under a power of two a group of 32;
// these scales are stored apart. WIDEN: then to e5m2 under one power of two, which goes into the weight
// (rows/mxfp4.cuh).
//
//   one warp    8 heads of a token, in 4 rounds of two: half a warp has a head. The loads of all rounds are under way
//               together
//     rotate    concerns the 8 lanes that hold the 64 rotated values. Angles are loaded once for all heads. The values
//               of a half-split pair stand 4 lanes apart and are exchanged by shuffles. Each product and sum is
//               rounded to float32, the result to bfloat16
//     quantize  a lane has 16 bytes of q and stores 8 bytes of e4m3. One register has the largest magnitudes of two
//               rounds, so that one set of shuffles finds both
//               MXFP4: it stores 4 bytes of e2m1; four lanes have a group
//     weights   lane h < 8 stores that of head h
//
// ALIGNED: q allows 16-byte loads. No shared memory.
#include "rows/chunk.cuh"
#include "rows/mxfp4.cuh"
#include "rows/quantize.cuh"

// The launcher declares the same fields.
struct QuantizeQParams {
    const bf16* q;             // [tokens, heads, 128]
    const void* weights;       // [tokens, heads] float32, or bf16
    const int64_t* positions;  // [tokens], or null
    const void* cos_sin;       // [num_positions, 64] float32, or bf16
    uint8_t* codes;            // [tokens, heads, 128]; MXFP4, not widened: 64
    uint32_t* scales;          // [tokens, heads] of MXFP4 that is not widened
    float* w;                  // [tokens, heads]
    int64_t q_t, q_h;          // strides, items
    int64_t weights_stride, positions_end, cos_sin_stride;
    int32_t tokens, heads;
    int32_t bf16_weights, bf16_cos_sin;
    int32_t rope_first, interleaved, power_of_two;
    float factor;  // (heads * 128) ** -0.5
};

constexpr int D = 128, LANES = D / CHUNK, ROUNDS = 4, HEADS = ROUNDS * 32 / LANES;  // heads of a warp
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROPE_LANES = 64 / CHUNK, ANGLES = 32;
constexpr float LEAST_AMAX = 1e-10f;
static_assert(LANES == 16 && HEADS == 8, "");

__device__ __forceinline__ float load_number(const void* from, int64_t at, bool is_bf16) {
    return is_bf16 ? bf16_to_float(static_cast<const bf16*>(from)[at]) : static_cast<const float*>(from)[at];
}

// A lane's cosines and sines: of its 8 values (half-split), or of its 4 pairs (interleaved).
struct Angles {
    float cos[CHUNK], sin[CHUNK];
    bool mine;  // this lane's values are rotated

    __device__ __forceinline__ void load(const QuantizeQParams& p, int token, int lane) {
        const int place = p.rope_first ? lane : lane - (LANES - ROPE_LANES);  // among the lanes with rotated values
        const int64_t position = p.positions == nullptr ? -1 : p.positions[token];
        mine = 0 <= place && place < ROPE_LANES && 0 <= position && position < p.positions_end;
        if (!mine) return;
        const int first = p.interleaved ? place * CHUNK / 2 : place % (ROPE_LANES / 2) * CHUNK;
        const int64_t row = position * p.cos_sin_stride;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const int angle = min(first + i, ANGLES - 1);  // interleaved: the last four are not used
            cos[i] = load_number(p.cos_sin, row + angle, p.bf16_cos_sin);
            sin[i] = load_number(p.cos_sin, row + ANGLES + angle, p.bf16_cos_sin);
        }
    }
};

__device__ __forceinline__ Vec16 rotate(const QuantizeQParams& p, const Vec16& v, const Angles& angles, int lane) {
    float x[CHUNK], y[CHUNK], out[CHUNK];
    widen_8(v, x);
    const Vec16 across = {__shfl_xor_sync(~0u, v.x, ROPE_LANES / 2), __shfl_xor_sync(~0u, v.y, ROPE_LANES / 2),
                          __shfl_xor_sync(~0u, v.z, ROPE_LANES / 2), __shfl_xor_sync(~0u, v.w, ROPE_LANES / 2)};
    if (!angles.mine) return v;
    widen_8(across, y);
    const bool second = lane & (ROPE_LANES / 2);  // of half-split pairs
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const float mine = x[i], other = p.interleaved ? x[i ^ 1] : y[i];
        const float cos = p.interleaved ? angles.cos[i / 2] : angles.cos[i];
        const float sin = p.interleaved ? angles.sin[i / 2] : angles.sin[i];
        const float a = multiply_exactly(mine, cos), b = multiply_exactly(other, sin);
        out[i] = (p.interleaved ? i % 2 == 1 : second) ? add_exactly(a, b) : subtract_exactly(a, b);
    }
    return {pack_bf16x2(out[0], out[1]), pack_bf16x2(out[2], out[3]), pack_bf16x2(out[4], out[5]),
            pack_bf16x2(out[6], out[7])};
}

// Quantizes and stores row number `row`, a head of a token, by 16 lanes. Returns the factor of the head's weight.
__device__ __forceinline__ float store_mxfp4(const QuantizeQParams& p, const Vec16& values, int64_t row, int lane) {
    const uint32_t scale = mxfp4_scale(amax_or_nan<MXFP4_GROUP / CHUNK>(values)), scales = join_scales(scale, lane);
    const uint32_t codes = quantize_e2m1_8(values, scale), largest = largest_scale(scales);
    if constexpr (WIDEN) {
        *reinterpret_cast<Vec8*>(p.codes + row * D + lane * CHUNK) =
            widen_e2m1_8(codes, magnitudes_of(largest - scale));
        return factor_of_scales(largest);
    }
    *reinterpret_cast<uint32_t*>(p.codes + row * (D / 2) + lane * (CHUNK / 2)) = codes;
    if (lane == 0) p.scales[row] = scales;
    return 1.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_q(const __grid_constant__ QuantizeQParams p) {
    const int of_token = p.heads / HEADS, number = blockIdx.x * WARPS + threadIdx.x / 32;
    const int token = number / of_token, first = (number - token * of_token) * HEADS;
    if (token >= p.tokens) return;
    const int lane = threadIdx.x % LANES, half = threadIdx.x % 32 / LANES;
    Vec16 rows[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
        rows[i] = load_chunk(p.q + token * p.q_t + (first + 2 * i + half) * p.q_h + lane * CHUNK, ALIGNED);
    if (p.positions != nullptr) {
        Angles angles;
        angles.load(p, token, lane);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) rows[i] = rotate(p, rows[i], angles, lane);
    }
    const int64_t at = int64_t(token) * p.heads + first;
    float scale_of_mine = 0.0f;  // of head `threadIdx.x % 32`
#pragma unroll
    for (int i = 0; i < ROUNDS; i += 2) {
        const uint32_t amax = MXFP4 ? 0 : tile_amax<LANES>(rows[i], rows[i + 1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int head = 2 * (i + j) + half;
            float scale;
            if constexpr (MXFP4) {
                scale = store_mxfp4(p, rows[i + j], at + head, lane);
            } else {
                const float largest = j == 0 ? bf16_low(amax) : bf16_high(amax);
                const float ratio = scale_from_amax(fmaxf(largest, LEAST_AMAX));
                scale = p.power_of_two ? power_of_two_from(ratio) : ratio;
                *reinterpret_cast<Vec8*>(p.codes + (at + head) * D + lane * CHUNK) = quantize_8(rows[i + j], scale);
            }
            const float scales[2] = {__shfl_sync(~0u, scale, 0), __shfl_sync(~0u, scale, LANES)};
            if (threadIdx.x % 32 / 2 == i + j) scale_of_mine = scales[threadIdx.x % 2];
        }
    }
    const int head = threadIdx.x % 32;
    if (head >= HEADS) return;
    const float weight = load_number(p.weights, token * p.weights_stride + first + head, p.bf16_weights);
    p.w[at + head] = multiply_exactly(multiply_exactly(weight, scale_of_mine), p.factor);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
