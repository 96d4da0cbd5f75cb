// Sparse attention of flat bf16 rows on Hopper, 64 heads of a query at a time: all rows of the call are divided evenly
// over the CTAs (shares.cuh). For batches of no whole wave. Pipeline and shared memory: bf16_sm90.cuh.
//
//   a CTA's share, worked on backwards     | end of item 7 | item 8 | begin of item 9 |
//                                             3. merged       2.      1. left to the CTA that has the end of item 9
//
// Only tiles in which an entry is valid are copied and multiplied: before the first tile of a split the producer warps
// look at all its entries, unless it has at most UNSEEN tiles.
//
//   PRODUCER_SYNC   named: the 128 producer threads
//
// grid: x CTAs.
#include "attention/bf16_sm90.cuh"
#include "attention/merge.cuh"
#include "attention/shares.cuh"

constexpr int PRODUCER_SYNC = CONSUMER_SYNC + 1;
// Producer warps look at up to 32 * TILE_WORDS tiles; all others count as having a valid entry.
constexpr int UNSEEN = 4, TILE_WORDS = 8, LISTED = 32 * TILE_WORDS;

struct ShareState {
    Shares<THREADS> shares;
    uint32_t found[2][TILE_WORDS][4];  // of this split and the one before: tiles that each producer warp has found
    uint8_t tiles[4][LISTED];          // their numbers in the split, for each producer warp
    float largest[2][HEADS];           // |O| of a partial result, in each warpgroup's columns
    int partials;                      // results that are merged
};

struct Share : SingleQueries {
    static constexpr bool OVERLAPS = true;
    static constexpr int KEPT = 4;

    static __device__ __forceinline__ ShareState& state() {
        return *reinterpret_cast<ShareState*>(shared + SHARED_BYTES<Share>);
    }

    static __device__ __forceinline__ void init(const Params& p) { find_share_early(p, state().shares); }
    static __device__ __forceinline__ void start(const Params& p) { find_share(p, state().shares); }

    // --- splits, numbered by their items ----------------------------------------------------------------------

    static __device__ __forceinline__ int worker() { return 0; }
    static __device__ __forceinline__ int workers() { return 1; }
    static __device__ __forceinline__ int last_item() {
        const Boundary end = state().shares.end;
        return end.pair > 0 ? end.item : end.item - 1;
    }
    static __device__ __forceinline__ int num_items(const Params&, int) {
        return last_item() + 1 - state().shares.begin.item;
    }
    static __device__ __forceinline__ int find_item(const Params&, int turn, int) { return last_item() - turn; }
    static __device__ __forceinline__ bool begins_item(int item) {
        return item != state().shares.begin.item || state().shares.begin.pair == 0;
    }
    static __device__ __forceinline__ bool ends_item(int item) { return item != state().shares.end.item; }
    static __device__ __forceinline__ int first_entry(int item) {
        return begins_item(item) ? 0 : state().shares.begin.pair * 2 * TILE_ROWS;
    }
    static __device__ __forceinline__ int length_of(const Params& p, int item, int head_tiles) {
        const int length = list_length(p.main, query_of(p, item / head_tiles).b);
        return (ends_item(item) ? length : state().shares.end.pair * 2 * TILE_ROWS) - first_entry(item);
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int item, int head_tiles, int length) {
        const int tiles = ceil_div(length, TILE_ROWS);
        return {query_of(p, item / head_tiles),
                item % head_tiles,
                length,
                num_pairs(length),
                item,
                first_entry(item),
                tiles};
    }

    // --- tiles with valid entries -----------------------------------------------------------------------------

    static __device__ __forceinline__ bool is_unseen(const Work& w) { return w.length <= UNSEEN * TILE_ROWS; }

    // Looks for valid entries in the tiles of a split: producer warp w in every fourth tile, from tile w on.
    static __device__ __forceinline__ void look_for_valid(const Params& p, const Work& w, const Copier& c, int turn,
                                                          int words) {
        constexpr int AT_ONCE = 8;
        const int32_t* list = list_of(p, w);
#pragma unroll 1
        for (int word = 0; word < words; ++word) {
            const int first = (32 * word + c.warp) * TILE_ROWS + c.lane;
            int32_t entries[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const int at = first + i / 2 * 4 * TILE_ROWS + i % 2 * 32;
                entries[i / 2][i % 2] = at < w.length ? list[at] : -1;
            }
            uint32_t found = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                auto is_valid = [&](int32_t entry) { return uint32_t(entry) < uint32_t(p.main.num_slots); };
                if (__any_sync(~0u, is_valid(entries[i][0]) || is_valid(entries[i][1])))
                    found |= 1u << (4 * i + c.warp);
            }
            if (c.lane == 0) state().found[turn][word][c.warp] = found;
        }
    }

    // Each producer warp lists the tiles that have a valid entry. All producer warps call.
    static __device__ __forceinline__ void choose_tiles(const Params& p, Work& w, const Copier& c) {
        if (is_unseen(w)) return;
        const int words = min(TILE_WORDS, ceil_div(w.tiles, 32)), turn = w.number % 2;
        look_for_valid(p, w, c, turn, words);
        named_barrier_sync(PRODUCER_SYNC, WARPGROUP);
        int listed = 0;
#pragma unroll 1
        for (int word = 0; word < words; ++word) {
            const uint32_t (&by_warp)[4] = state().found[turn][word];
            const uint32_t found = by_warp[0] | by_warp[1] | by_warp[2] | by_warp[3];
            const int before = __popc(found & (1u << c.lane) - 1);
            if (found >> c.lane & 1) state().tiles[c.warp][listed + before] = uint8_t(32 * word + c.lane);
            listed += __popc(found);
        }
        __syncwarp();
        w.tiles = listed + max(0, w.tiles - LISTED);
        w.pairs = ceil_div(w.tiles, 2);
    }
    // The i-th of them; behind the last one a tile that has no entries.
    static __device__ __forceinline__ int tile_of(const Work& w, int i) {
        if (is_unseen(w)) return i;
        if (i >= w.tiles) return w.length;
        const int unlisted = max(0, ceil_div(w.length, TILE_ROWS) - LISTED), listed = w.tiles - unlisted;
        return i < listed ? state().tiles[threadIdx.x / 32 - 8][i] : i - listed + LISTED;
    }

    // --- results ----------------------------------------------------------------------------------------------

    // Chunk 512 n + 256 i + thread of a partial result: of a thread's line i two columns each of four eights.
    static __device__ __forceinline__ int chunk_of(int n, int i) { return 512 * n + 256 * i + threadIdx.x; }

    // Leaves this CTA's partial result to the CTA whose share ends the item, as f16 times a power of two for each line.
    template <int W, typename Total>
    static __device__ __forceinline__ void leave(const Params& p, const Work& w, int warp, int lane, Total total_of,
                                                 const float (&o)[128]) {
        const PartialResults<8> partials = {p.cluster_parts, int(blockIdx.x)};
        const int line = 16 * warp + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = 0.0f;
#pragma unroll
            for (int j = 0; j < 32; ++j) top = fmaxf(top, fmaxf(fabsf(o[4 * j + 2 * i]), fabsf(o[4 * j + 2 * i + 1])));
            top = quad_max(top);
            if (lane % 4 == 0) state().largest[W][line + 8 * i] = top;
        }
        sync_consumers();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float up = to_f16_range(fmaxf(state().largest[0][line + 8 * i], state().largest[1][line + 8 * i]));
            const LineTotal total = total_of(i);
            if (W == 0 && lane % 4 == 0)
                partials.write_statistics(line + 8 * i, total.ref, total.sum, total.max, 1.0f / up);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                float words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float* two = &o[4 * (4 * n + k) + 2 * i];
                    words[k] = __uint_as_float(pack_f16x2(two[0] * up, two[1] * up));
                }
                partials.write(chunk_of(n, i), make_float4(words[0], words[1], words[2], words[3]));
            }
        }
        sync_consumers();
        if (threadIdx.x == 0) announce_partial(p, begins_item(w.number));
    }

    // Adds what the CTAs before have left of the item.
    static __device__ __forceinline__ void merge(const Params& p, int warp, int lane, LineTotal (&total)[2],
                                                 float (&o)[128]) {
        if (threadIdx.x < 32) {
            const int count = wait_for_partials(p, lane);
            if (lane == 0) state().partials = count;
        }
        sync_consumers();
        constexpr int AT_ONCE = 4;  // chunks of a thread whose loads are under way at a time
        const int count = state().partials, line = 16 * warp + lane / 4, first = int(blockIdx.x) - count;
        const PartialResults<8> partials = {p.cluster_parts, int(blockIdx.x)};
        float ref[2] = {total[0].ref, total[1].ref};
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) ref[i] = fmaxf(ref[i], partials.statistics_of(first + n, line + 8 * i).x);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float by = rescale_factor(total[i].ref, ref[i]);
            total[i].ref = ref[i];
            total[i].sum *= by;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                o[4 * j + 2 * i] *= by;
                o[4 * j + 2 * i + 1] *= by;
            }
        }
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 statistics = partials.statistics_of(first + n, line + 8 * i);
                const float weight = rescale_factor(statistics.x, ref[i]);
                total[i].sum += weight * statistics.y;
                total[i].max = fmaxf(total[i].max, statistics.z);
#pragma unroll
                for (int begin = 0; begin < 8; begin += AT_ONCE) {
                    float4 chunks[AT_ONCE];
#pragma unroll
                    for (int k = 0; k < AT_ONCE; ++k) chunks[k] = partials.chunk_of(first + n, chunk_of(begin + k, i));
#pragma unroll
                    for (int k = 0; k < AT_ONCE; ++k) {
                        float v[8] = {};
                        add_chunk(v, weight * statistics.w, chunks[k]);
#pragma unroll
                        for (int m = 0; m < 8; ++m) o[16 * (begin + k) + m / 2 * 4 + 2 * i + m % 2] += v[m];
                    }
                }
            }
        }
    }

    template <int W, typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warp, int lane, Total total_of,
                                                 float (&o)[128]) {
        if (!ends_item(w.number)) {
            leave<W>(p, w, warp, lane, total_of, o);
            return;
        }
        if (begins_item(w.number)) {
            write_lines<Share, W>(p, w, warp, lane, total_of, o);
            return;
        }
        LineTotal total[2] = {total_of(0), total_of(1)};
        merge(p, warp, lane, total, o);
        write_lines<Share, W>(p, w, warp, lane, [&](int i) { return total[i]; }, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_shares_sm90(const __grid_constant__ AttentionParams p) {
    run<Share>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<Share> + int(sizeof(ShareState));
