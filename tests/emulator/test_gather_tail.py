"""`gather_tail` on an emulated GPU: whole sequences and tails, rows that are not aligned, and numbers out of range."""

from __future__ import annotations

from ..ops import test_gather_tail as of_operation
from .again import again

test_rows = again(of_operation.test_gather, (61, [130, 1, 64, 63]))
test_rows_that_are_not_aligned = again(of_operation.test_gather_into_rows_that_are_not_aligned)
test_hostile_numbers = again(of_operation.test_gather_of_hostile_numbers)
