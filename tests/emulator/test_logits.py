"""`logits` on an emulated GPU: keys in rows and in pages, in whole and in compact rows."""

from __future__ import annotations

import pytest

from ..ops import test_candidates as of_candidates
from ..ops import test_logits as of_operation
from .again import again


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("CUPY_MLA_INDEXER_KERNELS", "logits")


test_rows = again(of_operation.test_ragged, (3, 70, 64, True), (5, 129, 24, True))
test_compact_rows = again(of_operation.test_compact_rows, (5, 129, 24, True))
test_pages = again(of_operation.test_paged, (4, 3, 64, 15, 90, True))


@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), [(3, 2, 32, 16, 100), (2, 7, 48, 7, 65)])
def test_pages_of_mxfp4(kind, rng, b, n, heads, block_size, longest):
    for exact in (False, True):
        of_candidates.test_logits_over_mxfp4(kind, rng, b, n, heads, block_size, longest, exact)


test_candidates = pytest.mark.long(sample=2)(
    again(
        of_candidates.test_candidate_logits,
        (9, 64, 16, 3, of_candidates.FP8),
        (5, 8, 1, 1, of_candidates.FP8),
        (3, 32, 8, 30, of_candidates.FP8),
        (9, 64, 16, 3, of_candidates.MXFP4),
        (5, 8, 1, 1, of_candidates.MXFP4),
        (3, 32, 8, 30, of_candidates.MXFP4),
    )
)
test_hostile_candidates = again(of_candidates.test_hostile_candidates)
test_rows_of_candidates = again(
    of_candidates.test_select_candidate_rows,
    (1, of_candidates.MXFP4),
    (20, of_candidates.MXFP4),
    (39, of_candidates.MXFP4),
)
