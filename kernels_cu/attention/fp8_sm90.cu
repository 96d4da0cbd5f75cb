// Sparse attention of FP8 rows on Hopper, 16, 32 or 64 heads of a query at a time: wgmma with KV rows from registers.
//
// Rows stay in shared memory as they lie in the cache; no tile of 16-bit rows is ever written. The consumer warps
// widen a row's bytes on their way into the A operand. In both products the M side is KV rows or value columns:
//
//   S^T = K . Q^T     64 rows x heads       a thread reads 16 bytes of its two rows; columns of Q are permuted to
//                                           match
//   O^T = V^T . P^T   512 columns x heads   ldmatrix.trans of byte pairs, which prmt puts in order
//
//   warpgroup 0 (consumer)          warpgroup 1 (consumer)          warpgroup 2 (producer)
//     S_2 = K_2 . Q^T                 softmax, P_1 published          rows by bulk copies into a ring of
//     O += V_1 . P_1   columns        O += V_1 . P_1   columns        STAGES x 16 rows, as stages are released
//     softmax, P_2     0 .. 255       S_3 = K_3 . Q^T  256 .. 511
//     O += V_2 . P_2                  O += V_2 . P_2
//     S_4 = ...                       softmax, P_3 ...
//
//   Warpgroup w computes S of every second tile of 64 rows. Both multiply every P with their half of the value
//   columns. So the softmax of one runs beside the products of the other.
//
// e4m3 is exact in f16. Scales: r of a row is a power of two at or above its largest scale. Value columns are widened
// to f16 as e4m3 * (scale / r), and r goes into the exponent of P^T = 2^(logit + log2 r - ref). P^T fits f16 too,
// because ref is a reference for that sum, which rises when a P^T passes MAX_P. The denominator adds P^T / r.
//   float32 scales (V32_FP8, V32_NOPE_FP8): nothing that is multiplied for S^T is rounded: between chunks of 128 columns
//     S^T is multiplied by scale_c / scale_c+1. RoPE in bfloat16; without RoPE the last scale is a factor of the logits.
//     For the values scale / r is rounded to f16, and so is its product with e4m3. What stands under a scale of 0, NaN too,
//     becomes zeros in the ring before it is multiplied: 7 instructions a tile look for such scales.
//   UE8M0 scales (V4_FP8, V41_FP8): powers of two, so K is widened to e4m3 * (scale / r), too. Both are exact while
//     scale / r is 2^-15 or more; below, values are rounded to multiples of r 2^-24, 2^-31 of the row's largest one or less.
//     V4_FP8's RoPE becomes f16 divided by r and goes back to where it lay in the ring; as a value column it needs no more.
//   PLAIN_FP8: r is 1, for the call brings one scale: a factor of logits and of results.
//   FP4 (V32_NVFP4, V4_NVFP4): e2m1 under e4m3 scales of 16 columns. A consumer warp that multiplies K EXPANDS codes to
//     bytes, and stores these in the ring, for V. Nothing is rounded, for f16 holds e2m1 * scale, or 2^-7 of that.
//     V32_NVFP4: e5m2 bytes, 2^-14 of their numbers, are multiplied by 2^7 scale where they are widened. Logits and
//     results have the 2^7 that is missing, and Q's RoPE, for K's is e4m3 without scale. r is 1.
//     V4_NVFP4: e4m3 bytes, 2^-6 of their numbers, are multiplied by 2^6 scale. RoPE is as V4_FP8's: f16, in multiples of
//     2^-24; r is above 1 only where RoPE is 2^15 or more.
//   V41_FP8 with an extra cache V41_FP4: a tile has rows of one cache. Its marks say which; codes are expanded as
//     V4_NVFP4's, r is 1, and behind that all is the same for both.
// Q is f16 times a power of two that brings its largest value to 2^13 .. 2^14.
//
// Instructions issued beside wgmma take turns with it: float32 arithmetic takes issue slots from it, the others wait
// until it leaves some (uniform instructions cost nothing). So the time of large batches is the number of
// instructions.
//
// How work is divided over CTAs is the business of attention/division, which DIVISION chooses from: whole items, clusters,
// shares, segments or teams. A CTA asks it for its turns, each a split of a work item, and gives it the result of each.
// Where a division has equal splits, the tiles of rows with float32 scales are dealt out to them in turn.
//
// Only tiles in which an entry is valid are copied and multiplied. Each producer warp looks at all entries of a tile
// before it copies its rows, and passes the tile over if none is valid. So nobody knows beforehand how many tiles a split
// has: a tile says whether more may follow (`Follows`), and if none did although more might have, a tile that holds
// nothing but the end of the split comes last. Where the lists end is found early, so that the next Q and its rows can
// be asked for: of the CTA's first splits by the consumers while they wait for Q, of later ones by the producer warps.
// UE8M0 scales, whose models have shorter lists, and END KEEP: by the producer warps, after a few tiles without rows.
//
//   full[stage]          copies done          COPIERS warps: bulk copies, and one arrival for `marks`; where scales stand
//                                             apart, 32 more after their copies
//   empty[stage]         stage released       the 8 consumer warps
//   q_full               Q has come           bulk copies, and one arrival for `attended`
//   q_empty              Q released           the 8 consumer warps, after the last product with it
//   ends_known           first splits' ends   the 8 consumer warps
//   P_READY + w          named: P of warpgroup w's tile is published: its 128 threads arrive, the other 128 wait
//   WARPGROUP_SYNC + w   named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC        named: all 256 consumer threads
//   PRODUCER_SYNC        named: the 128 producer threads, who find a split's end
//
// Shared memory, HEADS 64, V32_FP8: Q 73,728, and 1,024 for the gaps with which it comes; two P of heads x 64 f16,
// 16,384; 12 stages of 16 rows x 656, 125,952; the rest 6,928. V4_FP8: Q 65,536; rows of 592. Rows of 528: Q 65,536; 16
// stages, 135,168. FP4: rows of 624, V41_FP8 with V41_FP4 560; 12 stages, 16 with 32 heads. 16 heads: 16 to 24.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch.
// What was tried, what bounds it: docs/kernels/fp8_sm90.md.
//
// Parts, under fp8_sm90/:
//
//   plan                        constants, shared memory, who a thread is, the turns of a CTA
//   producer                    bulk copies of rows and Q
//   list_rows, list_lines       rows that index lists name, heads of a query; DENSE: request_rows, request_lines
//   queries, scales             Q, and the scales of rows, as the products take them
//   scores, softmax, values     S^T, P^T, O^T
//   results                     what becomes of O^T
//   pipeline                    a work item in the consumer warps, and all that a CTA does
#include "attention/fp8_sm90/pipeline.cuh"

// grid: x CTAs among which the work items are divided; in clusters x a cluster an item.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_sm90(const __grid_constant__ AttentionParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
