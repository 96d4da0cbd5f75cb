"""Parameter structs that many launchers fill: block tables, query tokens, divisors, scales."""

from __future__ import annotations

from functools import lru_cache

from ..arrays import Array
from ..dtypes import INT64
from . import structs
from .structs import Packed


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@lru_cache(maxsize=256)
def fitting(sizes: tuple[int, ...], n: int) -> int:
    """The smallest of ascending sizes that is at least n, or the largest."""
    return next((size for size in sizes if n <= size), sizes[-1])


def block_table(
    table: Array, block_size: int, first: int = 0, count: int | None = None, block_stride: int | None = None
) -> Packed:
    """`struct BlockTable` of a block table [num_requests, width] of blocks of `block_size` tokens.

    Args:
        first, count: the requests; `count` None: all.
        block_stride: slots from the first one of a block to the first one of the next block; None: `block_size`.
    """
    num_requests, width = table.shape
    return structs.BLOCK_TABLE(
        blocks=pointer(table, first), stride=table.strides[0], num_requests=num_requests if count is None else count,
        width=width, block_size=divisor(int(block_size)),
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
    """`struct CallScale` of a scale that is an argument of the call."""
    return structs.CALL_SCALE(on_device=scale.ptr, known=0.0) if isinstance(scale, Array) else _known_scale(scale)


@lru_cache(maxsize=64)
def _known_scale(scale: float) -> Packed:
    return structs.CALL_SCALE(on_device=0, known=scale)


def lens_stride(context_lens: Array) -> int:
    """The stride from request to request of context lengths [B, n]; for [B] it is 0, which means one length a
    request."""
    return context_lens.strides[0] if len(context_lens.shape) == 2 else 0


def pointer(array: Array | None, first: int = 0) -> object:
    """The address of an array, or of entry `first` of its first axis; 0 for None."""
    if array is None:
        return 0
    return array.ptr + first * array.strides[0] * array.dtype.itemsize if first else array.ptr


@lru_cache(maxsize=64)
def divisor(value: int) -> Packed:
    """`struct Divisor`: n // value == n * multiplier >> shift for 0 <= n < 2**31.

    With 2**(s - 1) < value <= 2**s and shift = 31 + s, the multiplier, which is 2**shift / value rounded up, fits 32
    bits. Rounding it up adds less than n / 2**31 <= 1 to the quotient's numerator, too little to reach the next
    quotient.
    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    shift = 31 + (value - 1).bit_length()
    return structs.DIVISOR(value=value, multiplier=-(-(1 << shift) // value), shift=shift)


def ownership(world_size: int, rank: int, interleave: int) -> Packed:
    """`struct Ownership`: which tokens (or keys or rows of several tokens) a rank has."""
    return structs.OWNERSHIP(
        interleave=divisor(int(interleave)), turn=divisor(int(interleave) * int(world_size)), rank=rank
    )


NO_TABLE = structs.BLOCK_TABLE(blocks=0, stride=0, num_requests=0, width=0, block_size=divisor(1), block_stride=1)
