"""The launchers of sparse attention.

A call is a `problem.Problem`. `choose.py` finds the kernel and the division (`divide.py`) that take the least time. The
kernel's module in `kernels/` makes the launches.
"""

from __future__ import annotations

from ...arguments import Decode, Prefill
from .. import structs
from ..driver import Gpu
from ..paging import pointer
from ..program import Program
from . import choose
from .call import ALIGNED_ROWS, ALIKE, DECODE, Call, PagedRows, decode_fields, fields_of
from .divide import Whole
from .kernels.bf16_grouped_sm90 import LEAST_SCALE
from .problem import Problem


def sparse_prefill(gpu: Gpu, a: Prefill) -> Program:
    """Twin of `reference.attention.sparse_prefill`. Flat rows are a cache of one block, query tokens requests of
    one."""
    s_q, h_q, _ = a.q.shape
    if s_q == 0:
        return ()
    kernel, division = choose.asked()
    s_kv, topk = a.kv.shape[0], a.indices.shape[1]
    aligned = a.kv.aligned(16)
    row_bytes = a.kv.strides[0] * a.kv.dtype.itemsize
    # Kernels know the stride of quantized rows in a block as a constant. So each of these rows is a block.
    stride, size = (row_bytes, 1) if a.layout.quantized else (0, max(s_kv, 1))
    problem = Problem(
        gpu, a.layout, True, h_q, s_q, topk, uneven=a.length is not None,
        aligned=aligned and a.q.aligned(16), groupable=a.sm_scale >= LEAST_SCALE, kernel=kernel, division=division,
    )  # fmt: skip
    main = structs.SOURCE(
        cache=a.kv.ptr, indices=a.indices.ptr, lengths=pointer(a.length), row_stride=row_bytes,
        index_stride_b=a.indices.strides[0], index_stride_s=0, num_slots=s_kv, topk=topk,
        block_stride=stride, block_size=size,
    )  # fmt: skip
    q, out, lse = a.q.strides, a.out.strides, a.lse.strides
    sizes = {
        "q_b": q[0], "q_s": 0, "q_h": q[1], "out_b": out[0], "out_s": 0, "out_h": out[1], "lse_b": lse[0], "lse_s": 0,
        "lse_h": lse[1], "max_logits": a.max_logits.ptr, "s_q": 1, "h_q": h_q, "num_queries": s_q,
    }  # fmt: skip
    fields = fields_of(problem, a, main, sizes, aligned * ALIGNED_ROWS)
    return _program(problem, Call(fields, topk, s_kv, a.length))


def sparse_decode(gpu: Gpu, a: Decode) -> Program:
    """Twin of `reference.attention.sparse_decode`."""
    b, s_q, h_q, _ = a.q.shape
    if b == 0 or s_q == 0:
        return ()
    length, ends = (None, a.length) if a.padded else (a.length, None)
    rows = PagedRows.of(a.layout, a.cache)
    sizes, aligned, flat, extra_entries = decode_fields(a), rows.aligned, rows.flat, 0
    if a.extra is not None and a.extra_indices is not None:
        of_extra = PagedRows.of(a.extra_layout or a.layout, a.extra)
        sizes["extra"] = of_extra.source(a.extra, a.extra_indices, a.extra_length)
        aligned, flat, extra_entries = aligned and of_extra.aligned, False, a.extra_indices.shape[2]
    kernel, division = choose.asked()
    problem = Problem(
        gpu, a.layout, False, h_q, b * s_q, a.indices.shape[2], extra_entries,
        uneven=length is not None or a.extra_length is not None, aligned=aligned and a.q.aligned(16), flat=flat,
        num_splits=a.num_splits or 0, batch_invariant=a.batch_invariant, kernel=kernel, division=division,
        extra_layout=a.extra_layout,
    )  # fmt: skip
    flags = aligned * ALIGNED_ROWS | DECODE | a.padded * ALIKE
    fields = fields_of(problem, a, rows.source(a.cache, a.indices, length), sizes, flags)
    return _program(problem, Call(fields, problem.entries, rows.fields["num_slots"], length, ends, a.plan))


def decode_splits(problem: Problem) -> int:
    """The splits of a query's rows that a call gets; 0: all rows of the call are divided evenly."""
    kernel, division = choose.asked()
    chosen = choose.choose(problem._replace(kernel=kernel, division=division)).division
    return chosen.splits if not isinstance(chosen, Whole) else 1


def _program(problem: Problem, call: Call) -> Program:
    return [
        step
        for each in choose.chosen(problem)
        for step in choose.KERNELS[each.kernel].launches(problem, each.division, call)
    ]
