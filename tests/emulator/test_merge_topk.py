"""`merge_topk` on an emulated GPU: lists of ranks in any order and ascending, and equal logits."""

from __future__ import annotations

from ..ops import test_context_parallel as of_operation
from .again import again

test_any_order = again(of_operation.test_merge_topk, (3, 4, 50, 149))
test_ascending = again(of_operation.test_merge_topk_of_ascending_lists, (8, 2, 1024, 512))
test_equal_logits = again(of_operation.test_merge_topk_of_a_plateau)
