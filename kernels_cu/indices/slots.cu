// Converts positions in requests to slots of a paged cache, as int64. One thread a position. No shared memory.
#include "rows/block_table.cuh"
#include "rows/integers.cuh"

// The launcher declares the same fields.
struct SlotsParams {
    BlockTable table;
    Integers positions;          // [num_rows, k]
    const int32_t* request_ids;  // [num_rows], or null: row r is of request r
    int64_t* out;                // [num_rows, k]
    int64_t positions_stride;    // items
    int64_t out_stride;
    int64_t total;  // num_rows * k
    int64_t k;
};

constexpr int THREADS = POSITIONS_PER_BLOCK;

// -1 where the position is negative or beyond the request's row of the table, or has no block.
__device__ __forceinline__ int64_t find_slot_of(const BlockTable& t, int32_t request, int64_t position) {
    if (!has_request(t, request) || position < 0) return -1;
    const int64_t size = t.block_size.value, column = position / size;
    if (column >= t.width) return -1;
    const int64_t block = t.blocks[request * t.stride + column];
    return block < 0 ? -1 : block * size + position - column * size;
}

extern "C" __global__ void __launch_bounds__(THREADS) slots(const __grid_constant__ SlotsParams p) {
    const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= p.total) return;
    const int64_t row = index / p.k, at = index - row * p.k;
    const int32_t request = p.request_ids == nullptr ? int32_t(row) : p.request_ids[row];
    p.out[row * p.out_stride + at] =
        find_slot_of(p.table, request, load_integer(p.positions, row * p.positions_stride + at));
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
