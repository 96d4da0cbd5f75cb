"""`compressed_slots` on an emulated GPU: tokens that complete a row and that do not, and numbers out of range."""

from __future__ import annotations

from ..ops import test_compressed as of_operation
from .again import again

test_slots = again(of_operation.test_slots, (1, 1), (64, 4), (2, 128))
test_ranks = again(of_operation.test_slots_of_ranks, (2, 1, 16), (3, 4, 8))
test_padding_tokens = again(of_operation.test_slots_of_padding_tokens, (2,))
test_edges = again(of_operation.test_slots_at_the_boundary)
test_hostile_numbers = again(of_operation.test_slots_of_hostile_numbers)
