"""`kernels_cu/attention/dense_combine.cu`: merges the partial results of `dense_sm90` and `dense_fp8_sm90`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ....layouts import BF16_576, FP16_576
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...program import Launch
from ...structs import Packed
from . import bf16_sm90, fp8_sm90

CTAS = 2  # of an SM, at most: the next launch waits for them
SPILL_BYTES = {False: 4, True: 12}  # once a line; of `fp8`
MOST_SHARES = 512  # of which items are cut anywhere: no GPU has more SMs


def kernel(lines: int = bf16_sm90.HEADS, fp8: bool = False, half: bool = False) -> Kernel:
    """The kernel for work items of so many lines. It does not depend on the width of rows.

    Args:
        fp8: for what `dense_fp8_sm90` leaves.
        half: results are float16, else bfloat16.
    """
    return _kernel(lines, fp8, half)


@cache
def _kernel(lines: int, fp8: bool, half: bool) -> Kernel:
    defines = {
        **bf16_sm90.defines(FP16_576 if half else BF16_576), "HEADS": lines, "FP8_PARTIALS": int(fp8),
        "MOST_SHARES": MOST_SHARES, "UNEVEN_ITEM_COST": 0, "MAX_CLUSTER": MAX_CLUSTER,
    }  # fmt: skip
    return Kernel(
        "attention/dense_combine.cu", structs.DENSE, defines, archs=("90a",), target="90a", overlaps=True,
        spill_bytes=SPILL_BYTES[fp8],
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield kernel()
    yield kernel(half=True)
    for lines in fp8_sm90.HEADS:
        yield kernel(lines, fp8=True)


def launch(of: Kernel, params: Packed, lines: int, sms: int) -> Launch:
    """The launch behind one that may have left partial results of so many lines.

    Args:
        of: a kernel of this module.
    """
    return Launch(of, (min(CTAS * sms, lines), 1, 1), params)
