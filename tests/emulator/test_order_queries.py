"""`order_queries` on an emulated GPU: queries with the longest lists come first, whatever the lengths."""

from __future__ import annotations

import pytest

from ..cases import check_unequal_prefill


@pytest.mark.parametrize("name", ["bf16_sm90", "bf16_few_heads_sm90"])
def test_lengths(kind, rng, force, name):
    """More queries than the GPU has SMs, some of them without a row."""
    force(name, "whole")
    check_unequal_prefill(kind, rng, 17, 5, 576, slice(3, 6))
