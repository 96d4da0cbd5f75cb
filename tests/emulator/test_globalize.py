"""`globalize` on an emulated GPU: logits and positions of what a rank chose, and of entries that are none."""

from __future__ import annotations

import pytest

from ..ops import test_context_parallel as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("tokens", "width", "keys"), [(3, 2048, 5000), (9, 1, 1), (2, 3, 0)])
def test_lists(kind, rng, tokens, width, keys):
    of_operation.test_globalize_topk(kind, rng, tokens, width, keys, 5, 4, 64)
