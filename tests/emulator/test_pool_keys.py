"""`pool_keys` on an emulated GPU: pools of this step, of the ring, of both; drafted tokens; no ring."""

from __future__ import annotations

import pytest

from ..ops import test_pools as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("kpool", "ring"), [(1, 1), (4, 8), (3, 5)])
def test_keys(kind, rng, kpool, ring):
    of_operation.test_prompts_in_portions_and_decodes(kind, rng, kpool, ring)


def test_no_ring(kind, rng):
    of_operation.test_requests_without_a_ring_and_tokens_of_none(kind, rng)
