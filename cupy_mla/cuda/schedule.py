"""How many parts a query's rows are split into (split-KV), so that a small batch fills the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ..layouts import D_V
from .jit import MAX_CLUSTER

PART_BYTES = 4 * D_V + 16  # of a head, in what clusters merge; kernels_cu/attention/cluster_merge.cuh


class Shape(NamedTuple):
    """How a launch of a Hopper decode kernel is cut up."""

    heads: int  # of a block
    splits: int  # of a query's rows
    cluster: int  # splits that the blocks of a cluster merge; what is left is merged by combine.cu

    @property
    def parts(self) -> int:
        """Splits that are left to combine.cu; 1: none."""
        return self.splits // self.cluster

    def merge_bytes(self, h_q: int, num_queries: int) -> int:
        """Global memory in which the clusters of a launch merge, enough for parts in float32."""
        padded = -(-h_q // self.heads) * self.heads
        return num_queries * self.splits * padded * PART_BYTES if self.cluster > 1 else 0


def shapes(heads: tuple[int, ...], tiles: int, most: int, splits: int | None = None) -> Iterator[Shape]:
    """Every shape for queries of up to `tiles` tiles, with up to `most` splits, or with `splits`."""
    for n in heads:
        for parts in range(1, max(1, min(tiles, most)) + 1) if splits is None else (splits,):
            yield Shape(n, parts, 1)
            cluster = max(c for c in range(1, MAX_CLUSTER + 1) if parts % c == 0)
            if cluster > 1:
                yield Shape(n, parts, cluster)


def cheapest(
    heads: tuple[int, ...],
    tiles: int,
    splits: int | None,
    h_q: int,
    queries: int,
    at_once: tuple[int, ...],
    block_time: Callable[[Shape, float], float],
    combine_time: Callable[[Shape, float], float],
) -> Shape:
    """The shape with the least estimated time.

    Args:
        heads: that blocks are built for.
        tiles: tiles of the longest query.
        splits: parts that each query's tiles are split into; None: to be chosen.
        at_once: clusters of 1, 2, ... MAX_CLUSTER blocks that the GPU runs at a time.
        block_time: microseconds of a block, a cluster's merge included, when blocks fill so much of the GPU (0 to 1).
        combine_time: of combine.cu, with so many thousand heads' parts.
    """
    sms = at_once[0]

    def time(shape: Shape) -> float:
        clusters = queries * math.ceil(h_q / shape.heads) * shape.parts
        waves = math.ceil(clusters / at_once[shape.cluster - 1])
        work = block_time(shape, min(1.0, clusters * shape.cluster / sms)) * waves
        return work + (combine_time(shape, queries * h_q * shape.parts / 1000) if shape.parts > 1 else 0.0)

    return min(shapes(heads, tiles, sms, splits), key=time)


# In steps of the attention kernel's main loop (about 4 us on an H200): what a block costs besides its steps (Q, first
# rows, results), what the launch that merges splits costs, and what each split adds to it, once and a block. Fitted to
# 2048 rows at 16, 64 and 128 heads, batch 1 to 64, 1 to 64 splits: what is chosen is within 10 % of the best of those.
BLOCK_OVERHEAD = 2.0
COMBINE_OVERHEAD = 0.5
SPLIT_OVERHEAD, SPLIT_OVERHEAD_PER_BLOCK = 0.08, 0.01


@lru_cache(maxsize=4096)
def best_splits(blocks: int, steps: int, slots: int) -> int:
    """The number of splits with the least estimated time.

    Args:
        blocks: blocks of an unsplit launch (queries times head tiles).
        steps: main-loop steps of the longest query.
        slots: blocks that the GPU runs at a time.

    Returns:
        1 when the blocks fill the GPU, at most one split a step.
    """

    def time(splits: int) -> float:
        waves = -(-blocks * splits // slots)
        work = waves * (-(-steps // splits) + BLOCK_OVERHEAD)
        if splits == 1:
            return work
        return work + COMBINE_OVERHEAD + splits * (SPLIT_OVERHEAD + SPLIT_OVERHEAD_PER_BLOCK * blocks)

    return min(range(1, max(1, min(steps, 2 * slots)) + 1), key=time)
