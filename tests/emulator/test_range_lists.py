"""`range_lists` on an emulated GPU: the indexer's loss over ranges of keys."""

from __future__ import annotations

from ..ops import test_training as of_operation
from ..training import check_bits_whatever, inputs, over_ranges


def test_sizes(kind, rng):
    for scale_format in (None, "fp32"):
        of_operation.test_dense_loss(kind, rng, 6, 12, 300, (1, 2, 8), scale_format)


def test_chunks(kind, rng):
    """Of one token, of some, of all: the same bits, and those of lists of the same keys."""
    check_bits_whatever(kind, over_ranges(rng, inputs(rng, 9, 12, 200, 5)), (1, 300_000))
    of_operation.test_ranges_are_lists(kind, rng)
