"""Index lists of the sliding window against plain loops, over every kind of array."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cupy_mla.ops.swa import combine_topk_swa_indices, compute_prefill_gather_lens, compute_swa_indices_and_lens
from tests import oracle_v4
from tests.batches import queries, random_queries, table_for
from tests.kinds import gapped
from tests.lists import BLOCK_SIZES, check_lists, hostile

# --- compute_swa_indices_and_lens -----------------------------------------------------------------------------


def check_swa(
    kind, starts, seq_lens, token_to_req, valid, table, block_size: int, window: int, gap: int = 3,
    replay_start=None, visible=(None, None), max_image_tokens: int = 0,
) -> None:  # fmt: skip
    want, want_lens = oracle_v4.swa_indices_and_lens(
        starts, seq_lens, token_to_req, valid, table, block_size, window, replay_start, *visible, max_image_tokens
    )
    inputs = [kind.put(a) for a in (starts, seq_lens, token_to_req, valid, gapped(table, 0, 1))]
    names = ("replay_start", "left_visible", "right_visible")
    more = {n: kind.put(a) for n, a in zip(names, (replay_start, *visible), strict=True) if a is not None}
    more["max_image_tokens"] = max_image_tokens
    call = partial(compute_swa_indices_and_lens, *inputs, block_size, window, **more)
    check_lists(kind, call, want, want_lens, gap)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [1, 5, 128])
def test_swa(kind, rng, block_size: int, window: int) -> None:
    """Uneven query lengths, sequences shorter and longer than the window, padding tokens, first tokens."""
    batch = random_queries(rng, 6, 4, 300)
    table = table_for(rng, 6, 300, block_size)
    valid = rng.random(batch.tokens) < 0.8
    check_swa(kind, batch.query_start_loc, batch.seq_lens, batch.token_to_req, valid, table, block_size, window)


def test_swa_at_the_edges(kind, rng) -> None:
    """The first token of a sequence, a sequence one short of the window, of its length, and one beyond."""
    batch = queries([1, 2, 1, 1, 3], [1, 2, 7, 8, 9])
    table = table_for(rng, 5, 9, 4)
    valid = np.ones(batch.tokens, bool)
    check_swa(kind, batch.query_start_loc, batch.seq_lens, batch.token_to_req, valid, table, 4, 8)


def test_swa_of_hostile_numbers(kind, rng) -> None:
    """Requests and blocks that do not exist, a table too narrow: -1 in their places; invalid tokens read nothing."""
    batch = queries([2, 1, 2, 1, 1], [9, 40, 6, 5, 12])
    table = hostile(rng, rng.integers(0, 2**31 - 1, (5, 3)), 0.3)
    valid = np.array([1, 1, 1, 1, 0, 1, 0], bool)
    token_to_req = batch.token_to_req.copy()
    token_to_req[[0, 4, 5]] = [-1, 2**31 - 1, 5]
    check_swa(kind, batch.query_start_loc, batch.seq_lens, token_to_req, valid, table, 4, 8)


@pytest.mark.parametrize(("requests", "width"), [(0, 3), (2, 0)])
def test_swa_nothing(kind, rng, requests: int, width: int) -> None:
    batch = queries([1] * requests, [4] * requests)
    valid = np.ones(batch.tokens, bool)
    table = np.zeros((requests, width), np.int32)
    check_swa(kind, batch.query_start_loc, batch.seq_lens, batch.token_to_req, valid, table, 4, 8)


def test_swa_by_hand(kind) -> None:
    """Two requests: one token at position 5, and two at 1 and 2; window 4, blocks of 2."""
    arrays = ([0, 1, 3], [6, 3], [0, 1, 1])
    inputs = [kind.put(np.array(a, np.int32)) for a in arrays]
    valid, table = kind.put(np.ones(3, bool)), kind.put(np.array([[3, 1, 4], [2, 5, 0]], np.int32))
    slots, lens = compute_swa_indices_and_lens(*inputs, valid, table, 2, 4)
    np.testing.assert_array_equal(kind.take(slots), [[2, 3, 8, 9], [4, 5, -1, -1], [4, 5, 10, -1]])
    np.testing.assert_array_equal(kind.take(lens), [4, 2, 3])


@pytest.mark.parametrize("window", [1, 5, 128])
def test_swa_of_replayed_prefixes(kind, rng, window: int) -> None:
    """Sequences that have rows from a position on: below the window, within it, at the token, behind it."""
    batch = random_queries(rng, 8, 4, 300)
    table, valid = table_for(rng, 8, 300, 61), rng.random(batch.tokens) < 0.9
    start = np.maximum(batch.seq_lens - rng.choice([300, window + 3, window, 2, 1, 0, -5], 8), 0).astype(np.int32)
    arguments = (batch.query_start_loc, batch.seq_lens, batch.token_to_req, valid, table, 61, window)
    check_swa(kind, *arguments, replay_start=start)


def visible_of(rng, batch, most: int) -> tuple[np.ndarray, np.ndarray]:
    """For each token how many positions of an image of at most `most` tokens stand before and behind it; some 0."""
    length = rng.integers(1, most + 1, batch.tokens)
    left = np.minimum(rng.integers(0, length), batch.positions)
    image = rng.random(batch.tokens) < 0.7
    return tuple(np.where(image, part, 0).astype(np.int32) for part in (left, length - 1 - left))


@pytest.mark.parametrize(("window", "most"), [(1, 1), (5, 3), (5, 40), (128, 70)])
def test_swa_of_images(kind, rng, window: int, most: int) -> None:
    """Images shorter and longer than the window, that end with the sequence or would go on behind it."""
    batch = random_queries(rng, 8, 4, 300)
    table, valid = table_for(rng, 8, 300, 64), rng.random(batch.tokens) < 0.9
    arguments = (batch.query_start_loc, batch.seq_lens, batch.token_to_req, valid, table, 64, window)
    visible = visible_of(rng, batch, most)
    check_swa(kind, *arguments, visible=visible, max_image_tokens=most)
    start = (batch.seq_lens // 2).astype(np.int32)
    check_swa(kind, *arguments, visible=visible, max_image_tokens=most, replay_start=start)
    check_swa(kind, *arguments, max_image_tokens=most)


def test_swa_of_hostile_images(kind, rng) -> None:
    """Numbers of visible positions that no image has, and starts of no sequence: no list is longer than it is wide."""
    batch = queries([2, 3, 4], [9, 40, 60])
    extremes = np.array([-(2**31), 2**31 - 1, -1, 50], np.int32)
    visible = tuple(rng.choice(extremes, batch.tokens) for _ in range(2))
    for start in (None, np.array([-(2**31), 2**31 - 1, 57], np.int32)):
        check_swa(
            kind, batch.query_start_loc, batch.seq_lens, batch.token_to_req, np.ones(batch.tokens, bool),
            table_for(rng, 3, 60, 4), 4, 8, replay_start=start, visible=visible, max_image_tokens=6,
        )  # fmt: skip


# --- compute_prefill_gather_lens ------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [0, 1, 5, 300])
@pytest.mark.parametrize("window", [1, 8, 128])
def test_gather_lens(kind, rng, requests: int, window: int) -> None:
    batch = random_queries(rng, requests, 20, 200)
    decodes = int(rng.integers(0, requests + 1))
    want = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, decodes, window)
    seq_lens, starts = kind.put(batch.seq_lens), kind.put(batch.query_start_loc)
    out = kind.put(np.full(requests - decodes, 77, np.int32))
    assert compute_prefill_gather_lens(seq_lens, starts, decodes, window, out=out) is out
    np.testing.assert_array_equal(kind.take(out), want)
    fresh = compute_prefill_gather_lens(seq_lens, starts, decodes, window)
    assert kind.is_mine(fresh)
    np.testing.assert_array_equal(kind.take(fresh), want)
    replay_start = hostile(rng, rng.integers(0, 200, requests), 0.1)
    want = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, decodes, window, replay_start)
    got = compute_prefill_gather_lens(seq_lens, starts, decodes, window, replay_start=kind.put(replay_start))
    np.testing.assert_array_equal(kind.take(got), want)


# --- combine_topk_swa_indices ---------------------------------------------------------------------------------


def check_combine(
    kind, topk_indices, starts, seq_lens, gather_lens, window: int, ratio: int, topk: int, M: int, N: int, gap: int = 2,
    visible=(None, None), max_image_tokens: int = 0,
) -> None:  # fmt: skip
    arguments = (window, ratio, topk, M, N)
    want, want_lens = oracle_v4.combined_indices(
        topk_indices, starts, seq_lens, gather_lens, *arguments, *visible, max_image_tokens
    )
    names = ("left_visible", "right_visible")
    more = {n: kind.put(a) for n, a in zip(names, visible, strict=True) if a is not None}
    more["max_image_tokens"] = max_image_tokens
    inputs = [kind.put(a) for a in (gapped(topk_indices, 0, gap), starts, seq_lens, gather_lens)]
    check_lists(kind, partial(combine_topk_swa_indices, *inputs, *arguments, **more), want, want_lens, gap)


def chosen_rows(rng, batch, ratio: int, topk: int) -> np.ndarray:
    """For each token, some of its complete compressed rows in any order, -1 at the end."""
    chosen = np.full((batch.tokens, topk), -1, np.int32)
    for t, p in enumerate(batch.positions):
        rows = rng.permutation((p + 1) // ratio if ratio else 0)[:topk]
        chosen[t, : len(rows)] = rows
    return chosen


@pytest.mark.parametrize("ratio", [0, 1, 2, 4, 128])
@pytest.mark.parametrize(("topk", "window"), [(0, 128), (1, 1), (20, 9), (64, 64), (130, 128)])
@pytest.mark.parametrize("first_token", [0, 37])
def test_combine(kind, rng, ratio: int, topk: int, window: int, first_token: int) -> None:
    """Offsets of a chunk inside its batch, sequences shorter and longer than window and compression."""
    batch = random_queries(rng, 4, 30, 400)
    chosen = chosen_rows(rng, batch, ratio, topk)
    gather_lens = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, 0, window)
    N = -(-431 // ratio) if topk and ratio else 0
    M = N + window + 30
    starts = batch.query_start_loc + np.int32(first_token)
    check_combine(kind, chosen, starts, batch.seq_lens, gather_lens, window, ratio, topk, M, N)


def test_combine_of_windows_that_were_not_gathered(kind, rng) -> None:
    """Windows that would start before the gathered rows start there: their lists are shorter, not full of -1."""
    batch = random_queries(rng, 5, 20, 300)
    query_lens = np.diff(batch.query_start_loc)
    gather_lens = (query_lens + np.minimum(batch.seq_lens - query_lens, rng.integers(0, 12, 5))).astype(np.int32)
    check_combine(
        kind, chosen_rows(rng, batch, 2, 8), batch.query_start_loc, batch.seq_lens, gather_lens, 9, 2, 8, 300, 200
    )


@pytest.mark.parametrize(("window", "most"), [(1, 1), (5, 40), (128, 70)])
def test_combine_of_images(kind, rng, window: int, most: int) -> None:
    """Images that the chunk cuts on the left or on the right: what was not gathered or does not exist is not seen."""
    batch = random_queries(rng, 5, 60, 300)
    gather_lens = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, 0, window)
    for visible in (visible_of(rng, batch, most), (None, None)):
        check_combine(
            kind, chosen_rows(rng, batch, 1, 30), batch.query_start_loc, batch.seq_lens, gather_lens, window, 1, 30,
            600, 310, visible=visible, max_image_tokens=most,
        )  # fmt: skip
    extremes = np.array([-(2**31), 2**31 - 1, -1, 50], np.int32)
    hostile_ones = tuple(rng.choice(extremes, batch.tokens) for _ in range(2))
    check_combine(
        kind, chosen_rows(rng, batch, 1, 30), batch.query_start_loc, batch.seq_lens, gather_lens, window, 1, 30,
        320, 310, visible=hostile_ones, max_image_tokens=most,
    )  # fmt: skip


def test_combine_at_the_edges(kind, rng) -> None:
    """Tokens on both sides of a compression boundary, a sequence exactly on it, the first token of a sequence."""
    batch = queries([1, 4, 5, 8], [1, 4, 9, 8])
    gather_lens = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, 0, 6)
    check_combine(
        kind, chosen_rows(rng, batch, 4, 2), batch.query_start_loc, batch.seq_lens, gather_lens, 6, 4, 2, 20, 3
    )


def test_combine_of_hostile_numbers(kind, rng) -> None:
    """Compressed rows that do not exist, tails gathered too short, tokens of no request: never another's row."""
    batch = queries([3, 1, 5], [9, 40, 6])
    chosen = hostile(rng, np.concatenate([chosen_rows(rng, batch, 4, 8), np.zeros((2, 8), np.int32)]), 0.4)
    gather_lens = np.array([2, 500, -1], np.int32)
    check_combine(kind, chosen, batch.query_start_loc, batch.seq_lens, gather_lens, 8, 4, 8, 30, 10)


def test_combine_nothing(kind) -> None:
    none = np.zeros(0, np.int32)
    check_combine(kind, np.zeros((0, 4), np.int32), np.zeros(1, np.int32), none, none, 8, 4, 4, 20, 5)
    check_combine(kind, np.zeros((3, 4), np.int32), np.zeros(1, np.int32), none, none, 8, 4, 4, 20, 5)


def test_combine_by_hand(kind) -> None:
    """Second request of a chunk that starts at token 10: position 6 of 7, ratio 4, window 3, M = 10, N = 4."""
    inputs = [
        kind.put(np.array(a, np.int32)) for a in ([[9, 9], [0, 9]], [10, 11, 12], [3, 7], [3, 3])
    ]  # fmt: skip
    rows, lens = combine_topk_swa_indices(*inputs, 3, 4, 2, 10, 4)
    assert kind.take(rows).shape == (2, 128)
    np.testing.assert_array_equal(kind.take(rows)[:, :5], [[4, 5, 6, -1, -1], [10, 14, 15, 16, -1]])
    assert (kind.take(rows)[:, 5:] == -1).all()
    np.testing.assert_array_equal(kind.take(lens), [3, 4])
