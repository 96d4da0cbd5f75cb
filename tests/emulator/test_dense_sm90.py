"""`dense_sm90` on an emulated GPU."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import dense_hopper
from .emulator import needs_compiler

pytestmark = needs_compiler
REQUESTS = 5
SHARES, SPLITS = "shares(splits=0)", "shares(splits=3)"


@pytest.fixture(autouse=True)
def runs_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "dense_sm90")


@pytest.fixture
def division(request, force) -> None:
    """That is forced."""
    force(division=request.param)


divided = pytest.mark.parametrize("division", [SHARES, SPLITS], indirect=True)


@pytest.mark.long(sample=2)
@divided
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_requests(kind, rng, division, heads):
    dense_hopper.some_requests(kind, rng, REQUESTS, heads)


@pytest.mark.long(sample=1)
@divided
def test_blocks_that_are_not_there(kind, rng, division):
    dense_hopper.blocks_that_are_not_there(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
@divided
def test_lengths_that_differ_by_a_thousand(kind, rng, division):
    dense_hopper.lengths_that_differ_by_a_thousand(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
@divided
def test_a_call_again_with_other_lengths(kind, rng, division):
    dense_hopper.a_call_again_with_other_lengths(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
def test_calls_of_one_plan(kind, rng, force):
    force(division=SHARES)
    dense_hopper.calls_of_one_plan(kind, rng, 3)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_equal_splits(kind, rng, num_splits):
    dense_hopper.some_requests(kind, rng, REQUESTS, 64, num_splits=num_splits)


@pytest.mark.long(sample=1)
def test_bits_of_a_request(kind, rng):
    dense_hopper.bits_of_a_request(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
@divided
def test_full_tiles_that_some_lines_see(kind, rng, division):
    dense_hopper.full_tiles_that_some_lines_see(kind, rng, REQUESTS)
