// The blocks of a cluster merge what each found of its rows: they write it to global memory, which the L2 holds, wait for one
// another, and merge a share each. (Distributed shared memory moves 10 bytes a cycle and multiprocessor, the L2 several times
// as much.)
//
// A block's part is units of 16 bytes of its O, four float32 or eight float16, in the order in which threads hold them, relative
// to the head's `ref` and times 1 / `scale`, and {ref, sum, max, scale} for each head. A unit has the same values of O in
// every part.
#pragma once
#include "attention/params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "tile/finish.cuh"

// A head's lse and the like where it has results, if `write`. Returns what its O is multiplied with in the end.
__device__ __forceinline__ float finish_merged_head(const AttentionParams& p, Query query, int head, bool write, float ref, float sum, float max) {
    if (head >= p.h_q) return 0.0f;
    const HeadResult result = {max, sum == 0.0f ? -INF : ref + log2_approx(sum)};
    if (write) write_statistics(p, query, head, result);
    return sum == 0.0f ? 0.0f : sink_factor(p, head, result.lse) / sum;
}

// v += weight * the values of a unit.
__device__ __forceinline__ void add_unit(float (&v)[4], float weight, const float4& unit) {
    v[0] += weight * unit.x;
    v[1] += weight * unit.y;
    v[2] += weight * unit.z;
    v[3] += weight * unit.w;
}
__device__ __forceinline__ void add_unit(float (&v)[8], float weight, const float4& unit) {
    const float words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = f16x2_to_float(__float_as_uint(words[i]));
        v[2 * i] += weight * two.x;
        v[2 * i + 1] += weight * two.y;
    }
}

// Parts of a cluster that works on HEADS heads (a constant of the kernel) of a query, with so many values a unit.
template <int VALUES>
struct Parts {
    static constexpr int MAX_BLOCKS = MAX_CLUSTER;
    static constexpr int SIZE = HEADS * D_V / VALUES, STEP = SIZE + HEADS;  // units, and with the statistics, of a part
    float4* first;
    int blocks, rank;

    __device__ __forceinline__ Parts(const AttentionParams& p, int query, int head_tile, int head_tiles)
        : first(p.cluster_parts), blocks(cluster_size()), rank(cluster_rank()) {
        first += (int64_t(query) * head_tiles + head_tile) * blocks * STEP;
    }
    __device__ __forceinline__ void write(int unit, float4 v) const { first[int64_t(rank) * STEP + unit] = v; }
    __device__ __forceinline__ void write_statistics(int head, float ref, float sum, float max, float scale = 1.0f) const {
        first[int64_t(rank) * STEP + SIZE + head] = make_float4(ref, sum, max, scale);
    }

    // Wait for the cluster's parts and merge this block's share of the units, by its first THREADS threads, for which `sync`
    // waits; the others call cluster_sync_with_one_fence(false), for barriers of the cluster count every thread.
    //   weights                                 MAX_BLOCKS x HEADS floats of shared memory that nobody uses
    //   head_of(unit), column_of(unit)          a unit's head in the block and its first column
    //   finish(head, write, ref, sum, max)      what O is multiplied with in the end; `write`: lse and the like are written, too
    //   act(head, column, o)                    takes the result
    template <int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge(float* weights, HeadOf head_of, ColumnOf column_of, Finish finish, Sync sync, Act act) const {
        sync();
        cluster_sync_with_one_fence(threadIdx.x == 0);
        if (blocks <= 4) {
            merge_by<4, THREADS>(weights, head_of, column_of, finish, sync, act);
        } else if (blocks <= 8) {
            merge_by<8, THREADS>(weights, head_of, column_of, finish, sync, act);
        } else if constexpr (SIZE <= MAX_BLOCKS * THREADS) {
            merge_alone<THREADS>(head_of, column_of, finish, act);
        } else {
            merge_by<MAX_BLOCKS, THREADS>(weights, head_of, column_of, finish, sync, act);
        }
    }

    template <int SLOTS, int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge_by(float* weights, HeadOf head_of, ColumnOf column_of, Finish finish, Sync sync, Act act) const {
        constexpr int AT_ONCE = MAX_BLOCKS / SLOTS;  // units of a thread whose loads are under way at a time
        const int share = ceil_div(SIZE, blocks), end = min(SIZE, (rank + 1) * share);
        int unit = rank * share + threadIdx.x;
        float4 o[AT_ONCE][SLOTS];
        auto load = [&] {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) {
                    o[u][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (i < blocks && unit + u * THREADS < end) o[u][i] = __ldcg(first + i * STEP + unit + u * THREADS);
                }
            }
        };
        load();
        find_weights<SLOTS, THREADS>(weights, finish);
        sync();
#pragma unroll 1
        for (; unit < end; unit += AT_ONCE * THREADS, load()) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int at = unit + u * THREADS, head = head_of(at);
                if (at >= end) continue;
                float v[VALUES] = {};
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) add_unit(v, weights[i * HEADS + head], o[u][i]);
                act(head, column_of(at), v);
            }
        }
    }

    // With so many blocks that a thread has hardly more than a unit, it finds its head's weights by itself, rather than for all
    // threads: 0.4 us of 11 faster with 16 blocks, up to 5 us slower with fewer.
    template <int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Act>
    __device__ __forceinline__ void merge_alone(HeadOf head_of, ColumnOf column_of, Finish finish, Act act) const {
        const int share = ceil_div(SIZE, blocks), end = min(SIZE, (rank + 1) * share);
#pragma unroll 1
        for (int unit = rank * share + threadIdx.x; unit < end; unit += THREADS) {
            const int head = head_of(unit), column = column_of(unit);
            float4 o[MAX_BLOCKS];
#pragma unroll
            for (int i = 0; i < MAX_BLOCKS; ++i) {
                o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i < blocks) o[i] = __ldcg(first + i * STEP + unit);
            }
            float weight[MAX_BLOCKS], v[VALUES] = {};
            const float scale = weigh(head, weight, finish, column == 0);
#pragma unroll
            for (int i = 0; i < MAX_BLOCKS; ++i) add_unit(v, weight[i] * scale, o[i]);
            act(head, column, v);
        }
    }

    // What each part's O of a head is multiplied with in the result: [part][head]. Several threads look at a head.
    template <int SLOTS, int THREADS, typename Finish>
    __device__ __forceinline__ void find_weights(float* weights, Finish finish) const {
        constexpr int LOOKERS = THREADS / HEADS;
        const int head = threadIdx.x % HEADS, looker = threadIdx.x / HEADS;
        float weight[SLOTS];
        const float scale = weigh(head, weight, finish, rank == 0 && looker == 0);
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            if (i % LOOKERS == looker) weights[i * HEADS + head] = weight[i] * scale;
        }
    }

    // Each part's weight for a head. Returns what all of them are to be multiplied with.
    template <int SLOTS, typename Finish>
    __device__ __forceinline__ float weigh(int head, float (&weight)[SLOTS], Finish finish, bool write) const {
        float4 of[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            of[i] = make_float4(-INF, 0.0f, -INF, 1.0f);
            if (i < blocks) of[i] = __ldcg(first + i * STEP + SIZE + head);
        }
        float ref = -INF, sum = 0.0f, max = -INF;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            ref = fmaxf(ref, of[i].x);
            max = fmaxf(max, of[i].z);
        }
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            weight[i] = of[i].x == -INF ? 0.0f : exp2_approx(of[i].x - ref);
            sum += weight[i] * of[i].y;
            if (VALUES == 8) weight[i] *= of[i].w;  // float32 have scale 1
        }
        return finish(head, write, ref, sum, max);
    }
};
