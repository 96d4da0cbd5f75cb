"""`dense_sm90` on an emulated GPU."""

from __future__ import annotations

import pytest

from ..dense_hopper import bits_of_a_request, calls_of_one_plan, every_batch, every_heads, some_requests

SHARES, SPLITS = "shares(splits=0)", "shares(splits=3)"
REQUESTS = 5


@pytest.fixture(autouse=True)
def division(request, force) -> None:
    """That is forced, if there is one."""
    force("dense_sm90", getattr(request, "param", None))


divided = pytest.mark.parametrize("division", [SHARES, SPLITS], indirect=True)


@pytest.mark.long(sample=2)
@divided
@every_heads
def test_requests(kind, rng, heads):
    some_requests(kind, rng, REQUESTS, heads)


@pytest.mark.long(sample=4)
@divided
@every_batch
def test_batches(kind, rng, check):
    check(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("division", [SHARES], indirect=True)
def test_calls_of_one_plan(kind, rng):
    calls_of_one_plan(kind, rng, 3)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_equal_splits(kind, rng, num_splits):
    some_requests(kind, rng, REQUESTS, 64, num_splits=num_splits)


@pytest.mark.long(sample=1)
def test_bits_of_a_request(kind, rng):
    bits_of_a_request(kind, rng, REQUESTS)
