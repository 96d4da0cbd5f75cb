"""Gradients of rows, as sums of what query tokens contribute to them: `backward_lists.cu` and `backward_rows.cu`.

Tokens are worked on in chunks, so that memory stays bounded. `backward_lists` sorts a chunk's lists; a kernel of the
caller leaves what each token contributes to each of its rows; `backward_rows` adds that up. A row's sum goes over the
tokens in their order, across chunks, so bits do not depend on where these begin.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..arrays import Array
from ..dtypes import BFLOAT16, FLOAT32
from ..dtypes import INT32 as INTEGERS
from .kernel import Kernel
from .paging import ceil_div
from .program import Buffer, Launch
from .structs import INT32, INT64, POINTER, Struct

LISTS = Struct(
    "BackwardListsParams", indices=POINTER, lengths=POINTER, counted=POINTER, rows=POINTER, spare=POINTER,
    places=POINTER, spare_places=POINTER, counts=POINTER, starts=POINTER, index_stride=INT64, topk=INT32, s_kv=INT32,
    passes=INT32, ranges=INT32,
)  # fmt: skip
RANGES = Struct(
    "RangeListsParams", first=POINTER, end=POINTER, counted=POINTER, rows=POINTER, places=POINTER, counts=POINTER,
    starts=POINTER, s_kv=INT32, ranges=INT32,
)  # fmt: skip
ROWS = Struct(
    "BackwardRowsParams", contributions=POINTER, rows=POINTER, starts=POINTER, total=POINTER, out=POINTER,
    total_stride=INT64, out_stride=INT64, queries=INT32, topk=INT32, blocks=INT32, ranges=INT32, s_kv=INT32,
    wide=INT32, aligned=INT32,
)  # fmt: skip

DIGIT_BITS = 8  # of a row number, by which lists are sorted in a pass
MOST_ITEMS = 1 << 30  # contributions of a chunk, which the kernels number


@cache
def lists_kernel(range_rows: int, places: bool) -> Kernel:
    """The kernel for ranges of so many rows, which says where in the list an entry stood or not."""
    return Kernel("attention/backward_lists.cu", LISTS, {"RANGE_ROWS": range_rows, "PLACES": int(places)})


@cache
def ranges_kernel(range_rows: int) -> Kernel:
    """The kernel that writes lists of what ranges of rows hold."""
    return Kernel("indices/range_lists.cu", RANGES, {"RANGE_ROWS": range_rows})


@cache
def rows_kernel(width: int, range_rows: int) -> Kernel:
    """The kernel for rows of so many values, of which a CTA has a range."""
    return Kernel("attention/backward_rows.cu", ROWS, {"D_QK": width, "RANGE_ROWS": range_rows})


class Lists(NamedTuple):
    """Which rows the tokens list: those of index lists, or of ranges.

    Attributes:
        tokens, rows: how many there are.
        range_rows: rows whose gradients a CTA adds up.
        places: whether the caller's kernel needs to know where in its list an entry stood, or in the rows.
        indices, length: [tokens, topk] int32, and [tokens] int32 or None.
        starts, ends: [tokens] int32, where there are no index lists.
        counted: [tokens] bool, or None: others list none.
    """

    tokens: int
    rows: int
    range_rows: int
    places: bool = False
    indices: Array | None = None
    length: Array | None = None
    starts: Array | None = None
    ends: Array | None = None
    counted: Array | None = None

    @property
    def topk(self) -> int:
        """Most entries of a list."""
        return self.rows if self.indices is None else self.indices.shape[1]


class RowSums:
    """Scratch memory of a call for chunks of its tokens, and their launches.

    Args:
        of: the lists.
        gradient: [rows, width] or [rows, 1, width], which is written; None: there is none.
        accumulate: add to what `gradient` holds.
        blocks: contributions of a token to a row.
        max_bytes: of scratch memory, as long as a chunk has a token.
        bytes_of_token: which the caller's kernel needs besides.

    Attributes:
        step: tokens of a chunk.
        contributions, rows, places, counts: of a chunk; there are places only where they are asked for.
    """

    def __init__(
        self, of: Lists, gradient: Array | None, accumulate: bool, blocks: int, max_bytes: int, bytes_of_token: int = 0
    ) -> None:
        tokens, topk = of.tokens, of.topk
        self._of, self._gradient, self._accumulate, self._blocks = of, gradient, accumulate, blocks
        self._ranges = ceil_div(of.rows, of.range_rows)
        width = 0 if gradient is None else gradient.shape[-1]
        of_entry = 16 if of.places and of.indices is not None else 8  # lists, and what they are sorted by turns into
        of_token = bytes_of_token + topk * (blocks * width * BFLOAT16.itemsize + of_entry)
        of_token += 4 * (self._ranges + 2)
        self._total: Buffer | None = None  # float32 sums between chunks, where the gradient does not hold them
        if gradient is not None and max_bytes < tokens * of_token and gradient.dtype != FLOAT32:
            self._total = Buffer("sums of rows", shape=(of.rows, width), dtype=FLOAT32)
            max_bytes -= self._total.nbytes
        self.step: int = max(1, min(tokens, max_bytes // of_token, MOST_ITEMS // max(topk * blocks, 1)))
        if self.step >= tokens:
            self._total = None
        lists = (self.step, topk)
        self.contributions: Buffer = Buffer("contributions", shape=(*lists, blocks, width), dtype=BFLOAT16)
        self.rows: Buffer = Buffer("rows", shape=lists, dtype=INTEGERS)
        self.places: Buffer = Buffer("places in lists", shape=lists, dtype=INTEGERS)
        self.counts: Buffer = Buffer("counts", shape=(self.step,), dtype=INTEGERS)
        self._spare = Buffer("rows, half sorted", shape=lists, dtype=INTEGERS)
        self._spare_places = Buffer("places, half sorted", shape=lists, dtype=INTEGERS)
        self._starts = Buffer("starts of ranges", shape=(self.step, self._ranges + 1), dtype=INTEGERS)

    def sort(self, first: int, tokens: int) -> Launch:
        """The sort of the lists of these tokens; those of ranges are written so."""
        of = self._of
        if of.indices is None:
            params = RANGES(
                first=from_token(of.starts, first), end=from_token(of.ends, first),
                counted=from_token(of.counted, first), rows=self.rows.ptr, places=self.places.ptr,
                counts=self.counts.ptr, starts=self._starts.ptr, s_kv=of.rows, ranges=self._ranges,
            )  # fmt: skip
            return Launch(ranges_kernel(of.range_rows), (tokens, 1, 1), params)
        params = LISTS(
            indices=from_token(of.indices, first), lengths=from_token(of.length, first),
            counted=from_token(of.counted, first), rows=self.rows.ptr, spare=self._spare.ptr,
            places=self.places.ptr if of.places else 0, spare_places=self._spare_places.ptr if of.places else 0,
            counts=self.counts.ptr, starts=self._starts.ptr, index_stride=of.indices.strides[0],
            topk=of.topk, s_kv=of.rows,
            passes=max(1, ceil_div(max(of.rows - 1, 0).bit_length(), DIGIT_BITS)), ranges=self._ranges,
        )  # fmt: skip
        return Launch(lists_kernel(of.range_rows, of.places), (tokens, 1, 1), params)

    def add(self, first: int, tokens: int) -> list[Launch]:
        """The sums of what these tokens contribute, added to those of the tokens before; nothing for no rows."""
        of, gradient = self._of, self._gradient
        if gradient is None or of.rows == 0:
            return []
        last = first + tokens >= of.tokens
        given = gradient.ptr, gradient.strides[0]
        between = given if self._total is None else (self._total.ptr, gradient.shape[-1])
        total = between if first > 0 or self._accumulate else (0, 0)
        to = given if last else between
        params = ROWS(
            contributions=self.contributions.ptr, rows=self.rows.ptr, starts=self._starts.ptr, total=total[0],
            out=to[0], total_stride=total[1], out_stride=to[1], queries=tokens, topk=of.topk,
            blocks=self._blocks, ranges=self._ranges, s_kv=of.rows, wide=int(not last or gradient.dtype == FLOAT32),
            aligned=int(gradient.aligned(2 * gradient.dtype.itemsize)),
        )  # fmt: skip
        return [Launch(rows_kernel(gradient.shape[-1], of.range_rows), (self._ranges, 1, 1), params)]


def from_token(array: Array | None, first: int) -> object:
    """Where entry `first` of the first axis stands; null for an array that is not there."""
    return 0 if array is None else array.ptr + array.dtype.itemsize * first * array.strides[0]
