// Keeps the entries of each query token's list that lie on this rank, as positions among the rank's tokens, in their
// order and without gaps.
//
//   one CTA   a token. 256 threads take 1024 entries at a time, four neighbours each, by one 16-byte load. Sums over
//             lanes and warps tell how many of the rank's entries stand before them, and so where they go
//
// The list may be written in place: a CTA writes only where it has read.
//
// Shared memory (static): 64 bytes, the warps' sums of two turns, so that one barrier a turn is enough.
#include "indices/ownership.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/warp.cuh"

// The launcher declares the same fields.
struct LocalizeParams {
    Ownership owner;
    const int32_t* positions;  // [tokens, width]
    int32_t* out;              // [tokens, width]; may be `positions`
    int32_t* length;           // [tokens]
    int64_t positions_stride;  // items
    int64_t out_stride;
    int32_t width;
    int32_t aligned;  // rows of positions allow loads of four
};

constexpr int THREADS = 256, WARPS = THREADS / 32, WIDE = 4;

__shared__ int32_t warp_sums[2][WARPS];

// Four neighbouring entries, -1 behind the row's end.
__device__ __forceinline__ int4 load_entries(const LocalizeParams& p, const int32_t* row, int at) {
    if (p.aligned && at + WIDE <= p.width) return *reinterpret_cast<const int4*>(row + at);
    return {at < p.width ? row[at] : -1, at + 1 < p.width ? row[at + 1] : -1, at + 2 < p.width ? row[at + 2] : -1,
            at + 3 < p.width ? row[at + 3] : -1};
}

extern "C" __global__ void __launch_bounds__(THREADS) localize(const __grid_constant__ LocalizeParams p) {
    let_next_kernel_start();
    wait_for_earlier_kernels();
    const int32_t* row = p.positions + blockIdx.x * p.positions_stride;
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    int count = 0, turn = 0;
    for (int begin = 0; begin < p.width; begin += WIDE * THREADS, turn ^= 1) {
        const int4 four = load_entries(p, row, begin + WIDE * threadIdx.x);
        const int32_t local[WIDE] = {local_position(p.owner, four.x), local_position(p.owner, four.y),
                                     local_position(p.owner, four.z), local_position(p.owner, four.w)};
        const int mine = (local[0] >= 0) + (local[1] >= 0) + (local[2] >= 0) + (local[3] >= 0);
        int total;
        int place = count + cta_sum_before(mine, warp_sums[turn], total);
#pragma unroll
        for (int i = 0; i < WIDE; ++i)
            if (local[i] >= 0) out[place++] = local[i];
        count += total;
    }
    for (int at = count + threadIdx.x; at < p.width; at += THREADS) out[at] = -1;
    if (threadIdx.x == 0) p.length[blockIdx.x] = count;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
