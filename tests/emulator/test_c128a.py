"""`c128a` on an emulated GPU: lists of decodes and of prefills, at the edges of rows, and numbers out of range."""

from __future__ import annotations

from ..ops import test_compressed as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


def test_lists(kind, rng):
    of_operation.test_c128a(kind, rng, block_size=61, ratio=128, most=300)


def test_edges(kind, rng):
    of_operation.test_c128a_at_the_boundary(kind, rng)


def test_hostile_numbers(kind, rng):
    of_operation.test_c128a_of_hostile_numbers(kind, rng)
