"""Pooled keys of the indexer in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..arguments import PooledKeys
from .swa import positions_of, requests_of

D = 128
SCALE = np.float32(0.08838834764831845)  # 1 / sqrt(128)


@np.errstate(all="ignore")
def kpool_compress(a: PooledKeys) -> None:
    """Keys of complete pools, and rings of the tokens of others; see `cupy_mla.kpool_compress`."""
    kpool, ring = len(a.ape), a.tail.shape[2]
    tokens = np.arange(len(a.k))
    request = requests_of(tokens, a.query_start_loc)
    position = positions_of(tokens, request, a.query_start_loc, a.seq_lens)
    rings = np.full(len(tokens), -1, np.int64)
    exists = position >= 0
    rings[exists] = a.tail_blocks[request[exists]]
    rings[rings >= len(a.tail)] = -1

    a.out[...] = 0
    for t in np.flatnonzero(exists & ((position + 1) % kpool == 0)):
        now = min(t - int(a.query_start_loc[request[t]]) + 1, kpool)  # tokens of the pool that are of this step
        keys, gates = a.k[t + 1 - now : t + 1], a.gate[t + 1 - now : t + 1]
        if now < kpool:
            if rings[t] < 0:
                continue
            places = (position[t] + 1 - kpool + np.arange(kpool - now)) % ring
            earlier = a.tail[rings[t]][:, places]
            keys, gates = np.concatenate([earlier[0], keys]), np.concatenate([earlier[1], gates])
        scores = gates.astype(np.float32) + a.ape
        weights = np.exp(scores - scores.max(axis=0))
        mean = (weights * keys.astype(np.float32)).sum(axis=0) / weights.sum(axis=0)
        a.out[t] = hadamard(mean.astype(a.out.dtype).astype(np.float32))

    for t in np.flatnonzero((rings >= 0) & (position >= a.seq_lens[np.maximum(request, 0)].astype(np.int64) - ring)
                            if len(a.seq_lens) else exists):  # fmt: skip
        place = position[t] % ring
        a.tail[rings[t], 0, place], a.tail[rings[t], 1, place] = a.k[t], a.gate[t]


def hadamard(x: np.ndarray) -> np.ndarray:
    """The Hadamard transform of 128 values, in float32, divided by sqrt(128)."""
    step = 1
    while step < D:
        pairs = x.reshape(-1, 2, step)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(D)
        step *= 2
    return x * SCALE


def expand_pools_and_append_tail(
    pool_ids: np.ndarray, seq_lens: np.ndarray, kpool: int, out: np.ndarray, lens: np.ndarray
) -> None:
    """Positions of chosen pools and of tokens in no whole pool; see `cupy_mla.expand_pools_and_append_tail`."""
    out[...] = -1
    for t, seen in enumerate(np.maximum(seq_lens, 0).tolist()):
        ids = pool_ids[t].astype(np.int64)
        ids = ids[(ids >= 0) & (ids < seen // kpool)]
        listed = (ids[:, None] * kpool + np.arange(kpool)).reshape(-1)
        listed = np.concatenate([listed, np.arange(seen // kpool * kpool, seen)])
        out[t, : len(listed)] = listed
        lens[t] = len(listed)
