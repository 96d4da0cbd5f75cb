"""Block tables and query tokens as the kernels take them, and what grids are made with."""

from __future__ import annotations

from functools import lru_cache

from ..arrays import Array
from ..dtypes import INT64
from . import structs
from .program import Buffer
from .structs import Packed


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def block_table(
    table: Array, block_size: int, first: int = 0, count: int | None = None, block_stride: int | None = None
) -> Packed:
    """`struct BlockTable` of a block table [num_requests, width] of blocks of `block_size` tokens.

    Args:
        first, count: only these requests.
        block_stride: slots from a block's first to the next block's; None: `block_size`.
    """
    num_requests, width = table.shape
    return structs.BLOCK_TABLE(
        blocks=table.ptr + 4 * first * table.strides[0] if count is not None else table.ptr, stride=table.strides[0],
        num_requests=num_requests if count is None else count, width=width, block_size=divisor(int(block_size)),
        block_stride=block_size if block_stride is None else block_stride,
    )  # fmt: skip


def queries(query_start_loc: Array, seq_lens: Array, num_tokens: int) -> Packed:
    """`struct Queries` of a batch."""
    return structs.QUERIES(
        starts=query_start_loc.ptr, seq_lens=seq_lens.ptr, num_requests=seq_lens.shape[0], num_tokens=num_tokens
    )


def integers(array: Array) -> Packed:
    """`struct Integers` of an int32 or int64 array."""
    return structs.INTEGERS(first=array.ptr, wide=int(array.dtype == INT64))


def call_scale(scale: Array | float) -> Packed:
    """`struct CallScale` of a scale that a call brings."""
    return structs.CALL_SCALE(on_device=scale.ptr, known=0.0) if isinstance(scale, Array) else _known_scale(scale)


@lru_cache(maxsize=64)
def _known_scale(scale: float) -> Packed:
    return structs.CALL_SCALE(on_device=0, known=scale)


def lens_stride(context_lens: Array) -> int:
    """From request to request of context lengths [B, n]; 0, the kernels' mark of one length a request, of [B]."""
    return context_lens.strides[0] if len(context_lens.shape) == 2 else 0


def pointer(array: Array | Buffer | None) -> object:
    """Where an array or scratch memory starts; null for one that is not there."""
    return 0 if array is None else array.ptr


@lru_cache(maxsize=64)
def divisor(value: int) -> Packed:
    """`struct Divisor`: n // value == n * multiplier >> shift for 0 <= n < 2**31.

    With 2**(s - 1) < value <= 2**s and shift = 31 + s the multiplier, 2**shift / value rounded up, fits 32 bits,
    and rounding it up adds less than n / 2**31 <= 1 to the quotient's numerator: too little to reach the next one.
    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    shift = 31 + (value - 1).bit_length()
    return structs.DIVISOR(value=value, multiplier=-(-(1 << shift) // value), shift=shift)


def ownership(world_size: int, rank: int, interleave: int) -> Packed:
    """`struct Ownership` of a rank, of tokens or of what stands for several."""
    return structs.OWNERSHIP(
        interleave=divisor(int(interleave)), turn=divisor(int(interleave) * int(world_size)), rank=rank
    )


NO_TABLE = structs.BLOCK_TABLE(blocks=0, stride=0, num_requests=0, width=0, block_size=divisor(1), block_stride=1)
