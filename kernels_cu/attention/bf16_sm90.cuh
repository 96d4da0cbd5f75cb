// Attention of 16-bit rows on Hopper: wgmma, persistent CTAs, tiles of 64 lines of Q. Seven kernels share it. They
// differ in what the lines of Q and the rows of a work item are, and in what is done with its result:
//
//   bf16_sm90.cu            64 heads of a query, all its rows
//   bf16_cluster_sm90.cu    64 heads of a query; the CTAs of a cluster share its rows and merge their results
//   bf16_shares_sm90.cu     64 heads of a query; all rows of the call are divided evenly over the CTAs
//   bf16_grouped_sm90.cu    all heads of several neighbouring queries, the union of their rows
//   dense_whole_sm90.cu     64 lines of a request, its query tokens times its heads; its rows, by the block table
//   dense_cluster_sm90.cu   the same in clusters
//   dense_sm90.cu           the same; all rows of the call are divided evenly over the CTAs
//
// There are three warpgroups. Tiles of 64 rows are worked on in pairs, an even and an odd tile; shared memory holds
// both.
//
//   warpgroup 0 (consumer)              warpgroup 1 (consumer)              warpgroup 2 (producer)
//     S_0 = Q . K_0^T     m64n64k16       S_1 = Q . K_1^T                     cp.async of the next work item's Q, once
//     P_0 = 2^(S_0 - ref_0)               O += P_0 . V_0  right half            both S of the last pair are done;
//     O += P_0 . V_0      m64n256k16        beside P_1 = 2^(S_1 - ref_1)      cp.async of each tile's rows, region by
//          left half of the columns       O += P_1 . V_1                        region, as regions are released
//     O += P_1 . V_1
//
// The warpgroup that computes P_w keeps it in registers. For the other warpgroup it stores P_w in shared memory, over
// the RoPE columns of K_w. Both read K from shared memory, whose bandwidth limits Q . K. So KEPT_Q_STEPS steps of k of
// Q are kept in registers, too.
//
// A tile has two regions, which are released one by one. Region w is columns 256 w .. 256 w + 255, which only
// warpgroup w reads in P . V. Region 1 - w of tile w also holds the RoPE columns, over which P_w is stored. (With D_QK
// 512 there is no RoPE behind V, and P has its own space.) P . V takes four steps of k. When the first two are done,
// half of the region's rows are released, and new rows are copied there while the other two steps run. The RoPE
// columns wait for all four steps, because those read P.
//
//   full[tile][region]    copies done      128 arrivals after cp.async; for the region with has_validity also
//                                          16 x VALIDITY_LANES arrivals, once validity is stored
//   empty[tile][region][half]              half of a region's rows released, by the 4 warps of warpgroup `region`
//   q_full                Q has come       128 arrivals after cp.async, in clusters 256; and 1 for the index of the
//                         work item
//   q_empty               Q released       the 8 consumer warps; not in clusters
//   P_READY + w           named: P_w is published: warpgroup w arrives, the other one waits
//   CONSUMER_SYNC         named: both consumer warpgroups, at the end of a work item
//   PRODUCER_SYNC         named: the producer warps, which exchange what they found in list entries
//
// Only tiles with a valid entry are copied and multiplied (tiles.cuh). With the validity of a tile's rows the
// producers store whether more pairs follow (`Follows`).
//
// In clusters a CTA has one work item. There the consumers copy Q, as they have nothing else to do.
//
// Softmax. P_w is relative to a reference ref_w, which is published with P_w, so the warpgroups need not exchange
// maxima. ref_w is never below the reference of either warpgroup's accumulators. Before a warpgroup multiplies P_w, it
// rescales its accumulators to ref_w. ref_w rises to the largest logit of its tile:
//   in the first pair   if that is larger. Then the largest P is 1, which bf16 holds exactly. Where only few rows have
//                       most of the softmax, the rounding of P is the largest error
//   later               if that is larger by REF_SLACK; or if its P would be more than PEAK of the sum at the end of
//                       the list, which is estimated from the rows so far. Both are rare after the first tiles, unless
//                       few rows have most of the softmax
// Sums only grow. So the threshold `least` that a logit must pass is computed anew only when one passes the old
// threshold.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P to bf16 (with float16 rows to float16); the
// output; partial results, to float16 times a power of two for each line. Products and sums are float32, exponentials
// ex2.approx.
//
// Shared memory: Q 73,728 + 2 tiles of 73,728 (D_QK 576) or 3 x 65,536 + P 16,384 (D_QK 512), and about 3 KB;
// bf16_grouped_sm90 4 KB more.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch; no spills in loops
// over tiles, and no wgmma serialised by the compiler (the compile test looks at both).
// What was tried, what bounds it: docs/kernels/bf16_sm90.md.
//
// Parts, under bf16_sm90/:
//
//   plan                 constants, shared memory, the struct of a work item
//   kinds                how the kernels differ
//   tiles, producer      which tiles are copied, and how
//   scores, values       S, its softmax, P; O
//   results              the epilogue of a work item
//   pipeline             a work item in a consumer warpgroup, and the kernel's main function
//   partials, chunks     partial results
#pragma once
#include "attention/bf16_sm90/pipeline.cuh"
