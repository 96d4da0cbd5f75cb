"""The arguments of a call of attention as the kernels take them."""

from __future__ import annotations

import math
from functools import lru_cache
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
        fields: fields of `struct AttentionParams`, as of `fields_of`.
        topk: entries of a main list.
        num_slots: rows of the main cache: entries are below it.
        lengths: lengths of the main lists; None: they have none.
        ends: where the main lists end, which are -1 from there on. So a kernel may use these lengths or leave them.
        plan: the plan that the layers of a step share; None: there is none.
    """

    fields: dict[str, Any]
    topk: int
    num_slots: int
    lengths: Array | None = None
    ends: Array | None = None
    plan: Plan | None = None

    def packed(self, **fields: Any) -> Packed:
        """`struct AttentionParams`, with fields that depend on kernel and division."""
        return structs.ATTENTION(**{**self.fields, **fields})

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
        return {} if self.ends is None else {"main": self.fields["main"].replaced(lengths=self.ends.ptr)}


# `struct Source` where there is no extra cache.
NO_SOURCE = structs.SOURCE(**{name: int(name == "block_size") for name in structs.SOURCE.index})

# Fields of `struct AttentionParams` that depend on kernel and division: what they are where a kernel does not replace
# them. And the extra cache, where there is none.
NOT_DIVIDED: dict[str, Any] = {
    **dict.fromkeys(("part_out", "part_lse", "part_max", "cluster_parts", "order", "ready", "nonce"), 0),
    **dict.fromkeys(("least_split", "item_cost", "cut_cost", "whole_items", "plan_filled", "plan"), 0), "num_splits": 1,
    "extra": NO_SOURCE,
}  # fmt: skip


def decode_fields(a: Decode | DenseDecode) -> dict[str, Any]:
    """Fields of `struct AttentionParams`: sizes of a decode, and strides of q, out and lse."""
    b, s_q, h_q, _ = a.q.shape
    q, out, lse = a.q.strides, a.out.strides, a.lse.strides
    return {
        "q_b": q[0], "q_s": q[1], "q_h": q[2], "out_b": out[0], "out_s": out[1], "out_h": out[2], "lse_b": lse[0],
        "lse_s": lse[2], "lse_h": lse[1], "max_logits": 0, "s_q": s_q, "h_q": h_q, "num_queries": b * s_q,
    }  # fmt: skip


def fields_of(
    problem: Problem | DenseProblem, a: Prefill | Decode | DenseDecode, main: Packed, sizes: dict[str, Any], flags: int
) -> dict[str, Any]:
    """Fields of `struct AttentionParams`; kernel and division replace those of `NOT_DIVIDED`.

    Args:
        main: `struct Source` of the main cache.
        sizes: sizes and strides, as of `decode_fields`.
        flags: those that say something about the caches and the kind of call.
    """
    wide_out = a.out.aligned(16)
    flags |= WIDE_OUT * wide_out | ALIGNED_OUT * (wide_out or a.out.aligned(4))
    flags |= ALIGNED_Q * (problem.aligned or a.q.aligned(4)) | E4M3_Q * (a.q.dtype.itemsize == 1)
    return {
        **NOT_DIVIDED, **sizes, "main": main, "q": a.q.ptr, "out": a.out.ptr, "lse": a.lse.ptr, "sink": pointer(a.sink),
        "scale_log2": a.sm_scale * LOG2_E, "flags": flags, "q_scale": call_scale(a.q_scale),
        "k_scale": call_scale(a.k_scale),
    }  # fmt: skip


class PagedRows(NamedTuple):
    """The rows of a paged cache.

    Attributes:
        aligned: every row starts at a multiple of 16 bytes. In quantized caches the layout says how far rows are apart.
        flat: one stride leads from each row to the next, also from block to block.
        fields: fields of `struct Source`.
    """

    aligned: bool
    flat: bool
    fields: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, cache: Array) -> PagedRows:
        """Those of a cache."""
        return _paged_rows(layout, cache.dtype.itemsize, cache.shape, cache.strides, cache.ptr % 16)

    def source(self, cache: Array, indices: Array, length: Array | None) -> Packed:
        """`struct Source` of the cache and its index lists."""
        return structs.SOURCE(
            **self.fields, cache=cache.ptr, indices=indices.ptr, lengths=pointer(length),
            index_stride_b=indices.strides[0], index_stride_s=indices.strides[1], topk=indices.shape[2],
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _paged_rows(layout: Layout, size: int, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> PagedRows:
    """`PagedRows.of` a cache of items of `size` bytes, whose address modulo 16 is `start`. The caches of a process have
    few shapes."""
    num_blocks, block_size, _ = shape
    block_stride, row_stride = strides[0] * size, strides[1] * size
    flat = num_blocks <= 1 or block_stride == block_size * row_stride
    apart = layout.row_stride if layout.quantized else row_stride * (block_size > 1)
    aligned = not (start % 16 or apart % 16 or block_stride * (num_blocks > 1) % 16)
    fields = {"block_stride": block_stride, "row_stride": row_stride, "num_slots": num_blocks * block_size}
    return PagedRows(aligned, flat, {**fields, "block_size": block_size})
