"""`kernels_cu/attention/bf16_shares_sm90.cu`: as `bf16_sm90`, all rows of a call divided evenly over the CTAs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import BF16_512, BF16_576, Layout
from .. import structs
from ..kernel import Kernel
from ..program import Launch, Program
from . import bf16_sm90
from .call import Call
from .cost import UNEVEN_ITEM_COST

SPILL_BYTES = 28  # a few words, once a work item; 20 by NVRTC 12.9 and 13.0


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    defines = {**bf16_sm90.defines(layout), "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST["bf16_shares_sm90"]}
    return Kernel(
        "attention/bf16_shares_sm90.cu", structs.ATTENTION, defines, archs=("90a",), target="90a",
        spill_bytes=SPILL_BYTES, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in (BF16_576, BF16_512):
        yield kernel(layout)


def launches(call: Call, ctas: int) -> Program:
    """The launch: so many CTAs, a share each."""
    return [Launch(kernel(call.layout), (ctas, 1, 1), call.params)]
