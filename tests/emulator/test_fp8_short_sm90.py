"""`fp8_short_sm90` on an emulated GPU, so small that a CTA has several work items."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import oracle
from ..cases import check_decode, off_zero, paged, queries, sinks, with_holes

KERNEL = "fp8_short_sm90"


@pytest.fixture(autouse=True)
def forced(emulated, monkeypatch):
    monkeypatch.setenv(VARIABLE, KERNEL)
    yield
    assert KERNEL in emulated.launched


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("emulated", [2], indirect=True)
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("topk", [(128, 0), (128, 64), (100, 70), (128, 128), (1, 0), (250, 0), (0, 130)], ids=str)
def test_lists(force, kind, rng, heads, topk):
    """Of all lengths, one without a row, one full, one whose rows all are in its last tile; with holes."""
    b, s_q, h_q = 3, int(rng.integers(1, 3)), int(rng.integers(1, 129))
    main, extra = (
        paged(rng, oracle.V4, b, s_q, entries, int(rng.choice([1, 61, 64])), lengths=bool(rng.integers(2)))
        for entries in topk
    )
    for lists in (main, extra):
        full = lists.indices[1].copy()
        with_holes(rng, lists)
        lists.indices[0], lists.indices[1], lists.indices[2, :, :-20] = -1, full, -1
    some = extra if topk[1] else None
    q = off_zero(oracle.V4, queries(rng, b, s_q, h_q, 512), main, some)
    force(division=f"whole(heads={heads})")
    check_decode(kind, oracle.V4, q, main, some, sink=sinks(rng, h_q), out_gaps=(0, 0, 0, int(rng.integers(3))))
