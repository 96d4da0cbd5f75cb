// Sparse attention of few heads over bf16 rows on Hopper, for large batches and prefill.
//
// Heads are the N side of wgmma, 8, 16 or 32 of them, so that nothing is padded to 64:
//
//   S^T = K . Q^T     64 rows x heads       A = the tile, K-major      36 x m64nHk16
//   O^T = V^T . P^T   512 columns x heads   A = the tile, MN-major     8 x 4 x m64nHk16
//
// Warpgroups 0 and 1 are consumers. Each has its own tile of 64 rows in shared memory and its own softmax. QUERIES 1:
// they take the tiles of a query in turn. QUERIES 2: each works on a query of its own. Warpgroups 2 and 3 are
// producers, one for each consumer warpgroup.
//
//   producer
//     vote              has the tile a valid entry? If not, go on to the next tile
//     copies            cp.async of the tile's rows, stage by stage, as stages are released. A stage is two column
//                       blocks of all 64 rows; the last stage also has the RoPE columns
//   consumer
//     vote              the same as the producer's
//     S^T               stage by stage, as stages arrive
//     vote              is a logit above the reference by REF_SLACK? Only then the reference rises and O^T is rescaled
//     P^T               stmatrix.trans, over the RoPE columns of the tile
//     O^T += V^T . P^T  stages are released one by one
//
//   full[w][stage]        copies done         the 128 producer threads of warpgroup w's tile
//   empty[w][stage]       stage released      the 4 warps of consumer warpgroup w
//   multiplying           a lock in shared memory: one warpgroup at a time multiplies, from Q . K to P . V. Without
//                         it, both would soon wait for rows at the same time, and multiply at the same time
//   WARPGROUP_SYNC + w    named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC         named: both consumer warpgroups, if they share a query
//   PRODUCER_VOTE + w     named: the 128 producer threads of warpgroup w's tile
//
// Tiles without a valid entry are neither copied nor multiplied. The 128 consumer threads of a tile hold its entries,
// and so do its 128 producer threads. Both vote and find the same, so neither has to tell the other. Before its first
// tile a warpgroup also finds its last tile with a valid entry, in the same way. The stages of that tile are not
// released, because O^T is stored over it. If no tile has a valid entry, the first one counts as the last: it is
// copied, as zeros, so that the consumers own its space, but not multiplied.
//
// At the end each warpgroup stores its O^T over its tile. From there a CTA merges the O^T of its query. The CTAs of a
// cluster exchange partial results, and each merges a share of the columns (merge.cuh). Splits that do not fit a
// cluster lie along gridDim.y, and combine.cu merges them.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P^T, to bf16; results. Products, sums and
// partial results are float32, exponentials ex2.approx.
//
// Shared memory: Q QUERIES x heads x D_QK x 2; 2 tiles of 64 x D_QK x 2 (and P where V has no RoPE columns behind it);
// statistics and mbarriers.
// Registers: 200 a consumer thread, 56 a producer thread (or 208 and 48), together 512 x 128.
// What was tried, what bounds it, why warpgroups take turns: docs/kernels/bf16_few_heads_sm90.md.
//
// Parts, under bf16_few_heads_sm90/:
//
//   plan                 constants, shared memory, thread roles, and a warpgroup's work
//   list_end, producer   which tiles are copied, and how
//   scores, values       S^T, its softmax, P^T; O^T
//   results              the epilogue: O^T becomes results or a partial result
//   pipeline             a query's tiles in a consumer warpgroup, and the kernel's main function
#include "attention/bf16_few_heads_sm90/pipeline.cuh"

// grid: QUERIES 1: x = (query * head tiles + head tile) * CTAs of the cluster + rank, y = split. QUERIES 2: x
// persistent CTAs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bf16_few_heads_sm90(const __grid_constant__ AttentionParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
