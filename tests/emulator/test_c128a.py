"""`c128a` on an emulated GPU: lists of decodes and of prefills, at the edges of rows, and numbers out of range."""

from __future__ import annotations

from ..ops import test_compressed as of_operation
from .again import again

test_lists = again(of_operation.test_c128a, (61, 128, 300))
test_edges = again(of_operation.test_c128a_at_the_boundary)
test_hostile_numbers = again(of_operation.test_c128a_of_hostile_numbers)
