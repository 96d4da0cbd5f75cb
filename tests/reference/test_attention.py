"""How fast the reference is; what it computes is tested through the public operations."""

from __future__ import annotations

import time

import numpy as np

import cupy_mla
from cupy_mla.reference import attention

from ..cases import normal


def test_a_v32_decode_step_takes_under_two_seconds(rng):
    """4 queries, 128 heads, 2048 rows each: the best of two runs, on whatever cores there are."""
    cache = np.zeros((100, 64, 656), np.uint8)
    rows = normal(rng, 6400, 576)
    cupy_mla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, np.arange(6400))
    q, indices = normal(rng, 4, 1, 128, 576), rng.integers(0, 6400, (4, 1, 2048), np.int32)

    def seconds() -> float:
        start = time.perf_counter()
        cupy_mla.sparse_decode(q, cache, indices, 0.04)
        return time.perf_counter() - start

    assert min(seconds(), seconds()) < 2


def test_rows_that_no_entry_names_are_not_unpacked(rng, monkeypatch):
    """A cache far larger than the list costs nothing."""
    unpacked = []

    def counted(cache, layout, slots, *scale):
        unpacked.append(len(slots))
        return unpack(cache, layout, slots, *scale)

    unpack = attention.rows_of
    monkeypatch.setattr(attention, "rows_of", counted)
    indices = np.array([[[5, -1, 7, 7, 99999, 3]]], np.int32)
    cupy_mla.sparse_decode(
        normal(rng, 1, 1, 2, 576),
        np.zeros((50, 64, 656), np.uint8),
        indices,
        0.04,
        topk_length=np.array([5], np.int32),
    )
    assert unpacked == [3]
