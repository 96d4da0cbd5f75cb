// The rows of a request, for the pipeline of bf16_sm90.cuh. A work item is 64 lines of a request: its query tokens
// times its heads, which share its rows. Each row of a tile is looked up in the block table. Each line sees rows up to
// an end of its own. The consumers compare rows with that end only in tiles that some line does not see in full
// (Columns::whole).
#pragma once
#include "attention/bf16_sm90.cuh"
#include "attention/bf16_sm90/partials.cuh"
#include "attention/dense.cuh"

// What the consumers need to mask a tile.
struct alignas(16) TileOf {
    int first, seen, first_line;  // its first row; the end of what the first token sees; the item's first line
};
static_assert(SHARED_BYTES<SingleQueries> % 16 == 0, "TileOf is aligned");
__device__ __forceinline__ TileOf (&tiles())[2] {
    return *reinterpret_cast<TileOf(*)[2]>(shared + SHARED_BYTES<SingleQueries>);
}
constexpr int DENSE_SHARED_BYTES = SHARED_BYTES<SingleQueries> + 2 * int(sizeof(TileOf));

// The rows of a request that any of its query tokens sees: begin .. end - 1. The first token sees those before `seen`.
struct RowsOf {
    int begin, end, seen;
    __device__ __forceinline__ int count() const { return end - begin; }
};
__device__ __forceinline__ RowsOf rows_of(const DenseParams& p, int request) {
    const int length = length_of_request(p, request), end = min(length, p.main.topk);
    const int seen = p.causal ? length - p.tokens + 1 : length;
    return {p.window > 0 ? min(max(seen - p.window, 0), end) : 0, end, seen};
}

struct RequestRows : SingleQueries {
    using Params = DenseParams;
    static constexpr bool POLICY = true, OVERLAPS = true;
    static constexpr Skips SKIPS = Skips::NONE;

    static __device__ __forceinline__ bool read_once(const Params& p) { return p.h_q <= HEADS; }

    // A split of a work item: rows `first` to `first + length - 1`, counted from rows.begin.
    static __device__ __forceinline__ Work split_of(int request, int tile, int number, const RowsOf& rows, int first,
                                                    int length) {
        return {{request, request, 0}, tile,    length,   num_pairs(length), number,
                rows.begin + first,    nullptr, rows.seen};
    }

    // Loads the slots of a producer thread's rows of one tile.
    template <typename>
    static __device__ __forceinline__ void load_slots(const Params& p, const Work& w, const Copier& c, int tile,
                                                      int32_t (&slots)[4]) {
        const int32_t* blocks = p.table.blocks + w.query.b * p.table.stride;
        const int end = w.first + w.length, size = p.table.block_size.value;
        const int first = opaque(w.first + tile * TILE_ROWS + c.row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + 16 * i, column = divide(row, p.table.block_size);
            const int32_t block = row < end ? blocks[column] : -1;
            slots[i] = uint32_t(block) < uint32_t(p.num_blocks) ? row + (block - column) * size : -1;
        }
    }
    static __device__ __forceinline__ const uint8_t* row_of(const Params& p, int32_t slot) {
        const int block = divide(slot, p.table.block_size), offset = slot - block * int(p.table.block_size.value);
        return p.main.cache + block * p.main.block_stride + offset * p.main.row_stride;
    }
    static __device__ __forceinline__ Line line_at(const Params& p, const Work& w, int line) {
        return line_of_request(p, w.query.b, line);
    }

    // Validity of a row: no line sees it; all lines see it; or some do, which the consumers must find out.
    enum Lines { NONE = 0, ALL = 1, SOME = 2 };

    // The first row that a token sees whose rows end at `end`.
    static __device__ __forceinline__ int begin_of(const Params& p, int end) {
        return p.window > 0 ? end - p.window : 0;
    }
    static __device__ __forceinline__ void store_validity(const Params& p, const Work& w, const Copier& c, int number,
                                                          int tile, const uint8_t* const (&rows)[4], Validity) {
        const int first = w.first + number * TILE_ROWS, end = w.listed;
        const int begin = begin_of(p, end + (p.causal ? p.tokens - 1 : 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * i + c.row;
            const Lines seen_by = first + row >= begin && first + row < end ? ALL : SOME;
            small<SingleQueries>().valid[tile][row] = rows[i] == nullptr ? NONE : seen_by;
        }
        if (c.row == 0) tiles()[tile] = {first, end, w.head_tile * HEADS};
    }

    struct Columns : SingleQueries::Columns {
        int tile, column;

        __device__ __forceinline__ Columns(const Reader& reader, int tile, int t)
            : SingleQueries::Columns(reader, tile, t), tile(tile), column(2 * t) {}
    };
    // Masks what a line does not see. Returns the scale that S is still to be multiplied by.
    static __device__ __forceinline__ float mask_tile(const Params& p, const Columns& columns, float (&s)[32]) {
        if (columns.whole && p.scale_log2 >= 0.0f) return p.scale_log2;
        const TileOf tile = tiles()[columns.tile];
        const int thread = read_thread_index(), line = tile.first_line + thread / 32 % 4 * 16 + thread % 32 / 4;
        int begin[2], end[2];  // rows that each of the thread's lines sees, counted from the thread's first column
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int seen = tile.seen + (p.causal ? divide(line + 8 * i, p.heads) : 0),
                      from = tile.first + columns.column;
            begin[i] = begin_of(p, seen) - from;
            end[i] = seen - from;
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const uint32_t two = *reinterpret_cast<const uint16_t*>(columns.valid + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = 8 * n + i % 2;
                const bool sees = two >> i % 2 * 8 & 0xff && column >= begin[i / 2] && column < end[i / 2];
                s[4 * n + i] = sees ? s[4 * n + i] * p.scale_log2 : -INF;
            }
        }
        return 1.0f;
    }
};
