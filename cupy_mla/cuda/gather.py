"""Launchers of `gather.cu`, `gather_tail.cu` and `concat_q.cu` of `kernels_cu/cache`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array
from ..dtypes import BFLOAT16
from ..layouts import BF16_576, D_V, QUANTIZED_OF_V4, QUANTIZED_OF_V32, Layout
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, call_scale, ceil_div, pointer
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

GATHER = Struct(
    "GatherParams", table=structs.BLOCK_TABLE, cache=POINTER, dst=POINTER, seq_lens=POINTER, starts=POINTER,
    block_stride=INT64, dst_stride=INT64, dst_rows=INT64, num_blocks=INT32, aligned=INT32,
    k_scale=structs.CALL_SCALE,
)  # fmt: skip
GATHER_TAIL = Struct(
    "GatherTailParams", table=structs.BLOCK_TABLE, cache=POINTER, dst=POINTER, seq_lens=POINTER, gather_lens=POINTER,
    block_stride=INT64, dst_stride=INT64, row_stride=INT64, dst_rows=INT32, num_blocks=INT32, aligned=INT32,
)  # fmt: skip
CONCAT_Q = Struct(
    "ConcatParams", nope=POINTER, rope=POINTER, out=POINTER, nope_t=INT64, nope_h=INT64, rope_t=INT64, rope_h=INT64,
    out_t=INT64, out_h=INT64, num_rows=INT64, heads=INT32, aligned=INT32,
)  # fmt: skip

ROWS_PER_BLOCK = 32
CTAS_PER_SM = 32  # of the gathers, of which 4 run at a time: at most so many share the tokens


@cache
def gather_kernel(layout: Layout) -> Kernel:
    """The kernel that gathers rows of one FP8 layout of V3.2's kind."""
    return Kernel("cache/gather.cu", GATHER, {**layout.defines(), "D_V": D_V, "ROWS_PER_BLOCK": ROWS_PER_BLOCK})


@cache
def tail_kernel(layout: Layout) -> Kernel:
    """The kernel that gathers the last tokens of requests, of one FP8 layout of V4's kind."""
    return Kernel("cache/gather_tail.cu", GATHER_TAIL, {**layout.defines(), "ROWS_PER_BLOCK": ROWS_PER_BLOCK})


CONCAT_KERNEL = Kernel("cache/concat_q.cu", CONCAT_Q, {**BF16_576.defines(), "ROWS_PER_BLOCK": ROWS_PER_BLOCK})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield from map(gather_kernel, QUANTIZED_OF_V32)
    yield from map(tail_kernel, QUANTIZED_OF_V4)
    yield CONCAT_KERNEL


def cp_gather_and_upconvert_fp8_kv_cache(
    gpu: Gpu,
    layout: Layout,
    src_cache: Array,
    dst: Array,
    table: Array,
    seq_lens: Array,
    workspace_starts: Array,
    k_scale: Array | float,
) -> Program:
    """Twin of `reference.gather.cp_gather_and_upconvert_fp8_kv_cache`."""
    num_blocks, block_size, _ = src_cache.shape
    rows = dst.shape[0]
    if rows == 0 or seq_lens.shape[0] == 0:
        return ()
    params = GATHER(
        table=block_table(table, block_size), cache=src_cache.ptr, dst=dst.ptr, seq_lens=seq_lens.ptr,
        starts=workspace_starts.ptr, block_stride=src_cache.strides[0], dst_stride=dst.strides[0], dst_rows=rows,
        num_blocks=num_blocks, aligned=int(dst.aligned(16)), k_scale=call_scale(k_scale),
    )  # fmt: skip
    return [Launch(gather_kernel(layout), (_ctas(gpu, rows), 1, 1), params)]


def dequantize_and_gather_k_cache(
    gpu: Gpu,
    layout: Layout,
    out: Array,
    k_cache: Array,
    seq_lens: Array,
    gather_lens: Array | None,
    table: Array,
    offset: int,
) -> Program:
    """Twin of `reference.gather.dequantize_and_gather_k_cache`."""
    num_blocks, block_size, _ = k_cache.shape
    requests, rows, _ = out.shape
    if requests == 0 or rows == offset:
        return ()
    params = GATHER_TAIL(
        table=block_table(table, block_size), cache=k_cache.ptr,
        dst=out.ptr + offset * out.strides[1] * BFLOAT16.itemsize, seq_lens=seq_lens.ptr,
        gather_lens=pointer(gather_lens), block_stride=k_cache.strides[0], dst_stride=out.strides[0],
        row_stride=out.strides[1], dst_rows=rows - offset, num_blocks=num_blocks, aligned=int(out.aligned(16)),
    )  # fmt: skip
    return [Launch(tail_kernel(layout), (_ctas(gpu, requests * (rows - offset)), 1, 1), params)]


def concat_mla_q(gpu: Gpu, ql_nope: Array, q_pe: Array, out: Array) -> Program:
    """Twin of `reference.gather.concat_mla_q`."""
    tokens, heads, _ = out.shape
    rows = tokens * heads
    if rows == 0:
        return ()
    aligned = ql_nope.aligned(16) and q_pe.aligned(16) and out.aligned(16)
    params = CONCAT_Q(
        nope=ql_nope.ptr, rope=q_pe.ptr, out=out.ptr, nope_t=ql_nope.strides[0], nope_h=ql_nope.strides[1],
        rope_t=q_pe.strides[0], rope_h=q_pe.strides[1], out_t=out.strides[0], out_h=out.strides[1], num_rows=rows,
        heads=heads, aligned=int(aligned),
    )  # fmt: skip
    return [Launch(CONCAT_KERNEL, (ceil_div(rows, ROWS_PER_BLOCK), 1, 1), params)]


def _ctas(gpu: Gpu, rows: int) -> int:
    """CTAs of a gather of so many rows. CTAs that end and start use the memory better than fewer ones that loop."""
    return min(ceil_div(rows, ROWS_PER_BLOCK), CTAS_PER_SM * gpu.sms)
