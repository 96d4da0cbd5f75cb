// The KV-row reader of the cache layout that this file is compiled for (constants: cupy_mla/layouts.py).
// Every reader is a struct `Rows` with the same members:
//   QUANTIZED      false when a staged row is already the bf16 row
//   STAGED_BYTES   bytes of shared memory a staged row takes (quantized layouts)
//   row_of         where a slot's row lies in the paged cache
//   none           the row of an invalid entry
//   copy           start the copy of a row into shared memory, eight lanes a row
//   FOLDED_SCALES  float32 scales of a row that are kept apart from its values, to be folded into S and P
//   dequantize     staged rows to a tile of bf16 rows (quantized layouts)
#pragma once
#if NUM_SCALES == 0
#include "rows/bf16.cuh"
#elif SCALE_OFFSET >= 0
#include "rows/v32_fp8.cuh"
#else
#include "rows/v4_fp8.cuh"
#endif
