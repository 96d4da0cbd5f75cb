"""`kernels_cu/attention/portable.cu`: any rows, any heads, any GPU from sm_80 on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import ATTENTION_LAYOUTS, D_V, Layout
from .. import structs
from ..kernel import Kernel
from ..program import Launch, Program
from .call import Call

TILE_ROWS = 32  # rows of a step of the main loop
BLOCKS_PER_SM = {16: 2, 32: 1, 64: 1}  # CTAs that an SM runs at a time, by the heads of a CTA

SPILL_BYTES = 96  # Q and O fill the registers; some compilers put a few words of softmax state into local memory


def block_heads(h_q: int) -> int:
    """Heads of a CTA, for a call with `h_q` heads."""
    return next((heads for heads in BLOCKS_PER_SM if h_q <= heads), max(BLOCKS_PER_SM))


@cache
def kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for one cache layout and heads of a CTA."""
    defines = {
        **layout.defines(), "D_V": D_V, "HEADS": heads, "TILE_ROWS": TILE_ROWS, "BLOCKS_PER_SM": BLOCKS_PER_SM[heads]
    }  # fmt: skip
    return Kernel("attention/portable.cu", structs.ATTENTION, defines, spill_bytes=SPILL_BYTES)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        for heads in BLOCKS_PER_SM:
            yield kernel(layout, heads)


def launches(call: Call, heads: int, partials: int) -> Program:
    """The launch: a CTA for each work item and split."""
    return [Launch(kernel(call.layout, heads), (call.items(heads), partials, 1), call.params)]
