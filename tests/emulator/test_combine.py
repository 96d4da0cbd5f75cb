"""`combine` on an emulated GPU: partial results of a few splits and of many, some without rows."""

from __future__ import annotations

import pytest

from .. import oracle
from ..cases import check_decode, paged, queries, sinks


@pytest.mark.parametrize("num_splits", [2, 40])
def test_splits(kind, rng, monkeypatch, num_splits):
    monkeypatch.setenv("CUPY_MLA_KERNELS", "portable")
    main = paged(rng, oracle.BF16_576, 2, 1, 300, 64, lengths=True)
    main.length[:] = 33, 300
    check_decode(kind, oracle.BF16_576, queries(rng, 2, 1, 20, 576), main, sink=sinks(rng, 20), num_splits=num_splits)
