"""Launches the backward of sparse attention: `kernels_cu/attention/backward*.cu`.

Queries are worked on in chunks, so that memory stays bounded. Each chunk has three launches: `backward_lists` sorts the
lists, `backward_sm90` or `backward` makes dq and what every query contributes to its rows, and `backward_rows` adds
that up. A row's sum goes over the queries in their order, across chunks, so bits do not depend on where these begin.
`backward_sinks` is the last launch of a call with attention sinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..arguments import PrefillBackward
from ..arrays import Array
from ..dtypes import BFLOAT16, FLOAT32
from ..dtypes import INT32 as INTEGERS
from ..layouts import D_V
from .attention import choose
from .attention.kernels.portable import LARGE, SMALL
from .driver import Gpu
from .kernel import PORTABLE, Kernel
from .paging import ceil_div, pointer
from .program import Launch, Program, Slot
from .structs import FLOAT, INT32, INT64, POINTER, Struct

LISTS = Struct(
    "BackwardListsParams", indices=POINTER, lengths=POINTER, rows=POINTER, spare=POINTER, counts=POINTER,
    starts=POINTER, index_stride=INT64, topk=INT32, s_kv=INT32, passes=INT32, ranges=INT32,
)  # fmt: skip
BACKWARD = Struct(
    "BackwardParams", q=POINTER, kv=POINTER, out=POINTER, dout=POINTER, lse=POINTER, d_lse=POINTER, sink=POINTER,
    rows=POINTER, counts=POINTER, dq=POINTER, contributions=POINTER, sink_terms=POINTER, q_token=INT64, q_head=INT64,
    kv_row=INT64, out_token=INT64, out_head=INT64, dout_token=INT64, dout_head=INT64, lse_token=INT64, lse_head=INT64,
    d_lse_token=INT64, d_lse_head=INT64, dq_token=INT64, dq_head=INT64, sink_stride=INT64, h_q=INT32, topk=INT32,
    blocks=INT32, scale=FLOAT, scale_log2=FLOAT, wide=INT32, aligned=INT32, aligned_dq=INT32,
)  # fmt: skip
ROWS = Struct(
    "BackwardRowsParams", contributions=POINTER, rows=POINTER, starts=POINTER, total=POINTER, out=POINTER,
    total_stride=INT64, out_stride=INT64, queries=INT32, topk=INT32, blocks=INT32, ranges=INT32, s_kv=INT32,
    wide=INT32, aligned=INT32,
)  # fmt: skip
SINKS = Struct(
    "BackwardSinksParams", terms=POINTER, out=POINTER, out_stride=INT64, queries=INT32, heads=INT32
)  # fmt: skip

RANGE_ROWS = 16  # whose gradients a CTA adds up
DIGIT_BITS = 8  # of a row number, by which lists are sorted in a pass
MOST_ITEMS = 1 << 30  # contributions of a chunk, which the kernels number
WIDTHS = (576, 512)
HEADS_SM90, LEAST_HEADS_SM90 = 64, 33  # of a CTA of `backward_sm90`; of a call that it is for


class Shape(NamedTuple):
    """How a CTA of `backward` works: heads, rows of a tile, and KB of shared memory that it may have."""

    heads: int
    tile_rows: int
    limit: int


LARGEST = 227  # KB, of sm_90 and sm_100
ARCHS = {SMALL: PORTABLE, LARGE: ("80", "90", "100"), LARGEST: ("90", "100")}
SHAPES = {
    LARGEST: (Shape(16, 64, LARGE), Shape(32, 32, LARGE), Shape(64, 32, LARGEST)),
    LARGE: (Shape(16, 64, LARGE), Shape(32, 32, LARGE), Shape(64, 16, LARGE)),
    SMALL: (Shape(16, 32, SMALL), Shape(32, 16, SMALL)),
}


def shape_of(limit: int, h_q: int) -> Shape:
    """The shape for so many heads and KB of shared memory a CTA: the smallest that has all heads, or the largest."""
    shapes = next(shapes for least, shapes in SHAPES.items() if limit >= least)
    return next((shape for shape in shapes if h_q <= shape.heads), shapes[-1])


class Chosen(NamedTuple):
    """The kernel that works on queries, and heads of its CTAs."""

    kernel: Kernel
    heads: int


def chosen(gpu: Gpu, a: PrefillBackward) -> Chosen:
    """The kernel for a call: on Hopper, of more than 32 heads and rows that it can read, that for Hopper, unless a
    portable one is asked for (`CUPY_MLA_KERNELS`)."""
    _, h_q, d_qk = a.q.shape
    asked, _ = choose.asked()
    if gpu.capability == 90 and not asked.startswith("portable") and h_q >= LEAST_HEADS_SM90 and _aligned(a):
        return Chosen(sm90_kernel(d_qk), HEADS_SM90)
    shape = shape_of(SMALL if asked == "portable_99kb" else gpu.shared_kb, h_q)
    return Chosen(backward_kernel(d_qk, shape), shape.heads)


def _aligned(a: PrefillBackward) -> bool:
    """Whether rows of what is copied start at multiples of 16 bytes."""
    return all(x.aligned(16) for x in (a.q, a.kv, a.out, a.dout))


@cache
def lists_kernel() -> Kernel:
    return Kernel("attention/backward_lists.cu", LISTS, {"RANGE_ROWS": RANGE_ROWS})


@cache
def backward_kernel(d_qk: int, shape: Shape) -> Kernel:
    """The kernel for one width of rows and shape of a CTA."""
    heads, tile_rows, limit = shape
    defines = {"D_QK": d_qk, "D_V": D_V, "HEADS": heads, "TILE_ROWS": tile_rows, "SHARED_LIMIT": 1024 * limit}
    return Kernel("attention/backward.cu", BACKWARD, defines, archs=ARCHS[limit])


@cache
def sm90_kernel(d_qk: int) -> Kernel:
    """The kernel for Hopper, for one width of rows."""
    defines = {"D_QK": d_qk, "D_V": D_V, "HEADS": HEADS_SM90}
    return Kernel("attention/backward_sm90.cu", BACKWARD, defines, archs=("90a",), target="90a")


@cache
def rows_kernel(d_qk: int) -> Kernel:
    """The kernel for one width of rows."""
    return Kernel("attention/backward_rows.cu", ROWS, {"D_QK": d_qk, "D_V": D_V, "RANGE_ROWS": RANGE_ROWS})


@cache
def sinks_kernel() -> Kernel:
    return Kernel("attention/backward_sinks.cu", SINKS, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield lists_kernel()
    for d_qk in WIDTHS:
        for shape in dict.fromkeys(shape for shapes in SHAPES.values() for shape in shapes):
            yield backward_kernel(d_qk, shape)
        yield sm90_kernel(d_qk)
        yield rows_kernel(d_qk)
    yield sinks_kernel()


class Workspace:
    """Scratch memory of a call, and how many queries a chunk has.

    Args:
        a: the call.
        blocks: of heads, each of which contributes to a row.
        ranges: of rows.

    Attributes:
        step: queries of a chunk.
        contributions, rows, spare, counts, starts: of a chunk.
        total: float32 sums between chunks, where results do not hold them; or None.
        sink_terms: of all queries, or None.
    """

    def __init__(self, a: PrefillBackward, blocks: int, ranges: int) -> None:
        (s_q, h_q, d_qk), topk, s_kv = a.q.shape, a.indices.shape[1], a.kv.shape[0]
        self.sink_terms: Slot | None = None if a.sink is None else Slot("sink terms", shape=(s_q, h_q), dtype=FLOAT32)
        self.total: Slot | None = None
        of_query = topk * (blocks * d_qk * BFLOAT16.itemsize + 8) + 4 * (ranges + 2)
        left = a.max_workspace_bytes - (0 if self.sink_terms is None else self.sink_terms.nbytes)
        if left < s_q * of_query and a.dkv.dtype != FLOAT32:
            self.total = Slot("sums of rows", shape=(s_kv, d_qk), dtype=FLOAT32)
            left -= self.total.nbytes
        self.step: int = max(1, min(s_q, left // of_query, MOST_ITEMS // max(topk * blocks, 1)))
        if self.step >= s_q:
            self.total = None
        self.contributions: Slot = Slot("contributions", shape=(self.step, topk, blocks, d_qk), dtype=BFLOAT16)
        self.rows: Slot = Slot("rows", shape=(self.step, topk), dtype=INTEGERS)
        self.spare: Slot = Slot("rows, half sorted", shape=(self.step, topk), dtype=INTEGERS)
        self.counts: Slot = Slot("counts", shape=(self.step,), dtype=INTEGERS)
        self.starts: Slot = Slot("starts of ranges", shape=(self.step, ranges + 1), dtype=INTEGERS)


def sparse_prefill_backward(gpu: Gpu, a: PrefillBackward) -> Program:
    """Twin of `reference.backward.sparse_prefill_backward`."""
    s_q, h_q, _ = a.q.shape
    s_kv, (kernel, heads) = a.kv.shape[0], chosen(gpu, a)
    blocks, ranges = ceil_div(h_q, heads), ceil_div(s_kv, RANGE_ROWS)
    space = Workspace(a, blocks, ranges)
    program: list[Launch] = []
    for first in range(0, max(s_q, 1), space.step):
        queries = min(space.step, s_q - first)
        if queries > 0:
            program.append(_lists(a, space, first, queries, ranges))
            program.append(_backward(a, space, first, queries, kernel, blocks))
        if s_kv > 0:
            program.append(_rows(a, space, first, queries, blocks))
    if space.sink_terms is not None:
        params = SINKS(
            terms=space.sink_terms.ptr, out=a.d_sink.ptr, out_stride=a.d_sink.strides[0], queries=s_q, heads=h_q
        )
        program.append(Launch(sinks_kernel(), (ceil_div(h_q, 32), 1, 1), params))
    return program


def _lists(a: PrefillBackward, space: Workspace, first: int, queries: int, ranges: int) -> Launch:
    """The sort of a chunk's lists."""
    s_kv, topk = a.kv.shape[0], a.indices.shape[1]
    params = LISTS(
        indices=_from(a.indices, first), lengths=_from(a.length, first), rows=space.rows.ptr, spare=space.spare.ptr,
        counts=space.counts.ptr, starts=space.starts.ptr, index_stride=a.indices.strides[0], topk=topk, s_kv=s_kv,
        passes=max(1, ceil_div(max(s_kv - 1, 0).bit_length(), DIGIT_BITS)), ranges=ranges,
    )  # fmt: skip
    return Launch(lists_kernel(), (queries, 1, 1), params)


def _backward(a: PrefillBackward, space: Workspace, first: int, queries: int, kernel: Kernel, blocks: int) -> Launch:
    """dq of a chunk's queries, and what they contribute to rows."""
    h_q = a.q.shape[1]
    terms = 0 if space.sink_terms is None else space.sink_terms.ptr + 4 * first * h_q
    d_lse = (0, 0) if a.d_lse is None else a.d_lse.strides
    params = BACKWARD(
        q=_from(a.q, first), kv=a.kv.ptr, out=_from(a.out, first), dout=_from(a.dout, first),
        lse=_from(a.lse, first), d_lse=_from(a.d_lse, first), sink=pointer(a.sink), rows=space.rows.ptr,
        counts=space.counts.ptr, dq=_from(a.dq, first), contributions=space.contributions.ptr, sink_terms=terms,
        q_token=a.q.strides[0], q_head=a.q.strides[1], kv_row=a.kv.strides[0], out_token=a.out.strides[0],
        out_head=a.out.strides[1], dout_token=a.dout.strides[0], dout_head=a.dout.strides[1],
        lse_token=a.lse.strides[0], lse_head=a.lse.strides[1], d_lse_token=d_lse[0], d_lse_head=d_lse[1],
        dq_token=a.dq.strides[0], dq_head=a.dq.strides[1], sink_stride=0 if a.sink is None else a.sink.strides[0],
        h_q=h_q, topk=a.indices.shape[1], blocks=blocks, scale=a.sm_scale, scale_log2=a.sm_scale * math.log2(math.e),
        wide=int(a.dq.dtype == FLOAT32), aligned=int(_aligned(a)),
        aligned_dq=int(a.dq.aligned(2 * a.dq.dtype.itemsize)),
    )  # fmt: skip
    return Launch(kernel, (queries * blocks, 1, 1), params)


def _rows(a: PrefillBackward, space: Workspace, first: int, queries: int, blocks: int) -> Launch:
    """The sums of what a chunk contributes, added to those of the chunks before."""
    s_kv, _, d_qk = a.dkv.shape
    last = first + queries >= a.q.shape[0]
    given = a.dkv.ptr, a.dkv.strides[0]
    between = given if space.total is None else (space.total.ptr, d_qk)
    total = between if first > 0 or a.accumulate else (0, 0)
    to = given if last else between
    params = ROWS(
        contributions=space.contributions.ptr, rows=space.rows.ptr, starts=space.starts.ptr, total=total[0], out=to[0],
        total_stride=total[1], out_stride=to[1], queries=queries, topk=a.indices.shape[1], blocks=blocks,
        ranges=ceil_div(s_kv, RANGE_ROWS), s_kv=s_kv, wide=int(not last or a.dkv.dtype == FLOAT32),
        aligned=int(a.dkv.aligned(2 * a.dkv.dtype.itemsize)),
    )  # fmt: skip
    return Launch(rows_kernel(d_qk), (ceil_div(s_kv, RANGE_ROWS), 1, 1), params)


def _from(array: Array | None, first: int) -> object:
    """Where entry `first` of the first axis stands; null for an array that is not there."""
    return 0 if array is None else array.ptr + array.dtype.itemsize * first * array.strides[0]
