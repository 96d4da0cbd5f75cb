"""`fp8_sm90` where teams of CTAs that are no cluster work on the splits of an item, against the oracle. Needs a Hopper
GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ... import oracle
from ...cases import check_decode, check_same_bits, off_zero, paged, queries, run_decode, sinks, with_holes
from .replays import check_replays_with_other_lengths
from .two_gpus import check_two_gpus_in_turn

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
HEADS = pytest.mark.parametrize("heads", [16, 32, 64])

KERNEL = "fp8_sm90"
BY_LENGTH = 0  # splits


@pytest.fixture
def teams(force) -> Callable[..., None]:
    """A function that makes every later call run in teams: so many heads a CTA, and splits of an item; `BY_LENGTH`: as
    its lists are long, with so many CTAs in all, and at least one an item. With `clusters` the splits are clusters."""

    def use(heads: int, splits: int, ctas: int = 0, clusters: bool = False) -> None:
        teams = f"teams(heads={heads}, splits={splits}, ctas={ctas})"
        force(division=f"clusters(heads={heads}, splits={splits}, cluster={splits})" if clusters else teams)

    return use


@FORMATS
@HEADS
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "splits"),
    [
        (1, 1, 1, 1, 2),
        (3, 1, 7, 63, 3),
        (1, 2, 33, 700, 16),
        (21, 1, 128, 1152, 3),
        (8, 1, 64, 1100, 16),
        (140, 1, 64, 200, 4),
        (60, 1, 30, 500, 16),
        (2, 2, 128, 2100, 5),
    ],
)
def test_equal_lists(hopper, teams, rng, fmt, heads, b, s_q, h_q, topk, splits):
    teams(heads, splits)
    main = paged(rng, fmt, b, s_q, topk, 64)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q))


@FORMATS
@HEADS
@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize(("b", "h_q", "topk", "splits"), [(2, 64, 2100, 3), (7, 128, 1000, 7), (30, 40, 700, 2)])
def test_empty_tiles(hopper, teams, rng, fmt, heads, clusters, b, h_q, topk, splits):
    teams(heads, splits, clusters=clusters)
    main = paged(rng, fmt, b, 1, topk, 64)
    with_holes(rng, main)
    q = off_zero(fmt, queries(rng, b, 1, h_q, fmt.d_qk), main)
    check_decode(hopper, fmt, q, main, sink=sinks(rng, h_q))


def unequal(rng: np.random.Generator, fmt: oracle.Format, b: int, s_q: int) -> tuple[Any, Any]:
    """Two caches with lengths: empty lists, full ones and tiles without a valid entry."""
    main, extra = paged(rng, fmt, b, s_q, 900, 64, lengths=True), paged(rng, fmt, b, s_q, 130, 2, lengths=True)
    main.length[:] = np.resize([0, 900, 64, 300, 0, 5000], b)
    extra.length[:] = np.resize([130, 0, 70, 5, 0], b)
    main.indices[:, :, 64:256][rng.random((b, s_q)) < 0.5] = -1
    return main, extra


@FORMATS
@pytest.mark.parametrize(("b", "splits"), [(11, 2), (11, 7), (30, 16)])
def test_to_the_bits_of_clusters(hopper, teams, rng, fmt, b, splits):
    """With 300 CTAs and more a team's CTAs do not all run at a time: the last of them to leave a partial result merges
    all."""
    main, extra = unequal(rng, fmt, b, 2)
    q, sink = off_zero(fmt, queries(rng, b, 2, 72, fmt.d_qk), main, extra), sinks(rng, 72)
    teams(64, splits, clusters=True)
    of_clusters = run_decode(hopper, q, main, extra, sink=sink)
    teams(64, splits)
    of_teams = check_decode(hopper, fmt, q, main, extra, sink=sink)
    assert [r.tobytes() for r in of_teams] == [r.tobytes() for r in of_clusters]


@FORMATS
@HEADS
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "ctas"),
    [(1, 1, 5, 1), (1, 1, 20, 40), (7, 2, 128, 132), (21, 1, 128, 132), (44, 3, 30, 132), (100, 1, 64, 132),
     (5, 1, 64, 300), (150, 1, 64, 151), (150, 2, 128, 1200), (150, 1, 9, 131)],
)  # fmt: skip
def test_by_length(hopper, teams, rng, fmt, heads, b, s_q, h_q, ctas):
    teams(heads, BY_LENGTH, ctas)
    main, extra = unequal(rng, fmt, b, s_q)
    q = off_zero(fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, extra)
    check_decode(hopper, fmt, q, main, extra, sink=sinks(rng, h_q))


@FORMATS
@pytest.mark.parametrize("lengths", ["one", "none", "random", "topk"])
def test_lengths(hopper, teams, rng, fmt, lengths):
    """One request with everything, which has no more than MAX_CLUSTER CTAs; nothing at all; anything."""
    b, topk = 20, 3000
    teams(64, BY_LENGTH, 132)
    main = paged(rng, fmt, b, 1, topk, 64, lengths=True)
    if lengths == "random":
        main.length[:] = rng.integers(0, topk + 2, b)
    else:
        main.length[:] = topk if lengths == "topk" else 0
        if lengths == "one":
            main.length[rng.integers(b)] = topk
    check_decode(hopper, fmt, off_zero(fmt, queries(rng, b, 1, 64, fmt.d_qk), main), main)


@FORMATS
@pytest.mark.parametrize(("b", "tiles", "ctas", "splits"), [(12, 15, 132, 8), (44, 18, 132, 3), (40, 7, 132, 3)])
def test_equal_lengths_have_equal_teams(hopper, teams, rng, fmt, b, tiles, ctas, splits):
    """The least quota of tiles for which so many CTAs suffice: to the bits of clusters of that size."""
    topk = 64 * tiles
    main, q = paged(rng, fmt, b, 1, topk, 64, lengths=True), queries(rng, b, 1, 64, fmt.d_qk)
    main.length[:] = topk
    teams(64, splits, clusters=True)
    of_clusters = run_decode(hopper, q, main)
    teams(64, BY_LENGTH, ctas)
    of_teams = check_decode(hopper, fmt, q, main)
    assert [r.tobytes() for r in of_teams] == [r.tobytes() for r in of_clusters]


@FORMATS
@pytest.mark.parametrize("batches", [range(first, 133, 8) for first in range(1, 9)], ids=lambda r: f"from {r[0]}")
def test_every_batch(hopper, teams, rng, fmt, batches):
    """Random heads, lists and splits, as many as there are CTAs for."""
    for b in batches:
        h_q, topk = int(rng.integers(1, 9)), int(rng.integers(64, 400))
        lengths = bool(rng.integers(2))
        teams(64, *((BY_LENGTH, 132) if lengths else (int(rng.integers(2, 5)), 0)))
        main = paged(rng, fmt, b, 1, topk, 64, lengths=lengths)
        check_decode(hopper, fmt, off_zero(fmt, queries(rng, b, 1, h_q, fmt.d_qk), main), main)


@FORMATS
@HEADS
@pytest.mark.parametrize("gap", [1, 2, 8])
def test_alignment_of_results(hopper, teams, rng, fmt, heads, gap):
    """Rows of 512 + `gap` values begin at multiples of 2, 4 and 16 bytes."""
    teams(heads, 3)
    main, q = paged(rng, fmt, 40, 1, 390, 64), queries(rng, 40, 1, 30, fmt.d_qk)
    check_decode(hopper, fmt, q, main, out_gaps=(0, 0, 0, gap))


@FORMATS
@pytest.mark.parametrize(("b", "splits", "ctas"), [(37, 3, 0), (150, 3, 0), (37, BY_LENGTH, 0), (150, BY_LENGTH, 400)])
def test_same_bits_every_time(hopper, teams, rng, fmt, b, splits, ctas):
    teams(64, splits, ctas)
    main, q = paged(rng, fmt, b, 1, 700, 64, lengths=splits == BY_LENGTH), queries(rng, b, 1, 64, fmt.d_qk)
    check_same_bits(hopper, q, main, times=6)


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
@pytest.mark.parametrize(("b", "splits", "ctas"), [(20, 3, 0), (40, BY_LENGTH, 0), (100, 2, 0), (100, BY_LENGTH, 300)])
def test_replays_with_other_lengths(hopper, teams, rng, b, splits, ctas):
    """A captured graph of two calls, which use the same memory for partial results, run again and again."""
    teams(64, splits, ctas)
    main, extra = unequal(rng, oracle.V4, b, 1)
    check_replays_with_other_lengths(rng, oracle.V4, queries(rng, b, 1, 128, 512), main, extra, times=2)


@FORMATS
def test_two_gpus_in_turn(two_gpus, hopper, teams, rng, fmt):
    teams(64, 3)
    check_two_gpus_in_turn(hopper, rng, fmt, 20, 1)
