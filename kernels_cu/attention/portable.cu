// Sparse attention on mma.sync, for every GPU from sm_80 on: decode and prefill, every cache layout.
//
// A CTA works on a split of a work item at a time: one query, HEADS heads, some of its rows, in tiles of TILE_ROWS. It
// has one split, whose result combine.cu merges with the others', or an equal share of all rows of the launch
// (division/share.cuh). Two kinds of warps work on neighbouring tiles at the same time:
//
//   4 score warps    S = Q.K^T and softmax. They form GROUPS groups, each with HEADS / GROUPS heads. A warp of a group
//                    multiplies its share of the columns, then the warps add their parts of S through shared memory. Q
//                    is held in registers, its last steps in shared memory.
//   8 output warps   O += P.V, all heads x 64 columns each. They also bring the rows of later tiles.
//
//   tile             output warps           score warps                                          output warps
//                    rows  -->              S parts --> exchange --> S --> P, rescale factors --> O
//                             tile_full[stage]      P_EMPTY[tile % 2]               P_FULL[tile % 2]
//
//   tile_full[stage]   mbarrier: all rows of a stage are there, as bf16
//   P_EMPTY + i        named: output warps have read buffer i of P; all score warps have left their parts of S
//   P_FULL + i         named: score warps have written buffer i of P; all output warps are done with the tile before
//   S_DONE + i         named: score warps have multiplied S of a tile (where P.V of the tile before waits for that)
//   OUTPUT_SYNC        named: output warps are done with a tile; or have written a partial result
//   GROUP_SYNC + i     named: score warps of group i have read each other's parts of S (where these have one buffer)
//   SCORE_SYNC         named: score warps know the split's tiles; later, how many partial results they merge
//   TILES_KNOWN        named: output warps know the split's tiles, and the next split
//   FACTORS_KNOWN      named: score warps have left the final factors of the heads
//   NEXT_SPLIT         named: all warps are done with a split, or leave it to begin anew; all know the next
//
// What stands beside what. 163 KB, bf16: all warps share the tensor cores, and score warps, which have more to do, are
// slowed by P.V; so P.V waits for S of the next tile and runs beside its softmax. Elsewhere P.V begins with P.
//
// Rows. bf16 rows are copied (cp.async) into the stage of a tile that all output warps are done with. Quantized rows
// are copied as they lie in the cache into a ring that each output warp has for its own rows, some tiles ahead. From
// there the warp widens them to bf16, once, after P.V of the tile two before has freed the stage. List entries that
// are invalid are not read: their rows are zeros in the stage and their logits become -inf. Tiles in which no entry is
// valid are passed over (list_tiles.cuh).
//
// From a split to the next (NEXT_EARLY). While P.V is still multiplied, a score thread finds the next split. When O is
// complete, output warps start to copy the next split's first rows, then they write O; score warps write statistics,
// then they load the next Q (bf16 rows).
//
// Shared memory of 64 heads and rows of 576, in bytes:
//
//                      stages        raw rows      parts of S   P       Q in it   the rest
//   163 KB, bf16       3 x 36,864                  16,384       8,192   24,576    6,496
//   163 KB, V32_FP8    2 x 36,864    2 x 20,992    8,192        8,192   28,672    5,744
//   99 KB, bf16        4 x 18,432                  4,096        4,096   16,384    3,072
//   99 KB, V32_FP8     2 x 18,432    2 x 10,496    8,192        4,096   24,576    3,696
//
// What is exact: rows as bf16, for e4m3, e2m1 and their UE8M0 or e4m3 scales fit it, and e4m3 queries. What is
// rounded: P, to bf16, or to f16 where rows are f16; results. Float32 scales (FOLDED) would round rows, so they are
// multiplied into S (scores.cuh) and into P, which is f16 until then (values.cuh). The call's scale (PLAIN_FP8) is a
// factor on logits and on results. Products and sums are float32, exponentials ex2.approx.
//
// Parts, under portable/, each on those above it:
//
//   plan                          constants, shared memory, who a thread is
//   splits                        the splits of a CTA
//   list_tiles, request_tiles     which tiles a split has: of index lists; DENSE: of a request
//   rows, widen                   how rows come to the stages
//   scores, softmax, values       S, P, O
//   results                       what becomes of a split
//   pipeline                      a split in each kind of warps, and the splits of a CTA
//
// EXTRA_ROWS: rows of the extra cache are of another layout, V41_FP4 or V41_FP4_SPLIT. A tile has rows of one cache.
// DENSE: rows come from a block table. A query is a request, and its heads are the request's lines: its query tokens
// times their heads, which share its rows.
//
// What was tried, what bounds it: docs/kernels/portable.md.
#include "attention/portable/pipeline.cuh"

// grid: x = query * head tiles + head tile, y = split; in shares: x = CTAs among which all rows are divided
extern "C" __global__ void __launch_bounds__(THREADS, 1) portable(const __grid_constant__ Params p) { run(p); }

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
