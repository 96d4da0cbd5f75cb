"""`pack` on an emulated GPU: every byte of each layout, at the edges of e4m3."""

from __future__ import annotations

import pytest

from ..ops import test_cache as of_operation


@of_operation.every_writer
@pytest.mark.parametrize(("tokens", "num_blocks", "block_size", "gap"), [(9, 4, 2, 0), (33, 2, 61, 1)])
def test_bytes(kind, rng, fmt, scale_format, tokens, num_blocks, block_size, gap):
    of_operation.test_bytes(kind, rng, fmt, scale_format, tokens, num_blocks, block_size, gap)


@of_operation.every_writer
def test_ties_and_edges(kind, rng, fmt, scale_format):
    of_operation.test_bytes_of_ties_and_edges(kind, rng, fmt, scale_format)
