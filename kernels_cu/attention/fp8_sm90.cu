// Sparse attention of FP8 rows on Hopper, 32 or 64 heads of a query at a time: wgmma with KV rows from registers.
//
// Rows stay in shared memory as they lie in the cache. No tile of 16-bit rows is ever written: the multiplying warps widen
// a row's bytes on their way into the A operand, for both products with KV rows or value columns as the M side,
//
//   S^T = K . Q^T     64 rows x heads       a thread reads 16 bytes of its two rows; columns of Q are permuted to match
//   O^T = V^T . P^T   512 columns x heads   ldmatrix.trans of byte pairs, sorted out by prmt
//
//   warpgroup 0 (multiplies)        warpgroup 1 (multiplies)        warpgroup 2 (copies)
//     S_2 = K_2 . Q^T                 softmax, P_1 published          rows by cp.async into a ring of UNITS x 16 rows, as
//     O += V_1 . P_1   columns        O += V_1 . P_1   columns        units come free
//     softmax, P_2     0 .. 255       S_3 = K_3 . Q^T  256 .. 511
//     O += V_2 . P_2                  O += V_2 . P_2
//     S_4 = ...                       softmax, P_3 ...
//
//   Warpgroup w makes S of every second tile of 64 rows; both multiply every P with their half of the columns. So one's
//   softmax runs beside the other's products.
//
// e4m3 is exact in f16. Scales: a row's r is a power of two at or above its largest scale; its value columns are widened to
// f16 as e4m3 * (scale / r), and r goes into the exponent of P^T = 2^(logit + log2 r - ref), which f16 holds too, since ref
// is a reference for just that sum, raised when a P^T passes MAX_P. The denominator adds P^T / r.
//   V32_FP8: S^T is exact: chunks of 128 columns, S^T is multiplied by scale_c / scale_c+1 between them; RoPE in bfloat16.
//   V4_FP8:  all scales are powers of two: K is widened to e4m3 * (scale / r) too, exact; RoPE as f16, divided by r, which goes
//            back to where it lay and is a value column as it is.
// Q is f16 times a power of two that brings its largest value to 2^13 .. 2^14.
//
// What is issued beside wgmma takes turns with it: float32 arithmetic takes its time, the rest waits until it leaves room
// (uniform instructions cost nothing). So large batches take as long as there are instructions.
//
// MERGES: the splits of a query are the blocks of a cluster, which merge what they found (cluster_merge.cuh). Without,
// combine.cu merges splits.
//
//   full[unit], empty[unit]   mbarriers: copies done (a share: 32 lanes, and one for `valid`); read for the last time (8 warps)
//   q_full, q_free            mbarriers: Q's bulk copies have come; the last product with it is done (8 warps)
//   named 1, 2                P of warpgroup 0's, 1's tiles is there: 128 arrive, the other 128 wait
//   named 3, 4                the 128 threads of a multiplying warpgroup
//   named 5                   all multiplying threads
//
// Shared memory: Q, two P (heads x 64 f16), the ring, statistics.
// Registers: 232 a multiplying thread, 40 a copying one, together the 384 x 168 of the launch.
// What was tried, what bounds it: docs/kernels/sparse_decode_sm90.md.
#include "attention/cluster_merge.cuh"
#include "attention/lists.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid.cuh"
#include "ptx/limits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma_registers.cuh"
#include "tile/chunk.cuh"
#include "tile/finish.cuh"
#include "tile/heads.cuh"
#include "tile/row_tile.cuh"

constexpr bool V32 = Rows::FOLDED_SCALES != 0;  // else V4_FP8
constexpr int WARPGROUP = 128, THREADS = 3 * WARPGROUP;
// Of a unit SHARES copying warps bring WARP_ROWS rows each. Four have it there sooner; one takes fewer instructions.
constexpr int UNIT_ROWS = 16, SHARES = MERGES ? 4 : 1, WARP_ROWS = UNIT_ROWS / SHARES;
constexpr int STRIDE = Rows::STAGED_BYTES, UNIT_BYTES = UNIT_ROWS * STRIDE;
constexpr int NOPE_BLOCKS = D_NOPE / 64, Q_BLOCKS = NOPE_BLOCKS + 1;  // blocks of 64 columns; the last is RoPE
constexpr int LINES_BYTES = HEADS * 128;  // a line of 64 16-bit values for each head, swizzled: a block of Q, or a P
constexpr int CHUNKS = V32 ? 4 : NOPE_BLOCKS;  // columns with a scale of their own
constexpr int COLUMNS = HEADS / 4;             // heads a thread holds of S^T and O^T: 8 j + 2 t + k at 2 j + k
// Denominators a thread holds: of all its heads, over its own rows. 64 heads: of two, over the rows of eight lanes, for there
// are no registers for more.
constexpr int SUMS = HEADS == 64 ? 2 : COLUMNS;
// Smaller scales count as this one, so that no quotient of two overflows, nor P^T / r of a row of zeros.
constexpr float LEAST_SCALE = 0x1p-60f;
constexpr int LEAST_EXPONENT = 127 - 60;
constexpr uint32_t MAX_P = 0x7800;  // 2^15 as f16
constexpr float REF_NONE = -1e30f;
constexpr float HEADROOM = 8.0f;  // a raised reference brings the largest P^T to 2^HEADROOM, far from where f16 ends below
static_assert(STRIDE / 16 % 2 == 1, "ldmatrix reads eight rows from all banks");

constexpr int Q_AT = 0, P_AT = Q_BLOCKS * LINES_BYTES, RING_AT = P_AT + 2 * LINES_BYTES;

template <int UNITS>
struct alignas(16) SmallOf {
    uint64_t full[UNITS], empty[UNITS];
    float ref[HEADS];                      // what P^T and O^T are relative to
    float factor[2][HEADS];                // what P of a tile brings: O^T before it times this, if `raised`
    float across[2][4][HEADS];             // between the warps of a warpgroup
    float scale[HEADS];                    // at the end: of O^T
    uint16_t ratio[2][CHUNKS][TILE_ROWS];  // f16, scale / r
    uint64_t q_full, q_free;               // mbarriers: Q's bulk copies; its last product is done (8 warps)
    float q_max[8];
    uint32_t raised[2];
    uint32_t valid[UNITS];                 // a bit a row, place valid_bit(row)
};
// Units of the ring: whole tiles, as many as there is space for.
template <int UNITS>
__host__ __device__ constexpr int most_units() {
    if constexpr (RING_AT + UNITS * UNIT_BYTES + int(sizeof(SmallOf<UNITS>)) <= SM90_SHARED_BYTES) {
        return UNITS;
    } else {
        return most_units<UNITS - 4>();
    }
}
constexpr int UNITS = most_units<64>(), SMALL_AT = RING_AT + UNITS * UNIT_BYTES;
using Small = SmallOf<UNITS>;
constexpr int SHARED_BYTES = SMALL_AT + int(sizeof(Small));

extern __shared__ __align__(1024) uint8_t shared[];

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// --- who and what ---------------------------------------------------------------------------------------------

// A multiplying thread's place: warpgroup, warp of it, lane 4 g + t. Shuffles tell the compiler what a warp agrees on.
struct Role {
    int group, warp, lane, g, t;

    static __device__ __forceinline__ Role here() {
        const int thread = here_only(threadIdx.x);
        return {__shfl_sync(~0u, thread / WARPGROUP, 0), __shfl_sync(~0u, thread / 32 % 4, 0), thread % 32, thread % 32 / 4, thread % 4};
    }
    __device__ __forceinline__ void sync() const { named_barrier_sync(3 + group, WARPGROUP); }
    __device__ __forceinline__ int head(int c) const { return c / 2 * 8 + 2 * t + c % 2; }
};

// A query, a tile of its heads and a split of its rows: tiles begin .. end - 1 of the main list and then the extra one.
// `turn` counts the block's earlier pieces of work, `unit` the units that they took.
struct Work {
    Query query;
    int first_head, split, main_length, extra_length, main_tiles, begin, end, pairs, turn;
    uint32_t unit;
};

__device__ __forceinline__ Work find_work(const AttentionParams& p, int query, int head_tile, uint32_t split, uint32_t splits) {
    Work w;
    w.query = query_at_once(p, query);
    w.first_head = head_tile * HEADS;
    w.split = split;
    find_tiles(p, w, split, splits);
    w.pairs = ceil_div(w.end - w.begin, 2);
    w.turn = 0;
    w.unit = 0;
    return w;
}

// With MERGES a cluster has one piece of work, and its blocks are the splits.
__device__ __forceinline__ Work find_only_work(const AttentionParams& p) { return find_work(p, cluster_index(), blockIdx.y, cluster_rank(), cluster_size()); }

// `only`: the one piece of work, with MERGES.
template <typename Do>
__device__ __forceinline__ void for_each_work(const AttentionParams& p, const Work& only, Do act) {
    if constexpr (MERGES) {
        act(only);
    } else {
        const int head_tiles = ceil_div(p.h_q, HEADS), total = p.num_queries * head_tiles * p.num_splits;
        int turn = 0;
        uint32_t unit = 0;
#pragma unroll 1
        for (int index = blockIdx.x; index < total; index += gridDim.x) {
            const int rest = index / head_tiles;
            Work w = find_work(p, rest / p.num_splits, index % head_tiles, rest % p.num_splits, p.num_splits);
            w.turn = turn++;
            w.unit = unit;
            unit += 8 * w.pairs;
            act(w);
        }
    }
}

__device__ __forceinline__ int slot_of(uint32_t unit) { return unit % UNITS; }
__device__ __forceinline__ uint32_t phase_of(uint32_t unit) { return unit / UNITS & 1; }
__device__ __forceinline__ uint32_t unit_address(uint32_t unit) { return shared_address(shared) + RING_AT + slot_of(unit) * UNIT_BYTES; }

// --- copying --------------------------------------------------------------------------------------------------

// As find_row of lists.cuh, with the source chosen once, which spills less here and more in the kernels for few heads.
__device__ __forceinline__ Rows row_of_entry(const AttentionParams& p, const Work& w, int tile, int32_t entry) {
    const Source& source = tile >= w.main_tiles ? p.extra : p.main;
    return entry >= 0 && entry < source.num_slots ? Rows::row_of(source, entry) : Rows::none();
}

// Scales that stand apart from their row.
template <typename R>
__device__ __forceinline__ void copy_scales(const R& row, uint32_t to) {
    if constexpr (R::FOLDED_SCALES == 0) cp_async_8(to, row.scales, row.scales != nullptr);
}

// Validity of a unit's rows, with several shares a byte each.
constexpr uint32_t ALL_VALID = SHARES == 1 ? 0xffff : 0x0f0f0f0f;
__device__ __forceinline__ int valid_bit(int row) { return row / WARP_ROWS * 8 + row % WARP_ROWS; }
__device__ __forceinline__ void store_valid(int slot, int share, uint32_t bits) {
    uint32_t& word = small().valid[slot];
    if (SHARES == 1) {
        word = bits;
    } else {
        reinterpret_cast<uint8_t*>(&word)[share] = uint8_t(bits);
    }
}

// Where in a tile the i-th of SHARES units stands that copying warp `warp` brings WARP_ROWS rows of.
__device__ __forceinline__ int unit_of_share(int i, int warp) { return SHARES == 1 ? warp : i; }

// Start the copies of a warp's 16 rows of the tile that begins with unit `first`. Lanes l and l + 16 know row l % WARP_ROWS of
// those in share l / WARP_ROWS. Eight lanes copy a row; a chunk that they would need one more round for goes by a lane a row.
__device__ __forceinline__ void copy_tile(const Rows& row, uint32_t first, int warp, int lane) {
    constexpr int PIECES = ROW_STRIDE / 16, ONE_LEFT = PIECES % 8 == 1;
    Small& sm = small();
    const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
#pragma unroll
    for (int i = 0; i < SHARES; ++i) {
        const uint32_t unit = first + unit_of_share(i, warp);
        const int slot = slot_of(unit);
        const uint32_t to = unit_address(unit) + warp % SHARES * WARP_ROWS * STRIDE, full = shared_address(&sm.full[slot]);
        mbarrier_wait(shared_address(&sm.empty[slot]), phase_of(unit) ^ 1);
#pragma unroll
        for (int j = 0; j < WARP_ROWS; j += ROWS_AT_ONCE)
            copy_row<PIECES - ONE_LEFT>(to + (j + lane / 8) * STRIDE + lane % 8 * 16, shuffle_pointer(row.data, WARP_ROWS * i + j + lane / 8), lane);
        if (lane / WARP_ROWS == i) {
            const uint32_t own = to + lane % WARP_ROWS * STRIDE;
            if (ONE_LEFT) cp_async_16(own + ROW_STRIDE - 16, row.data + ROW_STRIDE - 16, row.data != nullptr);
            copy_scales(row, own + ROW_STRIDE);
        }
        if (lane == 0) {
            store_valid(slot, warp % SHARES, valid >> WARP_ROWS * i & (1 << WARP_ROWS) - 1);
            mbarrier_arrive(full);
        }
        mbarrier_arrive_after_copies(full);
    }
}

// Q as it is comes by bulk copies of a copying warp, [head][D_QK], to where it will be in the order of multiply_qk, as soon as
// the block's piece of work before this one has done with its own.
__device__ __forceinline__ void fetch_q(const AttentionParams& p, const Work& w, int lane) {
    if (w.turn > 0) mbarrier_wait(shared_address(&small().q_free), (w.turn - 1) & 1);
    const bf16* q = p.q + w.query.b * p.q_b + w.query.s * p.q_s + w.first_head * p.q_h;
    const uint32_t to = shared_address(shared) + Q_AT, full = shared_address(&small().q_full);
    const int heads = min(HEADS, p.h_q - w.first_head), each = p.q_h == D_QK ? HEADS / 8 : 1;  // heads of a copy
    if (lane == 0) mbarrier_arrive_expecting(full, heads * D_QK * 2);
    __syncwarp();
    for (int head = lane * each; head < heads; head += 32 * each)
        copy_in_bulk(to + head * D_QK * 2, q + head * p.q_h, min(each, heads - head) * D_QK * 2, full);
}

// A warp of four brings 16 rows of every tile. List entries are loaded AHEAD tiles before their rows: under load they take 2,000
// cycles to come. Warp 0 brings Q, too, while they do.
__device__ __forceinline__ void copy_rows(const AttentionParams& p, const Work& w, int warp, int lane) {
    constexpr int AHEAD = 4;
    const int my_row = UNIT_ROWS * unit_of_share(lane % 16 / WARP_ROWS, warp) + warp % SHARES * WARP_ROWS + lane % WARP_ROWS;
    const int end = w.begin + 2 * w.pairs;
    // As load_entry of lists.cuh, with as few instructions as can be: they take turns with wgmma.
    const int32_t *main = list_of(p.main, w.query) + my_row, *extra = list_of(p.extra, w.query) + my_row - w.main_tiles * TILE_ROWS;
    const int main_rows = w.main_length - my_row, rows = w.main_tiles * TILE_ROWS + w.extra_length - my_row;
    auto entry_of = [&](int tile) {
        const bool second = tile >= w.main_tiles;
        const int at = tile * TILE_ROWS;
        int32_t entry = -1;
        if (tile < w.end && at < (second ? rows : main_rows)) entry = (second ? extra : main)[at];
        return entry;
    };
    int32_t entries[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) entries[i] = entry_of(w.begin + i);
    if (warp == 0) fetch_q(p, w, lane);
    uint32_t unit = w.unit;
#pragma unroll 1
    for (int first = w.begin; first < end; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i, unit += 4) {
            const int tile = first + i;
            if (tile >= end) return;
            const Rows row = row_of_entry(p, w, tile, entries[i]);
            entries[i] = entry_of(tile + AHEAD);
            copy_tile(row, unit, warp, lane);
        }
    }
}

// --- Q --------------------------------------------------------------------------------------------------------

// Whether columns 64 p .. + 63 of Q are a block of their own, or share two with the 64 beside them.
__device__ __forceinline__ bool is_alone(int p) { return 64 * p >= D_NOPE / 128 * 128; }

// Where columns 64 p + 8 j .. + 7 of Q go in a head's lines: block, first of four chunks, and place in them. k = 16 i + 2 t + e
// is what thread t holds as item 4 i + e (e = 0, 1) or, 8 further, 4 i + 2 + e, of a row's columns in multiply_qk.
__device__ __forceinline__ uint32_t q_line(int p, int j, int head) {
    const bool alone = is_alone(p);
    const int block = alone ? p : p / 2 * 2 + j / 2 % 2, t = alone ? j / 2 : p % 2 * 2 + j / 4, first_chunk = j % 2 * 4;
    return shared_address(shared) + Q_AT + block * LINES_BYTES + head * 128 + ((first_chunk ^ (head & 7)) << 4) + 4 * t;
}

// Eight columns times `factor`, a pair of powers of two, to where `line` says; chunk c of the four is c ^ (head & 7).
__device__ __forceinline__ void store_q(uint32_t line, const Vec16& q, uint32_t factor, bool f16) {
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint32_t scaled = multiply_bf16x2(words[k], factor);
        store_shared_4(line ^ (k << 4), f16 ? bf16x2_to_f16x2(scaled) : scaled);
    }
}

__device__ __forceinline__ uint32_t largest_bits(const Vec16& q) {
    return max_abs_bf16x2(max_abs_bf16x2(q.x, q.y), max_abs_bf16x2(q.z, q.w));
}

// Q to shared memory. A warp does four heads at a time, 64 columns of each; where 128 share two blocks, half of the lanes begin
// with the second 64, so that a warp's stores hit all banks. Returns what a logit is to be multiplied with.
__device__ __forceinline__ float load_q(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int PIECES = D_QK / 64, ROUNDS = HEADS / 32 * PIECES;
    const int warp = 4 * r.group + r.warp, j = r.lane % 8;
    auto head_of = [&](int round) { return warp * (HEADS / 8) + round / PIECES * 4 + r.lane / 8; };
    auto piece_of = [&](int round) { return is_alone(round % PIECES) ? round % PIECES : round % PIECES ^ j / 2 % 2; };
    auto is_there = [&](int round) { return w.first_head + head_of(round) < p.h_q; };
    mbarrier_wait(shared_address(&small().q_full), w.turn & 1);
    const uint32_t raw = shared_address(shared) + Q_AT + 16 * j;
    Vec16 pieces[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) pieces[i] = load_shared_16(raw + (head_of(i) * PIECES + piece_of(i)) * 128);
    uint32_t top = 0;
#pragma unroll
    for (int first = 0; first < ROUNDS; first += PIECES) {
        uint32_t of_head = 0;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) of_head = max_abs_bf16x2(of_head, largest_bits(pieces[first + i]));
        if (is_there(first)) top = max_abs_bf16x2(top, of_head);
    }
    top &= 0x7fff7fff;
    // Positive numbers are ordered as their bits are.
    top = __reduce_max_sync(~0u, larger_half(top));
    if (r.lane == 0) small().q_max[warp] = __uint_as_float(top << 16);
    named_barrier_sync(5, 2 * WARPGROUP);
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) max = fmaxf(max, small().q_max[i]);
    const int exponent = int(__float_as_uint(max) >> 23) - 127;
    const int shift = exponent == 128 || max == 0.0f ? 0 : min(13 - exponent, 100);  // an infinity stays one
    const uint32_t factor = power_of_two_bf16x2(shift + 127);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        // Of heads that there are not, whatever was there becomes zeros and NaN, which raise no reference.
        store_q(q_line(piece_of(i), j, head_of(i)), pieces[i], is_there(i) ? factor : 0, !V32 || i % PIECES < NOPE_BLOCKS);
    }
    const float logit_scale = p.scale_log2 * __uint_as_float(uint32_t(127 - shift) << 23);
    return logit_scale == 0.0f ? 0x1p-120f : logit_scale;  // times -inf that is still -inf
}

// --- S^T ------------------------------------------------------------------------------------------------------

// What multiply_qk finds out of a thread's two rows, g and g + 8 of its warp's unit: r, and scale / r as f16, of both rows
// in a word, of chunk t and (V4_FP8) t + 4.
struct RowScales {
    float r[2], logit[2];  // S^T times `logit` are the logits
    uint32_t ratio[V32 ? 1 : 2];
};

// 2^(exponent - 127), and its inverse.
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(exponent) << 23); }
__device__ __forceinline__ float inverse_power_of_two(int exponent) { return __uint_as_float(uint32_t(254 - exponent) << 23); }

// Float32 scales of a row, none below LEAST_SCALE.
__device__ __forceinline__ void load_v32_scales(uint32_t row, float (&scale)[4]) {
    const Vec16 v = load_shared_16(row + SCALE_OFFSET);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float x = __uint_as_float(words[c]);
        scale[c] = x < LEAST_SCALE ? LEAST_SCALE : x;  // a NaN stays one
    }
}

// V4_FP8: exponents of a row's scales as they stand, biased by 127.
__device__ __forceinline__ int v4_exponent(const Vec8& bytes, int chunk) { return (chunk < 4 ? bytes.x : bytes.y) >> (chunk % 4 * 8) & 0xff; }

// 16 e4m3 of each of a thread's two rows: four k-steps.
struct Bytes {
    Vec16 x, y;
};

// They as A operands; V4_FP8: times the f16 pairs `ratio`.
__device__ __forceinline__ void widen_rows(const Bytes& bytes, const uint32_t (&ratio)[2], uint32_t (&a)[4][4]) {
    const Vec16 &x = bytes.x, &y = bytes.y;
    const uint32_t words[2][4] = {{x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            e4m3x4_to_f16x2(words[row][i], a[i][row], a[i][row + 2]);
            if (!V32) {
                a[i][row] = multiply_f16x2(a[i][row], ratio[row]);
                a[i][row + 2] = multiply_f16x2(a[i][row + 2], ratio[row]);
            }
        }
    }
}

__device__ __forceinline__ uint64_t q_operand() { return wgmma_operand(here_only(shared_address(shared) + Q_AT), 1024, 16); }

// s = or += four k-steps against block `block` of Q.
template <Step FIRST, Step NEXT>
__device__ __forceinline__ void start_qk(uint64_t q, int block, const uint32_t (&a)[4][4], float (&s)[HEADS / 2]) {
    wgmma_fence();
    wgmma_registers<FIRST>(s, a[0], wgmma_further(q, block * LINES_BYTES));
#pragma unroll
    for (int i = 1; i < 4; ++i) wgmma_registers<NEXT>(s, a[i], wgmma_further(q, block * LINES_BYTES + 32 * i));
    wgmma_commit();
}

__device__ __forceinline__ void scale_rows(float (&s)[HEADS / 2], float x, float y) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) s[i] *= i % 4 < 2 ? x : y;
}

// 16 values of a row's RoPE: words 2 i and 2 i + 1 for k-step i.
__device__ __forceinline__ void load_rope(uint32_t row, int t, uint32_t (&words)[8]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        const Vec16 v = load_shared_16(row + ROPE_OFFSET + 16 * (2 * t + b));
        words[4 * b] = v.x, words[4 * b + 1] = v.y, words[4 * b + 2] = v.z, words[4 * b + 3] = v.w;
    }
}

// V4_FP8: where it was, for load_columns: of 16 columns the even ones and then the odd ones.
__device__ __forceinline__ void store_rope(uint32_t row, int t, const uint32_t (&words)[8]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint32_t bytes = odd ? 0x7632 : 0x5410;
        store_shared(row + ROPE_OFFSET + 16 * (2 * t + odd), {__byte_perm(words[0], words[1], bytes), __byte_perm(words[2], words[3], bytes),
                                                                 __byte_perm(words[4], words[5], bytes), __byte_perm(words[6], words[7], bytes)});
    }
}

// RoPE of two rows as A operands.
__device__ __forceinline__ void arrange_rope(const uint32_t (&rope)[2][8], uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) a[i][row] = rope[row][2 * i], a[i][row + 2] = rope[row][2 * i + 1];
    }
}

__device__ __forceinline__ Bytes load_block(uint32_t row, int t, int block) {
    const uint32_t at = row + (block < D_NOPE / 128 * 2 ? 128 * (block / 2) + 16 * (2 * t + block % 2) : 64 * block + 16 * t);
    return {load_shared_16(at), load_shared_16(at + 8 * STRIDE)};
}

// In all of these, bytes are loaded and widened for the block after next while wgmma works.

__device__ __forceinline__ RowScales multiply_qk_v32(uint32_t row, int t, float logit_scale, float (&s)[HEADS / 2]) {
    const uint32_t none[2] = {0, 0};
    const uint64_t q = q_operand();
    uint32_t a[2][4][4];
    Bytes bytes = load_block(row, t, 0);
    float scale[2][4];
    load_v32_scales(row, scale[0]);
    load_v32_scales(row + 8 * STRIDE, scale[1]);
    widen_rows(bytes, none, a[0]);
    bytes = load_block(row, t, 1);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (c == 0) {
            start_qk<Step::FIRST, Step::F16>(q, 0, a[0], s);
        } else {
            start_qk<Step::F16, Step::F16>(q, 2 * c, a[0], s);
        }
        widen_rows(bytes, none, a[1]);
        if (c < 3) bytes = load_block(row, t, 2 * c + 2);
        start_qk<Step::F16, Step::F16>(q, 2 * c + 1, a[1], s);
        wgmma_wait<1>();
        if (c < 3) {
            widen_rows(bytes, none, a[0]);
            bytes = load_block(row, t, 2 * c + 3);
        } else {
            uint32_t rope[2][8];
            load_rope(row, t, rope[0]);
            load_rope(row + 8 * STRIDE, t, rope[1]);
            arrange_rope(rope, a[0]);
        }
        const float x = c < 3 ? scale[0][c] * reciprocal_approx(scale[0][(c + 1) % 4]) : scale[0][3];
        const float y = c < 3 ? scale[1][c] * reciprocal_approx(scale[1][(c + 1) % 4]) : scale[1][3];
        wgmma_wait<0>();
        scale_rows(s, x, y);
    }
    start_qk<Step::BF16, Step::BF16>(q, NOPE_BLOCKS, a[0], s);
    RowScales result;
    float ratio[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int exponent = __float_as_uint(fmaxf(fmaxf(scale[i][0], scale[i][1]), fmaxf(scale[i][2], scale[i][3]))) >> 23;
        const float own = t < 2 ? (t == 0 ? scale[i][0] : scale[i][1]) : (t == 2 ? scale[i][2] : scale[i][3]);
        result.r[i] = power_of_two(exponent);
        result.logit[i] = logit_scale;
        ratio[i] = own * inverse_power_of_two(exponent);
    }
    result.ratio[0] = pack_f16x2(ratio[0], ratio[1]);
    wgmma_wait<0>();
    return result;
}

__device__ __forceinline__ RowScales multiply_qk_v4(uint32_t row, int t, float logit_scale, float (&s)[HEADS / 2]) {
    const uint64_t q = q_operand();
    uint32_t rope[2][8], ratio[4][2];  // of columns 128 c + 32 t .. + 31, as pairs of f16
    RowScales result;
    float own[2][2];
    Bytes bytes = load_block(row, t, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_rope(row + i * 8 * STRIDE, t, rope[i]);
        const Vec8 scales = load_shared_8(row + i * 8 * STRIDE + ROW_STRIDE);
        uint32_t top = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) top = max_abs_bf16x2(top, rope[i][k]);
        top = max(top & 0x7fff, top >> 16 & 0x7fff);
        top = max(top, __shfl_xor_sync(~0u, top, 1));
        top = max(top, __shfl_xor_sync(~0u, top, 2));
        int exponent = int(top >> 7) - 14;  // RoPE / r stays below 2^15
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) exponent = max(exponent, v4_exponent(scales, c));
        const bool nan = exponent == 255;
        exponent = min(max(exponent, LEAST_EXPONENT), 253);
        result.r[i] = nan ? __uint_as_float(0x7fffffffu) : power_of_two(exponent);
        result.logit[i] = logit_scale * result.r[i];
        if (result.logit[i] == 0.0f) result.logit[i] = logit_scale;  // times -inf that is still -inf
        auto ratio_of = [&](int biased) { return power_of_two(max(biased - exponent + 127, 0)); };
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float f = ratio_of(c < 3 ? (c < 2 ? scales.x : scales.y) >> (16 * (c % 2) + t / 2 * 8) & 0xff : scales.y >> 16 & 0xff);
            ratio[c][i] = pack_f16x2(f, f);
        }
        own[0][i] = ratio_of(scales.x >> 8 * t & 0xff);
        own[1][i] = ratio_of(scales.y >> 8 * t & 0xff);
        const uint32_t inverse = power_of_two_bf16x2(254 - exponent);
#pragma unroll
        for (int k = 0; k < 8; ++k) rope[i][k] = bf16x2_to_f16x2(multiply_bf16x2(rope[i][k], inverse));
        store_rope(row + i * 8 * STRIDE, t, rope[i]);
    }
    uint32_t a[2][4][4];
    arrange_rope(rope, a[0]);
    start_qk<Step::FIRST, Step::F16>(q, NOPE_BLOCKS, a[0], s);
#pragma unroll
    for (int block = 0; block < NOPE_BLOCKS; ++block) {
        uint32_t(&buffer)[4][4] = a[(block + 1) % 2];
        widen_rows(bytes, ratio[block / 2], buffer);
        if (block + 1 < NOPE_BLOCKS) bytes = load_block(row, t, block + 1);
        start_qk<Step::F16, Step::F16>(q, block, buffer, s);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < (V32 ? 1 : 2); ++k) result.ratio[k] = pack_f16x2(own[k][0], own[k][1]);
    return result;
}

// S^T of the tile whose first unit is `unit`, each warp its 16 rows; what stands for rows that are not valid becomes a P of 0.
__device__ __forceinline__ RowScales multiply_qk(const Role& r, uint32_t unit, float logit_scale, float (&s)[HEADS / 2]) {
    unit += r.warp;
    Small& sm = small();
    mbarrier_wait(shared_address(&sm.full[slot_of(unit)]), phase_of(unit));
    const uint32_t row = unit_address(unit) + r.g * STRIDE;
    RowScales scales;
    if constexpr (V32) {
        scales = multiply_qk_v32(row, r.t, logit_scale, s);
    } else {
        scales = multiply_qk_v4(row, r.t, logit_scale, s);
    }
    const uint32_t valid = sm.valid[slot_of(unit)];
    if (valid != ALL_VALID) {
        const float mask = logit_scale < 0.0f ? INF : -INF;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (valid >> valid_bit(r.g + 8 * i) & 1) continue;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) s[element(i, c)] = mask;
        }
    }
    return scales;
}

// --- softmax --------------------------------------------------------------------------------------------------

// Of 2 HALF sums, each half of the lanes, by a bit of g, keeps HALF, added over both.
template <int HALF>
__device__ __forceinline__ void share_sums(float (&v)[COLUMNS], bool high, int distance) {
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
        const float first = v[c], second = v[c + HALF];
        v[c] = (high ? second : first) + __shfl_xor_sync(~0u, high ? first : second, distance);
    }
}

// Adds sums over the lanes with the same t until a thread has SUMS of them, of heads sum_head(r, 0), sum_head(r, 1) ...
__device__ __forceinline__ void add_lanes(const Role& r, float (&v)[COLUMNS]) {
    if constexpr (SUMS < COLUMNS) {
        share_sums<COLUMNS / 2>(v, r.g & 4, 16);
        share_sums<COLUMNS / 4>(v, r.g & 2, 8);
        share_sums<COLUMNS / 8>(v, r.g & 1, 4);
    }
}
__device__ __forceinline__ int sum_head(const Role& r, int c) { return SUMS == COLUMNS ? r.head(c) : 8 * r.g + 2 * r.t + c; }

// References rise to the tile's largest logit + log2 r; everything before, O^T and sums, is to be multiplied by `factor`. Rare.
__device__ __forceinline__ void raise_references(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2]) {
    Small& sm = small();
    const float log2_r[2] = {log2_approx(scales.r[0]), log2_approx(scales.r[1])};  // exact
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float top = rows_max(fmaxf(s[element(0, c)] * scales.logit[0] + log2_r[0], s[element(1, c)] * scales.logit[1] + log2_r[1]));
        if (r.g == 0) sm.across[r.group][r.warp][r.head(c)] = top;
    }
    r.sync();
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float(&tops)[4][HEADS] = sm.across[r.group];
        const float old = sm.ref[head], top = fmaxf(fmaxf(tops[0][head], tops[1][head]), fmaxf(tops[2][head], tops[3][head]));
        const float to = fmaxf(old, top - HEADROOM);
        sm.ref[head] = to;
        sm.factor[r.group][head] = exp2_approx(old - to);
    }
    r.sync();
}

// A row's ratios, by its quad, where load_columns wants them: a thread's four of 16 rows stand next to one another.
__device__ __forceinline__ void store_ratios(const Role& r, const RowScales& scales) {
    Small& sm = small();
    const int place = 16 * r.warp + r.g / 2 * 4 + r.g % 2;  // of row g; row g + 8 two further
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sm.ratio[r.group][r.t][place + 2 * i] = uint16_t(scales.ratio[0] >> 16 * i);
        if constexpr (!V32) {
            if (r.t < 3) sm.ratio[r.group][r.t + 4][place + 2 * i] = uint16_t(scales.ratio[1] >> 16 * i);
        }
    }
}

// P^T = r 2^(logit - ref) to shared memory, rounded; `sums` is that of P / r. True if one is above MAX_P.
__device__ __forceinline__ bool store_p(
    const Role& r, const RowScales& scales, const float (&s)[HEADS / 2], float (&sums)[COLUMNS]) {
    // Line = head, chunk = eight rows.
    const int line = r.lane % 8 + r.lane / 16 * 8, chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = shared_address(shared) + P_AT + r.group * LINES_BYTES + line * 128 + ((chunk ^ (line & 7)) << 4);
    float2 refs[HEADS / 8];  // all loaded at once, lest each wait behind the stores before it
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) refs[j] = *reinterpret_cast<const float2*>(&small().ref[r.head(2 * j)]);
    uint32_t top = 0, rounded[2][2];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 ref = refs[j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = exp2_approx(fmaf(s[4 * j + 2 * i], scales.logit[i], -ref.x));
            const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], scales.logit[i], -ref.y));
            sums[2 * j] = i == 0 ? x : sums[2 * j] + x;
            sums[2 * j + 1] = i == 0 ? y : sums[2 * j + 1] + y;
            rounded[j % 2][i] = pack_f16x2(x * scales.r[i], y * scales.r[i]);
            top = max_f16x2(top, rounded[j % 2][i]);
        }
        if (j % 2 == 1) stmatrix_x4_trans(to + (j - 1) * 1024, rounded[0][0], rounded[0][1], rounded[1][0], rounded[1][1]);
    }
    return larger_half(top) > MAX_P;
}

// S^T of one of this warpgroup's tiles becomes P^T and is published; `sums` is what a thread's rows add to denominators.
// P^T is made with the references as they are, and again in the rare case that they turn out too low: then true.
__device__ __forceinline__ bool softmax_tile(
    const Role& r, const RowScales& scales, const float (&s)[HEADS / 2], float (&sums)[COLUMNS]) {
    store_ratios(r, scales);
    const bool too_large = store_p(r, scales, s, sums);
    fence_proxy_async();
    const bool raised = named_barrier_any(3 + r.group, WARPGROUP, too_large);
    if (raised) {
        raise_references(r, scales, s);
        store_p(r, scales, s, sums);
        fence_proxy_async();
    }
    if (threadIdx.x % WARPGROUP == 0) small().raised[r.group] = raised;
    if (raised) r.sync();
    named_barrier_arrive(1 + r.group, 2 * WARPGROUP);
    return raised;
}

// --- O^T ------------------------------------------------------------------------------------------------------

// A thread's part of O^T: four blocks of 64 value columns, and of the denominators.
struct Output {
    float o[4][HEADS / 2], sum[SUMS];
};

// References were raised for the P of a tile of warpgroup `owner`: O^T and sums come to them.
__device__ __forceinline__ void follow_references(const Role& r, int owner, Output& out) {
    const Small& sm = small();
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float f = sm.factor[owner][r.head(c)];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            out.o[v][element(0, c)] *= f;
            out.o[v][element(1, c)] *= f;
        }
    }
#pragma unroll
    for (int c = 0; c < SUMS; ++c) out.sum[c] *= sm.factor[owner][sum_head(r, c)];
}

// What two rows (2 t and 2 t + 1 of eight) hold of the columns 2 g, 2 g + 1, as bytes, becomes a pair for each column.
__device__ __forceinline__ void widen_pair(uint32_t bytes, uint32_t ratio, uint32_t& even, uint32_t& odd) {
    e4m3x4_to_f16x2(__byte_perm(bytes, 0, 0x3120), even, odd);
    even = multiply_f16x2(even, ratio);
    odd = multiply_f16x2(odd, ratio);
}

// 16 rows and this warp's 16 columns of blocks 2 i and 2 i + 1, as they come from shared memory, and the rows' ratios.
struct Columns {
    uint32_t bytes[4];
    Vec8 ratio[V32 ? 1 : 2];  // of the thread's four rows: for both blocks, or for each
    uint32_t rope[4];  // V4_FP8: the last block's A operand
};

__device__ __forceinline__ uint32_t ratio_address(int owner, int chunk, int k, int t) {
    return shared_address(&small().ratio[owner][chunk][16 * k + 4 * t]);
}

__device__ __forceinline__ Columns load_columns(const Role& r, uint32_t unit, int owner, int k, int i) {
    const uint32_t rows = unit_address(unit) + r.lane % 16 * STRIDE, second = r.lane / 16;
    const uint32_t from = rows + 256 * r.group + 64 * second + 16 * r.warp;
    Columns c;
    if constexpr (V32) {
        ldmatrix_x4_trans(c.bytes, from + 128 * i);
        c.ratio[0] = load_shared_8(ratio_address(owner, 2 * r.group + i, k, r.t));
    } else {
        ldmatrix_x4_trans(c.bytes, i == 0 || (r.group == 1 && second) ? from : from + 128);  // the last block is RoPE
#pragma unroll
        for (int v = 0; v < 2; ++v) c.ratio[v] = load_shared_8(ratio_address(owner, min(4 * r.group + 2 * i + v, CHUNKS - 1), k, r.t));
        if (i == 1) ldmatrix_x4_trans(c.rope, unit_address(unit) + (r.lane / 16 * 8 + r.lane % 8) * STRIDE + ROPE_OFFSET + 32 * r.warp + r.lane / 8 % 2 * 16);
    }
    return c;
}

// They as A operands.
__device__ __forceinline__ void widen_columns(const Role& r, const Columns& c, int i, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        const Vec8& ratio = c.ratio[V32 ? 0 : v];
        widen_pair(c.bytes[2 * v], ratio.x, a[v][0], a[v][1]);
        widen_pair(c.bytes[2 * v + 1], ratio.y, a[v][2], a[v][3]);
    }
    if (!V32 && i == 1) {
        // Chosen here, or the compiler does so behind the fence, between two wgmma, and serialises these.
#pragma unroll
        for (int n = 0; n < 4; ++n) a[1][n] = here_only(r.group == 1 ? c.rope[n] : a[1][n]);
    }
}

// O^T += V^T . P^T of the tile of warpgroup `owner` whose first unit is `unit`, two blocks at a time; its units are let go one
// by one. `meanwhile` is done while wgmma works.
template <typename Do>
__device__ __forceinline__ void multiply_pv(const Role& r, uint32_t unit, int owner, bool raised, Output& out, Do meanwhile) {
    if (raised) follow_references(r, owner, out);
    const uint64_t prob = wgmma_operand(here_only(shared_address(shared) + P_AT) + owner * LINES_BYTES, 1024, 16);
    uint32_t a[2][2][4];
    Columns columns = load_columns(r, unit, owner, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (k > 0) wgmma_wait<1>();
            widen_columns(r, columns, i, a[i]);
            if (i == 0) {
                columns = load_columns(r, unit + k, owner, k, 1);
            } else {
                __syncwarp();
                mbarrier_arrive_for_warp(shared_address(&small().empty[slot_of(unit + k)]), r.lane);
                if (k < 3) columns = load_columns(r, unit + k + 1, owner, k + 1, 0);
            }
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < 2; ++v) wgmma_registers<Step::F16>(out.o[2 * i + v], a[i][v], wgmma_further(prob, 32 * k));
            wgmma_commit();
        }
        if (k == 0) meanwhile();
    }
    wgmma_wait<0>();
}

// --- results --------------------------------------------------------------------------------------------------

// The sum of all warps for head `local` of the block.
__device__ __forceinline__ void gather_sums(const Role& r, const Output& out) {
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float sum = SUMS == COLUMNS ? rows_sum(out.sum[c]) : out.sum[c];
        if (SUMS < COLUMNS || r.g == 0) small().across[r.group][r.warp][sum_head(r, c)] = sum;
    }
    named_barrier_sync(5, 2 * WARPGROUP);
}
__device__ __forceinline__ float sum_of(int local) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += small().across[i / 4][i % 4][local];
    return sum;
}

// Sums to statistics, and to the factor that O^T is multiplied with.
__device__ __forceinline__ void finish_sums(const AttentionParams& p, const Work& w, const Role& r, const Output& out) {
    Small& sm = small();
    gather_sums(r, out);
    const int local = threadIdx.x, head = w.first_head + local;
    if (local < HEADS) {
        const float sum = sum_of(local);
        const HeadResult result = {0.0f, sum == 0.0f ? -INF : sm.ref[local] + log2_approx(sum)};
        float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (head < p.h_q) {
            if (p.num_splits == 1) {
                if (sum != 0.0f) scale *= sink_factor(p, head, result.lse);
                write_statistics(p, w.query, head, result);
            } else {
                p.part_lse[(int64_t(w.split) * p.num_queries + w.query.index) * p.h_q + head] = result.lse;
            }
        }
        sm.scale[local] = scale;
    }
    named_barrier_sync(5, 2 * WARPGROUP);
}

// 2^(14 - exponent of `largest`): brings it to just below what f16 holds.
__device__ __forceinline__ float to_f16_range(float largest) {
    const int exponent = 268 - int(__float_as_uint(largest) >> 23);
    return __uint_as_float(uint32_t(max(1, min(exponent, 253))) << 23);
}

// What this block found goes to the cluster's parts, as f16 times a power of two a head, and a share of what all found to the
// results.
__device__ __forceinline__ void merge_results(const AttentionParams& p, const Work& w, const Role& r, const Output& out) {
    Small& sm = small();
    const Parts<8> parts(p, w.query.index, blockIdx.y, gridDim.y);
    // Over Q, which nobody reads any more: weights, and behind them the largest |O| of a warp's columns, [warp][head].
    float *weights = reinterpret_cast<float*>(shared), *largest = weights + Parts<8>::MAX_BLOCKS * HEADS;
    static_assert((Parts<8>::MAX_BLOCKS + 8) * HEADS * 4 <= P_AT, "");
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float top = 0.0f;
#pragma unroll
        for (int v = 0; v < 4; ++v) top = fmaxf(top, fmaxf(fabsf(out.o[v][element(0, c)]), fabsf(out.o[v][element(1, c)])));
        top = rows_max(top);
        if (r.g == 0) largest[(4 * r.group + r.warp) * HEADS + r.head(c)] = top;
    }
    gather_sums(r, out);
    if (threadIdx.x < HEADS) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) top = fmaxf(top, largest[i * HEADS + threadIdx.x]);
        const float up = to_f16_range(top);
        sm.scale[threadIdx.x] = up;
        parts.write_statistics(threadIdx.x, sm.ref[threadIdx.x], sum_of(threadIdx.x), 0.0f, 1.0f / up);
    }
    named_barrier_sync(5, 2 * WARPGROUP);
    // Unit 256 c + thread: of head c the columns 2 g and 2 g + 1 of 16, of four blocks.
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float up = sm.scale[r.head(c)];
        float words[4];
#pragma unroll
        for (int v = 0; v < 4; ++v)
            words[v] = __uint_as_float(pack_f16x2(out.o[v][element(0, c)] * up, out.o[v][element(1, c)] * up));
        parts.write(256 * c + threadIdx.x, make_float4(words[0], words[1], words[2], words[3]));
    }
    auto head_of = [](int unit) { return unit / 256 / 2 * 8 + unit % 4 * 2 + unit / 256 % 2; };
    auto finish = [&](int local, bool write, float ref, float sum, float) {
        return finish_merged_head(p, w.query, w.first_head + local, write, ref, sum, 0.0f);
    };
    auto column_of = [](int unit) {
        const int thread = unit % 256;
        return thread / 128 * 256 + thread % 128 / 32 * 16 + thread % 32 / 4 * 2;
    };
    auto sync = [] { named_barrier_sync(5, 2 * WARPGROUP); };
    parts.merge<2 * WARPGROUP>(weights, head_of, column_of, finish, sync, [&](int local, int column, const float (&v)[8]) {
        const int head = w.first_head + local;
        if (head >= p.h_q) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) write_output(p, w.query, head, column + 64 * i, v[2 * i], v[2 * i + 1]);
    });
}

__device__ __forceinline__ void write_results(const AttentionParams& p, const Work& w, const Role& r, Output& out) {
    finish_sums(p, w, r, out);
    // Of block v this thread holds columns 2 g and 2 g + 1 of 16.
    const int first = 256 * r.group + 16 * r.warp;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float f = small().scale[r.head(c)];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            out.o[v][element(0, c)] *= f;
            out.o[v][element(1, c)] *= f;
        }
    }
    if (p.num_splits > 1) {
        if (w.begin == w.end) return;
        // PAIRED_PARTS: what this thread holds of two blocks stands together.
        float* part = p.part_out + (int64_t(w.split) * p.num_queries + w.query.index) * p.h_q * D_V + 256 * r.group + 32 * r.warp + 4 * r.g;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int head = w.first_head + r.head(c);
            if (head >= p.h_q) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float(&first)[HEADS / 2] = out.o[2 * i], (&second)[HEADS / 2] = out.o[2 * i + 1];
                *reinterpret_cast<float4*>(part + head * D_V + 128 * i) =
                    make_float4(first[element(0, c)], first[element(1, c)], second[element(0, c)], second[element(1, c)]);
            }
        }
        return;
    }
    bf16* results = p.out + w.query.b * p.out_b + w.query.s * p.out_s + w.first_head * p.out_h;
    if (p.flags & WIDE_OUT) {
        // Eight heads at a time over P, [head][column], and from there whole lines. Pieces of 32 bytes change places from one
        // pair of heads to the next, so that a warp's stores hit all banks.
        constexpr int LINE = 2 * D_V, BUFFERS = HEADS / 32;
        static_assert(BUFFERS * 8 * LINE == 2 * LINES_BYTES, "");
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            const uint32_t lines = shared_address(shared) + P_AT + j % BUFFERS * 8 * LINE;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    store_shared_4(lines + (2 * r.t + k) * LINE + (2 * (first + 64 * v + 2 * r.g) ^ r.t << 5),
                                   pack_bf16x2(out.o[v][element(0, 2 * j + k)], out.o[v][element(1, 2 * j + k)]));
            }
            named_barrier_sync(5, 2 * WARPGROUP);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int head = threadIdx.x / 64 + 4 * i, column = threadIdx.x % 64 * 8;
                const Vec16 chunk = load_shared_16(lines + head * LINE + (2 * column ^ head / 2 << 5));
                if (w.first_head + 8 * j + head < p.h_q) store_chunk(results + (8 * j + head) * p.out_h + column, chunk, true);
            }
            if (BUFFERS == 1) named_barrier_sync(5, 2 * WARPGROUP);
        }
    } else {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int head = w.first_head + r.head(c);
            if (head >= p.h_q) continue;
#pragma unroll
            for (int v = 0; v < 4; ++v)
                write_output(p, w.query, head, first + 64 * v + 2 * r.g, out.o[v][element(0, c)], out.o[v][element(1, c)]);
        }
    }
}

// --- a piece of work ------------------------------------------------------------------------------------------

__device__ __forceinline__ void let_go_of_q(const Role& r) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&small().q_free), r.lane);
}

// Tile after tile: this warpgroup's next S before the product with the tile, the softmax of it after.
__device__ __forceinline__ void attend(const AttentionParams& p, const Work& w, const Role& r) {
    const float logit_scale = load_q(p, w, r);
    if (threadIdx.x < HEADS) small().ref[threadIdx.x] = REF_NONE;
    fence_proxy_async();
    named_barrier_sync(5, 2 * WARPGROUP);

    Output out;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
#pragma unroll
        for (int i = 0; i < HEADS / 2; ++i) out.o[v][i] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < SUMS; ++c) out.sum[c] = 0.0f;

    if (w.pairs == 0) let_go_of_q(r);
    const int other = 1 - r.group;
    auto multiply_other = [&](uint32_t unit) {
        named_barrier_sync(1 + other, 2 * WARPGROUP);
        multiply_pv(r, unit, other, small().raised[other], out, [] {});
    };
    uint32_t unit = w.unit + 4 * r.group;  // of this warpgroup's tile
#pragma unroll 1
    for (int pair = 0; pair < w.pairs; ++pair, unit += 8) {
        float s[HEADS / 2], sums[COLUMNS];
        const RowScales scales = multiply_qk(r, unit, logit_scale, s);
        if (pair + 1 == w.pairs) let_go_of_q(r);
        if (pair > 0 || r.group == 1) multiply_other(unit - 4);
        const bool raised = softmax_tile(r, scales, s, sums);
        multiply_pv(r, unit, r.group, raised, out, [&] {
            add_lanes(r, sums);
#pragma unroll
            for (int c = 0; c < SUMS; ++c) out.sum[c] += sums[c];
        });
    }
    if (r.group == 0 && w.pairs > 0) multiply_other(unit - 4);
    if constexpr (MERGES) {
        merge_results(p, w, r, out);
    } else {
        write_results(p, w, r, out);
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x persistent blocks over queries x head tiles x splits, or (MERGES) x a cluster a query, y head tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // a lane a warp: the lanes of one would take turns, 40 cycles each
        for (int unit = threadIdx.x / 32; unit < UNITS; unit += THREADS / 32) {
            mbarrier_init(shared_address(&sm.full[unit]), SHARES * 33);
            mbarrier_init(shared_address(&sm.empty[unit]), 8 * WARP_ARRIVALS);
        }
        if (threadIdx.x == 0) {
            mbarrier_init(shared_address(&sm.q_full), 1);
            mbarrier_init(shared_address(&sm.q_free), 8 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    Work only;
    if constexpr (MERGES) {
        if (has_lengths(p)) wait_for_earlier_kernels();
        only = find_only_work(p);
    }
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (threadIdx.x >= 2 * WARPGROUP) {
        give_registers<40>();
        for_each_work(p, only, [&](const Work& w) {
            const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
            copy_rows(p, w, warp, lane);
        });
        if constexpr (MERGES) cluster_sync_with_one_fence(false);  // barriers of the cluster count every thread
    } else {
        take_registers<232>();
        for_each_work(p, only, [&](const Work& w) { attend(p, w, Role::here()); });
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
