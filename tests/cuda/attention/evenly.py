"""Choices that divide the rows of any call evenly over CTAs, so that small calls are divided over many of them, too;
and what the tests of kernels that do so share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cupy_mla.cuda.attention import choose
from cupy_mla.cuda.attention.choose import EVENLY, Choice, Facts, Row, Sizes
from cupy_mla.cuda.attention.cost import CUT_COST, ITEM_COST
from cupy_mla.cuda.paging import ceil_div

from ... import oracle
from ...cases import Paged, check_decode, off_zero, paged, queries, sinks
from ...kinds import NumPy

CTAS = 132
PAIR_ROWS = 128  # of a pair of tiles


def table_with(kernel: str, choice: Callable[[Facts, Sizes], Choice]) -> tuple[Row, ...]:
    """`choose.TABLE`, in which this kernel has this choice."""
    return tuple(row._replace(choice=choice) if row.kernel == kernel else row for row in choose.TABLE)


def table(
    kernel: str, heads: int, item_cost: int = ITEM_COST, cut_cost: int = 0, ctas: int | None = None
) -> tuple[Row, ...]:
    """`choose.TABLE`, in which this kernel divides evenly, with so many heads a CTA and splits of a pair and more."""

    def divided(facts: Facts, sizes: Sizes) -> Choice:
        pairs = max(1, ceil_div(sizes.rows, PAIR_ROWS))
        shares = max(1, min(ctas or CTAS, sizes.queries * ceil_div(sizes.h_q, heads) * pairs))
        return Choice(kernel, heads, EVENLY, ctas=shares, least_split=1, item_cost=item_cost, cut_cost=cut_cost)

    return table_with(kernel, divided)


unequal_lengths = pytest.mark.parametrize(
    "lengths",
    [
        [0, 1, 300, 5000],
        [0] * 69 + [300],  # one request with everything
        [300] + [0] * 69,
        [0],
        [-7, 64, 65],
    ],
    ids=str,
)


def unequal(rng: np.random.Generator, fmt: oracle.Format, lengths: list[int]) -> tuple[Paged, Paged]:
    """Two caches for 70 requests, with these lengths, in turn."""
    main, extra = paged(rng, fmt, 70, 2, 300, 64, lengths=True), paged(rng, fmt, 70, 2, 130, 2, lengths=True)
    main.length[:] = np.resize(lengths, 70)
    extra.length[:] = np.resize(lengths[::-1], 70)
    return main, extra


def check_nothing_valid(kind: NumPy, rng: np.random.Generator, fmt: oracle.Format, h_q: int) -> None:
    """But for the first five, lists have no valid entry."""
    main = paged(rng, fmt, 140, 1, 300, 64)
    main.indices[5:] = -1
    out, lse = check_decode(kind, fmt, queries(rng, 140, 1, h_q, fmt.d_qk), main)
    assert (out[5:].astype(np.float32) == 0).all()
    assert (lse[5:] == np.inf).all()


def check_items_stay_whole(
    kind: NumPy,
    rng: np.random.Generator,
    replace_in_choose: Callable[[str, tuple[Row, ...]], None],
    fmt: oracle.Format,
    kernel: str,
    heads: int,
) -> None:
    """Items of lists with lengths, of 4 CTAs, are cut where the longest share then gets shorter by enough."""
    always, never = 0, 1 << 20
    for lengths, cut in (
        ([1024, 1024, 1024], False),
        ([1024, 1100, 960], False),  # up to topk; as many pairs of tiles
        ([1024, 1024], True),
        ([1024, 100, 0], True),
        ([200] * 5, False),  # a CTA has two
        ([1024] * 5, True),
    ):
        main = paged(rng, fmt, len(lengths), 1, 1024, 64, lengths=True)
        main.length[:] = lengths
        q = off_zero(fmt, queries(rng, len(lengths), 1, heads, fmt.d_qk), main)
        sink, bits = sinks(rng, heads), []
        for cost in (never, CUT_COST, always):
            replace_in_choose("TABLE", table(kernel, heads, cut_cost=cost, ctas=4))
            bits.append([r.tobytes() for r in check_decode(kind, fmt, q, main, sink=sink)])
        whole, found, split = bits
        assert whole != split
        assert found == (split if cut else whole), lengths
