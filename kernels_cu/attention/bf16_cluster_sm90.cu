// Sparse attention of flat bf16 rows on Hopper for few work items: a cluster works on 64 heads of a query. Its CTAs
// have neighbouring pairs of tiles each and merge their partial results (merge.cuh). Pipeline and shared memory:
// bf16_sm90.cuh.
//
// grid: x = (query * head tiles + head tile) * CTAs of the cluster + rank.
#include "attention/bf16_partials.cuh"

struct Cluster : SingleQueries {
    static constexpr bool CLUSTER = true, POLICY = true, OVERLAPS = true;

    template <typename, typename Params, typename Act>
    static __device__ __forceinline__ void for_each(const Params&, int, Act act) {
        act(int(blockIdx.x));
    }
    // The first list entry of a CTA of the cluster, of a list of `length`.
    static __device__ __forceinline__ int first_entry(int length, uint32_t rank) {
        return min(int(uint32_t(num_pairs(length)) * rank / uint32_t(cluster_size())) * 2 * TILE_ROWS, length);
    }
    static __device__ __forceinline__ int length_of(const Params& p, int, int head_tiles) {
        const int length = list_length(p.main, query_of_item(p, cluster_index(), head_tiles).b), rank = cluster_rank();
        return first_entry(length, rank + 1) - first_entry(length, rank);
    }
    static __device__ __forceinline__ Work work_of(const Params& p, int index, int head_tiles, int length) {
        const int item = cluster_index();
        const Query query = query_of_item(p, item, head_tiles);
        const int first = first_entry(list_length(p.main, query.b), cluster_rank());
        return {query, item - query.index * head_tiles, length, num_pairs(length), index, first};
    }

    // Writes this CTA's partial result and merges a share of the cluster's.
    template <typename Total>
    static __device__ __forceinline__ void write(const Params& p, const Work& w, int warpgroup, int warp, int lane,
                                                 Total total_of, const float (&o)[128]) {
        const int warps = num_line_warps(p, w);
        const ClusterResults<8> partials(p, w.query.index * num_head_tiles(p) + w.head_tile, warps * CHUNKS_OF_WARP);
        // Both in the space of Q.
        auto& largest = *reinterpret_cast<float (*)[2][HEADS]>(shared);
        auto* weights = reinterpret_cast<float*>(shared + sizeof(largest));
        write_partial(partials, largest, warps, warpgroup, warp, lane, total_of, o);
        auto finish = [&](int local, bool write, float ref, float sum, float max) {
            return finish_merged_head(p, w.query, w.head_tile * HEADS + local, write, ref, sum, max);
        };
        auto store = [&](int local, int column, const float (&v)[8]) {
            const int head = w.head_tile * HEADS + local;
            if (head >= p.h_q) return;
#pragma unroll
            for (int i = 0; i < 4; ++i) write_output(p, w.query, head, column + 8 * i, v[2 * i], v[2 * i + 1]);
        };
        partials.merge<CONSUMERS>(weights, line_of_chunk, column_of_chunk, finish, [] { sync_consumers(); }, store);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_cluster_sm90(const __grid_constant__ AttentionParams p) {
    run<Cluster>(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES<Cluster>;
