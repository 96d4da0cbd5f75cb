"""Launches the kernels that bring rows together: `gather`, `gather_tail` and `concat_q` of `kernels_cu/cache`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array, Place
from ..layouts import BF16_576, BFLOAT16, V4_FP8, V32_FP8, Layout
from ..recording import Params
from .jit import Kernel, num_sms
from .paging import BLOCK_TABLE, block_table_fields

THREADS = 256
ROWS_PER_BLOCK = THREADS // 32 * 4
GATHER_BLOCKS_PER_SM = 4  # that run at a time

_GATHER = Params("=" + BLOCK_TABLE + "4Q3q2i")  # struct Params of gather.cu
_TAIL = Params("=" + BLOCK_TABLE + "4Q3q3i4x")  # struct Params of gather_tail.cu
_CONCAT = Params("=3Q7q2i")  # struct Params of concat_q.cu


@cache
def gather_kernel(layout: Layout) -> Kernel:
    """The kernel that gathers rows of one FP8 layout."""
    return Kernel("cache/gather.cu", "gather", {**layout.defines(), "ROWS_PER_BLOCK": ROWS_PER_BLOCK}, threads=THREADS)


@cache
def tail_kernel(layout: Layout) -> Kernel:
    """The kernel that gathers the last tokens of requests, of one FP8 layout whose scales stand apart."""
    return Kernel("cache/gather_tail.cu", "gather_tail", {**layout.defines(), "ROWS_PER_BLOCK": ROWS_PER_BLOCK}, threads=THREADS)


@cache
def concat_kernel() -> Kernel:
    """The kernel that concatenates the two parts of queries."""
    return Kernel("cache/concat_q.cu", "concat_q", {**BF16_576.defines(), "ROWS_PER_BLOCK": ROWS_PER_BLOCK}, threads=THREADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield gather_kernel(V32_FP8)
    yield tail_kernel(V4_FP8)
    yield concat_kernel()


def cp_gather_and_upconvert_fp8_kv_cache(
    place: Place,
    layout: Layout,
    src_cache: Array,
    dst: Array,
    block_table: Array,
    seq_lens: Array,
    workspace_starts: Array,
) -> None:
    """Twin of `reference.gather.cp_gather_and_upconvert_fp8_kv_cache`."""
    num_blocks, block_size, _ = src_cache.shape
    rows = dst.shape[0]
    if rows == 0 or seq_lens.shape[0] == 0:
        return
    params = _GATHER.pack(
        *block_table_fields(block_table, block_size),
        src_cache.ptr, dst.ptr, seq_lens.ptr, workspace_starts.ptr,
        src_cache.strides[0], dst.strides[0], rows, num_blocks, dst.aligned(16),
    )  # fmt: skip
    blocks = min(-(-rows // ROWS_PER_BLOCK), GATHER_BLOCKS_PER_SM * num_sms(place.device))
    gather_kernel(layout).launch(place, (blocks, 1, 1), params)


def dequantize_and_gather_k_cache(
    place: Place,
    layout: Layout,
    out: Array,
    k_cache: Array,
    seq_lens: Array,
    gather_lens: Array | None,
    block_table: Array,
    offset: int,
) -> None:
    """Twin of `reference.gather.dequantize_and_gather_k_cache`."""
    num_blocks, block_size, _ = k_cache.shape
    requests, rows, _ = out.shape
    if requests == 0 or rows == offset:
        return
    params = _TAIL.pack(
        *block_table_fields(block_table, block_size),
        k_cache.ptr, out.ptr + offset * out.strides[1] * BFLOAT16.itemsize, seq_lens.ptr,
        gather_lens.ptr if gather_lens else 0,
        k_cache.strides[0], *out.strides[:2], rows - offset, num_blocks, out.aligned(16),
    )  # fmt: skip
    blocks = min(-(-requests * (rows - offset) // ROWS_PER_BLOCK), GATHER_BLOCKS_PER_SM * num_sms(place.device))
    tail_kernel(layout).launch(place, (blocks, 1, 1), params)


def concat_mla_q(place: Place, ql_nope: Array, q_pe: Array, out: Array) -> None:
    """Twin of `reference.gather.concat_mla_q`."""
    tokens, heads, _ = out.shape
    rows = tokens * heads
    if rows == 0:
        return
    params = _CONCAT.pack(
        ql_nope.ptr, q_pe.ptr, out.ptr, *ql_nope.strides[:2], *q_pe.strides[:2], *out.strides[:2], rows, heads,
        ql_nope.aligned(16) and q_pe.aligned(16) and out.aligned(16),
    )  # fmt: skip
    concat_kernel().launch(place, (-(-rows // ROWS_PER_BLOCK), 1, 1), params)
