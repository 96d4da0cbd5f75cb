"""`merge_topk` on an emulated GPU: lists of ranks in any order and ascending, and equal logits."""

from __future__ import annotations

from ..ops import test_context_parallel as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


def test_any_order(kind, rng):
    of_operation.test_merge_topk(kind, rng, 3, 4, 50, 149)


def test_ascending(kind, rng):
    of_operation.test_merge_topk_of_ascending_lists(kind, rng, 8, 2, 1024, 512)


def test_equal_logits(kind):
    of_operation.test_merge_topk_of_a_plateau(kind)
