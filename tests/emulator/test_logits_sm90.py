"""`logits_sm90` on an emulated Hopper GPU, at sizes that the operations' example calls do not have."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import (
    candidate_logits,
    indexer_logits,
    paged_indexer_logits,
    paged_indexer_schedule,
    select_candidate_rows,
    select_rows,
    select_rows_paged,
)

from ..ops import test_candidates as of_candidates
from ..ops import test_logits as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from ..ops.test_logits import paged, put, ragged
from .again import again


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("CUPY_MLA_INDEXER_KERNELS", "logits_sm90")


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_logits_of_rows(kind, rng, clean: bool, e5m2: bool) -> None:
    """The same bits as NumPy's where those are exact, -inf or nothing for keys that are not seen."""
    inputs = ragged(rng, 23, 333, 40, True, (e5m2, e5m2))
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


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    ("b", "n", "heads", "block_size", "longest"),
    [(2, 1, 64, 64, 700), (5, 2, 32, 64, 200), (3, 2, 64, 20, 130), (2, 3, 48, 16, 100), (1, 7, 32, 64, 90)],
)
def test_logits_of_mxfp4(kind, rng, b: int, n: int, heads: int, block_size: int, longest: int) -> None:
    inputs = of_candidates.paged(rng, b, n, heads, block_size, longest, exact=True)
    inputs["kv_cache"] = _aligned(inputs["kv_cache"])
    got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    np.testing.assert_array_equal(got, paged_indexer_logits(**inputs))


def test_mxfp4_of_many_sizes(kind, rng) -> None:
    """Scales of a key up to 2^28 apart."""
    inputs = of_candidates.paged(rng, 2, 2, 32, 64, 300)
    inputs["kv_cache"] = _aligned(inputs["kv_cache"])
    of_candidates.check(kind.take(paged_indexer_logits(**put(kind, inputs))), paged_indexer_logits(**inputs))


test_small_groups_of_mxfp4 = again(of_candidates.test_small_groups_are_exact, (20,), (27,), (28,))
test_scales_far_apart_of_mxfp4 = again(of_mxfp4.test_logits_of_scales_far_apart, (15,), (28,))
test_compact_rows_of_e5m2 = again(of_operation.test_ragged_of_e5m2, (5, 129, 24, (True, True), True))
test_far_groups_of_mxfp4 = again(of_candidates.test_far_groups)
test_weights_of_mxfp4 = again(of_candidates.test_weights_that_are_not_finite, (np.nan,), (np.inf,))
test_nan_scale_of_mxfp4 = again(of_candidates.test_nan_scale_of_mxfp4)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("token_bytes", [of_candidates.FP8, of_candidates.MXFP4])
@pytest.mark.parametrize(
    ("tokens", "heads", "block_size", "blocks"), [(9, 64, 16, 3), (140, 24, 4, 7), (3, 32, 64, 24)]
)
def test_candidates(kind, rng, tokens: int, heads: int, block_size: int, blocks: int, token_bytes: int) -> None:
    inputs = of_candidates.candidates_of(rng, tokens, heads, block_size, blocks, True, token_bytes)
    inputs["kv_cache"] = _aligned(inputs["kv_cache"])
    out = kind.put(np.full((tokens, 8 * blocks), 7, np.float32))
    there = put(kind, inputs)
    np.testing.assert_array_equal(kind.take(candidate_logits(**there, out=out)), candidate_logits(**inputs))
    got = kind.take(select_candidate_rows(**there, k=9))
    np.testing.assert_array_equal(got, select_candidate_rows(**inputs, k=9))


def _aligned(cache: np.ndarray) -> np.ndarray:
    """Blocks allow 16-byte loads."""
    return np.ascontiguousarray(cache)


def _assert_same(got: np.ndarray, expected: np.ndarray, clean: bool) -> None:
    """Entries were 7 before, as are those behind the rows' ends."""
    width = expected.shape[1]
    assert (got[:, width:] == 7).all()
    left = np.isneginf(expected) & (got[:, :width] == 7)
    assert not (clean and left.any())
    np.testing.assert_array_equal(np.where(left, expected, got[:, :width]), expected)
