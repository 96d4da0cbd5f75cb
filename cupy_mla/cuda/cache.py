"""Launches the kernels that pack tokens into a paged cache: `kernels_cu/cache/pack.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array, Place
from ..layouts import BF16_576, V4_FP8, V32_FP8, Layout
from ..recording import Params
from .jit import Kernel

THREADS = 256
TOKENS_PER_BLOCK = THREADS // 32 * 4

_PARAMS = Params("=4Q5q3i4x")  # struct Params of pack.cu


@cache
def pack_kernel(layout: Layout, aligned: bool) -> Kernel:
    """The packing kernel for one cache layout and arrays that allow 16-byte accesses or do not."""
    defines = {**layout.defines(), "ALIGNED": int(aligned), "D_V": 512, "TOKENS_PER_BLOCK": TOKENS_PER_BLOCK}
    return Kernel("cache/pack.cu", "pack", defines, threads=THREADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in (BF16_576, V32_FP8, V4_FP8):
        for aligned in (True, False):
            yield pack_kernel(layout, aligned)


def concat_and_cache_mla(
    place: Place, layout: Layout, kv_c: Array, k_pe: Array, cache: Array, slots: Array, scale_format: str
) -> None:
    """Twin of `reference.cache.concat_and_cache_mla`."""
    _launch(place, layout, kv_c, k_pe, cache, slots, scale_format == "ue8m0")


def quantize_and_insert_k_cache(place: Place, layout: Layout, k: Array, cache: Array, slots: Array) -> None:
    """Twin of `reference.cache.quantize_and_insert_k_cache`."""
    _launch(place, layout, k, None, cache, slots, True)


def _launch(
    place: Place, layout: Layout, latent: Array, rope: Array | None, cache: Array, slots: Array, power_of_two: bool
) -> None:
    tokens = slots.shape[0]
    num_blocks, block_size, _ = cache.shape
    if tokens == 0 or num_blocks == 0:
        return
    size = cache.dtype.itemsize
    row_stride = layout.row_stride if layout.quantized else cache.strides[1] * size
    aligned = (
        latent.aligned(16) and (rope is None or rope.aligned(16)) and (layout.quantized or cache.aligned(16))
    )  # fmt: skip
    params = _PARAMS.pack(
        latent.ptr, rope.ptr if rope else 0, cache.ptr, slots.ptr,
        latent.strides[0], rope.strides[0] if rope else 0, cache.strides[0] * size, row_stride, num_blocks * block_size,
        block_size, tokens, power_of_two,
    )  # fmt: skip
    pack_kernel(layout, aligned).launch(place, (-(-tokens // TOKENS_PER_BLOCK), 1, 1), params)
