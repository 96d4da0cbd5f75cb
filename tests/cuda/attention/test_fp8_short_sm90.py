"""`fp8_short_sm90`, for short lists of V4_FP8 rows, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ... import oracle
from ...cases import (
    check_decode,
    check_nan_of_a_named_row,
    check_same_bits,
    off_zero,
    paged,
    queries,
    sinks,
    with_holes,
)
from ...kinds import gapped

pytestmark = pytest.mark.gpu

KERNEL, V4 = "fp8_short_sm90", oracle.V4
WAY = pytest.mark.parametrize("division", ["whole(heads=32)", "whole(heads=64)"])


@pytest.fixture
def forced(force):
    return lambda division: force(KERNEL, division)


@WAY
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "extra_topk"),
    [
        (1, 1, 1, 1, 0),
        (3, 1, 7, 63, 2),
        (2, 3, 64, 128, 64),
        (2, 1, 128, 129, 61),
        (3, 2, 33, 0, 256),
        (70, 2, 100, 128, 128),  # several work items for a CTA
        (140, 1, 16, 256, 0),
    ],
)
def test_sizes(hopper, forced, rng, b, s_q, h_q, topk, extra_topk, division):
    """Lists with holes, of all lengths; some have no row in one of the caches, or in both."""
    main, extra = (paged(rng, V4, b, s_q, n, int(rng.choice([1, 61, 64])), lengths=True) for n in (topk, extra_topk))
    for lists, missing in ((main, np.arange(b) % 4 == 1), (extra, np.arange(b) % 4 > 1)):
        with_holes(rng, lists)
        lists.length[missing], lists.length[0] = 0, lists.indices.shape[-1]
        lists.indices[b // 2, :, :-70] = -1  # nothing in the first tiles
    extra = extra if extra_topk else None
    q = off_zero(V4, queries(rng, b, s_q, h_q, 512), main, extra)
    forced(division)
    check_decode(hopper, V4, q, main, extra, sink=sinks(rng, h_q))


@WAY
@pytest.mark.parametrize("gap", [1, 2, 8])
def test_full_lists_and_strides(hopper, forced, rng, division, gap):
    """Rows of results begin at multiples of 2, 4 and 16 bytes."""
    main, extra = paged(rng, V4, 9, 2, 128, 64, gap=1, invalid=0), paged(rng, V4, 9, 2, 64, 2, invalid=0)
    q = gapped(queries(rng, 9, 2, 72, 512), 0, 0, 0, 8)
    forced(division)
    check_decode(hopper, V4, q, main, extra, sink=sinks(rng, 72), out_gaps=(0, 1, 2, gap))


@WAY
@pytest.mark.parametrize("sm_scale", [0.0, -0.03, 8.0])
def test_any_scale(hopper, forced, rng, division, sm_scale):
    main = paged(rng, V4, 1, 2, 200, 64)
    forced(division)
    check_decode(hopper, V4, queries(rng, 1, 2, 64, 512), main, sm_scale=sm_scale)


@WAY
def test_nan_of_a_named_row(hopper, forced, rng, division):
    main = paged(rng, V4, 3, 1, 200, 64, invalid=0)
    main.indices[1, 0, 150] = main.dead[0]
    main.indices[2] = -1
    forced(division)
    check_nan_of_a_named_row(hopper, V4, queries(rng, 3, 1, 64, 512), main, 1)


@WAY
def test_same_bits_every_time(hopper, forced, rng, division):
    main, q = paged(rng, V4, 150, 1, 190, 64), queries(rng, 150, 1, 64, 512)
    forced(division)
    check_same_bits(hopper, q, main)
