"""`dense_fp8_sm90` on an emulated GPU, in each of its divisions."""

from __future__ import annotations

import pytest

from ..dense_hopper import (
    FP8_FORMATS,
    bits_of_a_request,
    calls_of_one_plan,
    every_batch,
    plain_requests,
    some_requests,
)

SHARES, SPLITS = "shares(splits=0)", "shares(splits=3)"
# Divisions, SMs (all clusters must run at a time), and requests.
DIVISIONS = [("whole", 3, 5), ("clusters", 64, 2), (SHARES, 6, 5), (SPLITS, 6, 5)]


@pytest.fixture(autouse=True)
def division(request, force) -> None:
    """That is forced, if there is one."""
    force("dense_fp8_sm90", getattr(request, "param", None))


divided = pytest.mark.parametrize(("division", "emulated", "b"), DIVISIONS, indirect=["division", "emulated"])


@pytest.mark.long(sample=2)
@divided
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_requests(kind, rng, b, heads):
    some_requests(kind, rng, b, heads, FP8_FORMATS)


@pytest.mark.long(sample=4)
@divided
@every_batch
def test_batches(kind, rng, b, check):
    check(kind, rng, b, FP8_FORMATS)


@pytest.mark.long(sample=1)
@divided
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("e4m3_q", [False, True], ids=["bf16 q", "e4m3 q"])
def test_a_scale_of_the_call(kind, rng, b, heads, e4m3_q):
    plain_requests(kind, rng, b, heads, e4m3_q)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("division", [SHARES], indirect=True)
def test_calls_of_one_plan(kind, rng):
    calls_of_one_plan(kind, rng, 3, FP8_FORMATS[:2])


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_equal_splits(kind, rng, num_splits):
    some_requests(kind, rng, 5, 64, FP8_FORMATS, num_splits=num_splits)


@pytest.mark.long(sample=1)
def test_bits_of_a_request(kind, rng):
    bits_of_a_request(kind, rng, 5, FP8_FORMATS)
