"""`few_heads_sm90` where all V32_FP8 rows of a call are divided evenly over CTAs, and where tiles without a valid entry
are skipped, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import pytest

from ... import oracle
from ...cases import (
    check_batches,
    check_decode,
    check_same_bits,
    every_batch,
    paged,
    queries,
    sinks,
    with_holes,
)
from . import evenly as divided
from .replays import check_replays_with_other_lengths, check_replays_with_other_lists
from .two_gpus import check_two_gpus_in_turn

pytestmark = pytest.mark.gpu

KERNEL = "few_heads_sm90"
FORMATS = pytest.mark.parametrize("fmt", [oracle.V32, oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
HEADS = pytest.mark.parametrize("heads", [8, 16])


@pytest.fixture
def heads() -> int:
    """Of a CTA."""
    return 16


@pytest.fixture
def evenly(heads, force) -> None:
    """Every call's rows are divided evenly over 132 CTAs, into splits of a pair of tiles and more."""
    force(division=divided.shares(heads))


@FORMATS
@pytest.mark.parametrize("num_splits", [1, 2, 3, 17, None])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk"), [(7, 1, 7, 1000), (3, 2, 16, 2048), (5, 3, 8, 65), (2, 1, 33, 700), (140, 1, 12, 63)]
)
def test_tiles_without_an_entry(hopper, rng, fmt, b, s_q, h_q, topk, num_splits):
    main = paged(rng, fmt, b, s_q, topk, 64, lengths=bool(rng.integers(2)))
    with_holes(rng, main)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q), num_splits=num_splits)


@HEADS
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "block_size"),
    [
        (1, 1, 1, 1, 1),
        (1, 1, 16, 3000, 64),  # a query over 24 CTAs
        (3, 1, 7, 63, 2),
        (1, 2, 16, 65, 61),
        (3, 1, 40, 700, 256),
        (133, 1, 16, 300, 64),  # one more than there are multiprocessors
        (45, 2, 32, 390, 64),
        (60, 3, 8, 129, 64),
    ],
)
def test_sizes(hopper, evenly, rng, b, s_q, h_q, topk, block_size):
    main = paged(rng, oracle.V32, b, s_q, topk, block_size)
    check_decode(hopper, oracle.V32, queries(rng, b, s_q, h_q, 576), main, sink=sinks(rng, h_q))


@HEADS
@every_batch
def test_every_batch(hopper, evenly, rng, batches):
    check_batches(hopper, rng, oracle.V32, batches)


@HEADS
def test_items_stay_whole(hopper, force, rng, heads):
    divided.check_items_stay_whole(hopper, rng, force, oracle.V32, heads)


@HEADS
@divided.unequal_lengths
def test_lengths(hopper, evenly, rng, lengths):
    main, extra = divided.unequal(rng, oracle.V32, lengths)
    q = queries(rng, 70, 2, 13, 576)
    check_decode(hopper, oracle.V32, q, main, extra, sink=sinks(rng, 13), out_gaps=(0, 1, 2, 3))


@HEADS
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk"), [(1, 1, 16, 3000), (7, 2, 16, 700), (133, 1, 7, 300), (45, 1, 30, 390), (3, 1, 8, 129)]
)
def test_short_lists_and_holes(hopper, evenly, rng, b, s_q, h_q, topk):
    """Divided by what each CTA finds."""
    main = paged(rng, oracle.V32, b, s_q, topk, 64, invalid=0)
    with_holes(rng, main)
    check_decode(hopper, oracle.V32, queries(rng, b, s_q, h_q, 576), main, sink=sinks(rng, h_q))


def test_nothing_valid(hopper, evenly, rng):
    divided.check_nothing_valid(hopper, rng, oracle.V32, 16)


@HEADS
def test_same_bits_every_time(hopper, evenly, rng):
    main, q = paged(rng, oracle.V32, 37, 1, 1000, 64), queries(rng, 37, 1, 16, 576)
    check_same_bits(hopper, q, main)


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_replays_with_other_lists(hopper, evenly, rng):
    """Each replay divides anew, by where -1 then begins."""
    main = paged(rng, oracle.V32, 40, 1, 700, 64, invalid=0)
    check_replays_with_other_lists(rng, oracle.V32, queries(rng, 40, 1, 16, 576), main, with_holes)


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_replays_with_other_lengths(hopper, evenly, rng):
    """Each replay divides anew, by the lengths that then lie in memory."""
    main, extra = divided.unequal(rng, oracle.V32, [300])
    check_replays_with_other_lengths(rng, oracle.V32, queries(rng, 70, 2, 16, 576), main, extra)


def test_two_gpus_in_turn(two_gpus, hopper, evenly, rng):
    check_two_gpus_in_turn(hopper, rng, oracle.V32)
