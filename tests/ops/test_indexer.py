"""The indexer's key cache against plain loops, byte for byte."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupy_mla.ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from tests import oracle, oracle_indices, oracle_mxfp4
from tests.indexers import empty_key_cache as key_cache
from tests.kinds import BF16, E4M3, POISON, gapped, poisoned
from tests.operations import OPERATIONS


def pack_oracle(key: np.ndarray, scale_format: str) -> tuple[bytes, bytes]:
    """One token's 128 keys as (e4m3 codes, float32 scale), from the specification."""
    values = key.astype(np.float32)
    amax = np.where(np.isnan(values), 0, np.abs(values)).max()
    scale = max(amax, np.float32(1e-4)) / np.float32(448)
    if scale_format == "ue8m0" and not math.isinf(scale):
        scale = np.float32(2.0 ** math.ceil(math.log2(scale)))
    with np.errstate(invalid="ignore"):  # infinity under an infinite scale is NaN
        return oracle.e4m3_code(values / scale).tobytes(), np.float32(scale).tobytes()


def token_bytes(cache: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of one token's codes and scale bytes."""
    b, t = divmod(slot, cache.shape[1])
    block = cache[b].reshape(-1)
    return block[128 * t : 128 * (t + 1)], block[128 * cache.shape[1] + 4 * t :][:4]


def keys_of(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Keys of many sizes: normal rows scaled by 1e-6 to 1e6, among them rows of zeros, subnormals, both zeros, 448."""
    keys = rng.standard_normal((tokens, 128)) * 10.0 ** rng.uniform(-6, 6, (tokens, 1))
    keys[rng.random(tokens) < 0.1] = 0
    keys[rng.random(tokens) < 0.1, 0] = 448
    keys = np.where(rng.random(keys.shape) < 0.05, rng.choice([1e-39, -1e-39, 0.0, -0.0], keys.shape), keys)
    return keys.astype(BF16)


def mxfp4_rows(rng: np.random.Generator, count: int) -> np.ndarray:
    """Rows of many sizes, in groups of many sizes; among them zeros, subnormals, ties, and any bits."""
    rows = rng.standard_normal((count, 4, 32)) * 10.0 ** rng.uniform(-3, 3, (count, 4, 1))
    rows *= 10.0 ** rng.uniform(-6, 6, (count, 1, 1))
    rows[rng.random((count, 4)) < 0.1] = 0
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5], rows.shape)
    rows = np.where(rng.random((count, 4, 1)) < 0.2, ties * 2.0 ** rng.integers(-9, 9, (count, 4, 1)), rows)
    rows = np.where(rng.random(rows.shape) < 0.05, rng.choice([1e-39, -1e-39, 0.0, -0.0], rows.shape), rows)
    rows = rows.reshape(count, 128).astype(BF16)
    any_bits = rng.integers(0, 2**16, rows.shape, dtype=np.uint16).view(BF16)
    return np.where(rng.random((count, 1)) < 0.1, any_bits, rows)


def pack(kind, keys: np.ndarray, cache: np.ndarray, slots: np.ndarray, scale_format: str) -> np.ndarray:
    """Pack through the operation and return all bytes of the cache's allocation."""
    there, whole = kind.put_with_allocation(cache)
    of_scale = () if scale_format == "mxfp4" else (scale_format,)
    indexer_k_quant_and_cache(kind.put(keys), there, kind.put(slots), *of_scale)
    return kind.take(whole)


def packed_by_hand(keys: np.ndarray, cache: np.ndarray, slots: np.ndarray, scale_format: str) -> None:
    for t, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            if scale_format == "mxfp4":
                codes, scales = oracle_mxfp4.token(cache, slot)
                codes[:], scales[:] = oracle_mxfp4.pack(keys[t])
                continue
            codes, scale = token_bytes(cache, slot)
            code_bytes, scale_bytes = pack_oracle(keys[t], scale_format)
            codes[:], scale[:] = np.frombuffer(code_bytes, np.uint8), np.frombuffer(scale_bytes, np.uint8)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0", "mxfp4"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 64, 128, 256])
@pytest.mark.parametrize("tokens", [0, 1, 63, 130])
def test_pack(kind, rng, tokens: int, block_size: int, scale_format: str) -> None:
    num_blocks, gap = tokens // block_size + 2, int(rng.integers(0, 3))
    capacity = num_blocks * block_size
    keys, item = (mxfp4_rows(rng, tokens + 2), 68) if scale_format == "mxfp4" else (keys_of(rng, tokens + 2), 132)
    slots = rng.permutation(capacity)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.1] = rng.choice([-1, -(2**63), capacity, 2**62])
    want = key_cache(num_blocks, block_size, gap, item)
    packed_by_hand(keys, want, slots, scale_format)
    keys = gapped(keys, 0, int(rng.choice([0, 8, 3])))
    got = pack(kind, keys, key_cache(num_blocks, block_size, gap, item), slots, scale_format)
    np.testing.assert_array_equal(got, want.base.reshape(-1))


def test_pack_infinities_and_nan(kind) -> None:
    """A scale of infinity makes zeros of finite keys; NaN keys become 0x7F and do not count for the scale."""
    keys = np.ones((2, 128), BF16)
    keys[0, 5:7], keys[1, 7:9] = (np.inf, -np.inf), (np.nan, -np.nan)
    got = pack(kind, keys, key_cache(1, 2), np.array([0, 1], np.int64), "fp32").reshape(-1)
    scales = got[256:].view(np.float32)
    assert np.isinf(scales[0])
    assert scales[1] == np.float32(1) / np.float32(448)
    codes = got[:256].reshape(2, 128)
    assert (codes[0, 5:7] == 0x7F).all()
    assert (oracle.E4M3[np.delete(codes[0], [5, 6])] == 0).all()
    assert (codes[1, 7:9] == 0x7F).all()
    assert (oracle.E4M3[np.delete(codes[1], [7, 8])] == 448).all()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # signalling NaN
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_every_bf16_value(kind, rng, scale_format: str) -> None:
    """With either sign as a key's largest, NaN and infinities too, above others down to those that become 0."""
    bits = np.arange(2**15)[:, None] - rng.integers(0, 2500, (2**15, 128)) * (np.arange(128) > 1)
    signs = rng.integers(2, size=bits.shape)
    signs[:, 1] = 1 - signs[:, 0]
    keys, slots = (np.maximum(bits, 0) | signs << 15).astype(np.uint16).view(BF16), np.arange(2**15)
    want = key_cache(2**9, 64)
    packed_by_hand(keys, want, slots, scale_format)
    got = pack(kind, keys, key_cache(2**9, 64), slots, scale_format)
    np.testing.assert_array_equal(got, want.base.reshape(-1))


@pytest.mark.parametrize("as_fp8", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 64, 256])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 17], [130, 1], [2] * 300])
def test_gather(kind, rng, block_size: int, lengths: list[int], as_fp8: bool) -> None:
    width = -(-max(lengths) // block_size)
    blocks = len(lengths) * width
    table = rng.permutation(blocks).reshape(len(lengths), width).astype(np.int32)
    cache = key_cache(blocks, block_size, int(rng.integers(0, 2)))
    cache[...] = rng.integers(0, 256, cache.shape)
    check_gather(kind, cache, table, np.concatenate([[0], np.cumsum(lengths)]), sum(lengths) + 1, as_fp8)


def check_gather(kind, cache: np.ndarray, table: np.ndarray, cu_seq_lens, rows: int, as_fp8: bool = False) -> None:
    num_blocks, block_size, _ = cache.shape
    codes, scales = np.full((rows, 128), POISON, np.uint8), np.full((rows, 4), POISON, np.uint8)
    for r in range(len(table)):
        for t in range(max(0, min(cu_seq_lens[r + 1], rows) - cu_seq_lens[r]) if cu_seq_lens[r] >= 0 else 0):
            slot = oracle_indices.slot(table, r, t, block_size)
            found = 0 <= slot < num_blocks * block_size
            codes[cu_seq_lens[r] + t], scales[cu_seq_lens[r] + t] = token_bytes(cache, slot) if found else (0, 0)
    gap = 4 if rows % 2 else 0
    dst_k = kind.put(gapped(poisoned((rows, 128), E4M3 if as_fp8 else np.uint8), 0, gap))
    dst_scale = kind.put(poisoned(rows, np.float32))
    inputs = [kind.put(a) for a in (table, np.asarray(cu_seq_lens, np.int32))]
    cp_gather_indexer_k_quant_cache(kind.put(cache), dst_k, dst_scale, *inputs)
    np.testing.assert_array_equal(kind.take(dst_k).view(np.uint8), codes)
    np.testing.assert_array_equal(kind.take(dst_scale).view(np.uint8).reshape(rows, 4), scales)


def test_gather_of_hostile_numbers(kind, rng) -> None:
    cache = key_cache(4, 8)
    cache[...] = rng.integers(0, 256, cache.shape)
    table = np.array([[2, 4], [-1, 3], [1, 2**31 - 1]], np.int32)
    check_gather(kind, cache, table, [0, 16, 40, 2**31 - 1], 60)
    check_gather(kind, cache, table, [-3, 16, 10, 20], 60)
    check_gather(kind, cache, table, [5, 70, 60, 61], 60)


@pytest.mark.parametrize(
    ("requests", "width", "rows", "blocks"), [(0, 2, 5, 3), (2, 0, 5, 3), (2, 2, 0, 3), (2, 2, 5, 0)]
)
def test_gather_nothing(kind, requests: int, width: int, rows: int, blocks: int) -> None:
    check_gather(kind, key_cache(blocks, 4), np.zeros((requests, width), np.int32), 2 * np.arange(requests + 1), rows)


def test_what_is_packed_comes_back(kind, rng) -> None:
    keys, slots = keys_of(rng, 24), rng.permutation(32)[:24].astype(np.int64)
    cache = kind.put(key_cache(4, 8))
    indexer_k_quant_and_cache(kind.put(keys), cache, kind.put(slots), "ue8m0")
    dst_k, dst_scale = kind.put(poisoned((32, 128), np.uint8)), kind.put(poisoned(32, np.float32))
    table, starts = kind.put(np.arange(4, dtype=np.int32)[None]), kind.put(np.array([0, 32], np.int32))
    cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, table, starts)
    rows = oracle.E4M3[kind.take(dst_k)] * kind.take(dst_scale).astype(np.float64)[:, None]
    wanted = keys.astype(np.float64)
    amax = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(rows[slots] - wanted) <= np.maximum(np.abs(wanted) / 16, np.maximum(amax, 1e-4) * 2.0**-14)).all()


def test_gather_of_scales_as_bytes(kind, rng) -> None:
    """[S, 4] uint8, which is what vLLM holds: the same bytes."""
    call = OPERATIONS["cp_gather_indexer_k_quant_cache"](rng)
    given = {name: kind.put(a) for name, a in call.arrays.items()}
    cp_gather_indexer_k_quant_cache(**given)
    whole = kind.put(gapped(poisoned((60, 4), np.uint8), 2))
    for scales in (kind.put(poisoned((60, 4), np.uint8)), whole):
        cp_gather_indexer_k_quant_cache(**{**given, "dst_scale": scales})
        got = np.ascontiguousarray(kind.take(scales)).view(np.float32)[:, 0]
        assert got.tobytes() == kind.take(given["dst_scale"]).tobytes()
    host = {name: a.copy() for name, a in call.arrays.items()}
    for wrong, message in (
        (np.zeros((60, 3), np.uint8), r"dst_scale: expected shape \[any, 4\]"), (np.zeros(60, np.uint8), "dst_scale: "),
        (np.zeros((60, 5), np.uint8)[:, :4], "dst_scale: items of 4 bytes must start at multiples of 4 bytes"),
        (np.zeros((59, 4), np.uint8), r"dst_scale: expected shape \[60\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cp_gather_indexer_k_quant_cache(**{**host, "dst_scale": wrong})
