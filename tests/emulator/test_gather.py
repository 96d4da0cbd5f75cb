"""`gather` on an emulated GPU: requests in any order, rows that are not aligned, and numbers out of range."""

from __future__ import annotations

from ..ops import test_gather as of_operation
from .again import again

test_rows = again(of_operation.test_gather, (3, [5, 0, 17]))
test_rows_that_are_not_aligned = again(of_operation.test_gather_into_rows_that_are_not_aligned)
test_hostile_numbers = again(of_operation.test_gather_of_hostile_numbers)
test_more_requests_than_threads = again(of_operation.test_gather_of_more_requests_than_a_block_has_threads)
