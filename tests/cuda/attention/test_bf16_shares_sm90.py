"""`bf16_shares_sm90`: bf16 rows of a call, divided evenly over CTAs, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ... import oracle
from ...cases import (
    LIFT,
    check_batches,
    check_decode,
    check_prefill,
    check_same_bits,
    every_batch,
    lift_logits,
    paged,
    prefill_inputs,
    queries,
    sinks,
)  # fmt: skip
from . import evenly
from .replays import check_replays_with_other_lengths
from .two_gpus import check_two_gpus_in_turn

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)

KERNEL = "bf16_shares_sm90"


@pytest.fixture
def small_splits(force) -> None:
    """Splits of a pair of tiles and more: small calls are divided over many CTAs as well."""
    force(division=evenly.shares(64))


@FORMATS
@evenly.every_size
def test_sizes(hopper, small_splits, rng, fmt, b, s_q, h_q, topk, block_size):
    main = paged(rng, fmt, b, s_q, topk, block_size)
    q = queries(rng, b, s_q, h_q, fmt.d_qk)
    check_decode(hopper, fmt, q, main, sink=sinks(rng, h_q), num_splits=None, out_gaps=(0, 1, 2, 3))


@FORMATS
@every_batch
def test_every_batch(hopper, small_splits, rng, fmt, batches):
    check_batches(hopper, rng, fmt, batches)


@FORMATS
def test_items_stay_whole(hopper, force, rng, fmt):
    evenly.check_items_stay_whole(hopper, rng, force, fmt, 64)


@FORMATS
@evenly.unequal_lengths
def test_lengths(hopper, small_splits, rng, fmt, lengths):
    main = paged(rng, fmt, 70, 2, 300, 64, lengths=True)
    main.length[:] = np.resize(lengths, 70)
    q, sm_scale = queries(rng, 70, 2, 72, fmt.d_qk), 0.05
    lift_logits(q, main.cache, sm_scale)
    check_decode(hopper, fmt, q, main, sm_scale=sm_scale, sink=sinks(rng, 72) + LIFT, num_splits=None)


@FORMATS
@pytest.mark.parametrize("num_splits", [2, 3, 7, 33])
@pytest.mark.parametrize("lengths", [False, True])
def test_splits_that_are_asked_for(hopper, rng, fmt, num_splits, lengths):
    """Some have no rows."""
    main = paged(rng, fmt, 5, 2, 500, 64, lengths=lengths)
    check_decode(hopper, fmt, queries(rng, 5, 2, 33, fmt.d_qk), main, sink=sinks(rng, 33), num_splits=num_splits)


@FORMATS
@pytest.mark.parametrize(("b", "h_q", "lengths"), [(40, 64, False), (66, 33, True), (20, 128, True)])
def test_equal_splits_that_are_chosen(hopper, rng, fmt, b, h_q, lengths):
    """Two or three of a query, of decode and of prefill; with lengths some are empty, or all of a query are."""
    main = paged(rng, fmt, b, 1, 900, 64, lengths=lengths)
    if lengths:
        main.length[:5] = 0, 60, 129, 257, 900
    check_decode(hopper, fmt, queries(rng, b, 1, h_q, fmt.d_qk), main, sink=sinks(rng, h_q), num_splits=None)
    check_prefill(hopper, *prefill_inputs(rng, b, h_q, fmt.d_qk, 1000, 900), 0.05, sinks(rng, h_q))


@pytest.mark.parametrize("d_qk", [576, 512])
def test_prefill(hopper, small_splits, rng, d_qk):
    """It writes the largest logits, too."""
    check_prefill(hopper, *prefill_inputs(rng, 150, 100, d_qk, 700, 600), 0.05, sinks(rng, 100))


@FORMATS
def test_nothing_valid(hopper, small_splits, rng, fmt):
    evenly.check_nothing_valid(hopper, rng, fmt, 64)


@FORMATS
def test_same_bits_every_time(hopper, small_splits, rng, fmt):
    main, q = paged(rng, fmt, 37, 1, 1000, 64), queries(rng, 37, 1, 64, fmt.d_qk)
    check_same_bits(hopper, q, main)


def test_replays_with_other_lengths(hopper, small_splits, rng):
    """Each replay divides anew, by the lengths that then lie in memory."""
    main = paged(rng, oracle.BF16_576, 70, 2, 300, 64, lengths=True)
    check_replays_with_other_lengths(rng, oracle.BF16_576, queries(rng, 70, 2, 64, 576), main)


def test_two_gpus_in_turn(two_gpus, hopper, small_splits, rng):
    check_two_gpus_in_turn(hopper, rng, oracle.BF16_576)
