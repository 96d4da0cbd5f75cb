// Writes a prefill token's list of workspace rows: the compressed rows that its indexer chose, then its sliding
// window.
//
//   one CTA   a token; neighbouring threads write neighbouring entries of its list
#include "indices/queries.cuh"
#include "indices/window.cuh"

// The launcher declares the same fields.
struct CombineSwaParams {
    Queries queries;
    const int32_t* chosen;       // [num_tokens, >= topk] compressed positions
    const int32_t* gather_lens;  // [num_requests]
    const int32_t* left;         // [num_tokens] positions of the token's image before it, or null
    const int32_t* right;        // [num_tokens] and behind it
    int32_t* out;                // [num_tokens, width]
    int32_t* lens;               // [num_tokens]
    int64_t chosen_stride;       // items
    int64_t out_stride;
    int32_t window;
    int32_t most;   // entries that a window may have
    int32_t ratio;  // 0: no compressed rows
    int32_t topk;
    int32_t rows;             // of the workspace, for each request
    int32_t compressed_rows;  // the first ones of these; the others are gathered tokens
    int32_t width;
    int32_t unused;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) combine_swa(const __grid_constant__ CombineSwaParams p) {
    const int32_t token = p.queries.starts[0] + int32_t(blockIdx.x);
    const int32_t request = request_of(p.queries, token), position = position_of(p.queries, request, token);
    int32_t compressed = 0, window = 0, first_row = 0;
    int64_t tail = 0;  // number of the window's first token among the gathered ones
    if (position >= 0) {
        const bool image = p.left != nullptr;
        const int32_t seq_len = p.queries.seq_lens[request];
        const int64_t gathered = int64_t(seq_len) - p.gather_lens[request];
        const Window seen = window_of(position, seq_len, p.window, gathered, image ? p.left[blockIdx.x] : 0,
                                      image ? p.right[blockIdx.x] : 0, p.most);
        if (p.ratio > 0) compressed = min(int32_t((uint32_t(position) + 1u) / uint32_t(p.ratio)), p.topk);
        window = seen.length;
        first_row = request * p.rows;
        tail = seen.first - gathered;
    }
    const int32_t* chosen = p.chosen + blockIdx.x * p.chosen_stride;
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    for (int i = threadIdx.x; i < p.width; i += THREADS) {
        int32_t row = -1;
        if (i < compressed) {
            const int32_t entry = chosen[i];
            if (uint32_t(entry) < uint32_t(p.compressed_rows)) row = first_row + entry;
        } else if (i < compressed + window) {
            const int64_t gathered = tail + (i - compressed);
            if (gathered < p.rows - p.compressed_rows) row = first_row + p.compressed_rows + int32_t(gathered);
        }
        out[i] = row;
    }
    if (threadIdx.x == 0) p.lens[blockIdx.x] = compressed + window;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
