// Dense attention of FP8 rows on Hopper. A work item is HEADS lines of a request: its query tokens times its heads,
// which share the request's rows.
//
//   rows    producer warps look up each row's block in the block table and copy it by bulk copies    request_rows.cuh
//   lines   a line of Q is a head of a query token                                                   request_lines.cuh
//
// Everything else is as in fp8_sm90.cu: S^T, softmax, O^T, barriers, registers, and shared memory, but for 4 bytes a
// line.
//
// There are no index lists, so every tile is copied and multiplied, and the number of tiles is known. A tile is marked
// if some line does not see all its rows. Only in these tiles the consumers compare rows with the end of each line's
// rows.
//
// What is exact and what is rounded, as in fp8_sm90.cu: e4m3 becomes f16 exactly, times scale / r under UE8M0 scales,
// where values are rounded to multiples of at most 2^-31 of the row's largest. Under float32 scales K is exact, and
// scale / r and its product with V are rounded to f16. Queries in bfloat16 and P^T are rounded to f16, but for the
// product of V32_FP8's RoPE, which is in bfloat16; queries in e4m3 are exact. Sums are float32.
//
//   DIVISION   WHOLE      CTAs take items in turn                              many short requests
//              CLUSTERS   a cluster an item; its CTAs take tiles in turn       few items of few rows
//              REQUESTS   all rows of the call in equal shares, or each item   long or unequal requests;
//                         in equal splits                                      dense_combine.cu merges
//
// grid: x CTAs among which the division deals out work; CLUSTERS: x = work item * CTAs of a cluster + rank.
#include "attention/fp8_sm90/pipeline.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_fp8_sm90(const __grid_constant__ DenseParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
