"""The launcher of the tensor quantization: `kernels_cu/cache/tensor_quant.cu`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from ..arrays import Array
from ..dtypes import INT32
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div
from .program import Buffer, Clear, Launch, Program
from .structs import INT64, POINTER, Struct

TENSOR_QUANT = Struct(
    "TensorQuantParams", x=POINTER, codes=POINTER, scale=POINTER, state=POINTER, size=INT64, tiles=INT64,
    aligned=structs.INT32,
)  # fmt: skip

VALUES_PER_TILE = 4096  # a CTA takes so many at a time
BLOCKS_PER_SM = 4  # CTAs that run at the same time on every GPU, as a cooperative launch needs


@cache
def quantize_kernel(float32: bool) -> Kernel:
    """The kernel for float32 or bfloat16 input."""
    defines = {"FLOAT32": int(float32), "VALUES_PER_TILE": VALUES_PER_TILE, "BLOCKS_PER_SM": BLOCKS_PER_SM}
    return Kernel("cache/tensor_quant.cu", TENSOR_QUANT, defines, cooperative=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for float32 in (False, True):
        yield quantize_kernel(float32)


def dynamic_per_batched_tensor_quant(gpu: Gpu, x: Array, codes: Array, scale: Array) -> Program:
    """Twin of `reference.quant.dynamic_per_batched_tensor_quant`."""
    size = math.prod(x.shape)
    tiles = ceil_div(size, VALUES_PER_TILE)
    state = Buffer("state", shape=(2,), dtype=INT32)
    params = TENSOR_QUANT(
        x=x.ptr, codes=codes.ptr, scale=scale.ptr, state=state.ptr, size=size, tiles=tiles,
        aligned=int(x.ptr % 16 == 0),
    )  # fmt: skip
    ctas = max(1, min(tiles, BLOCKS_PER_SM * gpu.sms))
    launch = Launch(quantize_kernel(x.dtype.itemsize == 4), (ctas, 1, 1), params)
    return [Clear(state.ptr, state.nbytes), launch]
