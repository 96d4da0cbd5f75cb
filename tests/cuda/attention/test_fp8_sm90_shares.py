"""`fp8_sm90` where all rows of a call are divided evenly over CTAs, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ... import oracle
from ...cases import (
    Paged,
    check_batches,
    check_decode,
    check_same_bits,
    every_batch,
    paged,
    queries,
    sinks,
)
from . import evenly as divided
from .replays import check_replays_with_other_lengths, check_replays_with_other_lists
from .two_gpus import check_two_gpus_in_turn

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
HEADS = pytest.mark.parametrize("heads", [16, 32, 64])

KERNEL = "fp8_sm90"


@pytest.fixture
def heads() -> int:
    """Of a CTA."""
    return 64


@pytest.fixture
def evenly(heads, force) -> None:
    """Every call's rows are divided evenly over 132 CTAs, into splits of a pair of tiles and more."""
    force(division=divided.shares(heads))


@FORMATS
@HEADS
@divided.every_size
def test_sizes(hopper, evenly, rng, fmt, b, s_q, h_q, topk, block_size):
    main = paged(rng, fmt, b, s_q, topk, block_size)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q))


@FORMATS
@every_batch
def test_every_batch(hopper, evenly, rng, fmt, batches):
    check_batches(hopper, rng, fmt, batches)


@FORMATS
@divided.unequal_lengths
def test_lengths(hopper, evenly, rng, fmt, lengths):
    main, extra = divided.unequal(rng, fmt, lengths)
    check_decode(
        hopper, fmt, queries(rng, 70, 2, 72, fmt.d_qk), main, extra, sink=sinks(rng, 72), out_gaps=(0, 1, 2, 3)
    )


@FORMATS
@HEADS
def test_items_stay_whole(hopper, force, rng, fmt, heads):
    divided.check_items_stay_whole(hopper, rng, force, fmt, heads)


def short(rng: np.random.Generator, main: Paged, holes: bool = False) -> None:
    """Lists without lengths end sooner: -1 stands behind, with `holes` anywhere, too. One is empty, one full."""
    b, s_q, topk = main.indices.shape
    ends = rng.integers(1, rng.choice([2, 100, topk]) + 1, (b, s_q, 1))
    ends = np.maximum(ends, 60)  # of fewer rows an lse may be near 0, where a relative tolerance means nothing
    if b > 1:
        ends[:2] = [[topk]], [[0]]
        rng.shuffle(ends)
    main.indices[np.arange(topk) >= ends] = -1
    if holes:
        main.indices[rng.random(main.indices.shape) < 0.5] = -1
        main.indices[:, :, : divided.PAIR_ROWS][
            (ends[..., 0] > divided.PAIR_ROWS + 120) & (rng.random((b, s_q)) < 0.5)
        ] = -1


@FORMATS
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk"),
    [(1, 1, 64, 3000), (7, 2, 128, 700), (133, 1, 32, 300), (45, 1, 100, 390), (3, 1, 64, 129)],
)
def test_short_lists(hopper, evenly, rng, fmt, b, s_q, h_q, topk, holes):
    """Divided by what each CTA finds."""
    main = paged(rng, fmt, b, s_q, topk, 64, invalid=0)
    short(rng, main, holes)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q))


@FORMATS
def test_nothing_valid(hopper, evenly, rng, fmt):
    divided.check_nothing_valid(hopper, rng, fmt, 64)


@FORMATS
@pytest.mark.parametrize("item_cost", [0, 3, 8, 12, 20])
@pytest.mark.parametrize("b", [67, 133, 150])
def test_item_costs(hopper, force, rng, fmt, b, item_cost):
    """Lists that are equally long, and lists that turn out not to be, when a CTA has looked at them."""
    force(division=divided.shares(64, item_cost=item_cost))
    main, q = paged(rng, fmt, b, 1, 1000, 64), queries(rng, b, 1, 64, fmt.d_qk)
    check_decode(hopper, fmt, q, main, num_splits=None)
    main.indices[b // 2 :, :, 300:] = -1
    check_decode(hopper, fmt, q, main, num_splits=None)


@FORMATS
@HEADS
@pytest.mark.parametrize("gap", [1, 2, 8])
def test_alignment_of_results(hopper, evenly, rng, fmt, gap):
    """Rows of 512 + `gap` values begin at multiples of 2, 4 and 16 bytes."""
    main, q = paged(rng, fmt, 45, 1, 390, 64), queries(rng, 45, 1, 72, fmt.d_qk)
    check_decode(hopper, fmt, q, main, out_gaps=(0, 0, 0, gap))


@FORMATS
def test_same_bits_every_time(hopper, evenly, rng, fmt):
    main, q = paged(rng, fmt, 37, 1, 1000, 64), queries(rng, 37, 1, 64, fmt.d_qk)
    check_same_bits(hopper, q, main)


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_replays_with_other_lists(hopper, evenly, rng):
    """Each replay divides anew, by where -1 then begins."""
    main = paged(rng, oracle.V32, 40, 1, 700, 64, invalid=0)
    check_replays_with_other_lists(rng, oracle.V32, queries(rng, 40, 1, 128, 576), main, short)


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_replays_with_other_lengths(hopper, evenly, rng):
    """Each replay divides anew, by the lengths that then lie in memory."""
    main, extra = divided.unequal(rng, oracle.V4, [300])
    check_replays_with_other_lengths(rng, oracle.V4, queries(rng, 70, 2, 64, 512), main, extra)


@FORMATS
def test_two_gpus_in_turn(two_gpus, hopper, evenly, rng, fmt):
    check_two_gpus_in_turn(hopper, rng, fmt)
