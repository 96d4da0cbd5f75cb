// Merges the partial results of dense_sm90.cu, or of dense_fp8_sm90.cu (FP8_PARTIALS): of a line, over the shares that have a part of its item,
//
//   out = sum_i 2^(ref_i - ref) O_i / sum_i 2^(ref_i - ref) sum_i
//
//   1. A CTA finds the items that are cut: those that a share begins and does not end.
//   2. A line of them is merged by a warp, or, where items are cut anywhere and lines are few, by all warps of a CTA. A
//      lane has two chunks of 8 columns of each partial result. A warp takes 32 partial results at a time, or every
//      WARPS-th.
//
// Partial results are added in the order of shares: the bits do not depend on who was first.
//
// grid: x CTAs, which take lines in turn.
#if FP8_PARTIALS
#include "attention/fp8_sm90/chunks.cuh"
#else
#include "attention/bf16_sm90/chunks.cuh"
#endif
#include "attention/division/merge.cuh"
#include "attention/division/request_shares.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int LINES = HEADS;  // of a work item
constexpr int WARPS = 8, COMBINERS = 32 * WARPS, LANE_CHUNKS = 2;
constexpr int AT_ONCE = 4;  // partial results whose chunks a lane loads at a time

struct Shared {
    Boundary ends[MOST_SHARES];    // of the shares, where items are cut anywhere
    uint16_t firsts[MOST_SHARES];  // the shares that begin an item and do not end it
    int found[WARPS];              // by each warp
    float ref[WARPS], sum[WARPS];  // of a line that all warps merge
    float o[WARPS][8 * LANE_CHUNKS][32];
};
__shared__ Shared sm;

// An item that is cut: it has parts of `count` shares from `first` on.
struct Cut {
    int item, first, count;
};

// Finds the items that are cut, in their order. Returns how many they are. All threads call.
__device__ __forceinline__ int find_cuts(const DenseParams& p, int shares) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int total = 0;
#pragma unroll 1
    for (int base = 0; base < shares; base += COMBINERS) {
        const int share = base + threadIdx.x;
        const int4 of = share < shares ? __ldcg(p.shares + share) : make_int4(0, 0, 0, 0);
        const bool begins_cut = of.w > 0 && (of.x != of.z || of.y == 0);
        if (share < shares) sm.ends[share] = {of.z, of.w};
        const uint32_t found = __ballot_sync(~0u, begins_cut);
        if (lane == 0) sm.found[warp] = __popc(found);
        __syncthreads();
        int before = total;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            if (i < warp) before += sm.found[i];
            total += sm.found[i];
        }
        if (begins_cut) sm.firsts[before + __popc(found & (1u << lane) - 1)] = share;
        __syncthreads();
    }
    return total;
}

// The n-th of them. All lanes of a warp call.
__device__ __forceinline__ Cut cut_of(int n, int lane) {
    const int first = sm.firsts[n], item = sm.ends[first].item;
#pragma unroll 1
    for (int base = first + 1;; base += 32) {
        const uint32_t others = __ballot_sync(~0u, sm.ends[min(base + lane, MOST_SHARES - 1)].item != item);
        if (others != 0) return {item, first, base + __ffs(others) - first};
    }
}

// The sum of a line's partial results so far, relative to `ref`.
struct Merged {
    float ref = -INF, sum = 0.0f, o[LANE_CHUNKS][8] = {};
};

// Merges partial results `begin`, begin + step, ... of a line of a cut item, 32 at a time.
__device__ __forceinline__ Merged merge(const DenseParams& p, const Cut& cut, int line, int begin, int step,
                                        int lane) {
    Merged m;
    const int chunks[LANE_CHUNKS] = {chunk_of_line(line, lane), chunk_of_line(line, lane + 32)};
    float4 loaded[AT_ONCE][LANE_CHUNKS];
    auto partial = [&](int i) { return partial_of(p, cut.first + i, i + 1 < cut.count); };
    auto load = [&](int first) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
#pragma unroll
            for (int c = 0; c < LANE_CHUNKS; ++c) {
                loaded[k][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (first + k * step >= cut.count) continue;
                const PartialResults<8> of = partial(first + k * step);
                loaded[k][c] = of.chunk_of(of.rank, chunks[c]);
            }
        }
    };
#pragma unroll 1
    for (int base = begin; base < cut.count; base += 32 * step) {
        load(base);  // before they are weighed, so that both are under way at a time
        const int mine = base + lane * step;
        float4 statistics = make_float4(-INF, 0.0f, -INF, 1.0f);
        if (mine < cut.count) {
            const PartialResults<8> of = partial(mine);
            statistics = of.statistics_of(of.rank, line);
        }
        const float ref = fmaxf(m.ref, rows_max(quad_max(statistics.x)));
        const float weight = rescale_factor(statistics.x, ref), old = rescale_factor(m.ref, ref);
        m.sum = m.sum * old + rows_sum(quad_sum(weight * statistics.y));
        m.ref = ref;
#pragma unroll
        for (int c = 0; c < LANE_CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) m.o[c][i] *= old;
        }
        const float factor = weight * statistics.w;
        const int end = min(cut.count, base + 32 * step);
#pragma unroll 1
        for (int first = base, n = 0; first < end; n += AT_ONCE) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const float by = __shfl_sync(~0u, factor, n + k);
#pragma unroll
                for (int c = 0; c < LANE_CHUNKS; ++c) add_chunk(m.o[c], by, loaded[k][c]);
            }
            first += AT_ONCE * step;
            if (first < end) load(first);
        }
    }
    return m;
}
static_assert(32 % AT_ONCE == 0, "they are loaded for 32 partial results");

// The line of the call that is line `line` of an item.
__device__ __forceinline__ Line line_of(const DenseParams& p, const Cut& cut, int line) {
    return line_of_request(p, query_of_item(p, cut.item), head_tile_of_item(p, cut.item) * LINES + line);
}

// What O is multiplied with in the end. With `write` it writes the line's statistics.
__device__ __forceinline__ float finish_line(const DenseParams& p, const Line& of, float ref, float sum, bool write) {
    const HeadResult result = {ref, log2_sum_exp(ref, sum)};
    if (write) write_statistics(p, of.query, of.head, result);
    return sum == 0.0f ? 0.0f : sink_factor(p, of.head, result.lse) / sum;
}

// A warp writes a line.
__device__ __forceinline__ void write_line(const DenseParams& p, const Line& of, int line, const Merged& m, int lane) {
    const float by = finish_line(p, of, m.ref, m.sum, lane == 0);
#pragma unroll
    for (int c = 0; c < LANE_CHUNKS; ++c) {
        const int column = column_of_chunk(chunk_of_line(line, lane + 32 * c));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            write_output(p, of.query, of.head, column + COLUMNS_APART * i, m.o[c][2 * i] * by, m.o[c][2 * i + 1] * by);
    }
}

// The warps of a CTA, each of which has merged some of the partial results, write a line, two values a lane each.
__device__ __forceinline__ void write_line_together(const DenseParams& p, const Line& of, int line, const Merged& m,
                                                    int warp, int lane) {
    __syncthreads();  // of the line before
    if (lane == 0) sm.ref[warp] = m.ref, sm.sum[warp] = m.sum;
#pragma unroll
    for (int i = 0; i < 8 * LANE_CHUNKS; ++i) sm.o[warp][i][lane] = m.o[i / 8][i % 8];
    __syncthreads();
    float ref = -INF, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) ref = fmaxf(ref, sm.ref[i]);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        const float by = rescale_factor(sm.ref[i], ref);
        sum += by * sm.sum[i];
        x += by * sm.o[i][2 * warp][lane];
        y += by * sm.o[i][2 * warp + 1][lane];
    }
    const float by = finish_line(p, of, ref, sum, threadIdx.x == 0);
    const int column = column_of_chunk(chunk_of_line(line, lane + 32 * (warp / 4))) + COLUMNS_APART * (warp % 4);
    write_output(p, of.query, of.head, column, x * by, y * by);
}
static_assert(2 * WARPS == 8 * LANE_CHUNKS, "a warp has two of a lane's values");

extern "C" __global__ void __launch_bounds__(COMBINERS) dense_combine(const __grid_constant__ DenseParams p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int item_lines = min(LINES, p.h_q);
    const bool split = p.num_splits > 1;  // each item, alike
    const int items = p.num_queries * num_head_tiles(p);
    const int cuts = split ? items : find_cuts(p, p.num_shares);
    auto find = [&](int n) { return split ? Cut{n, n * p.num_splits, p.num_splits} : cut_of(n, lane); };
    // Items without rows have no partial results.
    auto is_left = [&](const Cut& cut) { return !split || __ldcg(p.shares + cut.first).w > 0; };
    const int units = cuts * item_lines;
    // Equal splits are those of batch-invariant calls, too, whose bits do not depend on how many lines there are.
    const bool together = !split && units <= int(gridDim.x);
    const int step = together ? int(gridDim.x) : int(gridDim.x) * WARPS;
#pragma unroll 1
    for (int unit = together ? blockIdx.x : blockIdx.x * WARPS + warp; unit < units; unit += step) {
        const int line = unit % item_lines;
        const Cut cut = find(unit / item_lines);
        const Line of = line_of(p, cut, line);
        if (of.head >= p.h_q || !is_left(cut)) continue;
        const Merged m = merge(p, cut, line, together ? warp : 0, together ? WARPS : 1, lane);
        if (together) {
            write_line_together(p, of, line, m, warp, lane);
        } else {
            write_line(p, of, line, m, lane);
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = COMBINERS;
extern "C" __device__ int kernel_shared_bytes = 0;
