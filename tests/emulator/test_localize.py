"""`localize` on an emulated GPU: lists of one entry and of more than a CTA has threads, in place too."""

from __future__ import annotations

import pytest

from ..ops import test_context_parallel as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("tokens", "width"), [(3, 2048), (5, 1023), (9, 1)])
def test_lists(kind, rng, tokens, width):
    of_operation.test_localize_topk(kind, rng, tokens, width, 3, 1, 5)
