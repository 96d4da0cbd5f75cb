// Merges the partial results of dense_sm90.cu, or of dense_fp8_sm90.cu (FP8_PARTIALS). For each line it sums over the
// shares that have a part of the line's work item:
//
//   out = sum_i 2^(ref_i - ref) O_i / sum_i 2^(ref_i - ref) sum_i
//
//   1. Each CTA finds the items that are cut: those that a share begins and does not end.
//   2. A warp merges a unit: some columns of GROUP_LINES lines, whose chunks are neighbours in memory. If there are
//     few units, all warps of a CTA merge one together: each takes every WARPS-th partial result.
//
// Partial results are added in the order of the shares, so the bits do not depend on which share was first.
//
// grid: x CTAs, which take units in turn.
#if FP8_PARTIALS
#include "attention/fp8_sm90/chunks.cuh"
#else
#include "attention/bf16_sm90/chunks.cuh"
#endif
#include "attention/division/merge.cuh"
#include "attention/division/request_shares.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int LINES = HEADS;  // of a work item
constexpr int WARPS = 8, COMBINERS = 32 * WARPS;
constexpr int LANE_LOADS = 8;  // chunks that a lane loads at a time
// Chunks of each partial result that a lane adds: where one warp merges a unit (ALONE), and where all warps of a CTA
// do (TOGETHER).
constexpr int ALONE = 2, TOGETHER = 1;
constexpr int ROUNDS_TOGETHER = 2;  // warps merge together if each CTA has at most this many units

struct Shared {
    Boundary ends[MOST_SHARES];    // where each share ends
    uint16_t firsts[MOST_SHARES];  // the shares that begin an item and do not end it
    int found[WARPS];              // how many of these each warp has found
    // For a unit that all warps merge together: the result of each warp.
    float ref[WARPS][GROUP_LINES], sum[WARPS][GROUP_LINES], o[WARPS][8 * TOGETHER][32];
};
__shared__ Shared sm;

// An item that is cut: shares first .. first + count - 1 have a part of it.
struct Cut {
    int item, first, count;
};

// Finds the items that are cut, in their order. Returns their number. All threads call.
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

// The n-th item that is cut. All lanes of a warp call.
__device__ __forceinline__ Cut cut_of(int n, int lane) {
    const int first = sm.firsts[n], item = sm.ends[first].item;
#pragma unroll 1
    for (int base = first + 1;; base += 32) {
        const uint32_t others = __ballot_sync(~0u, sm.ends[min(base + lane, MOST_SHARES - 1)].item != item);
        if (others != 0) return {item, first, base + __ffs(others) - first};
    }
}

// What a warp, or a CTA, merges at a time: of each partial result of a cut item, CHUNKS chunks a lane, from chunk
// number `first` of the group on.
struct Unit {
    Cut cut;
    int group, first;
    __device__ __forceinline__ int chunk(int c, int lane) const { return chunk_of_group(group, first + c, lane); }
    __device__ __forceinline__ int line(int lane) const { return line_of_chunk(chunk(0, lane)); }
};

// The sum of a lane's chunks over the partial results so far, relative to `ref`.
template <int CHUNKS>
struct Merged {
    float ref = -INF, sum = 0.0f, o[CHUNKS][8] = {};
};

// Reductions over the lanes that have chunks of the same line.
__device__ __forceinline__ float line_max(float x) { return rows_max(GROUP_LINES == 1 ? quad_max(x) : x); }
__device__ __forceinline__ float line_sum(float x) { return rows_sum(GROUP_LINES == 1 ? quad_sum(x) : x); }
static_assert(GROUP_LINES == 1 || GROUP_LINES == 4, "lane l has line l % GROUP_LINES of a group");

// Merges partial results begin, begin + step, ... of a unit. The lanes of a line compute the weights of WEIGHED
// partial results at a time, one each.
template <int CHUNKS>
__device__ __forceinline__ Merged<CHUNKS> merge(const DenseParams& p, const Unit& unit, int begin, int step,
                                                int lane) {
    constexpr int WEIGHED = 32 / GROUP_LINES, AT_ONCE = LANE_LOADS / CHUNKS;
    static_assert(WEIGHED % AT_ONCE == 0, "loads come in whole groups of weights");
    const Cut& cut = unit.cut;
    Merged<CHUNKS> m;
    float4 loaded[AT_ONCE][CHUNKS];
    auto partial = [&](int i) { return partial_of(p, cut.first + i, i + 1 < cut.count); };
    auto load = [&](int first) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                loaded[k][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (first + k * step >= cut.count) continue;
                const PartialResults<8> of = partial(first + k * step);
                loaded[k][c] = of.chunk_of(of.rank, unit.chunk(c, lane));
            }
        }
    };
#pragma unroll 1
    for (int base = begin; base < cut.count; base += WEIGHED * step) {
        load(base);  // before the weights, so that both loads are in flight at a time
        const int mine = base + lane / GROUP_LINES * step;
        float4 statistics = make_float4(-INF, 0.0f, -INF, 1.0f);
        if (mine < cut.count) {
            const PartialResults<8> of = partial(mine);
            statistics = of.statistics_of(of.rank, unit.line(lane));
        }
        const float ref = fmaxf(m.ref, line_max(statistics.x));
        const float weight = rescale_factor(statistics.x, ref), old = rescale_factor(m.ref, ref);
        m.sum = m.sum * old + line_sum(weight * statistics.y);
        m.ref = ref;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < 8; ++i) m.o[c][i] *= old;
        }
        const float factor = weight * statistics.w;
        const int end = min(cut.count, base + WEIGHED * step);
#pragma unroll 1
        for (int first = base, n = 0; first < end; n += AT_ONCE) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const float by = __shfl_sync(~0u, factor, (n + k) * GROUP_LINES + lane % GROUP_LINES);
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) add_chunk(m.o[c], by, loaded[k][c]);
            }
            first += AT_ONCE * step;
            if (first < end) load(first);
        }
    }
    return m;
}

// The query token and head of line `line` of an item.
__device__ __forceinline__ Line line_of(const DenseParams& p, const Cut& cut, int line) {
    return line_of_request(p, query_of_item(p, cut.item), head_tile_of_item(p, cut.item) * LINES + line);
}

// Returns the final factor of O. Writes the line's statistics if `write`.
__device__ __forceinline__ float finish_line(const DenseParams& p, const Line& of, float ref, float sum, bool write) {
    const HeadResult result = {ref, log2_sum_exp(ref, sum)};
    if (write) write_statistics(p, of.query, of.head, result);
    return sum == 0.0f ? 0.0f : sink_factor(p, of.head, result.lse) / sum;
}

// Whether a lane writes its line's statistics.
__device__ __forceinline__ bool writes_statistics(const Unit& unit, int lane) {
    return unit.first == 0 && lane < GROUP_LINES;
}

// One warp writes a unit. `of`: the lane's line, which is no padding.
__device__ __forceinline__ void write_unit(const DenseParams& p, const Line& of, const Unit& unit,
                                           const Merged<ALONE>& m, int lane) {
    const float by = finish_line(p, of, m.ref, m.sum, writes_statistics(unit, lane));
#pragma unroll
    for (int c = 0; c < ALONE; ++c) {
        const int column = column_of_chunk(unit.chunk(c, lane));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            write_output(p, of.query, of.head, column + COLUMNS_APART * i, m.o[c][2 * i] * by, m.o[c][2 * i + 1] * by);
    }
}

// The warps of a CTA write a unit, after each has merged some of the partial results. Four of them add up the warps'
// results, two values a lane each.
__device__ __forceinline__ void write_unit_together(const DenseParams& p, const Line& of, const Unit& unit,
                                                    const Merged<TOGETHER>& m, int warp, int lane) {
    __syncthreads();  // the unit before has been read
    if (lane < GROUP_LINES) sm.ref[warp][lane] = m.ref, sm.sum[warp][lane] = m.sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) sm.o[warp][i][lane] = m.o[0][i];
    __syncthreads();
    if (warp >= 4 || of.head >= p.h_q) return;
    const int own = lane % GROUP_LINES;
    float ref = -INF, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) ref = fmaxf(ref, sm.ref[i][own]);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        const float by = rescale_factor(sm.ref[i][own], ref);
        sum += by * sm.sum[i][own];
        x += by * sm.o[i][2 * warp][lane];
        y += by * sm.o[i][2 * warp + 1][lane];
    }
    const float by = finish_line(p, of, ref, sum, warp == 0 && writes_statistics(unit, lane));
    const int column = column_of_chunk(unit.chunk(0, lane)) + COLUMNS_APART * warp;
    write_output(p, of.query, of.head, column, x * by, y * by);
}
static_assert(TOGETHER == 1, "");

extern "C" __global__ void __launch_bounds__(COMBINERS) dense_combine(const __grid_constant__ DenseParams p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool split = p.num_splits > 1;  // each item is divided into equal splits
    const int items = p.num_queries * num_head_tiles(p);
    const int cuts = split ? items : find_cuts(p, p.num_shares);
    const int groups = groups_of(min(LINES, p.h_q));  // of an item
    const bool few = cuts * groups * (GROUP_CHUNKS / TOGETHER) <= ROUNDS_TOGETHER * int(gridDim.x);
    const bool together = few && !(p.flags & INVARIANT);
    const int of_group = GROUP_CHUNKS / (together ? TOGETHER : ALONE), of_cut = groups * of_group;
    const int step = together ? int(gridDim.x) : int(gridDim.x) * WARPS;
#pragma unroll 1
    for (int n = together ? blockIdx.x : warp * gridDim.x + blockIdx.x; n < cuts * of_cut; n += step) {
        const int number = n / of_cut, rest = n % of_cut;
        const Cut cut = split ? Cut{number, number * p.num_splits, p.num_splits} : cut_of(number, lane);
        // Items without rows have no partial results.
        if (split && __ldcg(p.shares + cut.first).w <= 0) continue;
        const Unit unit = {cut, rest / of_group, rest % of_group * (together ? TOGETHER : ALONE)};
        const Line of = line_of(p, cut, unit.line(lane));
        if (together) {
            write_unit_together(p, of, unit, merge<TOGETHER>(p, unit, warp, WARPS, lane), warp, lane);
        } else {
            const Merged<ALONE> m = merge<ALONE>(p, unit, 0, 1, lane);
            if (of.head < p.h_q) write_unit(p, of, unit, m, lane);
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = COMBINERS;
extern "C" __device__ int kernel_shared_bytes = 0;
