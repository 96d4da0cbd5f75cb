// Copying rows that an index list names into shared memory, a warp at a time.
#pragma once
#include "layout/paged.cuh"
#include "ptx/cp_async.cuh"

// Lane r < ROWS of a warp holds the address of row r, null where the entry is invalid. All lanes then copy all rows
// in 16-byte pieces, consecutive lanes consecutive pieces; `to(row, chunk)` says where a piece goes. Pieces of invalid
// rows are written as zeros, and nothing is read for them.
template <int ROWS, int CHUNKS, typename To>
__device__ __forceinline__ void gather_chunks(const uint8_t* row, To to) {
    const int lane = threadIdx.x % 32;
#pragma unroll 3
    for (int i = 0; i < ceil_div(ROWS * CHUNKS, 32); ++i) {
        const int piece = i * 32 + lane, r = piece / CHUNKS, c = piece % CHUNKS;
        const uint8_t* from = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(row), r));
        if (ROWS * CHUNKS % 32 == 0 || piece < ROWS * CHUNKS) {
            cp_async_16(to(r, c), from + 16 * c, from != nullptr);
        }
    }
}
