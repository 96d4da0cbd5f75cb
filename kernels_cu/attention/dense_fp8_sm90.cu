// Dense attention of FP8 rows on Hopper: a work item is HEADS lines of a request, its query tokens times its heads, which
// share the request's rows.
//
//   block table, lengths --> producer warps    a lookup, and a bulk copy, for each row of a tile     request_rows.cuh
//   q                    --> lines             a token and a head each                               request_lines.cuh
//                            S^T, softmax, O^T, of 64 rows at a time: as they are in                 fp8_sm90.cu
//                            whose picture holds here: its barriers, registers and shared memory, and 4 bytes a line
//
// What differs: no index lists, so every tile is copied and multiplied, and it is known how many there are. A tile that
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
