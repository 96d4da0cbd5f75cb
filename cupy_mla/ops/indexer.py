"""Operations on the indexer's key cache. A key has 128 values: in layout INDEXER_FP8 e4m3 with one float32 scale, in
INDEXER_MXFP4 e2m1 with a power of two as scale for each group of 32.

Source: the lightning indexer of DeepSeek-V3.2, whose keys vLLM caches in the former; that of V4.1 for the latter.
"""

from __future__ import annotations

import numpy as np

from .. import arrays
from ..arrays import Array
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_choice
from ..checks.validate import INDEXER_ALIGNMENT, QUANTIZED, cache_layout, require_cache, require_slots, tokens_of
from ..checks.values import check_blocks, check_offsets, check_slots
from ..cuda import indexer as cuda
from ..dtypes import BFLOAT16, E5M2, FLOAT32, INT32, UINT8
from ..layouts import INDEXER_FP8, INDEXER_LAYOUTS, LEAST_NORMAL, Layout
from ..reference import indexer as reference
from ..typing import AnyArray, ScaleFormat
from .cache import SCALE_FORMATS, require_floor

__all__ = ["cp_gather_indexer_k_quant_cache", "indexer_k_quant_and_cache"]

ALIGNMENT = INDEXER_ALIGNMENT


@operation
def indexer_k_quant_and_cache(
    k: AnyArray,
    kv_cache: AnyArray,
    slot_mapping: AnyArray,
    scale_format: ScaleFormat = "fp32",
    *,
    scale_floor: float = LEAST_NORMAL,
) -> None:
    """Quantize tokens' indexer keys and write them into the paged cache.

    Args:
        k: [T, (1,) 128] bfloat16.
        kv_cache: [num_blocks, block_size, 132] uint8 or float8_e4m3fn in layout INDEXER_FP8, or [..., 68] in layout
            INDEXER_MXFP4, start and block stride multiples of 4 bytes; written in place.
        slot_mapping: [T'] int64 with T' <= T (a padded batch: its length counts). A token whose slot is negative is
            skipped; a slot beyond the cache is never written.
        scale_format: for INDEXER_FP8: "fp32" (`max(amax, 1e-4) / 448`) or "ue8m0" (that, rounded up to a power of two).
            INDEXER_MXFP4 always has powers of two: `2 ** ceil(log2(max(amax, 6 * 2**-126) / 6))` of 32 values. A NaN
            makes all values NaN that share its scale. Infinity makes the finite ones 0.
        scale_floor: for INDEXER_MXFP4: the least scale, a power of two from `2**-126`, which is vLLM's, to 1. `2**-13`
            is SGLang's. (SGLang rounds keys twice, so its bytes differ in other groups, too, but not the values.)

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError, ValueError: under `cupy_mla.set_checks`: a slot beyond the cache; two tokens in one slot.

    Example:
        >>> cache = np.zeros((2, 64, 132), np.uint8)  # 2 blocks of 64 tokens in layout INDEXER_FP8
        >>> cupy_mla.indexer_k_quant_and_cache(np.ones((2, 128), bfloat16), cache, np.array([3, 64]))
        >>> cache.any(axis=(1, 2)).tolist()  # which blocks hold something
        [True, True]
    """
    require_choice("scale_format", scale_format, SCALE_FORMATS)
    floor = require_floor(scale_floor)
    place, (k_, cache, slots) = bind(k=k, kv_cache=kv_cache, slot_mapping=slot_mapping)
    tokens = tokens_of(k_).require(BFLOAT16, "T", INDEXER_FP8.d_qk).shape[0]
    layout = indexer_layout(cache)
    cache.require_writable()
    require_slots(slots, tokens)
    if arrays.CHECK_VALUES:
        check_slots(slots, cache)
    place.call(
        cuda.indexer_k_quant_and_cache, reference.indexer_k_quant_and_cache,
        layout, k_, cache, slots, scale_format, floor,
    )  # fmt: skip


@operation
def cp_gather_indexer_k_quant_cache(
    kv_cache: AnyArray, dst_k: AnyArray, dst_scale: AnyArray, block_table: AnyArray, cu_seq_lens: AnyArray
) -> None:
    """Copy requests' keys and scales out of the paged cache into consecutive rows.

    Token t of request r goes to row `cu_seq_lens[r] + t`, for `t < cu_seq_lens[r + 1] - cu_seq_lens[r]`. Keys in layout
    INDEXER_MXFP4 are copied as they are, or widened to what `indexer_logits` takes, as `widen_mxfp4` does.

    Args:
        kv_cache: [num_blocks, block_size, 132 or 68] uint8 or float8_e4m3fn, as for `indexer_k_quant_and_cache`.
        dst_k: [S, 128] uint8 or float8_e4m3fn, rows at multiples of 4 bytes; written in place. Of INDEXER_MXFP4 it is
            [S, 128] float8_e5m2 for the widened keys, or [S, 64] uint8 for the keys as they are. Rows beyond it are not
            written; rows of tokens whose block does not exist become zeros, their scales too.
        dst_scale: [S] float32, or its bytes, [S, 4] uint8, as vLLM has them; written in place. With [S, 64] keys the
            bytes are the four scales of a token.
        block_table: [R, M] int32 blocks of each request.
        cu_seq_lens: [R + 1] int32 running sum of the sequence lengths, from 0.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: `cu_seq_lens` starts below 0, goes down, or ends beyond S, the
            block table is too narrow for a length, or a block of a sequence does not exist.

    Example:
        >>> cache = np.zeros((2, 64, 132), np.uint8)
        >>> cupy_mla.indexer_k_quant_and_cache(np.full((2, 128), 3, bfloat16), cache, np.array([64, 65]))  # block 1
        >>> keys, scales = np.zeros((2, 128), np.uint8), np.zeros(2, np.float32)
        >>> starts = np.array([0, 2], np.int32)
        >>> cupy_mla.cp_gather_indexer_k_quant_cache(cache, keys, scales, np.array([[1]], np.int32), starts)
        >>> values = keys.view(float8_e4m3fn).astype(np.float32) * scales[:, None]
        >>> bool(np.allclose(values, 3))
        True
    """
    place, (cache, keys, scales, table, starts) = bind(
        kv_cache=kv_cache, dst_k=dst_k, dst_scale=dst_scale, block_table=block_table, cu_seq_lens=cu_seq_lens
    )
    layout = indexer_layout(cache)
    if layout is INDEXER_FP8:
        keys.require(QUANTIZED, "S", layout.d_qk)
    elif keys.shape[-1:] == (layout.row_stride,):
        keys.require(QUANTIZED, "S", layout.row_stride)
    else:
        keys.require(E5M2, "S", layout.d_qk)
    rows = keys.require_writable().shape[0]
    if not keys.aligned(ALIGNMENT):
        raise ValueError(
            f"dst_k: rows must start at multiples of {ALIGNMENT} bytes in memory, got strides {list(keys.strides)} "
            f"and a first row {keys.ptr % ALIGNMENT} bytes after one"
        )
    if scales.dtype == UINT8:
        scales.reinterpreted(FLOAT32)
    scales.require(FLOAT32, rows).require_writable()
    requests = table.require(INT32, "R", "M").shape[0]
    starts.require(INT32, requests + 1)
    if arrays.CHECK_VALUES:
        ends = check_offsets(starts)
        if ends[-1] > rows:
            raise IndexError(f"cu_seq_lens: ends at {ends[-1]}, dst_k has {rows} rows")
        lens = np.diff(ends)
        check_blocks(table, np.zeros_like(lens), lens, cache)
    place.call(
        cuda.cp_gather_indexer_k_quant_cache, reference.cp_gather_indexer_k_quant_cache,
        layout, cache, keys, scales, table, starts,
    )  # fmt: skip


def indexer_layout(cache: Array) -> Layout:
    """Check a paged cache of the indexer's keys; returns its layout, told by the last axis."""
    layout = cache_layout(cache, INDEXER_LAYOUTS)
    require_cache(cache, layout, ALIGNMENT)
    return layout
