"""`tensor_quant` on an emulated GPU: whole tiles, parts of them, memory that is not aligned, infinity and NaN."""

from __future__ import annotations

import numpy as np
import pytest

from ..kinds import BF16
from ..ops import test_quant as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("shape", "dtype"), [((7,), BF16), ((4096,), np.dtype(np.float32)), ((2, 3, 4095), BF16)])
def test_codes(kind, rng, shape, dtype):
    of_operation.test_quantize(kind, rng, shape, dtype, 1e6)


def test_memory_that_is_not_aligned(kind, rng):
    of_operation.test_memory_that_is_not_aligned(kind, rng)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinity_and_nan(kind, rng, bad):
    of_operation.test_infinity_and_nan(kind, rng, bad)
