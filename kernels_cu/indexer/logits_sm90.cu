// The indexer's logits on Hopper: wgmma on e4m3, keys in rows, or in a paged cache.
//
//   grid        as many CTAs as the GPU runs at a time; each takes an equal share of the units of keys (work.cuh)
//   warpgroup   works alone, on the tile's QUERIES queries and 64 of a unit's keys. What one does between two products
//               is hidden behind the products of the others
//     a tile    its queries to shared memory, its weights to registers
//     a unit    keys x heads: A are keys in registers, B queries in shared memory; one wgmma group of 4 steps
//               load: the keys of the next unit; where they stand was looked up a round earlier
//               sum: relu, times the head's weight, in float32, over a lane's heads, then over the four lanes of a
//               quad: each lane is left with a query of each group of four, and stores its logits of two keys
//   end         -inf for the keys that no unit covers, if asked
//
// The order of k is that of keys.cuh: of the 16 words of half a key, word 4 t + r is multiplied as word t of part r. So
// the words of half a row of queries are transposed as a matrix of 4 x 4, and stand as wgmma's B operand, 128-byte
// swizzle.
//
// Shared memory: 128 bytes a query and head, a copy for each warpgroup: 32 to 64 KB, and 1 KB to align them.
#include "indexer/keys.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 128 * WARPGROUPS;
constexpr int ROWS = QUERIES * HEADS;  // columns of wgmma
constexpr int KEYS = 64, UNIT = KEYS * WARPGROUPS;
constexpr int TILE_BYTES = ROWS * KEY_BYTES;
constexpr int LINE_GROUP = 8 * LINE_BYTES;  // what the swizzle repeats after
constexpr int MINE = ceil_div(QUERIES, 4);  // queries whose logits a lane stores
static_assert(HEADS % 32 == 0, "");

extern __shared__ uint8_t shared[];

__device__ __forceinline__ int this_warpgroup() { return uniform(threadIdx.x / 128); }
__device__ __forceinline__ void meet_warpgroup() { named_barrier_sync(1 + this_warpgroup(), 128); }

// The warpgroup's copy of the tile's queries.
__device__ __forceinline__ uint32_t query_rows() {
    return (shared_address(shared) + LINE_GROUP - 1) / LINE_GROUP * LINE_GROUP + this_warpgroup() * TILE_BYTES;
}

// The queries to shared memory; heads and queries that do not exist are zeros.
__device__ __forceinline__ void load_queries(const LogitsParams& p, const QueryTile& tile) {
    const uint32_t rows = query_rows();
    for (int item = threadIdx.x % 128; item < ROWS * 2; item += 128) {
        const int row = item / 2, half = item % 2, query = row / HEADS, head = row % HEADS;
        Vec16 x[4] = {};
        if (query < tile.count && head < p.heads) {
            const uint8_t* from = p.q8 + tile.request * p.q_request + (tile.first + query) * p.q_query;
#pragma unroll
            for (int t = 0; t < 4; ++t) x[t] = reinterpret_cast<const Vec16*>(from + head * p.q_head + 64 * half)[t];
        }
        const int chunk = 4 * half;
        store_shared_16(swizzled(rows, row, chunk), {x[0].x, x[1].x, x[2].x, x[3].x});
        store_shared_16(swizzled(rows, row, chunk + 1), {x[0].y, x[1].y, x[2].y, x[3].y});
        store_shared_16(swizzled(rows, row, chunk + 2), {x[0].z, x[1].z, x[2].z, x[3].z});
        store_shared_16(swizzled(rows, row, chunk + 3), {x[0].w, x[1].w, x[2].w, x[3].w});
    }
}

// What a lane needs of its queries: weights of its accumulators' columns, and what of the queries it stores.
struct Queries {
    float w[ROWS / 4];  // of columns 8 j + 2 t + k: 2 j + k
    KeyRange range[MINE];
    float* out[MINE];  // null where there is no such query

    __device__ __forceinline__ void load(const LogitsParams& p, const QueryTile& tile) {
        const int t = threadIdx.x % 4;
        const int64_t row = tile.row(p, 0);
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int column = 8 * (i / 2) + 2 * t + i % 2, query = column / HEADS, head = column % HEADS;
            w[i] = query < tile.count && head < p.heads ? p.w[(row + query) * p.w_stride + head] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int query = 4 * i + t;
            const bool exists = query < tile.count;
            range[i] = exists ? range_of_query(p, tile.request, tile.first + query) : KeyRange{0, 0};
            out[i] = exists ? p.out + (row + query) * p.out_stride : nullptr;
        }
    }
};

// c = keys x heads.
__device__ __forceinline__ void multiply(float (&c)[ROWS / 2], const Keys<2>& keys, uint64_t queries) {
    uint32_t a[4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Vec16 &x = keys.chunk[0][half], &y = keys.chunk[1][half];
        const uint32_t of_steps[8] = {x.x, y.x, x.y, y.y, x.z, y.z, x.w, y.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) a[2 * half + i / 4][i % 4] = of_steps[i];
    }
    wgmma_fence();
    wgmma_e4m3<Sum::SET>(c, a[0], queries);
#pragma unroll
    for (int step = 1; step < 4; ++step) wgmma_e4m3<Sum::ADD>(c, a[step], wgmma_further(queries, 32 * step));
    wgmma_commit();
    wgmma_wait<0>();
}

// Sums of a lane's columns, of key g or g + 8, for four queries from `first` on; then over the quad. Returns the logit,
// without the key's scale, of query first + t.
__device__ __forceinline__ float weighted_sum(const float (&c)[ROWS / 2], const Queries& queries, int first, int key) {
    float sum[4] = {};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const int query = first + q;
        if (query >= QUERIES) break;
#pragma unroll
        for (int i = 0; i < HEADS / 4; ++i) {
            const int column = query * HEADS / 4 + i;  // of this lane
            const float dot = c[column / 2 * 4 + 2 * key + column % 2];
            sum[q] = fmaf(max_or_nan(dot, 0.0f), queries.w[column], sum[q]);
        }
    }
    return quad_sum_of_mine(sum, threadIdx.x % 4);
}

__device__ __forceinline__ void work_on(const LogitsParams& p, const QueryTile& tile, const KeyRange& range, int unit,
                                        int units) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int of_warp = range.begin + this_warpgroup() * KEYS + threadIdx.x % 128 / 32 * 16;
    const auto first_key = [&](int u) { return of_warp + (unit + u) * UNIT; };
    const int end = min(range.end, range.begin + (unit + units) * UNIT);

    Keys<2> keys = {};
    keys.load(p, block_of_key(p, tile.request, first_key(0) + lane % 16, end), first_key(0) + lane % 16, end);
    KeyBlock next = block_of_key(p, tile.request, first_key(1) + lane % 16, end);
    meet_warpgroup();  // all have multiplied with the queries before
    load_queries(p, tile);
    Queries queries;
    queries.load(p, tile);
    fence_proxy_async();
    meet_warpgroup();
    const uint64_t rows = wgmma_operand(query_rows(), LINE_GROUP, 16);

#pragma unroll 1
    for (int u = 0; u < units; ++u) {
        float c[ROWS / 2];
        multiply(c, keys, rows);
        const float scale = keys.scale;
        const bool exists = keys.exists;
        keys.load(p, next, first_key(u + 1) + lane % 16, end);
        next = block_of_key(p, tile.request, first_key(u + 2) + lane % 16, end);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float of_key = __shfl_sync(~0u, scale, g + 8 * i);
            const int key = first_key(u) + g + 8 * i, asked = __shfl_sync(~0u, exists, g + 8 * i) ? key : -1;
#pragma unroll
            for (int j = 0; j < MINE; ++j) {
                const float logit = weighted_sum(c, queries, 4 * j, i) * of_key;
                if (queries.out[j] != nullptr && key < p.width)
                    queries.out[j][key] = queries.range[j].has(asked) ? logit : -INF;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) logits_sm90(const __grid_constant__ LogitsParams p) {
    wait_for_earlier_kernels();
    const Share share = share_of_cta<THREADS, QUERIES, UNIT>(p);
    for_tiles<QUERIES, UNIT>(p, share, [&](const QueryTile& tile, const KeyRange& range, int unit, int units) {
        work_on(p, tile, range, unit, units);
    });
    clean_rows<THREADS, QUERIES, UNIT>(p, threadIdx.x);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = WARPGROUPS * TILE_BYTES + LINE_GROUP;
