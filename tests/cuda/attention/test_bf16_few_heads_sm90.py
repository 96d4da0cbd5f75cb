"""`bf16_few_heads_sm90`, for bf16 rows, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ... import oracle
from ...cases import (
    LIFT,
    check_decode,
    check_prefill,
    check_unequal_prefill,
    lift_logits,
    off_zero,
    paged,
    prefill_inputs,
    queries,
    sinks,
    with_holes,
)
from .replays import check_replays_with_other_lengths

pytestmark = pytest.mark.gpu

KERNEL = "bf16_few_heads_sm90"


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
        (300, 8, 64),
        (300, 16, 130),
        (300, 32, 70),
        (90, 64, 70),
    ],
)
def test_prefill(hopper, rng, s_q, h_q, topk, d_qk):
    """Split, and unsplit with one and (300 and 90 queries) with two queries a CTA."""
    check_prefill(hopper, *prefill_inputs(rng, s_q, h_q, d_qk, 97, topk), 0.05)


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("s_q", [40, 700])
def test_sinks_lengths_and_strides(hopper, rng, s_q, d_qk):
    """700 queries: warpgroups take several each, the longest first, some of them without a row."""
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
        (150, 1, 16, 70, 64),
    ],
)
def test_decode(hopper, rng, fmt, b, s_q, h_q, topk, block_size, num_splits):
    """17 splits are more than a cluster holds; 150 queries are more than a GPU has multiprocessors."""
    main = paged(rng, fmt, b, s_q, topk, block_size, lengths=True)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, sink=sinks(rng, h_q), num_splits=num_splits)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("b", "h_q", "topk"), [(1, 7, 130), (3, 16, 700), (150, 16, 300), (140, 30, 1000)])
@pytest.mark.parametrize("lengths", [False, True])
def test_two_queries_a_cta(hopper, force, rng, fmt, b, h_q, topk, lengths):
    """Also where that is not the fastest."""
    force(division="whole(queries=2)")
    main = paged(rng, fmt, b, 1, topk, 64, lengths=lengths)
    check_decode(hopper, fmt, queries(rng, b, 1, h_q, fmt.d_qk), main, sink=sinks(rng, h_q))


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("splits", "cluster"), [(4, 2), (6, 3)])
def test_clusters_that_leave_partial_results(hopper, force, rng, fmt, splits, cluster):
    """Two clusters work on a query at a time; `combine` merges what they leave."""
    force(division=f"clusters(splits={splits}, cluster={cluster})")
    main = paged(rng, fmt, 1, 1, 700, 64)
    check_decode(hopper, fmt, queries(rng, 1, 1, 12, fmt.d_qk), main, sink=sinks(rng, 12))


def test_two_caches(hopper, rng):
    main, extra = paged(rng, oracle.BF16_576, 5, 2, 130, 64, gap=1), paged(rng, oracle.BF16_576, 5, 2, 70, 2)
    check_decode(hopper, oracle.BF16_576, queries(rng, 5, 2, 12, 576), main, extra, num_splits=2)


def test_queries_without_rows_between_others(hopper, rng):
    """Warpgroups take several queries each. Their order is that of the main lists, which are all empty."""
    b = 800
    main, extra = paged(rng, oracle.BF16_576, b, 1, 64, 64), paged(rng, oracle.BF16_576, b, 1, 130, 64)
    main.length = np.zeros(b, np.int32)
    extra.length = np.where(rng.random(b) < 0.5, 0, rng.integers(65, 131, b)).astype(np.int32)
    check_decode(hopper, oracle.BF16_576, queries(rng, b, 1, 16, 576), main, extra, num_splits=1)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "num_splits"),
    [(3, 2, 7, 1000, 1), (9, 1, 16, 700, 2), (5, 1, 40, 1300, 4), (2, 1, 12, 2100, 17), (150, 1, 30, 300, 1),
     (150, 2, 8, 500, 1)],
)  # fmt: skip
@pytest.mark.parametrize("two_caches", [False, True])
def test_empty_tiles(hopper, rng, fmt, b, s_q, h_q, topk, num_splits, two_caches):
    """Tiles without a valid entry anywhere: of one CTA, of a cluster, of splits along the grid, of two queries."""
    main = paged(rng, fmt, b, s_q, topk, 64, lengths=bool(rng.integers(2)))
    caches = [main, paged(rng, fmt, b, s_q, 200, 64)] if two_caches else [main]
    for cache in caches:
        with_holes(rng, cache)
    q = off_zero(fmt, queries(rng, b, s_q, h_q, fmt.d_qk), *caches)
    check_decode(hopper, fmt, q, *caches, num_splits=num_splits)


@pytest.mark.parametrize(("s_q", "h_q"), [(40, 16), (300, 8), (300, 32)])
def test_empty_tiles_of_prefill(hopper, rng, s_q, h_q):
    """With one query a CTA, and with two."""
    q, kv, indices = prefill_inputs(rng, s_q, h_q, 576, 500, 700)
    holes = rng.random((s_q, 1, 11)) < rng.choice([0, 0.1, 0.5, 0.9, 1], (s_q, 1, 1))
    indices[np.repeat(holes, 64, -1)[..., :700]] = -1
    lift_logits(q, kv, 0.02)
    check_prefill(hopper, q, kv, indices, 0.02, sinks(rng, h_q) + LIFT)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("b", [3, 70])
def test_replays_with_other_lengths(hopper, rng, fmt, b):
    """A captured graph of two calls, run again with other lengths in memory."""
    main = paged(rng, fmt, b, 2, 300, 64, lengths=True)
    check_replays_with_other_lengths(rng, fmt, queries(rng, b, 2, 12, fmt.d_qk), main, times=2)
