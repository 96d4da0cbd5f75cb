// Dense attention of bf16 rows on Hopper: a work item is 64 lines of a request, its query tokens times its heads, which
// share the request's rows. All rows of the call are divided evenly over the CTAs, wherever in an item a share ends, or
// each item into equal splits. Pipeline and shared memory: bf16_sm90.cuh.
//
//   all rows of the call   |request 0   |request 1   |request 2   |          (and once more for each further 64 lines)
//   shares of the CTAs     |CTA 0  |CTA 1  |CTA 2  |CTA 3  |CTA 4  |
//
//   whole in a share: the CTA writes the results        cut: each CTA leaves a partial result; dense_combine.cu merges
//
// Rows come from the block table, a lookup for each row of a tile. Lines see rows up to an end of their own: only in
// tiles that not all lines see in full is it looked at (Columns::whole).
//
// grid: x CTAs.
#include "attention/dense_partials.cuh"

// What the consumers know of a tile that not all lines see in full.
struct TileOf {
    int first, request, first_line;  // its first row in the request, the request, and its work item's first line
};

struct State {
    Share<THREADS> mine;
    float largest[2][LINES];  // of write_partial
    TileOf tile[2];
    int share;  // this CTA's
};

struct Dense : SingleQueries {
    using Params = DenseParams;
    static constexpr bool POLICY = true, OVERLAPS = true;
    static constexpr Skips SKIPS = Skips::NONE;

    static __device__ __forceinline__ bool read_once(const Params& p) { return p.h_q <= LINES; }

    static __device__ __forceinline__ State& state() {
        return *reinterpret_cast<State*>(shared + SHARED_BYTES<Dense>);
    }

    // --- a request's rows -------------------------------------------------------------------------------------

    // The rows that any of its lines sees; the first one begins a tile.
    static __device__ __forceinline__ Seen rows_of(const Params& p, int request) {
        const int end = rows_seen(p, request, p.tokens - 1).end;
        return {min(rows_seen(p, request, 0).begin, end) & -TILE_ROWS, end};
    }
    static __device__ __forceinline__ int pairs_of(const Params& p, int request) {
        const Seen rows = rows_of(p, request);
        return num_pairs(rows.end - rows.begin);
    }
    static __device__ __forceinline__ const int32_t* list_of(const Params&, const Work&) { return nullptr; }
    static __device__ __forceinline__ int32_t load_entry(const Params& p, const Work& w, const int32_t*, int entry) {
        const int32_t row = w.first + entry, block = load_block(p, w.query.b, row);
        return slot_in_block(p.table, block, row - divide(row, p.table.block_size) * p.main.block_size);
    }
    static __device__ __forceinline__ const uint8_t* row_of(const Params& p, int32_t slot) {
        const Slot at = find_slot(p.main, slot);
        return at.block + at.offset * p.main.row_stride;
    }

    // --- splits, numbered by their items ----------------------------------------------------------------------

    static __device__ __forceinline__ void init(const Params& p) {
        if (threadIdx.x == 0) state().share = share_side_by_side(p);
    }
    static __device__ __forceinline__ Boundary split_boundary(const Params& p, uint32_t share) {
        const int item = share / p.num_splits, split = share % p.num_splits;
        return {item, split == 0 ? 0 : ceil_div(pairs_of(p, ::query_of_item(p, item)) * split, p.num_splits)};
    }
    static __device__ __forceinline__ void start(const Params& p) {
        const int share = state().share;
        Share<THREADS>& mine = state().mine;
        if (p.num_splits > 1) {
            if (threadIdx.x < 2) (threadIdx.x == 0 ? mine.begin : mine.end) = split_boundary(p, share + threadIdx.x);
            __syncthreads();
        } else {
            find_uneven_share(p, share, mine, [&](int request) { return pairs_of(p, request); });
        }
        leave_share(p, share, mine);
    }
    template <typename, typename P, typename Act>
    static __device__ __forceinline__ void for_each(const P&, int, Act act) {
        const int last = state().mine.last_item();
#pragma unroll 1
        for (int item = state().mine.begin.item; item <= last; ++item) act(item);
    }
    // The first of the rows of this CTA's split, counted from rows_of(..).begin.
    static __device__ __forceinline__ int first_row(int item) {
        return state().mine.begins(item) ? 0 : state().mine.begin.pair * 2 * TILE_ROWS;
    }
    static __device__ __forceinline__ int length_of(const Params& p, int item, int) {
        const Seen rows = rows_of(p, ::query_of_item(p, item));
        const int all = rows.end - rows.begin,
                  end = state().mine.ends(item) ? all : state().mine.end.pair * 2 * TILE_ROWS;
        return max(0, min(end, all) - first_row(item));
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int item, int, int length) {
        const int request = ::query_of_item(p, item);
        return {{request, request, 0},
                head_tile_of_item(p, item),
                length,
                num_pairs(length),
                item,
                rows_of(p, request).begin + first_row(item)};
    }
    static __device__ __forceinline__ Line line_at(const Params& p, const Work& w, int line) {
        return line_of_request(p, w.query.b, line);
    }

    // --- what lines see ---------------------------------------------------------------------------------------

    // Of a row: no line sees it, all lines do, or some do, which the consumers find out.
    enum Lines { NONE = 0, ALL = 1, SOME = 2 };

    static __device__ __forceinline__ void store_validity(const Params& p, const Work& w, const Copier& c, int number,
                                                          int tile, const uint8_t* const (&rows)[4], Validity) {
        const int first = w.first + number * TILE_ROWS, request = w.query.b;
        const int begin = rows_seen(p, request, p.tokens - 1).begin, end = rows_seen(p, request, 0).end;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * i + c.row;
            const Lines seen_by = first + row >= begin && first + row < end ? ALL : SOME;
            small<Dense>().valid[tile][row] = rows[i] == nullptr ? NONE : seen_by;
        }
        if (c.row == 0) state().tile[tile] = {first, request, w.head_tile * LINES};
    }

    struct Columns : SingleQueries::Columns {
        int tile, column;

        __device__ __forceinline__ Columns(const Reader& reader, int tile, int t)
            : SingleQueries::Columns(reader, tile, t), tile(tile), column(2 * t) {}
    };
    // Takes out what a line does not see. Returns the scale that is still to be multiplied by.
    static __device__ __forceinline__ float mask_tile(const Params& p, const Columns& columns, float (&s)[32]) {
        if (columns.whole && p.scale_log2 >= 0.0f) return p.scale_log2;
        const TileOf tile = state().tile[columns.tile];
        const int thread = read_thread_index(), line = tile.first_line + thread / 32 % 4 * 16 + thread % 32 / 4;
        const Seen seen[2] = {rows_seen(p, tile.request, line / p.heads),
                              rows_seen(p, tile.request, (line + 8) / p.heads)};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const uint32_t two = *reinterpret_cast<const uint16_t*>(columns.valid + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = tile.first + 8 * n + columns.column + i % 2;
                const Seen mine = seen[i / 2];
                const bool sees = (two >> i % 2 * 8 & 0xff) != NONE && row >= mine.begin && row < mine.end;
                s[4 * n + i] = sees ? s[4 * n + i] * p.scale_log2 : -INF;
            }
        }
        return 1.0f;
    }

    // --- results ----------------------------------------------------------------------------------------------

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& of, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        // Found anew, so that it takes no registers before.
        const Work w = work_of(p, opaque(of.number), num_head_tiles(p), 0);
        warp = opaque(warp);
        const Share<THREADS>& mine = state().mine;
        const bool ends = mine.ends(w.number);
        if (ends && mine.begins(w.number)) {
            write_lines<Dense>(p, w, warpgroup, warp, lane, total_of, o);
            return;
        }
        const PartialResults<8> partial = partial_of(p, state().share, !ends);
        write_partial(partial, state().largest, num_line_warps(p, w), warpgroup, warp, lane, total_of, o);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_sm90(const __grid_constant__ DenseParams p) {
    run<Dense>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<Dense> + int(sizeof(State));
