"""`logits` on an emulated GPU: keys in rows and in pages, in whole and in compact rows."""

from __future__ import annotations

import pytest

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
