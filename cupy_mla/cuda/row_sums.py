"""Gradients of rows, as sums of what query tokens contribute to them: `backward_lists.cu` and `backward_rows.cu`.

Tokens are worked on in chunks, so that memory stays bounded. Each chunk has three launches: `backward_lists` sorts its
lists, a kernel of the caller writes what each token contributes to each of its rows, and `backward_rows` adds that up.
The sum of a row goes over tokens in their order, also from chunk to chunk. So the bits do not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ..arrays import Array
from ..dtypes import BFLOAT16, FLOAT32
from ..dtypes import INT32 as INTEGERS
from .kernel import Kernel
from .paging import ceil_div, pointer
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

DIGIT_BITS = 8  # bits of a row number by which a pass sorts lists
MOST_ITEMS = 1 << 30  # contributions of a chunk: the kernels number them in 32 bits


@cache
def lists_kernel(range_rows: int, places: bool) -> Kernel:
    """The kernel that sorts lists into ranges of so many rows; `places`: it also tells where in its list an entry
    stood."""
    return Kernel("attention/backward_lists.cu", LISTS, {"RANGE_ROWS": range_rows, "PLACES": int(places)})


@cache
def ranges_kernel(range_rows: int) -> Kernel:
    """The kernel that writes the same for tokens that see ranges of rows instead of lists."""
    return Kernel("indices/range_lists.cu", RANGES, {"RANGE_ROWS": range_rows})


@cache
def rows_kernel(width: int, range_rows: int) -> Kernel:
    """The kernel that adds up contributions to rows of `width` values. A CTA has `range_rows` of them."""
    return Kernel("attention/backward_rows.cu", ROWS, {"D_QK": width, "RANGE_ROWS": range_rows})


class Lists(NamedTuple):
    """The rows of each token, as index lists or as ranges.

    Attributes:
        tokens, rows: how many tokens and rows there are.
        range_rows: a CTA adds up the gradients of so many rows.
        places: whether the caller's kernel needs to know the place of an entry in its list.
        indices, length: [tokens, topk] int32 index lists, and [tokens] int32 their lengths or None.
        starts, ends: [tokens] int32 ranges, where there are no index lists.
        counted: [tokens] bool; a token that does not count has no rows. None: all count.
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
        """Entries that a list may have."""
        return self.rows if self.indices is None else self.indices.shape[1]

    @property
    def ranges(self) -> int:
        """Ranges of rows."""
        return ceil_div(self.rows, self.range_rows)


class Sorted(NamedTuple):
    """Memory for the ascending lists of a chunk.

    Attributes:
        rows, counts: [tokens, topk] and [tokens] int32, entries and how many there are.
        starts: [tokens, ranges + 1] int32, where each range of rows begins.
    """

    rows: Buffer
    counts: Buffer
    starts: Buffer

    @classmethod
    def of(cls, tokens: int, topk: int, ranges: int) -> Sorted:
        """For so many tokens and ranges."""
        return cls(
            Buffer("rows", shape=(tokens, topk), dtype=INTEGERS), Buffer("counts", shape=(tokens,), dtype=INTEGERS),
            Buffer("starts of ranges", shape=(tokens, ranges + 1), dtype=INTEGERS),
        )  # fmt: skip


class RowSums:
    """Scratch memory of a call for chunks of its tokens, and their launches.

    Args:
        of: the lists.
        gradient: [rows, width] or [rows, 1, width], the result; None: it is not asked for.
        accumulate: add to what `gradient` holds.
        blocks: contributions of a token to a row.
        max_bytes: limit of the scratch memory; a chunk has at least one token all the same.
        bytes_of_token: memory that the caller's kernels need for each token.
        multiples: numbers of tokens. If there are several chunks, they begin at multiples of the first that fits the
            memory, or of the last.

    Attributes:
        step: tokens of a chunk.
        ranges: of rows.
        contributions, sorted, places: memory for those of a chunk.
    """

    def __init__(
        self, of: Lists, gradient: Array | None, accumulate: bool, blocks: int, max_bytes: int,
        bytes_of_token: int = 0, multiples: Sequence[int] = (1,),
    ) -> None:  # fmt: skip
        tokens, topk = of.tokens, of.topk
        self._of, self._gradient, self._accumulate, self._blocks = of, gradient, accumulate, blocks
        self.ranges: int = of.ranges
        width = 0 if gradient is None else gradient.shape[-1]
        of_entry = 16 if of.places and of.indices is not None else 8  # of lists, and of their copies that sorting needs
        of_token = bytes_of_token + topk * (blocks * width * BFLOAT16.itemsize + of_entry)
        of_token += 4 * (self.ranges + 2)
        most = min(max_bytes // of_token, MOST_ITEMS // max(topk * blocks, 1))
        self._total: Buffer | None = None  # float32 sums from chunk to chunk, if the gradient is bfloat16
        if most < tokens:
            if gradient is not None and gradient.dtype != FLOAT32:
                self._total = Buffer("sums of rows", shape=(of.rows, width), dtype=FLOAT32)
                most = min(most, (max_bytes - self._total.nbytes) // of_token)
            multiple = next((number for number in multiples if number <= most), multiples[-1])
            most = max(most // multiple, 1) * multiple
        self.step: int = max(1, min(tokens, most))
        if self.step >= tokens:
            self._total = None
        lists = (self.step, topk)
        self.contributions: Buffer = Buffer("contributions", shape=(*lists, blocks, width), dtype=BFLOAT16)
        self.sorted: Sorted = Sorted.of(self.step, topk, self.ranges)
        self.places: Buffer = Buffer("places in lists", shape=lists, dtype=INTEGERS)
        self._spare = Buffer("rows, half sorted", shape=lists, dtype=INTEGERS)
        self._spare_places = Buffer("places, half sorted", shape=lists, dtype=INTEGERS)

    def sort(self, first: int, tokens: int) -> Launch:
        """The launch that sorts the lists of these tokens, or writes sorted lists of their ranges."""
        of, (rows, counts, starts) = self._of, self.sorted
        if of.indices is None:
            params = RANGES(
                first=pointer(of.starts, first), end=pointer(of.ends, first),
                counted=pointer(of.counted, first), rows=rows.ptr, places=self.places.ptr, counts=counts.ptr,
                starts=starts.ptr, s_kv=of.rows, ranges=self.ranges,
            )  # fmt: skip
            return Launch(ranges_kernel(of.range_rows), (tokens, 1, 1), params)
        params = LISTS(
            indices=pointer(of.indices, first), lengths=pointer(of.length, first),
            counted=pointer(of.counted, first), rows=rows.ptr, spare=self._spare.ptr,
            places=self.places.ptr if of.places else 0, spare_places=self._spare_places.ptr if of.places else 0,
            counts=counts.ptr, starts=starts.ptr, index_stride=of.indices.strides[0], topk=of.topk, s_kv=of.rows,
            passes=max(1, ceil_div(max(of.rows - 1, 0).bit_length(), DIGIT_BITS)), ranges=self.ranges,
        )  # fmt: skip
        return Launch(lists_kernel(of.range_rows, of.places), (tokens, 1, 1), params)

    def add(self, first: int, tokens: int, lists: Sorted | None = None) -> list[Launch]:
        """The launch that adds what these tokens contribute to the sums of the tokens before; none without rows.
        `lists`: those of the contributions, if they are not the tokens' own."""
        of, gradient = self._of, self._gradient
        if gradient is None or of.rows == 0:
            return []
        last = first + tokens >= of.tokens
        given = gradient.ptr, gradient.strides[0]
        between = given if self._total is None else (self._total.ptr, gradient.shape[-1])
        total = between if first > 0 or self._accumulate else (0, 0)
        to = given if last else between
        rows, _, starts = self.sorted if lists is None else lists
        params = ROWS(
            contributions=self.contributions.ptr, rows=rows.ptr, starts=starts.ptr, total=total[0], out=to[0],
            total_stride=total[1], out_stride=to[1], queries=tokens, topk=of.topk,
            blocks=self._blocks, ranges=self.ranges, s_kv=of.rows, wide=int(not last or gradient.dtype == FLOAT32),
            aligned=int(gradient.aligned(2 * gradient.dtype.itemsize)),
        )  # fmt: skip
        return [Launch(rows_kernel(gradient.shape[-1], of.range_rows), (self.ranges, 1, 1), params)]
