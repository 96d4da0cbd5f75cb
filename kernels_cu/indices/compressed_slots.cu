// Writes the slot of the compressed row that a query token completes. -1: it completes none, the token itself has no
// slot, or the row is another rank's. One thread an entry of `out`.
#include "indices/ownership.cuh"
#include "indices/queries.cuh"

// The launcher declares the same fields.
struct CompressedSlotsParams {
    BlockTable table;
    Queries queries;
    Ownership owner;              // of compressed rows
    const int64_t* slot_mapping;  // [>= num_tokens] slots of the tokens themselves, or null
    int64_t* out;                 // [size]
    int32_t size;
    int32_t ratio;
};

constexpr int THREADS = TOKENS_PER_BLOCK;

extern "C" __global__ void __launch_bounds__(THREADS)
    compressed_slots(const __grid_constant__ CompressedSlotsParams p) {
    const int32_t token = blockIdx.x * THREADS + threadIdx.x;
    if (token >= p.size) return;
    int64_t slot = -1;
    if (token < p.queries.num_tokens && (p.slot_mapping == nullptr || p.slot_mapping[token] >= 0)) {
        const int32_t request = request_of(p.queries, token), position = position_of(p.queries, request, token);
        const uint32_t ratio = uint32_t(p.ratio), end = uint32_t(position) + 1u;
        if (position >= 0 && end % ratio == 0) {
            const Position at = find_position(p.table, local_position(p.owner, int32_t(end / ratio) - 1));
            if (at.column >= 0) {
                const int32_t block = p.table.blocks[request * p.table.stride + at.column];
                if (block >= 0) slot = int64_t(block) * p.table.block_size.value + at.offset;
            }
        }
    }
    p.out[token] = slot;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
