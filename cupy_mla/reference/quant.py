"""Quantization of whole tensors in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..dtypes import E4M3, E4M3_MAX

LEAST_AMAX = np.float32(1e-10)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Float32 rounded to the nearest e4m3 number, ties to even, saturated. NaN of either sign is 0x7F."""
    saturated = np.clip(values, -E4M3_MAX, E4M3_MAX)
    return np.where(np.isnan(values), np.float32(np.nan), saturated).astype(E4M3)


@np.errstate(all="ignore")
def dynamic_per_batched_tensor_quant(x: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> None:
    """One scale for all of x; see `cupy_mla.dynamic_per_batched_tensor_quant`."""
    values = x.astype(np.float32)
    factor = np.float32(E4M3_MAX) / np.maximum(np.abs(values).max(initial=0), LEAST_AMAX)
    codes[...] = to_e4m3(values * factor)
    scale[...] = np.float32(1) / factor
