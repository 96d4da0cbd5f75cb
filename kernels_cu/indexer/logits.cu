// The indexer's logits with mma.sync, on any GPU from sm_80 on: keys in rows, or in a paged cache.
//
//   grid       as many CTAs as the GPU runs at a time, each with an equal share of the units of keys (work.cuh)
//   CTA        a tile of queries, with all heads, stands in shared memory. 8 warps have 32 of a unit's 256 keys each
//     a warp   loads its keys into registers, as A operands (keys.cuh). Then for each query, 8 heads at a time:
//                multiply  keys x heads, with B from shared memory
//                sum       relu, times the head's weight, in float32, over the lane's heads
//              The four lanes of a quad add up their sums so that each has the sum of one key, and stores its logit
//   end        -inf for the keys that no unit covers, if asked
//
// Keys and queries are e4m3, or e5m2 where they were MXFP4: E5M2_KEYS, and p.e5m2_queries. MXFP4 keys of a cache are
// widened to e5m2 when they are loaded (keys.cuh). That is exact if the scales of a key's groups are within a factor of
// 2^28. Otherwise values of small groups are off by less than 2^-29 of the key's largest scale.
//
// CANDIDATES: a query sees blocks of 8 keys of its own (work.cuh).
//
// COMPACT: a row of results starts at the first key that its query sees, and has no room for keys that it does not
// see.
//
// On sm_89, and from sm_120 on, operands are bytes (m16n8k32). Older GPUs have no such mma, and on sm_90 and sm_100
// mma.sync widens bytes each time it runs. There operands are widened to f16 once, which is exact (m16n8k16).
//
// A row of the tile in shared memory is one head: 16-byte pieces in the order in which lanes need them. Odd rows have
// the halves of each 128 bytes swapped, so that a load of two rows meets all banks.
//
// Shared memory: QUERIES * HEADS rows of 128 bytes or 256 (f16), 4 bytes a row of weights, and 16 bytes a warp.
#include "indexer/keys.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"

#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr bool WIDENED = false;
#else
constexpr bool WIDENED = true;
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROWS = 4, KEYS = 8 * ROWS, TILES = KEYS / 16;  // of a warp: a lane has 4 keys, of two tiles of mma
constexpr int UNIT = WARPS * KEYS;
constexpr int PIECES = WIDENED ? 4 : 2;  // of 16 bytes that a lane has of a head; each is for two steps of k
constexpr int STEPS = 2 * PIECES;
constexpr int HEAD_BYTES = 64 * PIECES, TILE_BYTES = QUERIES * HEADS * HEAD_BYTES;

static_assert(!PAGED || E5M2_KEYS == MXFP4, "a cache has FP8 keys, e4m3, or MXFP4 keys, which become e5m2");

extern __shared__ uint8_t shared[];

__device__ __forceinline__ uint32_t piece_offset(int row, int piece, int t) {
    return row * HEAD_BYTES + ((4 * piece + t) ^ (row % 2 * 4)) * 16;
}

template <bool E5M2>
__device__ __forceinline__ void widen_to_f16(uint32_t bytes, uint32_t& first, uint32_t& second) {
    if constexpr (E5M2) {
        e5m2x4_to_f16x2(bytes, first, second);
    } else {
        e4m3x4_to_f16x2(bytes, first, second);
    }
}

template <bool E5M2>
__device__ __forceinline__ void widen_to_f16(const Vec16& bytes, Vec16& first, Vec16& second) {
    widen_to_f16<E5M2>(bytes.x, first.x, first.y);
    widen_to_f16<E5M2>(bytes.y, first.z, first.w);
    widen_to_f16<E5M2>(bytes.z, second.x, second.y);
    widen_to_f16<E5M2>(bytes.w, second.z, second.w);
}

// Brings the tile's queries and weights to shared memory. Heads and queries that do not exist become zeros.
__device__ __forceinline__ void load_queries(const LogitsParams& p, const QueryTile& tile) {
    const uint32_t rows = shared_address(shared), weights = rows + TILE_BYTES;
    for (int item = threadIdx.x; item < QUERIES * HEADS * 8; item += THREADS) {
        const int row = item / 8, query = row / HEADS, head = row % HEADS, half = item / 4 % 2, t = item % 4;
        Vec16 chunk = {0, 0, 0, 0};
        if (query < tile.count && head < p.heads) {
            const uint8_t* from = p.q8 + tile.request * p.q_request + (tile.first + query) * p.q_query;
            chunk = *reinterpret_cast<const Vec16*>(from + head * p.q_head + item % 8 * 16);
        }
        if constexpr (WIDENED) {
            Vec16 first, second;
            if (p.e5m2_queries) {
                widen_to_f16<true>(chunk, first, second);
            } else {
                widen_to_f16<false>(chunk, first, second);
            }
            store_shared_16(rows + piece_offset(row, 2 * half, t), first);
            store_shared_16(rows + piece_offset(row, 2 * half + 1, t), second);
        } else {
            store_shared_16(rows + piece_offset(row, half, t), chunk);
        }
    }
    for (int row = threadIdx.x; row < QUERIES * HEADS; row += THREADS) {
        const int query = row / HEADS, head = row % HEADS;
        const bool exists = query < tile.count && head < p.heads;
        const float w = exists ? p.w[tile.row(p, query) * p.w_stride + head] : 0.0f;
        store_shared_4(weights + 4 * row, __float_as_uint(w));
    }
}

// The warp's keys as A operands: [tile][step of k].
struct Fragments {
    uint32_t a[TILES][STEPS][4];

    __device__ __forceinline__ void set(const Keys<ROWS>& keys) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Vec16& v = keys.chunk[2 * m + i][half];
                    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if constexpr (WIDENED) {
                            widen_to_f16<E5M2_KEYS>(words[k], a[m][4 * half + k][i], a[m][4 * half + k][2 + i]);
                        } else {
                            a[m][2 * half + k / 2][k % 2 * 2 + i] = words[k];
                        }
                    }
                }
            }
        }
    }
};

// A query's sums over heads for the warp's keys. Returns that of key 8 t + g: the logit without the key's scale.
// E5M2: queries in shared memory are e5m2.
template <bool E5M2>
__device__ __forceinline__ float weighted_sum(const Fragments& keys, int query) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t rows = shared_address(shared), weights = rows + TILE_BYTES + (query * HEADS + 2 * t) * 4;
    const uint32_t mine = rows + query * HEADS * HEAD_BYTES;
    float sum[ROWS] = {};
#pragma unroll 1
    for (int j = 0; j < HEADS / 8; ++j) {
        float c[TILES][4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const Vec16 b = load_shared_16(mine + piece_offset(8 * j + g, piece, t));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                if constexpr (WIDENED) {
                    mma_m16n8k16_f16(c[m], keys.a[m][2 * piece], b.x, b.y);
                    mma_m16n8k16_f16(c[m], keys.a[m][2 * piece + 1], b.z, b.w);
                } else {
                    constexpr Fp8 A = E5M2_KEYS ? Fp8::E5M2 : Fp8::E4M3, B = E5M2 ? Fp8::E5M2 : Fp8::E4M3;
                    mma_m16n8k32<A, B>(c[m], keys.a[m][2 * piece], b.x, b.y);
                    mma_m16n8k32<A, B>(c[m], keys.a[m][2 * piece + 1], b.z, b.w);
                }
            }
        }
        const Vec8 w = load_shared_8(weights + 32 * j);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sum[i] = fmaf(max_or_nan(c[i / 2][i % 2 * 2], 0.0f), __uint_as_float(w.x), sum[i]);
            sum[i] = fmaf(max_or_nan(c[i / 2][i % 2 * 2 + 1], 0.0f), __uint_as_float(w.y), sum[i]);
        }
    }
    return quad_sum_of_mine(sum, t);
}

// Units `unit` to `unit + units - 1` of a tile whose keys are `range`.
__device__ __forceinline__ void work_on(const LogitsParams& p, const QueryTile& tile, const KeyRange& range, int unit,
                                        int units) {
    __syncthreads();  // all have read the tile before
    load_queries(p, tile);
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int mine = lane % 4 * 8 + lane / 4;  // the warp's key whose logits this lane stores
#pragma unroll 1
    for (int u = unit; u < unit + units; ++u) {
        const int first = range.begin + u * UNIT + warp * KEYS;
        Keys<ROWS> keys = {};
        keys.load(p, block_of_key(p, tile.request, first + lane, range.end), first + lane, range.end);
        const float scale = __shfl_sync(~0u, keys.scale, mine);
        const int key = first + mine, asked = __shfl_sync(~0u, keys.exists, mine) ? key : -1;
        Fragments fragments;
        fragments.set(keys);
#pragma unroll 1
        for (int i = 0; i < tile.count; ++i) {
            const bool e5m2 = !WIDENED && p.e5m2_queries;
            const float logit = (e5m2 ? weighted_sum<true>(fragments, i) : weighted_sum<false>(fragments, i)) * scale;
            const KeyRange own = range_of_query(p, tile.request, tile.first + i);
            float* to = p.out + tile.row(p, i) * p.out_stride;
            if constexpr (COMPACT) {
                if (own.has(asked) && key - own.begin < p.compact_width) to[key - own.begin] = logit;
            } else {
                if (key < p.width) to[key] = own.has(asked) ? logit : -INF;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) logits(const __grid_constant__ LogitsParams p) {
    const Share share = share_of_cta<THREADS, QUERIES, UNIT>(p);
    for_tiles<QUERIES, UNIT>(p, share, [&](const QueryTile& tile, const KeyRange& range, int unit, int units) {
        work_on(p, tile, range, unit, units);
    });
    if constexpr (COMPACT) {
        clean_compact_rows<THREADS>(p, threadIdx.x);
    } else {
        clean_rows<THREADS, QUERIES, UNIT>(p, threadIdx.x);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = TILE_BYTES + 4 * QUERIES * HEADS;
