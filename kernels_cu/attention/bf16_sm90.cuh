// Sparse prefill on Hopper: bf16 rows, wgmma, one persistent block an SM, 64 heads of one query at a time.
//
// Three warpgroups. Tiles of 64 rows go in pairs, an even and an odd one; both are in shared memory at once.
//
//   warpgroup 0 (multiplies)            warpgroup 1 (multiplies)            warpgroup 2 (copies)
//     S_0 = Q . K_0^T     m64n64k16       S_1 = Q . K_1^T                     Q of the next piece of work, when both
//     P_0 = 2^(S_0 - ref_0)               O += P_0 . V_0  right half            S of the last pair are done
//     O += P_0 . V_0      m64n256k16        while P_1 = 2^(S_1 - ref_1)       rows of each tile by cp.async, region
//          left half of the columns       O += P_1 . V_1                        by region, as the regions come free
//     O += P_1 . V_1
//
//   P_w is in registers where it is made, and in shared memory, over the RoPE part of K_w, for the other warpgroup.
//   Of Q, KEPT steps of k are in registers as well: what Q . K need not read from shared memory, whose rate is its limit.
//
//   A tile has two regions: region w is what warpgroup w reads last, columns 256 w .. + 255, and region 1 - w of tile w
//   holds the RoPE part as well, over which P_w is laid. D_QK 512 has no columns beyond V: P has its own space there.
//
//   full[tile][region]    copies done              128 arrivals by cp.async; region w of tile w 16 more, for validity
//                                                  (GROUPED 64)
//   empty[tile][region]   last product done        warpgroup `region`: its 128 threads for region w of tile w, else 4
//   q_full, q_empty       the same for Q           128 arrivals and 1 for the number of the piece of work; 8 arrivals
//   named 1, 2            P_0, P_1 are readable    written by one multiplying warpgroup, read by the other
//   named 3               both multiplying warpgroups, at the end of a piece of work
//
// Softmax without a running maximum that goes to and fro: P_w is taken relative to ref_w, which stays what it was until
// a logit passes it by 2^REF_SLACK, and is published with P_w. Who multiplies P_w brings its accumulators, or P_w, to
// the higher of the two references. That happens in the first tiles and then hardly ever, and needs no waiting.
//
// SPLIT: the blocks of a cluster share the rows of a query and head tile, and merge what they found (cluster_merge.cuh).
//
// GROUPED: the 64 heads are those of several neighbouring queries, the rows the union of their lists (group_lists.cu). One
// more step of Q . K adds -2^120 where a line's query does not list a row, so softmax is as above but for rows that count
// twice. Rows that one query lists meet the P of others, which is 0 there; a row that is not finite would reach them all
// the same, so a group with such a result is left to the kernel that runs after this one.
//
// Shared memory: Q 73,728 + 2 tiles of 73,728 (D_QK 576) or 3 x 65,536 + P 16,384 (D_QK 512), and about 3 KB; GROUPED 4 KB
// more.
// Registers: 232 a multiplying thread, 40 a copying one, together the 384 x 168 of the launch; no spills and no wgmma
// serialised by the compiler (both asserted by the compile test).
// What was tried, what bounds it: docs/kernels/sparse_prefill_sm90.md.
#if GROUPED
#include "attention/grouped.cuh"
#endif
#if SPLIT
#include "attention/cluster_merge.cuh"
#endif
#include "attention/pieces.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/wgmma_registers.cuh"
#include "tile/chunk.cuh"
#include "tile/finish.cuh"
#include "tile/quad.cuh"

constexpr int BLOCKS = D_QK / 64;              // column blocks of 64 values: 64 lines of 128 bytes, swizzled
constexpr int BLOCK_BYTES = TILE_ROWS * 128;
constexpr int TILE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr bool P_OVER_ROPE = D_QK > D_V;
constexpr int THREADS = 384;
constexpr float REF_SLACK = 8.0f;
constexpr int AHEAD = GROUPED ? 1 : 2;         // tiles whose list entries are loaded ahead; groups are short of registers

constexpr int Q_AT = 0, TILE_AT = TILE_BYTES, P_AT = 3 * TILE_BYTES;
constexpr int MORE_AT = P_AT + (P_OVER_ROPE ? 0 : 2 * BLOCK_BYTES);

// Groups: one more step of Q . K takes out the rows that a query does not list. To Q it adds 16 columns that name a line's
// query, to K what is to be added for each query, 0 or EXCLUDED; the second 8 of the 16 columns are zeros.
constexpr int MORE_BYTES = TILE_ROWS * 16;     // 64 lines of 8 columns, without swizzle
constexpr int MORE_Q = MORE_AT, MORE_K = MORE_Q + MORE_BYTES, MORE_ZEROS = MORE_K + 2 * MORE_BYTES;
constexpr uint32_t ONE = 0x3f80, EXCLUDED = 0xfb80;  // bfloat16: 1, -2^120
constexpr float LEAST_LISTED = -0x1p100f;

constexpr int SMALL_AT = MORE_AT + (GROUPED ? 4 * MORE_BYTES : 0);

struct Small {
    uint64_t full[2][2], empty[2][2], q_full, q_empty;
    int work, length;        // what Q is of: the number of a piece of work, -1 behind the last, and its list's length
#if GROUPED
    uint64_t twice[2][MAX_QUERIES];
#else
    uint8_t valid[2][TILE_ROWS];
#endif
    float ref[2][HEADS];     // what P_w is relative to
    float sum[2][2][HEADS];  // at the end, by turn: sums and maxima of each warpgroup's tiles
    float max[2][2][HEADS];
};
constexpr int SHARED_BYTES = SMALL_AT + int(sizeof(Small));

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }
__device__ __forceinline__ uint32_t tile_address(int tile) { return shared_address(shared) + TILE_AT + tile * TILE_BYTES; }
__device__ __forceinline__ uint32_t p_address(int tile) {
    return P_OVER_ROPE ? tile_address(tile) + 8 * BLOCK_BYTES : shared_address(shared) + P_AT + tile * BLOCK_BYTES;
}

// A piece of work: a query and a head tile, or (SPLIT) a part of its list, or a group.
struct Work {
    Query query;
    int head_tile, length, pairs;  // entries of the list, pairs of tiles
    int number;                    // of a group, which has no query of its own
    int first;                     // SPLIT: of the entries
};

__device__ __forceinline__ int num_pairs(int length) { return (length + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS); }

// gridDim.x, read where it is wanted: the compiler would keep it in a register all through the loop.
__device__ __forceinline__ int num_blocks() {
    int blocks;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
    return blocks;
}

// What one of the 64 rows of Q, S and O is for.
struct Line {
    Query query;
    int head;  // h_q or more: for nothing
};

#if GROUPED
using Arguments = GroupedParams;

__device__ __forceinline__ int num_pieces(const Arguments& p, int) { return p.num_groups; }

__device__ __forceinline__ int find_piece(const Arguments& p, int piece, int) { return p.group_lengths[piece] > 0 ? piece : -1; }

__device__ __forceinline__ int length_of(const Arguments& p, int index, int) { return p.group_lengths[index]; }

__device__ __forceinline__ Work work_of(const Arguments& p, int index, int, int length) {
    return {{}, 0, length, num_pairs(length), index, 0};
}

__device__ __forceinline__ const int32_t* list_of(const Arguments& p, const Work& w) {
    return p.rows + int64_t(w.number) * p.capacity;
}

__device__ __forceinline__ int first_query(const Arguments& p, const Work& w) { return (p.first_group + w.number) * p.queries; }

__device__ __forceinline__ Line line_at(const Arguments& p, const Work& w, int row) {
    const int query = row / p.h_q, index = first_query(p, w) + query;
    return {query_of(p, index), query < p.queries && index < p.num_queries ? row % p.h_q : p.h_q};
}

// Lines beyond the last may belong to any query.
__device__ __forceinline__ int query_of_line(const Arguments& p, int row) { return min(row / p.h_q, p.queries - 1); }
#else
using Arguments = AttentionParams;

#if SPLIT
// A cluster has one piece of a query's head tiles, and its blocks have neighbouring pairs of tiles each.
__device__ __forceinline__ int num_pieces(const Arguments&, int) { return num_blocks(); }

__device__ __forceinline__ int find_piece(const Arguments&, int piece, int) { return piece; }

__device__ __forceinline__ int first_entry(const Arguments& p, int index, int head_tiles, int rank) {
    const int blocks = cluster_size(), length = list_length(p.main, query_of(p, index / blocks / head_tiles).b);
    return min(num_pairs(length) * rank / blocks * 2 * TILE_ROWS, length);
}

__device__ __forceinline__ int length_of(const Arguments& p, int index, int head_tiles) {
    const int rank = cluster_rank();
    return first_entry(p, index, head_tiles, rank + 1) - first_entry(p, index, head_tiles, rank);
}

__device__ __forceinline__ Work work_of(const Arguments& p, int index, int head_tiles, int length) {
    const int item = index / cluster_size(), first = first_entry(p, index, head_tiles, cluster_rank());
    return {query_of(p, item / head_tiles), item % head_tiles, length, num_pairs(length), index, first};
}
#else
__device__ __forceinline__ int num_pieces(const Arguments& p, int head_tiles) { return p.num_queries * head_tiles; }

__device__ __forceinline__ int find_piece(const Arguments& p, int piece, int head_tiles) { return find_tile(p, piece, head_tiles); }

__device__ __forceinline__ int length_of(const Arguments& p, int index, int head_tiles) {
    return list_length(p.main, query_of(p, index / head_tiles).b);
}

__device__ __forceinline__ Work work_of(const Arguments& p, int index, int head_tiles, int length) {
    return {query_of(p, index / head_tiles), index % head_tiles, length, num_pairs(length), index, 0};
}
#endif

__device__ __forceinline__ const int32_t* list_of(const Arguments& p, const Work& w) {
    return p.main.indices + w.query.b * p.main.index_stride_b + w.query.s * p.main.index_stride_s + w.first;
}

__device__ __forceinline__ Line line_at(const Arguments& p, const Work& w, int head) {
    return {w.query, head};
}
#endif

// The region that warpgroup 1 - tile empties holds the RoPE part too, if P of the tile is laid over it.
constexpr __device__ bool has_rope(int tile, int region) { return P_OVER_ROPE && region != tile; }
// The region that warpgroup `tile` empties speaks for the validity bytes too, which that warpgroup reads.
constexpr __device__ bool has_validity(int tile, int region) { return region == tile; }

__device__ __forceinline__ int num_head_tiles(const Arguments& p) { return (p.h_q + HEADS - 1) / HEADS; }

// --- copying --------------------------------------------------------------------------------------------------

// A copying thread brings the 16-byte piece `lane % 8` of rows 16 i + 4 warp + lane / 8, i = 0 .. 3.
struct Copier {
    int warp, lane, row;
    uint32_t offset;  // of the piece in a column block, row `row`

    static __device__ __forceinline__ Copier here() {
        Copier c;
        c.warp = threadIdx.x / 32 - 8;
        c.lane = threadIdx.x % 32;
        c.row = 4 * c.warp + c.lane / 8;
        c.offset = c.row * 128 + (((c.lane % 8) ^ (c.row & 7)) << 4);  // 16 rows on, the swizzle is the same
        return c;
    }
};

// Column blocks `begin` to `end` - 1 of this thread's four rows; null rows become zeros.
template <int BEGIN, int END>
__device__ __forceinline__ void copy_blocks(const Copier& c, uint32_t tile, const uint8_t* const (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int b = BEGIN; b < END; ++b)
            cp_async_16(tile + b * BLOCK_BYTES + i * 2048 + c.offset, rows[i] + b * 128 + c.lane % 8 * 16, rows[i] != nullptr);
    }
}

// The list entries of this thread's rows of one tile; -1 where there is none.
__device__ __forceinline__ void load_slots(const Arguments& p, const Work& w, const Copier& c, int tile, int32_t (&slots)[4]) {
    const int32_t* list = list_of(p, w);
    const int first = here_only(tile * TILE_ROWS + c.row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int entry = first + 16 * i;
        slots[i] = entry < w.length ? list[entry] : -1;
    }
}

// What is known of a tile's rows besides their values, where softmax or Q . K finds it.
#if GROUPED
constexpr int VALIDITY_LANES = 4;  // of each eight copying threads, those that bring it
using Validity = uint32_t;         // `excluded` of row 16 (lane % 8) + c.row

__device__ __forceinline__ Validity load_validity(const Arguments& p, const Work& w, const Copier& c, int tile) {
    const int entry = tile * TILE_ROWS + 16 * (c.lane % 4) + c.row;
    return entry < w.length ? p.excluded[int64_t(w.number) * p.capacity + entry] : 0xff;
}

__device__ __forceinline__ void bring_validity(
    const Arguments& p, const Work& w, const Copier& c, int number, int tile, const uint8_t* const (&)[4], Validity excluded) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t two = excluded >> 2 * i & 3;
        words[i] = ((two | two << 15) & 0x10001) * EXCLUDED;
    }
    *reinterpret_cast<Vec16*>(shared + MORE_K + tile * MORE_BYTES + (16 * (c.lane % 8) + c.row) * 16) = {
        words[0], words[1], words[2], words[3]};
    if (c.lane % 8 == 0 && c.row < p.queries)
        cp_async_8(shared_address(&small().twice[tile][c.row]),
                   p.twice + int64_t(w.number) * p.twice_capacity + number * p.queries + c.row, number * TILE_ROWS < w.length);
}
#else
constexpr int VALIDITY_LANES = 1;
struct Validity {};

__device__ __forceinline__ Validity load_validity(const Arguments&, const Work&, const Copier&, int) { return {}; }

__device__ __forceinline__ void bring_validity(
    const Arguments&, const Work&, const Copier& c, int, int tile, const uint8_t* const (&rows)[4], Validity) {
#pragma unroll
    for (int i = 0; i < 4; ++i) small().valid[tile][16 * i + c.row] = rows[i] != nullptr;
}
#endif

// Region `REGION` of tile `TILE` once it is empty: half of V's columns, and RoPE where P of the tile is laid over it.
template <int TILE, int REGION>
__device__ __forceinline__ void copy_region(
    const Arguments& p, const Work& w, const Copier& c, int pair, const uint8_t* const (&rows)[4], Validity validity, uint32_t parity) {
    Small& sm = small();
    mbarrier_wait(shared_address(&sm.empty[TILE][REGION]), parity);
    copy_blocks<4 * REGION, 4 * REGION + 4>(c, tile_address(TILE), rows);
    if constexpr (has_rope(TILE, REGION)) copy_blocks<8, 9>(c, tile_address(TILE), rows);
    if constexpr (has_validity(TILE, REGION)) {
        if (c.lane % 8 < VALIDITY_LANES) {
            bring_validity(p, w, c, 2 * pair + TILE, TILE, rows, validity);
            mbarrier_arrive(shared_address(&sm.full[TILE][REGION]));
        }
    }
    mbarrier_arrive_after_copies(shared_address(&sm.full[TILE][REGION]));
}

__device__ __forceinline__ void find_rows(const Arguments& p, const int32_t (&slots)[4], const uint8_t* (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool valid = slots[i] >= 0 && slots[i] < p.main.num_slots;
        rows[i] = valid ? p.main.cache + slots[i] * p.main.row_stride : nullptr;
    }
}

// The rows of Q that this thread copies: those of its heads, null beyond the last.
__device__ __forceinline__ void find_q(const Arguments& p, const Work& w, const Copier& c, const uint8_t* (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Line line = line_at(p, w, w.head_tile * HEADS + 16 * i + c.row);
        const bf16* q = p.q + line.query.b * p.q_b + line.query.s * p.q_s + line.head * p.q_h;
        rows[i] = line.head < p.h_q ? reinterpret_cast<const uint8_t*>(q) : nullptr;
    }
}

// What the multiplying warpgroups work on next.
__device__ __forceinline__ void announce(int work, int length) {
    if (threadIdx.x % 128 != 0) return;
    small().work = work;
    small().length = length;
    mbarrier_arrive(shared_address(&small().q_full));
}

__device__ __forceinline__ void copy_all(const Arguments& p) {
    const Copier c = Copier::here();
    Small& sm = small();
    uint32_t parity = 1, q_parity = 1;  // the first wait for an empty space is no wait
    const int head_tiles = num_head_tiles(p);
    auto find = [&](int piece) { return find_piece(p, piece, head_tiles); };
    for_each_piece(num_pieces(p, head_tiles), blockIdx.x, num_blocks, find, [&](int index) {
        const Work w = work_of(p, index, head_tiles, length_of(p, index, head_tiles));
        int32_t even[4], odd[4];  // list entries of the next even and odd tile
        const uint8_t* rows[4];
        load_slots(p, w, c, 0, even);
        if (AHEAD == 2) load_slots(p, w, c, 1, odd);

        // Q is a tile whose rows are heads.
        find_q(p, w, c, rows);
        mbarrier_wait(shared_address(&sm.q_empty), q_parity);
        q_parity ^= 1;
        announce(index, w.length);
        copy_blocks<0, BLOCKS>(c, shared_address(shared) + Q_AT, rows);
        mbarrier_arrive_after_copies(shared_address(&sm.q_full));

        for (int pair = 0; pair < w.pairs; ++pair) {
            find_rows(p, even, rows);
            const Validity even_validity = load_validity(p, w, c, 2 * pair);
            load_slots(p, w, c, 2 * pair + AHEAD, AHEAD == 2 ? even : odd);
            copy_region<0, 0>(p, w, c, pair, rows, even_validity, parity);
            copy_region<0, 1>(p, w, c, pair, rows, even_validity, parity);
            find_rows(p, odd, rows);
            const Validity odd_validity = load_validity(p, w, c, 2 * pair + 1);
            load_slots(p, w, c, 2 * pair + 1 + AHEAD, AHEAD == 2 ? odd : even);
            copy_region<1, 0>(p, w, c, pair, rows, odd_validity, parity);
            copy_region<1, 1>(p, w, c, pair, rows, odd_validity, parity);
            parity ^= 1;
        }
    });
    mbarrier_wait(shared_address(&sm.q_empty), q_parity);
    announce(-1, 0);
    mbarrier_arrive(shared_address(&sm.q_full));
}

// --- multiplying ----------------------------------------------------------------------------------------------

// What a multiplying thread knows of its two heads (rows g and g + 8 of its warp's 16). `ref` is what the accumulators
// and `sum` are relative to; `sum` and `max` cover this thread's columns of this warpgroup's tiles only.
struct Softmax {
    float ref[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, max[2] = {-INF, -INF};
};

// The steps of k whose part of Q a multiplying warpgroup keeps in registers, so that Q . K reads only K there: number
// KEPT_EVERY - 1, and so on.
constexpr int KEPT = GROUPED ? 4 : 6, KEPT_EVERY = 4;

template <int N>
__device__ __forceinline__ void keep_q(int warp, int lane, uint32_t (&kept)[N][4]) {
    const int line = 16 * warp + lane % 16;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int step = KEPT_EVERY * n + KEPT_EVERY - 1, chunk = step % 4 * 2 + lane / 16;
        ldmatrix_x4(kept[n], shared_address(shared) + Q_AT + step / 4 * BLOCK_BYTES + line * 128 + ((chunk ^ (line & 7)) << 4));
    }
}

// Start S = Q . K^T of a whole tile, the regions in the order in which they are copied.
template <int N>
__device__ __forceinline__ void start_qk(int tile, uint32_t parity, const uint32_t (&kept)[N][4], float (&s)[32]) {
    const uint64_t q = wgmma_operand(shared_address(shared) + Q_AT, 1024, 16), k = wgmma_operand(tile_address(tile), 1024, 16);
    auto multiply = [&](int block, bool first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint64_t a = wgmma_further(q, block * BLOCK_BYTES + 32 * i), b = wgmma_further(k, block * BLOCK_BYTES + 32 * i);
            const int step = 4 * block + i;
            if (first && i == 0) {
                wgmma_m64n64k16_first(s, a, b);
            } else if (step % KEPT_EVERY == KEPT_EVERY - 1 && step / KEPT_EVERY < N) {
                wgmma_registers<Step::BF16>(s, kept[step / KEPT_EVERY], b);
            } else {
                wgmma_m64n64k16(s, a, b);
            }
        }
    };
#pragma unroll
    for (int region = 0; region < 2; ++region) {
        mbarrier_wait(shared_address(&small().full[tile][region]), parity);
        fence_proxy_async();
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < 4; ++block) multiply(4 * region + block, region + block == 0);
        if (has_rope(tile, region)) multiply(8, false);
        if (GROUPED && has_validity(tile, region)) {
            const int more_k = MORE_K + tile * MORE_BYTES;
            wgmma_m64n64k16(s, wgmma_plain_operand(shared_address(shared) + MORE_Q, 128, MORE_ZEROS - MORE_Q),
                            wgmma_plain_operand(shared_address(shared) + more_k, 128, MORE_ZEROS - more_k));
        }
    }
    wgmma_commit();
}

#if GROUPED
// The queries that a thread's two rows belong to.
struct Reader {
    uint32_t queries;  // 16 bits each

    static __device__ __forceinline__ Reader here(const Arguments& p, int warp, int lane) {
        const int row = 16 * warp + lane / 4;
        return {uint32_t(query_of_line(p, row) | query_of_line(p, row + 8) << 16)};
    }
};

// Which of a thread's columns count twice: bit 8 (n % 4) + k of word n / 4 for the two columns of its n-th eight.
struct Columns {
    uint32_t twice[2][2];
    bool once;  // for all of the warp: none does

    __device__ __forceinline__ Columns(const Reader& reader, int tile, int t) {
        uint32_t any = 0;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const Vec8 words = *reinterpret_cast<const Vec8*>(&small().twice[tile][reader.queries >> 16 * row & 0xffff]);
            twice[row][0] = words.x >> 2 * t;
            twice[row][1] = words.y >> 2 * t;
            any |= twice[row][0] | twice[row][1];
        }
        once = __all_sync(~0u, (any & 0x03030303) == 0);
    }
};

// The rows that are not listed are as good as taken out already.
__device__ __forceinline__ float mask_tile(const Arguments& p, const Columns&, float (&)[32]) { return p.scale_log2; }

__device__ __forceinline__ float top_of(float top, float scale) { return top < LEAST_LISTED ? -INF : top * scale; }

__device__ __forceinline__ void count_twice(const Columns& columns, int row, float (&s)[32]) {
    if (columns.once) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (i / 2 % 2 == row && columns.twice[row][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1) s[i] += s[i];
}
#else
struct Reader {
    static __device__ __forceinline__ Reader here(const Arguments&, int, int) { return {}; }
};

// The validity bytes of a thread's columns.
struct Columns {
    const uint8_t* valid;

    __device__ __forceinline__ Columns(const Reader&, int tile, int t) : valid(small().valid[tile] + 2 * t) {}
};

// Takes out what is not valid. Returns the scale that is still to be multiplied by.
__device__ __forceinline__ float mask_tile(const Arguments& p, const Columns& columns, float (&s)[32]) {
    uint32_t all = 0x0101;
    float scale = 1.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) all &= *reinterpret_cast<const uint16_t*>(columns.valid + 8 * n);
    if (!__all_sync(~0u, all == 0x0101) || p.scale_log2 < 0.0f) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const uint32_t two = *reinterpret_cast<const uint16_t*>(columns.valid + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[4 * n + i] = two >> (i % 2 * 8) & 1 ? s[4 * n + i] * p.scale_log2 : -INF;
        }
    } else {
        scale = p.scale_log2;
    }
    return scale;
}

__device__ __forceinline__ float top_of(float top, float scale) { return top * scale; }

__device__ __forceinline__ void count_twice(const Columns&, int, float (&)[32]) {}
#endif

// S becomes P relative to `ref`, rounded, as the A fragments of four steps of k; `sum` is that of P before rounding.
__device__ __forceinline__ void softmax_tile(
    const Arguments& p, const Columns& columns, float (&s)[32], Softmax& state, float (&ref)[2], float (&sum)[2],
    uint32_t (&prob)[4][4]) {
    const float scale = mask_tile(p, columns, s);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float top = -INF;
#pragma unroll
        for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(s[4 * n + 2 * row], s[4 * n + 2 * row + 1]));
        top = top_of(quad_max(top), scale);
        state.max[row] = fmaxf(state.max[row], top);
        ref[row] = top > state.ref[row] + REF_SLACK ? top : state.ref[row];
        const float base = ref[row] == -INF ? 0.0f : ref[row];
        sum[row] = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float &x = s[4 * n + 2 * row], &y = s[4 * n + 2 * row + 1];
            x = exp2_approx(x * scale - base);
            y = exp2_approx(y * scale - base);
        }
        count_twice(columns, row, s);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float x = s[4 * n + 2 * row], y = s[4 * n + 2 * row + 1];
            sum[row] += x + y;
            prob[n / 2][n % 2 * 2 + row] = pack_bf16x2(x, y);
        }
    }
}

// Word `t` of the 16 bytes `chunk` of a line of P.
__device__ __forceinline__ uint32_t& p_word(int tile, int line, int chunk, int t) {
    return *reinterpret_cast<uint32_t*>(
        shared + (p_address(tile) - shared_address(shared)) + line * 128 + ((chunk ^ (line & 7)) << 4) + 4 * t);
}

// Publish P and its reference for the other warpgroup.
__device__ __forceinline__ void publish_p(int tile, int warp, int lane, const uint32_t (&prob)[4][4], const float (&ref)[2]) {
    const int g = lane / 4, t = lane % 4, row = 16 * warp + g;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p_word(tile, row + i % 2 * 8, 2 * k + i / 2, t) = prob[k][i];
        }
    }
    if (t == 0) {
        small().ref[tile][row] = ref[0];
        small().ref[tile][row + 8] = ref[1];
    }
    fence_proxy_async();
    named_barrier_arrive(1 + tile, 256);
}

// Wait for the other warpgroup's P and its reference.
__device__ __forceinline__ void take_p(int tile, int warp, int lane, float (&ref)[2]) {
    named_barrier_sync(1 + tile, 256);
    const int row = 16 * warp + lane / 4;
    ref[0] = small().ref[tile][row];
    ref[1] = small().ref[tile][row + 8];
}

// Before the product with P relative to `ref`: accumulators come to the higher of their references. Rarely anything to
// do; then no product may be under way. False: there was nothing.
__device__ __forceinline__ bool raise(Softmax& state, const float (&ref)[2], float (&o)[128]) {
    if (__all_sync(~0u, ref[0] == state.ref[0] && ref[1] == state.ref[1])) return false;
    wgmma_wait<0>();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float to = fmaxf(state.ref[row], ref[row]), by = factor(state.ref[row], to);
        state.sum[row] *= by;
        state.ref[row] = to;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            o[4 * j + 2 * row] *= by;
            o[4 * j + 2 * row + 1] *= by;
        }
    }
    return true;
}

// The same, and so does P, the other warpgroup's, in shared memory. A warp's products read its own rows only.
__device__ __forceinline__ void raise_and_move(int tile, int warp, int lane, Softmax& state, const float (&ref)[2], float (&o)[128]) {
    if (!raise(state, ref, o)) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float by = factor(ref[row], state.ref[row]);
#pragma unroll 1
        for (int chunk = 0; chunk < 8; ++chunk) {
            uint32_t& two = p_word(tile, 16 * warp + lane / 4 + 8 * row, chunk, lane % 4);
            two = pack_bf16x2(bf16_low(two) * by, bf16_high(two) * by);
        }
    }
    fence_proxy_async();
    __syncwarp();
}

__device__ __forceinline__ uint64_t v_operand(int tile, int half) {
    return wgmma_operand(tile_address(tile) + 4 * half * BLOCK_BYTES, 1024, BLOCK_BYTES);
}

// Start O += P . V for this warpgroup's half of V's columns, with its own P, ...
__device__ __forceinline__ void start_pv(int tile, int half, const uint32_t (&prob)[4][4], float (&o)[128]) {
    const uint64_t v = v_operand(tile, half);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64n256k16(o, prob[k], wgmma_further(v, 2048 * k));
    wgmma_commit();
}

// ... with the other warpgroup's.
__device__ __forceinline__ void start_pv(int tile, int half, float (&o)[128]) {
    const uint64_t p = wgmma_operand(p_address(tile), 1024, 16), v = v_operand(tile, half);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_m64n256k16(o, wgmma_further(p, 32 * k), wgmma_further(v, 2048 * k));
    wgmma_commit();
}

__device__ __forceinline__ void release(uint64_t& barrier, int lane) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&barrier), lane);
}

#if SPLIT
// What this block found goes to the cluster's parts, and a share of what all found to the results.
template <int W>
__device__ __forceinline__ void merge(
    const Arguments& p, const Work& w, int warp, int lane, const float (&sum)[2], const float (&max)[2], const Softmax& state, const float (&o)[128]) {
    const Parts<4> parts(p, w.query.index, w.head_tile, num_head_tiles(p));
    const int thread = 128 * W + 32 * warp + lane;
    // Unit 512 j + 256 i + thread: of head i columns 2 t and 2 t + 1 of the eights 2 j and 2 j + 1.
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float *first = &o[8 * j + 2 * i], *second = first + 4;
            parts.write(512 * j + 256 * i + thread, make_float4(first[0], first[1], second[0], second[1]));
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (W == 0 && lane % 4 == 0) parts.write_statistics(16 * warp + lane / 4 + 8 * i, state.ref[i], sum[i], max[i]);
    }
    auto head_of = [](int unit) { return unit % 128 / 32 * 16 + unit % 32 / 4 + unit / 256 % 2 * 8; };
    auto finish = [&](int local, bool write, float ref, float total, float largest) {
        return finish_merged_head(p, w.query, w.head_tile * HEADS + local, write, ref, total, largest);
    };
    auto column_of = [](int unit) { return unit % 256 / 128 * 256 + unit / 512 * 16 + unit % 4 * 2; };
    auto sync = [] { named_barrier_sync(3, 256); };
    parts.merge<256>(reinterpret_cast<float*>(shared), head_of, column_of, finish, sync, [&](int local, int column, const float (&v)[4]) {  // over Q
        const int head = w.head_tile * HEADS + local;
        if (head >= p.h_q) return;
        write_output(p, w.query, head, column, v[0], v[1]);
        write_output(p, w.query, head, column + 8, v[2], v[3]);
    });
}
#endif

// The results of one piece of work: this warpgroup's half of the columns.
template <int W>
__device__ __forceinline__ void finish(
    const Arguments& p, const Work& w, int warp, int lane, int turn, const Softmax& state, const float (&o)[128]) {
    Small& sm = small();
    asm volatile("" : "+r"(lane));  // so that nothing derived from it is kept in registers all through the loop
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(state.sum[i]);
        if (t == 0) {
            sm.sum[turn][W][16 * warp + g + 8 * i] = sum;
            sm.max[turn][W][16 * warp + g + 8 * i] = state.max[i];
        }
    }
    named_barrier_sync(3, 256);
#if SPLIT
    float sums[2], maxima[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 16 * warp + g + 8 * i;
        sums[i] = sm.sum[turn][0][row] + sm.sum[turn][1][row];
        maxima[i] = fmaxf(sm.max[turn][0][row], sm.max[turn][1][row]);
    }
    merge<W>(p, w, warp, lane, sums, maxima, state, o);
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 16 * warp + g + 8 * i;
        const Line line = line_at(p, w, w.head_tile * HEADS + row);
        const float sum = sm.sum[turn][0][row] + sm.sum[turn][1][row];
        const HeadResult result = {fmaxf(sm.max[turn][0][row], sm.max[turn][1][row]),
                                   sum == 0.0f ? -INF : state.ref[i] + log2_approx(sum)};
        const bool here = line.head < p.h_q;  // all lanes of the quad agree, and all take part in the shuffles
        const float scale = !here || sum == 0.0f ? 0.0f : sink_factor(p, line.head, result.lse) / sum;
        bf16* out = p.out + line.query.b * p.out_b + line.query.s * p.out_s + line.head * p.out_h + 256 * W;
        const bool aligned = p.flags & WIDE_OUT;
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
            uint32_t packed[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float* two = &o[4 * (j + k) + 2 * i];
                packed[k] = pack_bf16x2(two[0] * scale, two[1] * scale);
            }
            transpose_quad(packed, t);
            if (here) store_chunk(out + CHUNK * (j + t), {packed[0], packed[1], packed[2], packed[3]}, aligned);
        }
        if (W == 0 && t == 0 && here) write_statistics(p, line.query, line.head, result);
    }
#endif
#if GROUPED
    // A row that is not finite reached all queries of the group, named by them or not: they are left after all.
    float probe = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) probe += o[i] * 0.0f;
    const int query = first_query(p, w) + lane;
    if (__any_sync(~0u, probe != 0.0f) && lane < p.queries && query < p.num_queries) p.left[query] = call_length(p, query);
#endif
}

template <int W>
__device__ __forceinline__ void multiply_all(const Arguments& p) {
    Small& sm = small();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const Reader reader = Reader::here(p, warp, lane);
    uint32_t parity = 0, turn = 0;
#pragma unroll 1
    for (;; turn ^= 1) {
        Softmax state;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        mbarrier_wait(shared_address(&sm.q_full), turn);
        if (sm.work < 0) break;
        const Work w = work_of(p, sm.work, num_head_tiles(p), sm.length);
        uint32_t kept[KEPT][4];
        keep_q(warp, lane, kept);
        if (w.pairs == 0) release(sm.q_empty, lane);
        for (int pair = 0; pair < w.pairs; ++pair) {
            float s[32];
            start_qk(W, parity, kept, s);
            parity ^= 1;
            uint32_t mine[4][4];
            float my_ref[2], my_sum[2], other_ref[2];
            if constexpr (W == 0) {
                wgmma_wait<0>();
            } else {
                // P_0 is there by now: its product runs while this warpgroup computes P_1.
                take_p(0, warp, lane, other_ref);
                raise_and_move(0, warp, lane, state, other_ref, o);
                start_pv(0, W, o);
                wgmma_wait<1>();
            }
            if (pair + 1 == w.pairs) release(sm.q_empty, lane);
            softmax_tile(p, Columns(reader, W, lane % 4), s, state, my_ref, my_sum, mine);
            publish_p(W, warp, lane, mine, my_ref);
            if constexpr (W == 1) {
                wgmma_wait<0>();
                release(sm.empty[0][1], lane);
            }
            raise(state, my_ref, o);  // my_ref is not below state.ref: P stays as it was published
            state.sum[0] += my_sum[0];
            state.sum[1] += my_sum[1];
            start_pv(W, W, mine, o);
            wgmma_wait<0>();
            mbarrier_arrive(shared_address(&sm.empty[W][W]));  // every thread: each has read validity bytes
            if constexpr (W == 0) {
                take_p(1, warp, lane, other_ref);
                raise_and_move(1, warp, lane, state, other_ref, o);
                start_pv(1, W, o);
                wgmma_wait<0>();
                release(sm.empty[1][0], lane);
            }
        }
        finish<W>(p, w, warp, lane, turn, state, o);
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(const __grid_constant__ Arguments p) {
    Small& sm = small();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int region = 0; region < 2; ++region) {
                mbarrier_init(shared_address(&sm.full[tile][region]), 128 + (has_validity(tile, region) ? 16 * VALIDITY_LANES : 0));
                mbarrier_init(shared_address(&sm.empty[tile][region]), has_validity(tile, region) ? 128 : 4 * WARP_ARRIVALS);
            }
        }
        mbarrier_init(shared_address(&sm.q_full), 128 + 1);
        mbarrier_init(shared_address(&sm.q_empty), 8 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
#if GROUPED
    for (int i = threadIdx.x; i < TILE_ROWS * 8; i += THREADS) {
        reinterpret_cast<bf16*>(shared + MORE_Q)[i] = i % 8 == query_of_line(p, i / 8) ? ONE : 0;
        reinterpret_cast<bf16*>(shared + MORE_ZEROS)[i] = 0;
    }
    fence_proxy_async();
#endif
    __syncthreads();
#if SPLIT
    wait_for_earlier_kernels();
    let_next_kernel_start();
#endif
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 2) {
        give_registers<40>();
        copy_all(p);
#if SPLIT
        cluster_sync_with_one_fence(false);  // barriers of the cluster count every thread
#endif
    } else {
        take_registers<232>();
        if (warpgroup == 0) {
            multiply_all<0>(p);
        } else {
            multiply_all<1>(p);
        }
    }
}
