"""`block_scores` on an emulated GPU: ties, infinities, NaN, and ranges that begin anywhere."""

from __future__ import annotations

import pytest

from ..ops import test_candidates as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("n", "count"), [(9, 1), (300, 5), (3001, 64)])
def test_blocks(kind, rng, n, count):
    of_operation.test_blocks(kind, rng, n, count)


@pytest.mark.parametrize("limit", [1 << 20, 1])
def test_blocks_beside_rows(kind, rng, limit):
    of_operation.test_blocks_beside_rows(kind, rng, limit)
