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

// Parts of a cluster that works on HEADS heads (a constant of the kernel) of a query.
struct Parts {
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

    // Merge this block's share of the units by `threads` threads, 16 loads of each kind under way at a time. `head_of(unit)` is
    // a unit's head in the block; act(unit, head, ref, sum, max, o) gets what all parts make of it.
    template <typename HeadOf, typename Act>
    __device__ __forceinline__ void merge(int thread, int threads, HeadOf head_of, Act act) const {
        if (blocks <= 4) {
            merge_by<4>(thread, threads, head_of, act);
        } else if (blocks <= 8) {
            merge_by<8>(thread, threads, head_of, act);
        } else {
            merge_by<16>(thread, threads, head_of, act);
        }
    }

    template <int SLOTS, typename HeadOf, typename Act>
    __device__ __forceinline__ void merge_by(int thread, int threads, HeadOf head_of, Act act) const {
        constexpr int AT_ONCE = 16 / SLOTS;
        const int share = ceil_div(SIZE, blocks), end = min(SIZE, (rank + 1) * share);
#pragma unroll 1
        for (int base = rank * share + thread; base < end; base += AT_ONCE * threads) {
            float4 o[AT_ONCE][SLOTS], statistics[AT_ONCE][SLOTS];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int unit = min(base + u * threads, end - 1), head = head_of(unit);
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) {  // beyond the last part the last
                    const float4* part = first + min(i, blocks - 1) * STEP;
                    statistics[u][i] = __ldcg(part + SIZE + head);
                    o[u][i] = __ldcg(part + unit);
                }
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                if (base + u * threads >= end) break;
                float ref = statistics[u][0].x, sum = 0.0f, max = statistics[u][0].z;
#pragma unroll
                for (int i = 1; i < SLOTS; ++i) {
                    ref = fmaxf(ref, statistics[u][i].x);
                    max = fmaxf(max, statistics[u][i].z);
                }
                float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < SLOTS; ++i) {
                    const float own = statistics[u][i].x;
                    const float weight = i < blocks && own != -INF ? exp2_approx(own - ref) : 0.0f;
                    sum += weight * statistics[u][i].y;
                    v = make_float4(v.x + weight * o[u][i].x, v.y + weight * o[u][i].y, v.z + weight * o[u][i].z, v.w + weight * o[u][i].w);
                }
                act(base + u * threads, head_of(base + u * threads), ref, sum, max, v);
            }
        }
    }
};
