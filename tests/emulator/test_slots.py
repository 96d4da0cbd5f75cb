"""`slots` on an emulated Hopper GPU."""

from __future__ import annotations

import pytest

from ..ops import test_indices as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("tokens", "k", "requests", "width"), [(1, 0, 1, 1), (300, 0, 5, 40), (9, 33, 2, 300)])
def test_slots(kind, rng, tokens: int, k: int, requests: int, width: int) -> None:
    of_operation.check_slots(kind, rng, tokens, k, requests, width)
