"""`kernels_cu/attention/bf16_cluster_sm90.cu`: as `bf16_sm90`, a query's rows split over the CTAs of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...layouts import BF16_512, BF16_576, Layout
from .. import structs
from ..driver import MAX_CLUSTER
from ..kernel import Kernel
from ..program import Launch, Program
from . import bf16_sm90
from .call import Call

HEADS = (16, 32, bf16_sm90.HEADS)  # of a work item


@cache
def kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for rows of one width and so many heads a work item."""
    return Kernel(
        "attention/bf16_cluster_sm90.cu", structs.ATTENTION,
        {**bf16_sm90.defines(layout), "HEADS": heads, "MAX_CLUSTER": MAX_CLUSTER}, archs=("90a",), target="90a",
        max_cluster=MAX_CLUSTER, overlaps=True,
    )  # fmt: skip


@cache
def cluster_kernel() -> Kernel:
    """The variant that is asked how many clusters run at a time; a CTA of every variant takes a whole SM."""
    return kernel(BF16_576, bf16_sm90.HEADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in (BF16_576, BF16_512):
        for heads in HEADS:
            yield kernel(layout, heads)


def launches(call: Call, heads: int, cluster: int) -> Program:
    """The launch: a cluster a work item."""
    return [Launch(kernel(call.layout, heads), (call.items(heads) * cluster, 1, 1), call.params, cluster)]
