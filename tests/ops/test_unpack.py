"""Caches that hold nothing yet, and their rows as numbers, against the bytes' description."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla import empty_cache, layouts, unpack_rows
from cupy_mla.bridges import Place, describe
from tests import oracle
from tests.cases import block_bytes, paged_rows
from tests.kinds import BF16, E4M3, gapped, poisoned
from tests.ops.test_indexer import key_cache, token_bytes

every_format = pytest.mark.parametrize("fmt", [*oracle.FORMATS, "indexer"], ids=lambda fmt: getattr(fmt, "name", fmt))


def full(rng: np.random.Generator, fmt, num_blocks: int, block_size: int, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """A cache with a row in every slot, and the rows, float32 by slot."""
    slots = num_blocks * block_size
    if fmt != "indexer":
        cache = paged_rows(rng, fmt, num_blocks, block_size, np.arange(slots), gap)
        blocks = [block_bytes(cache, b).tobytes() for b in range(num_blocks)]
        rows = [oracle.unpack_row(fmt, blocks[s // block_size], block_size, s % block_size) for s in range(slots)]
        return cache, np.array(rows).astype(np.float32)
    cache, want = key_cache(num_blocks, block_size, gap), np.empty((slots, 128), np.float32)
    for slot in range(slots):
        codes, scale = token_bytes(cache, slot)
        codes[...] = rng.standard_normal(128).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        scale[...] = np.frombuffer(np.float32(rng.uniform(0.01, 2)).tobytes(), np.uint8)
        want[slot] = codes.view(E4M3).astype(np.float32) * scale.view(np.float32)
    return cache, want


def check(kind, rng, fmt, num_blocks: int, block_size: int, gap: int, dtype: type) -> None:
    """Slots in any order, some twice, some that are none; results with gaps between the rows, which stay."""
    cache, want = full(rng, fmt, num_blocks, block_size, gap)
    count, beyond = len(want), len(want) + np.array([0, 1, 2**31 - 1 - len(want)])
    slots = np.concatenate([rng.integers(0, count, 2 * count), beyond, [-1, -(2**31)]]).astype(dtype)
    if dtype is np.int64:
        slots = np.append(slots, [2**40, -(2**62), 2**32])
    rng.shuffle(slots)
    exists = (slots >= 0) & (slots < count)
    expected = np.where(exists[:, None], want[np.where(exists, slots, 0)], 0)
    got = unpack_rows(kind.put(cache), kind.put(slots))
    assert kind.is_mine(got)
    np.testing.assert_array_equal(kind.take(got), expected)
    out, whole = kind.put_with_allocation(gapped(poisoned(expected.shape, np.float32), 0, 3))
    assert unpack_rows(kind.put(cache), kind.put(slots), out=out) is out
    np.testing.assert_array_equal(kind.take(out), expected)
    assert (kind.take(whole).reshape(len(slots), -1)[:, 4 * expected.shape[1] :] == 0xFF).all()


@every_format
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "gap"), [(1, 1, 0), (3, 2, 1), (2, 61, 0), (3, 64, 2), (1, 128, 1), (2, 256, 0)]
)
def test_rows(kind, rng, fmt, dtype: type, num_blocks: int, block_size: int, gap: int) -> None:
    check(kind, rng, fmt, num_blocks, block_size, gap, dtype)


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_every_code_and_every_scale(kind, rng, fmt) -> None:
    """Random bytes: NaN, subnormal codes and products, scales that are infinite, NaN or negative."""
    cache = np.zeros((3, 64, fmt.token_bytes), np.uint8)
    cache[...] = rng.integers(0, 256, cache.shape, np.uint8)
    slots = rng.permutation(192)
    got = kind.take(unpack_rows(kind.put(cache), kind.put(slots)))
    if fmt is oracle.V4:  # byte 255 is NaN in the OCP format and 2**128 by formula: no number either way
        scales = cache.reshape(3, -1)[:, 576 * 64 :].reshape(192, 8)[slots, :7]
        assert np.isnan(got[:, :448].reshape(192, 7, 64)[scales == 255]).all()
        got[:, :448].reshape(192, 7, 64)[scales == 255] = 0
        cache.reshape(3, -1)[:, 576 * 64 :][cache.reshape(3, -1)[:, 576 * 64 :] == 255] = 0
    with np.errstate(all="ignore"):
        want = oracle.named_rows(fmt, cache, slots).astype(np.float32)
    if fmt is oracle.V4:
        want[:, :448].reshape(192, 7, 64)[scales == 255] = 0
    np.testing.assert_array_equal(got, want)


def test_a_head_axis_and_e4m3(kind, rng) -> None:
    cache, want = full(rng, oracle.V32, 2, 8, 1)
    slots = np.arange(16)
    for view in (cache[:, :, None], cache.view(E4M3)):
        np.testing.assert_array_equal(kind.take(unpack_rows(kind.put(view), kind.put(slots))), want)


def test_no_rows(kind) -> None:
    cache = kind.put(np.zeros((2, 8, 656), np.uint8))
    assert kind.take(unpack_rows(cache, kind.put(np.zeros(0, np.int32)))).shape == (0, 576)
    got = unpack_rows(kind.put(np.zeros((0, 8, 656), np.uint8)), kind.put(np.arange(3)))
    assert (kind.take(got) == np.zeros((3, 576))).all()


# --- caches that hold nothing yet -----------------------------------------------------------------------------

LAYOUTS = [*layouts.CACHE_LAYOUTS, layouts.INDEXER_FP8]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.d_qk}")
@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (1, 1), (3, 2), (2, 64), (5, 61)])
def test_empty_caches(kind, layout, num_blocks: int, block_size: int) -> None:
    """Zeros, with the block stride of the layout's writers; the same by the layout's name."""
    place = Place.of(kind.put(np.zeros(1, np.float32)))
    cache = empty_cache(layout, num_blocks, block_size, place)
    assert kind.is_mine(cache)
    described = describe("cache", cache)
    assert (described.shape, described.dtype) == ((num_blocks, block_size, layout.last_axis), layout.dtype)
    if num_blocks > 1:
        assert described.strides[0] * layout.dtype.itemsize == layout.block_bytes(block_size)
    assert not kind.take(cache).view(np.uint8).any()
    named = empty_cache(layout.name, num_blocks, block_size, tuple(place), d_qk=layout.d_qk)
    assert describe("cache", named).strides == described.strides


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.d_qk}")
def test_they_are_what_operations_take(kind, rng, layout) -> None:
    """Rows that are written come back, and no block writes into another one."""
    place, slots = Place.of(kind.put(np.zeros(1))), rng.permutation(3 * 5)
    cache = empty_cache(layout, 3, 5, place)
    rows = np.repeat(6 * 2.0 ** rng.integers(-3, 3, (15, 1)), layout.d_qk, axis=1).astype(BF16)
    k, at, named = kind.put(rows), kind.put(slots), {} if layout.told else {"layout": layout.name}
    if layout in layouts.INDEXER_LAYOUTS:
        cupy_mla.indexer_k_quant_and_cache(k, cache, at)
    elif layout in layouts.QUANTIZED_OF_V4:
        cupy_mla.quantize_and_insert_k_cache(k, cache, at, **named)
    else:
        cupy_mla.concat_and_cache_mla(kind.put(rows[:, :512]), kind.put(rows[:, 512:].copy()), cache, at, **named)
    got = kind.take(unpack_rows(cache, at, **named))
    np.testing.assert_allclose(got, rows.astype(np.float32), rtol=1e-6)


def test_empty_caches_that_cannot_be() -> None:
    for given, error, message in (
        (("fp4", 2, 8), ValueError, "layout must be one of"),
        ((None, 2, 8), TypeError, "layout: expected one of"),
        (("bf16", -1, 8), ValueError, "num_blocks must be >= 0"),
        (("bf16", 2, 0), ValueError, "block_size must be >= 1"),
        (("bf16", 2, 1.5), TypeError, "block_size: expected an integer"),
        (("bf16", 2, 8, "cpu"), TypeError, "place: expected a kind of array and a device"),
        (("bf16", 2, 8, ("numpy", 0)), ValueError, r"device must be in -1\.\.-1"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            empty_cache(*given)
    with pytest.raises(ValueError, match="d_qk of a bf16 cache must be 576 or 512, got 64"):
        empty_cache("bf16", 2, 8, d_qk=64)
