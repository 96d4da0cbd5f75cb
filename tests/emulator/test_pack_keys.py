"""`pack_keys` on an emulated GPU: every byte, infinity and NaN."""

from __future__ import annotations

from ..ops import test_indexer as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .again import again

test_bytes = again(
    of_operation.test_pack,
    (1, 1, "fp32"),
    (63, 3, "fp32"),
    (130, 64, "fp32"),
    (1, 1, "ue8m0"),
    (63, 3, "ue8m0"),
    (130, 64, "ue8m0"),
)
test_infinity_and_nan = again(of_operation.test_pack_infinities_and_nan)
test_mxfp4 = again(of_mxfp4.test_pack, (1, 1), (63, 3), (130, 64))
test_every_bfloat16_as_mxfp4 = again(of_mxfp4.test_every_bfloat16)
