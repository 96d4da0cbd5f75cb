"""Prefill and decode of the same tokens, by a kernel that works on whole queries, to the same bits."""

from __future__ import annotations

import pytest

from ..forwards import check_forwards_agree


def test_portable(kind, emulated, rng, force):
    force("portable", "whole")
    check_forwards_agree(kind, rng, 12, (3, 6), 20, autograd=False)
    assert "portable" in emulated.launched


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "heads"), [("portable", 40), ("bf16_sm90", 64)])
def test_several_tiles(kind, emulated, rng, force, kernel, heads):
    """More rows than a tile has, in the last sequence's tokens."""
    force(kernel, "whole")
    check_forwards_agree(kind, rng, heads, (3, 70), 80, autograd=False)
    assert kernel in emulated.launched


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "heads", "d_qk"), [("portable", 12, 512), ("bf16_sm90", 16, 576)])
def test_long_lists(kind, emulated, rng, force, kernel, heads, d_qk):
    """More entries than a split of a batch-invariant decode has by default."""
    force(kernel, "whole")
    check_forwards_agree(kind, rng, heads, (3, 730), 720, autograd=False, d_qk=d_qk, newest=2, options=True)
    assert kernel in emulated.launched
