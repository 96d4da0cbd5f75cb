"""The launcher of `kernels_cu/indexer/widen_mxfp4.cu`, which converts MXFP4 rows to e5m2."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..arrays import Array
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div, pointer
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

WIDEN = Struct(
    "WidenParams", codes=POINTER, scales=POINTER, weights=POINTER, out=POINTER, factors=POINTER, rows=INT64,
    codes_outer=INT64, codes_inner=INT64, scales_outer=INT64, scales_inner=INT64, weights_outer=INT64,
    weights_inner=INT64, inner=INT32,
)  # fmt: skip
ROWS_PER_BLOCK = 32

WIDEN_KERNEL = Kernel("indexer/widen_mxfp4.cu", WIDEN, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield WIDEN_KERNEL


def widen_mxfp4(gpu: Gpu, codes: Array, scales: Array, weights: Array | None, values: Array, factors: Array) -> Program:
    """Twin of `reference.mxfp4.widen_mxfp4`."""
    of_rows = codes.shape[:-1]
    rows, inner = math.prod(of_rows), of_rows[1] if len(of_rows) == 2 else 1
    if rows == 0:
        return ()

    def strides(array: Array | None) -> tuple[int, int]:
        """The strides of the outer and the inner axis of rows."""
        if array is None:
            return 0, 0
        return array.strides[0], array.strides[1] if len(of_rows) == 2 else 0

    (codes_outer, codes_inner), (scales_outer, scales_inner) = strides(codes), strides(scales)
    weights_outer, weights_inner = strides(weights)
    params = WIDEN(
        codes=codes.ptr, scales=scales.ptr, weights=pointer(weights), out=values.ptr, factors=factors.ptr, rows=rows,
        codes_outer=codes_outer, codes_inner=codes_inner, scales_outer=scales_outer, scales_inner=scales_inner,
        weights_outer=weights_outer, weights_inner=weights_inner, inner=inner,
    )  # fmt: skip
    return [Launch(WIDEN_KERNEL, (ceil_div(rows, ROWS_PER_BLOCK), 1, 1), params)]
