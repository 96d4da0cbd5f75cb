"""`kernels_cu/attention/portable.cu`: any rows, any heads, any GPU from sm_80 on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from ....layouts import ATTENTION_LAYOUTS, D_V, EXTRA_OF, Layout
from ... import structs
from ...kernel import PORTABLE, Kernel
from ...paging import ceil_div, fitting
from ...program import Launch, Program
from ...structs import Packed
from ..call import Call
from ..divide import PARTIAL_BYTES, Clusters, Division, Shares, Whole, split_numbers
from ..problem import Problem
from ..times import Work
from . import bf16_sm90, combine, fp8_sm90
from .work import Counted

ON_HOPPER = {*bf16_sm90.LAYOUTS, *fp8_sm90.LAYOUTS}  # the kernels for Hopper read these
HEADS = (16, 32, 64)  # heads a CTA is built for
# KB of shared memory of a CTA: SMALL fits all GPUs (sm_86, 89, 120 and 121 have no more), LARGE sm_80, 90 and 100.
SMALL, LARGE = 99, 163
STEP_ROWS = 32  # rows of a step, in which work is counted
UNEVEN_ITEM_COST = 11  # what an item of unequal lists costs beside its pairs, in eighths of a pair of tiles
INVARIANT_ROWS = 512  # of a split of a batch-invariant call
PLACES = 2  # partial results that a CTA may leave in shares: at either end
LEAST_SPLIT = 2  # pairs of tiles of a split in shares


class Shape(NamedTuple):
    """The rows of a tile, and the slices of Q that a warp holds in shared memory instead of registers."""

    tile_rows: int
    q_in_shared: int


# The shapes of 64 heads, by kind of scales, width of the rows and shared memory. FITS serves all other rows.
SHAPES = {
    ("none", 576, SMALL): Shape(16, 4), ("none", 576, LARGE): Shape(32, 6),
    ("none", 512, SMALL): Shape(16, 4), ("none", 512, LARGE): Shape(32, 6),
    ("fp32", 576, SMALL): Shape(16, 6), ("fp32", 576, LARGE): Shape(32, 7),
    ("fp32", 512, SMALL): Shape(16, 4), ("fp32", 512, LARGE): Shape(32, 6),
    ("ue8m0", 512, SMALL): Shape(16, 3), ("ue8m0", 512, LARGE): Shape(32, 6),
    ("e4m3", 576, SMALL): Shape(16, 6), ("e4m3", 576, LARGE): Shape(32, 7),
    ("e4m3", 512, SMALL): Shape(16, 3), ("e4m3", 512, LARGE): Shape(32, 6),
    ("call", 576, SMALL): Shape(16, 6), ("call", 576, LARGE): Shape(32, 7),
    ("call", 512, SMALL): Shape(16, 4), ("call", 512, LARGE): Shape(32, 6),
}  # fmt: skip
FITS = Shape(16, 4)
SPILL_BYTES = {("call", 576, LARGE): 16}  # of a thread with 64 heads: four registers on sm_100


def shape(layout: Layout, heads: int, limit: int) -> Shape:
    """The shape of a kernel that has `limit` KB of shared memory."""
    if heads == max(HEADS):
        return SHAPES.get((layout.scale_kind, layout.d_qk, limit), FITS)
    return Shape(32 if limit == LARGE else 16, 0)


@cache
def kernel(layout: Layout, heads: int, limit: int, dense: bool = False, extra: Layout | None = None) -> Kernel:
    """The kernel for one cache layout.

    Args:
        heads: of a CTA.
        limit: SMALL or LARGE.
        dense: rows come from a block table, else from index lists.
        extra: the layout of extra caches where it differs from `layout`.
    """
    rows, q_in_shared = shape(layout, heads, limit)
    defines = {
        **layout.defines_beside(extra), "D_V": D_V, "HEADS": heads, "TILE_ROWS": rows, "Q_IN_SHARED": q_in_shared,
        "SHARED_LIMIT": 1024 * limit, "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST, "DENSE": int(dense),
    }  # fmt: skip
    archs = PORTABLE if limit == SMALL else ("80", "90", "100")
    spills = SPILL_BYTES.get((layout.scale_kind, layout.d_qk, limit), 0) if heads == max(HEADS) else 0
    params = structs.DENSE if dense else structs.ATTENTION
    return Kernel("attention/portable.cu", params, defines, archs=archs, spill_bytes=spills)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        for heads in HEADS:
            for limit in (SMALL, LARGE):
                for extra in (None, *EXTRA_OF.get(layout, ())):
                    yield kernel(layout, heads, limit, extra=extra)


def serves(problem: Problem) -> bool:
    """Any call that kernels for Hopper do not serve, on a GPU with as much shared memory as an A100."""
    return problem.gpu.shared_kb >= LARGE and (problem.forced or not on_hopper(problem))


def on_hopper(problem: Problem) -> bool:
    """Whether kernels for Hopper serve a call."""
    others = problem.layout in ON_HOPPER and not (problem.prefill and problem.layout.quantized)
    return problem.on_hopper and others


def candidates(problem: Problem) -> Iterator[Division]:
    """Whole items, splits that `combine.cu` merges, and shares."""
    heads, asked, sms = fitting(HEADS, problem.heads), problem.splits(INVARIANT_ROWS), problem.gpu.sms
    if asked <= 1:
        yield Whole(heads)
    if asked > 1:
        yield Clusters(heads, asked, 1)
    if asked and not problem.division:
        return
    yield Shares(heads)
    if asked:
        return
    steps, items = ceil_div(problem.rows, STEP_ROWS), problem.items(heads)
    found = [*split_numbers(steps, 2 * sms // max(1, items))][-10:]
    for n in found or ([2] if problem.division else ()):
        yield Clusters(heads, n, 1)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    if isinstance(division, Whole):
        return division == Whole(division.heads) and division.heads in HEADS
    if isinstance(division, Clusters):
        return division.heads in HEADS and division.fits and division.cluster == 1
    return division.heads in HEADS and division.splits == 0


def work(problem: Problem, division: Any) -> Work:
    """The work of a division."""
    return (LARGE, "KB"), *counted(problem, division)


def counted(problem: Problem, division: Any) -> Counted:
    """What takes time in a division, with rows counted in steps."""
    items, sms = problem.items(division.heads), problem.gpu.sms
    steps = max(1, ceil_div(problem.rows, STEP_ROWS))
    share, of_steps, of_items = items / sms, f"steps of {division.heads}", f"items of {division.heads}"
    if isinstance(division, Shares):
        partials = max(0.0, 1 / max(share, 1 / sms) - 1)
        return ("shares", of_steps, of_items, "partial results"), (1, share * steps, share, partials)
    splits = division.num_splits
    rounds = ceil_div(items * splits, sms)
    merged = (1, splits, splits * items) if splits > 1 else (0, 0, 0)
    names = of_steps, of_items, "merge", "splits", "splits of all"
    return names, (rounds * ceil_div(steps, splits), rounds, *merged)


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch, and the merge of its splits."""
    return program(problem, division, call, LARGE)


def program(problem: Problem, division: Any, call: Call, limit: int) -> Program:
    """The launch with `limit` KB of shared memory, and the merge of its splits."""
    attention = launch(
        problem, division, call.packed(), kernel(problem.layout, division.heads, limit, extra=problem.extra_layout)
    )
    return [attention, combine.launch(problem, attention.params)] if division.num_splits > 1 else [attention]


def launch(problem: Problem, division: Any, params: Packed, variant: Kernel) -> Launch:
    """The launch of a kernel of this module: a CTA for each work item and split, or for each share."""
    heads, splits = division.heads, division.num_splits
    if isinstance(division, Shares):
        steps = ceil_div(problem.rows, STEP_ROWS) * LEAST_SPLIT
        division = division.filled(problem, problem.gpu.sms, LEAST_SPLIT, pairs=steps)
        fields, grid = division.fields(problem, PLACES * heads * PARTIAL_BYTES), (division.ctas, 1, 1)
    else:
        fields = division.memory(problem, heads * PARTIAL_BYTES) if splits > 1 else {}
        grid = (problem.items(heads), splits, 1)
    return Launch(variant, grid, params.replaced(num_splits=splits, **fields))
