"""Weight absorption: attention over latent rows instead of expanded keys and values.

MLA expands a latent row `c` into a key `W_UK c` and a value `W_UV c` for each head. Both are linear. So the first can
be applied to the query (`q . (W_UK c) = (W_UK' q) . c`), and the second after the softmax. The cache then holds one
latent row a token for all heads, and the sparse kernels read it. Both steps are one matrix product for each head, which
the caller's own library computes.

Source: DeepSeek-V2, section 2.1.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bridges import Library, bind
from ..calls.operation import traceable
from ..checks.options import require_integer
from ..checks.validate import QUANTIZED
from ..dtypes import BFLOAT16, FLOAT32
from ..layouts import D_V
from ..typing import A, AnyArray

__all__ = ["absorb_q", "split_kv_b_proj", "v_up_proj"]

FLOATS = (BFLOAT16, FLOAT32)
SCALE_BLOCK = 128  # rows and columns of a weight that share a scale


@traceable
def split_kv_b_proj(weight: A, num_heads: int, d_nope: int, *, scales: AnyArray | None = None) -> tuple[A, A]:
    """Split the weight of `kv_b_proj`, which expands latent rows into keys and values, into its two halves.

    Args:
        weight: [512, num_heads * (d_nope + d_v)] bfloat16 or float32, any strides; of a `torch.nn.Linear` that is
            `kv_b_proj.weight.T`. With `scales` float8_e4m3fn, or uint8, its bytes.
        num_heads: query heads on this rank.
        d_nope: width of a head's key without its RoPE part.
        scales: [4, W] float32, one for each 128 x 128 values of an FP8 weight, W its columns / 128, rounded up; any
            strides. Of DeepSeek's checkpoints that is `kv_b_proj.weight_scale_inv.T`. A rank's part of the columns
            must begin at a multiple of 128.

    Returns:
        w_uk [512, num_heads, d_nope] and w_uv [512, num_heads, d_v], views of `weight`. For an FP8 weight they are
        views of a new bfloat16 array: values times their scales, rounded once.

    Raises:
        TypeError, ValueError: `weight` or `scales` has the wrong type, shape or place, or `weight` does not split into
            that many heads.

    Example:
        >>> weight = np.zeros((512, 16 * (128 + 128)), np.float32)  # 16 heads, keys and values of 128
        >>> w_uk, w_uv = cupy_mla.split_kv_b_proj(weight, num_heads=16, d_nope=128)
        >>> w_uk.shape, w_uv.shape
        ((512, 16, 128), (512, 16, 128))
    """
    place, (w,) = bind(weight=weight)
    (scales_,) = place.optional(scales=scales)
    if scales_ is None and w.dtype in QUANTIZED:
        raise TypeError(f"weight: expected dtype bfloat16 or float32, or scales with it, got {w.dtype.name} alone")
    dtypes = FLOATS if scales_ is None else QUANTIZED
    _, width = w.require(dtypes, D_V, "num_heads * (d_nope + d_v)", contiguous=False).shape
    num_heads, d_nope = require_integer("num_heads", num_heads, 1), require_integer("d_nope", d_nope, 1)
    if width % num_heads or d_nope >= width // num_heads:
        raise ValueError(f"weight: expected {num_heads} heads of more than {d_nope} columns, got {width} columns")
    if scales_ is None:
        return split_by_head(weight, num_heads, d_nope)
    scales_.require(FLOAT32, *(-(-n // SCALE_BLOCK) for n in w.shape), contiguous=False)
    return split_by_head(dequantized(place.library, w.obj, scales_.obj), num_heads, d_nope)


@traceable
def absorb_q(q_nope: A, w_uk: AnyArray) -> A:
    """Apply the key expansion to the query: `out[t, h] = w_uk[:, h] @ q_nope[t, h]`.

    Args:
        q_nope: [T, h, d_nope] bfloat16 or float32, any strides.
        w_uk: [512, h, d_nope] of the same dtype, any strides; from `split_kv_b_proj`.

    Returns:
        [T, h, 512], dtype of `q_nope`; a view whose last axis is contiguous.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.

    Example:
        >>> w_uk = np.ones((512, 16, 128), np.float32)
        >>> out = cupy_mla.absorb_q(np.ones((3, 16, 128), np.float32), w_uk)
        >>> out.shape, float(out[0, 0, 0])
        ((3, 16, 512), 128.0)
    """
    place, (q, w) = bind(q_nope=q_nope, w_uk=w_uk)
    _, h, d_nope = q.require(FLOATS, "T", "h", "d_nope", contiguous=False).shape
    w.require(q.dtype, D_V, h, d_nope, contiguous=False)
    return product_by_head(place.kind, q_nope, w.obj.swapaxes(0, 1).swapaxes(1, 2))


@traceable
def v_up_proj(x: A, w_uv: AnyArray) -> A:
    """Expand the attention's latent output into values: `out[t, h] = x[t, h] @ w_uv[:, h]`.

    Args:
        x: [T, h, 512] bfloat16 or float32, any strides; output of the sparse attention.
        w_uv: [512, h, d_v] of the same dtype, any strides; from `split_kv_b_proj`.

    Returns:
        [T, h, d_v], dtype of `x`; a view whose last axis is contiguous.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.

    Example:
        >>> w_uv = np.ones((512, 16, 128), np.float32)
        >>> out = cupy_mla.v_up_proj(np.ones((3, 16, 512), np.float32), w_uv)
        >>> out.shape, float(out[0, 0, 0])
        ((3, 16, 128), 512.0)
    """
    place, (rows, w) = bind(x=x, w_uv=w_uv)
    h = rows.require(FLOATS, "T", "h", D_V, contiguous=False).shape[1]
    w.require(rows.dtype, D_V, h, "d_v", contiguous=False)
    return product_by_head(place.kind, x, w.obj.swapaxes(0, 1))


def dequantized(library: Library, weight: Any, scales: Any) -> Any:
    """An FP8 weight [m, n], with one scale for each block of its values, as bfloat16."""
    for axis, length in enumerate(weight.shape):
        scales = library.repeated(scales, SCALE_BLOCK, axis)
        scales = scales[:length] if axis == 0 else scales[:, :length]
    return library.rounded(library.widened(weight) * scales)


def split_by_head(weight: Any, num_heads: int, d_nope: int) -> tuple[Any, Any]:
    """[k, num_heads * (d_nope + d_v)] as [k, num_heads, d_nope] and [k, num_heads, d_v]."""
    latent, width = weight.shape
    heads = weight.reshape(latent, num_heads, width // num_heads)
    return heads[..., :d_nope], heads[..., d_nope:]


def product_by_head(kind: str, x: Any, weight: Any) -> Any:
    """[T, h, k] times [h, k, n] gives [T, h, n]: one matrix product for each head."""
    by_head = x.swapaxes(0, 1)
    if kind == "torch":
        return (by_head @ weight).swapaxes(0, 1)
    # NumPy has no bfloat16 product, and CuPy 14 none for batches. So multiply in float32 and round once.
    product = by_head.astype(np.float32, copy=False) @ weight.astype(np.float32, copy=False)
    return product.astype(x.dtype, copy=False).swapaxes(0, 1)
