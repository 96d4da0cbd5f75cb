"""The arguments of a call of attention as the kernels take them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...arguments import Decode, DenseDecode, Prefill
from ...arrays import Array
from ...layouts import Layout
from .. import structs
from ..paging import call_scale, pointer
from ..program import Plan, PlanField
from ..structs import Packed
from .problem import DenseProblem, Problem

LOG2_E: float = math.log2(math.e)

# Bits of AttentionParams::flags, as in kernels_cu/attention/params.cuh.
ALIGNED_ROWS, ALIGNED_Q, ALIGNED_OUT, WIDE_OUT, SOME_DONE, DECODE, ALIKE, E4M3_Q = 1, 2, 4, 8, 16, 32, 64, 128
INVARIANT = 256


class Call(NamedTuple):
    """The arguments of one call of attention.

    Attributes:
        params: `struct AttentionParams`; the fields that depend on kernel and division are still to be filled in.
        topk: entries of a main list.
        num_slots: rows of the main cache: entries are below it.
        lengths: lengths of the main lists; None: they have none.
        ends: where the main lists end, which are -1 from there on. So a kernel may use these lengths or leave them.
        plan: the plan that the layers of a step share; None: there is none.
    """

    params: Packed
    topk: int
    num_slots: int
    lengths: Array | None = None
    ends: Array | None = None
    plan: Plan | None = None

    def plan_fields(self, problem: Problem, heads: int, ctas: int) -> dict[str, Any]:
        """Fields that say where lists end and where the plan lies.

        Args:
            heads: of a work item.
            ctas: among which the plan divides the work.
        """
        if self.plan is None:
            return self.end_fields()
        key = ctas, heads, problem.heads, problem.queries, self.topk, problem.extra_entries
        plan = {"plan": PlanField(self.plan, key, "address"), "plan_filled": PlanField(self.plan, key, "filled")}
        return {**self.end_fields(), **plan}

    def end_fields(self) -> dict[str, Any]:
        """Fields that say where lists end."""
        return {} if self.ends is None else {"main.lengths": self.ends.ptr}


# `struct Source` where there is no extra cache.
NO_SOURCE = structs.SOURCE(**{name: int(name == "block_size") for name in structs.SOURCE.index})

# Fields of `struct AttentionParams` that depend on kernel and division: what they are until a kernel replaces them.
NOT_DIVIDED: dict[str, int] = {
    **dict.fromkeys(("part_out", "part_lse", "part_max", "cluster_parts", "order", "ready", "nonce"), 0),
    **dict.fromkeys(("least_split", "item_cost", "cut_cost", "whole_items", "plan_filled", "plan"), 0), "num_splits": 1,
}  # fmt: skip


def decode_fields(a: Decode | DenseDecode) -> dict[str, Any]:
    """Fields of `struct AttentionParams`: sizes of a decode, and strides of q, out and lse."""
    b, s_q, h_q, _ = a.q.shape
    q, out, lse = a.q.strides, a.out.strides, a.lse.strides
    return {
        "q_b": q[0], "q_s": q[1], "q_h": q[2], "out_b": out[0], "out_s": out[1], "out_h": out[2], "lse_b": lse[0],
        "lse_s": lse[2], "lse_h": lse[1], "max_logits": 0, "s_q": s_q, "h_q": h_q, "num_queries": b * s_q,
    }  # fmt: skip


def params_of(
    problem: Problem | DenseProblem,
    a: Prefill | Decode | DenseDecode,
    main: Packed,
    extra: Packed,
    fields: dict[str, Any],
    flags: int,
) -> Packed:
    """`struct AttentionParams`; kernel and division fill in the fields of `NOT_DIVIDED`.

    Args:
        main, extra: `struct Source` of both caches.
        fields: sizes and strides, as of `decode_fields`.
        flags: those that say something about the caches and the kind of call.
    """
    wide_out = a.out.aligned(16)
    flags |= WIDE_OUT * wide_out | ALIGNED_OUT * (wide_out or a.out.aligned(4))
    flags |= ALIGNED_Q * (problem.aligned or a.q.aligned(4)) | E4M3_Q * (a.q.dtype.itemsize == 1)
    return structs.ATTENTION(
        **NOT_DIVIDED, **fields, main=main, extra=extra, q=a.q.ptr, out=a.out.ptr, lse=a.lse.ptr, sink=pointer(a.sink),
        scale_log2=a.sm_scale * LOG2_E, flags=flags, q_scale=call_scale(a.q_scale), k_scale=call_scale(a.k_scale),
    )  # fmt: skip


def aligned_rows(layout: Layout, cache: Array) -> bool:
    """True when every row of a paged cache starts at a multiple of 16 bytes. In quantized caches the layout says how
    far rows are apart."""
    if not layout.quantized:
        return cache.aligned(16)
    return cache.ptr % 16 == 0 and layout.row_stride % 16 == 0 and (cache.shape[0] <= 1 or cache.strides[0] % 16 == 0)
