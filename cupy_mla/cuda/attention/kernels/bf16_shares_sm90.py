"""`kernels_cu/attention/bf16_shares_sm90.cu`: as `bf16_sm90`, all rows of a call divided evenly over the CTAs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ....layouts import Layout
from ... import structs
from ...kernel import Kernel
from ...program import Launch, Program
from ..call import Call
from ..divide import HALF_PARTIAL_BYTES, ITEM_COST, PAIR_COST, Division, Shares, even_shares, nearest_pair
from ..problem import Problem
from ..times import Work
from . import bf16_sm90
from .work import shares, split

UNEVEN_ITEM_COST = 8  # what an item of unequal lists costs beside its pairs, in eighths of a pair of tiles
LEAST_SPLIT = 1  # pairs of tiles
MOST_SPLITS = 256  # of a work item: a CTA merges no more partial results
INVARIANT_ROWS = 256  # of a split of a batch-invariant call, which only gets this kernel where it is forced
SPILL_BYTES = 28  # a few words, once a work item; 20 by NVRTC 12.9 and 13.0


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    defines = {**bf16_sm90.defines(layout), "UNEVEN_ITEM_COST": UNEVEN_ITEM_COST}
    return Kernel(
        "attention/bf16_shares_sm90.cu", structs.ATTENTION, defines, archs=("90a",),
        spill_bytes=SPILL_BYTES, overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in bf16_sm90.LAYOUTS:
        yield kernel(layout)


def serves(problem: Problem) -> bool:
    """Flat bf16 rows, in at least two splits."""
    flat = problem.flat and problem.layout in bf16_sm90.LAYOUTS
    return problem.on_hopper and flat and not problem.fixed_kernel and problem.num_splits != 1


def candidates(problem: Problem) -> Iterator[Division]:
    """Equal shares of all rows; and as many equal splits of each item as fill the GPU."""
    heads, sms = bf16_sm90.HEADS, problem.gpu.sms
    asked = problem.splits(INVARIANT_ROWS)
    if asked:
        yield Shares(heads, splits=min(asked, MOST_SPLITS))
    elif problem.forced or problem.items(heads) <= 6 * sms:
        yield Shares(heads)
        splits = sms // problem.items(heads)
        if 1 < splits <= problem.pairs:
            yield Shares(heads, splits=splits)


def fits(problem: Problem, division: Any) -> bool:
    """Whether the kernel is built for this division, whose kind is one of its candidates'."""
    return division.heads == bf16_sm90.HEADS and 0 <= division.splits <= MOST_SPLITS


def work(problem: Problem, division: Any) -> Work:
    """The work of a division, see `work.py`."""
    heads = division.heads
    items, shared = problem.items(heads), problem.heads > heads
    words = problem.phase, problem.lists
    if division.splits:
        pairs = -(-problem.pairs // division.splits)
        counted = split(problem, items * division.splits, division.splits, pairs, shared)
        return ("splits", *words), *counted
    names, amounts = shares(problem, items, shared)
    if problem.uneven or items == 0:
        return ("shares", *words), names, amounts
    ctas = max(1, min(problem.gpu.sms, items * problem.pairs // LEAST_SPLIT))
    begun, pairs, cuts = slowest_share(items, problem.pairs, ctas)
    return ("shares", *words), (*names, "cuts"), (1, begun, pairs, amounts[3], cuts)


# Times by which the slowest share is found, in eighths of the time of a pair of tiles: of each item that a share has a
# part of (Q, first rows, results), and of each end of the share within an item (a partial result is left or merged).
SLOWEST_ITEM, SLOWEST_CUT = 15, 5


def slowest_share(items: int, pairs: int, ctas: int) -> tuple[int, int, int]:
    """The items, pairs of tiles and ends within an item that the slowest of `ctas` equal shares has.

    Shares end at whole pairs, and a part of an item takes as long for Q and first rows as a whole item. So with short
    lists the slowest share takes much longer than the mean.
    """
    item, rest = even_shares(items, ctas)
    pair_of, before, until = _boundary_times(pairs, ctas)
    took = (item[1:] - item[:-1]) * (SLOWEST_ITEM + PAIR_COST * pairs) + until[rest[1:]] - before[rest[:-1]]
    share = int(took.argmax())
    first, last = int(item[share]), int(item[share + 1])
    begin, end = int(pair_of[rest[share]]), int(pair_of[rest[share + 1]])
    multiplied = (last - first) * pairs + end - begin
    return last - first + (end > 0) - (begin == pairs), multiplied, (0 < begin < pairs) + (0 < end < pairs)


@lru_cache(maxsize=64)
def _boundary_times(pairs: int, ctas: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three arrays over places of a boundary in an item of so many pairs. Place r is r / `ctas` of the item's cost
    behind its begin.

    Returns:
        the pairs before the boundary; the time of the item that the share which begins there is spared; the time of the
        item that the share which ends there takes.
    """
    cost = np.arange(ctas) * (ITEM_COST + PAIR_COST * pairs) // ctas
    pair = np.minimum(nearest_pair(cost, ITEM_COST), pairs)
    first, last, whole = pair == 0, pair == pairs, SLOWEST_ITEM + PAIR_COST * pairs
    before = np.where(first, 0, np.where(last, whole, PAIR_COST * pair - SLOWEST_CUT))
    return pair, before, np.where(first, 0, np.where(last, whole, SLOWEST_ITEM + PAIR_COST * pair + SLOWEST_CUT))


def launches(problem: Problem, division: Any, call: Call) -> Program:
    """The launch: a CTA for each share."""
    division = division.filled(problem, problem.gpu.sms, LEAST_SPLIT)
    fields = division.fields(problem, division.heads * HALF_PARTIAL_BYTES)
    params = call.packed(num_splits=division.num_splits, **fields)
    return [Launch(kernel(problem.layout), (division.ctas, 1, 1), params)]
