"""Block tables and query tokens as the kernels take them: `struct BlockTable` of `kernels_cu/layout/block_table.cuh`
and `struct Queries` of `kernels_cu/indices/queries.cuh`."""

from __future__ import annotations

from functools import lru_cache

from ..arrays import Array

BLOCK_TABLE = "Qq2i3Ii"  # their fields, for struct.Struct
QUERIES = "2Q2i"


def block_table_fields(block_table: Array, block_size: int) -> tuple[int, ...]:
    """The values of `struct BlockTable`."""
    return (block_table.ptr, block_table.strides[0], *block_table.shape, *divisor(block_size), 0)


def query_fields(query_start_loc: Array, seq_lens: Array, num_tokens: int) -> tuple[int, ...]:
    """The values of `struct Queries`."""
    return query_start_loc.ptr, seq_lens.ptr, seq_lens.shape[0], num_tokens


@lru_cache(maxsize=64)
def divisor(value: int) -> tuple[int, int, int]:
    """`struct Divisor`: (value, multiplier, shift) with n // value == n * multiplier >> shift for 0 <= n < 2**31.

    With 2**(s - 1) < value <= 2**s and shift = 31 + s the multiplier, 2**shift / value rounded up, fits 32 bits,
    and rounding it up adds less than n / 2**31 <= 1 to the quotient's numerator: too little to reach the next one.
    Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
    """
    shift = 31 + (value - 1).bit_length()
    return value, -(-(1 << shift) // value), shift
