"""MXFP4 in plain NumPy: e2m1 values, two a byte, with a power of two as scale for each group of 32."""

from __future__ import annotations

import numpy as np

from ..dtypes import E5M2, E8M0
from ..layouts import LEAST_NORMAL

GROUP, NAN_SCALE = 32, 255
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])  # by code
BETWEEN = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)  # midpoints, which round to the even code
WIDENED_BY = 13  # e5m2 numbers are e2m1 times 2^13 in the group of the largest scale
SUBNORMALS = 16  # e5m2 numbers are multiples of 2^-16


@np.errstate(all="ignore")
def quantize(values: np.ndarray, least_scale: float = LEAST_NORMAL) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., n / 2] and scales [..., n / 32], both uint8, of bf16 numbers [..., n] given as float32. A group with
    a NaN has the scale NaN, and codes of zero. No scale is below `least_scale`, a power of two."""
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // GROUP, GROUP)
    amax = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(6 * least_scale))
    mantissa, exponent = np.frexp(amax)  # amax / 6 = mantissa / 0.75 * 2 ** (exponent - 3)
    exponent = np.where(np.isinf(amax), 127, exponent - 3 + (mantissa > 0.75))
    codes = np.where(np.isnan(amax), 0, codes_of(np.ldexp(groups, -exponent)))
    scales = np.where(np.isnan(amax), NAN_SCALE, exponent + 127)[..., 0]
    return packed(codes.reshape(values.shape)), scales.astype(np.uint8)


def codes_of(values: np.ndarray) -> np.ndarray:
    """E2m1 codes of numbers: rounded to the nearest, ties to even codes, saturated at 6. Zeros keep their sign."""
    magnitudes = np.abs(values)
    codes = np.searchsorted(BETWEEN, magnitudes.reshape(-1)).reshape(values.shape)  # ties to the lower code,
    codes += (codes % 2 == 1) & (magnitudes == BETWEEN[np.minimum(codes, len(BETWEEN) - 1)])  # or to the even one
    return codes + 8 * np.signbit(values)


def packed(codes: np.ndarray) -> np.ndarray:
    """Bytes [..., n / 2] of codes [..., n]."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def unpacked(codes: np.ndarray) -> np.ndarray:
    """E2m1 numbers [..., n] float32 of bytes [..., n / 2]."""
    return E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values [..., n] float64, exactly."""
    return unpacked(codes).astype(np.float64) * np.repeat(scales.view(E8M0).astype(np.float64), GROUP, axis=-1)


def widen(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values as e5m2 [..., n], and their factors [...] float32: powers of two, or 0 where float32 has no normal
    one. Values in small groups of a row are truncated; see `cupy_mla.widen_mxfp4`."""
    largest = scales.max(axis=-1).astype(np.int64)
    exponent = np.repeat(WIDENED_BY - (largest[..., None] - scales), GROUP, axis=-1)
    multiples = np.trunc(np.ldexp(unpacked(codes), exponent + SUBNORMALS))
    values = np.ldexp(multiples, -SUBNORMALS).astype(E5M2)
    factors = np.ldexp(np.float32(1), largest - 127 - WIDENED_BY).astype(np.float32)
    factors = np.where(factors < np.finfo(np.float32).tiny, np.float32(0), factors)
    return values, np.where(largest == NAN_SCALE, np.float32(np.nan), factors)


def widen_mxfp4(
    codes: np.ndarray, scales: np.ndarray, weights: np.ndarray | None, values: np.ndarray, factors: np.ndarray
) -> None:
    """Codes to e5m2, factors times weights; see `cupy_mla.widen_mxfp4`."""
    values[...], factors[...] = widen(codes.view(np.uint8), scales)
    if weights is not None:
        factors *= weights
