"""The launchers of sparse attention.

A call is a `problem.Problem`. `choose.py` finds the kernel and the division (`divide.py`) that take the least time. The
kernel's module in `kernels/` makes the launches.
"""

from __future__ import annotations

from ...arguments import Decode, Prefill
from ...arrays import Array
from .. import structs
from ..driver import Gpu
from ..paging import pointer
from ..program import Plan, Program
from ..structs import Packed
from . import choose
from .call import ALIGNED_ROWS, ALIKE, DECODE, NO_SOURCE, Call, aligned_rows, decode_fields, params_of
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
    fields = {
        "q_b": q[0], "q_s": 0, "q_h": q[1], "out_b": out[0], "out_s": 0, "out_h": out[1], "lse_b": lse[0], "lse_s": 0,
        "lse_h": lse[1], "max_logits": a.max_logits.ptr, "s_q": 1, "h_q": h_q, "num_queries": s_q,
    }  # fmt: skip
    params = params_of(problem, a, main, NO_SOURCE, fields, aligned * ALIGNED_ROWS)
    return _program(problem, Call(params, topk, s_kv, a.length))


def sparse_decode(
    gpu: Gpu, a: Decode, *, batch_invariant: bool = False, plan: Plan | None = None, padded: bool = False
) -> Program:
    """Twin of `reference.attention.sparse_decode`.

    Args:
        batch_invariant: as for `ops.attention.sparse_decode`.
        plan, padded: as for `ops.attention.decode`.
    """
    b, s_q = a.q.shape[:2]
    if b == 0 or s_q == 0:
        return ()
    ends = a.length if padded else None
    length = None if padded else a.length
    problem = decode_problem(gpu, a, batch_invariant, length)
    main, extra = _paged(a.cache, a.indices, length), NO_SOURCE
    if a.extra is not None and a.extra_indices is not None:
        extra = _paged(a.extra, a.extra_indices, a.extra_length)
    aligned = problem.aligned or _aligned_caches(a)
    flags = aligned * ALIGNED_ROWS | DECODE | padded * ALIKE
    params = params_of(problem, a, main, extra, decode_fields(a), flags)
    num_slots = a.cache.shape[0] * a.cache.shape[1]
    return _program(problem, Call(params, problem.entries, num_slots, length, ends, plan))


def decode_problem(gpu: Gpu, a: Decode, batch_invariant: bool, length: Array | None) -> Problem:
    """The problem of a decode. `length`: the lengths of the main lists that decide how the call is divided."""
    b, s_q, h_q, _ = a.q.shape
    kernel, division = choose.asked()
    return Problem(
        gpu, a.layout, False, h_q, b * s_q, a.indices.shape[2],
        0 if a.extra_indices is None else a.extra_indices.shape[2],
        uneven=length is not None or a.extra_length is not None,
        aligned=_aligned_caches(a) and a.q.aligned(16), flat=_flat_rows(a.cache, a.extra),
        num_splits=a.num_splits or 0, batch_invariant=batch_invariant, kernel=kernel, division=division,
        extra_layout=a.extra_layout,
    )  # fmt: skip


def decode_splits(problem: Problem) -> int:
    """The splits of a query's rows that a call gets; 0: all rows of the call are divided evenly."""
    kernel, division = choose.asked()
    chosen = choose.choose(problem._replace(kernel=kernel, division=division)).division
    return chosen.splits if not isinstance(chosen, Whole) else 1


def _program(problem: Problem, call: Call) -> Program:
    chosen = choose.choose(problem)
    return choose.KERNELS[chosen.kernel].launches(problem, chosen.division, call)


def _flat_rows(cache: Array, extra: Array | None) -> bool:
    """Whether there is one cache, and one stride leads from each row to the next, also from block to block."""
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


def _aligned_caches(a: Decode) -> bool:
    return aligned_rows(a.layout, a.cache) and (a.extra is None or aligned_rows(a.extra_layout or a.layout, a.extra))
