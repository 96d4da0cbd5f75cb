"""Quantization of whole tensors against the specification's formula."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.ops.quant import dynamic_per_batched_tensor_quant
from tests import oracle
from tests.kinds import BF16, gapped

FLOAT32 = np.dtype(np.float32)


def check(kind, x: np.ndarray) -> None:
    """Same codes and scale as float32 arithmetic in the order of the formula."""
    values = x.astype(np.float32)
    factor = np.float32(448) / max(np.float32(np.abs(values).max(initial=0)), np.float32(1e-10))
    want = oracle.e4m3_code(np.clip(values * factor, -448, 448))
    codes, scale = dynamic_per_batched_tensor_quant(kind.put(x))
    assert kind.is_mine(codes)
    assert kind.is_mine(scale)
    got = kind.take(codes).view(np.uint8)
    assert got.shape == x.shape
    np.testing.assert_array_equal(got, want)
    assert kind.take(scale).shape == ()
    assert kind.take(scale)[()] == np.float32(1) / factor


@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5, 576), (4096,), (4097,), (2, 3, 4095), (37, 1, 9, 130)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_quantize(kind, rng, shape: tuple[int, ...], dtype: np.dtype, size: float) -> None:
    x = (size * rng.standard_normal(shape)).astype(dtype)
    x.reshape(-1)[rng.integers(x.size)] *= 8  # stands alone at the top
    x.reshape(-1)[rng.integers(x.size)] = -0.0
    check(kind, x)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_single(kind, shape: tuple[int, ...]) -> None:
    check(kind, np.full(shape, 3.5, np.float32))


@pytest.mark.parametrize("value", [0.0, 1e-12, -1e-10, 3e38])
def test_constant_tensors(kind, value: float) -> None:
    check(kind, np.full((3, 50), value, np.float32))


def test_memory_that_is_not_aligned(kind, rng) -> None:
    x = gapped(rng.standard_normal(5003).astype(BF16), 5)
    whole = x.base
    whole[3:5006] = x
    check(kind, whole[3:5006])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_infinity_and_nan(kind, rng, bad: float) -> None:
    """NaN spoils everything; infinity leaves zeros and, in its own place, NaN. NaN is 0x7F."""
    x = rng.standard_normal((9, 999)).astype(np.float32)
    x[4, 7] = bad
    codes, scale = dynamic_per_batched_tensor_quant(kind.put(x))
    got = kind.take(codes).view(np.uint8)
    assert got[4, 7] == 0x7F
    others = np.delete(got.ravel(), 4 * 999 + 7)
    if np.isnan(bad):
        assert (others == 0x7F).all()
        assert np.isnan(kind.take(scale))
    else:
        assert (oracle.E4M3[others] == 0).all()
        assert np.isinf(kind.take(scale))


@pytest.mark.gpu
def test_a_large_tensor(kind, rng) -> None:
    """More tiles than blocks run at a time, and not a whole number of tiles."""
    if not kind.on_gpu:
        pytest.skip("a launch shape of the kernel")
    check(kind, rng.standard_normal(9_000_001, np.float32).astype(BF16))


def test_errors() -> None:
    with pytest.raises(TypeError, match="x: expected dtype bfloat16 or float32, got float16"):
        dynamic_per_batched_tensor_quant(np.zeros((3, 4), np.float16))
    for gaps in (np.zeros((3, 6), BF16)[:, :4], np.zeros((4, 3), BF16).T, np.zeros((3, 8), BF16)[:, ::2]):
        with pytest.raises(ValueError, match="x: "):
            dynamic_per_batched_tensor_quant(gaps)
    with pytest.raises(TypeError, match="x: expected a NumPy, CuPy or torch array"):
        dynamic_per_batched_tensor_quant([1.0])
