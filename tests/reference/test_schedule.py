"""Splitting a query's rows into parts, and merging the parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla.reference.schedule import TILE, merge_partials, split_rows

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@given(st.integers(0, 3000), st.integers(1, 100))
def test_parts_are_consecutive_whole_tiles(rows, num_splits):
    parts = split_rows(rows, num_splits)
    assert len(parts) == num_splits
    assert parts[0][0] == 0
    assert parts[-1][1] == rows
    assert all(stop == start for (_, stop), (start, _) in pairwise(parts))
    assert all(start % TILE == 0 for start, stop in parts if stop > start)
    tiles = [-(-(stop - start) // TILE) for start, stop in parts]
    assert max(tiles) - min(tiles) <= 1


@pytest.mark.parametrize(
    ("rows", "num_splits", "expected"),
    [(0, 2, [(0, 0), (0, 0)]), (65, 1, [(0, 65)]), (65, 2, [(0, 32), (32, 65)]), (33, 3, [(0, 0), (0, 32), (32, 33)])],
)
def test_parts(rows, num_splits, expected):
    assert split_rows(rows, num_splits) == expected


def softmax_sum(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 softmax over axis 1 of logits [h, n] applied to values [n, d]; an empty list as merging wants it."""
    if logits.shape[1] == 0:
        return np.zeros((len(logits), values.shape[1])), np.full(len(logits), -np.inf)
    lse = np.log(np.exp(logits).sum(axis=1))
    return np.exp(logits - lse[:, None]) @ values, lse


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_merge_is_the_softmax_over_all_rows(seed, sizes):
    rng = np.random.default_rng(seed)
    edges = np.cumsum([0, *sizes])
    logits, values = 5 * rng.standard_normal((3, edges[-1])), rng.standard_normal((edges[-1], 6))
    parts = [softmax_sum(logits[:, a:b], values[a:b]) for a, b in pairwise(edges)]
    out, lse = merge_partials([o.astype(np.float32) for o, _ in parts], [part_lse for _, part_lse in parts])
    want_out, want_lse = softmax_sum(logits, values)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_merge_of_merges_is_the_merge(rng):
    out, lse = rng.standard_normal((6, 4, 5), np.float32), 9 * rng.standard_normal((6, 4))
    lse[1:3] = -np.inf
    out[1:3] = 0
    halves = [merge_partials(out[part], lse[part]) for part in (slice(0, 1), slice(1, 3), slice(3, 6))]
    nested = merge_partials([o for o, _ in halves], [part_lse for _, part_lse in halves])
    for got, want in zip(nested, merge_partials(out, lse), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_merge_survives_parts_far_apart():
    """exp of either lse alone would overflow or vanish."""
    out, lse = merge_partials(np.array([[[1.0]], [[2.0]]], np.float32), np.array([[-2000.0], [3000.0]]))
    assert (out[0, 0], lse[0]) == (2, 3000)


def test_merge_of_nothing_is_nothing():
    out, lse = merge_partials(np.zeros((3, 2, 4), np.float32), np.full((3, 2), -np.inf))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_merge_hands_on_nan():
    out, lse = merge_partials(np.array([[[np.nan]], [[2.0]]], np.float32), np.array([[np.nan], [1.0]]))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
