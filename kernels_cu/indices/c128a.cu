// Writes lists that name every compressed row that is complete at a token's position: as slots for decode tokens, as
// row numbers for prefill tokens.
//
//   one CTA   a token; neighbouring threads write neighbouring entries
#include "rows/block_table.cuh"

// The launcher declares the same fields.
struct C128aParams {
    BlockTable table;
    const int64_t* positions;     // [num_tokens]
    const int64_t* slot_mapping;  // [num_tokens]
    const int32_t* token_to_req;  // [num_tokens]
    int32_t* decode_indices;      // [>= num_decode_tokens, decode_width]
    int32_t* decode_lens;         // [>= num_decode_tokens]
    int32_t* prefill_indices;     // [>= num_tokens - num_decode_tokens, prefill_width]
    int64_t decode_stride;        // items
    int64_t prefill_stride;
    int32_t decode_width, prefill_width;
    int32_t num_decode_tokens;
    int32_t ratio;
    int32_t most;  // entries that a list may have
    int32_t unused;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) c128a(const __grid_constant__ C128aParams p) {
    const int token = blockIdx.x;
    const int64_t position = p.positions[token];
    int32_t count = position < 0 ? 0 : int32_t(min((position + 1) / p.ratio, int64_t(p.most)));
    if (token >= p.num_decode_tokens) {
        int32_t* out = p.prefill_indices + (token - p.num_decode_tokens) * p.prefill_stride;
        for (int i = threadIdx.x; i < p.prefill_width; i += THREADS) out[i] = i < count ? i : -1;
        return;
    }
    if (p.slot_mapping[token] < 0) count = 0;
    const int32_t request = p.token_to_req[token];
    const bool known = has_request(p.table, request);
    const int32_t* blocks = p.table.blocks + (known ? request : 0) * p.table.stride;
    int32_t* out = p.decode_indices + token * p.decode_stride;
    for (int i = threadIdx.x; i < p.decode_width; i += THREADS) {
        int32_t slot = -1;
        if (known && i < count) {
            const Position at = find_position(p.table, i);
            if (at.column >= 0) slot = slot_in_block(p.table, blocks[at.column], at.offset);
        }
        out[i] = slot;
    }
    if (threadIdx.x == 0) p.decode_lens[token] = count;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
