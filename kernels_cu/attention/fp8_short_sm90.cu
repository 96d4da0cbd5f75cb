// Sparse attention of V4_FP8 rows on Hopper, 32 or 64 heads of a query at a time, for lists of at most 256 rows: all rows
// of a query are in shared memory at once. There is no ring, and nobody but the warps that use a row fetches it.
//
//   S^T = K . Q^T, O^T = V^T . P^T as in fp8_sm90.cu, whose headers make S^T. Four warpgroups, each
//
//     ask     lengths, list entries and Q at once; then each warp copies the 16 rows whose S^T it makes
//     Q       to f16, in the order of S^T
//     S^T     64 rows: a tile of the warpgroup's own
//       ----  all meet: the largest logit of each head, over all rows; nobody reads Q any more
//     P^T     to where Q was
//       ----  all meet
//     O^T     128 of the 512 value columns, over all tiles
//       ----  all meet
//     results, through the place of Q and P
//
// A reference that all rows have is found before the first P^T: so there is none that rises, nothing is multiplied again,
// and P^T is at most 2^HEADROOM. Scales and their rounding are as in fp8_sm90.cu.
//
// Where tiles are: main lists from tile 0 on, extra lists from the tile behind the longest main list on. So an entry's
// place does not depend on lengths, which are loaded with it. Tiles without a valid entry are not multiplied.
//
// Shared memory, HEADS 64: Q, then four P of heads x 64 f16, 65,536; 256 rows x 592, 151,552; the rest 9,344.
// Registers: 128, four warps of a scheduler.
// What was tried, what bounds it: docs/kernels/fp8_short_sm90.md.
#include "attention/division/results.cuh"
#include "attention/fp8_sm90/softmax.cuh"

constexpr bool MEET = SPLITS_MEET;  // an item has a cluster, whose CTAs merge
constexpr int TILES = 4, WARPS = 4 * TILES, CTA_THREADS = 32 * WARPS;
constexpr int ROWS_AT = Q_BLOCKS * LINES_BYTES;
static_assert(HAS_ROPE && E8M0_SCALES && Q_BLOCKS == 8 && TILES * LINES_BYTES <= ROWS_AT, "V4_FP8; P where Q was");

struct alignas(16) Rest {
    uint64_t full[WARPS];                          // a warp's rows have come
    uint32_t valid[WARPS];                         // a bit for each row of a warp
    float q_max[WARPS], across[WARPS][HEADS];      // of each warp
    float ref[HEADS], scale[HEADS], sink[HEADS];   // what P^T is relative to; of O^T; in base 2
    uint16_t ratio[TILES][CHUNKS + 1][TILE_ROWS];  // f16, scale / r; a chunk more is loaded, and not used
};
constexpr int REST_AT = ROWS_AT + TILES * TILE_ROWS * STRIDE, CTA_BYTES = REST_AT + int(sizeof(Rest));
static_assert(CTA_BYTES <= SM90_SHARED_BYTES, "");
__device__ __forceinline__ Rest& rest() { return *reinterpret_cast<Rest*>(shared + REST_AT); }
__device__ __forceinline__ void meet() { named_barrier_sync(CONSUMER_SYNC, CTA_THREADS); }

struct Item {
    Query query;
    int first_head;
};

// --- what an item needs ---------------------------------------------------------------------------------------

// MEET: the tiles of an item are dealt out to the CTAs of a cluster in turn.
__device__ __forceinline__ int tile_of(int warpgroup) {
    return MEET ? cluster_rank() + warpgroup * cluster_size() : warpgroup;
}

// The cache of a warpgroup's tile, and the tile's place in its list. The first warpgroup has one in any case.
struct Place {
    const Source& source;
    int first;
    bool exists;
};
__device__ __forceinline__ Place place_of_tile(const AttentionParams& p, int warpgroup) {
    const int tile = tile_of(warpgroup);
    const int of_extra = tile - ceil_div(p.main.topk, TILE_ROWS);
    const Source& source = of_extra < 0 ? p.main : p.extra;
    const int first = (of_extra < 0 ? tile : of_extra) * TILE_ROWS;
    return {source, first, warpgroup == 0 || first < source.topk};
}

// The entry of this lane's row, and the length of its list, neither looked at yet: nothing waits for them before Q is asked
// for. Lane l < 16 has row l of its warp's.
struct Entry {
    int32_t slot, length, at;
    __device__ __forceinline__ bool is_listed() const { return at < length; }
};
__device__ __forceinline__ Entry load_entry(const AttentionParams& p, const Query& query, const Role& r) {
    const Place place = place_of_tile(p, r.warpgroup);
    const Source& source = place.source;
    Entry entry = {-1, source.topk, place.first + STAGE_ROWS * r.warp + r.lane};
    if (r.lane < STAGE_ROWS && entry.at < source.topk) {
        entry.slot = list_of(source, query)[entry.at];
        if (source.lengths != nullptr) entry.length = source.lengths[query.b];
    }
    return entry;
}

__device__ __forceinline__ uint32_t rows_of_warp(const Role& r) {
    return shared_address(shared) + ROWS_AT + STAGE_ROWS * (4 * r.warpgroup + r.warp) * STRIDE;
}

// Starts the copies of a warp's rows; of zeros, where entries name none.
__device__ __forceinline__ void copy_rows(const AttentionParams& p, const Entry& entry, const Role& r) {
    const Place place = place_of_tile(p, r.warpgroup);
    const int warp = 4 * r.warpgroup + r.warp;
    const uint32_t full = shared_address(&rest().full[warp]), to = rows_of_warp(r) + r.lane * STRIDE;
    const bool named = entry.is_listed() && uint32_t(entry.slot) < nameable_slots(place.source);
    const Row row = named ? Row::of_slot(place.source, entry.slot) : Row::none();
    const uint32_t valid = __ballot_sync(~0u, row.data != nullptr);
    if (r.lane == 0) rest().valid[warp] = valid;
    if (!place.exists) return;
    mbarrier_arrive_expecting_for_warp(full, STAGE_ROWS * ROW_STRIDE, r.lane);
    __syncwarp();
    if (r.lane < STAGE_ROWS) {
        copy_in_bulk(to, row_or_zeros<ROW_STRIDE>(row.data, r.lane), ROW_STRIDE, full);
        copy_scales<SCALES_BEHIND>(to + SCALES_AT, row.scales(), row.data != nullptr);
    }
    mbarrier_arrive_after_copies(full);
}

// This thread's part of Q: of HEADS / 32 heads eight columns for each t, as store_q takes them (queries.cuh). Eight lanes
// store to all banks; four load 64 bytes of a head.
struct QColumns {
    static constexpr int COUNT = HEADS / 32;
    Vec16 of[COUNT][4];

    static __device__ __forceinline__ int head(const Role& r, int i) {
        return 8 * (r.warpgroup + 4 * i) + r.lane / 2 % 4 + r.lane / 16 * 4;
    }
    static __device__ __forceinline__ int half(const Role& r) { return r.lane % 2; }
    static __device__ __forceinline__ int block(const Role& r) { return 2 * r.warp + r.lane / 8 % 2; }

    __device__ __forceinline__ void load(const AttentionParams& p, const Item& item, const Role& r) {
        const bool alone = are_alone(r.warp);
        const int column = 128 * r.warp + (alone ? 64 : 16) * (r.lane / 8 % 2) + 8 * half(r);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int head = item.first_head + QColumns::head(r, i);
            const bf16* from = q_of(p, item.query, head) + column;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                of[i][t] = {0, 0, 0, 0};
                if (head < p.h_q) of[i][t] = *reinterpret_cast<const Vec16*>(from + (alone ? 16 : 32) * t);
            }
        }
    }
    // To shared memory as f16. Returns what a logit is to be multiplied with. All threads meet twice.
    __device__ __forceinline__ float store(const AttentionParams& p, const Role& r) const {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) top = largest_bits(top, of[i]);
        top = __reduce_max_sync(~0u, larger_half(top & 0x7fff7fff));  // positive numbers are ordered as their bits are
        if (r.lane == 0) rest().q_max[4 * r.warpgroup + r.warp] = __uint_as_float(top << 16);
        meet();
        float max = rest().q_max[r.lane % WARPS];
        max = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(max)));
        const int exponent = int(__float_as_uint(max) >> 23) - 127;
        const int shift = exponent == 128 || max == 0.0f ? 0 : min(13 - exponent, 100);  // an infinity stays one
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            store_q(swizzled(shared_address(shared) + Q_AT, head(r, i), 4 * half(r)), block(r), of[i],
                    power_of_two_bf16x2(shift + 127), true);
        fence_proxy_async();
        meet();
        return logit_scale_of(p, __uint_as_float(uint32_t(127 - shift) << 23));
    }
};

// Which tiles are multiplied, a bit each: those with a valid entry, or the first one. All lanes of a warp call.
__device__ __forceinline__ uint32_t tiles_with_rows() {
    const uint32_t warps = __ballot_sync(~0u, rest().valid[threadIdx.x % WARPS] != 0);
    uint32_t tiles = 0;
#pragma unroll
    for (int i = 0; i < TILES; ++i) tiles |= uint32_t((warps >> 4 * i & 15) != 0) << i;
    return max(tiles, 1u);
}

// --- S^T and P^T ----------------------------------------------------------------------------------------------

// Writes what `values` of a thread's heads become over its warp's rows, to `across`.
template <typename Combine, typename OverRows>
__device__ __forceinline__ void write_across(const Role& r, float (&values)[OWN_HEADS], Combine combine,
                                             OverRows over_rows) {
    combine_lanes(r, values, combine);
#pragma unroll
    for (int c = 0; c < SUMS; ++c) {
        const float value = SUMS == OWN_HEADS ? over_rows(values[c]) : values[c];
        if (SUMS < OWN_HEADS || r.g == 0) rest().across[4 * r.warpgroup + r.warp][sum_head(r, c)] = value;
    }
}
// The same where a warp has no rows.
__device__ __forceinline__ void fill_across(const Role& r, float value) {
#pragma unroll
    for (int head = 0; head < HEADS; head += 32) rest().across[4 * r.warpgroup + r.warp][head + r.lane] = value;
}

// All have written the largest logits + log2 r of their heads: references are found of them, while all meet twice.
__device__ __forceinline__ void find_references() {
    meet();
    if (threadIdx.x < HEADS) {
        float top = REF_NONE;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) top = fmaxf(top, rest().across[i][threadIdx.x]);
        rest().ref[threadIdx.x] = fmaxf(top - HEADROOM, REF_NONE);
    }
    meet();
}

// As store_ratios of softmax.cuh.
__device__ __forceinline__ void store_ratios_of_tile(const Role& r, const RowScales& scales) {
    const int place = 16 * r.warp + r.g / 2 * 4 + r.g % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < RATIO_WORDS; ++k) {
            if (k < CHUNKS / 4 || r.t < CHUNKS % 4)
                rest().ratio[r.warpgroup][chunk_of_word(r.t, k)][place + 2 * i] = uint16_t(scales.ratio[k] >> 16 * i);
        }
    }
}

// P^T = r 2^(logit - ref) of the tile to shared memory, and the sums of P^T / r to `across`.
__device__ __forceinline__ void store_p_of_tile(const Role& r, const RowScales& scales, const float (&s)[HEADS / 2]) {
    const int line = r.lane % 8 + r.lane / 16 * 8, chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(shared_address(shared) + r.warpgroup * LINES_BYTES, line, chunk);
    float sums[OWN_HEADS];
    uint32_t rounded[2][2];
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
        const float2 ref = *reinterpret_cast<const float2*>(&rest().ref[r.head(2 * j)]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = exp2_approx(fmaf(s[4 * j + 2 * i], scales.logit[i], -ref.x));
            const float y = exp2_approx(fmaf(s[4 * j + 2 * i + 1], scales.logit[i], -ref.y));
            sums[2 * j] = i == 0 ? x : sums[2 * j] + x;
            sums[2 * j + 1] = i == 0 ? y : sums[2 * j + 1] + y;
            rounded[j % 2][i] = pack_f16x2(x * scales.r[i], y * scales.r[i]);
        }
        if (j % 2 == 1)
            stmatrix_x4_trans(to + (j - 1) * 1024, rounded[0][0], rounded[0][1], rounded[1][0], rounded[1][1]);
    }
    write_across(r, sums, [](float x, float y) { return x + y; }, [](float x) { return rows_sum(x); });
}

// S^T of the warpgroup's tile, and P^T of it. All threads meet three times.
__device__ __forceinline__ void attend_tile(const AttentionParams& p, const Role& r, float logit_scale) {
    float s[HEADS / 2];
    const RowScales scales = multiply_qk_fine_scales(rows_of_warp(r) + r.g * STRIDE, r.t, false, logit_scale, s);
    const uint32_t valid = rest().valid[4 * r.warpgroup + r.warp];
    if (!all_seen(valid)) mask_rows(p, r, 0, valid, logit_scale < 0.0f ? INF : -INF, s);
    store_ratios_of_tile(r, scales);
    const float log2_r[2] = {log2_approx(scales.r[0]), log2_approx(scales.r[1])};  // exact
    float tops[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c)
        tops[c] =
            fmaxf(s[element(0, c)] * scales.logit[0] + log2_r[0], s[element(1, c)] * scales.logit[1] + log2_r[1]);
    write_across(r, tops, [](float x, float y) { return fmaxf(x, y); }, [](float x) { return rows_max(x); });
    find_references();
    store_p_of_tile(r, scales, s);
    fence_proxy_async();
    meet();
}

// The same in a warpgroup whose tile is not multiplied.
__device__ __forceinline__ void pass_tile(const Role& r) {
    fill_across(r, REF_NONE);
    find_references();
    fill_across(r, 0.0f);
    meet();
}

// --- O^T and results ------------------------------------------------------------------------------------------

// Column blocks 2 w and 2 w + 1 of O^T, of warpgroup w: rows g and g + 8 of a warp's 16 are its columns 2 g and 2 g + 1.
struct Values2 {
    float o[2][HEADS / 2];
};

// 16 rows and a warp's 16 columns of both blocks as they come from shared memory, and the rows' ratios.
struct RowColumns {
    uint32_t bytes[4], rope[4];
    Vec8 ratio[2];
};
__device__ __forceinline__ RowColumns load_row_columns(const Role& r, uint32_t rows, uint32_t ratios) {
    RowColumns c = {};
    ldmatrix_x4_trans(c.bytes, rows + r.lane % 16 * STRIDE + 128 * r.warpgroup + r.lane / 16 * 64 + 16 * r.warp);
    if (r.warpgroup == TILES - 1)
        ldmatrix_x4_trans(
            c.rope, rows + (r.lane / 16 * 8 + r.lane % 8) * STRIDE + ROPE_AT + 32 * r.warp + r.lane / 8 % 2 * 16);
#pragma unroll
    for (int v = 0; v < 2; ++v) c.ratio[v] = load_shared_8(ratios + 2 * TILE_ROWS * v);
    return c;
}
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t ratio, uint32_t& even, uint32_t& odd) {
    e4m3x4_to_f16x2(__byte_perm(bytes, 0, 0x3120), even, odd);
    even = multiply_f16x2(even, ratio);
    odd = multiply_f16x2(odd, ratio);
}
__device__ __forceinline__ void widen_row_columns(const Role& r, const RowColumns& c, uint32_t (&a)[2][4]) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        widen(c.bytes[2 * v], c.ratio[v].x, a[v][0], a[v][1]);
        widen(c.bytes[2 * v + 1], c.ratio[v].y, a[v][2], a[v][3]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) a[1][n] = opaque(r.warpgroup == TILES - 1 ? c.rope[n] : a[1][n]);  // as in values.cuh
}

// O^T = V^T . P^T over the tiles.
__device__ __forceinline__ void multiply_pv(const Role& r, uint32_t tiles, Values2& out) {
    const uint64_t first_p = wgmma_operand(opaque(shared_address(shared)), 1024, 16);
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) out.o[0][i] = out.o[1][i] = 0.0f;
#pragma unroll 1
    do {
        const int tile = __ffs(tiles) - 1;
        tiles &= tiles - 1;
        const uint64_t prob = wgmma_further(first_p, tile * LINES_BYTES);
        const uint32_t rows = shared_address(shared) + ROWS_AT + tile * TILE_ROWS * STRIDE;
        const uint32_t ratios = shared_address(&rest().ratio[tile][2 * r.warpgroup][4 * r.t]);
        uint32_t a[2][2][4];
        RowColumns columns = load_row_columns(r, rows, ratios);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k > 1) wgmma_wait<1>();
            widen_row_columns(r, columns, a[k % 2]);
            if (k < 3) columns = load_row_columns(r, rows + 16 * (k + 1) * STRIDE, ratios + 2 * 16 * (k + 1));
            wgmma_fence();
#pragma unroll
            for (int v = 0; v < 2; ++v)
                wgmma<Values::F16, Sum::ADD, Major::K>(out.o[v], a[k % 2][v], wgmma_further(prob, 32 * k));
            wgmma_commit();
        }
        wgmma_wait<0>();
    } while (tiles != 0);
}

// The sinks of a CTA's heads to shared memory, -inf where there is none.
__device__ __forceinline__ void load_sinks(const AttentionParams& p, int first_head) {
    const int head = first_head + int(threadIdx.x);
    if (threadIdx.x < HEADS)
        rest().sink[threadIdx.x] = p.sink == nullptr || head >= p.h_q ? -INF : p.sink[head] * LOG2E;
}

// A head's denominator, of which each warp has a part.
__device__ __forceinline__ float sum_of_warps(int local) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += rest().across[i][local];
    return sum;
}

// Denominators to statistics, and to what O^T is multiplied with. MEET: they are kept in `scale`.
__device__ __forceinline__ void finish_heads(const AttentionParams& p, const Item& item) {
    const int local = threadIdx.x, head = item.first_head + local;
    if (local >= HEADS || head >= p.h_q) return;
    const float sum = sum_of_warps(local);
    if constexpr (MEET) {
        rest().scale[local] = sum;
        return;
    }
    const HeadResult result = {0.0f, log2_sum_exp(rest().ref[local], sum)};
    write_statistics(p, item.query, head, result);
    rest().scale[local] = sum == 0.0f ? 0.0f : 1.0f / (sum * (1.0f + exp2_approx(rest().sink[local] - result.lse)));
}

// Results go through the place of Q and P, as bf16 (MEET: f16) [head][column], of which whole lines are written. Stretches of 32 bytes
// change places from one pair of heads to the next, so that a warp's stores meet all banks.
constexpr int RESULT_BYTES = 2 * D_V;  // of a head
static_assert(HEADS * RESULT_BYTES <= ROWS_AT, "");

// O^T times `scale`.
__device__ __forceinline__ void stage_results(const Role& r, const Values2& out) {
    const uint32_t to =
        shared_address(shared) + 2 * r.t * RESULT_BYTES + 256 * r.warpgroup + (32 * r.warp + 4 * r.g ^ r.t << 5);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float f = rest().scale[r.head(c)];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            const float x = f * out.o[v][element(0, c)], y = f * out.o[v][element(1, c)];
            store_shared_4(to + (c / 2 * 8 + c % 2) * RESULT_BYTES + 128 * v,
                           MEET ? pack_f16x2(x, y) : pack_bf16x2(x, y));
        }
    }
}

// What a thread writes of them: eight columns of every AT_ONCE-th head. Two warps write a head.
constexpr int AT_ONCE = WARPS / 2;
struct StagedLines {
    int first, chunk;
    uint32_t from;
    __device__ __forceinline__ explicit StagedLines(const Role& r)
        : first((4 * r.warpgroup + r.warp) / 2),
          chunk(r.warp % 2 * 32 + r.lane),
          from(shared_address(shared) + first * RESULT_BYTES + (16 * chunk ^ first / 2 % 4 << 5)) {}
    __device__ __forceinline__ Vec16 of(int i) const { return load_shared_16(from + i * RESULT_BYTES); }
};

// Once all have met.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Item& item, const Role& r) {
    const StagedLines staged(r);
    bf16* to = out_of(p, item.query, item.first_head + staged.first, CHUNK * staged.chunk);
    const int heads = min(HEADS, p.h_q - item.first_head) - staged.first;
    if (p.flags & WIDE_OUT) {
#pragma unroll
        for (int i = 0; i < HEADS; i += AT_ONCE) {
            if (i < heads) store_16(to + i * p.out_h, staged.of(i));
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < heads; i += AT_ONCE) store_chunk(to + i * p.out_h, staged.of(i), false);
    }
}

// MEET: leaves a partial result, and merges this CTA's share of the output once those of the cluster are there. All threads
// have met since the last product.
__device__ __forceinline__ void merge_in_cluster(const AttentionParams& p, const Item& item, const Role& r,
                                                 const Values2& out) {
    const int cluster = blockIdx.y * num_head_tiles(p) + blockIdx.x / cluster_size();
    const ClusterResults<8> partials(p, cluster);
    float tops[OWN_HEADS];
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        tops[c] = 0.0f;
#pragma unroll
        for (int v = 0; v < 2; ++v)
            tops[c] = fmaxf(tops[c], fmaxf(fabsf(out.o[v][element(0, c)]), fabsf(out.o[v][element(1, c)])));
    }
    write_across(r, tops, [](float x, float y) { return fmaxf(x, y); }, [](float x) { return rows_max(x); });
    meet();
    if (threadIdx.x < HEADS) {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) top = fmaxf(top, rest().across[i][threadIdx.x]);
        const float up = to_f16_range(top);
        partials.write_statistics(threadIdx.x, rest().ref[threadIdx.x], rest().scale[threadIdx.x], 0.0f, 1.0f / up);
        rest().scale[threadIdx.x] = up;
    }
    meet();
    stage_results(r, out);
    meet();
    const StagedLines staged(r);
#pragma unroll
    for (int i = 0; i < HEADS; i += AT_ONCE) {
        const Vec16 v = staged.of(i);
        partials.write(
            (staged.first + i) * (D_V / 8) + staged.chunk,
            make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)));
    }
    meet();
    cluster_sync_with_one_fence(threadIdx.x == 0);
    auto finish = [&](int local, bool write, float ref, float sum, float) {
        return finish_merged_head(p, item.query, item.first_head + local, write, ref, sum, 0.0f);
    };
    auto store = [&](int local, int column, const float (&v)[8]) {
        const int head = item.first_head + local;
        if (head >= p.h_q) return;
        const Vec16 packed = {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                              pack_bf16x2(v[6], v[7])};
        store_chunk(out_of(p, item.query, head, column), packed, p.flags & WIDE_OUT);
    };
    partials.merge_share<CTA_THREADS>(
        reinterpret_cast<float*>(shared + ROWS_AT), [](int chunk) { return chunk / (D_V / 8); },
        [](int chunk) { return chunk % (D_V / 8) * 8; }, finish, meet, store);
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: tiles of heads x CTAs, which take queries in turn; MEET: CTAs of the clusters of a query's tiles of heads x queries.
extern "C" __global__ void __launch_bounds__(CTA_THREADS, 1)
    fp8_short_sm90(const __grid_constant__ AttentionParams p) {
    const Role who = Role::of(threadIdx.x, uniform(threadIdx.x / WARPGROUP), uniform(threadIdx.x / 32 % 4));
    // Nothing that is derived from the lane stays in registers.
    const auto role = [&] { return rare_role(who); };
    const uint32_t full = shared_address(&rest().full[4 * who.warpgroup + who.warp]);
    if (who.lane == 0) {
        mbarrier_init(full, WARP_ARRIVALS + 32);
        mbarrier_init_fence();
    }
    __syncwarp();  // no other warp uses it
    const bool has_tile = place_of_tile(p, who.warpgroup).exists;
    Item item = {query_by_branch(p, blockIdx.y), int(blockIdx.x / (MEET ? cluster_size() : 1)) * HEADS};
    wait_for_earlier_kernels();
    let_next_kernel_start();
    Entry entry = load_entry(p, item.query, role());
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        float logit_scale;
        {
            QColumns q;
            q.load(p, item, role());
            if (turn == 0) {
                copy_rows(p, entry, role());
                load_sinks(p, item.first_head);
            }
            logit_scale = q.store(p, role());
        }
        const uint32_t tiles = tiles_with_rows();
        if (has_tile) mbarrier_wait(full, turn & 1);
        if (tiles >> who.warpgroup & 1) {
            attend_tile(p, role(), logit_scale);
        } else {
            pass_tile(role());
        }
        finish_heads(p, item);
        const int next = blockIdx.y + (turn + 1) * gridDim.y;
        const Item done = item;
        if (next < p.num_queries) {
            item.query = query_by_branch(p, next);
            entry = load_entry(p, item.query, role());
        }
        Values2 out;
        multiply_pv(role(), tiles, out);
        meet();
        if constexpr (MEET) {
            merge_in_cluster(p, item, role(), out);
            break;
        }
        if (next < p.num_queries) {
            fence_proxy_async();  // between reads of rows and bulk copies to the same place
            copy_rows(p, entry, role());
        }
        stage_results(role(), out);
        meet();
        write_results(p, done, role());
        if (next >= p.num_queries) break;
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = CTA_THREADS;
extern "C" __device__ int kernel_shared_bytes = CTA_BYTES;
