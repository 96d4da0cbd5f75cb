"""What work takes on a GPU, in microseconds: data that `benchmarks/fit_times.py` writes from the records.

A file `h200.py` holds, by kernel and what its module calls a kind of work, the time of each amount of it. A GPU without
a file has that of the H200: its kernels for Hopper are the same, and the portable kernel's divisions were compared there
in steps, which take longer elsewhere, alike.

EXCEPTIONS are ranges where a kernel or a division was measured to take another time than that: it is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...driver import Gpu
from . import h100, h200

# By number of SMs and whether memory is that of an H100: `of` tells them apart.
FILES = {"h200": h200, "h100": h100}


@cache
def of(gpu: Gpu) -> Any:
    """The times of a GPU."""
    return FILES[name_of(gpu)].TIMES


def name_of(gpu: Gpu) -> str:
    """The file that is for a GPU."""
    return "h100" if "H100" in gpu.name else "h200"


def microseconds(gpu: Gpu, kernel: str, kind: str, amounts: dict[str, float]) -> float:
    """How long a kernel takes for amounts of work."""
    each = of(gpu)[kernel][kind]
    return sum([amount * each.get(name, 0.0) for name, amount in amounts.items()])
