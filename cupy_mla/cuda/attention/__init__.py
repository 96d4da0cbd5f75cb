"""Sparse attention as launchers.

A call is a `problem.Problem`. `choose.py` finds the kernel and the division (`divide.py`) that take the least time; the
kernel's module in `kernels/` makes launches of them.
"""

from __future__ import annotations

import math
from typing import Any

from ...arguments import Decode, Prefill
from ...arrays import Array
from ...layouts import Layout, by_name
from .. import structs
from ..driver import Gpu
from ..paging import pointer
from ..program import Plan, Program
from ..structs import Packed
from . import choose
from .call import ALIGNED_OUT, ALIGNED_Q, ALIGNED_ROWS, ALIKE, DECODE, NO_SOURCE, WIDE_OUT, Call
from .divide import Whole
from .kernels.bf16_grouped_sm90 import LEAST_SCALE
from .problem import Problem

LOG2_E: float = math.log2(math.e)


def sparse_prefill(gpu: Gpu, a: Prefill) -> Program:
    """Twin of `reference.attention.sparse_prefill`: flat rows are a cache of one block, queries a batch of s_q = 1."""
    s_q, h_q, d_qk = a.q.shape
    if s_q == 0:
        return ()
    kernel, division = choose.asked()
    s_kv, topk = a.kv.shape[0], a.indices.shape[1]
    aligned = a.kv.aligned(16)
    problem = Problem(
        gpu, by_name("bf16", d_qk), True, h_q, s_q, topk, uneven=a.length is not None,
        aligned=aligned and a.q.aligned(16), groupable=a.sm_scale >= LEAST_SCALE, kernel=kernel, division=division,
    )  # fmt: skip
    main = structs.SOURCE(
        cache=a.kv.ptr, indices=a.indices.ptr, lengths=pointer(a.length), block_stride=0,
        row_stride=2 * a.kv.strides[0], index_stride_b=a.indices.strides[0], index_stride_s=0, num_slots=s_kv,
        topk=topk, block_size=max(s_kv, 1),
    )  # fmt: skip
    q, out, lse = a.q.strides, a.out.strides, a.lse.strides
    fields = {
        "q_b": q[0], "q_s": 0, "q_h": q[1], "out_b": out[0], "out_s": 0, "out_h": out[1], "lse_b": lse[0], "lse_s": 0,
        "lse_h": lse[1], "max_logits": a.max_logits.ptr, "s_q": 1, "h_q": h_q, "num_queries": s_q,
    }  # fmt: skip
    params = _params(problem, a, main, NO_SOURCE, fields, aligned * ALIGNED_ROWS)
    return _program(problem, Call(params, topk, s_kv, a.length))


def sparse_decode(
    gpu: Gpu, a: Decode, *, batch_invariant: bool = False, plan: Plan | None = None, alike: bool = False
) -> Program:
    """Twin of `reference.attention.sparse_decode`.

    Args:
        batch_invariant: as for `ops.attention.sparse_decode`.
        plan: of calls that divide their lists alike.
        alike: as for `ops.attention.decode`.
    """
    b, s_q, h_q, _ = a.q.shape
    if b == 0 or s_q == 0:
        return ()
    ends = a.length if alike else None
    length = None if alike else a.length
    problem = decode_problem(gpu, a, batch_invariant, length)
    main, extra = _paged(a.cache, a.indices, length), NO_SOURCE
    if a.extra is not None and a.extra_indices is not None:
        extra = _paged(a.extra, a.extra_indices, a.extra_length)
    q, out, lse = a.q.strides, a.out.strides, a.lse.strides
    fields = {
        "q_b": q[0], "q_s": q[1], "q_h": q[2], "out_b": out[0], "out_s": out[1], "out_h": out[2], "lse_b": lse[0],
        "lse_s": lse[2], "lse_h": lse[1], "max_logits": 0, "s_q": s_q, "h_q": h_q, "num_queries": b * s_q,
    }  # fmt: skip
    aligned = problem.aligned or _aligned_caches(a.layout, a.cache, a.extra)
    params = _params(problem, a, main, extra, fields, aligned * ALIGNED_ROWS | DECODE | alike * ALIKE)
    planned = plan if a.extra is None and not problem.uneven else None
    num_slots = a.cache.shape[0] * a.cache.shape[1]
    return _program(problem, Call(params, problem.entries, num_slots, length, ends, planned))


def decode_problem(gpu: Gpu, a: Decode, batch_invariant: bool, length: Array | None) -> Problem:
    """What a decode asks for."""
    b, s_q, h_q, _ = a.q.shape
    kernel, division = choose.asked()
    return Problem(
        gpu, a.layout, False, h_q, b * s_q, a.indices.shape[2],
        0 if a.extra_indices is None else a.extra_indices.shape[2],
        uneven=length is not None or a.extra_length is not None,
        aligned=_aligned_caches(a.layout, a.cache, a.extra) and a.q.aligned(16), flat=_flat_rows(a.cache, a.extra),
        num_splits=a.num_splits or 0, batch_invariant=batch_invariant, kernel=kernel, division=division,
    )  # fmt: skip


def decode_splits(problem: Problem) -> int:
    """Splits of a query's rows; 0: all rows of the call are divided evenly."""
    kernel, division = choose.asked()
    chosen = choose.choose(problem._replace(kernel=kernel, division=division)).division
    return chosen.splits if not isinstance(chosen, Whole) else 1


def _program(problem: Problem, call: Call) -> Program:
    chosen = choose.choose(problem)
    return choose.KERNELS[chosen.kernel].launches(problem, chosen.division, call)


# Fields of struct AttentionParams that depend on kernel and division.
DIVIDED: dict[str, int] = {
    **dict.fromkeys(("part_out", "part_lse", "part_max", "cluster_parts", "order", "ready", "nonce"), 0),
    **dict.fromkeys(("least_split", "item_cost", "cut_cost", "whole_items", "plan_filled", "plan"), 0), "num_splits": 1,
}  # fmt: skip


def _params(
    problem: Problem, a: Prefill | Decode, main: Packed, extra: Packed, fields: dict[str, Any], flags: int
) -> Packed:
    """struct AttentionParams, but for what depends on kernel and division.

    Args:
        fields: strides and sizes.
    """
    wide_out = a.out.aligned(16)
    flags |= WIDE_OUT * wide_out | ALIGNED_OUT * (wide_out or a.out.aligned(4))
    flags |= ALIGNED_Q * (problem.aligned or a.q.aligned(4))
    return structs.ATTENTION(
        **DIVIDED, **fields, main=main, extra=extra, q=a.q.ptr, out=a.out.ptr, lse=a.lse.ptr, sink=pointer(a.sink),
        scale_log2=a.sm_scale * LOG2_E, flags=flags,
    )  # fmt: skip


def _flat_rows(cache: Array, extra: Array | None) -> bool:
    """True when one stride leads from each row to the next, also from block to block, and there is one cache."""
    num_blocks, block_size, _ = cache.shape
    return extra is None and (num_blocks <= 1 or cache.strides[0] == block_size * cache.strides[1])


def _paged(cache: Array, indices: Array, length: Array | None) -> Packed:
    """`struct Source` of a paged cache and its index lists."""
    size = cache.dtype.itemsize
    num_blocks, block_size, _ = cache.shape
    return structs.SOURCE(
        cache=cache.ptr, indices=indices.ptr, lengths=pointer(length), block_stride=cache.strides[0] * size,
        row_stride=cache.strides[1] * size, index_stride_b=indices.strides[0], index_stride_s=indices.strides[1],
        num_slots=num_blocks * block_size, topk=indices.shape[2], block_size=block_size,
    )  # fmt: skip


def _aligned_caches(layout: Layout, cache: Array, extra: Array | None) -> bool:
    return _aligned_rows(layout, cache) and (extra is None or _aligned_rows(layout, extra))


def _aligned_rows(layout: Layout, cache: Array) -> bool:
    """True when every row of a paged cache starts at a multiple of 16 bytes. FP8 rows stand where the layout says."""
    if not layout.quantized:
        return cache.aligned(16)
    return cache.ptr % 16 == 0 and layout.row_stride % 16 == 0 and (cache.shape[0] <= 1 or cache.strides[0] % 16 == 0)
