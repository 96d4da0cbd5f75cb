"""`backward_rows` on an emulated GPU: sums over many queries and few, in chunks and to what is there."""

from __future__ import annotations

import numpy as np
import pytest

from ..backward import FLOAT32, check, check_bits_whatever, inputs
from ..cases import sinks
from ..kinds import BF16
from ..ops import test_backward as of_operation
from .again import again


def test_chunks(kind, rng):
    """Of one query, of some, of all: the same bits. Two blocks of heads contribute."""
    a = inputs(rng, 9, 70, 576, 80, 50)._replace(sink=sinks(rng, 70))
    check_bits_whatever(kind, a, (1, 700_000, 1_500_000))


@pytest.mark.parametrize(("dtype", "gaps", "h_q"), [(BF16, None, 70), (FLOAT32, (0, 0, 8), 4), (BF16, (2, 0, 1), 128)])
def test_chunks_are_right(kind, rng, dtype, gaps, h_q):
    check(kind, inputs(rng, 6, h_q, 512, 50, 40), gaps, dtype, max_workspace_bytes=250_000)


def test_crowded_range(kind, rng):
    """More contributions to a range than are listed at a time, from more queries than are looked at at a time."""
    a = inputs(rng, 130, 2, 576, 40, 12, invalid=0)
    lists = a.indices.copy()
    live = np.unique(lists)
    lists[:, :, :9] = rng.choice(live[live < 16]) if (live < 16).any() else live[0]
    check(kind, a._replace(indices=lists))


test_same_lists_and_rows = again(of_operation.test_same_lists_and_rows)


def test_accumulate(kind, rng):
    of_operation.test_accumulate(kind, rng)
    of_operation.test_accumulated_bits(kind, rng, int(rng.choice([7, 12])))
