"""`expand_pools` on an emulated GPU: more pools than a CTA has threads, tails, and numbers out of range."""

from __future__ import annotations

from ..ops import test_pools as of_operation
from .again import again

test_lists = again(of_operation.test_expand, (1, 5), (4, 300), (3, 0))
test_hostile_numbers = again(of_operation.test_expand_hostile_numbers)
