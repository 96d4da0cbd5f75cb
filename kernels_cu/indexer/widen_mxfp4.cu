// Widens rows of 128 MXFP4 values to e5m2 under one factor a row (rows/mxfp4.cuh says what is exact).
//
//   8 lanes    a row: each loads 8 bytes of codes and stores 16 bytes of e5m2. The first of them stores the factor,
//              times the row's weight if there are weights
//
// Rows of codes start at multiples of 4 bytes. No shared memory.
#include "rows/mxfp4.cuh"

// The launcher declares the same fields.
struct WidenParams {
    const uint8_t* codes;   // [rows, 64]
    const uint8_t* scales;  // [rows, 4]
    const float* weights;   // [rows], or null
    uint8_t* out;           // [rows, 128] e5m2
    float* factors;         // [rows]
    int64_t rows;
    int64_t codes_outer, codes_inner, scales_outer, scales_inner;  // strides, bytes
    int64_t weights_outer, weights_inner;                          // strides, items
    int32_t inner;                                                 // row r is [r / inner, r % inner]
    int32_t unused;
};

constexpr int THREADS = 256, LANES = 8, ROWS = THREADS / LANES, LANES_OF_GROUP = MXFP4_GROUP / 16;

extern "C" __global__ void __launch_bounds__(THREADS) widen_mxfp4(const __grid_constant__ WidenParams p) {
    const int lane = threadIdx.x % LANES;
    const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES;
    if (row >= p.rows) return;
    const int64_t outer = row / p.inner, inner = row - outer * p.inner;
    const auto* codes = reinterpret_cast<const uint32_t*>(p.codes + outer * p.codes_outer + inner * p.codes_inner);
    const uint8_t* bytes = p.scales + outer * p.scales_outer + inner * p.scales_inner;
    const uint32_t scales = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | uint32_t(bytes[3]) << 24;
    const uint32_t largest = largest_scale(scales), scale = scales >> lane / LANES_OF_GROUP * 8 & 255;
    const Magnitudes of = magnitudes_of(largest - scale);
    const Vec8 low = widen_e2m1_8(codes[2 * lane], of), high = widen_e2m1_8(codes[2 * lane + 1], of);
    *reinterpret_cast<Vec16*>(p.out + row * 128 + 16 * lane) = {low.x, low.y, high.x, high.y};
    if (lane > 0) return;
    const float factor = factor_of_scales(largest);
    const bool weighted = p.weights != nullptr;
    const float weight = weighted ? p.weights[outer * p.weights_outer + inner * p.weights_inner] : 1.0f;
    p.factors[row] = weighted ? multiply_exactly(weight, factor) : factor;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
