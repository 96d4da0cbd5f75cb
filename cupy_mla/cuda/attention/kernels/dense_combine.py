"""`kernels_cu/attention/dense_combine.cu`: shares, and their merge, for `dense_sm90` and `dense_fp8_sm90`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ....layouts import BF16_576, FP16_576
from ... import structs
from ...driver import MAX_CLUSTER
from ...kernel import Kernel
from ...paging import ceil_div
from ...program import PLAN_BYTES, Buffer, Launch, Plan, PlanField, Program
from ...structs import Packed
from ..divide import CUT_COST, HALF_PARTIAL_BYTES, Shares, split_numbers
from ..problem import DenseProblem
from . import bf16_sm90, fp8_sm90
from .work import Counted

CTAS = 2  # of an SM, at most: the next launch waits for them
LEAST_SPLIT = 1  # pairs of tiles
MOST_PAIRS = 16  # pairs of tiles of an equal split; see `dense_cluster_sm90.MOST_PAIRS`
INVARIANT_SPLITS = 8  # of each request in a batch-invariant call
MOST_SHARES = 512  # that may end anywhere in an item: no GPU has more SMs
SHARE_BYTES = 16  # what the kernel writes down of a share
UNITS_OF_8_LINES = 16  # parts into which the merge of 8 lines of an item is divided


@cache
def kernel(lines: int, fp8: bool, half: bool) -> Kernel:
    """The kernel for work items of so many lines. It does not depend on the width of rows.

    Args:
        fp8: partial results are those of `dense_fp8_sm90`.
        half: results are float16, else bfloat16.
    """
    defines = {
        **bf16_sm90.defines(FP16_576 if half else BF16_576), "HEADS": lines, "FP8_PARTIALS": int(fp8),
        "MOST_SHARES": MOST_SHARES, "UNEVEN_ITEM_COST": 0, "MAX_CLUSTER": MAX_CLUSTER,
    }  # fmt: skip
    return Kernel(
        "attention/dense_combine.cu", structs.DENSE, defines, archs=("90a",), overlaps=True,
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for half in (False, True):
        yield kernel(bf16_sm90.HEADS, False, half)
    for lines in fp8_sm90.HEADS:
        yield kernel(lines, True, False)


def candidates(problem: DenseProblem, lines: int) -> Iterator[Shares]:
    """Equal shares of all rows, and the most equal splits of each item of which all run at a time; or the splits that
    are prescribed."""
    asked = problem.num_splits or (INVARIANT_SPLITS if problem.batch_invariant else 0)
    yield Shares(lines, asked if asked > 1 else 0)
    splits = [] if asked else split_numbers(problem.pairs, problem.gpu.sms // problem.items(lines))[-1:]
    for n in splits:
        if problem.requests == 1 or ceil_div(problem.pairs, n) <= MOST_PAIRS or problem.forced:
            yield Shares(lines, n)


def fits(division: Shares) -> bool:
    """Whether the merge can handle so many shares."""
    return 0 <= division.ctas <= MOST_SHARES and division.splits >= 0


SHARES = "launch", "items", "pairs", "mean pairs", "partial results", "partial lines"


def kind_of(division: Shares) -> str:
    """The word for shares of this kind in the keys of `times`."""
    return "splits" if division.splits > 1 else "shares"


def counted(problem: DenseProblem, division: Shares) -> Counted:
    """What takes time in shares and their merge.

    "items" are those of an SM; "pairs" and "mean pairs" the pairs of tiles of the longest share and, in the mean, of an
    SM; "partial results" those of an item; "partial lines" the lines of all partial results by SM, in units of 64.
    """
    items, sms = problem.items(division.heads), problem.gpu.sms
    ctas = shares_of(problem, division)
    pairs = ceil_div(problem.pairs, division.splits) if division.splits > 1 else ceil_div(items * problem.pairs, ctas)
    lines = min(problem.lines, division.heads) / 64
    return SHARES, (1, items / sms, pairs, items * problem.pairs / sms, max(0.0, ctas / items - 1), ctas * lines / sms)


def shares_of(problem: DenseProblem, division: Shares) -> int:
    """The number of shares, which is that of CTAs."""
    items = problem.items(division.heads)
    if division.splits > 1:
        return items * division.splits
    return min(division.ctas or problem.gpu.sms, items * problem.pairs)


def in_shares(
    attention: Kernel,
    merge: Kernel,
    problem: DenseProblem,
    params: Packed,
    division: Shares,
    plan: Plan | None,
    cut_cost: int = CUT_COST,
) -> Program:
    """Two launches: attention over all rows in equal shares, a share a CTA; and the merge of items that are cut.

    Args:
        attention: a kernel of `dense_sm90` or `dense_fp8_sm90`.
        merge: a kernel of this module.
        plan: the plan that the layers of a step share. Equal splits of each item need none.
        cut_cost: what a share costs more where items are cut, in eighths of a pair of tiles.
    """
    lines, splits = division.heads, division.num_splits
    items = problem.items(lines)
    shares = shares_of(problem, division)
    nbytes = (shares if splits > 1 else 2 * shares) * lines * HALF_PARTIAL_BYTES
    memory = Buffer("partial results", shape=(nbytes + SHARE_BYTES * shares,)).ptr
    params = params.replaced(
        num_splits=splits, cluster_parts=memory, shares=memory + nbytes, least_split=LEAST_SPLIT,
        cut_cost=shares * cut_cost, whole_items=ceil_div(items, shares) * shares, num_shares=shares,
    )  # fmt: skip
    dividing = params
    if plan is not None and splits == 1 and SHARE_BYTES * shares <= PLAN_BYTES:
        key = shares, lines, problem.lines, problem.requests
        dividing = params.replaced(
            plan=PlanField(plan, key, "address"), plan_filled=PlanField(plan, key, "filled")
        )  # fmt: skip
    units = min(items, shares) * UNITS_OF_8_LINES * ceil_div(min(problem.lines, lines), 8)
    grid = (min(CTAS * problem.gpu.sms, units), 1, 1)
    return [Launch(attention, (shares, 1, 1), dividing), Launch(merge, grid, params)]
