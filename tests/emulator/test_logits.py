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


test_small_groups = again(of_candidates.test_small_groups_are_exact, (20,), (28,))
test_far_groups = again(of_candidates.test_far_groups)

FORMATS = (of_candidates.FP8, of_candidates.MXFP4)
SIZES = ((9, 64, 16, 3), (5, 8, 1, 1), (3, 32, 8, 30))

test_candidates = again(of_candidates.test_candidate_logits, *((*size, fmt) for size in SIZES for fmt in FORMATS))
test_hostile_candidates = again(of_candidates.test_hostile_candidates)
# Of all rows there are no logits.
test_rows_of_candidates = again(of_candidates.test_select_candidate_rows, *((k, FORMATS[1]) for k in (1, 20, 39)))
