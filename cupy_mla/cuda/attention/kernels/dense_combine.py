"""`kernels_cu/attention/dense_combine.cu`: merges the partial results of `dense_sm90`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ....layouts import BF16_576, FP16_576
from ... import structs
from ...kernel import Kernel
from ...program import Launch
from ...structs import Packed
from . import bf16_sm90

CTAS = 2  # of an SM, at most: the next launch waits for them
SPILL_BYTES = 4  # once a line
MOST_SHARES = 512  # of which items are cut anywhere: no GPU has more SMs


@cache
def kernel(half: bool = False) -> Kernel:
    """The kernel for results in bfloat16, or float16; it does not depend on the width of rows."""
    defines = {**bf16_sm90.defines(FP16_576 if half else BF16_576), "MOST_SHARES": MOST_SHARES, "UNEVEN_ITEM_COST": 0}
    return Kernel(
        "attention/dense_combine.cu", structs.DENSE, defines, archs=("90a",), target="90a", overlaps=True,
        spill_bytes=SPILL_BYTES,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield kernel()
    yield kernel(True)


def launch(params: Packed, lines: int, sms: int, half: bool) -> Launch:
    """The launch behind one that may have left partial results of so many lines."""
    return Launch(kernel(True) if half else kernel(), (min(CTAS * sms, lines), 1, 1), params)
