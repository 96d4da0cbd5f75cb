"""`expand_pools` on an emulated GPU: more pools than a CTA has threads, tails, and numbers out of range."""

from __future__ import annotations

import pytest

from ..ops import test_pools as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("kpool", "n"), [(1, 5), (4, 300), (3, 0)])
def test_lists(kind, rng, kpool, n):
    of_operation.test_expand(kind, rng, kpool, n)


def test_hostile_numbers(kind, rng):
    of_operation.test_expand_hostile_numbers(kind, rng)
