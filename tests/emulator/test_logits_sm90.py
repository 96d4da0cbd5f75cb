"""`logits_sm90` on an emulated Hopper GPU, at sizes that the operations' example calls do not have."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import (
    indexer_logits,
    paged_indexer_logits,
    paged_indexer_schedule,
    select_rows,
    select_rows_paged,
)

from ..ops.test_logits import paged, put, ragged
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("clean", [False, True])
def test_logits_of_rows(kind, rng, clean: bool) -> None:
    """The same bits as NumPy's where those are exact, -inf or nothing for keys that are not seen."""
    inputs = ragged(rng, 23, 333, 40, exact=True)
    expected = indexer_logits(**inputs)
    there, out = put(kind, inputs), kind.put(np.full((23, 335), 7, np.float32))
    indexer_logits(**there, clean=clean, out=out[:, :333])
    _assert_same(kind.take(out), expected, clean)
    np.testing.assert_array_equal(kind.take(select_rows(**there, k=63)), select_rows(**inputs, k=63))


@pytest.mark.parametrize(("n", "heads", "shares"), [(1, 64, None), (1, 64, 18), (2, 48, 5)])
def test_logits_of_pages(kind, rng, n: int, heads: int, shares: int | None) -> None:
    """NaN in memory beyond requests' ends does not show."""
    inputs = paged(rng, 5, n, heads, 64, 700, exact=True)
    inputs["kv_cache"] = np.ascontiguousarray(inputs["kv_cache"])
    inputs["block_table"][rng.random(inputs["block_table"].shape) < 0.1] = -1
    there, schedule = put(kind, inputs), None
    if shares is not None:
        of_step = (there["context_lens"], there["block_table"], 700, 64, shares)
        schedule = paged_indexer_schedule(*of_step)
    out = kind.put(np.full((5 * n, 703), 7, np.float32))
    paged_indexer_logits(**there, schedule=schedule, clean=False, out=out[:, :700])
    _assert_same(kind.take(out), paged_indexer_logits(**inputs), False)
    got = select_rows_paged(**there, schedule=schedule, k=63, slots=True)
    np.testing.assert_array_equal(kind.take(got), select_rows_paged(**inputs, k=63, slots=True))


def _assert_same(got: np.ndarray, expected: np.ndarray, clean: bool) -> None:
    """Entries were 7 before, as are those behind the rows' ends."""
    width = expected.shape[1]
    assert (got[:, width:] == 7).all()
    left = np.isneginf(expected) & (got[:, :width] == 7)
    assert not (clean and left.any())
    np.testing.assert_array_equal(np.where(left, expected, got[:, :width]), expected)
