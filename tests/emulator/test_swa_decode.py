"""`swa_decode` on an emulated GPU: windows of uneven sequences, at their edges, and numbers out of range."""

from __future__ import annotations

import pytest

from ..ops import test_swa as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("block_size", "window"), [(1, 5), (64, 128)])
def test_windows(kind, rng, block_size, window):
    of_operation.test_swa(kind, rng, block_size, window)


def test_edges(kind, rng):
    of_operation.test_swa_at_the_edges(kind, rng)


def test_hostile_numbers(kind, rng):
    of_operation.test_swa_of_hostile_numbers(kind, rng)
    of_operation.test_swa_of_hostile_images(kind, rng)


@pytest.mark.parametrize(("window", "most"), [(5, 40), (128, 70)])
def test_images_and_replayed_prefixes(kind, rng, window, most):
    of_operation.test_swa_of_images(kind, rng, window, most)
    of_operation.test_swa_of_replayed_prefixes(kind, rng, window)
