#define GROUPED 0
#define SPLIT 0
#define ENTRY bf16_sm90
#include "attention/bf16_sm90.cuh"

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
