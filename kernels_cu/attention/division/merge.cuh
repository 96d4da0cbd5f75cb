// Merge of a cluster's partial results. Each CTA writes its partial result to global memory, where L2 keeps it. The
// CTAs wait for one another, then each merges a share of the output. (Distributed shared memory moves 10 bytes a cycle
// and SM, L2 several times as much.)
//
// A partial result consists of chunks of 16 bytes of O, and {ref, sum, max, scale} for each head. A chunk holds VALUES
// values (four float32 or eight float16) in the order in which threads hold them, relative to the head's `ref` and
// divided by `scale`. A chunk of the same index holds the same columns in every partial result.
#pragma once
#include "attention/division/partials.cuh"
#include "attention/division/results.cuh"
#include "attention/params.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"

// Returns the final factor of a merged head's O. Writes the head's statistics if `write`.
__device__ __forceinline__ float finish_merged_head(const AttentionParams& p, Query query, int head, bool write,
                                                    float ref, float sum, float max) {
    if (head >= p.h_q) return 0.0f;
    const HeadResult result = {max, log2_sum_exp(ref, sum)};
    if (write) write_statistics(p, query, head, result);
    return sum == 0.0f ? 0.0f : sink_factor(p, head, result.lse) / sum;
}

// v += weight * the chunk's values.
__device__ __forceinline__ void add_chunk(float (&v)[4], float weight, const float4& chunk) {
    v[0] += weight * chunk.x;
    v[1] += weight * chunk.y;
    v[2] += weight * chunk.z;
    v[3] += weight * chunk.w;
}
__device__ __forceinline__ void add_chunk(float (&v)[8], float weight, const float4& chunk) {
    const float words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = f16x2_to_float(__float_as_uint(words[i]));
        v[2 * i] += weight * two.x;
        v[2 * i + 1] += weight * two.y;
    }
}

// 2^(14 - exponent of `largest`), which brings `largest` into the top of f16's range.
__device__ __forceinline__ float to_f16_range(float largest) {
    const int exponent = 268 - int(__float_as_uint(largest) >> 23);
    return __uint_as_float(uint32_t(max(1, min(exponent, 253))) << 23);
}

// The partial results of a cluster, which works on HEADS heads of a query.
template <int VALUES>
struct ClusterResults : PartialResults<VALUES> {
    using PartialResults<VALUES>::CHUNKS;
    using PartialResults<VALUES>::STEP;
    using PartialResults<VALUES>::first;
    using PartialResults<VALUES>::rank;
    int ctas, chunks, mergers;  // partial results; chunks used of each; CTAs that share the chunks for the merge

    // Of cluster number `index` of the launch. The first `chunks` chunks of each partial result are used.
    __device__ __forceinline__ ClusterResults(const AttentionParams& p, int index, int chunks = CHUNKS)
        : PartialResults<VALUES>{p.cluster_parts, cluster_rank()},
          ctas(cluster_size()),
          chunks(chunks),
          mergers(ctas) {
        first += int64_t(index) * ctas * STEP;
    }

    // Of `ctas` partial results that lie one after the other from `first` on. This CTA is number `rank` of `mergers`.
    __device__ __forceinline__ ClusterResults(float4* first, int rank, int ctas, int mergers)
        : PartialResults<VALUES>{first, rank}, ctas(ctas), chunks(CHUNKS), mergers(mergers) {}

    // Waits for the cluster's partial results and merges this CTA's share of the chunks. The CTA's first THREADS
    // threads merge; `sync` is their barrier. The other threads must call cluster_sync_with_one_fence(false), since
    // cluster barriers count every thread.
    //   weights                            MAX_CLUSTER x HEADS floats of free shared memory
    //   head_of(chunk), column_of(chunk)   a chunk's head in the head tile, and its first column
    //   finish(head, write, ref, sum, max) returns the factor of O; if `write`, it writes the head's statistics
    //   act(head, column, o)               takes the result
    template <int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge(float* weights, HeadOf head_of, ColumnOf column_of, Finish finish, Sync sync,
                                          Act act) const {
        sync();
        cluster_sync_with_one_fence(threadIdx.x == 0);
        merge_share<THREADS>(weights, head_of, column_of, finish, sync, act);
    }

    // The same, once all partial results are written.
    template <int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge_share(float* weights, HeadOf head_of, ColumnOf column_of, Finish finish,
                                                Sync sync, Act act) const {
        if (ctas <= 4) {
            merge_up_to<4, THREADS>(weights, head_of, column_of, finish, sync, act);
        } else if (ctas <= 8) {
            merge_up_to<8, THREADS>(weights, head_of, column_of, finish, sync, act);
        } else if constexpr (CHUNKS <= MAX_CLUSTER * THREADS) {
            merge_chunk_by_chunk<THREADS>(head_of, column_of, finish, act);
        } else {
            merge_up_to<MAX_CLUSTER, THREADS>(weights, head_of, column_of, finish, sync, act);
        }
    }

    // The merge of at most CTAS partial results. Threads first compute all weights, then add chunks.
    template <int CTAS, int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Sync, typename Act>
    __device__ __forceinline__ void merge_up_to(float* weights, HeadOf head_of, ColumnOf column_of, Finish finish,
                                                Sync sync, Act act) const {
        constexpr int AT_ONCE = MAX_CLUSTER / CTAS;  // chunks that a thread loads at a time
        const int share = ceil_div(chunks, mergers), end = min(chunks, (rank + 1) * share);
        int chunk = rank * share + threadIdx.x;
        float4 o[AT_ONCE][CTAS];
        auto load = [&] {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
                for (int i = 0; i < CTAS; ++i) {
                    o[u][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (i < ctas && chunk + u * THREADS < end)
                        o[u][i] = __ldcg(first + i * STEP + chunk + u * THREADS);
                }
            }
        };
        load();
        find_weights<CTAS, THREADS>(weights, finish);
        sync();
#pragma unroll 1
        for (; chunk < end; chunk += AT_ONCE * THREADS, load()) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int at = chunk + u * THREADS, head = head_of(at);
                if (at >= end) continue;
                float v[VALUES] = {};
#pragma unroll
                for (int i = 0; i < CTAS; ++i) add_chunk(v, weights[i * HEADS + head], o[u][i]);
                act(head, column_of(at), v);
            }
        }
    }

    // The merge of so many partial results that a thread has hardly more than one chunk. Each thread computes the
    // weights of its head itself. With 16 CTAs that is 0.4 us of 11 faster, with fewer up to 5 us slower.
    template <int THREADS, typename HeadOf, typename ColumnOf, typename Finish, typename Act>
    __device__ __forceinline__ void merge_chunk_by_chunk(HeadOf head_of, ColumnOf column_of, Finish finish,
                                                         Act act) const {
        const int share = ceil_div(chunks, mergers), end = min(chunks, (rank + 1) * share);
#pragma unroll 1
        for (int chunk = rank * share + threadIdx.x; chunk < end; chunk += THREADS) {
            const int head = head_of(chunk), column = column_of(chunk);
            float4 o[MAX_CLUSTER];
#pragma unroll
            for (int i = 0; i < MAX_CLUSTER; ++i) {
                o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i < ctas) o[i] = __ldcg(first + i * STEP + chunk);
            }
            float weight[MAX_CLUSTER], v[VALUES] = {};
            const float scale = weigh(head, weight, finish, column == 0);
#pragma unroll
            for (int i = 0; i < MAX_CLUSTER; ++i) add_chunk(v, weight[i] * scale, o[i]);
            act(head, column, v);
        }
    }

    // Fills weights [partial result][head], the factor of each partial result's O. Several threads compute the weights
    // of a head; each stores some of them.
    template <int CTAS, int THREADS, typename Finish>
    __device__ __forceinline__ void find_weights(float* weights, Finish finish) const {
        constexpr int READERS = THREADS / HEADS;
        const int head = threadIdx.x % HEADS, reader = threadIdx.x / HEADS;
        float weight[CTAS];
        const float scale = weigh(head, weight, finish, rank == 0 && reader == 0);
#pragma unroll
        for (int i = 0; i < CTAS; ++i) {
            if (i % READERS == reader) weights[i * HEADS + head] = weight[i] * scale;
        }
    }

    // Computes the weight of each partial result for a head. Returns a common factor for all of them.
    template <int CTAS, typename Finish>
    __device__ __forceinline__ float weigh(int head, float (&weight)[CTAS], Finish finish, bool write) const {
        float4 statistics[CTAS];
#pragma unroll
        for (int i = 0; i < CTAS; ++i) {
            statistics[i] = make_float4(-INF, 0.0f, -INF, 1.0f);
            if (i < ctas) statistics[i] = __ldcg(first + i * STEP + CHUNKS + head);
        }
        float ref = -INF, sum = 0.0f, max = -INF;
#pragma unroll
        for (int i = 0; i < CTAS; ++i) {
            ref = fmaxf(ref, statistics[i].x);
            max = fmaxf(max, statistics[i].z);
        }
#pragma unroll
        for (int i = 0; i < CTAS; ++i) {
            weight[i] = statistics[i].x == -INF ? 0.0f : exp2_approx(statistics[i].x - ref);
            sum += weight[i] * statistics[i].y;
            if (VALUES == 8) weight[i] *= statistics[i].w;  // `scale`, which is 1 for float32
        }
        return finish(head, write, ref, sum, max);
    }
};
