"""Context parallelism in plain loops and float64, written from the specification alone."""

from __future__ import annotations

import math
from functools import cmp_to_key

import numpy as np

from .oracle_indexer import compared


def owner(position: int, world_size: int, interleave: int) -> int:
    """The rank that a token of a request lies on."""
    return position // interleave % world_size


def tokens_of(length: int, world_size: int, rank: int, interleave: int) -> list[int]:
    """The rank's tokens of a request, in their order: the i-th one is token i of the rank's cache."""
    return [i for i in range(length) if owner(i, world_size, interleave) == rank]


def localize(row: np.ndarray, world_size: int, rank: int, interleave: int) -> list[int]:
    """The rank's entries of a list of positions, as numbers of its tokens."""
    mine = tokens_of(int(row.max(initial=-1)) + 1, world_size, rank, interleave)
    number = {position: i for i, position in enumerate(mine)}
    return [number[int(i)] for i in row if int(i) in number]


def merge_topk(values: np.ndarray, positions: np.ndarray, k: int) -> np.ndarray:
    """Positions [k] of the largest of a token's logits [N, K]."""
    items = [(float(v), int(i)) for v, i in zip(values.reshape(-1), positions.reshape(-1), strict=True) if i >= 0]
    items.sort(key=cmp_to_key(lambda a, b: compared(a[0], b[0]) or a[1] - b[1]))
    chosen = sorted(i for _, i in items[:k])
    return np.array(chosen + [-1] * (k - len(chosen)), np.int32)


def merge_attention(outs: np.ndarray, lses: np.ndarray, sink: float | None) -> tuple[np.ndarray, float]:
    """One token and head: outs [N, 512], lses [N]."""
    parts = [(np.float64(x), o.astype(np.float64)) for x, o in zip(lses, outs, strict=True) if not math.isinf(x)]
    if not parts:
        return np.zeros(outs.shape[1:]), math.inf
    top = max(x for x, _ in parts)
    lse = top + math.log(sum(math.exp(x - top) for x, _ in parts))
    out = np.sum([math.exp(x - lse) * o for x, o in parts], axis=0)
    return out if sink is None else out / (1 + np.exp(np.float64(sink) - lse)), lse
