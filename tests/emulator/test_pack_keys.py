"""`pack_keys` on an emulated GPU: every byte, infinity and NaN."""

from __future__ import annotations

from itertools import product

from ..ops import test_indexer as of_operation
from ..ops.test_mxfp4 import test_every_bfloat16 as every_bfloat16
from ..ops.test_mxfp4 import test_scale_floor as scale_floor
from .again import again

SIZES, SCALES = ((1, 1), (63, 3), (130, 64)), ("fp32", "ue8m0", "mxfp4")

test_bytes = again(of_operation.test_pack, *((*size, scales) for size, scales in product(SIZES, SCALES)))
test_infinity_and_nan = again(of_operation.test_pack_infinities_and_nan)
test_every_bfloat16_as_mxfp4 = again(every_bfloat16)
test_scale_floor = again(scale_floor, (2.0**-126,), (2.0**-13,), (1,))
test_every_bf16_value = again(of_operation.test_every_bf16_value, ("fp32",), ("ue8m0",))
