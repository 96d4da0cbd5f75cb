// Attention of 16-bit rows on Hopper: wgmma, persistent CTAs, 64 lines of Q at a time. Shared by seven kernels, which
// differ in what the lines of Q and the rows of a work item are, and in what is done with its result:
//
//   bf16_sm90.cu            64 heads of a query, all its rows
//   bf16_cluster_sm90.cu    64 heads of a query; the CTAs of a cluster share its rows and merge their results
//   bf16_shares_sm90.cu     64 heads of a query; all rows of the call are divided evenly over the CTAs
//   bf16_grouped_sm90.cu    all heads of several neighbouring queries, the union of their rows
//   dense_whole_sm90.cu     64 of a request's query tokens and heads; its rows, by the block table
//   dense_cluster_sm90.cu   the same in clusters
//   dense_sm90.cu           the same; all rows of the call are divided evenly over the CTAs
//
// Three warpgroups. Tiles of 64 rows go in pairs, an even and an odd one; both are in shared memory at once.
//
//   warpgroup 0 (consumer)              warpgroup 1 (consumer)              warpgroup 2 (producer)
//     S_0 = Q . K_0^T     m64n64k16       S_1 = Q . K_1^T                     Q of the next work item, once both
//     P_0 = 2^(S_0 - ref_0)               O += P_0 . V_0  right half            S of the last pair are done
//     O += P_0 . V_0      m64n256k16        while P_1 = 2^(S_1 - ref_1)       rows of each tile by cp.async, region
//          left half of the columns       O += P_1 . V_1                        by region, as regions are released
//     O += P_1 . V_1
//
//   P_w is in registers where it is computed, and in shared memory, over the RoPE columns of K_w, for the other
//   warpgroup.
//   KEPT steps of k of Q are in registers as well, so that Q . K reads less from shared memory, whose rate is its
//   limit.
//
//   A tile has two regions. Region w is what warpgroup w reads last, columns 256 w .. + 255. Region 1 - w of tile w
//   holds the RoPE columns as well, over which P_w is stored. With D_QK 512 there are no columns behind V: P has a
//   space of its own. Half of a region's rows are released when the first two of four steps of P.V are done, and are
//   copied anew while the other two run; RoPE columns wait for all four, which read P.
//
//   full[tile][region]    copies done      128 arrivals after cp.async; region w of tile w (VOTED: region 0 of both)
//                                          16 x VALIDITY_LANES more, for validity
//   empty[tile][region][half]              half of a region's rows released, by the 4 warps of warpgroup `region`
//   q_full                Q has come       128 arrivals after cp.async, in clusters 256, and 1 for the work item's
//                         number
//   q_empty               Q released       the 8 consumer warps; not in clusters
//   P_READY + w           named: P_w is published: warpgroup w arrives, the other one waits
//   CONSUMER_SYNC         named: both consumer warpgroups, at the end of a work item
//   PRODUCER_SYNC         named: the producer warps, which have looked at list entries
//
// Only tiles in which an entry is valid are copied and multiplied (tiles.cuh). The consumers are told with a tile's
// validity what follows its pair (`Follows`).
//
// In clusters a CTA has one work item: the consumers, who have nothing else to do, copy Q.
//
// Softmax. P_w is relative to a reference, ref_w, which is published with it, so warpgroups exchange no maxima. ref_w
// is never below what either warpgroup's accumulators are relative to; who multiplies P_w first brings them to ref_w.
// It rises to the largest logit of its tile:
//   in the first pair   whenever that is larger. The largest P is then 1, which bf16 holds exactly; where few rows
//                       take the softmax, rounding it is the largest error
//   later               where that is larger by REF_SLACK, or where its P would be more than PEAK of what the sum will
//                       have become by the end of the list, guessed from the rows so far. Unless few rows take the
//                       softmax, this is rare behind the first tiles
// Sums only grow. So what a logit has to pass (`least`) is computed anew only when one passes the last value.
//
// What is exact: rows and Q are multiplied as they are. What is rounded: P, to bf16 (float16 rows: to float16);
// results; partial results of clusters and shares, to float16 times a power of two for each line. Products and sums
// are float32, exponentials ex2.approx.
//
// Shared memory: Q 73,728 + 2 tiles of 73,728 (D_QK 576) or 3 x 65,536 + P 16,384 (D_QK 512), and about 3 KB;
// bf16_grouped_sm90 4 KB more.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch; no spills in loops
// over tiles, and no wgmma serialised by the compiler (the compile test looks at both).
// What was tried, what bounds it: docs/kernels/bf16_sm90.md.
//
// Parts, under bf16_sm90/:
//
//   plan                 constants, shared memory, what a work item is
//   kinds                how the kernels differ
//   tiles, producer      which tiles come, and how
//   scores, values       S, its softmax, P; O
//   results              of a work item
//   pipeline             a work item in a consumer warpgroup, and all that a CTA does
//   partials, chunks     partial results
#pragma once
#include "attention/bf16_sm90/pipeline.cuh"
