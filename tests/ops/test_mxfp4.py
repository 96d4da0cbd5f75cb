"""MXFP4 keys and queries of the indexer against plain loops, byte for byte."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import pytest

from cupy_mla import (
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
    indexer_logits,
    paged_indexer_logits,
    quantize_indexer_q,
    quantize_indexer_q_mxfp4,
    unpack_rows,
    widen_mxfp4,
)
from tests import oracle, oracle_indices, oracle_mxfp4
from tests.indexers import empty_key_cache
from tests.kinds import BF16, E5M2, POISON, gapped, poisoned

from .test_indexer import mxfp4_rows, pack

key_cache = partial(empty_key_cache, token_bytes=68)


@pytest.mark.parametrize(
    ("row", "head", "scales", "digest"),
    [
        (oracle_mxfp4.row_a(), "8cc4512a9dc4401b", "7e7e7e7e", "2f0ab81df3a379dc"),
        (oracle_mxfp4.row_b(), "0200e00000000000", "7f010101", "33a202f2b9ab1277"),
    ],
)
def test_vectors_of_the_specification(kind, row: np.ndarray, head: str, scales: str, digest: str) -> None:
    got = pack(kind, row.astype(BF16)[None], key_cache(1, 1), np.zeros(1, np.int64), "mxfp4").tobytes()
    assert (got[:8].hex(), got[64:].hex()) == (head, scales)
    assert hashlib.sha256(got).hexdigest()[:16] == digest


@pytest.mark.parametrize("floor", [2.0**-126, 2.0**-13, 1])
def test_scale_floor(kind, rng, floor: float) -> None:
    """2**-13 is SGLang's: `max(amax / 6, 1e-4)` rounded up to a power of two."""
    rows = mxfp4_rows(rng, 60)
    cache = kind.put(key_cache(60, 1))
    indexer_k_quant_and_cache(kind.put(rows), cache, kind.put(np.arange(60)), scale_floor=floor)
    want = [np.concatenate(oracle_mxfp4.pack(row, floor)) for row in rows]
    np.testing.assert_array_equal(kind.take(cache)[:, 0], want)


@pytest.mark.long
def test_every_bfloat16(kind) -> None:
    """Each of the 2^16 numbers beside zeros, so that it decides about its scale, and all beside their neighbours."""
    bits = np.arange(2**16, dtype=np.uint16)
    alone = np.zeros((2**14, 4, 32), np.uint16)
    alone[:, :, 2] = bits.reshape(2**14, 4)
    rows = np.concatenate([alone.reshape(-1, 128), bits.reshape(-1, 128)]).view(BF16)
    got = pack(kind, rows, key_cache(1, len(rows)), np.arange(len(rows)), "mxfp4")
    codes, scales = got[: 64 * len(rows)].reshape(-1, 4, 16), got[64 * len(rows) :].reshape(-1, 4)
    for t in range(2**14, len(rows)):
        want = oracle_mxfp4.pack(rows[t])
        assert (codes[t].tobytes(), scales[t].tobytes()) == (want[0].tobytes(), want[1].tobytes()), rows[t]
    with np.errstate(invalid="ignore"):  # NaN
        numbers = bits.view(BF16).astype(np.float64)
    want = [oracle_mxfp4.scale_byte(x[None]) for x in numbers]
    assert scales[: 2**14].reshape(-1).tolist() == want
    assert not np.delete(codes[: 2**14], 1, axis=2).any()
    expected = [0 if s == 255 else oracle_mxfp4.code(x * 2.0 ** (127 - s)) for x, s in zip(numbers, want, strict=True)]
    assert codes[: 2**14, :, 1].reshape(-1).tolist() == expected


def check_gather(kind, cache: np.ndarray, table: np.ndarray, starts, rows: int, widened: bool) -> None:
    num_blocks, block_size, _ = cache.shape
    codes, scales = np.full((rows, 64), POISON, np.uint8), np.full((rows, 4), POISON, np.uint8)
    written, found = np.zeros(rows, bool), np.zeros(rows, bool)
    for r in range(len(table)):
        for t in range(max(0, min(starts[r + 1], rows) - starts[r])):
            slot = oracle_indices.slot(table, r, t, block_size)
            row = starts[r] + t
            written[row], found[row] = True, 0 <= slot < num_blocks * block_size
            codes[row], scales[row] = oracle_mxfp4.token(cache, slot) if found[row] else (0, 0)
    dst = poisoned((rows, 128), E5M2) if widened else poisoned((rows, 64), np.uint8)
    dst_k = kind.put(gapped(dst, 0, 4 if rows % 2 else 0))
    dst_scale = kind.put(poisoned((rows, 4), np.uint8) if not widened else poisoned(rows, np.float32))
    inputs = [kind.put(a) for a in (table, np.asarray(starts, np.int32))]
    cp_gather_indexer_k_quant_cache(kind.put(cache), dst_k, dst_scale, *inputs)
    got, got_scales = kind.take(dst_k).view(np.uint8), kind.take(dst_scale)
    if not widened:
        np.testing.assert_array_equal(got, codes)
        np.testing.assert_array_equal(got_scales, scales)
        return
    assert (got[~written] == POISON).all()
    assert not got[written & ~found].any()
    assert not got_scales[written & ~found].any()
    for row in np.flatnonzero(found):
        check_widened(got[row], got_scales[row], codes[row], scales[row])


def check_widened(bytes_: np.ndarray, factor: float, codes: np.ndarray, scales: np.ndarray) -> None:
    """Exact in groups up to 2^28 below the largest, else truncated to multiples of 2^-29 times the largest scale."""
    want = oracle_mxfp4.values(codes, scales)
    if scales.max() == 255:
        assert np.isnan(factor)
        return
    largest = 2.0 ** (int(scales.max()) - 127)
    got = oracle.E5M2[bytes_] * (largest * 2.0**-13)
    assert factor == np.float32(largest * 2.0**-13 if largest >= 2.0**-113 else 0)
    near = np.repeat(int(scales.max()) - scales.astype(int) <= 28, 32)
    np.testing.assert_array_equal(got[near], want[near])
    unit = largest * 2.0**-29
    np.testing.assert_array_equal(got, np.trunc(want / unit) * unit)


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 64, 256])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 17], [130, 1]])
def test_gather(kind, rng, block_size: int, lengths: list[int], widened: bool) -> None:
    width = -(-max(lengths) // block_size)
    blocks = len(lengths) * width
    table = rng.permutation(blocks).reshape(len(lengths), width).astype(np.int32)
    table[rng.random(table.shape) < 0.1] = rng.choice([-1, blocks, 2**31 - 1])
    cache = key_cache(blocks, block_size, int(rng.integers(0, 2)))
    cache.reshape(blocks, -1)[:, : 64 * block_size] = rng.integers(0, 256, (blocks, 64 * block_size))
    scales = rng.integers(100, 132, (blocks, 4 * block_size))
    cache.reshape(blocks, -1)[:, 64 * block_size :] = np.where(rng.random(scales.shape) < 0.01, 255, scales)
    check_gather(kind, cache, table, np.concatenate([[0], np.cumsum(lengths)]), sum(lengths) + 1, widened)


@pytest.mark.parametrize("block_size", [1, 3, 64, 256])
def test_unpack_rows(kind, rng, block_size: int) -> None:
    """What keys are as numbers; of a group whose scale is NaN, NaN."""
    cache = key_cache(5, block_size, int(rng.integers(0, 2)))
    whole = cache.reshape(5, -1)
    whole[:, : 64 * block_size] = rng.integers(0, 256, (5, 64 * block_size))
    whole[:, 64 * block_size :] = rng.choice([0, 1, 3, 100, 127, 128, 200, 250, 255], (5, 4 * block_size))
    slots = rng.integers(-2, 5 * block_size + 2, 40)
    got = kind.take(unpack_rows(kind.put(cache), kind.put(slots)))
    with np.errstate(over="ignore"):
        for row, slot in zip(got, slots.tolist(), strict=True):
            found = 0 <= slot < 5 * block_size
            want = oracle_mxfp4.values(*oracle_mxfp4.token(cache, slot)) if found else np.zeros(128)
            np.testing.assert_array_equal(row, want.astype(np.float32))


@pytest.mark.parametrize("shape", [(0,), (1,), (33,), (5, 24)])
def test_widen(kind, rng, shape: tuple[int, ...]) -> None:
    codes = rng.integers(0, 256, (*shape, 64), dtype=np.uint8)
    scales = rng.integers(100, 136, (*shape, 4)).astype(np.uint8)
    scales[rng.random(shape) < 0.3] = rng.integers(0, 256, 4)
    weights = rng.standard_normal(shape).astype(np.float32)
    there = kind.put(gapped(codes, *[0] * len(shape), 4)), kind.put(gapped(scales, *[0] * len(shape), 3))
    values, factors = map(kind.take, widen_mxfp4(*there))
    assert (values.shape, values.dtype, factors.shape) == ((*shape, 128), E5M2, shape)
    for at in np.ndindex(shape):
        check_widened(values.view(np.uint8)[at], factors[at], codes[at], scales[at])
    again, weighted = map(kind.take, widen_mxfp4(*there, kind.put(weights)))
    np.testing.assert_array_equal(again.view(np.uint8), values.view(np.uint8))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(weighted, weights * factors)


def apart_rows(rng: np.random.Generator, apart: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of 1, -1 and many zeros, of zeros alone in one group, and scales: those of the other groups are 2^-apart
    times the one group's."""
    codes = rng.choice(np.array([0] * 14 + [2, 10], np.uint8), (*shape, 4, 32))
    largest = rng.integers(0, 4, shape)[..., None] == np.arange(4)
    codes[largest] = 0
    codes = codes.reshape(*shape, 128)
    return codes[..., ::2] | codes[..., 1::2] << 4, np.where(largest, 130, 130 - apart).astype(np.uint8)


@pytest.mark.parametrize("apart", [1, 11, 12, 14, 15, 26, 27, 28])
def test_logits_of_scales_far_apart(kind, rng, apart: int) -> None:
    """Paged and gathered keys and queries are exact, also where only their groups of small scales count."""
    tokens, heads, block_size, keys = 3, 16, 16, 60
    q4, q_scales = apart_rows(rng, apart, tokens, heads)
    weights = rng.choice(np.array([-1, -0.5, 0.5, 1], np.float32), (tokens, heads))
    cache = np.zeros((4, block_size, 68), np.uint8)
    for slot, row in enumerate(zip(*apart_rows(rng, apart, keys), strict=True)):
        codes, scales = oracle_mxfp4.token(cache, slot)
        codes[:], scales[:] = row
    of_keys = [oracle_mxfp4.values(*oracle_mxfp4.token(cache, slot)) for slot in range(keys)]
    expected = np.empty((tokens, keys))
    for t in range(tokens):
        of_heads = np.array([oracle_mxfp4.values(q4[t, h], q_scales[t, h]) for h in range(heads)])
        expected[t] = weights[t] @ np.maximum(of_heads @ np.array(of_keys).T, 0)
    assert np.count_nonzero(expected) > tokens * keys / 2

    q8, w = widen_mxfp4(*map(kind.put, (q4, q_scales, weights)))
    there, table = kind.put(cache), kind.put(np.arange(4, dtype=np.int32)[None])
    lens = kind.put(np.full((1, tokens), keys, np.int32))
    got = paged_indexer_logits(q8[None], there, w, lens, table, keys)
    np.testing.assert_array_equal(kind.take(got), expected)
    k8, ks = kind.put(poisoned((keys, 128), E5M2)), kind.put(poisoned(keys, np.float32))
    cp_gather_indexer_k_quant_cache(there, k8, ks, table, kind.put(np.array([0, keys], np.int32)))
    starts, ends = kind.put(np.zeros(tokens, np.int32)), kind.put(np.full(tokens, keys, np.int32))
    np.testing.assert_array_equal(kind.take(indexer_logits(q8, k8, ks, w, starts, ends)), expected)


def test_gathered_keys_are_e5m2(kind) -> None:
    """Other dtypes would be read as e4m3."""
    inputs = [kind.put(a) for a in (np.zeros((1, 1), np.int32), np.array([0, 1], np.int32))]
    for dtype, name in ((np.dtype(np.uint8), "uint8"), (E5M2, "float8_e5m2")):
        token_bytes = 68 if dtype == np.uint8 else 132
        cache, keys = kind.put(np.zeros((1, 1, token_bytes), np.uint8)), kind.put(np.zeros((1, 128), dtype))
        with pytest.raises(TypeError, match=f"^dst_k: expected dtype .*, got {name}$"):
            cp_gather_indexer_k_quant_cache(cache, keys, kind.put(np.zeros(1, np.float32)), *inputs)


@pytest.mark.parametrize(("tokens", "heads", "dtype"), [(0, 8, BF16), (1, 64, np.float32), (7, 24, BF16)])
def test_quantize_queries(kind, rng, tokens: int, heads: int, dtype: np.dtype) -> None:
    """Packed: the bytes of the oracle. Widened: what `widen_mxfp4` makes of them."""
    q, weights = mxfp4_rows(rng, tokens * heads).reshape(tokens, heads, 128), rng.standard_normal((tokens, heads))
    there = kind.put(gapped(q, 0, 1, 8)), kind.put(gapped(weights.astype(dtype), 0, 3))
    q4, scales, w = quantize_indexer_q_mxfp4(*there)
    values, widened = map(kind.take, widen_mxfp4(q4, scales, w))
    q4, scales, w = map(kind.take, (q4, scales, w))
    factor = np.float32((heads * 128) ** -0.5)
    np.testing.assert_array_equal(w, weights.astype(dtype).astype(np.float32) * factor)
    for t, h in np.ndindex(tokens, heads):
        codes, bytes_ = oracle_mxfp4.pack(q[t, h])
        np.testing.assert_array_equal(q4[t, h], codes)
        np.testing.assert_array_equal(scales[t, h], bytes_)
    q8, at_once = map(kind.take, quantize_indexer_q(*there, scale_format="mxfp4"))
    assert q8.dtype == E5M2
    np.testing.assert_array_equal(q8.view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(at_once, widened)


def test_queries_are_rotated_first(kind, rng) -> None:
    """Angles of quarter turns, which are exact."""
    q = rng.standard_normal((4, 8, 128)).astype(BF16)
    turn = np.repeat(np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float32), 32, axis=1)
    rope = {"positions": kind.put(np.arange(4)), "cos_sin_cache": kind.put(turn)}
    weights = kind.put(np.ones((4, 8), np.float32))
    got = quantize_indexer_q_mxfp4(kind.put(q), weights, **rope, rope_first=False, interleaved=True)
    turned = q.astype(np.float32)
    for t in range(4):
        for _ in range(t):
            first = turned[t, :, 64::2].copy()
            turned[t, :, 64::2], turned[t, :, 65::2] = -turned[t, :, 65::2], first
    expected = quantize_indexer_q_mxfp4(kind.put(turned.astype(BF16)), weights)
    values = [[oracle_mxfp4.values(*row) for row in zip(codes, scales, strict=True)] for codes, scales in (
        (kind.take(of[0]).reshape(-1, 64), kind.take(of[1]).reshape(-1, 4)) for of in (got, expected)
    )]  # fmt: skip
    np.testing.assert_array_equal(*values)  # +0 and -0 are equal
