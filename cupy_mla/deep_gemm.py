"""Front door with the names and argument order of DeepGEMM's indexer functions::

    from cupy_mla import deep_gemm          # instead of: import deep_gemm

Takes torch, CuPy and NumPy arrays. Beyond DeepGEMM: 8 to 64 heads in steps of 8, any number of queries a request, any
block size, GPUs from sm_80 on, CPUs, and compressed logits (`max_seqlen_k`) with `clean_logits`. FP4 is converted to
e5m2 (`cupy_mla.widen_mxfp4` says what is exact); for queries, and keys in rows, that takes another launch. Queries may
be FP4 while keys are FP8, and the other way round; that is slower on Hopper.

Source: DeepGEMM's Python interface as it ships in vLLM 0.22.1. That of vLLM 0.33 has only the `fp8_fp4_*` functions,
with other arguments in the place of `clean_logits`. Those are an error here, so give arguments by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .bridges import bind, describe
from .checks.options import require_bool, require_integer
from .checks.values import check_widths
from .dtypes import INT32, UINT8
from .ops import logits
from .ops.logits import D, widen_mxfp4
from .typing import A, AnyArray

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]


def fp8_mqa_logits(
    q: A,
    kv: tuple[AnyArray, AnyArray],
    weights: AnyArray,
    cu_seq_len_k_start: AnyArray,
    cu_seq_len_k_end: AnyArray,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> A:
    """Logits over keys in rows: `cupy_mla.indexer_logits`, with the same arguments, results and errors.

    Args:
        kv: keys [N, 128] and their scales [N].
        clean_logits: write -inf for keys that a token does not see.
        max_seqlen_k: 0, or the width of compressed logits, whose rows start at the first key that a token sees
            (`compact_width`). It must be at least the longest range, which is checked only under `cupy_mla.set_checks`:
            keys beyond it are left out.

    Example:
        >>> q, keys = np.ones((1, 32, 128), float8_e4m3fn), np.ones((3, 128), float8_e4m3fn)
        >>> scales, weights = np.ones(3, np.float32), np.ones((1, 32), np.float32)
        >>> starts, ends = np.array([1], np.int32), np.array([3], np.int32)
        >>> cupy_mla.deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, starts, ends).tolist()
        [[-inf, 4096.0, 4096.0]]
    """
    width = require_integer("max_seqlen_k", max_seqlen_k, 0)
    clean = require_bool("clean_logits", clean_logits)
    keys, scales = _pair("kv", kv)
    try:
        found = logits.indexer_logits(
            q, keys, scales, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean=clean, compact_width=width or None
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise _renamed(error) from error
    if width and arrays.CHECK_VALUES:
        _, (starts, ends) = bind(cu_seq_len_k_start=cu_seq_len_k_start, cu_seq_len_k_end=cu_seq_len_k_end)
        check_widths(starts, ends, width)
    return found


def fp8_paged_mqa_logits(
    q: A,
    kv_cache: AnyArray,
    weights: AnyArray,
    context_lens: AnyArray,
    block_table: AnyArray,
    schedule_meta: AnyArray | None,
    max_context_len: int,
    clean_logits: bool = False,
) -> A:
    """Logits over a paged cache: `cupy_mla.paged_indexer_logits`, with the same arguments, results and errors.

    Args:
        kv_cache: [num_blocks, block_size, 1, 132] in layout INDEXER_FP8.
        context_lens: [B, n], or [B].
        schedule_meta: from `get_paged_mqa_logits_metadata`. It is ignored: our kernels divide their work themselves.
            `cupy_mla.paged_indexer_logits` takes a schedule of ours (`cupy_mla.paged_indexer_schedule`), which makes it
            faster.
        clean_logits: write -inf for keys that a token does not see.

    Example:
        >>> q, cache = np.ones((1, 1, 32, 128), float8_e4m3fn), np.zeros((2, 64, 1, 132), np.uint8)
        >>> lens, table = np.array([[3]], np.int32), np.array([[1]], np.int32)
        >>> schedule = cupy_mla.deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)
        >>> weights = np.ones((1, 32), np.float32)
        >>> cupy_mla.deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lens, table, schedule, 4, True).tolist()
        [[0.0, 0.0, 0.0, -inf]]
    """
    clean = require_bool("clean_logits", clean_logits)
    try:
        return logits.paged_indexer_logits(
            q, kv_cache, weights, context_lens, block_table, max_context_len, clean=clean
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise _renamed(error) from error


def get_paged_mqa_logits_metadata(context_lens: A, block_kv: int, num_sms: int) -> A:
    """An array of the shape of DeepGEMM's schedule, for callers that keep one. Its values have no meaning.

    Args:
        context_lens: [B, n] or [B] int32.
        block_kv: tokens a block.
        num_sms: SMs of the GPU.

    Returns:
        [num_sms + 1, 2] int32, where `context_lens` is.
    """
    require_integer("block_kv", block_kv, 1)
    num_sms = require_integer("num_sms", num_sms, 1)
    place, (lens,) = bind(context_lens=context_lens)
    lens.require(INT32, *("B", "n")[: max(len(lens.shape), 1)])
    schedule: A = place.empty((num_sms + 1, 2), INT32)
    return schedule


def fp8_fp4_mqa_logits(
    q: tuple[A, AnyArray | None],
    kv: tuple[AnyArray, AnyArray],
    weights: AnyArray,
    cu_seq_len_k_start: AnyArray,
    cu_seq_len_k_end: AnyArray,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> A:
    """`fp8_mqa_logits` with q as a pair: FP8 values and None, or MXFP4 values and scales. Keys are FP8, or MXFP4 too.

    Args:
        q: MXFP4: values [M, H, 64] uint8 or int8, and scales [M, H, 4] uint8 or [M, H] int32.
        kv: MXFP4: values [N, 64] uint8 or int8, and scales [N, 4] uint8 or [N] int32.
    """
    values, scaled = _queries(q, weights)
    keys, scales = _pair("kv", kv)
    if describe("kv[0]", keys).shape[-1:] == (D // 2,):
        keys, scales = _widened("kv", _bytes("kv[0]", keys), _bytes("kv[1]", scales))
    return fp8_mqa_logits(
        values, (keys, scales), scaled, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )  # fmt: skip


def fp8_fp4_paged_mqa_logits(
    q: tuple[A, AnyArray | None],
    kv_cache: AnyArray,
    weights: AnyArray,
    context_lens: AnyArray,
    block_table: AnyArray,
    schedule_meta: AnyArray | None,
    max_context_len: int,
    clean_logits: bool = False,
) -> A:
    """`fp8_paged_mqa_logits` with q as a pair: FP8 values and None, or MXFP4 values and scales.

    Args:
        q: MXFP4: values [B, n, H, 64] uint8 or int8, and scales [B, n, H, 4] uint8 or [B, n, H] int32.
        kv_cache: [num_blocks, block_size, 1, 132] in layout INDEXER_FP8, or [..., 68] in layout INDEXER_MXFP4.
    """
    values, scaled = _queries(q, weights)
    return fp8_paged_mqa_logits(
        values, kv_cache, scaled, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    )


# The names of arguments here, by their names in `cupy_mla.ops.logits`.
_NAMES = {
    "q8": "q", "k8": "kv[0]", "ks": "kv[1]", "w": "weights", "starts": "cu_seq_len_k_start",
    "ends": "cu_seq_len_k_end", "compact_width": "max_seqlen_k",
}  # fmt: skip


def _renamed(error: Exception) -> Exception:
    """The error with the argument's name here."""
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{_NAMES.get(name, name)}{colon}{rest}")


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        of = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        raise TypeError(f"{name}: expected a pair of values and scales, got {type(value).__name__}{of}")
    return value[0], value[1]


def _queries(q: Any, weights: Any) -> tuple[Any, Any]:
    """The queries as FP8, and the heads' weights times the scales of the queries."""
    values, scales = _pair("q", q)
    if scales is None:
        return values, weights
    codes, scales = _bytes("q[0]", values), _bytes("q[1]", scales)
    if len(codes.shape) != 4:
        return _widened("q", codes, scales, weights)
    flat_codes, flat_scales = (array.reshape(-1, *array.shape[2:]) for array in (codes, scales))
    wide, factors = _widened("q", flat_codes, flat_scales, weights)
    return wide.reshape(*codes.shape[:3], D), factors


def _widened(name: str, codes: Any, scales: Any, weights: Any = None) -> tuple[Any, Any]:
    """`widen_mxfp4` of a pair. Errors name the argument `name`."""
    try:
        return widen_mxfp4(codes, scales, weights)
    except (TypeError, ValueError) as error:
        of, colon, rest = str(error).partition(":")
        names = {"codes": f"{name}[0]", "scales": f"{name}[1]"}
        raise type(error)(f"{names.get(of, of)}{colon}{rest}") from error


INT8 = np.dtype(np.int8)  # how torch packs FP4


def _bytes(name: str, array: Any) -> Any:
    """An array as uint8. Each item of int32 becomes four bytes along another axis."""
    found = describe(name, array)
    wide = array[..., None] if found.dtype == INT32 else array
    return wide.view(found.library.native_dtype(UINT8)) if found.dtype in (INT8, INT32) else array
