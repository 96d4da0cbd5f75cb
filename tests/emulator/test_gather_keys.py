"""`gather_keys` on an emulated GPU: every byte, numbers out of range, and more requests than a CTA has threads."""

from __future__ import annotations

from ..ops import test_indexer as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .again import again

test_bytes = again(of_operation.test_gather, (3, [5, 0, 17], True), (64, [130, 1], True), (1, [2] * 300, True))
test_hostile_numbers = again(of_operation.test_gather_of_hostile_numbers)
test_mxfp4 = again(
    of_mxfp4.test_gather, (3, [5, 0, 17], False), (64, [130, 1], False), (3, [5, 0, 17], True), (64, [130, 1], True)
)
