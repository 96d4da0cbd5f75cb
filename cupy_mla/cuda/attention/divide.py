"""The ways to divide the work of an attention call over CTAs, as values.

A work item is a query with `heads` of its heads. Its rows may be cut into splits.

Every division has

    num_splits    the field of `struct AttentionParams`
    grid          CTAs, where the division says how many
    memory        scratch memory for partial results, as fields of `struct AttentionParams` (of `Shares`: `fields`)

It prints itself as text, `clusters(heads=64, splits=4, cluster=4)`, without the fields that have their defaults.
`parse` reads such text.
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

# Bytes of a head's partial result as float32 and as float16, as in kernels_cu/attention/division/merge.cuh.
PARTIAL_BYTES, HALF_PARTIAL_BYTES = 4 * D_V + 16, 2 * D_V + 16
MAX_SPLITS = 1024  # of a query's rows; each takes memory for a partial result

# Costs by which rows are divided into equal shares (kernels_cu/attention/division/find_share.cuh), in eighths of the
# time of a pair of tiles: a pair; a work item beside its pairs; what a share costs more where items are cut, which
# decides whether items of unequal lists are cut at all.
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
        return _persistent_ctas(problem, self.heads)


class Clusters(NamedTuple):
    """Each split of an item has a CTA. The CTAs of a cluster merge their results. Where an item has several clusters
    (splits / cluster), `combine.cu` merges what they leave.

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
        """Whether the sizes are possible."""
        return 1 <= self.cluster <= MAX_CLUSTER and 1 < self.splits <= MAX_SPLITS and self.splits % self.cluster == 0

    def memory(self, problem: Problem, cta_bytes: int) -> dict[str, Any]:
        """Memory for what the CTAs of a cluster merge, and for what clusters leave to `combine.cu`.

        Args:
            cta_bytes: of a CTA's partial results.
        """
        nbytes = problem.items(self.heads) * self.splits * cta_bytes if self.cluster > 1 else 0
        rows = self.num_splits * problem.queries * problem.heads if self.num_splits > 1 else 0
        if not nbytes + rows:
            return {}
        memory = Buffer("partial results", shape=(nbytes + 4 * rows * (D_V + 2),)).ptr
        out = memory + nbytes
        lse, max_logits = out + 4 * rows * D_V, out + 4 * rows * (D_V + 1)
        part_max = max_logits if problem.prefill else 0  # a decode has no such result
        return {"cluster_parts": memory, "part_out": out, "part_lse": lse, "part_max": part_max}


class Shares(NamedTuple):
    """All rows of the call are divided into equal shares, one a CTA. A share may end anywhere in an item.

    Attributes:
        heads: of a work item.
        splits: each item is divided into so many equal shares; 0: shares end anywhere.
        ctas: shares at most; 0: one for each SM. There are fewer where splits would be shorter than `least_split`.
        least_split: pairs of tiles that a split has at least; 0: the kernel's own number.
        item_cost: what an item costs beside its pairs, in eighths of a pair; -1: the kernel chooses it.
        cut_cost: what a share of unequal lists costs more because items are cut, in eighths of a pair. Where cutting
            saves less, items stay whole.
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
        self, problem: Problem, max_ctas: int, least_split: int, item_cost: int = ITEM_COST, pairs: int = 0
    ) -> Shares:
        """The same division with every field filled in.

        Args:
            max_ctas: CTAs at most, unless `ctas` is given.
            least_split, item_cost: the kernel's own.
            pairs: of an item, in the kernel's own unit; 0: its pairs of tiles.
        """
        items, least = problem.items(self.heads), self.least_split or least_split
        ctas = max(1, min(self.ctas or max_ctas, items * (pairs or problem.pairs) // least))
        cost = item_cost if self.item_cost < 0 else self.item_cost
        return self._replace(ctas=items * self.splits or ctas, least_split=least, item_cost=cost)

    def fields(self, problem: Problem, cta_bytes: int) -> dict[str, Any]:
        """Fields of `struct AttentionParams`, of a division that is `filled`.

        Args:
            cta_bytes: of a CTA's partial results.
        """
        whole = ceil_div(problem.items(self.heads), self.ctas) * self.ctas
        return {
            **_exchange(self.ctas, cta_bytes), "least_split": self.least_split, "item_cost": self.item_cost,
            "cut_cost": self.ctas * self.cut_cost, "whole_items": whole,
        }  # fmt: skip


class Segments(NamedTuple):
    """A CTA takes the splits of an item one after the other, and merges their results in the order of a cluster. So the
    bits are those of `Clusters` with as many splits.

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
        return _persistent_ctas(problem, self.heads)

    def memory(self, problem: Problem, split_bytes: int) -> dict[str, Pointer]:
        """Memory for the partial results of a CTA's splits, of so many bytes each."""
        return {"cluster_parts": Buffer("partial results", shape=(self.grid(problem) * self.splits * split_bytes,)).ptr}


class Teams(NamedTuple):
    """Each split of an item has a CTA. The CTAs of an item are no cluster and need not run at the same time. They merge
    their results as kernels_cu/attention/division/teams.cuh says.

    Attributes:
        heads: of a work item.
        splits: of a work item; 0: the kernel gives each item a part of all CTAs, by the length of its lists.
        ctas: CTAs in all where `splits` is 0; 0: one for each SM.
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
        """CTAs, at least one for each item."""
        items = problem.items(self.heads)
        return items * self.splits or max(self.ctas or problem.gpu.sms, items)

    def memory(self, problem: Problem, cta_bytes: int) -> dict[str, Any]:
        """Memory for the partial results of CTAs, of so many bytes each."""
        return _exchange(self.grid(problem), cta_bytes)


def _persistent_ctas(problem: Problem, heads: int) -> int:
    """CTAs that take items of so many heads in turn, at most one for each SM."""
    return min(problem.items(heads), problem.gpu.sms)


def _exchange(ctas: int, cta_bytes: int) -> dict[str, Any]:
    """Memory for the partial results that CTAs leave to others, and for the words that say that these are there."""
    memory = Buffer("partial results", shape=(ctas * (cta_bytes + 16),)).ptr
    return {"cluster_parts": memory, "ready": memory + ctas * cta_bytes, "nonce": Nonce()}


Division = Whole | Clusters | Shares | Segments | Teams
KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (Whole, Clusters, Shares, Segments, Teams)}
_TEXT = re.compile(r"(\w+)(?:\((.*)\))?")


@lru_cache(maxsize=4096)
def split_numbers(parts: int, most: int) -> tuple[int, ...]:
    """The numbers of splits from 2 to `most` that are worth considering. The longest split decides the time, so of the
    numbers that give it the same number of parts only the least counts.

    Args:
        parts: tiles, pairs of tiles or steps of an item's rows.
    """
    found, splits = [], 2
    while splits <= min(parts, most):
        found.append(splits)
        longest = -(-parts // splits)
        if longest == 1:
            break
        splits = -(-parts // (longest - 1))
    return tuple(found)


def even_shares(items: int, ctas: int) -> tuple[np.ndarray, np.ndarray]:
    """The boundaries of equal shares of items that cost the same: the item that each lies in, and how far behind the
    item's begin, in units of 1 / `ctas` of an item.

    The boundaries repeat after `ctas / gcd(items, ctas)` shares. Only these first ones are returned.
    """
    item, rest = np.divmod(np.arange(0, items // gcd(items, ctas) * ctas + 1, items), ctas)
    return item, rest


def nearest_pair(cost: np.ndarray, item_cost: np.ndarray | int) -> np.ndarray:
    """How many pairs of an item lie before a boundary between shares: that nearest to `cost` behind the item's begin,
    as `nearest_boundary` of kernels_cu/attention/division/find_share.cuh finds it."""
    return (np.maximum(cost - item_cost, 0) + PAIR_COST // 2) // PAIR_COST


@cache
def largest_cluster(splits: int) -> int:
    """The size of the largest cluster that divides a number of splits."""
    return next(n for n in range(min(splits, MAX_CLUSTER), 0, -1) if splits % n == 0)


def text_of(division: Any, whole: bool = False) -> str:
    """A division as text, with the fields that differ from their defaults; `whole`: with all fields."""
    defaults = {} if whole else division._field_defaults
    given = (f"{name}={value}" for name, value in division._asdict().items() if value != defaults.get(name))
    return f"{type(division).__name__.lower()}({', '.join(given)})"


def parse(text: str) -> tuple[type[Any], dict[str, int]]:
    """The kind of division that a text names, and the fields that it gives.

    Raises:
        ValueError: no kind or field has that name, or a value is no whole number.
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
