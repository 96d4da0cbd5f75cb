"""Packing into and unpacking from the paged KV caches, in plain NumPy.

Caches arrive as [num_blocks, block_size, last axis] views whose block stride may exceed the block. Arithmetic is
float32 throughout, in the order the format's description gives, so that bytes agree with other writers.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..arguments import RowScales
from ..dtypes import BFLOAT16, E4M3, E4M3_MAX, E8M0, FLOAT32
from ..layouts import LEAST_NORMAL, Layout
from . import mxfp4, nvfp4
from .quant import to_e4m3

AMAX_FLOOR = 1e-4  # power-of-two scales are made of at least this, so that none is 0
E8M0_BIAS = 127
SCALE_BYTES = {"call": 0, "fp32": 4, "ue8m0": 1, "e4m3": 1}


@np.errstate(all="ignore")
def concat_and_cache_mla(
    layout: Layout,
    kv_c: np.ndarray,
    k_pe: np.ndarray,
    cache: np.ndarray,
    slots: np.ndarray,
    scales: RowScales,
) -> None:
    """Write tokens whose RoPE values are an array of their own; see `cupy_mla.concat_and_cache_mla`."""
    no_rope = np.zeros((len(kv_c), layout.d_qk - kv_c.shape[1] - k_pe.shape[1]), BFLOAT16)
    rows = np.concatenate([kv_c, k_pe, no_rope], axis=1)
    pack_rows(layout, rows, cache, slots, scales)


@np.errstate(all="ignore")
def quantize_and_insert_k_cache(
    layout: Layout, k: np.ndarray, cache: np.ndarray, slots: np.ndarray, least_scale: float
) -> None:
    """Write whole rows; see `cupy_mla.quantize_and_insert_k_cache`."""
    pack_rows(layout, k, cache, slots, RowScales(False, least_scale))


@np.errstate(all="ignore")
def pack_rows(layout: Layout, rows: np.ndarray, cache: np.ndarray, slots: np.ndarray, scaled: RowScales) -> None:
    """Write rows into a cache of any layout. A row whose slot is not in the cache is skipped.

    Args:
        rows: [T, d_qk] bfloat16.
        cache: [num_blocks, block_size, last axis] in `layout`.
        slots: [T'] integers, T' <= T.
        scaled: how they get their scales.
    """
    tokens, block, offset = _targets(slots, cache)
    rows = rows[tokens]
    if not layout.quantized:
        cache[block, offset] = rows
        return
    if layout.scale_of_call:
        values = rows.astype(np.float32)[:, None]  # one tile
        cache.view(np.uint8)[block, offset] = _quantize(values, np.full((len(rows), 1), scaled.of_call, np.float32))
        return
    nope, rope, scale_bytes = _regions(layout, cache)
    if layout.scale_kind == "e4m3":
        values = rows[:, : layout.d_nope].astype(np.float32)
        nope[block, offset], stored = nvfp4.quantize(layout, values, scaled.round_up)
    else:
        tiles, amax = _tiles(layout, rows)
        scales, stored = _scales(layout, amax, scaled)
        codes = _quantize(tiles, scales)
        codes[np.repeat(scales == 0, layout.scale_tile, axis=1)] = 0
        nope[block, offset] = codes
    rope[block, offset] = _rope_bytes(layout, rows)
    if layout.scales_in_fours:
        stored = stored.reshape(len(rows), layout.num_scales // 4, 4).swapaxes(1, 2).reshape(stored.shape)
    scale_bytes[block, offset, : stored.shape[1]] = stored
    scale_bytes[block, offset, stored.shape[1] :] = 0  # padding


@np.errstate(all="ignore")
def rows_of(cache: np.ndarray, layout: Layout, slots: np.ndarray, k_scale: float | np.ndarray = 1.0) -> np.ndarray:
    """The rows in the given slots as numbers; other rows are not read.

    Args:
        cache: [num_blocks, block_size, last axis] in `layout`.
        slots: [n] integers, each in 0 .. num_blocks * block_size - 1.
        k_scale: the scale of all rows, for layouts whose scale is an argument.

    Returns:
        [n, d_qk] float32; in quantized layouts `float(code) * scale`.
    """
    block, offset = np.divmod(slots, cache.shape[1])
    if not layout.quantized:
        return cache[block, offset].astype(np.float32)
    if layout.scale_of_call:
        return cache[block, offset].view(E4M3).astype(np.float32) * np.asarray(k_scale, np.float32)
    nope, rope, scale_bytes = (region[block, offset] for region in _regions(layout, cache))
    scales = _scale_numbers(layout, scale_bytes)
    rows = np.empty((len(slots), layout.d_qk), np.float32)
    rows[:, : layout.d_nope] = mxfp4.unpacked(nope) if layout.code_bits == 4 else nope.view(E4M3)
    rows[:, layout.d_nope :] = _rope_numbers(layout, rope)
    tiles = rows[:, : layout.d_nope].reshape(len(slots), layout.num_scales, layout.scale_tile)
    tiles[...] = np.where(scales[..., None] == 0, 0, tiles * scales[..., None])  # 0 also for NaN codes
    return rows


@np.errstate(all="ignore")
def unpack_rows(
    layout: Layout, cache: np.ndarray, slots: np.ndarray, k_scale: float | np.ndarray, out: np.ndarray
) -> None:
    """Rows as numbers, zeros for slots that the cache has not; see `cupy_mla.unpack_rows`."""
    found = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    out[found] = rows_of(cache, layout, slots[found], k_scale)
    out[~found] = 0


def rope_bits(cache: np.ndarray, layout: Layout, slots: np.ndarray) -> np.ndarray:
    """The RoPE parts [n, d_rope] bfloat16 of rows in a quantized cache; if they are stored in bfloat16, the same
    bits."""
    block, offset = np.divmod(slots, cache.shape[1])
    return _rope_numbers(layout, _regions(layout, cache)[1][block, offset]).astype(BFLOAT16)


def _targets(slots: np.ndarray, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that are written, and the block and the offset in it of each."""
    num_blocks, block_size, _ = cache.shape
    tokens = np.flatnonzero((slots >= 0) & (slots < num_blocks * block_size))
    return tokens, *np.divmod(slots[tokens], block_size)


def _regions(layout: Layout, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of the cache's NoPE, RoPE and scale bytes, each [num_blocks, block_size, bytes a token].

    If a block's scales stand behind its tokens' data, the cache's last axis does not tell where a token's bytes are.
    """
    num_blocks, block_size, _ = cache.shape
    block_stride = cache.strides[0]
    flat = as_strided(cache.view(np.uint8), (num_blocks, block_size * layout.token_bytes), (block_stride, 1))

    def region(start: int, nbytes: int, token_stride: int) -> np.ndarray:
        return as_strided(flat[:, start:], (num_blocks, block_size, nbytes), (block_stride, token_stride, 1))

    nope = region(0, layout.nope_bytes, layout.row_stride)
    rope = region(layout.rope_offset, layout.rope_bytes, layout.row_stride)
    if layout.scales_apart:
        scales = region(layout.row_stride * block_size, layout.scale_stride, layout.scale_stride)
    else:
        scales = region(layout.scale_offset, layout.num_scales * SCALE_BYTES[layout.scale_kind], layout.row_stride)
    return nope, rope, scales


def _tiles(layout: Layout, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quantized part as float32 [n, scales, tile], and the largest magnitude of each tile, which ignores NaN."""
    values = rows[:, : layout.d_nope].astype(np.float32).reshape(len(rows), layout.num_scales, layout.scale_tile)
    return values, np.fmax.reduce(np.abs(values), axis=-1, initial=np.float32(0))


def _scales(layout: Layout, amax: np.ndarray, scaled: RowScales) -> tuple[np.ndarray, np.ndarray]:
    """The scales [n, scales] float32 of tiles with these largest magnitudes, and their bytes in the cache."""
    least = np.float32(scaled.least)
    if layout.scale_kind == "ue8m0":
        exponents = np.clip(_ceil_log2(np.maximum(amax / E4M3_MAX, least)), -E8M0_BIAS, 255 - E8M0_BIAS)
        return np.ldexp(np.float32(1), exponents), (exponents + E8M0_BIAS).astype(np.uint8)
    if scaled.round_up:
        scales = np.ldexp(np.float32(1), _ceil_log2(np.maximum(amax / E4M3_MAX, AMAX_FLOOR)))
    else:
        scales = amax / E4M3_MAX
        scales = np.maximum(np.where(scales < LEAST_NORMAL, np.float32(0), scales), least)
    return scales, scales.view(np.uint8)


def _ceil_log2(x: np.ndarray) -> np.ndarray:
    """The exponent of the smallest power of two that is not below x > 0. It is exact, unlike a logarithm.

    Infinity has the exponent with which float32 stores it.
    """
    mantissa, exponent = np.frexp(x)
    return np.where(np.isinf(x), 255 - E8M0_BIAS, exponent - (mantissa == 0.5))


def _quantize(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E4M3 bytes [n, d_nope] of values / scales, rounded to nearest even, saturated; NaN is 0x7F."""
    n, tiles, tile = values.shape
    return to_e4m3(values / scales[..., None]).view(np.uint8).reshape(n, tiles * tile)


def _rope_bytes(layout: Layout, rows: np.ndarray) -> np.ndarray:
    rope = rows[:, layout.d_nope :]
    if layout.rope_coded:
        return _quantize(rope.astype(np.float32)[:, None], np.ones((len(rows), 1), np.float32))
    return np.ascontiguousarray(rope).view(np.uint8)


def _rope_numbers(layout: Layout, rope: np.ndarray) -> np.ndarray:
    return rope.view(E4M3 if layout.rope_coded else BFLOAT16)


def _scale_numbers(layout: Layout, scale_bytes: np.ndarray) -> np.ndarray:
    """The scales [n, num_scales] float32 of rows, in the order of their tiles."""
    dtype = {"fp32": FLOAT32, "ue8m0": E8M0, "e4m3": E4M3}[layout.scale_kind]
    scales = scale_bytes.view(dtype)[:, : layout.num_scales].astype(np.float32)
    if layout.scales_in_fours:
        scales = scales.reshape(len(scales), 4, layout.num_scales // 4).swapaxes(1, 2).reshape(scales.shape)
    return scales
