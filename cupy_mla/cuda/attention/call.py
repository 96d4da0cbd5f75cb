"""What the launchers of all attention kernels are given."""

from __future__ import annotations

from typing import NamedTuple

from ...layouts import Layout
from .. import structs
from ..driver import Gpu
from ..paging import ceil_div
from ..structs import Packed

# Flags of struct AttentionParams; kernels_cu/attention/params.cuh
ALIGNED_ROWS, ALIGNED_Q, ALIGNED_OUT, WIDE_OUT, SOME_DONE, DECODE, ALIKE = 1, 2, 4, 8, 16, 32, 64


class Call(NamedTuple):
    """One call of attention.

    Attributes:
        h_q: query heads.
        queries: query tokens.
        topk, num_slots: entries of a main list, and the rows that they may name.
        params: struct AttentionParams.
    """

    gpu: Gpu
    layout: Layout
    h_q: int
    queries: int
    topk: int
    num_slots: int
    params: Packed

    def items(self, heads: int) -> int:
        """Work items: a query and a tile of so many heads each."""
        return self.queries * ceil_div(self.h_q, heads)


def no_source() -> Packed:
    """`struct Source` of a cache that is not there."""
    return structs.SOURCE(**{name: int(name == "block_size") for name in structs.SOURCE.index})
