"""The indexer's key cache in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..dtypes import E4M3_MAX
from ..layouts import INDEXER_FP8, INDEXER_MXFP4, LEAST_NORMAL, Layout
from . import mxfp4
from .cache import AMAX_FLOOR, _ceil_log2, _quantize, _regions, _targets, _tiles
from .indices import find_slots


@np.errstate(all="ignore")
def indexer_k_quant_and_cache(
    layout: Layout,
    k: np.ndarray,
    kv_cache: np.ndarray,
    slots: np.ndarray,
    scale_format: str,
    least_scale: float = LEAST_NORMAL,
) -> None:
    """Write tokens' keys into the cache; see `cupy_mla.indexer_k_quant_and_cache`."""
    tokens, block, offset = _targets(slots, kv_cache)
    keys, scale_bytes = key_regions(layout, kv_cache)
    if layout is INDEXER_MXFP4:
        keys[block, offset], scale_bytes[block, offset] = mxfp4.quantize(k[tokens].astype(np.float32), least_scale)
        return
    values, amax = _tiles(INDEXER_FP8, k[tokens])
    scales = np.maximum(amax, AMAX_FLOOR) / E4M3_MAX
    if scale_format == "ue8m0":
        scales = np.ldexp(np.float32(1), _ceil_log2(scales))
    keys[block, offset] = _quantize(values, scales)
    scale_bytes[block, offset] = scales.view(np.uint8)


def key_regions(layout: Layout, kv_cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of a cache's key bytes [num_blocks, block_size, 128 or 64] and scale bytes [num_blocks, block_size, 4]."""
    keys, _, scale_bytes = _regions(layout, kv_cache)
    return keys, scale_bytes


def cp_gather_indexer_k_quant_cache(
    layout: Layout,
    kv_cache: np.ndarray,
    dst_k: np.ndarray,
    dst_scale: np.ndarray,
    block_table: np.ndarray,
    cu_seq_lens: np.ndarray,
) -> None:
    """Copy requests' keys and scales into consecutive rows; see `cupy_mla.cp_gather_indexer_k_quant_cache`."""
    num_blocks, block_size, _ = kv_cache.shape
    keys, scale_bytes = key_regions(layout, kv_cache)
    codes = dst_k.view(np.uint8)
    widens = codes.shape[1] != keys.shape[2]
    for r, (begin, end) in enumerate(zip(cu_seq_lens[:-1].tolist(), cu_seq_lens[1:].tolist(), strict=True)):
        if not 0 <= begin < min(end, len(codes)):
            continue
        rows = slice(begin, min(end, len(codes)))
        slots = find_slots(block_table, np.array(r), np.arange(rows.stop - begin), block_size)
        found = (slots >= 0) & (slots < num_blocks * block_size)
        block, offset = np.divmod(slots[found], block_size)
        if widens:
            values, dst_scale[rows][found] = mxfp4.widen(keys[block, offset], scale_bytes[block, offset])
            codes[rows][found] = values.view(np.uint8)
        else:
            codes[rows][found] = keys[block, offset]
            dst_scale[rows][found] = scale_bytes[block, offset].view(np.float32)[:, 0]
        codes[rows][~found] = 0
        dst_scale[rows][~found] = 0
