"""`kernels_cu/indexer/block_scores.cu`: the scores of candidate blocks. `topk` selects the largest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .. import dtypes
from .kernel import Kernel
from .logits import CANDIDATE_BLOCK
from .paging import ceil_div
from .program import Buffer
from .structs import INT32, INT64, POINTER, Struct

BLOCK_SCORES = Struct(
    "BlockScoresParams", logits=POINTER, starts=POINTER, ends=POINTER, scores=POINTER, counts=POINTER,
    logits_stride=INT64, scores_stride=INT64, lens_stride=INT64, rows=INT32, width=INT32, queries=INT32,
    ctas_of_row=INT32, aligned=INT32,
)  # fmt: skip
SCORES_OF_CTA = 256
ALIGNED = 4  # the stride of scores is a multiple of it

KERNEL = Kernel("indexer/block_scores.cu", BLOCK_SCORES, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield KERNEL


def ctas_of_row(blocks: int) -> int:
    """The number of CTAs for a row of so many blocks."""
    return max(ceil_div(blocks, SCORES_OF_CTA), 1)


class BlockScores(NamedTuple):
    """Scratch memory for the scores of each row's blocks, and for the number of these."""

    scores: Buffer
    counts: Buffer

    @classmethod
    def of(cls, rows: int, width: int) -> BlockScores:
        """Scratch memory for at most so many rows of `width` logits."""
        stride = max(ceil_div(ceil_div(width, CANDIDATE_BLOCK), ALIGNED), 1) * ALIGNED
        return cls(
            Buffer("scores", shape=(rows, stride), dtype=dtypes.FLOAT32),
            Buffer("counts", shape=(rows,), dtype=dtypes.INT32),
        )
