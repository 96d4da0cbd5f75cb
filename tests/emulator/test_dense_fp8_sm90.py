"""`dense_fp8_sm90` on an emulated GPU, in each of its divisions."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import dense_hopper
from ..dense_hopper import FP8_FORMATS
from .emulator import needs_compiler

pytestmark = needs_compiler
SHARES, SPLITS = "shares(splits=0)", "shares(splits=3)"
DIVISIONS = ("whole", "clusters", SHARES, SPLITS)
SMS = {"whole": 3, "clusters": 60, SHARES: 6, SPLITS: 6}  # all clusters must run at a time
REQUESTS = {"whole": 5, "clusters": 2, SHARES: 5, SPLITS: 5}


@pytest.fixture(autouse=True)
def runs_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "dense_fp8_sm90")


@pytest.fixture
def division(request, force) -> str:
    """That is forced."""
    force(division=request.param)
    return request.param


divided = pytest.mark.parametrize(("division", "emulated"), [(d, SMS[d]) for d in DIVISIONS], indirect=True)


@pytest.mark.long(sample=2)
@divided
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_requests(kind, rng, division, heads):
    dense_hopper.some_requests(kind, rng, REQUESTS[division], heads, FP8_FORMATS)


@pytest.mark.long(sample=1)
@divided
def test_full_tiles_that_some_lines_see(kind, rng, division):
    dense_hopper.full_tiles_that_some_lines_see(kind, rng, REQUESTS[division], FP8_FORMATS)


@pytest.mark.long(sample=1)
@divided
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("e4m3_q", [False, True], ids=["bf16 q", "e4m3 q"])
def test_a_scale_of_the_call(kind, rng, division, heads, e4m3_q):
    dense_hopper.plain_requests(kind, rng, REQUESTS[division], heads, e4m3_q)


@pytest.mark.long(sample=1)
@divided
def test_blocks_that_are_not_there(kind, rng, division):
    dense_hopper.blocks_that_are_not_there(kind, rng, REQUESTS[division], FP8_FORMATS)


@pytest.mark.long(sample=1)
@divided
def test_lengths_that_differ_by_a_thousand(kind, rng, division):
    dense_hopper.lengths_that_differ_by_a_thousand(kind, rng, REQUESTS[division], FP8_FORMATS)


@pytest.mark.long(sample=1)
@divided
def test_a_call_again_with_other_lengths(kind, rng, division):
    dense_hopper.a_call_again_with_other_lengths(kind, rng, REQUESTS[division], FP8_FORMATS)


@pytest.mark.long(sample=1)
def test_calls_of_one_plan(kind, rng, force):
    force(division=SHARES)
    dense_hopper.calls_of_one_plan(kind, rng, 3, FP8_FORMATS[:2])


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_equal_splits(kind, rng, num_splits):
    dense_hopper.some_requests(kind, rng, 5, 64, FP8_FORMATS, num_splits=num_splits)


@pytest.mark.long(sample=1)
def test_bits_of_a_request(kind, rng):
    dense_hopper.bits_of_a_request(kind, rng, 5, FP8_FORMATS)
