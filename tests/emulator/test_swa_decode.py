"""`swa_decode` on an emulated GPU: windows of uneven sequences, at their edges, and numbers out of range."""

from __future__ import annotations

from ..ops import test_swa as of_operation
from .again import again

test_windows = again(of_operation.test_swa, (1, 5), (64, 128))
test_edges = again(of_operation.test_swa_at_the_edges)
test_hostile_numbers = again(of_operation.test_swa_of_hostile_numbers)
test_hostile_images = again(of_operation.test_swa_of_hostile_images)
test_images = again(of_operation.test_swa_of_images, (5, 40), (128, 70))
test_replayed_prefixes = again(of_operation.test_swa_of_replayed_prefixes, (5,), (128,))
