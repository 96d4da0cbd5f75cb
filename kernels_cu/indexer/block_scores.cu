// Scores of candidate blocks. A block is 8 neighbouring logits of a row's range, and its score is the largest of them.
// A block with a NaN, and the last block of the range, get +inf. The kernel `topk` then chooses the largest scores;
// `counts` tells it how many blocks each row has.
//
//   one thread   a block: 8 logits, by two 16-byte loads where rows and the row's range allow them
//
// No shared memory.
#include "indexer/topk/row_range.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"

// The launcher declares the same fields.
struct BlockScoresParams {
    const float* logits;    // [rows, width]
    const int32_t* starts;  // `starts` and `ends` are as in TopkParams
    const int32_t* ends;
    float* scores;                                      // [rows, blocks of `width`]
    int32_t* counts;                                    // [rows] blocks of a row
    int64_t logits_stride, scores_stride, lens_stride;  // items
    int32_t rows, width, queries;
    int32_t ctas_of_row;
    int32_t aligned;  // rows allow loads of four logits
    int32_t unused;
};

constexpr int THREADS = 256, BLOCK = 8;

extern "C" __global__ void __launch_bounds__(THREADS) block_scores(const __grid_constant__ BlockScoresParams p) {
    const int row = blockIdx.x / p.ctas_of_row, number = blockIdx.x % p.ctas_of_row * THREADS + threadIdx.x;
    const Range range = range_of_row(p, row);
    const int blocks = ceil_div(range.end - range.begin, BLOCK);
    if (number == 0) p.counts[row] = blocks;
    if (number >= blocks) return;
    float score = INF;
    if (number < blocks - 1) {  // the last one may have fewer logits
        const int64_t at = row * p.logits_stride + range.begin + number * BLOCK;
        float logits[BLOCK];
        if (p.aligned && range.begin % 4 == 0) {
#pragma unroll
            for (int i = 0; i < BLOCK; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(p.logits + at + i);
                logits[i] = four.x, logits[i + 1] = four.y, logits[i + 2] = four.z, logits[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; ++i) logits[i] = p.logits[at + i];
        }
        float largest = logits[0];
#pragma unroll
        for (int i = 1; i < BLOCK; ++i) largest = max_or_nan(largest, logits[i]);
        if (largest == largest) score = largest;
    }
    p.scores[row * p.scores_stride + number] = score;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
