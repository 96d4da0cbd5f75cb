// Dense attention of FP8 rows on Hopper: a work item is HEADS lines of a request, its query tokens times its heads, which
// share the request's rows.
//
//   block table, lengths --> producer warps    a lookup, and a bulk copy, for each row of a tile     request_rows.cuh
//   q                    --> lines             a token and a head each                               request_lines.cuh
//                            S^T, softmax, O^T, of 64 rows at a time: as they are in                 fp8_sm90.cu
//                            whose picture holds here: its barriers, registers and shared memory, and 4 bytes a line
//
// PLAIN_FP8 (SCALE_OF_CALL): no scales of rows; the call's is part of the logits' factor and of the results'. Q_E4M3: Q is
// e4m3 as well, so S^T takes rows as they are, by ldmatrix:
//
//   S^T = K . Q^T     64 rows x lines, 32 columns a step       Q: swizzled lines of 128 columns
//
// Shared memory with Q_E4M3, HEADS 64: Q of 576 columns 40,960; rows of 592.
//
// What differs besides: no index lists, so every tile is copied and multiplied, and it is known how many there are. A tile that
// not all lines see in full is marked; only there the consumers look at the end of each line's rows.
//
//   DIVISION   WHOLE      CTAs take items in turn                         many short requests
//              CLUSTERS   a cluster an item, tiles in turn                few items of few rows
//              REQUESTS   all rows of the call in equal shares            long or unequal requests, splits;
//                                                                         dense_combine.cu merges
//
// grid: x CTAs among which the work items are divided; in clusters x a cluster an item.
#include "attention/fp8_sm90/pipeline.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_fp8_sm90(const __grid_constant__ DenseParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
