"""The ways to divide the work of an attention call over CTAs, as values.

A work item is a query and a tile of `heads` heads. Its rows may be cut into splits, each worked on by a CTA of its own.

A division prints itself as text, `clusters(heads=64, splits=4, cluster=4)`, and `parse` reads such text. Fields that
have their defaults are left out.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

MAX_SPLITS = 1024  # of a query's rows; each takes memory for a partial result

# Of shares (kernels_cu/attention/shares.cuh), in eighths of the time of a pair of tiles: what a work item costs beside
# its pairs, and what a share of lists that are not equally long costs more because items are cut.
ITEM_COST, CUT_COST = 11, 24


class Whole(NamedTuple):
    """A CTA works on whole items, one after the other.

    Attributes:
        heads: of a work item.
        queries: of a work item.
        counted: a launch before finds the last valid entry of each list.
    """

    heads: int
    queries: int = 1
    counted: bool = False

    def __repr__(self) -> str:
        return text_of(self)


class Clusters(NamedTuple):
    """Each split of an item has a CTA. The CTAs of a cluster merge their results; `combine.cu` merges those of an
    item's splits / cluster clusters.

    Attributes:
        heads: of a work item.
        splits: of a work item.
        cluster: CTAs of a cluster.
    """

    heads: int
    splits: int
    cluster: int

    def __repr__(self) -> str:
        return text_of(self)


class Shares(NamedTuple):
    """All rows of the call are divided into equal shares, one a CTA, wherever in an item a share ends.

    Attributes:
        heads: of a work item.
        splits: each item is divided into so many equal shares; 0: shares end anywhere.
        ctas: shares; 0: one for each SM, fewer where splits would be shorter than `least_split`.
        least_split: pairs of tiles that a split has at least; 0: as the kernel has it.
        item_cost: what an item costs beside its pairs, in eighths of a pair; -1: that of the fastest slowest share.
        cut_cost: what a share of unequal lists costs more because items are cut. Where cutting saves less, items stay
            whole.
    """

    heads: int
    splits: int = 0
    ctas: int = 0
    least_split: int = 0
    item_cost: int = -1
    cut_cost: int = CUT_COST

    def __repr__(self) -> str:
        return text_of(self)


class Segments(NamedTuple):
    """A CTA takes the splits of an item one after the other, and merges their results as a cluster would: same bits.

    Attributes:
        heads: of a work item.
        splits: of a work item.
    """

    heads: int
    splits: int

    def __repr__(self) -> str:
        return text_of(self)


class Teams(NamedTuple):
    """Each split of an item has a CTA. The CTAs are no cluster, the last one merges their results.

    Attributes:
        heads: of a work item.
        splits: of a work item; 0: as many as the lengths of its lists ask for, of as many CTAs as there are SMs.
    """

    heads: int
    splits: int = 0

    def __repr__(self) -> str:
        return text_of(self)


Division = Whole | Clusters | Shares | Segments | Teams
KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (Whole, Clusters, Shares, Segments, Teams)}
_TEXT = re.compile(r"(\w+)(?:\((.*)\))?")


def text_of(division: Any) -> str:
    """A division as text."""
    defaults = division._field_defaults
    given = (f"{name}={value}" for name, value in division._asdict().items() if value != defaults.get(name))
    return f"{type(division).__name__.lower()}({', '.join(given)})"


def parse(text: str) -> tuple[type[Any], dict[str, int]]:
    """The kind that a text names, and the fields that it gives.

    Raises:
        ValueError: it names no kind or field, or a value is no whole number.
    """
    match = _TEXT.fullmatch(text.strip())
    kind = KINDS.get(match[1]) if match else None
    if match is None or kind is None:
        raise ValueError(f"a division is one of {', '.join(KINDS)}, with or without fields, got {text!r}")
    fields = {}
    for part in filter(None, (match[2] or "").replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        number = {"True": "1", "False": "0"}.get(value, value)
        if name not in kind._fields or not re.fullmatch(r"-?\d+", number):
            raise ValueError(f"the fields of {match[1]} are whole numbers {', '.join(kind._fields)}, got {part!r}")
        fields[name] = int(number)
    return kind, fields


def division(text: str) -> Division:
    """The division that a text names with all its fields.

    Raises:
        ValueError: as `parse`, or a field is missing.
    """
    kind, fields = parse(text)
    missing = [name for name in kind._fields if name not in fields and name not in kind._field_defaults]
    if missing:
        raise ValueError(f"{text!r} lacks {', '.join(missing)}")
    return kind(**fields)
