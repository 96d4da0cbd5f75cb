"""What a call of attention asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...layouts import Layout
from ..driver import MAX_CLUSTER, Gpu
from ..paging import ceil_div

TILE_ROWS = 64  # rows of a tile of the kernels for Hopper
# A batch-invariant call is divided as one of so many queries, whatever its batch: these fill the GPU.
INVARIANT_QUERIES = 128


class _Fields(NamedTuple):
    """The fields of `Problem`."""

    gpu: Gpu
    layout: Layout
    prefill: bool
    heads: int
    queries: int
    entries: int
    extra_entries: int = 0
    uneven: bool = False
    aligned: bool = True
    flat: bool = True
    groupable: bool = True
    num_splits: int = 0
    batch_invariant: bool = False
    kernel: str = ""
    division: str = ""
    extra_layout: Layout | None = None


class Problem(_Fields):
    """A call of attention: all that the choice of a kernel and a division depends on.

    Attributes:
        gpu: the GPU.
        layout: of the cache; flat bf16 rows are one as well.
        prefill: whether it is a prefill; otherwise a decode.
        heads: query heads.
        queries: query tokens.
        entries, extra_entries: entries of a query's main index list, and of its list for the extra cache.
        uneven: lists have lengths, so they may not be equally long.
        aligned: every row of the caches and of q starts at a multiple of 16 bytes.
        flat: there is one cache, and one stride leads from each row to the next, also from block to block. The kernels
            for flat bf16 rows need it.
        groupable: `sm_scale` is large enough for query groups to mask rows (`bf16_grouped_sm90`).
        num_splits: splits of a query's rows that the caller asks for; 0: to be chosen.
        batch_invariant: the choice must not depend on the number of queries.
        kernel: the name of the kernel that is forced; "": none.
        division: the division that is forced, or its kind, as text; "": none.
        extra_layout: of the extra cache where it differs from `layout`; else None.
        forced: whether a kernel or a division is forced.
        tiles, pairs: tiles of a query's rows, and pairs of tiles; at least one.
        phase, lists: "prefill" or "", and "uneven" or "": words of the keys of `times`.
    """

    forced: bool
    tiles: int
    pairs: int
    phase: str
    lists: str

    def __new__(cls, *fields: Any, **more: Any) -> Problem:
        made = super().__new__(cls, *fields, **more)
        made.forced = made.kernel != "" or made.division != ""
        made.tiles = tiles = -(-made.entries // TILE_ROWS) - (-made.extra_entries // TILE_ROWS) or 1
        made.pairs = (tiles + 1) // 2
        made.phase, made.lists = "prefill" if made.prefill else "", "uneven" if made.uneven else ""
        return made

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Problem:  # type: ignore[override]  # `_replace` calls it
        return cls(*iterable)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All fields but the numbers of queries and entries."""
        return self[:4] + self[7:]

    @property
    def fixed_kernel(self) -> bool:
        """Whether one kernel must serve every number of queries: the call is batch-invariant, and none is forced."""
        return self.batch_invariant and not self.kernel

    @property
    def on_hopper(self) -> bool:
        """Whether the kernels for Hopper can read its rows."""
        return self.aligned and self.gpu.capability == 90

    @property
    def rows(self) -> int:
        """Entries of both lists together."""
        return self.entries + self.extra_entries

    def __str__(self) -> str:
        lists = f"{self.entries}+{self.extra_entries}" if self.extra_entries else str(self.entries)
        said = {
            "of unequal lengths": self.uneven, "rows or q not aligned to 16 bytes": not self.aligned,
            "rows not in one flat array": not self.flat and not self.layout.quantized,
            "masks not possible at this sm_scale": not self.groupable, f"num_splits {self.num_splits}": self.num_splits,
            "batch-invariant": self.batch_invariant, f"kernel {self.kernel}": self.kernel,
            f"division {self.division}": self.division,
            f"an extra cache of {self.extra_layout.name if self.extra_layout else ''}": self.extra_layout,
        }  # fmt: skip
        return ", ".join(
            [
                f"{'prefill' if self.prefill else 'decode'} of {self.heads} heads over {self.layout.name} rows of "
                f"{self.layout.d_qk}", f"{self.queries} queries", f"{lists} entries",
                *(words for words, true in said.items() if true),
                f"{self.gpu.sms} SMs of compute capability {self.gpu.capability / 10}",
            ]
        )  # fmt: skip

    def items(self, heads: int) -> int:
        """The number of work items: each is one query with `heads` of its heads."""
        return self.queries * -(-self.heads // heads)

    def splits(self, invariant_rows: int) -> int:
        """The splits of a query's rows that the caller or batch invariance prescribes; 0: to be chosen.

        Args:
            invariant_rows: rows of a split of a batch-invariant call.
        """
        if self.num_splits or not self.batch_invariant:
            return self.num_splits
        return max(1, min(ceil_div(self.rows, invariant_rows), MAX_CLUSTER))


class DenseProblem(NamedTuple):
    """A call of dense attention: all that the choice of a kernel and a division depends on.

    Attributes:
        gpu: the GPU.
        layout: of the cache.
        heads: query heads.
        tokens: query tokens of a request.
        requests: requests of the call.
        capacity: rows that the block table can name for a request.
        rows: rows that a request's queries may see at most: fewer than `capacity` in a sliding window.
        block_size: rows of a block.
        aligned: every row of the cache and of q starts at a multiple of 16 bytes.
        num_splits: splits of a query's rows that the caller asks for; 0: to be chosen.
        batch_invariant: the choice must not depend on the number of requests or the table's width.
        kernel: the name of the kernel that is forced; "": none.
        division: the division that is forced, or its kind, as text; "": none.
    """

    gpu: Gpu
    layout: Layout
    heads: int
    tokens: int
    requests: int
    capacity: int
    rows: int
    block_size: int
    aligned: bool = True
    num_splits: int = 0
    batch_invariant: bool = False
    kernel: str = ""
    division: str = ""

    def __str__(self) -> str:
        return (
            f"dense decode of {self.heads} heads over {self.layout.name} rows of {self.layout.d_qk}, {self.requests} x "
            f"{self.tokens} queries, {self.rows} rows at most in blocks of {self.block_size}"
            + ("" if self.aligned else ", rows or q not aligned to 16 bytes")
            + f", compute capability {self.gpu.capability / 10}"
        )

    @property
    def forced(self) -> bool:
        """Whether a kernel or a division is forced."""
        return self.kernel != "" or self.division != ""

    @property
    def on_hopper(self) -> bool:
        """Whether the kernels for Hopper can read its rows."""
        return self.gpu.capability == 90 and self.aligned

    @property
    def lines(self) -> int:
        """Lines of a request: its query tokens times heads, which all attend over the same rows."""
        return self.tokens * self.heads

    @property
    def pairs(self) -> int:
        """Pairs of tiles of a request's rows, at least one."""
        return max(1, ceil_div(self.rows, 2 * TILE_ROWS))

    def items(self, lines: int) -> int:
        """The number of work items: each is one request with `lines` of its lines."""
        return self.requests * ceil_div(self.lines, lines)
