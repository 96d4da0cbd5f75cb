// The blocks of a cluster merge what each found of its rows: they write it to global memory, which the L2 holds, wait for one
// another, and merge a share each. (Distributed shared memory moves 10 bytes a cycle and multiprocessor, the L2 several times
// as much.)
//
// A block's part is D_V / 4 units a head of four float32 of its O, in the order in which threads hold them, relative to the
// head's `ref`, and {ref, sum, max, 0} for each head. A unit has the same four values of O in every part.
#pragma once
#include "attention/params.cuh"
#include "ptx/cluster.cuh"
#include "tile/finish.cuh"

// A head's lse and the like where it has results, if `write`. Returns what its O is multiplied with in the end.
__device__ __forceinline__ float finish_merged_head(const Params& p, Query query, int head, bool write, float ref, float sum, float max) {
    if (head >= p.h_q) return 0.0f;
    const HeadResult result = {max, sum == 0.0f ? -INF : ref + log2_approx(sum)};
    if (write) write_statistics(p, query, head, result);
    return sum == 0.0f ? 0.0f : sink_factor(p, head, result.lse) / sum;
}

// Parts of a cluster that works on HEADS heads (a constant of the kernel) of a query.
struct Parts {
    static constexpr int MAX_BLOCKS = 16;
    static constexpr int SIZE = HEADS * D_V / 4, STEP = SIZE + HEADS;  // units, and with the statistics, of a part
    float4* first;
    int blocks, rank;

    __device__ __forceinline__ Parts(const Params& p, int query, int head_tile, int head_tiles)
        : first(p.cluster_parts), blocks(cluster_size()), rank(cluster_rank()) {
        first += (int64_t(query) * head_tiles + head_tile) * blocks * STEP;
    }
    __device__ __forceinline__ void write(int unit, float4 v) const { first[int64_t(rank) * STEP + unit] = v; }
    __device__ __forceinline__ void write_statistics(int head, float ref, float sum, float max) const {
        first[int64_t(rank) * STEP + SIZE + head] = make_float4(ref, sum, max, 0.0f);
    }

    // Merge this block's share of the units, by its first THREADS threads, for which `sync` waits.
    //   weights                                 MAX_BLOCKS x HEADS floats of shared memory that nobody uses
    //   head_of(unit)                           a unit's head in the block
    //   finish(head, write, ref, sum, max)      what O is multiplied with in the end; `write`: lse and the like are written, too
    //   act(unit, head, o)                      takes the result
    template <int THREADS, typename HeadOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge(float* weights, HeadOf head_of, Finish finish, Sync sync, Act act) const {
        if (blocks <= 4) {
            merge_by<4, THREADS>(weights, head_of, finish, sync, act);
        } else if (blocks <= 8) {
            merge_by<8, THREADS>(weights, head_of, finish, sync, act);
        } else {
            merge_by<MAX_BLOCKS, THREADS>(weights, head_of, finish, sync, act);
        }
    }

    template <int SLOTS, int THREADS, typename HeadOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge_by(float* weights, HeadOf head_of, Finish finish, Sync sync, Act act) const {
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
                if (unit + u * THREADS >= end) continue;
                const int head = head_of(unit + u * THREADS);
                float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) {
                    const float weight = weights[i * HEADS + head];
                    v = make_float4(v.x + weight * o[u][i].x, v.y + weight * o[u][i].y, v.z + weight * o[u][i].z, v.w + weight * o[u][i].w);
                }
                act(unit + u * THREADS, head, v);
            }
        }
    }

    // What each part's O of a head is multiplied with in the result: [part][head]. Several threads look at a head.
    template <int SLOTS, int THREADS, typename Finish>
    __device__ __forceinline__ void find_weights(float* weights, Finish finish) const {
        constexpr int LOOKERS = THREADS / HEADS;
        const int head = threadIdx.x % HEADS, looker = threadIdx.x / HEADS;
        float4 of[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            of[i] = make_float4(-INF, 0.0f, -INF, 0.0f);
            if (i < blocks) of[i] = __ldcg(first + i * STEP + SIZE + head);
        }
        float ref = -INF, sum = 0.0f, max = -INF, weight[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            ref = fmaxf(ref, of[i].x);
            max = fmaxf(max, of[i].z);
        }
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            weight[i] = of[i].x == -INF ? 0.0f : exp2_approx(of[i].x - ref);
            sum += weight[i] * of[i].y;
        }
        const float scale = finish(head, rank == 0 && looker == 0, ref, sum, max);
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            if (i % LOOKERS == looker) weights[i * HEADS + head] = weight[i] * scale;
        }
    }
};
