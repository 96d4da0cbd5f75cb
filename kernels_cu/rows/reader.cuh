// The row of the cache layout that this file is compiled for. The layout names the header (`reader` in
// cupy_mla/layouts.py). It has a struct `Row` with these members:
//   QUANTIZED      false if a row in the cache is the bf16 row already
//   FOLDED_SCALES  number of float32 scales of a row; they are multiplied into S and P instead of into its values
//   SCALES_BEHIND  bytes of scales that are stored apart; a copy of the row in shared memory has them behind it
//   STAGED_BYTES   bytes of such a copy: an odd multiple of 16, eight rows at the same column then hit all banks
//   data           the address of the row, null for none
//   scales()       the address of its scales
//   in_block       row number `offset` of a block
//   of_slot        the row of a slot
//   none           no row
#pragma once
#include ROW_READER
