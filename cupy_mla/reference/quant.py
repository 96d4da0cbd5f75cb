"""Quantization of whole tensors in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..dtypes import E4M3, E4M3_MAX

LEAST_AMAX = np.float32(1e-10)


@np.errstate(all="ignore")
def dynamic_per_batched_tensor_quant(x: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> None:
    """One scale for all of x; see `cupy_mla.dynamic_per_batched_tensor_quant`."""
    values = x.astype(np.float32)
    factor = np.float32(E4M3_MAX) / np.maximum(np.abs(values).max(initial=0), LEAST_AMAX)
    codes[...] = np.clip(values * factor, -E4M3_MAX, E4M3_MAX).astype(E4M3)
    scale[...] = np.float32(1) / factor
