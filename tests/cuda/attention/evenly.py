"""Choices that divide the rows of any call evenly over CTAs, so that small calls are divided over many of them, too."""

from __future__ import annotations

from cupy_mla.cuda.attention import choose
from cupy_mla.cuda.attention.choose import EVENLY, Choice, Facts, Row, Sizes
from cupy_mla.cuda.attention.cost import ITEM_COST
from cupy_mla.cuda.paging import ceil_div

CTAS = 132
PAIR_ROWS = 128  # of a pair of tiles


def table(kernel: str, heads: int, item_cost: int = ITEM_COST) -> tuple[Row, ...]:
    """`choose.TABLE`, in which this kernel divides evenly, with so many heads a CTA and splits of a pair and more."""

    def divided(facts: Facts, sizes: Sizes) -> Choice:
        pairs = max(1, ceil_div(sizes.rows, PAIR_ROWS))
        ctas = max(1, min(CTAS, sizes.queries * ceil_div(sizes.h_q, heads) * pairs))
        return Choice(kernel, heads, EVENLY, ctas=ctas, least_split=1, item_cost=item_cost)

    return tuple(row._replace(choice=divided) if row.kernel == kernel else row for row in choose.TABLE)
