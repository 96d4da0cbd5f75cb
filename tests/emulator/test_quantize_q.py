"""`quantize_q` on an emulated GPU: codes and weights, with and without RoPE, and NaN."""

from __future__ import annotations

import numpy as np
import pytest

from ..kinds import BF16
from ..ops import test_logits as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("tokens", "heads", "dtype"), [(1, 64, np.float32), (7, 24, BF16)])
def test_codes(kind, rng, tokens, heads, dtype):
    of_operation.test_quantize(kind, rng, tokens, heads, dtype, "ue8m0")


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(kind, rng, interleaved):
    of_operation.test_quantize_with_rope(kind, rng, rope_first=interleaved, interleaved=interleaved, dtype=BF16)


def test_nan_and_infinity(kind):
    of_operation.test_quantize_nan_and_infinity(kind)


@pytest.mark.parametrize(("tokens", "heads", "dtype"), [(1, 64, np.float32), (7, 24, BF16)])
def test_mxfp4(kind, rng, tokens, heads, dtype):
    of_mxfp4.test_quantize_queries(kind, rng, tokens, heads, dtype)


def test_mxfp4_with_rope(kind, rng):
    of_mxfp4.test_queries_are_rotated_first(kind, rng)
