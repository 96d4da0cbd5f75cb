"""`dense_whole_sm90` on an emulated GPU."""

from __future__ import annotations

import pytest

from ..dense_hopper import every_batch, every_heads, some_requests

pytestmark = pytest.mark.parametrize("lines", [16, 32, 64])  # of a work item


@pytest.fixture(autouse=True)
def runs_it(force, lines):
    force("dense_whole_sm90", f"whole(heads={lines})")


@pytest.mark.long(sample=2)
@every_heads
def test_requests(kind, rng, lines, heads):
    some_requests(kind, rng, 5, heads)


@pytest.mark.long(sample=4)
@every_batch
def test_batches(kind, rng, lines, check):
    check(kind, rng, 5)
