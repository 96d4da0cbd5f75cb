// Sparse attention of FP8 and FP4 rows on Hopper. A CTA works on 16, 32 or 64 heads of a query at a time.
//
// Rows stay in shared memory in their 8-bit form; no tile of 16-bit rows is ever written. The consumer warps load
// bytes, widen them to f16 in registers, and pass them to wgmma as the A operand. So KV rows or value columns are the
// M side of both products, and heads are the N side:
//
//   S^T = K . Q^T     64 rows x heads       A thread loads 16 neighbouring bytes of each of its two rows. Q's columns
//                                           are stored in the order that matches.
//   O^T = V^T . P^T   512 columns x heads   ldmatrix.trans loads pairs of bytes, prmt puts them in order.
//
//   warpgroup 0 (consumer)          warpgroup 1 (consumer)          warpgroup 2 (producer)
//     S_2 = K_2 . Q^T                 softmax of S_1, publish P_1     bulk copies of rows into a ring of
//     O += V_1 . P_1   columns        O += V_1 . P_1   columns        STAGES stages of 16 rows each, as
//     softmax, publish P_2 0 .. 255   S_3 = K_3 . Q^T  256 .. 511     stages are released
//     O += V_2 . P_2                  O += V_2 . P_2
//     S_4 = ...                       softmax of S_3, publish P_3
//
// Warpgroup w computes S of every second tile of 64 rows. Both warpgroups multiply every P with their own half of the
// value columns. So the softmax of one warpgroup runs beside the products of the other.
//
// Scales. f16 holds every e4m3, but not every scale. So each row has a number r, a power of two near its largest
// scale. Values are widened to f16 as e4m3 * (scale / r), and P^T takes the factor r: P^T = 2^(logit + log2 r - ref).
// The reference is chosen for this whole sum, so P^T fits f16, too: `ref` rises when a P^T would pass MAX_P. The
// denominator is the sum of P^T / r.
//   float32 scales (V32_FP8, V32_NOPE_FP8): r is the power of two at or below the largest scale. K is widened without
//     its scales, so nothing is rounded for S^T. A scale covers 128 columns; from one such chunk to the next S^T is
//     multiplied by scale_c / scale_c+1. RoPE is bfloat16. Where rows have no RoPE, the last scale becomes a factor of
//     the logits. For the values, scale / r and its product with e4m3 are rounded to f16. What stands under a scale of
//     0 counts as 0, even NaN: such a chunk is set to zeros in the ring before it is multiplied. That is rare; looking
//     for it takes 7 instructions a tile.
//   UE8M0 scales (V4_FP8, V41_FP8): scales are powers of two, so K is widened to e4m3 * (scale / r), too. That is
//     exact while scale / r is at least 2^-15. Below, values are rounded to multiples of r 2^-24, which is at most
//     2^-31 of the row's largest value. V4_FP8's RoPE is divided by r, becomes f16, and is stored back to its place in
//     the ring: as value columns it then needs no more work. r is the largest scale, or more where RoPE / r would not
//     stay below 2^15.
//   PLAIN_FP8: the call has one scale, which multiplies logits and results. r is 1.
//   FP4 (V32_NVFP4, V4_NVFP4): e2m1 under e4m3 scales of 16 columns each. The consumer warp that multiplies K expands
//     the codes (EXPAND) to bytes and stores these in the ring, from where V is read. Nothing is rounded, because f16
//     holds e2m1 * scale, or 2^-7 of it.
//     V32_NVFP4: codes become e5m2 bytes, 2^-14 of their value, which are multiplied by 2^7 scale when they are
//       widened. Logits and results are multiplied by the missing 2^7. K's RoPE, e4m3 without a scale, does not lack
//       that factor, so Q's RoPE is multiplied by 2^-7. r is 1.
//     V4_NVFP4: codes become e4m3 bytes, 2^-6 of their value, which are multiplied by 2^6 scale. RoPE becomes f16 as
//       V4_FP8's does, in multiples of 2^-24. r is above 1 only where a RoPE value is 2^15 or more.
//   V41_FP8 with an extra cache V41_FP4: each tile has rows of one cache only, and its marks say of which. FP4 codes
//     are expanded as those of V4_NVFP4 are, with r 1. From there on both kinds of tiles are treated alike.
// Q becomes f16, times a power of two that brings its largest value to 2^13 .. 2^14.
//
// What bounds it. Other instructions compete with wgmma for issue slots: float32 arithmetic takes slots from wgmma,
// the rest waits until wgmma leaves some. (Uniform instructions cost nothing.) So the time of large batches is the
// number of instructions.
//
// How work is divided over CTAs is up to attention/division: DIVISION chooses whole items, clusters, shares, segments
// or teams. The division gives a CTA its turns, each a split of a work item, and takes the result of each turn. Lists
// of rows with float32 scales often end with -1. There, equal splits take an item's tiles in turn, so that each gets
// as many valid ones.
//
// Only tiles with a valid entry are copied and multiplied. Each producer warp looks at all entries of a tile, and
// skips the tile if none is valid. So nobody knows beforehand how many tiles a split has. Instead every tile has a
// mark that says whether more may follow (`Follows`). If the last tile said that more may follow, and none does, the
// producers send a stage without rows that is marked as the end.
//
// The end of the lists, behind their last valid entry, is found early, so that the next turn's Q and rows can be
// loaded. For the CTA's first turns the consumers find it, while they wait for Q; for later turns the producer warps
// do. Where scales are UE8M0, whose models have shorter lists, and where END is KEEP, the producer warps look for it
// only after a few tiles without rows.
//
//   full[stage]          rows have come       of each of COPIERS producer warps an arrival and its bulk copies' bytes;
//                                             with COPY_SCALES 32 arrivals more, after cp.async
//   empty[stage]         stage released       the 8 consumer warps
//   q_full               Q has come           2 arrivals: bulk copies of Q, and turn_infos is written
//   q_empty              Q released           the 8 consumer warps, after the last product with it
//   ends_known           ends found           the 8 consumer warps, for the lists of the first turns
//   P_READY + w          named: P of warpgroup w's tile is published: its 128 threads arrive, the other 128 wait
//   WARPGROUP_SYNC + w   named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC        named: all 256 consumer threads
//   PRODUCER_SYNC        named: the 128 producer threads, while they find the end of a split
//
// Shared memory in bytes, HEADS 64. V32_FP8: Q 73,728, and 1,024 for gaps between its groups of heads while it is
// copied; two P of heads x 64 f16, 16,384; 12 stages of 16 rows x 656, 125,952; barriers and small arrays 6,928.
// V4_FP8: Q 65,536; rows of 592. Rows of 528: Q 65,536; 16 stages, 135,168. FP4: rows of 624, V41_FP8 with V41_FP4
// 560; 12 stages, 16 with 32 heads. With 16 heads there are 16 to 24 stages.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch.
// What was tried, what bounds it: docs/kernels/fp8_sm90.md.
//
// Parts, under fp8_sm90/:
//
//   plan                          constants, shared memory, thread roles, the turns of a CTA
//   marks                         what the producers tell the consumers about a stage
//   producer                      bulk copies of rows and Q
//   list_rows, list_lines         rows that index lists name; lines of Q are heads of a query
//   request_rows, request_lines   DENSE: rows of a request; lines of Q are heads of its query tokens
//   queries, scales               Q, and the rows' scales, in the form that the products take
//   scores, softmax, values       S^T, P^T, O^T
//   results, chunks               results, partial results and their merge
//   pipeline                      a turn in the consumer warps, and the kernel's main function
#include "attention/fp8_sm90/pipeline.cuh"

// grid: x CTAs among which the division deals out work; CLUSTERS: x = work item * CTAs of a cluster + rank.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_sm90(const __grid_constant__ AttentionParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
