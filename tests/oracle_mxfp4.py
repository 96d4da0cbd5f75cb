"""MXFP4 keys and queries of the indexer, and candidate blocks, in plain loops, written from the specification alone."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from . import oracle, oracle_indexer, oracle_indices

# Magnitudes by code, and the largest magnitude that rounds to each code with whether it still does (ties).
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
UNTIL = [(0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5, True)]
LEAST = 2.0**-126  # scale


def code(x: float) -> int:
    """The code of a float: nearest, ties to the even code, at most 6; the sign is bit 3."""
    a = abs(x)
    magnitude = next((i for i, (end, itself) in enumerate(UNTIL) if a < end or (itself and a == end)), 7)
    return magnitude | 8 * (math.copysign(1, x) < 0)


def scale_byte(values: np.ndarray, least: float = LEAST) -> int:
    """The UE8M0 byte of a group's 32 values: 2^ceil(log2(max(amax, 6 * least) / 6)), 255 where one is NaN."""
    if np.isnan(values).any():
        return 255
    a = max(float(np.abs(values).max()), 6 * least)
    if math.isinf(a):
        return 254
    e = math.frexp(a)[1] - 5  # too small
    while Fraction(a) > 6 * Fraction(2) ** e:
        e += 1
    return e + 127


def pack(row: np.ndarray, least: float = LEAST) -> tuple[np.ndarray, np.ndarray]:
    """64 bytes of codes, the even value in the low nibble, and 4 scale bytes of 128 bf16 values."""
    with np.errstate(invalid="ignore"):  # NaN
        values = row.astype(np.float64)
    scales = [scale_byte(values[32 * g : 32 * g + 32], least) for g in range(4)]
    codes = [
        0 if scales[i // 32] == 255 else code(float(x) * 2.0 ** (127 - scales[i // 32])) for i, x in enumerate(values)
    ]
    return np.array([codes[i] | codes[i + 1] << 4 for i in range(0, 128, 2)], np.uint8), np.array(scales, np.uint8)


def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The 128 float64 values of a row."""
    out = np.empty(128)
    for i in range(128):
        nibble = int(codes[i // 2]) >> 4 * (i % 2) & 15
        scale = math.nan if scales[i // 32] == 255 else 2.0 ** (int(scales[i // 32]) - 127)
        out[i] = (-1 if nibble & 8 else 1) * E2M1[nibble & 7] * scale
    return out


def row_a() -> np.ndarray:
    """The first 128 values of the specification's test row A, as float64."""
    return np.array([(((37 * i + 11) % 101) - 50) / 16 * 2.0 ** (i // 128 - 1) for i in range(128)])


def row_b() -> np.ndarray:
    row = np.zeros(128)
    row[0], row[5], row[17] = 1, -3.5, 2.0**-7
    return row


def token(cache: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of one token's 64 bytes of codes and 4 of scales in a cache [num_blocks, block_size, 68]."""
    b, t = divmod(slot, cache.shape[1])
    block = cache[b].reshape(-1)
    return block[64 * t : 64 * (t + 1)], block[64 * cache.shape[1] + 4 * t :][:4]


def key(cache: np.ndarray, slot: int) -> np.ndarray:
    """The 128 float64 values of the key in a slot of a cache in layout INDEXER_FP8 or INDEXER_MXFP4."""
    if cache.shape[2] == 68:
        return values(*token(cache, slot))
    codes, scale = oracle_indexer.token(cache, slot)
    return oracle.E4M3[codes].astype(np.float64) * float(scale[0])


def logit(q8: np.ndarray, of_key: np.ndarray, w: np.ndarray) -> float:
    """Of one query token [H, 128], e5m2 or bytes of e4m3."""
    dots = oracle.fp8(q8) @ of_key
    return float((np.where(dots < 0, 0.0, dots) * w.astype(np.float64)).sum())


def paged_logits(q8, cache, w, context_lens, block_table, max_context_len) -> np.ndarray:
    num_blocks, block_size, _ = cache.shape
    requests, n = q8.shape[:2]
    out = np.full((requests * n, max_context_len), -np.inf)
    for b, j in np.ndindex(requests, n):
        for p in range(min(oracle_indexer.seen_keys(context_lens, n, b, j), max_context_len)):
            slot = oracle_indices.slot(block_table, b, p, block_size)
            if 0 <= slot < num_blocks * block_size:
                out[b * n + j, p] = logit(q8[b, j], key(cache, slot), w[b * n + j])
    return out


def best_blocks(row: np.ndarray, count: int, start: int, end: int) -> list[int]:
    """The blocks of 8 entries of a row's range that are chosen, ascending, -1 behind the last."""
    entries = row[max(start, 0) : max(min(end, len(row)), 0)].astype(np.float64).tolist()
    blocks = [entries[i : i + 8] for i in range(0, len(entries), 8)]
    score = [math.inf if any(map(math.isnan, block)) or i == len(blocks) - 1 else max(block)
             for i, block in enumerate(blocks)]  # fmt: skip
    chosen = sorted(sorted(range(len(blocks)), key=lambda i: -score[i])[:count])  # sorts are stable
    return chosen + [-1] * (count - len(chosen))


def candidate_logits(q8, cache, w, candidates, lens, req_id, block_table) -> np.ndarray:
    num_blocks, block_size, _ = cache.shape
    tokens, blocks = candidates.shape
    out = np.full((tokens, 8 * blocks), -np.inf)
    for t, c, i in np.ndindex(tokens, blocks, 8):
        position = 8 * int(candidates[t, c]) + i
        if candidates[t, c] >= 0 and position < lens[t] and 0 <= req_id[t] < len(block_table):
            slot = oracle_indices.slot(block_table, int(req_id[t]), position, block_size)
            if 0 <= slot < num_blocks * block_size:
                out[t, 8 * c + i] = logit(q8[t], key(cache, slot), w[t])
    return out
