"""Split-KV: how one query's rows are split, and how the partial results of the splits are merged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

TILE = 32  # rows; a split is a whole number of tiles


def split_rows(rows: int, num_splits: int) -> list[tuple[int, int]]:
    """Divide rows into consecutive splits of whole tiles, as evenly as tiles allow.

    Returns:
        `num_splits` pairs (start, stop). If there are fewer tiles than splits, some splits are empty. Only the last
        split that is not empty may end inside a tile.
    """
    tiles = -(-rows // TILE)
    edges = [min(i * tiles // num_splits * TILE, rows) for i in range(num_splits + 1)]
    return list(pairwise(edges))


@np.errstate(all="ignore")
def merge_partials(
    out_parts: Sequence[np.ndarray] | np.ndarray,
    lse_parts: Sequence[np.ndarray] | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Merge softmax-weighted sums over disjoint lists of rows into the sum over all rows.

    A split without rows has lse -inf. So has the result if no split has rows, so that merging stays associative. The
    caller turns that -inf into the +inf of its results, and applies the sink.

    Args:
        out_parts: [splits, ..., d] float32 partial results, each normalised over its own rows; 0 without rows.
        lse_parts: [splits, ...] natural logarithm.

    Returns:
        out [..., d] float32 and lse [...] float64.
    """
    lse = np.asarray(lse_parts, np.float64)
    top = lse.max(axis=0)
    top = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(lse - top)
    total = weight.sum(axis=0)
    weight /= np.where(total == 0.0, 1.0, total)
    out = (weight[..., None].astype(np.float32) * np.asarray(out_parts)).sum(axis=0)
    return out, top + np.log(total)
