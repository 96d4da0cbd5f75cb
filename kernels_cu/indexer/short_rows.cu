// The k largest of rows that have at most k logits: all of them, in order, whatever they are. Logits are not read. The
// parameters are those of `topk`.
//
//   grid      x: row, y: RESULTS of its k results
//   a thread  stores FOURS times four neighbouring results. The loads of the row's end and of its positions' blocks
//             are under way together: results wait for one load, or with `requests` for two
//
// No shared memory.
#include "indexer/topk/short_row.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int THREADS = 256, FOURS = RESULTS / (4 * THREADS);
static_assert(FOURS * 4 * THREADS == RESULTS, "");

template <typename Four>
__device__ __forceinline__ void store_results(const TopkParams& p, const int32_t* blocks) {
    const int row = blockIdx.x, first = blockIdx.y * RESULTS + threadIdx.x * 4;
    Four fours[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) fours[i].load(p.table, blocks, first + i * THREADS * 4);
    const Range range = columns_of_row(p, row);
#pragma unroll
    for (const Four& four : fours) {
        if (four.at < p.k) four.store(p.table, p.out + row * p.out_stride, range.end - range.begin, p.k);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) short_rows(const __grid_constant__ TopkParams p) {
    let_next_kernel_start();
    wait_for_earlier_kernels();
    if (p.table.blocks == nullptr) {
        store_results<FourPositions>(p, nullptr);
    } else {
        store_results<FourSlots>(p, blocks_of_row(p, blockIdx.x));
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
