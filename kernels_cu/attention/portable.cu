// Sparse attention on mma.sync, for every GPU from sm_80 on: decode and prefill, every cache layout.
//
// A CTA works on one split of a work item at a time: a query, HEADS heads, and some of its rows, in tiles of
// TILE_ROWS. Either it has one split, whose result combine.cu merges with the others', or an equal share of all rows
// of the launch (division/share.cuh). Two kinds of warps work on neighbouring tiles at the same time:
//
//   4 score warps    S = Q.K^T and softmax. They form GROUPS groups, each with HEADS / GROUPS heads. Each warp of a
//                    group multiplies a slice of the columns; then the warps add their parts of S through shared
//                    memory. Q is in registers; its last steps of k are in shared memory.
//   8 output warps   O += P.V, all heads x 64 columns each. They also copy the rows of later tiles.
//
//   tile             output warps           score warps                                          output warps
//                    rows  -->              S parts --> exchange --> S --> P, rescale factors --> O
//                             tile_full[stage]      P_EMPTY[tile % 2]               P_FULL[tile % 2]
//
//   tile_full[stage]   mbarrier: all rows of the stage's tile are there, as bf16
//   P_EMPTY + i        named: output warps have read P from buffer i; all score warps have stored their parts of S
//   P_FULL + i         named: score warps have written P to buffer i; output warps are done with the tile before
//   S_DONE + i         named: score warps have multiplied S of a tile (PV_AFTER_NEXT_QK: P.V of the tile before waits)
//   OUTPUT_SYNC        named: output warps are done with a tile, or have written a partial result
//   GROUP_SYNC + i     named: the score warps of group i have read each other's parts of S (if there is one buffer)
//   SCORE_SYNC         named: score warps know the split's tiles; later, the number of partial results to merge
//   TILES_KNOWN        named: output warps know the split's tiles, and the next split
//   FACTORS_KNOWN      named: score warps have stored the heads' final factors
//   NEXT_SPLIT         named: all warps are done with a split, or leave it to restart it; all know the next split
//
// Which products run at the same time. Score warps have more to do than output warps, and P.V slows them, because all
// share the tensor cores. So with bf16 rows and 163 KB, P.V of a tile waits for S of the next tile, and runs beside
// that tile's softmax. Elsewhere P.V begins as soon as P is there.
//
// Rows. bf16 rows are copied by cp.async into the stage of a tile that all output warps are done with. Quantized rows
// are copied in their form in the cache, some tiles ahead, into a ring that each output warp has for its own rows.
// From there the warp widens them to bf16, once, after P.V of the tile two before has freed the stage. For invalid
// list entries nothing is read: their rows are zeros in the stage, and their logits become -inf. Tiles without a valid
// entry are skipped (list_tiles.cuh).
//
// From one split to the next (OVERLAP_SPLITS). A score thread finds the next split while P.V still runs. When O is
// complete, the output warps first start to copy the next split's rows, then write O. The score warps write
// statistics, then load the next Q (bf16 rows).
//
// Shared memory of 64 heads and rows of 576, in bytes:
//
//                      stages        raw rows      parts of S   P       Q in it   the rest
//   163 KB, bf16       3 x 36,864                  16,384       8,192   24,576    6,496
//   163 KB, V32_FP8    2 x 36,864    2 x 20,992    8,192        8,192   28,672    5,744
//   99 KB, bf16        4 x 18,432                  4,096        4,096   16,384    3,072
//   99 KB, V32_FP8     2 x 18,432    2 x 10,496    8,192        4,096   24,576    3,696
//
// What is exact: rows as bf16, because e4m3 and e2m1 with UE8M0 or e4m3 scales fit bf16; e4m3 queries. What is
// rounded: P, to bf16, or to f16 where rows are f16; the output. Float32 scales (FOLDED) would round rows. So they are
// multiplied into S (scores.cuh), and into P, which is f16 until then (values.cuh). The call's scale (PLAIN_FP8) is a
// factor of logits and of the output. Products and sums are float32, exponentials ex2.approx.
//
// Parts, under portable/, each on those above it:
//
//   plan                          constants, shared memory, thread roles
//   splits                        the splits of a CTA
//   list_tiles, request_tiles     which tiles a split has: by index lists; DENSE: of a request
//   rows, widen                   how rows come to the stages
//   scores, softmax, values       S, P, O
//   results                       the epilogue of a split
//   pipeline                      a split in each kind of warps, and the kernel's main function
//
// EXTRA_ROWS: the extra cache has another layout, V41_FP4 or V41_FP4_SPLIT. A tile has rows of one cache only. DENSE:
// rows come from a block table. A "query" is then a request, and its "heads" are the request's lines: its query tokens
// times their heads, which share its rows.
//
// What was tried, what bounds it: docs/kernels/portable.md.
#include "attention/portable/pipeline.cuh"

// grid: x = query * head tiles + head tile, y = split; in shares: x = CTAs among which all rows are divided
extern "C" __global__ void __launch_bounds__(THREADS, 1) portable(const __grid_constant__ Params p) { run(p); }

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
