"""Training, prefill and decode of the same tokens give the same bits: in NumPy as they are, on a GPU where one kernel
works on whole queries."""

from __future__ import annotations

import pytest

from ..forwards import check_forwards_agree


@pytest.mark.parametrize("topk", [20, 600])
def test_forwards_agree(kind, rng, force, topk):
    if kind.on_gpu:
        force("portable_99kb", "whole")
    check_forwards_agree(kind, rng, 5, (9, 40), topk)


def test_forwards_agree_as_a_server_decodes(kind, rng, force):
    """Up to 512 entries, batch-invariant decode works on whole queries by itself."""
    if kind.on_gpu:
        force("portable_99kb", "whole")
    check_forwards_agree(kind, rng, 12, (9, 40), 30, num_splits=None)


@pytest.mark.parametrize("d_qk", [576, 512])
def test_forwards_agree_of_long_lists(kind, rng, force, d_qk):
    """More entries than a split of a batch-invariant decode has in any kernel: 512, or 704."""
    if kind.on_gpu:
        force("portable_99kb", "whole")
    check_forwards_agree(kind, rng, 5, (9, 850), 800, d_qk=d_qk, newest=3, options=True)
