"""Launches the tensor quantization kernel: `kernels_cu/cache/tensor_quant.cu`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np

from ..arrays import Array, Place
from ..recording import Params
from .jit import Kernel, clear, num_sms

THREADS = 256
TILE = THREADS * 2 * 8  # values a block takes at a time
BLOCKS_PER_SM = 4  # __launch_bounds__ of the kernel: as many as are sure to run at the same time

_PARAMS = Params("=4Q2qi4x")  # struct Params of tensor_quant.cu


@cache
def quantize_kernel(float32: bool) -> Kernel:
    """The kernel for float32 or bfloat16 input."""
    return Kernel(
        "cache/tensor_quant.cu", "tensor_quant", {"FLOAT32": int(float32), "VALUES_PER_TILE": TILE, "BLOCKS_PER_SM": BLOCKS_PER_SM}, threads=THREADS, cooperative=True
    )


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for float32 in (False, True):
        yield quantize_kernel(float32)


def dynamic_per_batched_tensor_quant(place: Place, x: Array, codes: Array, scale: Array) -> None:
    """Twin of `reference.quant.dynamic_per_batched_tensor_quant`."""
    size = math.prod(x.shape)
    tiles = -(-size // TILE)
    state = Array("state", place.empty((2,), np.dtype(np.int32)))
    clear(place, state)
    params = _PARAMS.pack(x.ptr, codes.ptr, scale.ptr, state.ptr, size, tiles, x.ptr % 16 == 0)
    blocks = max(1, min(tiles, BLOCKS_PER_SM * num_sms(place.device)))
    quantize_kernel(x.dtype.itemsize == 4).launch(place, (blocks, 1, 1), params)
