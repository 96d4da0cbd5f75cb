// The k largest of the logits that several ranks found for a query token, exact: of equal ones those at lower positions,
// ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 1 for NaN, equal for both zeros. An entry without a
// logit has the order 0.
//
//   CTA        a token. Its items, the ranks' lists one after the other, stay in registers, up to ITEMS a thread. Where
//              there are more, each step reads them again, a tile after the other
//   threshold  the order of the k-th largest by radix: between the least and the greatest order, a histogram of 10 bits,
//              then of 10 more bits of the items that agree so far, until all items of a bin are chosen: mostly two.
//              Where more items have the order of the k-th than are chosen, their positions are searched alike
//   collect    chosen positions into shared memory in the order of the items, by sums over lanes and warps
//   place      these are ascending runs, mostly one a rank: the place of a position is the number of lower ones in all
//              runs, by binary search. More than MAX_RUNS (more ranks, or lists that do not ascend): a bitonic sort
//
// Results do not depend on timing: atomics count, but decide about no place.
//
// Shared memory (static): 16 KB of positions, two histograms of 4 KB, and a few words a warp.
#include "indexer/order.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/warp.cuh"

// The launcher declares the same fields.
struct MergeTopkParams {
    const float* values;                                                             // [ranks, tokens, width]
    const int32_t* positions;                                                        // [ranks, tokens, width]
    int32_t* out;                                                                    // [tokens, k]
    int64_t values_rank, values_token, positions_rank, positions_token, out_stride;  // items
    int32_t ranks, width, k;
    int32_t unused;
};

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int ITEMS = 8, TILE = THREADS * ITEMS;
constexpr int DIGIT = 10, BINS = 1 << DIGIT;  // bits; a bin a thread
constexpr int MAX_K = 4096, PLACES = MAX_K / THREADS;
constexpr int MAX_RUNS = 16;
constexpr int32_t LAST = 0x7fffffff;  // no position comes after it
static_assert(BINS == THREADS && WARPS == 32, "a thread a bin, a lane a warp's sum");

using Histogram = uint32_t[BINS];

__shared__ int32_t chosen[MAX_K];
__shared__ Histogram bins[2];
__shared__ int32_t groups[WARPS];  // sums of warps
__shared__ uint32_t least[WARPS], greatest[WARPS];
__shared__ int32_t runs[MAX_RUNS], num_runs;  // where runs begin, in any order

// --- items ----------------------------------------------------------------------------------------------------

// An entry of a rank's list.
struct Entry {
    int rank, index;

    __device__ __forceinline__ void advance(int by, int width) {
        index += by;
        if (index >= width) {
            rank += index / width;
            index %= width;
        }
    }
};

// A thread's items. A warp's are neighbours: item j of a lane is the warp's item 32 j + lane.
struct Items {
    uint32_t order[ITEMS];
    int32_t position[ITEMS];
    int each, tiles;  // items of a thread in a tile
    Entry next;       // the first of the next tile

    __device__ __forceinline__ explicit Items(const MergeTopkParams& p) {
        const int64_t all = int64_t(p.ranks) * p.width;
        tiles = int((all + TILE - 1) / TILE);
        each = tiles > 1 ? ITEMS : ceil_div(int(all), THREADS);
        if (tiles == 1) load(p, 0);
    }

    __device__ __forceinline__ void load(const MergeTopkParams& p, int tile) {
        if (tile == 0) {
            next = {0, 0};
            next.advance(int(threadIdx.x / 32) * 32 * each + threadIdx.x % 32, p.width);
        }
        float value[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            value[j] = 0.0f;
            position[j] = -1;
            if (j >= each || next.rank >= p.ranks) continue;
            const int64_t rank = next.rank, token = blockIdx.x;
            value[j] = p.values[rank * p.values_rank + token * p.values_token + next.index];
            position[j] = p.positions[rank * p.positions_rank + token * p.positions_token + next.index];
            next.advance(32, p.width);
        }
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) order[j] = position[j] < 0 ? 0 : order_of(value[j]);
        next.advance(TILE - 32 * ITEMS, p.width);
    }

    // Calls act() for each tile, with its items in registers.
    template <typename Act>
    __device__ __forceinline__ void for_each_tile(const MergeTopkParams& p, Act act) {
        for (int tile = 0; tile < tiles; ++tile) {
            if (tiles > 1) load(p, tile);
            act();
        }
    }

    // Calls act(j) for each item of the tile.
    template <typename Act>
    __device__ __forceinline__ void for_each_of_tile(Act act) const {
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (j >= each) break;
            act(j);
        }
    }
};

// --- threshold ------------------------------------------------------------------------------------------------

// Each lane has a number of items. Returns the lane in which the `need`-th item is, the items before it, and in it.
struct Found {
    int lane, before, inside;

    __device__ __forceinline__ Found(int items, int need) {
        const int up_to = inclusive_sum(items, threadIdx.x % 32);
        lane = __popc(__ballot_sync(~0u, up_to < need));
        inside = __shfl_sync(~0u, items, lane);
        before = __shfl_sync(~0u, up_to, lane) - inside;
    }
};

// The bin in which the `need`-th item from the top is, the items in the bins above it, and in it.
struct Bin {
    int digit, above, inside;

    // Clears `next`.
    __device__ __forceinline__ Bin(const Histogram& all, Histogram& next, int need) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int group = __reduce_add_sync(~0u, int(all[BINS - 1 - threadIdx.x]));
        if (lane == 0) groups[warp] = group;
        next[threadIdx.x] = 0;
        __syncthreads();
        const Found of_groups(groups[lane], need);
        const int highest = BINS - 1 - 32 * of_groups.lane;
        const Found of_bins(all[highest - lane], need - of_groups.before);
        digit = highest - of_bins.lane;
        above = of_groups.before + of_bins.before;
        inside = of_bins.inside;
    }
};

// Chosen are all larger words, and the first `ties` of the equal ones.
struct Threshold {
    uint32_t word;
    int ties;
};

// The threshold that the `need` largest words meet. Where fewer words are not 0, all of these meet it. `word_of(j)` is 0
// for items that take no part.
template <typename Word>
__device__ __forceinline__ Threshold find_threshold(const MergeTopkParams& p, Items& items, int need, Word word_of) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t low = ~0u, high = 0;
    int count = 0;
    items.for_each_tile(p, [&] {
        items.for_each_of_tile([&](int j) {
            const uint32_t word = word_of(j);
            if (word == 0) return;
            low = min(low, word);
            high = max(high, word);
            ++count;
        });
    });
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    count = __reduce_add_sync(~0u, count);
    __syncthreads();  // all are done with an earlier search
    if (lane == 0) {
        least[warp] = low;
        greatest[warp] = high;
        groups[warp] = count;
    }
    bins[0][threadIdx.x] = 0;
    __syncthreads();
    low = __reduce_min_sync(~0u, least[lane]);
    high = __reduce_max_sync(~0u, greatest[lane]);
    if (__reduce_add_sync(~0u, groups[lane]) <= need) return {0, 0};

    uint32_t span = high - low;  // the words that agree so far lie from low to low + span
    int bits = 32 - __clz(span);
    for (int turn = 0; bits > 0; turn ^= 1) {
        const int shift = max(bits - DIGIT, 0);
        items.for_each_tile(p, [&] {
            items.for_each_of_tile([&](int j) {
                const uint32_t above_low = word_of(j) - low;
                if (above_low <= span) atomicAdd(&bins[turn][above_low >> shift], 1u);
            });
        });
        __syncthreads();
        const Bin bin(bins[turn], bins[turn ^ 1], need);
        low += uint32_t(bin.digit) << shift;
        need -= bin.above;
        if (bin.inside == need) return {low - 1, 0};
        bits = shift;
        span = (1u << shift) - 1;
    }
    return {low, need};
}

// --- results --------------------------------------------------------------------------------------------------

// Brings the positions of items for which is_chosen(j) to shared memory, in the order of the items. Returns their number.
template <typename Chosen>
__device__ __forceinline__ int collect(const MergeTopkParams& p, Items& items, Chosen is_chosen) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    items.for_each_tile(p, [&] {
        uint32_t lanes[ITEMS];
        int of_warp = 0;
        items.for_each_of_tile([&](int j) {
            lanes[j] = __ballot_sync(~0u, is_chosen(j));
            of_warp += __popc(lanes[j]);
        });
        __syncthreads();  // all have read earlier sums
        if (lane == 0) groups[warp] = of_warp;
        __syncthreads();
        int place = total + __reduce_add_sync(~0u, lane < warp ? groups[lane] : 0);
        items.for_each_of_tile([&](int j) {
            const uint32_t before = lanes[j] & ((1u << lane) - 1);
            if (lanes[j] >> lane & 1) chosen[place + __popc(before)] = items.position[j];
            place += __popc(lanes[j]);
        });
        total += __reduce_add_sync(~0u, groups[lane]);
    });
    __syncthreads();
    return total;
}

// How many of the chosen positions from `begin` to `end`, an ascending run, are below `bound`.
__device__ __forceinline__ int count_below(int begin, int end, uint32_t bound) {
    int low = begin, high = end;
    while (low < high) {
        const int middle = (low + high) / 2;
        const bool below = uint32_t(chosen[middle]) < bound;
        low = below ? middle + 1 : low;
        high = below ? high : middle;
    }
    return low - begin;
}

// Writes the `total` chosen positions, which are a few ascending runs, in ascending order.
__device__ __forceinline__ void merge_runs(int32_t* out, int total) {
    int place[PLACES] = {};
    for (int run = 0; run < num_runs; ++run) {
        const int begin = runs[run];
        int end = total;
        for (int other = 0; other < num_runs; ++other)
            if (runs[other] > begin) end = min(end, runs[other]);
#pragma unroll
        for (int i = 0; i < PLACES; ++i) {
            const int at = i * THREADS + threadIdx.x;
            // Of equal ones, those of earlier runs come first.
            if (at < total) place[i] += count_below(begin, end, uint32_t(chosen[at]) + (end <= at));
        }
    }
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at < total) out[place[i]] = chosen[at];
    }
}

// The same of positions in any order.
__device__ __forceinline__ void sort(int32_t* out, int total) {
    int size = 2;
    while (size < total) size *= 2;
    for (int i = total + threadIdx.x; i < size; i += THREADS) chosen[i] = LAST;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int low = pair / step * 2 * step + pair % step, high = low + step;
                const int32_t a = chosen[low], b = chosen[high];
                if ((a > b) == ((low & run) == 0)) {
                    chosen[low] = b;
                    chosen[high] = a;
                }
            }
            __syncthreads();
        }
    }
    for (int i = threadIdx.x; i < total; i += THREADS) out[i] = chosen[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_topk(const __grid_constant__ MergeTopkParams p) {
    let_next_kernel_start();
    if (threadIdx.x == 0) num_runs = 0;
    wait_for_earlier_kernels();
    Items items(p);
    const Threshold logit = find_threshold(p, items, p.k, [&](int j) { return items.order[j]; });
    uint32_t position = ~0u;  // complements of larger positions are smaller
    if (logit.ties > 0) {
        const auto word_of = [&](int j) { return items.order[j] == logit.word ? ~uint32_t(items.position[j]) : 0u; };
        position = find_threshold(p, items, logit.ties, word_of).word;
    }
    const int total = collect(p, items, [&](int j) {
        return items.order[j] > logit.word ||
               (items.order[j] == logit.word && ~uint32_t(items.position[j]) > position);
    });
    for (int i = threadIdx.x; i < total; i += THREADS) {
        if (i > 0 && chosen[i - 1] < chosen[i]) continue;
        const int run = atomicAdd(&num_runs, 1);
        if (run < MAX_RUNS) runs[run] = i;
    }
    __syncthreads();
    int32_t* out = p.out + blockIdx.x * p.out_stride;
    if (num_runs <= MAX_RUNS) {
        merge_runs(out, total);
    } else {
        sort(out, total);
    }
    for (int i = total + threadIdx.x; i < p.k; i += THREADS) out[i] = -1;
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
