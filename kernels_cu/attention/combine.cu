// Merges the partial results of split rows:  out = sum_i 2^(lse_i - lse) out_i,  lse = log2 sum_i 2^lse_i.
//
//   grid    x query, y head
//   block   128 threads, 4 output columns each; AT_ONCE splits' loads are under way at a time
//
// Splits are added in their order, so the bits do not depend on who finished first.
#include "attention/params.cuh"
#include "ptx/grid.cuh"
#include "tile/finish.cuh"

constexpr int THREADS = D_V / 4, AT_ONCE = 8;

// Loads where `here`, else zeros, in the order in which they are written here: ptxas puts others off until there are registers
// to spare.
__device__ __forceinline__ Vec16 load_in_order_16(const float* from, bool here) {
    Vec16 v = {0, 0, 0, 0};
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(uint32_t(here)));
    return v;
}
__device__ __forceinline__ float load_in_order(const float* from, bool here) {
    float v = -INF;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p ld.relaxed.gpu.global.f32 %0, [%1];\n"
        "}\n"
        : "+f"(v)
        : "l"(from), "r"(uint32_t(here)));
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ AttentionParams p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Query q = query_at_once(p, blockIdx.x);
    const int head = blockIdx.y;
    const int64_t first = int64_t(q.index) * p.h_q + head, step = int64_t(p.num_queries) * p.h_q;
    const float* lses = p.part_lse + first;
    const float* parts = p.part_out + first * D_V + 4 * threadIdx.x;

    float top = -INF, sum = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int base = 0; base < p.num_splits; base += AT_ONCE) {
        float lse[AT_ONCE];
        Vec16 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t at = (base + i) * step;
            const bool here = base + i < p.num_splits;
            v[i] = load_in_order_16(parts + at * D_V, here);
            lse[i] = load_in_order(lses + at, here);
        }
        float new_top = top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) new_top = fmaxf(new_top, lse[i]);
        // Without branches, so that nothing waits for lse before it is loaded.
        const float old = top == -INF ? 0.0f : exp2_approx(top - new_top);
        top = new_top;
        sum *= old;
#pragma unroll
        for (int k = 0; k < 4; ++k) o[k] *= old;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool there = lse[i] != -INF;  // not an empty split, whose part_out was never written
            const float weight = there ? exp2_approx(lse[i] - top) : 0.0f;
            sum += weight;
            o[0] += there ? weight * __uint_as_float(v[i].x) : 0.0f;
            o[1] += there ? weight * __uint_as_float(v[i].y) : 0.0f;
            o[2] += there ? weight * __uint_as_float(v[i].z) : 0.0f;
            o[3] += there ? weight * __uint_as_float(v[i].w) : 0.0f;
        }
    }
    float max = -INF;
    if (p.part_max != nullptr && threadIdx.x == 0) {
        for (int i = 0; i < p.num_splits; ++i) max = fmaxf(max, p.part_max[first + i * step]);
    }
    const HeadResult r = {max, sum == 0.0f ? -INF : top + log2_approx(sum)};
    const float factor = sum == 0.0f ? 0.0f : sink_factor(p, head, r.lse) / sum;
    // Parts of the kernel for FP8 rows: two pairs of columns, 64 apart.
    const bool paired = p.flags & PAIRED_PARTS;
    const int column = paired ? threadIdx.x / 32 * 128 + threadIdx.x % 32 * 2 : 4 * threadIdx.x;
    write_output(p, q, head, column, o[0] * factor, o[1] * factor);
    write_output(p, q, head, column + (paired ? 64 : 2), o[2] * factor, o[3] * factor);
    if (threadIdx.x == 0) write_statistics(p, q, head, r);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
