"""What the kernels of attention are given."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...arrays import Array
from .. import structs
from ..program import Plan, PlanField
from ..structs import Packed
from .problem import Problem

# Flags of struct AttentionParams; kernels_cu/attention/params.cuh
ALIGNED_ROWS, ALIGNED_Q, ALIGNED_OUT, WIDE_OUT, SOME_DONE, DECODE, ALIKE = 1, 2, 4, 8, 16, 32, 64


class Call(NamedTuple):
    """The arguments of one call of attention.

    Attributes:
        params: struct AttentionParams, but for what depends on kernel and division.
        topk, num_slots: entries of a main list, and the rows that they may name.
        lengths: of main lists; None: they have none.
        ends: where main lists end, for kernels and divisions that do not have to wait for it; -1 stands behind.
        plan: of calls that divide their lists alike.
    """

    params: Packed
    topk: int
    num_slots: int
    lengths: Array | None = None
    ends: Array | None = None
    plan: Plan | None = None

    def planned(self, problem: Problem, heads: int, ctas: int) -> dict[str, Any]:
        """Fields of work that is divided over so many CTAs as the plan says."""
        if self.plan is None:
            return self.ended()
        key = ctas, heads, problem.heads, problem.queries, self.topk
        plan = {"plan": PlanField(self.plan, key, "address"), "plan_filled": PlanField(self.plan, key, "filled")}
        return {**self.ended(), **plan}

    def ended(self) -> dict[str, Any]:
        """Fields that say where lists end."""
        return {} if self.ends is None else {"main.lengths": self.ends.ptr}


# `struct Source` of a cache that is not there.
NO_SOURCE = structs.SOURCE(**{name: int(name == "block_size") for name in structs.SOURCE.index})
