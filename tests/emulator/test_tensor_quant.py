"""`tensor_quant` on an emulated GPU: whole tiles, parts of them, more than CTAs are many, memory that is not aligned,
infinity and NaN."""

from __future__ import annotations

import numpy as np

from ..kinds import BF16
from ..ops import test_quant as of_operation
from .again import again

test_codes = again(
    of_operation.test_quantize,
    ((7,), BF16, 1e6),
    ((4096,), np.dtype(np.float32), 1e6),
    ((2, 3, 4095), BF16, 1e6),
    ((27, 4096), BF16, 1e6),
)
test_memory_that_is_not_aligned = again(of_operation.test_memory_that_is_not_aligned)
test_infinity_and_nan = again(of_operation.test_infinity_and_nan, (np.inf,), (-np.inf,), (np.nan,), (-np.nan,))
