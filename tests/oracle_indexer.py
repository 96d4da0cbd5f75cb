"""The lightning indexer in float64 and plain loops, written from the specification alone."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate

import numpy as np

from . import oracle, oracle_indices

D, ROPE = 128, 64


def rotated(x: np.ndarray, cos_sin: np.ndarray, rope_first: bool, interleaved: bool) -> np.ndarray:
    """One head's 128 float64 values, 64 of them rotated by 32 angles."""
    x = x.astype(np.float64)
    start = 0 if rope_first else D - ROPE
    for i in range(ROPE // 2):
        a, b = (start + 2 * i, start + 2 * i + 1) if interleaved else (start + i, start + i + ROPE // 2)
        cos, sin = float(cos_sin[i]), float(cos_sin[i + ROPE // 2])
        x[a], x[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return x


def q_scale(values: np.ndarray, scale_format: str) -> np.float32:
    """The scale of one head's 128 values."""
    amax = np.float32(max((m for m in np.abs(values.astype(np.float32)) if not math.isnan(m)), default=0.0))
    scale = max(amax, np.float32(1e-10)) / np.float32(448)
    return np.float32(2.0 ** math.ceil(math.log2(scale))) if scale_format == "ue8m0" else scale


def logits(q8: np.ndarray, k8: np.ndarray, ks: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Logits [N] float64 of one query token [H, 128] over keys; q8 and k8 are e5m2, or bytes of e4m3."""
    q, keys = oracle.fp8(q8), oracle.fp8(k8)
    dots = np.einsum("jd,hd->jh", keys, q)
    return ks.astype(np.float64) * np.einsum("jh,h->j", np.where(dots < 0, 0.0, dots), w.astype(np.float64))


def ragged_logits(q8, k8, ks, w, starts, ends) -> np.ndarray:
    out = np.full((len(q8), len(k8)), -np.inf)
    for i in range(len(q8)):
        seen = [j for j in range(len(k8)) if starts[i] <= j < ends[i]]
        out[i, seen] = logits(q8[i], k8[seen], ks[seen], w[i])
    return out


def seen_keys(context_lens: np.ndarray, n: int, b: int, j: int) -> int:
    """How many keys token j of request b sees."""
    return int(context_lens[b, j]) if context_lens.ndim == 2 else int(context_lens[b]) - n + j + 1


def paged_logits(q8, cache, w, context_lens, block_table, max_context_len) -> np.ndarray:
    num_blocks, block_size, _ = cache.shape
    requests, n = q8.shape[:2]
    out = np.full((requests * n, max_context_len), -np.inf)
    for b in range(requests):
        for j in range(n):
            for p in range(min(seen_keys(context_lens, n, b, j), max_context_len)):
                slot = oracle_indices.slot(block_table, b, p, block_size)
                if 0 <= slot < num_blocks * block_size:
                    key, scale = token(cache, slot)
                    out[b * n + j, p] = logits(q8[b, j], key[None], scale, w[b * n + j])[0]
    return out


def schedule(context_lens, block_table, max_context_len, block_size, shares) -> np.ndarray:
    """One list of all requests' units of 64 keys, cut into shares; of each its beginning and the first blocks of the
    request that it begins in and of the next one. Up to 288 shares are equal; of more, the first third has 92 % of the
    units, the next 5.5 %, the others the rest."""
    keys = [
        max([0, *(min(int(seen), max_context_len) for seen in np.ravel(of_request))]) for of_request in context_lens
    ]
    units = [(b, unit) for b, seen in enumerate(keys) for unit in range(-(-seen // 64))]
    out = np.zeros((shares, 32), np.int32)
    out[:, 5:] = -1
    third = -(-shares // 3)
    sizes = [Fraction(1, shares)] * shares
    if shares > 288:
        thirds = (third, Fraction(92, 100)), (third, Fraction(55, 1000)), (shares - 2 * third, Fraction(25, 1000))
        sizes = [part / count for count, part in thirds for _ in range(count)]
    cuts = [math.floor(len(units) * until) for until in accumulate(sizes, initial=Fraction(0))]
    for share in range(shares):
        own = units[cuts[share] : cuts[share + 1]]
        if not own:
            continue
        b, first = own[0]
        out[share, :5] = b, first, len(own), keys[b], keys[b + 1] if b + 1 < len(keys) else 0
        at = units.index(own[0])
        for i, (request, unit) in enumerate(units[at : at + 27]):
            if request <= b + 1 and 64 * unit // block_size < block_table.shape[1]:
                out[share, 5 + i] = block_table[request, 64 * unit // block_size]
    return out


def token(cache: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """One token's 128 key bytes and its scale [1] in a cache of layout INDEXER_FP8."""
    b, t = divmod(slot, cache.shape[1])
    block = cache[b].reshape(-1)
    scale = block[128 * cache.shape[1] + 4 * t :][:4]
    return block[128 * t : 128 * (t + 1)], np.frombuffer(scale.tobytes(), np.float32)


def compared(a: float, b: float) -> int:
    """-1 where a is chosen before b, 1 after it, 0 where their places decide: larger ones first, NaN last."""
    if math.isnan(a) or math.isnan(b):
        return int(math.isnan(a)) - int(math.isnan(b))
    return int(a < b) - int(a > b)


def topk(row: np.ndarray, k: int, start: int, end: int) -> np.ndarray:
    """Positions of the k largest entries of a row's range from its start, ascending, -1 behind the last."""
    begin, stop = max(start, 0), min(end, len(row))
    values = row[begin:stop].astype(np.float64).tolist() if begin < stop else []
    sizes = [(1, 0.0) if math.isnan(x) else (0, -x) for x in values]  # larger ones first, NaN last
    by_size = sorted(range(len(values)), key=sizes.__getitem__)  # is stable
    chosen = sorted(by_size[:k])
    return np.array(chosen + [-1] * (k - len(chosen)), np.int32)


def slots(positions: np.ndarray, request: int, block_table: np.ndarray, block_size: int) -> np.ndarray:
    """Positions in a request, -1 for none, as slots of the cache."""
    return np.array([oracle_indices.slot(block_table, request, int(p), block_size) for p in positions], np.int32)


def calc_diff(x: np.ndarray, y: np.ndarray) -> float:
    """1 - 2 sum(x y) / sum(x x + y y) over the entries that are finite in y."""
    finite = np.isfinite(y)
    x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
    total = (x * x + y * y).sum()
    return 1 - 2 * (x * y).sum() / total if total else 0.0
