"""Launchers of what selects the largest logits, behind the indexer's logits or alone: `kernels_cu/indexer/topk.cu`, and
`short_rows.cu` where no row can have more than k logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..arguments import CandidateKeys, PagedKeys, RaggedKeys, Selection
from ..arrays import Array
from ..dtypes import FLOAT32
from . import block_scores, structs
from .block_scores import BlockScores
from .driver import PORTABLE_CLUSTER, Gpu
from .kernel import PORTABLE, Kernel
from .logits import CANDIDATE_BLOCK, Part, logits_of_candidates, paged_logits, ragged_logits
from .paging import NO_TABLE, block_table, ceil_div, lens_stride, pointer
from .program import Buffer, Launch, Pointer, Program
from .structs import INT32, INT64, POINTER, Packed, Struct

TOPK = Struct(
    "TopkParams", table=structs.BLOCK_TABLE, logits=POINTER, starts=POINTER, ends=POINTER, requests=POINTER,
    out=POINTER, logits_stride=INT64, out_stride=INT64, lens_stride=INT64, rows=INT32, width=INT32, k=INT32,
    queries=INT32, aligned=INT32, in_blocks=INT32,
)  # fmt: skip

LEAST_CLUSTER_CAPABILITY = 90
# By whether logits are bfloat16: what a row needs once is spilled. These are of sm_80 and sm_100; sm_90 spills 48.
SPILL_BYTES = {False: 60, True: 68}
MOST_K = 4096
RESULTS_OF_CTA = 2048  # results that a CTA of `short_rows.cu` writes


class Shape(NamedTuple):
    """How a CTA works.

    Attributes:
        threads: of a CTA.
        items: logits that a thread holds at a time.
        per_sm: CTAs that run at a time on an SM; this limits their registers.
        streamed: rows may be longer than what the threads hold, and are read in pieces.
        clusters: the CTAs of a cluster share a row.
        few: there are no more rows than SMs. A CTA has an SM for itself, even where it starts before the CTAs of the
            logits have ended.
        ordered: for more streamed rows than SMs, of at most `MOST_ORDERED` logits. The pool holds the items of a chunk
            of columns side by side. Its last items are compared one by one. With 384 threads and more the sample is
            searched by finer digits.
    """

    threads: int
    items: int
    per_sm: int
    streamed: bool = False
    clusters: bool = False
    few: bool = False
    ordered: bool = False

    @property
    def held(self) -> int:
        """Items that the threads of a CTA hold in registers."""
        return self.threads * self.items

    @property
    def most_k(self) -> int:
        """The largest k: a streamed row's pool has room for twice as many."""
        return min(self.held // 2, MOST_K) if self.streamed else MOST_K


class Widths(NamedTuple):
    """The shapes for rows of at most `most` logits, each with the number of rows per SM above which it is used."""

    most: int
    shapes: tuple[tuple[int, Shape], ...]


ANY_WIDTH = 1 << 31
MOST_ORDERED = 1 << 20  # logits of a row: the kernel has no room for more chunks
STREAMED = Shape(512, 16, 2, streamed=True)
ORDERED = STREAMED._replace(ordered=True)
ORDERED_BY_THREE = Shape(384, 16, 3, streamed=True, ordered=True)
# For more rows than SMs. With up to 2 or 3 rows per SM all CTAs run at a time, with more, small CTAs run in waves.
# benchmarks/log/topk.md has the measurements.
MANY = (
    Widths(4096, ((1, Shape(512, 8, 2)), (2, Shape(512, 8, 3)), (3, Shape(256, 16, 5)))),
    Widths(5120, ((1, Shape(512, 12, 2)), (2, Shape(512, 12, 3)), (3, Shape(256, 20, 5)))),
    Widths(6144, ((1, Shape(512, 12, 2)), (2, Shape(512, 12, 3)), (3, Shape(256, 24, 4)), (4, Shape(256, 24, 5)))),
    Widths(7168, ((1, Shape(512, 16, 2)), (2, Shape(512, 16, 3)), (3, Shape(256, 28, 4)))),
    Widths(8192, ((1, Shape(512, 16, 2)), (2, Shape(512, 16, 3)), (3, Shape(256, 32, 4)))),
    Widths(10240, ((1, Shape(512, 20, 2)), (2, Shape(512, 20, 3)))),
    Widths(10752, ((1, Shape(512, 24, 2)), (2, Shape(384, 28, 3)))),
    *(Widths(512 * items, ((1, Shape(512, items, 2)),)) for items in (24, 28, 32)),
    Widths(32768, ((1, ORDERED), (2, ORDERED_BY_THREE), (3, Shape(256, 16, 4, streamed=True, ordered=True)))),
    Widths(65536, ((1, ORDERED), (2, ORDERED_BY_THREE), (3, ORDERED), (4, ORDERED_BY_THREE))),
    Widths(MOST_ORDERED, ((1, ORDERED),)),
    Widths(ANY_WIDTH, ((1, STREAMED),)),
)
# For at most as many rows as SMs, a CTA for each.
FEW = (
    *(Widths(512 * items, ((0, Shape(512, items, 2, few=True)),)) for items in (8, 16)),
    *(Widths(1024 * items, ((0, Shape(1024, items, 1, few=True)),)) for items in (12, 16, 20, 24)),
    Widths(57344, ((0, STREAMED._replace(few=True)),)),
    Widths(ANY_WIDTH, ((0, Shape(1024, 16, 1, streamed=True, few=True)),)),
)
# For clusters, by the width of a CTA's part.
CLUSTERS = (
    *(Widths(1024 * items, ((0, Shape(1024, items, 1, clusters=True)),)) for items in (4, 8, 12, 16)),
    Widths(ANY_WIDTH, ((0, Shape(1024, 16, 1, streamed=True, clusters=True)),)),
)


class Tables(NamedTuple):
    """The shapes for logits of a dtype: for more rows than SMs, for fewer, and for clusters."""

    many: tuple[Widths, ...]
    few: tuple[Widths, ...]
    clusters: tuple[Widths, ...]


FLOAT32_TABLES = Tables(MANY, FEW, CLUSTERS)
# No known library makes bfloat16 logits, and none were measured: a few shapes serve rows of any width.
BF16_TABLES = Tables(
    many=(
        *(Widths(512 * items, ((1, Shape(512, items, per_sm)),)) for items, per_sm in ((8, 3), (16, 3), (32, 2))),
        Widths(MOST_ORDERED, ((1, ORDERED),)),
        Widths(ANY_WIDTH, ((1, STREAMED),)),
    ),
    few=(
        Widths(8192, ((0, Shape(512, 16, 2, few=True)),)),
        Widths(24576, ((0, Shape(1024, 24, 1, few=True)),)),
        FEW[-1],
    ),
    clusters=(CLUSTERS[0], *CLUSTERS[-2:]),
)
LEAST_CLUSTER_WIDTH = 12288  # shorter rows have one CTA
LEAST_PART = CLUSTERS[0].most  # logits of a CTA in clusters of more than two
# The longest rows that one CTA holds in registers.
HELD_BY_ONE = max(widths.most for widths in FEW for _, shape in widths.shapes if not shape.streamed)
MOST_OF_ONE = 131072  # the longest rows for which one CTA is faster than two


@cache
def kernel(shape: Shape, bf16: bool) -> Kernel:
    """The kernel of CTAs of a shape."""
    defines = {name.upper(): int(value) for name, value in shape._asdict().items() if name != "few"}
    return Kernel(
        "indexer/topk.cu", TOPK, {**defines, "BF16": int(bf16)}, overlaps=True,
        spill_bytes=SPILL_BYTES[bf16],
        archs=[a for a in PORTABLE if int(a) >= (LEAST_CLUSTER_CAPABILITY if shape.clusters else 0)],
        max_cluster=PORTABLE_CLUSTER if shape.clusters else 1, alone=shape.few,
    )  # fmt: skip


# For rows that have no more than k logits. It does not read them, since all are selected.
SHORT_KERNEL = Kernel("indexer/short_rows.cu", TOPK, {"RESULTS": RESULTS_OF_CTA}, overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield SHORT_KERNEL
    for bf16, tables in ((False, FLOAT32_TABLES), (True, BF16_TABLES)):
        for shape in dict.fromkeys(shape for table in tables for widths in table for _, shape in widths.shapes):
            yield kernel(shape, bf16)


def choose(gpu: Gpu, rows: int, width: int, k: int, bf16: bool = False) -> tuple[Shape, int]:
    """The fastest shape for rows of so many logits, and the number of CTAs that share a row."""
    tables = BF16_TABLES if bf16 else FLOAT32_TABLES
    if rows > gpu.sms:
        return _shape(tables.many, rows, width, k, gpu.sms), 1
    cluster = _cluster(gpu, rows, width)
    return _shape(tables.few if cluster == 1 else tables.clusters, rows, width, k, gpu.sms, cluster), cluster


def cluster_kernel() -> Kernel:
    """The variant that `Gpu.clusters_at_once` is asked about. A CTA of all `CLUSTERS` takes a whole SM."""
    return kernel(CLUSTERS[0].shapes[0][1], False)


def _cluster(gpu: Gpu, rows: int, width: int) -> int:
    """The CTAs that share a row: the largest number with which all clusters run at a time and each CTA has work.

    For rows that one CTA can hold, clusters get four fifths of the SMs. If they need more, one CTA a row is faster.
    """
    if gpu.capability < LEAST_CLUSTER_CAPABILITY or width <= LEAST_CLUSTER_WIDTH or 2 * rows > gpu.sms:
        return 1
    at_once = gpu.clusters_at_once(cluster_kernel())
    most_ctas = gpu.sms * 4 // 5 if width <= HELD_BY_ONE else gpu.sms
    cluster = PORTABLE_CLUSTER
    while cluster > 1 and (
        rows > min(at_once[cluster - 1], most_ctas // cluster) or width <= cluster // 2 * LEAST_PART
    ):
        cluster //= 2
    return 1 if cluster == 2 and width <= MOST_OF_ONE else cluster


def _shape(table: tuple[Widths, ...], rows: int, width: int, k: int, sms: int, cluster: int = 1) -> Shape:
    """The last shape for a width that serves so many rows and this k."""
    shapes = next(widths.shapes for widths in table if width <= cluster * widths.most)
    return next(shape for above, shape in reversed(shapes) if rows > above * sms and k <= shape.most_k)


class Logits(NamedTuple):
    """Rows of logits in memory.

    Attributes:
        ptr: where the first row starts.
        stride: from row to row, in items.
        rows, width: the numbers of rows, and of logits of a row.
        bf16: the logits are bfloat16, else float32.
        aligned: rows allow loads of four items.
    """

    ptr: Pointer | int
    stride: int
    rows: int
    width: int
    bf16: bool
    aligned: bool


class Bounds(NamedTuple):
    """The range of columns of each row in which logits are selected.

    Attributes:
        starts, ends: pointers to the begin and the end of each row's range; 0: there is no limit.
        lens_stride: used with `queries`: items from request to request; 0 where a request has one context length.
        queries: queries of a request; `ends` are then context lengths of requests. 0: `ends` are ends of rows.
        in_blocks: columns are those of candidate blocks, and `ends` are numbers of keys.
    """

    starts: object
    ends: object
    lens_stride: int = 0
    queries: int = 0
    in_blocks: bool = False


def topk_indices(gpu: Gpu, logits: Array, k: int, starts: Array | None, ends: Array | None, out: Array) -> Program:
    """Twin of `reference.topk.topk_indices`."""
    rows, width = logits.shape
    item = logits.dtype.itemsize
    of = Logits(logits.ptr, logits.strides[0], rows, width, item == 2, logits.aligned(4 * item))
    return select_topk(gpu, of, Bounds(pointer(starts), pointer(ends)), k, out.ptr, out.strides[0])


def select_rows(
    gpu: Gpu,
    of: RaggedKeys,
    chosen: Selection,
    req_id: Array | None,
    table: Array | None,
    block_size: int | None,
) -> Program:
    """Twin of `reference.topk.select_rows`."""
    keys = of.k8.shape[0]
    slots = NO_TABLE if table is None or block_size is None else block_table(table, block_size)
    program: list = []
    for chunk in _chunks(chosen, of.q8.shape[0], 1, keys):
        first = chunk.part.first
        if keys > chunk.part.all_chosen:
            program += ragged_logits(gpu, of, chunk.part)
        bounds = Bounds(pointer(of.starts, first), pointer(of.ends, first))
        requests = pointer(req_id, first)
        program += _select(gpu, chunk, chosen, bounds, slots, requests)
    return program


def select_rows_paged(gpu: Gpu, of: PagedKeys, chosen: Selection, max_context_len: int, slots: bool) -> Program:
    """Twin of `reference.topk.select_rows_paged`."""
    requests, n = of.q8.shape[0], of.q8.shape[1]
    if n == 0:
        return ()
    program: list = []
    for chunk in _chunks(chosen, requests, n, max_context_len):
        first, size = chunk.part.first, chunk.part.size
        if size < requests:
            of = of._replace(schedule=None)  # it is one of all requests
        if max_context_len > chunk.part.all_chosen:
            program += paged_logits(gpu, of, chunk.part, max_context_len)
        bounds = Bounds(0, pointer(of.lens, first), lens_stride(of.lens), n)
        to = block_table(of.table, of.cache.shape[1], first, size) if slots else NO_TABLE
        program += _select(gpu, chunk, chosen, bounds, to)
    return program


def select_candidate_rows(gpu: Gpu, of: CandidateKeys, chosen: Selection) -> Program:
    """Twin of `reference.topk.select_candidate_rows`."""
    tokens, candidates = of.candidates.shape
    width = candidates * CANDIDATE_BLOCK
    program: list = []
    for chunk in _chunks(chosen, tokens, 1, width):
        first = chunk.part.first
        if width > chunk.part.all_chosen:
            program += logits_of_candidates(gpu, of, chunk.part)
        bounds = Bounds(0, pointer(of.lens, first), in_blocks=True)
        to_positions = block_table(of.candidates, CANDIDATE_BLOCK, first, chunk.part.size)
        program += _select(gpu, chunk, chosen, bounds, to_positions)
    return program


class Chunk(NamedTuple):
    """Some queries of a call, or requests over a paged cache, whose logits fill the workspace once.

    Attributes:
        part: which they are, and how their logits are written.
        logits: those in the workspace.
        scratch: for the scores of their blocks.
    """

    part: Part
    logits: Logits
    scratch: BlockScores


def _chunks(chosen: Selection, items: int, queries: int, width: int) -> Iterator[Chunk]:
    """Divide a call into chunks whose logits fit `chosen.max_workspace_bytes`. All share one workspace.

    Args:
        items: query tokens, or requests of `queries` query tokens each.
        width: logits of a row.
    """
    stride = _padded(width)
    step = max(chosen.max_workspace_bytes // (4 * stride * queries), 1)
    most = min(step, items) * queries
    workspace, scratch = Buffer("logits", shape=(most, stride), dtype=FLOAT32), BlockScores.of(most, width)
    without_logits = all_chosen(chosen.k, chosen.blocks)
    for first in range(0, items, step):
        size = min(step, items - first)
        part = Part(first, size, workspace.ptr, stride, clean=False, all_chosen=without_logits)
        yield Chunk(part, Logits(workspace.ptr, stride, size * queries, width, False, True), scratch)


def _select(gpu: Gpu, chunk: Chunk, chosen: Selection, bounds: Bounds, table: Packed, requests: object = 0) -> Program:
    """The launches that select a chunk's rows, and its blocks where `chosen` asks for them."""
    logits, out = chunk.logits, chosen.out
    first = chunk.part.first * (logits.rows // chunk.part.size)
    program = [*select_topk(gpu, logits, bounds, chosen.k, pointer(out, first), out.strides[0], table, requests)]
    if chosen.blocks is not None:
        program += select_blocks(gpu, logits, bounds, chunk.scratch, chosen.blocks, first)
    return program


def candidate_blocks(gpu: Gpu, logits: Array, starts: Array | None, ends: Array | None, out: Array) -> Program:
    """Twin of `reference.topk.candidate_blocks`."""
    rows, width = logits.shape
    of = Logits(logits.ptr, logits.strides[0], rows, width, False, logits.aligned(16))
    return select_blocks(gpu, of, Bounds(pointer(starts), pointer(ends)), BlockScores.of(rows, width), out, 0)


def select_blocks(gpu: Gpu, logits: Logits, bounds: Bounds, scratch: BlockScores, out: Array, first: int) -> Program:
    """The launches that select blocks of rows of float32 logits. Those of the first row go to row `first` of `out`."""
    rows, blocks = logits.rows, ceil_div(logits.width, CANDIDATE_BLOCK)
    if rows == 0:
        return ()
    stride = scratch.scores.shape[1]
    of_blocks = Logits(scratch.scores.ptr, stride, rows, blocks, False, True)
    params = block_scores.BLOCK_SCORES(
        logits=logits.ptr, starts=bounds.starts, ends=bounds.ends, scores=scratch.scores.ptr,
        counts=scratch.counts.ptr, logits_stride=logits.stride, scores_stride=stride, lens_stride=bounds.lens_stride,
        rows=rows, width=logits.width, queries=bounds.queries, ctas_of_row=block_scores.ctas_of_row(blocks),
        aligned=int(logits.aligned),
    )  # fmt: skip
    return [
        Launch(block_scores.KERNEL, (rows * block_scores.ctas_of_row(blocks), 1, 1), params),
        *select_topk(gpu, of_blocks, Bounds(0, scratch.counts.ptr), out.shape[1], pointer(out, first), out.strides[0]),
    ]


def select_topk(
    gpu: Gpu,
    logits: Logits,
    bounds: Bounds,
    k: int,
    out: object,
    out_stride: int,
    table: Packed = NO_TABLE,
    requests: object = 0,
) -> Program:
    """The launch that selects the k largest logits of each row. It writes columns; with a block table, slots."""
    rows, width = logits.rows, logits.width
    if rows == 0:
        return ()
    params = TOPK(
        table=table, logits=logits.ptr if width > k else 0, starts=bounds.starts, ends=bounds.ends, requests=requests,
        out=out, logits_stride=logits.stride, out_stride=out_stride, lens_stride=bounds.lens_stride, rows=rows,
        width=width, k=k, queries=bounds.queries, aligned=int(logits.aligned), in_blocks=int(bounds.in_blocks),
    )  # fmt: skip
    if width <= k:
        return [Launch(SHORT_KERNEL, (rows, ceil_div(k, RESULTS_OF_CTA), 1), params)]
    shape, cluster = choose(gpu, rows, width, k, logits.bf16)
    return [Launch(kernel(shape, logits.bf16), (rows * cluster, 1, 1), params, cluster)]


def all_chosen(k: int, blocks: Array | None) -> int:
    """A query with at most so many keys needs no logits: all its keys are selected, and all their blocks."""
    return k if blocks is None else min(k, CANDIDATE_BLOCK * blocks.shape[1])


def _padded(width: int) -> int:
    """The stride, in items, of float32 rows that allow loads of four."""
    return ceil_div(max(width, 1), 4) * 4
