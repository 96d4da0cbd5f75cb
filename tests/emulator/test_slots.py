"""`slots` on an emulated Hopper GPU."""

from __future__ import annotations

from ..ops import test_indices as of_operation
from .again import again

test_slots = again(of_operation.check_slots, (1, 0, 1, 1), (300, 0, 5, 40), (9, 33, 2, 300))
