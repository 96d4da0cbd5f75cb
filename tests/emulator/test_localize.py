"""`localize` on an emulated GPU: lists of one entry and of more than a CTA has threads, in place too."""

from __future__ import annotations

from ..ops import test_context_parallel as of_operation
from .again import again

test_lists = again(of_operation.test_localize_topk, (3, 2048, 3, 1, 5), (5, 1023, 3, 1, 5), (9, 1, 3, 1, 5))
