// Partial results that CTAs exchange through global memory, where L2 keeps them (merge.cuh, share_partials.cuh).
#pragma once
#include "ptx/types.cuh"

// An array of partial results, each of HEADS heads of a query. This CTA writes number `rank`.
template <int VALUES>
struct PartialResults {
    static constexpr int CHUNKS = HEADS * D_V / VALUES, STEP = CHUNKS + HEADS;  // float4s of a partial result
    float4* first;
    int rank;

    __device__ __forceinline__ void write(int chunk, float4 v) const { first[int64_t(rank) * STEP + chunk] = v; }
    __device__ __forceinline__ void write_statistics(int head, float ref, float sum, float max,
                                                     float scale = 1.0f) const {
        first[int64_t(rank) * STEP + CHUNKS + head] = make_float4(ref, sum, max, scale);
    }
    __device__ __forceinline__ float4 chunk_of(int other, int chunk) const {
        return __ldcg(first + int64_t(other) * STEP + chunk);
    }
    __device__ __forceinline__ float4 statistics_of(int other, int head) const {
        return chunk_of(other, CHUNKS + head);
    }
};
