// Sparse attention of flat bf16 rows on Hopper, for few heads. The 64 lines of Q are the heads of several neighbouring
// queries, a query group. The rows are the union of their index lists, which group_lists.cu has made. Pipeline and
// shared memory: bf16_sm90.cuh.
//
// A query of the group must ignore rows that only others list. One more step of k in Q . K adds -2^120 to their
// logits. So the softmax is that of a single query, but for rows that a list names twice: these count twice
// (count_twice). An ignored row has P = 0, but it is still multiplied by V, so a row that is not finite would spoil
// the results of all queries. A group with such a result is left to the kernel that runs next.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to bf16; results. Products
// and sums are float32 (bf16_sm90.cuh).
//
// grid: x persistent CTAs over query groups.
#include "attention/bf16_sm90.cuh"
#include "attention/grouped.cuh"

// The additional step of k has 16 columns, of which the last 8 are zeros. In Q, the first 8 are the unit vector of the
// line's query. In K, they hold for each query 0 or EXCLUDED, which is added to its logits.
constexpr int FACTOR_BYTES = TILE_ROWS * 16;  // 64 lines of 8 columns, not swizzled
constexpr int FACTOR_Q = EXTRA_AT, FACTOR_K = FACTOR_Q + FACTOR_BYTES, FACTOR_ZEROS = FACTOR_K + 2 * FACTOR_BYTES;
constexpr uint32_t ONE = 0x3f80, EXCLUDED = 0xfb80;  // bfloat16: 1, -2^120
constexpr float LEAST_LISTED = -0x1p100f;
static_assert(MAX_QUERIES == 8, "a bit of `excluded` and a column of the additional step for each query");

struct Grouped : Default {
    using Params = GroupedParams;
    static constexpr int EXTRA_BYTES = 4 * FACTOR_BYTES,
                         KEPT_Q_STEPS = 4;  // fewer than elsewhere: registers are short
    static constexpr bool EXCLUDES = true;

    static __device__ __forceinline__ int num_items(const Params& p, int) { return p.num_groups; }
    static __device__ __forceinline__ int find_item(const Params& p, int item, int) {
        return p.group_lengths[item] > 0 ? item : -1;
    }
    static __device__ __forceinline__ int length_of(const Params& p, int index, int) { return p.group_lengths[index]; }
    static __device__ __forceinline__ Work work_of(const Params& p, int index, int, int length) {
        return {{}, 0, length, num_pairs(length), index, 0};
    }
    static __device__ __forceinline__ const int32_t* list_of(const Params& p, const Work& w) {
        return p.rows + int64_t(w.number) * p.capacity;
    }
    static __device__ __forceinline__ int first_query(const Params& p, const Work& w) {
        return (p.first_group + w.number) * p.queries;
    }
    static __device__ __forceinline__ Line line_at(const Params& p, const Work& w, int row) {
        const int query = row / p.h_q, index = first_query(p, w) + query;
        return {query_of(p, index), query < p.queries && index < p.num_queries ? row % p.h_q : p.h_q};
    }
    // Padding lines may belong to any query.
    static __device__ __forceinline__ int query_of_line(const Params& p, int row) {
        return min(row / p.h_q, p.queries - 1);
    }

    static constexpr int VALIDITY_LANES = 4;
    using Validity = uint32_t;  // `excluded` of row 16 (lane % 4) + c.row
    static __device__ __forceinline__ Validity load_validity(const Params& p, const Work& w, const Copier& c,
                                                             int tile) {
        const int entry = tile * TILE_ROWS + 16 * (c.lane % 4) + c.row;
        return entry < w.length ? p.excluded[int64_t(w.number) * p.capacity + entry] : 0xff;
    }
    static __device__ __forceinline__ void store_validity(const Params& p, const Work& w, const Copier& c, int number,
                                                          int tile, const uint8_t* const (&)[4], Validity excluded) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t two = excluded >> 2 * i & 3;
            words[i] = ((two | two << 15) & 0x10001) * EXCLUDED;
        }
        *reinterpret_cast<Vec16*>(shared + FACTOR_K + tile * FACTOR_BYTES + (16 * (c.lane % 8) + c.row) * 16) = {
            words[0], words[1], words[2], words[3]};
        if (c.lane % 8 == 0 && c.row < p.queries)
            cp_async_8(shared_address(&small<Grouped>().twice[tile][c.row]),
                       p.twice + int64_t(w.number) * p.twice_capacity + number * p.queries + c.row,
                       number * TILE_ROWS < w.length);
    }
    static __device__ __forceinline__ void exclude(int tile, float (&s)[32]) {
        const int k = FACTOR_K + tile * FACTOR_BYTES;
        wgmma<Values::BF16, Sum::ADD, Major::K, Major::K>(
            s, wgmma_plain_operand(shared_address(shared) + FACTOR_Q, 128, FACTOR_ZEROS - FACTOR_Q),
            wgmma_plain_operand(shared_address(shared) + k, 128, FACTOR_ZEROS - k));
    }

    // The queries of a thread's two lines.
    struct Reader {
        uint32_t queries;  // 16 bits each

        static __device__ __forceinline__ Reader here(const Params& p, int warp, int lane) {
            const int row = 16 * warp + lane / 4;
            return {uint32_t(query_of_line(p, row) | query_of_line(p, row + 8) << 16)};
        }
    };
    // Which of a thread's columns count twice: bits 8 (n % 4) and + 1 of word n / 4, of its two columns in the n-th
    // eight.
    struct Columns {
        uint32_t twice[2][2];
        bool once;  // in the whole warp no column counts twice

        __device__ __forceinline__ Columns(const Reader& reader, int tile, int t) {
            uint32_t any = 0;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const Vec8 words =
                    *reinterpret_cast<const Vec8*>(&small<Grouped>().twice[tile][reader.queries >> 16 * row & 0xffff]);
                twice[row][0] = words.x >> 2 * t;
                twice[row][1] = words.y >> 2 * t;
                any |= twice[row][0] | twice[row][1];
            }
            once = __all_sync(~0u, (any & 0x03030303) == 0);
        }
    };
    // The additional step has masked the rows that a query does not list.
    static __device__ __forceinline__ float mask_tile(const Params& p, const Columns&, float (&)[32]) {
        return p.scale_log2;
    }
    static __device__ __forceinline__ float top_of(float top, float scale) {
        return top < LEAST_LISTED ? -INF : top * scale;
    }
    static __device__ __forceinline__ void count_twice(const Columns& columns, int row, float (&s)[32]) {
        if (columns.once) return;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (i / 2 % 2 == row && columns.twice[row][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1) s[i] += s[i];
    }

    static __device__ __forceinline__ void init(const Params& p) {
        for (int i = threadIdx.x; i < TILE_ROWS * 8; i += THREADS) {
            reinterpret_cast<bf16*>(shared + FACTOR_Q)[i] = i % 8 == query_of_line(p, i / 8) ? ONE : 0;
            reinterpret_cast<bf16*>(shared + FACTOR_ZEROS)[i] = 0;
        }
        fence_proxy_async();
    }

    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        write_lines<Grouped>(p, w, warpgroup, warp, lane, total_of, o);
        // A row that is not finite has spoilt the results of all queries of the group, so all of them are left to the
        // next kernel. o * 0 is 0 for finite numbers, else NaN.
        float probe = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; ++i) probe += o[i] * 0.0f;
        const int query = first_query(p, w) + lane;
        if (__any_sync(~0u, probe != 0.0f) && lane < p.queries && query < p.num_queries)
            p.left[query] = call_length(p, query);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_grouped_sm90(const __grid_constant__ GroupedParams p) {
    run<Grouped>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<Grouped>;
