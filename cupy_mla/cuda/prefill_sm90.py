"""The Hopper prefill kernel, `kernels_cu/attention/bf16_sm90.cu`, of single queries and of groups of them.

Groups take three launches: `group_lists.cu` unites the index lists of neighbouring queries, the prefill kernel works on
the groups whose lists share enough, as many queries as fill its tile of 64 heads, and then it or the kernel for few
heads works on what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from ..arrays import Array, Place
from ..layouts import BF16_512, BF16_576, D_V, Layout
from ..recording import Packed, Params
from . import few_heads_sm90
from .jit import MAX_CLUSTER, Kernel, num_sms
from .lists import longest_first, sorted_by_place
from .schedule import Shape

HEADS = TILE_ROWS = 64

MOST_QUERIES = 8  # kernels_cu/attention/groups.cuh
MOST_GROUPED_HEADS = 32
MOST_FEW_HEADS = 16  # up to which what groups leave is for the kernel for few heads, above for this one

# The most rows of a union, as a share of its lists' entries, with which a group is the faster way: the time that an
# entry takes otherwise over that of a row of a union: 0.74 on the kernel for few heads, 0.95 on this one. Clear
# of what random lists come to, so that all groups of such a call go one way: with 4 and 16 rows of the cache for an
# entry 0.43 and 0.79 (groups of 8), 0.63 and 0.89 (of 4), 0.79 and 0.94 (of 2).
MOST_ROWS_FEW_HEADS, MOST_ROWS = 0.71, 0.86

LEAST_SCALE = 2.0**-60  # sm_scale from which groups are: times -2^120, it takes rows out of a softmax

# Pieces of work, each a query and a tile of heads, from which a decode of flat bf16 rows is for this kernel, split over
# clusters, rather than for the one for few heads; with up to 32 heads half of the tile is padding.
LEAST_PIECES, LEAST_HALF_PIECES = 4, 8

SORTED_CACHE_BYTES = 1 << 26  # rows from which the lists of what groups leave are sorted: more than L2 holds

SCRATCH_BYTES = 1 << 28  # what the unions of one launch may take, about

_NAMES = {"": "bf16_sm90", "SPLIT": "bf16_cluster_sm90", "GROUPED": "bf16_grouped_sm90"}

_GROUPS = "6Q5if"  # what struct GroupedParams has after Params


@cache
def kernel(layout: Layout, kind: str = "") -> Kernel:
    """The kernel for rows of one width: of single queries, "SPLIT" over clusters or not, or of "GROUPED" ones."""
    tile = TILE_ROWS * 2 * layout.d_qk
    p_tiles = 0 if layout.d_qk > D_V else 2 * TILE_ROWS * 128
    more = 4 * TILE_ROWS * 16 if kind == "GROUPED" else 0
    small = 10 * 8 + 2 * 4 + 2 * TILE_ROWS + (2 + 8) * HEADS * 4  # struct Small of the kernel
    shared = 3 * tile + p_tiles + more + small
    return Kernel(
        f"attention/{_NAMES[kind]}.cu",
        _NAMES[kind],
        {**layout.defines(), "D_V": D_V, "HEADS": HEADS, "TILE_ROWS": TILE_ROWS}
        | ({"MAX_CLUSTER": MAX_CLUSTER} if kind == "SPLIT" else {"MAX_QUERIES": MOST_QUERIES} if kind == "GROUPED" else {}),
        threads=384,
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
        max_cluster=MAX_CLUSTER if kind == "SPLIT" else 1,
        overlaps=kind == "SPLIT",
    )


@cache
def group_lists_kernel(queries: int) -> Kernel:
    """The kernel that unites the index lists of so many queries; it does not depend on the layout."""
    shared = queries * (8192 + 2048 + 1536 + 4) + 4096 + (3 * 32 + 4) * 4  # struct Shared of the kernel
    return Kernel(
        "attention/group_lists.cu",
        "group_lists",
        {"QUERIES": queries, "MAX_QUERIES": MOST_QUERIES, "TILE_ROWS": TILE_ROWS},
        threads=128 * queries,
        shared_bytes=shared,
        archs=("90a",),
        target="90a",
    )


def pieces(h_q: int, num_queries: int) -> int:
    """Pieces of work of a call, each a query and a tile of heads."""
    return num_queries * -(-h_q // HEADS)


def best_splits(place: Place, h_q: int, num_queries: int, rows: int) -> int:
    """Splits of queries of up to `rows` rows that do not fill the GPU: as many as their clusters let run at a time."""
    work, pairs = pieces(h_q, num_queries), -(-rows // (2 * TILE_ROWS))
    if 2 * work > num_sms(place.device):
        return 1
    at_once = kernel(BF16_576, "SPLIT").clusters_at_once(place.device)
    fit = [n for n, clusters in enumerate(at_once, start=1) if work <= clusters and 2 * n <= pairs]
    return max(fit, default=1)


def launch(
    place: Place, layout: Layout, shape: Shape, h_q: int, num_queries: int, uneven: bool, params: Packed
) -> None:
    """Launch for single queries.

    Args:
        uneven: queries have lengths of their own.
        params: struct Params.
    """
    work, sms = pieces(h_q, num_queries), num_sms(place.device)
    if shape.cluster > 1:
        kernel(layout, "SPLIT").launch(place, (work * shape.cluster, 1, 1), params, shape.cluster)
        return
    if uneven and work > sms:
        params, _order = longest_first(place, num_queries, params)
    kernel(layout).launch(place, (min(work, sms), 1, 1), params)


@cache
def _grouped(params: Params) -> Params:
    """struct GroupedParams."""
    return Params(params.struct.format + _GROUPS)


def group_queries(h_q: int) -> int:
    """Queries of a group."""
    return min(HEADS // h_q, MOST_QUERIES)


def full(h_q: int, num_queries: int, sms: int) -> float:
    """Share of the GPU's blocks that have a group to work on, over all rounds."""
    groups = -(-num_queries // group_queries(h_q))
    return groups / (-(-groups // sms) * sms)


def launch_grouped(
    place: Place,
    layout: Layout,
    h_q: int,
    num_queries: int,
    topk: int,
    s_kv: int,
    length: Array | None,
    left: Array,
    forced: bool,
    params: Packed,
) -> None:
    """Launch for groups, and for the queries that are left.

    Args:
        length: the call's topk_length.
        left: int32 [num_queries], scratch that Params names as main.lengths, with the flag SOME_DONE.
        forced: group whatever lists share, for testing.
        params: struct Params.
    """
    sms = num_sms(place.device)
    queries = group_queries(h_q)
    capacity = queries * topk
    total = -(-num_queries // queries)
    sizes = (-(-capacity // TILE_ROWS) * queries * 8, 4 * capacity, 4, capacity)  # of twice, rows, length, excluded
    groups = min(total, max(SCRATCH_BYTES // sum(sizes), 1))  # of a launch
    scratch = Array("unions", place.empty((groups * sum(sizes),), np.dtype(np.uint8)))
    twice, rows, group_lengths, excluded = (scratch.ptr + groups * sum(sizes[:i]) for i in range(4))
    few = h_q <= MOST_FEW_HEADS
    most = 1.0 if forced else min(MOST_ROWS_FEW_HEADS if few else MOST_ROWS, full(h_q, num_queries, sms))
    for first in range(0, total, groups):
        here = min(groups, total - first)
        lists = (length.ptr if length else 0, rows, excluded, twice, group_lengths, left.ptr)
        grouped = _grouped(params.layout).pack(
            *params.values, *lists, queries, first, here, capacity, sizes[0] // 8, most
        )
        group_lists_kernel(queries).launch(place, (here, 1, 1), grouped)
        kernel(layout, "GROUPED").launch(place, (here if length else min(here, sms), 1, 1), grouped)
    if 2 * layout.d_qk * s_kv > SORTED_CACHE_BYTES:
        params, _lists = sorted_by_place(place, num_queries, topk, s_kv, params)
    if few:
        whole = Shape(few_heads_sm90.block_heads(h_q), 1, 1)
        few_heads_sm90.launch(place, layout, whole, h_q, num_queries, length is not None, params)
    else:
        launch(place, layout, Shape(HEADS, 1, 1), h_q, num_queries, length is not None, params)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for queries in sorted({group_queries(h_q) for h_q in range(1, MOST_GROUPED_HEADS + 1)}):
        yield group_lists_kernel(queries)
    for layout in (BF16_576, BF16_512):
        for kind in ("", "SPLIT", "GROUPED"):
            yield kernel(layout, kind)
