// Concatenates NoPE and RoPE values of every query head: [.., 512] and [.., 64] become [.., 576].
//
//   one warp     4 output rows of 72 chunks of 16 bytes: 9 chunks a lane
//     find       lane l computes the addresses of row l % 4, the others get them by shuffle
//     copy       every lane starts 9 loads, then 9 stores; neighbouring lanes have neighbouring chunks
//
// A CTA of 256 threads has 36 KB under way. No shared memory.
#include "rows/chunk.cuh"
#include "tile/warp.cuh"

// The launcher declares the same fields.
struct ConcatParams {
    const bf16* nope;        // [T, heads, 512]
    const bf16* rope;        // [T, heads, 64]
    bf16* out;               // [T, heads, 576]
    int64_t nope_t, nope_h;  // strides in items
    int64_t rope_t, rope_h;
    int64_t out_t, out_h;
    int64_t num_rows;  // T * heads
    int32_t heads;
    int32_t aligned;  // all three arrays allow 16-byte accesses
};

constexpr int ROWS = 4, THREADS = 32 * (ROWS_PER_BLOCK / ROWS);
constexpr int NOPE_CHUNKS = D_NOPE / CHUNK, ROW_CHUNKS = D_QK / CHUNK, ROUNDS = ROWS * ROW_CHUNKS / 32;
static_assert(ROWS * ROW_CHUNKS % 32 == 0, "every lane has as many chunks");

extern "C" __global__ void __launch_bounds__(THREADS) concat_q(const __grid_constant__ ConcatParams p) {
    const int lane = threadIdx.x % 32;
    const int64_t first = (int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32) * ROWS;
    if (first >= p.num_rows) return;
    const int64_t row = min(first + lane % ROWS, p.num_rows - 1);
    const int64_t t = row / p.heads, h = row % p.heads;
    const bf16* my_nope = p.nope + t * p.nope_t + h * p.nope_h;
    const bf16* my_rope = p.rope + t * p.rope_t + h * p.rope_h;
    bf16* my_out = p.out + t * p.out_t + h * p.out_h;

    Vec16 v[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int chunk = i * 32 + lane, r = chunk / ROW_CHUNKS, c = chunk % ROW_CHUNKS;
        const bf16 *nope = shuffle_pointer(my_nope, r), *rope = shuffle_pointer(my_rope, r);
        v[i] = load_chunk(c < NOPE_CHUNKS ? nope + c * CHUNK : rope + (c - NOPE_CHUNKS) * CHUNK, p.aligned);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int chunk = i * 32 + lane, r = chunk / ROW_CHUNKS, c = chunk % ROW_CHUNKS;
        bf16* to = shuffle_pointer(my_out, r);
        if (first + r < p.num_rows) store_chunk(to + c * CHUNK, v[i], p.aligned);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
