"""`backward_lists` on an emulated GPU: what it makes of lists decides which rows get gradients, and their bits."""

from __future__ import annotations

import numpy as np
import pytest

from ..backward import FLOAT32, check, check_bits_whatever, inputs


@pytest.mark.long
def test_many_rows(kind, rng):
    """Row numbers of three digits."""
    check(kind, inputs(rng, 2, 1, 512, 66_000, 40), dtype=FLOAT32)


@pytest.mark.parametrize(("topk", "s_kv"), [(1, 1), (1, 300), (300, 256), (300, 257), (1000, 40)])
def test_lists(kind, rng, topk, s_kv):
    """Of one entry, shorter and longer than the rows are many, of one digit and two; one names one row alone."""
    a = inputs(rng, 3, 2, 512, s_kv, topk)
    a.indices[1] = a.entries(0)[0] if len(a.entries(0)) else -1
    check(kind, a)


def test_order_of_lists(kind, rng):
    """It changes no bit."""
    a = inputs(rng, 3, 5, 576, 500, 300)
    check_bits_whatever(kind, a, ())
    shuffled = a._replace(indices=rng.permuted(a.indices, axis=-1))
    check_bits_whatever(kind, shuffled, ())


def test_lengths(kind, rng):
    a = inputs(rng, 5, 3, 512, 90, 70)
    check(kind, a._replace(length=np.array([-3, 0, 1, 70, 1000], np.int32)))
