"""`dense_lse` on an emulated GPU, and `attention_target` over ranges of rows behind it."""

from __future__ import annotations

import pytest

from ..training import check_dense


@pytest.mark.parametrize(("h_q", "d_qk", "gap"), [(9, 512, 0), (32, 576, 3), (100, 576, 0)])
def test_sizes(kind, rng, h_q, d_qk, gap):
    """A block of heads, or two; rows at any address."""
    check_dense(kind, rng, h_q, d_qk, gap)
