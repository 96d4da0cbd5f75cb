"""`short_rows` on an emulated GPU, and `topk` of rows as short in wider arrays: all that a row has is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import select_rows, select_rows_paged, topk_indices
from cupy_mla.layouts import INDEXER_FP8
from tests import oracle_indexer
from tests.kinds import BF16, POISON, gapped, poisoned

from ..ops import test_candidates as candidates
from ..ops.test_logits import paged, put, ragged


def all_of(lens: np.ndarray, k: int) -> np.ndarray:
    """Positions 0 to each length, and -1."""
    at = np.arange(k, dtype=np.int32)
    return np.where(at < np.asarray(lens).reshape(-1, 1), at, -1)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(("k", "width"), [(1, 1), (63, 60), (64, 0), (2048, 2047), (4096, 2048), (2051, 2051)])
def test_whole_and_by_ranges(kind, rng, k: int, width: int, dtype) -> None:
    """Of logits that are NaN, into rows of any stride; nothing else is written."""
    logits = kind.put(np.full((9, width), np.nan, dtype))
    starts, ends = (rng.integers(-2, width + 3, 9, dtype=np.int32) for _ in range(2))
    out, whole = kind.put_with_allocation(gapped(poisoned((9, k), np.int32), 0, int(rng.integers(0, 5))))
    topk_indices(logits, k, kind.put(starts), kind.put(ends), out=out)
    first = np.clip(starts, 0, width)
    np.testing.assert_array_equal(kind.take(out), all_of(np.clip(ends, first, width) - first, k))
    assert (kind.take(whole).reshape(9, -1)[:, 4 * k :] == POISON).all()
    np.testing.assert_array_equal(kind.take(topk_indices(logits, k)), all_of(np.full(9, width), k))


@pytest.mark.parametrize("width", [100, 260])
@pytest.mark.parametrize(("block_size", "n"), [(1, 1), (4, 2), (15, 3), (64, 1), (64, 2)])
def test_slots_of_requests(kind, rng, block_size: int, n: int, width: int) -> None:
    """By lengths of requests and of tokens, of tables with blocks that are missing or do not fit, in both kernels."""
    k, b = 101, 4
    inputs = paged(rng, b, n, 8, block_size, width)
    table = inputs["block_table"]
    table[rng.random(table.shape) < 0.1] = -1
    for lens in (rng.integers(0, k + 1, b), rng.integers(0, k + 1, (b, n))):
        inputs["context_lens"] = lens.astype(np.int32)
        seen = [oracle_indexer.seen_keys(inputs["context_lens"], n, r, j) for r in range(b) for j in range(n)]
        positions = all_of(np.minimum(seen, width), k)
        slots = [oracle_indexer.slots(row, i // n, table, block_size) for i, row in enumerate(positions)]
        got = select_rows_paged(**put(kind, inputs), k=k)
        np.testing.assert_array_equal(kind.take(got), positions)
        got = select_rows_paged(**put(kind, inputs), k=k, slots=True)
        np.testing.assert_array_equal(kind.take(got), slots)
    topk_indices(kind.put(np.zeros((1, 1), np.float32)), 1)


@pytest.mark.parametrize("block_size", [1, 4, 15, 64])
def test_slots_of_rows(kind, rng, block_size: int) -> None:
    """Of requests that the table has and of others; the widest table entry makes no slot."""
    inputs = ragged(rng, 7, 130, 8)
    table = rng.integers(-1, 50, (3, -(-100 // block_size)), dtype=np.int32)
    table[0, 0] = 2**31 - 1
    req_id = rng.integers(-1, 4, 7, dtype=np.int32)
    first = np.clip(inputs["starts"], 0, 130)
    positions = all_of(np.clip(inputs["ends"], first, 130) - first, 137)
    got = select_rows(
        **put(kind, inputs), k=137, req_id=kind.put(req_id), block_table=kind.put(table), block_size=block_size
    )
    expected = [oracle_indexer.slots(row, int(r), table, block_size) for row, r in zip(positions, req_id, strict=True)]
    np.testing.assert_array_equal(kind.take(got), expected)


def test_candidates(kind, rng) -> None:
    """Of as many candidates as are wanted, or fewer, and their blocks where as many are wanted as there are."""
    candidates.test_select_candidate_rows(kind, rng, 500, INDEXER_FP8.token_bytes)
    candidates.test_blocks(kind, rng, 300, 64)


def test_logits_of_short_rows_are_not_made(emulated, kind, rng) -> None:
    """A selection from arrays that are no wider than k is one launch."""
    of_rows, of_pages = ragged(rng, 3, 40, 8), paged(rng, 2, 2, 8, 16, 40)
    for call, inputs in ((select_rows, of_rows), (select_rows_paged, of_pages)):
        emulated.launched.clear()
        call(**put(kind, inputs), k=40)
        assert emulated.launched == {"short_rows"}
