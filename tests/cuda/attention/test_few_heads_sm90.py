"""`few_heads_sm90`, for bf16 rows, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import pytest

from ... import oracle
from ...cases import (
    check_decode,
    check_prefill,
    check_unequal_prefill,
    paged,
    prefill_inputs,
    queries,
    sinks,
    with_holes,
)
from .replays import check_replays_with_other_lengths

pytestmark = pytest.mark.gpu

KERNEL = "few_heads_sm90"


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"),
    [
        (1, 1, 1),
        (3, 7, 63),
        (2, 8, 64),
        (1, 16, 65),
        (3, 33, 127),
        (2, 64, 129),
        (1, 128, 2100),
        (300, 16, 130),
        (300, 32, 70),
    ],
)
def test_prefill(hopper, rng, s_q, h_q, topk, d_qk):
    """Also where by itself a call would run another kernel."""
    check_prefill(hopper, *prefill_inputs(rng, s_q, h_q, d_qk, 97, topk), 0.05)


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("s_q", [40, 700])
def test_sinks_lengths_and_strides(hopper, rng, s_q, d_qk):
    check_unequal_prefill(hopper, rng, s_q, 13, d_qk)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 17, None])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "block_size"),
    [
        (1, 1, 1, 1, 1),
        (3, 1, 7, 63, 2),
        (1, 2, 8, 64, 61),
        (3, 1, 16, 65, 64),
        (2, 2, 12, 1000, 256),
        (3, 1, 40, 130, 64),
    ],
)
def test_decode(hopper, rng, fmt, b, s_q, h_q, topk, block_size, num_splits):
    """Also where by itself a call would run another kernel. 17 splits are more than a cluster holds."""
    main = paged(rng, fmt, b, s_q, topk, block_size, lengths=True)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q), num_splits=num_splits)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 17, None])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk"), [(7, 1, 7, 1000), (3, 2, 16, 2048), (5, 3, 8, 65), (2, 1, 33, 700), (140, 1, 12, 63)]
)
def test_tiles_without_an_entry(hopper, rng, fmt, b, s_q, h_q, topk, num_splits):
    main = paged(rng, fmt, b, s_q, topk, 64, lengths=bool(rng.integers(2)))
    with_holes(rng, main)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q), num_splits=num_splits)


@pytest.mark.parametrize("b", [3, 70])
def test_replays_with_other_lengths(hopper, rng, b):
    """A captured graph of two calls, run again with other lengths in memory."""
    main = paged(rng, oracle.BF16_576, b, 2, 300, 64, lengths=True)
    check_replays_with_other_lengths(rng, oracle.BF16_576, queries(rng, b, 2, 12, 576), main, times=2)
