"""`local_lens` on an emulated GPU, up to the longest lengths."""

from __future__ import annotations

import pytest

from ..ops import test_context_parallel as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("world_size", "rank", "interleave"), [(3, 1, 5), (1024, 1023, 1 << 20)])
def test_lengths(kind, rng, world_size, rank, interleave):
    of_operation.test_local_seq_lens(kind, rng, world_size, rank, interleave)


def test_longest(kind):
    of_operation.test_longest_lengths(kind)
