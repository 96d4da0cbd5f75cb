"""`widen_mxfp4` on an emulated GPU: every byte, scales far apart, and strides."""

from __future__ import annotations

import pytest

from ..ops import test_mxfp4 as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("shape", [(33,), (5, 24)])
def test_rows(kind, rng, shape):
    of_operation.test_widen(kind, rng, shape)
