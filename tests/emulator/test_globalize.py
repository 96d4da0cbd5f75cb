"""`globalize` on an emulated GPU: logits and positions of what a rank chose, and of entries that are none."""

from __future__ import annotations

from ..ops import test_context_parallel as of_operation
from .again import again

test_lists = again(
    of_operation.test_globalize_topk, (3, 2048, 5000, 5, 4, 64), (9, 1, 1, 5, 4, 64), (2, 3, 0, 5, 4, 64)
)
