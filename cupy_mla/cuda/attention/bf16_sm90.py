"""`kernels_cu/attention/bf16_sm90.cu`: flat bf16 rows on Hopper, 64 heads of a query at a time, whole queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import BF16_512, BF16_576, D_V, Layout
from .. import structs
from ..kernel import Kernel
from ..program import Launch, Program
from .call import Call
from .lists import counted, longest_first

HEADS = TILE_ROWS = 64
SPILL_BYTES = 36  # a few words of the producer, once a work item


def defines(layout: Layout) -> dict[str, int | str]:
    """The constants of this kernel and its relatives."""
    return {**layout.defines(), "D_V": D_V, "HEADS": HEADS, "TILE_ROWS": TILE_ROWS}


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    return Kernel(
        "attention/bf16_sm90.cu", structs.ATTENTION, defines(layout), archs=("90a",), target="90a",
        spill_bytes=SPILL_BYTES, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in (BF16_576, BF16_512):
        yield kernel(layout)


def launches(call: Call, ordered: bool, counts: bool = False) -> Program:
    """The launch: CTAs that take work items in turn.

    Args:
        ordered: CTAs that take several queries begin with those that have the longest lists.
        counts: lists without lengths end with their last valid entry.
    """
    first, params = longest_first(call) if ordered else counted(call) if counts else (None, call.params)
    launch = Launch(kernel(call.layout), (min(call.items(HEADS), call.gpu.sms), 1, 1), params)
    return [first, launch] if first else [launch]
