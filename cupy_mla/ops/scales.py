"""Checks of scales that are arguments: of queries in e4m3, and of all rows of layout PLAIN_FP8."""

from __future__ import annotations

from typing import Any

from ..arrays import Array
from ..bridges import Place, describe, library_of
from ..checks.options import number, require_scale
from ..checks.validate import QUANTIZED
from ..dtypes import BFLOAT16, FLOAT32
from ..layouts import Layout

Scale = Array | float


def require_q(q: Array, layout: Layout, *shape: int | str | tuple[int, ...]) -> Array:
    """Check queries over rows of a layout: they have the dtype of results, or e4m3 if the rows' scale is an argument;
    returns them."""
    return q.require((BFLOAT16, *QUANTIZED) if layout.scale_of_call else layout.values, *shape)


def scale_of_q(place: Place, q: Array, q_scale: Any, name: str = "q_scale") -> Scale:
    """Check `q_scale`, which the caller calls `name`; None: 1.

    Raises:
        TypeError, ValueError: it is no positive number and no float32 of one item, or q is bfloat16.
    """
    if q_scale is None:
        return 1.0
    if q.dtype not in QUANTIZED:
        raise ValueError(f"{name} was given, but q is {q.dtype.name}: it is for float8_e4m3fn")
    return _checked(place, name, q_scale)


def scale_of_rows(place: Place, layout: Layout, k_scale: Any, name: str = "k_scale") -> Scale:
    """Check `k_scale`, which the caller calls `name`; None: 1.

    Raises:
        TypeError, ValueError: it is no positive number and no float32 of one item, or rows have scales of their own.
    """
    if k_scale is None:
        return 1.0
    if not layout.scale_of_call:
        raise ValueError(f"{name} was given, but the rows have the layout {layout.name}: it is for plain_fp8")
    return _checked(place, name, k_scale)


def _checked(place: Place, name: str, value: Any) -> Scale:
    if not isinstance(value, Array) and library_of(value) is None:
        scale = require_scale(name, value)
        if scale <= 0:
            raise ValueError(f"{name}: expected a positive number, got {number(value)}")
        return scale
    array = place.admit(describe(name, value))
    return array.require(FLOAT32, *((1,) if len(array.shape) == 1 else ()))
