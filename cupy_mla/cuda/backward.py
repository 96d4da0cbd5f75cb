"""The launcher of sparse attention's backward: `kernels_cu/attention/backward*.cu`.

Each chunk of queries has three launches. Two are those of `row_sums.py`. Between them `backward_sm90` or `backward`
makes dq, and what every query contributes to the gradients of its rows. Where queries make groups (`query_groups.py`)
a fourth launch unites their lists before, and a call begins with two that look for NaN and infinity. With attention
sinks `backward_sinks` is the last launch of a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ..arguments import PrefillBackward
from ..dtypes import BFLOAT16, FLOAT32
from ..layouts import D_V
from .attention import choose
from .attention.kernels.portable import LARGE, SMALL
from .driver import Gpu
from .kernel import PORTABLE, Kernel
from .paging import ceil_div, pointer
from .program import Buffer, Launch, Program
from .query_groups import GROUPS_KERNEL, LINES, Groups, finite_kernel, tokens_of_group
from .row_sums import Lists, RowSums, lists_kernel, rows_kernel
from .structs import FLOAT, INT32, INT64, POINTER, Packed, Struct

BACKWARD = Struct(
    "BackwardParams", q=POINTER, kv=POINTER, out=POINTER, dout=POINTER, lse=POINTER, d_lse=POINTER, sink=POINTER,
    rows=POINTER, counts=POINTER, listed=POINTER, dq=POINTER, contributions=POINTER, sink_terms=POINTER,
    q_token=INT64, q_head=INT64, kv_row=INT64, out_token=INT64, out_head=INT64, dout_token=INT64, dout_head=INT64,
    lse_token=INT64, lse_head=INT64, d_lse_token=INT64, d_lse_head=INT64, dq_token=INT64, dq_head=INT64,
    sink_stride=INT64, h_q=INT32, topk=INT32, blocks=INT32, scale=FLOAT, scale_log2=FLOAT, wide=INT32, aligned=INT32,
    aligned_dq=INT32, lines_dq=INT32,
)  # fmt: skip
SINKS = Struct(
    "BackwardSinksParams", terms=POINTER, out=POINTER, out_stride=INT64, queries=INT32, heads=INT32
)  # fmt: skip

RANGE_ROWS = 8  # a CTA adds up the gradients of so many rows
WIDTHS = (576, 512)


class Shape(NamedTuple):
    """Heads of a CTA of `backward`, rows of a tile, and KB of shared memory that the CTA may have."""

    heads: int
    tile_rows: int
    limit: int


LARGEST = 227  # KB of shared memory on sm_90 and sm_100
ARCHS = {SMALL: PORTABLE, LARGE: ("80", "90", "100"), LARGEST: ("90", "100")}
SHAPES = {
    LARGEST: (Shape(16, 32, SMALL), Shape(32, 32, LARGE), Shape(64, 32, LARGEST)),
    LARGE: (Shape(16, 32, SMALL), Shape(32, 32, LARGE), Shape(64, 16, LARGE)),
    SMALL: (Shape(16, 32, SMALL), Shape(32, 16, SMALL)),
}


def shape_of(limit: int, h_q: int) -> Shape:
    """The shape for so many heads and KB of shared memory a CTA: the smallest that has all heads, or the largest."""
    shapes = next(shapes for least, shapes in SHAPES.items() if limit >= least)
    return next((shape for shape in shapes if h_q <= shape.heads), shapes[-1])


class Chosen(NamedTuple):
    """The kernel that makes dq, the heads of its CTAs, and the tokens of a group."""

    kernel: Kernel
    heads: int
    tokens: int


def chosen(gpu: Gpu, a: PrefillBackward) -> Chosen:
    """The kernel for a call: on Hopper `backward_sm90`, if it can read the rows and no portable kernel is forced
    (`CUPY_MLA_KERNELS`)."""
    _, h_q, d_qk = a.q.shape
    asked, _ = choose.asked()
    if gpu.capability == 90 and not asked.startswith("portable") and _aligned(a):
        tokens = tokens_of_group(h_q)
        return Chosen(sm90_kernel(d_qk, tokens > 1), LINES, tokens)
    shape = shape_of(SMALL if asked == "portable_99kb" else gpu.shared_kb, h_q)
    return Chosen(backward_kernel(d_qk, shape), shape.heads, 1)


def _aligned(a: PrefillBackward) -> bool:
    """Whether the rows of arrays that are copied start at multiples of 16 bytes."""
    return all(x.aligned(16) for x in (a.q, a.kv, a.out, a.dout))


@cache
def backward_kernel(d_qk: int, shape: Shape) -> Kernel:
    """The kernel for one width of rows and shape of a CTA."""
    heads, tile_rows, limit = shape
    defines = {
        "D_QK": d_qk, "D_V": D_V, "HEADS": heads, "GROUPED": 0, "TILE_ROWS": tile_rows, "SHARED_LIMIT": 1024 * limit
    }  # fmt: skip
    return Kernel("attention/backward.cu", BACKWARD, defines, archs=ARCHS[limit])


@cache
def sm90_kernel(d_qk: int, grouped: bool) -> Kernel:
    """The kernel for Hopper, for one width of rows, and for groups of tokens or for tokens alone."""
    defines = {"D_QK": d_qk, "D_V": D_V, "HEADS": LINES, "GROUPED": int(grouped)}
    return Kernel("attention/backward_sm90.cu", BACKWARD, defines, archs=("90a",))


SINKS_KERNEL = Kernel("attention/backward_sinks.cu", SINKS, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield lists_kernel(RANGE_ROWS, False)
    for d_qk in WIDTHS:
        for shape in dict.fromkeys(shape for shapes in SHAPES.values() for shape in shapes):
            yield backward_kernel(d_qk, shape)
        for grouped in (False, True):
            yield sm90_kernel(d_qk, grouped)
        yield finite_kernel(d_qk)
        yield rows_kernel(d_qk, RANGE_ROWS)
    yield GROUPS_KERNEL
    yield SINKS_KERNEL


def sparse_prefill_backward(gpu: Gpu, a: PrefillBackward) -> Program:
    """Twin of `reference.backward.sparse_prefill_backward`."""
    s_q, h_q, _ = a.q.shape
    kernel, heads, tokens = chosen(gpu, a)
    blocks = ceil_div(h_q, heads)
    terms = None if a.sink is None else Buffer("sink terms", shape=(s_q, h_q), dtype=FLOAT32)
    lists = Lists(s_q, a.kv.shape[0], RANGE_ROWS, indices=a.indices, length=a.length)
    left = a.max_workspace_bytes - (0 if terms is None else terms.nbytes)
    of_call, of_token = Groups.memory(lists) if tokens > 1 else (0, 0)
    multiples = tokens * gpu.sms, tokens  # of whole waves of CTAs: chunks run one after the other
    sums = RowSums(lists, a.dkv, a.accumulate, blocks, left - of_call, of_token, multiples)
    groups = Groups(a, tokens, sums) if tokens > 1 else None
    program: list[Launch] = [] if groups is None else groups.find_finite()
    for first in range(0, max(s_q, 1), sums.step):
        queries = min(sums.step, s_q - first)
        of, listed = sums.sorted, None
        if queries > 0:
            program.append(sums.sort(first, queries))
            if groups is not None:
                program.append(groups.unite(first, queries))
                of, listed = groups.united, groups.listed
            of_chunk = 0 if terms is None else terms.ptr + 4 * first * h_q
            memory = {
                "rows": of.rows.ptr, "counts": of.counts.ptr, "listed": 0 if listed is None else listed.ptr,
                "contributions": sums.contributions.ptr, "sink_terms": of_chunk,
            }  # fmt: skip
            program.append(Launch(kernel, (queries * blocks, 1, 1), _params(a, first, blocks, memory)))
        program += sums.add(first, queries, of)
    if terms is not None:
        params = SINKS(terms=terms.ptr, out=a.d_sink.ptr, out_stride=a.d_sink.strides[0], queries=s_q, heads=h_q)
        program.append(Launch(SINKS_KERNEL, (ceil_div(h_q, 32), 1, 1), params))
    return program


def _params(a: PrefillBackward, first: int, blocks: int, memory: Mapping[str, object]) -> Packed:
    """The parameters of the kernel that makes dq of a chunk's queries and what they contribute to rows. `memory`: the
    fields that name scratch memory."""
    h_q = a.q.shape[1]
    d_lse = (0, 0) if a.d_lse is None else a.d_lse.strides
    return BACKWARD(
        q=pointer(a.q, first), kv=a.kv.ptr, out=pointer(a.out, first), dout=pointer(a.dout, first),
        lse=pointer(a.lse, first), d_lse=pointer(a.d_lse, first), sink=pointer(a.sink),
        dq=pointer(a.dq, first), q_token=a.q.strides[0], q_head=a.q.strides[1], kv_row=a.kv.strides[0],
        out_token=a.out.strides[0], out_head=a.out.strides[1], dout_token=a.dout.strides[0],
        dout_head=a.dout.strides[1],
        lse_token=a.lse.strides[0], lse_head=a.lse.strides[1], d_lse_token=d_lse[0], d_lse_head=d_lse[1],
        dq_token=a.dq.strides[0], dq_head=a.dq.strides[1], sink_stride=0 if a.sink is None else a.sink.strides[0],
        h_q=h_q, topk=a.indices.shape[1], blocks=blocks, scale=a.sm_scale, scale_log2=a.sm_scale * math.log2(math.e),
        wide=int(a.dq.dtype == FLOAT32), aligned=int(_aligned(a)),
        aligned_dq=int(a.dq.aligned(2 * a.dq.dtype.itemsize)),
        lines_dq=int(a.dq.dtype == BFLOAT16 and a.dq.aligned(16)), **memory,
    )  # fmt: skip
