// Sparse attention of few heads on Hopper, of V32_FP8 and bf16 rows, decode and prefill: rows go from staging into registers.
//
// Heads are the N side of the products, 8, 16 or 32 of them, so nothing is padded to 64; rows or value columns are the M
// side and come from registers, widened on the way (tile/fragments.cuh), so that shared memory holds rows as they lie in
// the cache and nothing else:
//
//   S^T = K . Q^T     a warp: 16 rows x heads        A = its own rows            d / 16 steps of m16n8k16
//   O^T = V^T . P^T   a warp: 128 columns x heads    A = pairs of rows a column  8 tiles x 4 steps
//
//   4 copying warps        a quarter of every tile of 64 rows each, by cp.async, as far ahead as its ring of UNITS x 8 rows
//                          goes
//   3 warpgroups multiply  (2 for 32 heads) a tile each in turn, with a softmax of their own:
//     S^T                  V32_FP8: one scale's 128 columns after the other, times the row's float32 scale, so that no
//                          scaled value is ever rounded
//     P^T                  to shared memory; V32_FP8: f16, a copy for each scale, relative to a reference a head and scale
//     vote                 a value far above its reference? Only then references rise, O^T follows, and P^T is computed
//                          again
//     O^T += V^T . P^T     quarter after quarter, which are let go
//
//   full, empty            mbarriers [quarter][unit]: copies to readers and back
//   named 1 to 3           the 128 threads of a multiplying warpgroup; 4: all of them
//
// While one warpgroup waits the others multiply. At the end they put their O^T together in shared memory, and the blocks
// of a cluster merge theirs (cluster_merge.cuh). What a cluster does not hold is split over gridDim.y and merged by combine.cu.
//
// Products are mma.sync: wgmma with A in registers takes a warpgroup 60 cycles and more whatever N is, and its fences keep
// the next fragments from being widened meanwhile.
//
// Shared memory: Q (heads x D_QK x 2) + P (warpgroups x copies x heads x 128) + 4 rings of UNITS x 8 staged rows +
// statistics and barriers.
// Registers: 160 (232) a multiplying thread, 32 (40) a copying one, together 512 x 128 (384 x 168); setmaxnreg hands out no
// more than the launch had.
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
#include "tile/chunk.cuh"
#include "tile/finish.cuh"
#include "tile/fragments.cuh"
#include "tile/heads.cuh"

// Warpgroups that multiply: what one waits for, another hides. 32 heads take the registers of two.
constexpr int GROUPS = CONSUMERS, REGISTERS = GROUPS == 2 ? 232 : 160, COPY_REGISTERS = GROUPS == 2 ? 40 : 32;
constexpr int WARPGROUP = 128, MULTIPLYING = GROUPS * WARPGROUP, THREADS = MULTIPLYING + WARPGROUP;
constexpr int V_TILES = D_V / 64, NOPE_BLOCKS = D_NOPE / 64;
constexpr int Q_BLOCK_BYTES = HEADS * 128, Q_BYTES = D_QK / 64 * Q_BLOCK_BYTES;
constexpr int P_COPIES = FOLDED ? Rows::FOLDED_SCALES : 1, P_BYTES = HEADS * 128;
constexpr int COLUMNS = HEADS / 4;     // heads a thread holds of S^T and O^T: 8 j + 2 t + k at 2 j + k
constexpr int UNROLLED_COPIES = HEADS == 32 ? 2 : 4;
constexpr bool KEEPS_MAX = !FOLDED;  // prefill asks for the largest logits
constexpr float REF_SLACK = 8.0f;      // a sum's terms stay below 2^this
constexpr float P_LIMIT = 32768.0f;    // and what is rounded to f16 below this

constexpr int Q_AT = 0, P_AT = Q_BYTES, RING_AT = P_AT + GROUPS * P_COPIES * P_BYTES;

// A head's softmax over some rows, relative to `ref` like its O^T.
struct Statistics {
    float ref, sum, max;
};
template <int UNITS>
struct SmallOf {
    uint64_t full[4][UNITS], empty[4][UNITS];
    float q_scale[HEADS];                     // from S^T to logits in base 2
    float ref[GROUPS][1 + P_COPIES][HEADS];        // what a warpgroup's sums, and a scale's columns of its O^T, are relative to
    float rise[GROUPS][1 + P_COPIES][HEADS];       // 2^(last reference - reference)
    float chunk_factor[GROUPS][P_COPIES][HEADS];   // 2^(ref - a scale's reference)
    float across[GROUPS][1 + P_COPIES][4][HEADS];  // between the warps of a warpgroup
    float weight[GROUPS][4][HEADS], scale[HEADS];  // of the warpgroups' columns 128 k .. in the block's result; of that in the end
};
// Units of each ring: as many as there is space for.
template <int UNITS>
__host__ __device__ constexpr int most_units() {
    if constexpr (RING_AT + 4 * UNITS * UNIT_BYTES + int(sizeof(SmallOf<UNITS>)) <= SM90_SHARED_BYTES) {
        return UNITS;
    } else {
        return most_units<UNITS - 1>();
    }
}
constexpr int UNITS = most_units<64>(), RING_BYTES = UNITS * UNIT_BYTES, SMALL_AT = RING_AT + 4 * RING_BYTES;
using Small = SmallOf<UNITS>;
constexpr int SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(UNITS >= 4, "two tiles");

// When all rows are read, the rings hold parts of O^T in float32, [head][column]: halves that warpgroups 0 and 1 exchange, and
// what warpgroup 2 gives them. Four columns more a line spread the heads over the banks.
constexpr int HALF_LINE = D_V / 2 + 4, EXCHANGE_AT = RING_AT, EXCHANGE_BYTES = HEADS * HALF_LINE * 4;
static_assert(EXCHANGE_AT + 2 * (GROUPS - 1) * EXCHANGE_BYTES <= SMALL_AT, "");

extern __shared__ __align__(1024) uint8_t shared[];

// --- who and what ---------------------------------------------------------------------------------------------

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// A multiplying thread's place: warpgroup, warp of it, and rows g, g + 8 and columns 2 t, 2 t + 1 of the warp's 16 rows.
struct Role {
    int group, warp, lane, g, t;

    static __device__ __forceinline__ Role here() {
        const int thread = threadIdx.x;
        return {thread / WARPGROUP, thread / 32 % 4, thread % 32, thread % 32 / 4, thread % 4};
    }
    __device__ __forceinline__ uint32_t q() const { return shared_address(shared) + Q_AT; }
    __device__ __forceinline__ uint32_t p() const { return shared_address(shared) + P_AT + group * P_COPIES * P_BYTES; }
    __device__ __forceinline__ void sync() const { named_barrier_sync(1 + group, WARPGROUP); }
    __device__ __forceinline__ int head(int c) const { return c / 2 * 8 + 2 * t + c % 2; }
};

__device__ __forceinline__ void sync_multiplying() { named_barrier_sync(4, MULTIPLYING); }

// A query and 8 to 32 of its heads; tiles of the main list, then of the extra one, of which this block takes `begin` to end - 1.
struct Work {
    Query query;
    int first_head, main_length, extra_length, main_tiles, begin, end;
};

__device__ __forceinline__ Work find_work(const AttentionParams& p, int query, int head_tile, uint32_t rank, uint32_t ranks) {
    Work w;
    w.query = query_at_once(p, query);
    w.first_head = head_tile * HEADS;
    find_tiles(p, w, rank, ranks);
    return w;
}

// --- copying --------------------------------------------------------------------------------------------------

// Start the copies of eight rows that lanes `first` .. + 7 know, the whole warp a row at a time. Invalid ones become zeros.
template <typename R>
__device__ __forceinline__ void copy_unit(uint32_t to, const R& row, int first, int lane) {
    constexpr int PIECES = COPIED_BYTES / 16;
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i, to += STAGED) {
        const uint8_t* data = shuffle_pointer(row.data, first + i);
        const bool valid = data != nullptr;
#pragma unroll
        for (int piece = 0; piece + 32 <= PIECES; piece += 32)
            cp_async_16(to + (piece + lane) * 16, data + (piece + lane) * 16, valid);
        constexpr int REST = PIECES / 32 * 32;
        if (lane < PIECES - REST) cp_async_16(to + (REST + lane) * 16, data + (REST + lane) * 16, valid);
    }
}

// A copying warp brings the rows 16 `quarter` .. of every tile. Lane l knows row l % 16 of one tile and (l >= 16) of the next.
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, const Work& w, int quarter) {
    const int lane = threadIdx.x % 32, my_row = 16 * quarter + lane % 16, my_tile = lane / 16;
    const uint32_t ring = shared_address(shared) + RING_AT + quarter * RING_BYTES;
    const uint32_t full = shared_address(small().full[quarter]), empty = shared_address(small().empty[quarter]);
    int32_t entry = load_entry(p, w, w.begin + my_tile, my_row), next_entry = load_entry(p, w, w.begin + 2 + my_tile, my_row);
    int at = 0;
    uint32_t parity = 1;  // the first wait for an empty unit is no wait
#pragma unroll 1
    for (int pair = w.begin; pair < w.end; pair += 2) {
        const Rows row = find_row(p, w, pair + my_tile, entry);
        entry = next_entry;
        next_entry = load_entry(p, w, pair + 4 + my_tile, my_row);
        const int units = min(w.end - pair, 2) * 2;
#pragma unroll 1
        for (int i = 0; i < units; ++i) {
            mbarrier_wait(empty + 8 * at, parity);
            copy_unit(ring + at * UNIT_BYTES, row, 8 * i, lane);
            mbarrier_arrive_after_copies(full + 8 * at);
            if (++at == UNITS) {
                at = 0;
                parity ^= 1;
            }
        }
    }
}

// The largest |q| of a head to just below 2^14, by a power of two, so that f16 holds all that counts.
struct QScale {
    float up, down;
};
__device__ __forceinline__ QScale q_scale_of(uint32_t largest) {
    const int exponent = min(140 - int(largest >> 7), 126);
    return {__uint_as_float(uint32_t(127 + exponent) << 23), __uint_as_float(uint32_t(127 - exponent) << 23)};
}

// Q to shared memory, a head a warp at a time, in the order of the fragments: line = head, blocks of 64 columns. Heads
// beyond the last are zeros.
__device__ __forceinline__ void load_q(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int FOURS = D_QK / 4, EACH = ceil_div(FOURS, 32);
    if (r.group >= 2) {
        sync_multiplying();
        return;
    }
    const int first = 4 * r.group + r.warp;
    const bf16* q = p.q + w.query.b * p.q_b + w.query.s * p.q_s + w.first_head * p.q_h + 4 * r.lane;
    Vec8 v[HEADS / 8][EACH];
#pragma unroll
    for (int k = 0; k < HEADS / 8; ++k) {
        const int head = first + 8 * k;
        const bool here = w.first_head + head < p.h_q;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            v[k][i] = {0, 0};
            if (here && r.lane + 32 * i < FOURS) v[k][i] = *reinterpret_cast<const Vec8*>(q + head * p.q_h + 128 * i);
        }
    }
#pragma unroll
    for (int k = 0; k < HEADS / 8; ++k) {
        const int head = first + 8 * k;
        QScale scale = {1.0f, 1.0f};
        if (FOLDED) {
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) most = max_bf16x2(most, max_bf16x2(abs_bf16x2(v[k][i].x), abs_bf16x2(v[k][i].y)));
            scale = q_scale_of(__reduce_max_sync(~0u, larger_half(most)));
        }
        if (r.lane == 0) small().q_scale[head] = scale.down * p.scale_log2;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int n = r.lane + 32 * i;
            if (n >= FOURS) break;
            const bool rope = n >= D_NOPE / 4, narrow = FOLDED && !rope;
            const int item = q_item(n % 16, rope || !FOLDED);
            const float x = bf16_low(v[k][i].x) * scale.up, y = bf16_high(v[k][i].x) * scale.up;
            const float z = bf16_low(v[k][i].y) * scale.up, u = bf16_high(v[k][i].y) * scale.up;
            const uint32_t to = r.q() + n / 16 * Q_BLOCK_BYTES + head * 128 + ((item / 8 ^ (head & 7)) << 4) + item % 8 * 2;
            store_shared_4(to, narrow ? pack_f16x2(x, y) : pack_bf16x2(x, y));
            store_shared_4(to ^ 16, narrow ? pack_f16x2(z, u) : pack_bf16x2(z, u));
        }
    }
    sync_multiplying();
}

// --- products -------------------------------------------------------------------------------------------------

// B of a step of k, from lines of 128 bytes, a head each: two fragments a head tile of 8. `place`: of the first step.
constexpr int HEAD_TILES = HEADS / 8;
struct HeadFragments {
    uint32_t b[HEAD_TILES][2];
};
__device__ __forceinline__ uint32_t head_fragments_place(uint32_t lines, int lane) {
    const int line = lane % 8 + (HEADS > 8 ? lane / 16 * 8 : 0), chunk = lane / 8 % 2;
    return lines + line * 128 + ((chunk ^ (line & 7)) << 4);
}
__device__ __forceinline__ HeadFragments load_head_fragments(uint32_t place, int step) {
    HeadFragments f;
#pragma unroll
    for (int j = 0; j < HEAD_TILES; j += 2) {
        uint32_t four[4];
        ldmatrix_x4(four, (place ^ (step << 5)) + j * 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (j + i / 2 < HEAD_TILES) f.b[j + i / 2][i % 2] = four[i];
        }
    }
    return f;
}

// acc += A . B^T over 16 of k, all heads. NARROW: float16.
template <bool NARROW>
__device__ __forceinline__ void multiply(float (&acc)[HEAD_TILES][4], const uint32_t (&a)[4], const HeadFragments& f) {
#pragma unroll
    for (int j = 0; j < HEAD_TILES; ++j) {
        if (NARROW) {
            mma_m16n8k16_f16(acc[j], a, f.b[j][0], f.b[j][1]);
        } else {
            mma_m16n8k16(acc[j], a, f.b[j][0], f.b[j][1]);
        }
    }
}

// acc += 16 rows times Q over 64 columns, a block of Q. Q's fragments are read a step ahead; `f`: those of the first.
template <bool NARROW>
__device__ __forceinline__ void multiply_block(
    uint32_t q_place, HeadFragments f, const uint32_t (&a)[4][4], float (&acc)[HEAD_TILES][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        HeadFragments next;
        if (step < 3) next = load_head_fragments(q_place, step + 1);
        multiply<NARROW>(acc, a[step], f);
        if (step < 3) f = next;
    }
}

__device__ __forceinline__ void clear(float (&acc)[HEAD_TILES][4]) {
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) acc[i / 4][i % 4] = 0.0f;
}

// V32_FP8: the scales of chunk `k` of a thread's two rows.
struct TwoScales {
    float x, y;
};
__device__ __forceinline__ TwoScales load_scales(uint32_t row, int k) {
    if constexpr (!FOLDED) return {1.0f, 1.0f};
    row += int(SCALE_OFFSET) + 4 * k;
    return {__uint_as_float(load_shared_4(row)), __uint_as_float(load_shared_4(row + STAGED))};
}

// S^T of a warp's 16 rows. Several sums run beside one another, V32_FP8: those of different scales, which are added times their
// scales. Loops stay loops: a batch of one pays for every instruction fetched.
__device__ __forceinline__ void multiply_qk(const Role& r, uint32_t row, float (&s)[HEAD_TILES][4]) {
    constexpr int PARTS = HEADS == 32 ? 1 : FOLDED && HEADS == 8 ? 4 : 2, EACH = FOLDED ? 2 : 1;
    constexpr int BLOCK_BYTES = FOLDED ? 64 : 128;
    const uint32_t q = head_fragments_place(r.q(), r.lane);
    const uint32_t q_rope = q + NOPE_BLOCKS * Q_BLOCK_BYTES;
    uint32_t a[4][4];
    const QkRaw rope = load_qk(row, ROPE_OFFSET, true, r.t);
    HeadFragments f = load_head_fragments(q_rope, 0);
    QkRaw raw = load_qk(row, 0, !FOLDED, r.t);  // always a block ahead
    clear(s);
    qk_wide(rope, a);
    multiply_block<false>(q_rope, f, a, s);
#pragma unroll 1
    for (int first = 0; first < NOPE_BLOCKS; first += PARTS * EACH) {
        float part[PARTS][HEAD_TILES][4];
        TwoScales scales[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) clear(part[i]);
#pragma unroll
        for (int i = 0; i < PARTS * EACH; ++i) {
            const int block = first + i % PARTS * EACH + i / PARTS;
            if (NOPE_BLOCKS % (PARTS * EACH) != 0 && block >= NOPE_BLOCKS) break;
            f = load_head_fragments(q + block * Q_BLOCK_BYTES, 0);
            qk_nope(raw, a);
            const int next = i + 1 < PARTS * EACH ? first + (i + 1) % PARTS * EACH + (i + 1) / PARTS : first + PARTS * EACH;
            raw = load_qk(row, min(next, NOPE_BLOCKS - 1) * BLOCK_BYTES, !FOLDED, r.t);
            if (i == PARTS * EACH - 1) {
#pragma unroll
                for (int k = 0; k < PARTS; ++k) scales[k] = load_scales(row, first / EACH + k);
            }
            multiply_block<FOLDED>(q + block * Q_BLOCK_BYTES, f, a, part[i % PARTS]);
        }
#pragma unroll
        for (int k = 0; k < PARTS; ++k) {
#pragma unroll
            for (int i = 0; i < HEADS / 2; ++i) {
                const float scale = FOLDED ? (i % 4 / 2 == 0 ? scales[k].x : scales[k].y) : 1.0f;
                s[i / 4][i % 4] += part[k][i / 4][i % 4] * scale;
            }
        }
    }
}

// O^T += V^T . P^T, letting go of the tile, whose units stand at `slot` in each ring.
__device__ __forceinline__ void multiply_pv(const Role& r, const uint32_t (&slot)[2], float (&o)[V_TILES][HEAD_TILES][4]) {
    const uint32_t p = head_fragments_place(r.p() + (FOLDED ? r.warp * P_BYTES : 0), r.lane);
    const uint32_t ring = shared_address(shared) + RING_AT;
    StagedRows rows = {{ring + slot[0] * UNIT_BYTES, ring + slot[1] * UNIT_BYTES}};
    uint32_t empty = shared_address(small().empty[0]) + 8 * (r.lane == 0 ? slot[0] : slot[1]);
    PvRaw raw = load_pv(rows, r.warp, r.g, r.t);
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
        const HeadFragments f = load_head_fragments(p, quarter);
        const PvRaw mine = raw;
        const StagedRows here = rows;
        if (quarter < 3) {
            rows = {{rows.unit[0] + RING_BYTES, rows.unit[1] + RING_BYTES}};
            raw = load_pv(rows, r.warp, r.g, r.t);
        }
        for_pv_fragments(mine, here, r.warp, r.g, r.t, [&](int q, const uint32_t (&a)[2][4]) {
            multiply<FOLDED>(o[2 * q], a[0], f);
            multiply<FOLDED>(o[2 * q + 1], a[1], f);
        });
        __syncwarp();
        mbarrier_arrive_for_warp_at_two(empty, r.lane);
        empty += 8 * UNITS;
    }
}

// --- softmax --------------------------------------------------------------------------------------------------

// Of a thread's heads; `sum` covers its rows only. O^T is relative to `ref`, V32_FP8: chunk_ref.
using Softmax = HeadsSoftmax<COLUMNS>;

// The element of row (S^T) or column (O^T) i of a thread's two and its c-th head.
template <typename T>
__device__ __forceinline__ T& at(T (&acc)[HEAD_TILES][4], int i, int c) { return acc[c / 2][2 * i + c % 2]; }

// References rise to the tile's maxima; sums and O^T follow. All of the warpgroup comes here together.
__device__ __forceinline__ void raise_references(
    const Role& r, uint32_t row, const float (&s)[HEAD_TILES][4], Softmax& state, float (&o)[V_TILES][HEAD_TILES][4]) {
    constexpr int REFS = FOLDED ? 1 + P_COPIES : 1;
    Small& sm = small();
    float(&across)[1 + P_COPIES][4][HEADS] = sm.across[r.group];
    float(&refs)[1 + P_COPIES][HEADS] = sm.ref[r.group], (&rise)[1 + P_COPIES][HEADS] = sm.rise[r.group];
#pragma unroll 1
    for (int k = 0; k < REFS; ++k) {
        const TwoScales scales = k == 0 ? TwoScales{1.0f, 1.0f} : load_scales(row, k - 1);
        const float x = log2_approx(scales.x), y = log2_approx(scales.y);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const float top = rows_max(fmaxf(at(s, 0, c) + x, at(s, 1, c) + y));
            if (r.g == 0) across[k][r.warp][r.head(c)] = top;
        }
    }
    r.sync();
#pragma unroll 1
    for (int i = threadIdx.x % WARPGROUP; i < REFS * HEADS; i += WARPGROUP) {
        const int k = i / HEADS, head = i % HEADS;
        const float from = refs[k][head];
        const float low = fmaxf(across[k][0][head], across[k][1][head]);
        const float to = fmaxf(fmaxf(from, low), fmaxf(across[k][2][head], across[k][3][head]));
        refs[k][head] = to;
        rise[k][head] = factor(from, to);
    }
    r.sync();
    if constexpr (FOLDED) {
#pragma unroll 1
        for (int i = threadIdx.x % WARPGROUP; i < P_COPIES * HEADS; i += WARPGROUP) {
            const int k = i / HEADS, head = i % HEADS;
            sm.chunk_factor[r.group][k][head] = refs[1 + k][head] == -INF ? 0.0f : exp2_approx(refs[0][head] - refs[1 + k][head]);
        }
    }
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const int head = 8 * j + 2 * r.t;
        const float2 ref = *reinterpret_cast<const float2*>(&refs[0][head]), f = *reinterpret_cast<const float2*>(&rise[0][head]);
        state.ref[2 * j] = ref.x;
        state.ref[2 * j + 1] = ref.y;
        state.sum[2 * j] *= f.x;
        state.sum[2 * j + 1] *= f.y;
        const float2 by = FOLDED ? *reinterpret_cast<const float2*>(&rise[1 + r.warp % P_COPIES][head]) : f;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            o[v][j][0] *= by.x;
            o[v][j][1] *= by.y;
            o[v][j][2] *= by.x;
            o[v][j][3] *= by.y;
        }
    }
    r.sync();
}

// P^T of the logits `s` to shared memory, and the sums of a thread's rows. Line = head, chunk = eight rows. True where a
// reference is too low for a value.
__device__ __forceinline__ bool store_p(
    const Role& r, uint32_t row, const float (&s)[HEAD_TILES][4], const Softmax& state, float (&sums)[COLUMNS]) {
    bool high = false;
    float e[HEAD_TILES][4];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float x = at(s, 0, c), y = at(s, 1, c), base = state.ref[c] == -INF ? 0.0f : state.ref[c];
        high |= fmaxf(x, y) > state.ref[c] + REF_SLACK;
        at(e, 0, c) = exp2_approx(x - base);
        at(e, 1, c) = exp2_approx(y - base);
        sums[c] = at(e, 0, c) + at(e, 1, c);
    }
    const int line = r.lane % 8 + (HEADS > 8 ? r.lane / 16 * 8 : 0), chunk = 2 * r.warp + r.lane / 8 % 2;
    uint32_t to = r.p() + line * 128 + ((chunk ^ (line & 7)) << 4);
    float top = 0.0f;
#pragma unroll UNROLLED_COPIES
    for (int copy = 0; copy < P_COPIES; ++copy, to += P_BYTES) {
        const TwoScales scales = load_scales(row, copy);
        uint32_t rounded[HEADS / 4];
#pragma unroll
        for (int j = 0; j < HEADS / 8; ++j) {
            float2 f = {1.0f, 1.0f};
            if (FOLDED) f = *reinterpret_cast<const float2*>(&small().chunk_factor[r.group][copy][8 * j + 2 * r.t]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float scale = i == 0 ? scales.x : scales.y;
                const float x = e[j][2 * i] * (scale * f.x), y = e[j][2 * i + 1] * (scale * f.y);
                top = fmaxf(top, fmaxf(x, y));
                rounded[2 * j + i] = FOLDED ? pack_f16x2(x, y) : pack_bf16x2(x, y);
            }
        }
        if constexpr (HEADS == 8) {
            stmatrix_x2_trans(to, rounded[0], rounded[1]);
        } else {
#pragma unroll
            for (int j = 0; j < HEADS / 8; j += 2)
                stmatrix_x4_trans(to + j * 1024, rounded[2 * j], rounded[2 * j + 1], rounded[2 * j + 2], rounded[2 * j + 3]);
        }
    }
    return high || (FOLDED && top > P_LIMIT);
}

// S^T to P^T in shared memory, behind a sync of the warpgroup. `first`: its first tile, without references yet.
__device__ __forceinline__ void softmax_tile(
    const Role& r, bool first, const bool (&valid)[2], uint32_t row, float (&s)[HEAD_TILES][4], Softmax& state,
    float (&o)[V_TILES][HEAD_TILES][4]) {
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 f = *reinterpret_cast<const float2*>(&small().q_scale[8 * j + 2 * r.t]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s[j][2 * i] = valid[i] ? s[j][2 * i] * f.x : -INF;
            s[j][2 * i + 1] = valid[i] ? s[j][2 * i + 1] * f.y : -INF;
        }
    }
    float sums[COLUMNS];
    r.sync();  // the last tile's P^T has been read
    bool raise = first;
#pragma unroll 1
    while (true) {
        if (__builtin_expect(raise, 0)) raise_references(r, row, s, state, o);
        const bool high = named_barrier_any(1 + r.group, WARPGROUP, store_p(r, row, s, state, sums));
        if (raise || !high) break;
        raise = true;
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        state.sum[c] += sums[c];
        if (KEEPS_MAX) state.max[c] = fmaxf(state.max[c], fmaxf(at(s, 0, c), at(s, 1, c)));
    }
}

// --- a query's tiles ------------------------------------------------------------------------------------------

__device__ __forceinline__ void attend(
    const AttentionParams& p, const Work& w, const Role& r, Softmax& state, float (&o)[V_TILES][HEAD_TILES][4]) {
    Small& sm = small();
    const FirstRow first = first_qk_row(r.g);
    const int my_row = 16 * r.warp + 8 * first.unit + first.row;
    const uint32_t ring = shared_address(shared) + RING_AT + r.warp * RING_BYTES, full = shared_address(sm.full[r.warp]);
    int32_t entries[2] = {load_entry(p, w, w.begin + r.group, my_row), load_entry(p, w, w.begin + r.group, my_row + 1)};
#pragma unroll 1
    for (int tile = w.begin + r.group; tile < w.end; tile += GROUPS) {
        const uint32_t number = 2 * (tile - w.begin), slot[2] = {number % UNITS, (number + 1) % UNITS};
        const bool valid[2] = {is_valid(p, w, tile, entries[0]), is_valid(p, w, tile, entries[1])};
        const StagedRows rows = {{ring + slot[0] * UNIT_BYTES, ring + slot[1] * UNIT_BYTES}};
        const uint32_t row = rows.qk_row(r.g);
        float s[HEAD_TILES][4];
        mbarrier_wait(full + 8 * slot[0], number / UNITS & 1);
        mbarrier_wait(full + 8 * slot[1], (number + 1) / UNITS & 1);
        multiply_qk(r, row, s);
        softmax_tile(r, tile == w.begin + r.group, valid, row, s, state, o);
        entries[0] = load_entry(p, w, tile + GROUPS, my_row);  // behind the fence, which would wait for them
        entries[1] = load_entry(p, w, tile + GROUPS, my_row + 1);
        multiply_pv(r, slot, o);
    }
}

// --- results --------------------------------------------------------------------------------------------------

// The softmax of a thread's rows to shared memory.
__device__ __forceinline__ void lay_down_statistics(const Role& r, const Softmax& state) {
    float(&across)[1 + P_COPIES][4][HEADS] = small().across[r.group];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float sum = rows_sum(state.sum[c]), max = KEEPS_MAX ? rows_max(state.max[c]) : 0.0f;
        if (r.g == 0) {
            across[0][r.warp][r.head(c)] = sum;
            if (KEEPS_MAX) across[1][r.warp][r.head(c)] = max;
        }
    }
}

// Both warpgroups' softmax of a head together, and what their columns 128 k .. are multiplied with. By a thread a head and k.
__device__ __forceinline__ Statistics merge_statistics(int k, int head) {
    Small& sm = small();
    float ref = -INF, sum = 0.0f, max = -INF;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) ref = fmaxf(ref, sm.ref[group][0][head]);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const float own = sm.ref[group][0][head];
        sm.weight[group][k][head] = factor(sm.ref[group][FOLDED ? 1 + k % P_COPIES : 0][head], ref);
        const float(&across)[1 + P_COPIES][4][HEADS] = sm.across[group];
        sum += factor(own, ref) * ((across[0][0][head] + across[0][1][head]) + (across[0][2][head] + across[0][3][head]));
        if (KEEPS_MAX) {
#pragma unroll
            for (int warp = 0; warp < 4; ++warp) max = fmaxf(max, across[1][warp][head]);
        }
    }
    return {ref, sum, max};
}

// What a head's O^T is multiplied with in the end; `write`: lse and the like are written, too.
__device__ __forceinline__ float finish_head(const AttentionParams& p, const Work& w, int head, bool write, float ref, float sum, float max) {
    const int global_head = w.first_head + head;
    if (global_head >= p.h_q || sum == 0.0f && !write) return 0.0f;
    const HeadResult result = {max, sum == 0.0f ? -INF : ref + log2_approx(sum)};
    if (write && p.num_splits == 1) write_statistics(p, w.query, global_head, result);
    if (write && p.num_splits > 1) {
        const int64_t at = (int64_t(blockIdx.y) * p.num_queries + w.query.index) * p.h_q + global_head;
        p.part_lse[at] = result.lse;
        if (p.part_max != nullptr) p.part_max[at] = result.max;
    }
    if (sum == 0.0f) return 0.0f;
    return (p.num_splits == 1 ? sink_factor(p, global_head, result.lse) : 1.0f) / sum;
}

// Four columns of a head, times `f`.
__device__ __forceinline__ void write_columns(const AttentionParams& p, const Work& w, int head, int column, float4 v, float f) {
    const int global_head = w.first_head + head;
    if (global_head >= p.h_q) return;
    v = make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
    if (p.num_splits > 1) {
        const int64_t at = (int64_t(blockIdx.y) * p.num_queries + w.query.index) * p.h_q + global_head;
        *reinterpret_cast<float4*>(p.part_out + at * D_V + column) = v;
    } else if (p.flags & WIDE_OUT) {
        bf16* out = p.out + w.query.b * p.out_b + w.query.s * p.out_s + global_head * p.out_h + column;
        *reinterpret_cast<Vec8*>(out) = {pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w)};
    } else {
        write_output(p, w.query, global_head, column, v.x, v.y);
        write_output(p, w.query, global_head, column + 2, v.z, v.w);
    }
}

// A thread's place in half `half` of the columns as warpgroup 0 or 1 (`by` 0) or warpgroup 2 gives them.
__device__ __forceinline__ float* given_half(const Role& r, int by, int half) {
    auto* columns = reinterpret_cast<float*>(shared + EXCHANGE_AT + (2 * by + half) * EXCHANGE_BYTES);
    return columns + 2 * r.t * HALF_LINE + pv_column(r.warp, r.g, 0) / (FOLDED ? 2 : 1);
}
// Of head c, word 2 half + k of the columns. Words of a half stand beside one another as they do in a row.
__device__ __forceinline__ float4& four_columns(float* half, int c, int k) {
    return *reinterpret_cast<float4*>(half + (c / 2 * 8 + c % 2) * HALF_LINE + (FOLDED ? 4 : 128) * k);
}

// Half `HALF` of a warpgroup's columns to shared memory.
template <int HALF>
__device__ __forceinline__ void give_half(float* to, const float (&o)[V_TILES][HEAD_TILES][4]) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float(&first)[HEAD_TILES][4] = o[4 * HALF + 2 * k], (&second)[HEAD_TILES][4] = o[4 * HALF + 2 * k + 1];
            four_columns(to, c, k) =
                make_float4(at(first, 0, c), at(first, 1, c), at(second, 0, c), at(second, 1, c));
        }
    }
}

// Half `HALF` of the columns of all warpgroups together, by warpgroup HALF: act(c, k, where it may be kept, value).
template <int HALF, typename Act>
__device__ __forceinline__ void merge_half(const Role& r, bool third_has_rows, const float (&o)[V_TILES][HEAD_TILES][4], Act act) {
    const Small& sm = small();
    float *both = given_half(r, 0, HALF), *third = given_half(r, 1, HALF);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int head = r.head(c);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float a = sm.weight[HALF][r.warp][head], b = sm.weight[1 - HALF][r.warp][head];
            const float(&first)[HEAD_TILES][4] = o[4 * HALF + 2 * k], (&second)[HEAD_TILES][4] = o[4 * HALF + 2 * k + 1];
            float4& four = four_columns(both, c, k);
            float4 v = four;
            v = make_float4(a * at(first, 0, c) + b * v.x, a * at(first, 1, c) + b * v.y,
                            a * at(second, 0, c) + b * v.z, a * at(second, 1, c) + b * v.w);
            if (GROUPS == 3 && third_has_rows) {
                const float w = sm.weight[GROUPS - 1][r.warp][head];
                const float4 x = four_columns(third, c, k);
                v = make_float4(v.x + w * x.x, v.y + w * x.y, v.z + w * x.z, v.w + w * x.w);
            }
            act(c, k, four, v);
        }
    }
}

// The block's result, [half][head][column] in shared memory, written.
__device__ __forceinline__ void write_block(const AttentionParams& p, const Work& w) {
#pragma unroll 4
    for (int i = threadIdx.x; i < HEADS * D_V / 4; i += MULTIPLYING) {
        const int head = i / (D_V / 4), column = i % (D_V / 4) * 4;
        const int half = FOLDED ? column / 8 % 2 : column / 256, at = FOLDED ? column / 16 * 8 + column % 8 : column % 256;
        const auto* v = reinterpret_cast<const float4*>(shared + EXCHANGE_AT + half * EXCHANGE_BYTES + (head * HALF_LINE + at) * 4);
        write_columns(p, w, head, column, *v, small().scale[head]);
    }
}

// Merge the warpgroups of a block, then the blocks of a cluster.
__device__ __forceinline__ void write_results(
    const AttentionParams& p, const Work& w, const Role& r, const Softmax& state, const float (&o)[V_TILES][HEAD_TILES][4]) {
    Small& sm = small();
    sync_multiplying();  // all rows have been read
    lay_down_statistics(r, state);
    const bool third_has_rows = w.end - w.begin > 2;
    if (r.group < 2 || third_has_rows) {
        if (r.group != 1) give_half<1>(given_half(r, r.group / 2, 1), o);
        if (r.group != 0) give_half<0>(given_half(r, r.group / 2, 0), o);
    }
    sync_multiplying();
    const Parts<4> parts(p, blockIdx.y * p.num_queries + w.query.index, blockIdx.z, gridDim.z);
    if (threadIdx.x < 4 * HEADS) {
        const int k = threadIdx.x / HEADS, head = threadIdx.x % HEADS;
        const Statistics block = merge_statistics(k, head);
        if (k == 0 && parts.blocks > 1) parts.write_statistics(head, block.ref, block.sum, block.max);
        if (k == 0 && parts.blocks == 1) sm.scale[head] = finish_head(p, w, head, true, block.ref, block.sum, block.max);
    }
    sync_multiplying();
    // Unit 128 (4 c + q) + thread: of head c word q of the columns of the first or second warpgroup's thread.
    auto keep = [&](int c, int k, float4& place, float4 v) {
        if (parts.blocks > 1) {
            parts.write(128 * (4 * c + 2 * r.group + k) + threadIdx.x % WARPGROUP, v);
        } else {
            place = v;
        }
    };
    if (r.group == 0) {
        merge_half<0>(r, third_has_rows, o, keep);
    } else if (r.group == 1) {
        merge_half<1>(r, third_has_rows, o, keep);
    }
    if (parts.blocks == 1) {
        sync_multiplying();
        write_block(p, w);
        return;
    }
    auto head_of = [](int unit) { return unit / 512 / 2 * 8 + unit % 4 * 2 + unit / 512 % 2; };
    auto finish = [&](int head, bool write, float ref, float sum, float max) { return finish_head(p, w, head, write, ref, sum, max); };
    auto column_of = [](int unit) { return pv_column(unit % 128 / 32, unit % 32 / 4, unit / 128 % 4); };
    auto weights = reinterpret_cast<float*>(shared);  // over Q
    static_assert(Parts<4>::MAX_BLOCKS * HEADS * 4 <= Q_BYTES, "");
    parts.merge<MULTIPLYING>(weights, head_of, column_of, finish, sync_multiplying, [&](int head, int column, const float (&v)[4]) {
        write_columns(p, w, head, column, make_float4(v[0], v[1], v[2], v[3]), 1.0f);
    });
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x a cluster a query, y splits that clusters do not hold, z head tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1) few_heads_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane: a barrier a thread would be done one after the other too
#pragma unroll 1
        for (int i = threadIdx.x / 32; i < 4 * UNITS; i += THREADS / 32) {
            mbarrier_init(shared_address(&sm.full[0][0] + i), 32);
            mbarrier_init(shared_address(&sm.empty[0][0] + i), 4 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < GROUPS * (1 + P_COPIES) * HEADS; i += THREADS) (&sm.ref[0][0][0])[i] = -INF;
    __syncthreads();
    const int blocks = cluster_size(), rank = cluster_rank();
    if (has_lengths(p)) wait_for_earlier_kernels();
    const Work w = find_work(p, cluster_index(), blockIdx.z, blockIdx.y * blocks + rank, p.num_splits * blocks);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (threadIdx.x >= MULTIPLYING) {
        give_registers<COPY_REGISTERS>();
        copy_tiles(p, w, threadIdx.x / 32 % 4);
        if (blocks > 1) cluster_sync_with_one_fence(false);  // barriers of the cluster count every thread
    } else {
        take_registers<REGISTERS>();
        const Role r = Role::here();
        Softmax state;
        state.clear();
        load_q(p, w, r);
        float o[V_TILES][HEAD_TILES][4];
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) clear(o[v]);
        attend(p, w, r, state, o);
        write_results(p, w, r, state, o);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
