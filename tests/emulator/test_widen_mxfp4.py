"""`widen_mxfp4` on an emulated GPU: every byte, scales far apart, and strides."""

from __future__ import annotations

from ..ops import test_mxfp4 as of_operation
from .again import again

test_rows = again(of_operation.test_widen, ((33,),), ((5, 24),))
# Through `gather_keys` and the logits.
test_logits_of_scales_far_apart = again(of_operation.test_logits_of_scales_far_apart, (15,), (28,))
