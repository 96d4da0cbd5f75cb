// Rounds rows of 128 values to e4m3 under a scale each, as quantize_q.cu and pack_keys.cu round the indexer's queries
// and keys. Writes the e4m3 numbers as bfloat16, which hold them exactly, and the scales.
//
//   one warp     4 rows, in 2 rounds of two: half a warp has a row. One register has the largest magnitudes of both
//                rounds, so that one set of shuffles finds both
//   a lane       loads 16 bytes of a row, and stores 16 bytes
//
// No shared memory.
#include "rows/chunk.cuh"
#include "rows/quantize.cuh"

// cupy_mla/cuda/training.py declares the same fields.
struct RoundRowsParams {
    const bf16* source;      // [outer, inner, 128]
    bf16* values;            // [outer * inner, 128]
    float* scales;           // [outer * inner]
    int64_t outer, inner;    // strides, items
    int32_t rows, of_outer;  // outer * inner, inner
    int32_t aligned;         // rows start at multiples of 16 bytes
    int32_t power_of_two;    // scales are rounded up to powers of two
    float least;             // of the largest magnitude
};

constexpr int D = 128, LANES = D / CHUNK, ROUNDS = 2, ROWS = ROUNDS * 32 / LANES;  // of a warp
constexpr int WARPS = 8, THREADS = 32 * WARPS;

extern "C" __global__ void __launch_bounds__(THREADS) round_rows(const __grid_constant__ RoundRowsParams p) {
    const int lane = threadIdx.x % LANES, half = threadIdx.x % 32 / LANES;
    const int first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS + half, step = 32 / LANES;
    Vec16 rows[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {  // behind the last row it is loaded again, but not stored
        const int row = min(first + i * step, p.rows - 1), outer = row / p.of_outer;
        rows[i] =
            load_chunk(p.source + outer * p.outer + (row - outer * p.of_outer) * p.inner + lane * CHUNK, p.aligned);
    }
    const uint32_t amax = tile_amax<LANES>(rows[0], rows[1]);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int row = first + i * step;
        if (row >= p.rows) return;
        const float ratio = scale_from_amax(fmaxf(i == 0 ? bf16_low(amax) : bf16_high(amax), p.least));
        const float scale = p.power_of_two ? power_of_two_from(ratio) : ratio;
        store_16(p.values + int64_t(row) * D + lane * CHUNK, dequantize_8(quantize_8(rows[i], scale), 1.0f));
        if (lane == 0) p.scales[row] = scale;
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
