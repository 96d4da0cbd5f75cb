"""Index lists and their lengths: numbers that name nothing, and results with memory between their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .kinds import NumPy, gapped

BLOCK_SIZES = [1, 2, 61, 64, 256]
EXTREMES = np.array([-1, -2, -(2**31), 2**31 - 1])


def hostile(rng: np.random.Generator, values: np.ndarray, share: float) -> np.ndarray:
    """A part of the values replaced by numbers at the ends of int32."""
    return np.where(rng.random(values.shape) < share, rng.choice(EXTREMES, values.shape), values).astype(np.int32)


def behind(kind, whole, shape: tuple[int, int], gap: int) -> np.ndarray:
    """The entries between the rows of an int32 array that was made with `gapped`."""
    return kind.take(whole).view(np.int32).reshape(shape[0], shape[1] + gap)[:, shape[1] :]


def lists_for(kind, tokens: int, width: int, gap: int):
    """Poisoned `out` [tokens, width] with gaps, `lens`, and the allocation behind `out`."""
    out, whole = kind.put_with_allocation(gapped(np.full((tokens, width), 77, np.int32), 0, gap))
    return out, kind.put(np.full(tokens, 77, np.int32)), whole


def check_lists(
    kind: NumPy, call: Callable[..., tuple[Any, Any]], want: np.ndarray, want_lens: np.ndarray, gap: int
) -> None:
    """What a call makes, and what it writes into a given `out` and `lens` and nowhere beside them."""
    out, lens, whole = lists_for(kind, *want.shape, gap)
    got = call(out=out, lens=lens)
    assert got[0] is out
    assert got[1] is lens
    for rows, counts in (got, call()):
        assert kind.is_mine(rows)
        np.testing.assert_array_equal(kind.take(rows), want)
        np.testing.assert_array_equal(kind.take(counts), want_lens)
    if len(want):
        assert (behind(kind, whole, want.shape, gap) == -1).all(), "memory between the rows was written"
