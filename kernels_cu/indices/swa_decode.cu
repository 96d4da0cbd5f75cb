// Writes the sliding window of each decode token as slots of the paged cache.
//
//   one warp   a token; neighbouring lanes have neighbouring positions, mostly of one block, and write neighbouring
//              slots
#include "indices/queries.cuh"
#include "indices/window.cuh"
#include "rows/block_table.cuh"

// The launcher declares the same fields.
struct SwaDecodeParams {
    BlockTable table;
    Queries queries;
    const int32_t* token_to_req;  // [num_tokens]
    const uint8_t* is_valid;      // [num_tokens]
    const int32_t* replay_start;  // [num_requests] first position with a row; null: 0
    const int32_t* left;          // [num_tokens] positions of the token's image before it, or null
    const int32_t* right;         // [num_tokens] and behind it
    int32_t* out;                 // [num_tokens, width]
    int32_t* lens;                // [num_tokens]
    int64_t out_stride;           // items
    int32_t window;
    int32_t width;
};

constexpr int THREADS = 32 * TOKENS_PER_BLOCK;

extern "C" __global__ void __launch_bounds__(THREADS) swa_decode(const __grid_constant__ SwaDecodeParams p) {
    const int token = (blockIdx.x * THREADS + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (token >= p.queries.num_tokens) return;
    int32_t request = -1, position = -1;
    if (p.is_valid[token]) {
        request = p.token_to_req[token];
        position = position_of(p.queries, request, token);
    }
    Window seen = {0, 0};
    if (position >= 0) {
        const bool image = p.left != nullptr;
        seen = window_of(position, p.queries.seq_lens[request], p.window,
                         p.replay_start == nullptr ? 0 : p.replay_start[request], image ? p.left[token] : 0,
                         image ? p.right[token] : 0, p.width);
    }
    const int32_t* blocks = p.table.blocks + int64_t(request) * p.table.stride;
    for (int i = lane; i < p.width; i += 32) {
        int32_t slot = -1;
        if (i < seen.length) {
            const Position at = find_position(p.table, int32_t(seen.first) + i);
            if (at.column >= 0) slot = slot_in_block(p.table, blocks[at.column], at.offset);
        }
        p.out[token * p.out_stride + i] = slot;
    }
    if (lane == 0) p.lens[token] = seen.length;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
