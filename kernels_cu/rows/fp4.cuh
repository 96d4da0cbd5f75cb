// Layouts of e2m1 values under e4m3 scales:
//   V32_NVFP4                  512 e2m1, 64 e4m3, 32 scales, together in 352 bytes
//   V4_NVFP4                   448 e2m1, 64 bfloat16; 28 scales and 4 bytes of padding apart
//   V41_FP4, V41_FP4_SPLIT     512 e2m1, 32 scales, together in 288 bytes; or the scales apart
#pragma once
#include "rows/fp4_row.cuh"
#include "rows/place.cuh"

using Row = Fp4Row<ROW_STRIDE, SCALE_OFFSET, SCALE_STRIDE>;
