// The k largest of the logits that several ranks found for a query token. The result is exact and ascends by position.
// Of equal logits, those at lower positions are chosen.
//
// A logit's radix key (radix_key.cuh) is an integer that is larger for larger logits. An entry without a logit has key
// 0.
//
//   one CTA    a token. Its items are the entries of all ranks' lists, one list after the other
//     load       registers hold up to ITEMS items a thread. Where a token has more, each step below reads them again,
//                a tile of TILE items at a time
//     threshold  the key of the k-th largest item, by radix: a histogram of 10 bits, between the least and the
//                greatest key, then of 10 more bits of the items that agree so far, until all items of a bin are
//                chosen. Mostly two histograms are enough. Where more items have the threshold's key than are chosen,
//                their positions are searched in the same way
//     collect    brings the positions of chosen items to shared memory, in the order of the items, by sums over lanes
//                and warps
//     place      these positions are ascending runs, mostly one a rank. A position's place is the number of lower
//                positions in all runs, by binary search. More than MAX_RUNS runs (more ranks, or lists that do not
//                ascend) are sorted instead
//
// Atomics count, but decide about no place, so results do not depend on timing.
//
// Shared memory (static): 16 KB of positions, two histograms of 4 KB, and a few words a warp.
#include "indexer/radix_key.cuh"
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
constexpr int DIGIT_BITS = 10, BINS = 1 << DIGIT_BITS;
constexpr int MAX_K = 4096, RESULTS_PER_THREAD = MAX_K / THREADS;
constexpr int MAX_RUNS = 16;
constexpr int32_t LAST = 0x7fffffff;  // sorts behind all positions
static_assert(BINS == THREADS && WARPS == 32, "a thread a bin, a lane a warp's sum");

using Histogram = uint32_t[BINS];

__shared__ int32_t chosen[MAX_K];  // positions
__shared__ Histogram bins[2];      // in turn: while one is searched, the next one is cleared
__shared__ int32_t warp_sums[WARPS];
__shared__ uint32_t least[WARPS], greatest[WARPS];
__shared__ int32_t runs[MAX_RUNS], num_runs;  // where runs begin, in any order

// --- items ----------------------------------------------------------------------------------------------------

// A place in the ranks' lists.
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

// A thread's items of a tile. A warp's items are neighbours: item j of a lane is the warp's item 32 j + lane.
struct Items {
    uint32_t key[ITEMS];
    int32_t position[ITEMS];
    int each, tiles;  // items of a thread in a tile, and tiles of the token
    Entry next;       // this thread's first item of the next tile

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
        for (int j = 0; j < ITEMS; ++j) key[j] = position[j] < 0 ? 0 : radix_key_of(value[j]);
        next.advance(TILE - 32 * ITEMS, p.width);
    }

    // Calls act() for each tile, while its items are in registers.
    template <typename Act>
    __device__ __forceinline__ void for_each_tile(const MergeTopkParams& p, Act act) {
        for (int tile = 0; tile < tiles; ++tile) {
            if (tiles > 1) load(p, tile);
            act();
        }
    }

    // Calls act(j) for each item of this thread in the tile.
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

// Each lane has some number of items. Finds the lane that has the `need`-th item, the items before that lane, and in
// it.
struct Found {
    int lane, before, inside;

    __device__ __forceinline__ Found(int items, int need) {
        const int up_to = inclusive_sum(items, threadIdx.x % 32);
        lane = __popc(__ballot_sync(~0u, up_to < need));
        inside = __shfl_sync(~0u, items, lane);
        before = __shfl_sync(~0u, up_to, lane) - inside;
    }
};

// The bin that has the `need`-th largest item, the items in bins above it, and in it. Each warp finds it for itself:
// first the 32 bins that have the item, by the warps' sums, then the bin among them.
struct Bin {
    int digit, above, inside;

    // Clears `next`. Called by the CTA.
    __device__ __forceinline__ Bin(const Histogram& all, Histogram& next, int need) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int of_warp = __reduce_add_sync(~0u, int(all[BINS - 1 - threadIdx.x]));
        if (lane == 0) warp_sums[warp] = of_warp;
        next[threadIdx.x] = 0;
        __syncthreads();
        const Found group(warp_sums[lane], need);
        const int highest = BINS - 1 - 32 * group.lane;
        const Found of_bins(all[highest - lane], need - group.before);
        digit = highest - of_bins.lane;
        above = group.before + of_bins.before;
        inside = of_bins.inside;
    }
};

// Of words, keys or others: all larger ones are chosen, and `ties` of the equal ones.
struct Threshold {
    uint32_t word;
    int ties;
};

// The threshold that the `need` largest words meet. word_of(j) is the word of item j of this thread; 0: the item takes
// no part. Where no more than `need` items take part, the threshold is 0, which all of them meet. Called by the CTA.
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
        warp_sums[warp] = count;
    }
    bins[0][threadIdx.x] = 0;
    __syncthreads();
    low = __reduce_min_sync(~0u, least[lane]);
    high = __reduce_max_sync(~0u, greatest[lane]);
    if (__reduce_add_sync(~0u, warp_sums[lane]) <= need) return {0, 0};

    uint32_t span = high - low;  // words that agree with the one searched so far lie in [low, low + span]
    int bits = 32 - __clz(span);
    for (int turn = 0; bits > 0; turn ^= 1) {
        const int shift = max(bits - DIGIT_BITS, 0);
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

// Stores the positions of items for which is_chosen(j) is true to `chosen`, in the order of the items. Returns how
// many they are. Called by the CTA.
template <typename Chosen>
__device__ __forceinline__ int collect(const MergeTopkParams& p, Items& items, Chosen is_chosen) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    items.for_each_tile(p, [&] {
        uint32_t lanes[ITEMS];  // whose item j is chosen, a bit a lane
        int of_warp = 0;
        items.for_each_of_tile([&](int j) {
            lanes[j] = __ballot_sync(~0u, is_chosen(j));
            of_warp += __popc(lanes[j]);
        });
        __syncthreads();  // all have read earlier sums
        if (lane == 0) warp_sums[warp] = of_warp;
        __syncthreads();
        int place = total + __reduce_add_sync(~0u, lane < warp ? warp_sums[lane] : 0);
        items.for_each_of_tile([&](int j) {
            const uint32_t before = lanes[j] & ((1u << lane) - 1);
            if (lanes[j] >> lane & 1) chosen[place + __popc(before)] = items.position[j];
            place += __popc(lanes[j]);
        });
        total += __reduce_add_sync(~0u, warp_sums[lane]);
    });
    __syncthreads();
    return total;
}

// How many of chosen[begin] to chosen[end - 1], an ascending run, are less than `bound`.
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

// Writes the `total` chosen positions in ascending order: they are a few ascending runs.
__device__ __forceinline__ void merge_runs(int32_t* out, int total) {
    int place[RESULTS_PER_THREAD] = {};
    for (int run = 0; run < num_runs; ++run) {
        const int begin = runs[run];
        int end = total;
        for (int other = 0; other < num_runs; ++other)
            if (runs[other] > begin) end = min(end, runs[other]);
#pragma unroll
        for (int i = 0; i < RESULTS_PER_THREAD; ++i) {
            const int at = i * THREADS + threadIdx.x;
            // Of equal ones, those of earlier runs come first.
            if (at < total) place[i] += count_below(begin, end, uint32_t(chosen[at]) + (end <= at));
        }
    }
#pragma unroll
    for (int i = 0; i < RESULTS_PER_THREAD; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (at < total) out[place[i]] = chosen[at];
    }
}

// Writes the `total` chosen positions, which are in any order, in ascending order, by a bitonic sort.
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
    const Threshold logit = find_threshold(p, items, p.k, [&](int j) { return items.key[j]; });
    // Of items that equal the threshold those at lower positions are chosen: complements of lower positions are
    // larger.
    uint32_t position = ~0u;
    if (logit.ties > 0) {
        const auto word_of = [&](int j) { return items.key[j] == logit.word ? ~uint32_t(items.position[j]) : 0u; };
        position = find_threshold(p, items, logit.ties, word_of).word;
    }
    const int total = collect(p, items, [&](int j) {
        return items.key[j] > logit.word || (items.key[j] == logit.word && ~uint32_t(items.position[j]) > position);
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
