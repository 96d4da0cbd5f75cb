"""Inputs of the indexer's logits, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .kinds import E4M3, E5M2, gapped, poisoned
from .oracle_indexer import calc_diff

TOLERANCE = 1e-7  # of `calc_diff`, over the logits of a call; the specification asks for 5e-6
FEW = 300  # logits; so few may all be what is left of larger terms
PRODUCT = 2.0**-11  # of a product of query and key: what sums of products of e4m3 on the tensor cores leave out
NAN_CODE = 0x7F


def codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """E4m3 bytes as of quantized rows: normal numbers under a scale that brings the largest of a row to 448."""
    values = rng.standard_normal(shape).astype(np.float32)
    return (values * 448 / np.abs(values).max(-1, keepdims=True)).astype(E4M3).view(np.uint8)


def e5m2(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """As of widened MXFP4: multiples of 1/2 up to 6, in groups of 32 under powers of two up to 2^5 apart."""
    values = rng.choice(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6]), shape)
    sizes = np.exp2(13 - rng.integers(0, 6, (*shape[:-1], shape[-1] // 32)))
    return (values * sizes.repeat(32, axis=-1)).astype(E5M2)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.002, 0.02, shape).astype(np.float32)


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (1e-5 * rng.standard_normal(shape)).astype(np.float32)


def exact_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """E4m3 bytes of few ones and minus ones: every sum of their products is exact in bfloat16, and ties abound."""
    return rng.choice(np.array([0] * 14 + [1, -1], E4M3).view(np.uint8), shape)


def exact_e5m2(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """The numbers of `exact_codes` as e5m2."""
    return exact_codes(rng, *shape).view(E4M3).astype(E5M2)


def made(exact: bool, e5m2_codes: bool) -> Callable[..., np.ndarray]:
    """What draws queries or keys of a type."""
    if e5m2_codes:
        return exact_e5m2 if exact else e5m2
    return exact_codes if exact else codes


def exact_weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.choice(np.array([-1, -0.5, 0.5, 1], np.float32), shape)


def key_cache(codes: np.ndarray, scales: np.ndarray, gap: int = 0) -> np.ndarray:
    """A cache [num_blocks, block_size, 132] of keys [num_blocks, block_size, 128] and scales [num_blocks, block_size],
    whose block stride exceeds the block by 4 * gap bytes."""
    num_blocks, block_size, _ = codes.shape
    cache = empty_key_cache(num_blocks, block_size, gap)
    cache.base[:, : 128 * block_size] = codes.reshape(num_blocks, 128 * block_size)
    cache.base[:, 128 * block_size : 132 * block_size] = scales.view(np.uint8)
    return cache


def empty_key_cache(num_blocks: int, block_size: int, gap: int = 0, token_bytes: int = 132) -> np.ndarray:
    """A poisoned cache [num_blocks, block_size, token_bytes] whose block stride exceeds the block by 4 * gap bytes."""
    raw = poisoned((num_blocks, token_bytes * block_size + 4 * gap), np.uint8)
    return raw[:, : token_bytes * block_size].reshape(num_blocks, block_size, token_bytes)


def ranges(rng: np.random.Generator, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends, some of them empty or beyond the keys."""
    starts = rng.integers(-3, keys + 1, queries, dtype=np.int32)
    ends = starts + rng.integers(-2, keys + 3, queries, dtype=np.int32)
    return starts, ends


def assert_close(got: np.ndarray, expected: np.ndarray, size: np.ndarray | None = None) -> None:
    """The logits of a call are within the tolerance. Of few ones, each is within that of its terms.

    Args:
        size: for calls that may have few logits: their terms' magnitudes, added up.
    """
    finite = np.isfinite(expected)
    if size is not None and finite.sum() < FEW:
        assert (np.abs(got[finite] - expected[finite]) <= PRODUCT * size[finite]).all()
    else:
        assert calc_diff(got, expected) < TOLERANCE


def strided(rng: np.random.Generator, rows: np.ndarray, items: int = 16) -> np.ndarray:
    """The same rows, whose stride may be larger by so many items."""
    return gapped(rows, *[0] * (rows.ndim - 1), int(rng.choice([0, items])))
