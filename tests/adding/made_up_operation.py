"""Negated values."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import negate


def test_negate(kind, rng) -> None:
    x = rng.standard_normal((3, 5), np.float32)
    np.testing.assert_array_equal(kind.take(negate(kind.put(x))), -x)


def test_wrong_dtype(kind) -> None:
    with pytest.raises(TypeError, match="x: expected dtype float32"):
        negate(kind.put(np.zeros(3, np.int32)))
