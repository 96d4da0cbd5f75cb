"""The ways to divide the work of an attention call over CTAs, as values.

A work item is a query and a tile of `heads` heads. Its rows may be cut into splits, each worked on by a CTA of its own.

A division prints itself as text, `clusters(heads=64, splits=4, cluster=4)`, and `parse` reads such text. Fields that
have their defaults are left out.

`num_splits` of a division is how many partial results of an item are left by CTAs that are no cluster; `memory` asks
for what partial results need, as fields of `struct AttentionParams`.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ...layouts import D_V
from ..driver import MAX_CLUSTER
from ..paging import ceil_div
from ..program import Buffer, Nonce, Pointer
from .problem import Problem

# Bytes of a head's partial result as float32 and as float16; kernels_cu/attention/division/merge.cuh
PARTIAL_BYTES, HALF_PARTIAL_BYTES = 4 * D_V + 16, 2 * D_V + 16
MAX_SPLITS = 1024  # of a query's rows; each takes memory for a partial result

# Of shares (kernels_cu/attention/division/find_share.cuh), in eighths of the time of a pair of tiles: what a work item
# costs beside its pairs, and what a share of lists that are not equally long costs more because items are cut.
PAIR_COST, ITEM_COST, CUT_COST = 8, 11, 24


class Whole(NamedTuple):
    """A CTA works on whole items, one after the other.

    Attributes:
        heads: of a work item.
        queries: of a work item.
    """

    heads: int
    queries: int = 1

    def __repr__(self) -> str:
        return text_of(self)

    @property
    def num_splits(self) -> int:
        return 1

    def grid(self, problem: Problem) -> int:
        return _in_turn(problem, self.heads)


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

    @property
    def num_splits(self) -> int:
        return self.splits // self.cluster

    @property
    def fits(self) -> bool:
        """Whether there can be such clusters."""
        return 1 <= self.cluster <= MAX_CLUSTER and 1 < self.splits <= MAX_SPLITS and self.splits % self.cluster == 0

    def memory(self, problem: Problem, each: int) -> dict[str, Any]:
        """Memory for what clusters merge, and for what they leave to `combine.cu`.

        Args:
            each: bytes of a CTA's partial results.
        """
        nbytes = problem.items(self.heads) * self.splits * each if self.cluster > 1 else 0
        rows = self.num_splits * problem.queries * problem.heads if self.num_splits > 1 else 0
        if not nbytes + rows:
            return {}
        memory = Buffer("partial results", shape=(nbytes + 4 * rows * (D_V + 2),)).ptr
        out = memory + nbytes
        lse, most = out + 4 * rows * D_V, out + 4 * rows * (D_V + 1)
        return {"cluster_parts": memory, "part_out": out, "part_lse": lse, "part_max": most if problem.prefill else 0}


class Shares(NamedTuple):
    """All rows of the call are divided into equal shares, one a CTA, wherever in an item a share ends.

    Attributes:
        heads: of a work item.
        splits: each item is divided into so many equal shares; 0: shares end anywhere.
        ctas: shares at most; 0: one for each SM. There are fewer where splits would be shorter than `least_split`.
        least_split: pairs of tiles that a split has at least; 0: as the kernel has it.
        item_cost: what an item costs beside its pairs, in eighths of a pair; -1: what makes the
            slowest share fastest.
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

    @property
    def num_splits(self) -> int:
        return self.splits or 1

    def filled(
        self, problem: Problem, most: int, least_split: int, item_cost: int = ITEM_COST, parts: int = 0
    ) -> Shares:
        """The same with every field filled in.

        Args:
            most: CTAs at most.
            least_split: the kernel's, in pairs of tiles.
            item_cost: the kernel's.
            parts: what an item has of what `least_split` counts; 0: its pairs of tiles.
        """
        items, least = problem.items(self.heads), self.least_split or least_split
        ctas = max(1, min(self.ctas or most, items * (parts or problem.pairs) // least))
        cost = item_cost if self.item_cost < 0 else self.item_cost
        return self._replace(ctas=items * self.splits or ctas, least_split=least, item_cost=cost)

    def fields(self, problem: Problem, each: int) -> dict[str, Any]:
        """Fields of filled shares.

        Args:
            each: bytes of a CTA's partial results.
        """
        whole = ceil_div(problem.items(self.heads), self.ctas) * self.ctas
        return {
            **_left(self.ctas, each), "least_split": self.least_split, "item_cost": self.item_cost,
            "cut_cost": self.ctas * self.cut_cost, "whole_items": whole,
        }  # fmt: skip


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

    @property
    def num_splits(self) -> int:
        return self.splits

    def grid(self, problem: Problem) -> int:
        return _in_turn(problem, self.heads)

    def memory(self, problem: Problem, each: int) -> dict[str, Pointer]:
        """Memory for the partial results of a CTA's splits, of so many bytes each."""
        return {"cluster_parts": Buffer("partial results", shape=(self.grid(problem) * self.splits * each,)).ptr}


class Teams(NamedTuple):
    """Each split of an item has a CTA. The CTAs are no cluster, the last one merges their results.

    Attributes:
        heads: of a work item.
        splits: of a work item; 0: as many as the lengths of its lists ask for, of `ctas` in all.
        ctas: 0: as many as there are SMs.
    """

    heads: int
    splits: int = 0
    ctas: int = 0

    def __repr__(self) -> str:
        return text_of(self)

    @property
    def num_splits(self) -> int:
        return self.splits or 1

    def grid(self, problem: Problem) -> int:
        """CTAs, at least one an item."""
        items = problem.items(self.heads)
        return items * self.splits or max(self.ctas or problem.gpu.sms, items)

    def memory(self, problem: Problem, each: int) -> dict[str, Any]:
        """Memory for partial results of a CTA, of so many bytes each."""
        return _left(self.grid(problem), each)


def _in_turn(problem: Problem, heads: int) -> int:
    """CTAs that take items of so many heads in turn."""
    return min(problem.items(heads), problem.gpu.sms)


def _left(ctas: int, each: int) -> dict[str, Any]:
    """Memory for what CTAs leave to others, and where they say that it is there."""
    memory = Buffer("partial results", shape=(ctas * (each + 16),)).ptr
    return {"cluster_parts": memory, "ready": memory + ctas * each, "nonce": Nonce()}


Division = Whole | Clusters | Shares | Segments | Teams
KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (Whole, Clusters, Shares, Segments, Teams)}
_TEXT = re.compile(r"(\w+)(?:\((.*)\))?")


@lru_cache(maxsize=4096)
def split_numbers(parts: int, most: int) -> tuple[int, ...]:
    """Numbers of splits that are worth a look, from 2 to `most`: each is the least with so few parts a split."""
    found, splits = [], 2
    while splits <= min(parts, most):
        found.append(splits)
        each = -(-parts // splits)
        if each == 1:
            break
        splits = -(-parts // (each - 1))
    return tuple(found)


def even_shares(items: int, ctas: int) -> tuple[np.ndarray, np.ndarray]:
    """Where even shares of items that are alike begin and end: the item, and how many `ctas`-ths of one behind its
    begin. Shares come again after some; these are left out."""
    item, rest = np.divmod(np.arange(0, items // gcd(items, ctas) * ctas + 1, items), ctas)
    return item, rest


def nearest_pair(cost: np.ndarray, item_cost: np.ndarray | int) -> np.ndarray:
    """The pair of tiles before which a share begins that is to begin so much cost behind an item's begin, as in
    kernels_cu/attention/division/find_share.cuh."""
    return (np.maximum(cost - item_cost, 0) + PAIR_COST // 2) // PAIR_COST


@cache
def largest_cluster(splits: int) -> int:
    """The CTAs of the largest cluster whose size divides so many splits."""
    return next(n for n in range(min(splits, MAX_CLUSTER), 0, -1) if splits % n == 0)


def text_of(division: Any, whole: bool = False) -> str:
    """A division as text; `whole`: with all its fields."""
    defaults = {} if whole else division._field_defaults
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
