"""Choices that divide the rows of any call evenly over CTAs, so that small calls are divided over many of them, too;
and what the tests of kernels that do so share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cupy_mla.cuda.attention import choose
from cupy_mla.cuda.attention.choose import EVENLY, Choice, Facts, Row, Sizes
from cupy_mla.cuda.attention.cost import ITEM_COST
from cupy_mla.cuda.paging import ceil_div

from ... import oracle
from ...cases import Paged, check_decode, paged, queries
from ...kinds import NumPy

CTAS = 132
PAIR_ROWS = 128  # of a pair of tiles


def table_with(kernel: str, choice: Callable[[Facts, Sizes], Choice]) -> tuple[Row, ...]:
    """`choose.TABLE`, in which this kernel has this choice."""
    return tuple(row._replace(choice=choice) if row.kernel == kernel else row for row in choose.TABLE)


def table(kernel: str, heads: int, item_cost: int = ITEM_COST) -> tuple[Row, ...]:
    """`choose.TABLE`, in which this kernel divides evenly, with so many heads a CTA and splits of a pair and more."""

    def divided(facts: Facts, sizes: Sizes) -> Choice:
        pairs = max(1, ceil_div(sizes.rows, PAIR_ROWS))
        ctas = max(1, min(CTAS, sizes.queries * ceil_div(sizes.h_q, heads) * pairs))
        return Choice(kernel, heads, EVENLY, ctas=ctas, least_split=1, item_cost=item_cost)

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
