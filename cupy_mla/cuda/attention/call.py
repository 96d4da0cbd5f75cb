"""What the kernels of attention are given."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...arguments import Decode, DenseDecode, Prefill
from ...arrays import Array
from ...layouts import Layout
from .. import structs
from ..paging import pointer
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
        key = ctas, heads, problem.heads, problem.queries, self.topk, problem.extra_entries
        plan = {"plan": PlanField(self.plan, key, "address"), "plan_filled": PlanField(self.plan, key, "filled")}
        return {**self.ended(), **plan}

    def ended(self) -> dict[str, Any]:
        """Fields that say where lists end."""
        return {} if self.ends is None else {"main.lengths": self.ends.ptr}


def no_source() -> Packed:
    """`struct Source` of a cache that is not there."""
    return structs.SOURCE(**{name: int(name == "block_size") for name in structs.SOURCE.index})


def decode_strides(a: Decode | DenseDecode) -> dict[str, int]:
    """The fields of `struct AttentionParams` that say where the queries and results of a decode are."""
    q, out, lse = a.q.strides, a.out.strides, a.lse.strides
    return {
        "q_b": q[0], "q_s": q[1], "q_h": q[2], "out_b": out[0], "out_s": out[1], "out_h": out[2], "lse_b": lse[0],
        "lse_s": lse[2], "lse_h": lse[1],
    }  # fmt: skip


def params_of(
    a: Prefill | Decode | DenseDecode, main: Packed, extra: Packed, strides: dict[str, int], flags: int
) -> Packed:
    """`struct AttentionParams` without sizes and memory."""
    flags |= ALIGNED_Q * a.q.aligned(4) | ALIGNED_OUT * a.out.aligned(4) | WIDE_OUT * a.out.aligned(16)
    return structs.ATTENTION(
        main=main, extra=extra, q=a.q.ptr, out=a.out.ptr, lse=a.lse.ptr, max_logits=0, part_out=0, part_lse=0,
        part_max=0, cluster_parts=0, sink=pointer(a.sink), scale_log2=a.sm_scale * math.log2(math.e), s_q=0, h_q=0,
        num_queries=0, num_splits=1, flags=flags, order=0, ready=0, nonce=0, least_split=0, item_cost=0, cut_cost=0,
        whole_items=0, plan_filled=0, plan=0, **strides,
    )  # fmt: skip


def aligned_rows(layout: Layout, cache: Array) -> bool:
    """True when every row of a paged cache starts at a multiple of 16 bytes. FP8 rows stand where the layout says."""
    if not layout.quantized:
        return cache.aligned(16)
    return cache.ptr % 16 == 0 and layout.row_stride % 16 == 0 and (cache.shape[0] <= 1 or cache.strides[0] % 16 == 0)
