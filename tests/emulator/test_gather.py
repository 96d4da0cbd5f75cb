"""`gather` on an emulated GPU: requests in any order, rows that are not aligned, and numbers out of range."""

from __future__ import annotations

from ..ops import test_gather as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


def test_rows(kind, rng):
    of_operation.test_gather(kind, rng, block_size=3, lengths=[5, 0, 17])


def test_rows_that_are_not_aligned(kind, rng):
    of_operation.test_gather_into_rows_that_are_not_aligned(kind, rng)


def test_hostile_numbers(kind, rng):
    of_operation.test_gather_of_hostile_numbers(kind, rng)


def test_more_requests_than_threads(kind, rng):
    of_operation.test_gather_of_more_requests_than_a_block_has_threads(kind, rng)
