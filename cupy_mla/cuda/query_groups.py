"""Groups of neighbouring query tokens, on whose heads the backward works at once: `backward_groups.cu` and
`finite_rows.cu` in `kernels_cu/attention`.

A group contributes to each row of the union of its tokens' lists once, where its tokens alone contribute once each.
"""

from __future__ import annotations

from functools import cache

from ..arguments import PrefillBackward
from ..dtypes import UINT8
from ..layouts import D_V
from .kernel import Kernel
from .paging import ceil_div
from .program import Buffer, Launch
from .row_sums import Lists, RowSums, Sorted
from .structs import INT32, INT64, POINTER, Struct

GROUPS = Struct(
    "BackwardGroupsParams", rows=POINTER, counts=POINTER, starts=POINTER, finite_queries=POINTER, finite_rows=POINTER,
    united=POINTER, listed=POINTER, united_counts=POINTER, united_starts=POINTER, queries=INT32, tokens=INT32,
    topk=INT32, ranges=INT32,
)  # fmt: skip
FINITE = Struct(
    "FiniteParams", x=POINTER, dout=POINTER, finite=POINTER, x_stride=INT64, x_head=INT64,
    dout_stride=INT64, dout_head=INT64, count=INT32, heads=INT32,
)  # fmt: skip

LINES = 64  # heads of all tokens of a group
SIZES = (8, 4, 2, 1)  # tokens of a group; a byte tells which of them list a row
ITEMS = 8  # of a CTA of `finite_rows`


def tokens_of_group(h_q: int) -> int:
    """How many tokens of so many heads make a group."""
    return next((tokens for tokens in SIZES if tokens * h_q <= LINES), 1)


GROUPS_KERNEL = Kernel("attention/backward_groups.cu", GROUPS, {"MOST": SIZES[0]}, archs=("90",))


@cache
def finite_kernel(d_qk: int) -> Kernel:
    """The kernel that looks for NaN and infinity in rows and tokens of one width."""
    return Kernel("attention/finite_rows.cu", FINITE, {"D_QK": d_qk, "D_V": D_V, "ITEMS": ITEMS}, archs=("90",))


class Groups:
    """Scratch memory of a call whose tokens make groups, and launches.

    Args:
        a: the call's arguments.
        tokens: of a group.
        sums: those of the call.

    Attributes:
        united: the unions of lists. That of a group stands where the list of its first token begins.
        listed: [tokens, topk] uint8, which tokens of its group list a row.
    """

    def __init__(self, a: PrefillBackward, tokens: int, sums: RowSums) -> None:
        self._a, self._tokens, self._sums = a, tokens, sums
        topk = a.indices.shape[1]
        self.united: Sorted = Sorted.of(sums.step, topk, sums.ranges)
        self.listed: Buffer = Buffer("tokens that list a row", shape=(sums.step, topk), dtype=UINT8)
        self._finite_queries = Buffer("finite tokens", shape=(a.q.shape[0],), dtype=UINT8)
        self._finite_rows = Buffer("finite rows", shape=(a.kv.shape[0],), dtype=UINT8)

    @staticmethod
    def memory(lists: Lists) -> tuple[int, int]:
        """Bytes of a call, and of each token of a chunk."""
        return lists.tokens + lists.rows, 5 * lists.topk + 4 * (lists.ranges + 2)

    def find_finite(self) -> list[Launch]:
        """The launches at the beginning of a call."""
        a, (s_q, h_q, d_qk), s_kv = self._a, self._a.q.shape, self._a.kv.shape[0]
        if s_q == 0:
            return []
        rows = FINITE(
            x=a.kv.ptr, dout=0, finite=self._finite_rows.ptr, x_stride=a.kv.strides[0], x_head=0,
            dout_stride=0, dout_head=0, count=s_kv, heads=1,
        )  # fmt: skip
        queries = FINITE(
            x=a.q.ptr, dout=a.dout.ptr, finite=self._finite_queries.ptr, x_stride=a.q.strides[0],
            x_head=a.q.strides[1], dout_stride=a.dout.strides[0], dout_head=a.dout.strides[1], count=s_q,
            heads=h_q,
        )  # fmt: skip
        return [
            Launch(finite_kernel(d_qk), (ceil_div(count, ITEMS), 1, 1), params)
            for count, params in ((s_kv, rows), (s_q, queries))
            if count > 0
        ]

    def unite(self, first: int, tokens: int) -> Launch:
        """The launch that unites the sorted lists of a chunk's tokens."""
        params = GROUPS(
            rows=self._sums.sorted.rows.ptr, counts=self._sums.sorted.counts.ptr, starts=self._sums.sorted.starts.ptr,
            finite_queries=self._finite_queries.ptr + first, finite_rows=self._finite_rows.ptr,
            united=self.united.rows.ptr, listed=self.listed.ptr, united_counts=self.united.counts.ptr,
            united_starts=self.united.starts.ptr, queries=tokens, tokens=self._tokens, topk=self._a.indices.shape[1],
            ranges=self._sums.ranges,
        )  # fmt: skip
        return Launch(GROUPS_KERNEL, (ceil_div(tokens, self._tokens), 1, 1), params)
