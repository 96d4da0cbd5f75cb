"""`dense_whole_sm90` on an emulated GPU."""

from __future__ import annotations

import pytest

from ..dense import check_dense, dense_queries, in_cache, off_zero
from ..dense_hopper import FORMATS, every_batch, every_heads, some_requests

pytestmark = pytest.mark.parametrize("lines", [16, 32, 64])  # of a work item


@pytest.fixture(autouse=True)
def runs_it(force, lines):
    force("dense_whole_sm90", f"whole(heads={lines})")


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("b", [7, 9, 12])
def test_second_items(kind, rng, lines, b):
    """Some CTAs have two items, found by their lengths."""
    fmt = FORMATS[rng.integers(len(FORMATS))]
    of = in_cache(rng, fmt, rng.integers(0, 700, b), 64)
    check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, b, 1, 8), of), of)


@pytest.mark.long(sample=2)
@every_heads
def test_requests(kind, rng, lines, heads):
    some_requests(kind, rng, 5, heads)


@pytest.mark.long(sample=4)
@every_batch
def test_batches(kind, rng, lines, check):
    check(kind, rng, 5)
