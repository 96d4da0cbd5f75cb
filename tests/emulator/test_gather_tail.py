"""`gather_tail` on an emulated GPU: whole sequences and tails, rows that are not aligned, and numbers out of range."""

from __future__ import annotations

from ..ops import test_gather_tail as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


def test_rows(kind, rng):
    of_operation.test_gather(kind, rng, block_size=61, lengths=[130, 1, 64, 63])


def test_rows_that_are_not_aligned(kind, rng):
    of_operation.test_gather_into_rows_that_are_not_aligned(kind, rng)


def test_hostile_numbers(kind, rng):
    of_operation.test_gather_of_hostile_numbers(kind, rng)
