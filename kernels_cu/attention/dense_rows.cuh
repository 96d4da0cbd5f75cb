// The rows of a request, as the pipeline of bf16_sm90.cuh takes them: a work item is 64 lines of a request, its query
// tokens times its heads, which share its rows. Rows come from the block table, a lookup for each row of a tile. Lines
// see rows up to an end of their own, which is looked at only in tiles that not all lines see in full (Columns::whole).
#pragma once
#include "attention/bf16_partials.cuh"
#include "attention/dense.cuh"

// What the consumers know of a tile that not all lines see in full.
struct alignas(16) TileOf {
    int first, request, first_line;  // its first row in the request, the request, and its work item's first line
};
__device__ __forceinline__ TileOf (&tiles())[2] {
    return *reinterpret_cast<TileOf(*)[2]>(shared + SHARED_BYTES<SingleQueries>);
}
static_assert(SHARED_BYTES<SingleQueries> % 16 == 0, "TileOf is aligned");
constexpr int DENSE_SHARED_BYTES = SHARED_BYTES<SingleQueries> + 2 * int(sizeof(TileOf));

// What line `line` of a request is: a token and a head.
__device__ __forceinline__ Line line_of_request(const DenseParams& p, int request, int line) {
    const int token = p.tokens == 1 ? 0 : line / p.heads;  // mostly a branch saves the division
    return {{request, request, token}, line < p.h_q ? line - token * p.heads : p.h_q};
}

struct RequestRows : SingleQueries {
    using Params = DenseParams;
    static constexpr bool POLICY = true, OVERLAPS = true;
    static constexpr Skips SKIPS = Skips::NONE;

    static __device__ __forceinline__ bool read_once(const Params& p) { return p.h_q <= LINES; }

    // The rows that any of its lines sees; the first one begins a tile.
    static __device__ __forceinline__ Seen rows_of(const Params& p, int request) {
        const int end = rows_seen(p, request, p.tokens - 1).end;
        return {min(rows_seen(p, request, 0).begin, end) & -TILE_ROWS, end};
    }
    static __device__ __forceinline__ int pairs_of(const Params& p, int request) {
        const Seen rows = rows_of(p, request);
        return num_pairs(rows.end - rows.begin);
    }

    // The slots of a producer thread's rows of one tile. Mostly a block of the cache has whole tiles.
    template <typename>
    static __device__ __forceinline__ void load_slots(const Params& p, const Work& w, const Copier& c, int tile,
                                                      int32_t (&slots)[4]) {
        const int first = w.first + tile * TILE_ROWS, end = w.first + w.length, request = w.query.b;
        const bool whole = p.table.block_size.value % TILE_ROWS == 0;
        const int32_t start = whole && first < end ? slot_of(p, request, first) : -1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = c.row + 16 * i;
            slots[i] = -1;
            if (first + row < end) slots[i] = !whole ? slot_of(p, request, first + row) : start < 0 ? -1 : start + row;
        }
    }
    static __device__ __forceinline__ int32_t slot_of(const Params& p, int request, int row) {
        const int32_t block = load_block(p, request, row);
        return slot_in_block(p.table, block, row - divide(row, p.table.block_size) * p.main.block_size);
    }
    static __device__ __forceinline__ const uint8_t* row_of(const Params& p, int32_t slot) {
        if (p.main.block_stride == p.main.block_size * p.main.row_stride)
            return p.main.cache + slot * p.main.row_stride;
        const Slot at = find_slot(p.main, slot);
        return at.block + at.offset * p.main.row_stride;
    }
    static __device__ __forceinline__ Line line_at(const Params& p, const Work& w, int line) {
        return line_of_request(p, w.query.b, line);
    }

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
            small<SingleQueries>().valid[tile][row] = rows[i] == nullptr ? NONE : seen_by;
        }
        if (c.row == 0) tiles()[tile] = {first, request, w.head_tile * HEADS};
    }

    struct Columns : SingleQueries::Columns {
        int tile, column;

        __device__ __forceinline__ Columns(const Reader& reader, int tile, int t)
            : SingleQueries::Columns(reader, tile, t), tile(tile), column(2 * t) {}
    };
    // Takes out what a line does not see. Returns the scale that is still to be multiplied by.
    static __device__ __forceinline__ float mask_tile(const Params& p, const Columns& columns, float (&s)[32]) {
        if (columns.whole && p.scale_log2 >= 0.0f) return p.scale_log2;
        const TileOf tile = tiles()[columns.tile];
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
};
