"""NVFP4 in plain NumPy: e2m1 values, two a byte, with an e4m3 scale for each tile of 16."""

from __future__ import annotations

import numpy as np

from ..dtypes import E4M3, E4M3_MAX
from ..layouts import Layout
from . import mxfp4

NAN_SCALE, LARGEST_SCALE = 0x7F, 0x7E
E2M1_MAX = np.float32(6)


def quantize(layout: Layout, values: np.ndarray, round_up: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, d_nope / 2] and scales [n, num_scales], both uint8, of bf16 numbers [n, d_nope] given as float32. A
    tile with a NaN or an infinity has the scale NaN, and codes of zero.

    Args:
        round_up: a scale is the smallest that is not below `amax / 6`, not the nearest to it.
    """
    tiles = values.reshape(len(values), layout.num_scales, layout.scale_tile)
    amax = np.abs(tiles).max(axis=-1)
    ratio = np.maximum(amax / E2M1_MAX, np.float32(layout.least_scale))
    stored = np.minimum(ratio, E4M3_MAX).astype(E4M3).view(np.uint8)
    if round_up:
        stored = stored + ((numbers(stored) < ratio) & (stored < LARGEST_SCALE))
    scales = numbers(stored)
    inverse = np.where(scales == 0, np.float32(0), 1 / scales)
    scaled = tiles / scales[..., None] if layout.divided else tiles * inverse[..., None]
    lost = ~np.isfinite(amax)
    codes = np.where(lost[..., None], 0, mxfp4.codes_of(scaled))
    return mxfp4.packed(codes.reshape(values.shape)), np.where(lost, NAN_SCALE, stored).astype(np.uint8)


def numbers(scales: np.ndarray) -> np.ndarray:
    """Scales as float32."""
    return scales.view(E4M3).astype(np.float32)
