"""The launcher of the tensor quantization: `kernels_cu/cache/tensor_quant.cu`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from ..arrays import Array
from ..dtypes import FLOAT32
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div
from .program import Buffer, Launch, Program
from .structs import INT64, POINTER, Struct

TENSOR_QUANT = Struct(
    "TensorQuantParams", x=POINTER, codes=POINTER, scale=POINTER, amax=POINTER, size=INT64, tiles=INT64,
    aligned=structs.INT32,
)  # fmt: skip

VALUES_PER_TILE = 4096  # a CTA takes so many at a time
BLOCKS_PER_SM = 4  # CTAs of a launch, at most


@cache
def quantize_kernel(float32: bool, codes: bool) -> Kernel:
    """The kernel that writes the codes of float32 or bfloat16 input, or the one that looks for its largest value."""
    defines = {"FLOAT32": int(float32), "CODES": int(codes), "VALUES_PER_TILE": VALUES_PER_TILE}
    return Kernel("cache/tensor_quant.cu", TENSOR_QUANT, defines)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for float32 in (False, True):
        for codes in (False, True):
            yield quantize_kernel(float32, codes)


def dynamic_per_batched_tensor_quant(gpu: Gpu, x: Array, codes: Array, scale: Array) -> Program:
    """Twin of `reference.quant.dynamic_per_batched_tensor_quant`."""
    size = math.prod(x.shape)
    tiles = ceil_div(size, VALUES_PER_TILE)
    ctas = max(1, min(tiles, BLOCKS_PER_SM * gpu.sms))
    amax = Buffer("largest magnitudes", shape=(ctas,), dtype=FLOAT32)
    params = TENSOR_QUANT(
        x=x.ptr, codes=codes.ptr, scale=scale.ptr, amax=amax.ptr, size=size, tiles=tiles,
        aligned=int(x.ptr % 16 == 0),
    )  # fmt: skip
    float32 = x.dtype == FLOAT32
    return [Launch(quantize_kernel(float32, write), (ctas, 1, 1), params) for write in (False, True)]
