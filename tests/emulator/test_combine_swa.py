"""`combine_swa` on an emulated GPU: chosen rows and a window, at the edges of rows, and numbers out of range."""

from __future__ import annotations

import pytest

from ..ops import test_swa as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("ratio", "topk", "window"), [(0, 20, 9), (1, 20, 9), (4, 130, 128), (128, 0, 128)])
def test_lists(kind, rng, ratio, topk, window):
    of_operation.test_combine(kind, rng, ratio, topk, window, first_token=37)


def test_edges(kind, rng):
    of_operation.test_combine_at_the_edges(kind, rng)


def test_hostile_numbers(kind, rng):
    of_operation.test_combine_of_hostile_numbers(kind, rng)


def test_images(kind, rng):
    of_operation.test_combine_of_images(kind, rng, 5, 40)


def test_rows_that_were_not_gathered(kind, rng):
    of_operation.test_combine_of_windows_that_were_not_gathered(kind, rng)
