// Part of bf16_sm90: the epilogue of a work item.
#pragma once
#include "attention/bf16_sm90/scores.cuh"

// A line's softmax over the tiles of both warpgroups.
struct LineTotal {
    float ref, sum, max;
};

// The total of a thread's i-th line. `turn`: the number (mod 2) of the work item in this CTA.
template <typename K>
__device__ __forceinline__ LineTotal line_total(int warp, int lane, int turn, const Softmax& state, int i) {
    const Small& sm = small<K>();
    const int row = 16 * warp + lane / 4 + 8 * i;
    return {state.ref[i], sm.sum[turn][0][row] + sm.sum[turn][1][row],
            fmaxf(sm.max[turn][0][row], sm.max[turn][1][row])};
}

// Writes a work item's statistics and a warpgroup's half of the output. `total_of(i)` returns the LineTotal of a
// thread's i-th line. Code after a main loop is fetched from memory, so the usual path is short and contiguous: output
// alignment is tested once, not for each chunk.
template <typename K, typename Total>
__device__ __forceinline__ void write_lines(const typename K::Params& p, const Work& w, int warpgroup, int warp,
                                            int lane, Total total_of, const float (&o)[128]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Line line = K::line_at(p, w, w.head_tile * HEADS + 16 * warp + g + 8 * i);
        const LineTotal total = total_of(i);
        const HeadResult result = {total.max, log2_sum_exp(total.ref, total.sum)};
        // All lanes of the quad agree, and all take part in the shuffles.
        const bool here = line.head < p.h_q && (HEADS == LINES || 16 * warp < HEADS);
        const float scale = !here || total.sum == 0.0f ? 0.0f : sink_factor(p, line.head, result.lse) / total.sum;
        bf16* out = out_of(p, line.query, line.head, 256 * warpgroup);
        auto pack = [&](int j) { return pack_items(o[4 * j + 2 * i] * scale, o[4 * j + 2 * i + 1] * scale); };
        if (p.flags & WIDE_OUT) {
            Vec16* to = reinterpret_cast<Vec16*>(out) + t;
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                uint32_t packed[4] = {pack(j), pack(j + 1), pack(j + 2), pack(j + 3)};
                transpose_quad(packed, t);
                if (here) to[j] = {packed[0], packed[1], packed[2], packed[3]};
            }
        } else if (here) {
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                const uint32_t packed = pack(j);
                out[8 * j + 2 * t] = bf16(packed);
                out[8 * j + 2 * t + 1] = bf16(packed >> 16);
            }
        }
        if (warpgroup == 0 && t == 0 && here) write_statistics(p, line.query, line.head, result);
    }
}

// The end of a work item in a consumer warpgroup.
template <typename K>
__device__ __forceinline__ void finish(const typename K::Params& p, const Work& w, int turn, const Softmax& state,
                                       float (&o)[128]) {
    Small& sm = small<K>();
    const int thread =
        read_thread_index();  // read anew, so that nothing derived from it occupies registers in the loop
    const int warpgroup = thread / WARPGROUP, warp = thread / 32 % 4, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(state.sum[i]), max = quad_max(state.max[i]);
        if (t == 0) {
            sm.sum[turn][warpgroup][16 * warp + g + 8 * i] = sum;
            sm.max[turn][warpgroup][16 * warp + g + 8 * i] = max;
        }
    }
    sync_consumers();
    auto total_of = [&](int i) { return line_total<K>(warp, lane, turn, state, i); };
    K::write(p, w, warpgroup, warp, lane, total_of, o);
}
