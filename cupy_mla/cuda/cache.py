"""Launchers of the kernels that pack tokens into a paged cache and unpack them: `pack.cu` and `unpack.cu` of
`kernels_cu/cache`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arguments import RowScales
from ..arrays import Array
from ..dtypes import BFLOAT16
from ..layouts import CACHE_LAYOUTS, D_V, INDEXER_LAYOUTS, Layout
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import call_scale, ceil_div, integers, pointer
from .program import Buffer, Clear, Launch, Program
from .structs import FLOAT, INT32, INT64, POINTER, Struct

PACK = Struct(
    "PackParams", latent=POINTER, rope=POINTER, cache=POINTER, slots=POINTER, latent_stride=INT64, rope_stride=INT64,
    block_stride=INT64, row_stride=INT64, num_slots=INT64, block_size=INT32, num_tokens=INT32, round_up=INT32,
    least_scale=FLOAT, k_scale=structs.CALL_SCALE,
)  # fmt: skip
UNPACK = Struct(
    "UnpackParams", slots=structs.INTEGERS, cache=POINTER, out=POINTER, block_stride=INT64, row_stride=INT64,
    out_stride=INT64, num_slots=INT64, num_rows=INT64, block_size=INT32, k_scale=structs.CALL_SCALE,
)  # fmt: skip

TOKENS_PER_BLOCK = 32
ROWS_PER_BLOCK = 8


@cache
def pack_kernel(layout: Layout, aligned: bool) -> Kernel:
    """The packing kernel for one cache layout; `aligned`: arrays allow 16-byte accesses."""
    defines = {**layout.defines(), "D_V": D_V, "ALIGNED": int(aligned), "TOKENS_PER_BLOCK": TOKENS_PER_BLOCK}
    return Kernel("cache/pack.cu", PACK, defines)


@cache
def unpack_kernel(layout: Layout) -> Kernel:
    """The unpacking kernel for one cache layout."""
    return Kernel("cache/unpack.cu", UNPACK, {**layout.defines(), "ROWS_PER_BLOCK": ROWS_PER_BLOCK})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in CACHE_LAYOUTS:
        for aligned in (True, False):
            yield pack_kernel(layout, aligned)
    yield from map(unpack_kernel, (*CACHE_LAYOUTS, *INDEXER_LAYOUTS))


def concat_and_cache_mla(
    gpu: Gpu,
    layout: Layout,
    kv_c: Array,
    k_pe: Array,
    cache: Array,
    slots: Array,
    scales: RowScales,
) -> Program:
    """Twin of `reference.cache.concat_and_cache_mla`."""
    rope = k_pe if k_pe.shape[1] != 0 else None
    return _pack(layout, kv_c, rope, cache, slots, scales)


def quantize_and_insert_k_cache(
    gpu: Gpu, layout: Layout, k: Array, cache: Array, slots: Array, least_scale: float
) -> Program:
    """Twin of `reference.cache.quantize_and_insert_k_cache`."""
    return _pack(layout, k, None, cache, slots, RowScales(False, least_scale))


def unpack_rows(gpu: Gpu, layout: Layout, cache: Array, slots: Array, k_scale: Array | float, out: Array) -> Program:
    """Twin of `reference.cache.unpack_rows`."""
    (rows,) = slots.shape
    num_blocks, block_size, _ = cache.shape
    if rows == 0:
        return ()
    params = UNPACK(
        slots=integers(slots), cache=cache.ptr, out=out.ptr, block_stride=cache.strides[0] * cache.dtype.itemsize,
        row_stride=_row_stride(layout, cache), out_stride=out.strides[0], num_slots=num_blocks * block_size,
        num_rows=rows, block_size=block_size, k_scale=call_scale(k_scale),
    )  # fmt: skip
    return [Launch(unpack_kernel(layout), (ceil_div(rows, ROWS_PER_BLOCK), 1, 1), params)]


def _row_stride(layout: Layout, cache: Array) -> int:
    """Bytes from a row to the next one in a block."""
    return layout.row_stride if layout.quantized else cache.strides[1] * cache.dtype.itemsize


def _pack(
    layout: Layout,
    latent: Array,
    rope: Array | None,
    cache: Array,
    slots: Array,
    scales: RowScales,
) -> Program:
    (tokens,) = slots.shape
    num_blocks, block_size, _ = cache.shape
    if tokens == 0 or num_blocks == 0:
        return ()
    size = cache.dtype.itemsize
    aligned = latent.aligned(16) and (rope is None or rope.aligned(16)) and (layout.quantized or cache.aligned(16))
    zeros = (
        Buffer("no RoPE", shape=(layout.d_qk - D_V,), dtype=BFLOAT16) if rope is None and layout.rope_apart else None
    )
    params = PACK(
        latent=latent.ptr, rope=zeros.ptr if zeros else pointer(rope), cache=cache.ptr, slots=slots.ptr,
        latent_stride=latent.strides[0], rope_stride=rope.strides[0] if rope else 0,
        block_stride=cache.strides[0] * size, row_stride=_row_stride(layout, cache),
        num_slots=num_blocks * block_size, block_size=block_size, num_tokens=tokens,
        round_up=int(scales.round_up), least_scale=scales.least, k_scale=call_scale(scales.of_call),
    )  # fmt: skip
    launch = Launch(pack_kernel(layout, aligned), (ceil_div(tokens, TOKENS_PER_BLOCK), 1, 1), params)
    return [Clear(zeros.ptr, zeros.nbytes), launch] if zeros else [launch]  # all tokens read the same zeros
