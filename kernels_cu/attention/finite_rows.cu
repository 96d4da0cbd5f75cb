// Tells which rows, or which query tokens, have no NaN and no infinity (backward_groups.cu).
//
//   one warp   a row of kv; or a token's heads of q and of dO. A CTA has ITEMS warps
#include "ptx/global.cuh"
#include "rows/chunk.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 32 * ITEMS;

// cupy_mla/cuda/query_groups.py declares the same fields.
struct FiniteParams {
    const bf16* x;                                     // [count, heads, D_QK]: kv or q
    const bf16* dout;                                  // [count, heads, D_V], or null
    uint8_t* finite;                                   // [count]
    int64_t x_stride, x_head, dout_stride, dout_head;  // items; multiples of CHUNK, as addresses are
    int32_t count, heads;
};

__device__ __forceinline__ bool finite_pair(uint32_t x) {
    return (x & 0x7f80) != 0x7f80 && (x & 0x7f800000) != 0x7f800000;
}

// Whether this lane's chunks of WIDTH values are finite.
template <int WIDTH>
__device__ __forceinline__ bool finite_chunks(const bf16* from, int lane) {
    bool finite = true;
#pragma unroll
    for (int at = 0; at < WIDTH; at += 32 * CHUNK) {
        if (at + CHUNK * lane >= WIDTH) break;
        const Vec16 v = load_chunk(from + at + CHUNK * lane, true);
        finite &= finite_pair(v.x) && finite_pair(v.y) && finite_pair(v.z) && finite_pair(v.w);
    }
    return finite;
}

extern "C" __global__ void __launch_bounds__(THREADS) finite_rows(const __grid_constant__ FiniteParams p) {
    const int lane = threadIdx.x % 32;
    const int64_t item = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (item >= p.count) return;
    bool finite = true;
    for (int head = 0; head < p.heads; ++head) {
        finite &= finite_chunks<D_QK>(p.x + item * p.x_stride + head * p.x_head, lane);
        if (p.dout != nullptr) finite &= finite_chunks<D_V>(p.dout + item * p.dout_stride + head * p.dout_head, lane);
    }
    finite = __all_sync(~0u, finite);
    if (lane == 0) p.finite[item] = finite;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
