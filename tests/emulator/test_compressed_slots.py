"""`compressed_slots` on an emulated GPU: tokens that complete a row and that do not, and numbers out of range."""

from __future__ import annotations

import pytest

from ..ops import test_compressed as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("block_size", "ratio"), [(1, 1), (64, 4), (2, 128)])
def test_slots(kind, rng, block_size, ratio):
    of_operation.test_slots(kind, rng, block_size, ratio)


@pytest.mark.parametrize(("world", "interleave", "block_size"), [(2, 1, 16), (3, 4, 8)])
def test_ranks(kind, rng, world, interleave, block_size):
    of_operation.test_slots_of_ranks(kind, rng, world, interleave, block_size)


def test_padding_tokens(kind, rng):
    of_operation.test_slots_of_padding_tokens(kind, rng, 2)


def test_edges(kind, rng):
    of_operation.test_slots_at_the_boundary(kind, rng)


def test_hostile_numbers(kind, rng):
    of_operation.test_slots_of_hostile_numbers(kind, rng)
