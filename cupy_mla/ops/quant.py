"""Quantization of whole tensors to fp8."""

from __future__ import annotations

from ..arrays import Array
from ..bridges import bind, dense_strides
from ..calls.operation import operation
from ..cuda import quant as cuda
from ..dtypes import BFLOAT16, E4M3, FLOAT32
from ..reference import quant as reference
from ..typing import A

__all__ = ["dynamic_per_batched_tensor_quant"]

FLOATS = (BFLOAT16, FLOAT32)


@operation
def dynamic_per_batched_tensor_quant(x: A) -> tuple[A, A]:
    """Quantize a tensor with one scale: with `s = 448 / max(amax, 1e-10)`, the codes of `clamp(x * s, -448, 448)`.

    A NaN anywhere makes everything NaN, as amax is then NaN.

    Args:
        x: bfloat16 or float32 of any shape, without gaps (C order).

    Returns:
        the codes, float8_e4m3fn of x's shape (uint8 in CuPy, which has no e4m3), and `1 / s`, float32 of shape [].

    Raises:
        TypeError, ValueError: x has the wrong type or strides.

    Example:
        >>> codes, scale = cupy_mla.dynamic_per_batched_tensor_quant(np.array([[1, -2], [4, 0]], np.float32))
        >>> (codes.astype(np.float32) * scale).tolist()
        [[1.0, -2.0], [4.0, 0.0]]
    """
    place, (x_,) = bind(x=x)
    x_.require(FLOATS, *("any",) * len(x_.shape))
    if not _without_gaps(x_):
        raise ValueError(f"x: expected an array without gaps in C order, got strides {list(x_.strides)} (in items)")
    codes, scale = place.new("codes", x_.shape, E4M3), place.new("scale", (), FLOAT32)
    place.call(cuda.dynamic_per_batched_tensor_quant, reference.dynamic_per_batched_tensor_quant, x_, codes, scale)
    return codes.obj, scale.obj


def _without_gaps(x: Array) -> bool:
    """Whether an array has no gaps in C order. The strides of axes of length 1 and of empty arrays are ignored."""
    axes = zip(x.shape, x.strides, dense_strides(x.shape), strict=True)
    return 0 in x.shape or all(length == 1 or stride == dense for length, stride, dense in axes)
