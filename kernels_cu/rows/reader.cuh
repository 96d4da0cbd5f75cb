// The row of the cache layout that this file is compiled for. The layout names the header (`reader` in
// cupy_mla/layouts.py), which has a struct `Row` with these members:
//   QUANTIZED      false if the row in the cache is the bf16 row already
//   FOLDED_SCALES  float32 scales of a row that are not multiplied into its values but folded into S and P
//   STAGED_BYTES   shared memory that a copy of the row takes, with scales that stand apart behind it; odd multiples
//                  of 16, so that eight rows read at the same column meet all banks
//   data           the row in the cache, null for none
//   scales()       its scales
//   in_block       row number `offset` of a block
//   of_slot        the row of a slot
//   none           no row
//   SCALES_BEHIND  bytes of scales that stand apart, which a copy of the row in shared memory has behind it
#pragma once
#include ROW_READER
