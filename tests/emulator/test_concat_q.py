"""`concat_q` on an emulated GPU: dense queries, with gaps, and not aligned."""

from __future__ import annotations

import pytest

from ..ops import test_gather as of_operation


@pytest.mark.parametrize("gaps", [(0, 0, 0), (8, 128, 16), (3, 1, 5)], ids=["dense", "strided", "unaligned"])
def test_queries(kind, rng, gaps):
    of_operation.test_concat(kind, rng, 7, 16, gaps)
