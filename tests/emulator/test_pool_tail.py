"""`pool_tail` on an emulated GPU: what it keeps of drafted tokens is what later pools need."""

from __future__ import annotations

from ..ops import test_pools as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


def test_drafted_tokens(kind, rng):
    of_operation.test_drafted_tokens_that_are_dropped(kind, rng)
