"""`convert` on an emulated Hopper GPU, at odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

from ..ops import test_indices as of_operation
from ..ops.test_indices import check
from .again import again


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(
    ("tokens", "k", "width"),
    [(1, 1, 1), (7, 2049, 40), (10, 1500, 90), (40, 5, 300), (120, 2052, 700), (133, 31, 5000), (150, 100, 13_000)],
)
def test_slots(kind, rng, tokens: int, k: int, width: int) -> None:
    """Lists with holes, whole, empty, of one entry; tokens of decodes and of prefills. Rows of the table are copied to
    shared memory where a CTA has three tokens or more and the table is not too wide."""
    block_size = int(rng.choice([1, 3, 64]))
    positions = rng.integers(-1, width * block_size + 3, (tokens, k), dtype=np.int32)
    positions[rng.random(tokens) < 0.2] = -1
    positions[np.arange(k) >= rng.integers(0, 2 * k + 1, tokens)[:, None]] = -1
    request = np.sort(rng.integers(-1, 4, tokens, dtype=np.int32))
    table = rng.integers(-1, 90, (3, width), dtype=np.int32)
    prefills, starts = rng.integers(-3, 3, tokens, dtype=np.int32), np.array([5, 2**31 - 9], np.int32)
    check(kind, request, table, positions, block_size)
    check(kind, request, table, positions, block_size, prefills, starts)
    check(kind, request, table, positions, block_size, prefills, starts, stride=block_size + 5)


test_in_place = pytest.mark.long(sample=1)(
    again(of_operation.test_to_the_front_in_place, (24, 0), (5001, 3), (4100, 0))
)
