// Writes what a rank passes on of the keys that it chose: their logits, and their positions in the request.
//
//   grid         x: token, y: THREADS entries of its list
//   one thread   an entry
#include "indices/ownership.cuh"
#include "ptx/griddepcontrol.cuh"

// The launcher declares the same fields.
struct GlobalizeParams {
    Ownership owner;
    const float* logits;                                                 // [tokens, keys]
    const int32_t* positions;                                            // [tokens, width] of the rank's tokens
    float* values;                                                       // [tokens, width]
    int32_t* out;                                                        // [tokens, width]
    int64_t logits_stride, positions_stride, values_stride, out_stride;  // items
    int32_t keys, width;
};

constexpr int THREADS = ENTRIES_PER_BLOCK;

extern "C" __global__ void __launch_bounds__(THREADS) globalize(const __grid_constant__ GlobalizeParams p) {
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int64_t token = blockIdx.x;
    const int at = blockIdx.y * THREADS + threadIdx.x;
    if (at >= p.width) return;
    const int32_t position = p.positions[token * p.positions_stride + at];
    const bool valid = uint32_t(position) < uint32_t(p.keys);
    p.values[token * p.values_stride + at] = valid ? p.logits[token * p.logits_stride + position] : -INF;
    p.out[token * p.out_stride + at] = valid ? global_position(p.owner, position) : -1;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
