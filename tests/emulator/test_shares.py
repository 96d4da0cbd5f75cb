"""Kernels that divide the rows of a call evenly over CTAs, on an emulated GPU: where work items stay whole."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import oracle
from ..cuda.attention import evenly


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "heads", "fmt", "cases"),
    [
        ("fp8_sm90", 64, oracle.V32, evenly.CUT_OF_FEW_ROWS),
        ("fp8_sm90", 32, oracle.V4, evenly.CUT_OF_FEW_ROWS),
        ("fp8_sm90", 16, oracle.V32, evenly.CUT_OF_FEW_ROWS),
        ("bf16_shares_sm90", 64, oracle.BF16_576, evenly.CUT_OF_FEW_ROWS),
    ],
    ids=["fp8_sm90-64", "fp8_sm90-32", "fp8_sm90-16", "bf16_shares_sm90"],
)
def test_items_stay_whole(kind, emulated, rng, monkeypatch, force, kernel, heads, fmt, cases):
    monkeypatch.setenv(VARIABLE, kernel)
    evenly.check_items_stay_whole(kind, rng, force, fmt, heads, cases)
    assert kernel in emulated.launched


@pytest.mark.long
@pytest.mark.parametrize("heads", [16, 64])
def test_plans_of_lists_with_ends(kind, emulated, rng, monkeypatch, force, heads):
    monkeypatch.setenv(VARIABLE, "fp8_sm90")
    force(division=evenly.shares(heads, ctas=7))
    evenly.check_plans_of_lists_with_ends(kind, rng, oracle.V32, 8, [(1, 700), (5, 390)])
    assert "fp8_sm90" in emulated.launched


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("heads", [32, 64])
def test_plans_of_lists_with_lengths(kind, emulated, rng, monkeypatch, force, heads):
    monkeypatch.setenv(VARIABLE, "fp8_sm90")
    force(division=evenly.shares(heads, ctas=5))
    evenly.check_plans_of_lists_with_lengths(kind, rng, oracle.V4, 8, [(3, 128, 300)])
    assert "fp8_sm90" in emulated.launched
