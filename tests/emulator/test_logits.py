"""`logits` on an emulated GPU: keys in rows and in pages, in whole and in compact rows."""

from __future__ import annotations

import pytest

from ..ops import test_candidates as of_candidates
from ..ops import test_logits as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("CUPY_MLA_INDEXER_KERNELS", "logits")


@pytest.mark.parametrize(("m", "n", "heads"), [(3, 70, 64), (5, 129, 24)])
def test_rows(kind, rng, m, n, heads):
    of_operation.test_ragged(kind, rng, m, n, heads, exact=True)


def test_compact_rows(kind, rng):
    of_operation.test_compact_rows(kind, rng, 5, 129, 24, clean=True)


def test_pages(kind, rng):
    of_operation.test_paged(kind, rng, 4, 3, 64, 15, 90, exact=True)


@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), [(3, 2, 32, 16, 100), (2, 7, 48, 7, 65)])
def test_pages_of_mxfp4(kind, rng, b, n, heads, block_size, longest):
    for exact in (False, True):
        of_candidates.test_logits_over_mxfp4(kind, rng, b, n, heads, block_size, longest, exact)


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("token_bytes", [of_candidates.FP8, of_candidates.MXFP4])
@pytest.mark.parametrize(("tokens", "heads", "block_size", "blocks"), [(9, 64, 16, 3), (5, 8, 1, 1), (3, 32, 8, 30)])
def test_candidates(kind, rng, tokens, heads, block_size, blocks, token_bytes):
    of_candidates.test_candidate_logits(kind, rng, tokens, heads, block_size, blocks, token_bytes)


def test_hostile_candidates(kind, rng):
    of_candidates.test_hostile_candidates(kind, rng)


@pytest.mark.parametrize("k", [1, 20, 39])  # of all rows there are no logits
def test_rows_of_candidates(kind, rng, k):
    of_candidates.test_select_candidate_rows(kind, rng, k, of_candidates.MXFP4)
