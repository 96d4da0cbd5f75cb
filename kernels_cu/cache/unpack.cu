// Unpacks rows of a paged cache of one layout into float32.
//
//   one warp     a row: divides its slot once. Lane l loads and stores values l, l + 32, and so on, so that
//                neighbouring lanes have neighbouring values. All loads of a row are under way together
//
// Exact: bf16 and e4m3 values without a scale, and codes times power-of-two or e4m3 scales, unless they over- or
// underflow float32. Rounded, once, to float32: e4m3 codes times float32 scales (V32_FP8, V32_NOPE_FP8, PLAIN_FP8).
//
// A load is of one or two bytes, so rows may start anywhere that allows it. A slot that is negative or beyond the
// cache becomes a row of zeros. No shared memory.
#include "rows/call_scale.cuh"
#include "rows/e2m1.cuh"
#include "rows/integers.cuh"
#include "rows/place.cuh"
#include "rows/scales.cuh"

// The launcher declares the same fields.
struct UnpackParams {
    Integers slots;  // [num_rows]
    const uint8_t* cache;
    float* out;            // [num_rows, D_QK]
    int64_t block_stride;  // bytes
    int64_t row_stride;    // bytes
    int64_t out_stride;    // items
    int64_t num_slots;
    int64_t num_rows;
    int32_t block_size;
    int32_t unused;
    CallScale k_scale;  // PLAIN_FP8: the scale of all rows
};

constexpr int THREADS = 32 * ROWS_PER_BLOCK;

#if !QUANTIZED_ROWS

__device__ __forceinline__ float value_at(const UnpackParams&, const uint8_t* data, const uint8_t*, int value) {
    return bf16_to_float(reinterpret_cast<const bf16*>(data)[value]);
}

#else

__device__ __forceinline__ float value_at(const UnpackParams& p, const uint8_t* data, const uint8_t* scales,
                                          int value) {
    if (value >= D_NOPE) {
        const uint8_t* rope = data + ROPE_OFFSET;
        if (ROPE_CODED) return e4m3_to_float(rope[value - D_NOPE]);
        return bf16_to_float(reinterpret_cast<const bf16*>(rope)[value - D_NOPE]);
    }
    const float code = CODE_BITS == 4 ? e2m1_to_float(data[value / 2] >> value % 2 * 4) : e4m3_to_float(data[value]);
    const float scale = scale_of_value(p.k_scale, scales, value);
    return is_zero(scale) ? 0.0f : multiply_exactly(code, scale);  // under a scale of 0 any code is 0
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS) unpack(const __grid_constant__ UnpackParams p) {
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / 32;
    if (row >= p.num_rows) return;
    const int64_t slot = load_integer(p.slots, row);
    const auto from = place_of_slot(slot, p.num_slots, p.block_size, p.block_stride, p.row_stride);
    float* to = p.out + row * p.out_stride;
#pragma unroll
    for (int i = 0; i < D_QK / 32; ++i) {
        const int value = i * 32 + lane;
        to[value] = from.data < 0 ? 0.0f : value_at(p, p.cache + from.data, p.cache + from.scales, value);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
