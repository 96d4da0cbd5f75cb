"""Gathers of cached rows, and concatenation of queries, in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..layouts import Layout
from .cache import rope_bits, rows_of
from .indices import find_slots


@np.errstate(all="ignore")
def cp_gather_and_upconvert_fp8_kv_cache(
    layout: Layout,
    src_cache: np.ndarray,
    dst: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    workspace_starts: np.ndarray,
    k_scale: float | np.ndarray,
) -> None:
    """Paged FP8 tokens to consecutive bf16 rows; see `cupy_mla.cp_gather_and_upconvert_fp8_kv_cache`."""
    num_blocks, block_size, _ = src_cache.shape
    for r, (length, start) in enumerate(zip(seq_lens.tolist(), workspace_starts.tolist(), strict=True)):
        if not 0 <= start < len(dst):
            continue
        rows = dst[start : start + max(length, 0)]
        slots = find_slots(block_table, np.array(r), np.arange(len(rows)), block_size)
        found = (slots >= 0) & (slots < num_blocks * block_size)
        rows[found] = rows_of(src_cache, layout, slots[found], k_scale)
        rows[found, layout.d_nope :] = rope_bits(src_cache, layout, slots[found])
        rows[~found] = 0


@np.errstate(all="ignore")
def dequantize_and_gather_k_cache(
    layout: Layout,
    out: np.ndarray,
    k_cache: np.ndarray,
    seq_lens: np.ndarray,
    gather_lens: np.ndarray | None,
    block_table: np.ndarray,
    offset: int,
) -> None:
    """The last paged FP8 tokens of requests to bf16 rows; see `cupy_mla.dequantize_and_gather_k_cache`."""
    num_blocks, block_size, _ = k_cache.shape
    wanted = seq_lens if gather_lens is None else np.minimum(gather_lens, seq_lens)
    for r, (length, count) in enumerate(zip(seq_lens.tolist(), wanted.tolist(), strict=True)):
        rows = out[r, offset : offset + max(count, 0)]
        slots = find_slots(block_table, np.array(r), length - count + np.arange(len(rows)), block_size)
        found = (slots >= 0) & (slots < num_blocks * block_size)
        rows[found] = rows_of(k_cache, layout, slots[found])
        rows[found, layout.d_nope :] = rope_bits(k_cache, layout, slots[found])
        rows[~found] = 0


def concat_mla_q(ql_nope: np.ndarray, q_pe: np.ndarray, out: np.ndarray) -> None:
    """The two parts of every query head side by side; see `cupy_mla.concat_mla_q`."""
    np.concatenate([ql_nope, q_pe], axis=-1, out=out)
