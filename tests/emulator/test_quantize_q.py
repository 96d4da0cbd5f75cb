"""`quantize_q` on an emulated GPU: codes and weights, with and without RoPE, and NaN."""

from __future__ import annotations

import numpy as np

from ..kinds import BF16
from ..ops import test_logits as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .again import again

test_codes = again(of_operation.test_quantize, (1, 64, np.float32, "ue8m0"), (7, 24, BF16, "ue8m0"))
test_rope = again(of_operation.test_quantize_with_rope, (True, True, BF16), (False, False, BF16))
test_nan_and_infinity = again(of_operation.test_quantize_nan_and_infinity)
test_mxfp4 = again(of_mxfp4.test_quantize_queries, (1, 64, np.float32), (7, 24, BF16))
test_mxfp4_with_rope = again(of_mxfp4.test_queries_are_rotated_first)
