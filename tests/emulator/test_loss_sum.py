"""`loss_sum` on an emulated GPU, behind gradients in chunks and in parts."""

from __future__ import annotations

from ..ops import test_training as of_operation
from ..training import check_bits_whatever, inputs
from .again import again


def test_chunks(kind, rng):
    """Of one token, of some, of all: the same bits."""
    check_bits_whatever(kind, inputs(rng, 9, 12, 300, 50), (1, 70_000, 200_000))


test_accumulate = again(of_operation.check_accumulate)
