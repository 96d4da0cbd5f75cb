"""Which attention kernel serves a call, and how the call is divided: decided here, once a call, from one table.

`Chooser` is made from the facts that a signature fixes, and called with the sizes. The rows of `TABLE` are asked in
order: the first kernel runs that can serve the call and was measured to be the fastest for such calls. What facts alone
say of a row is asked once. The environment variable CUPY_MLA_KERNELS names a kernel that is to run instead, for
testing; it must be able to serve the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import Any, NamedTuple

from ... import private
from ...layouts import Layout
from ..driver import MAX_CLUSTER, Gpu
from ..paging import ceil_div
from . import bf16_cluster_sm90, bf16_grouped_sm90, bf16_sm90, few_heads_sm90, fp8_sm90, portable
from .cost import (
    CUT_COST,
    EVENLY,
    FP8_LEAST_SPLIT,
    ITEM_COST,
    TEAM,
    Division,
    bf16_evenly,
    decided_with,
    few_heads_candidates,
    fp8_candidates,
    fp8_in_turn,
    fp8_item_cost,
    portable_splits,
)

VARIABLE = "CUPY_MLA_KERNELS"
asked_kernel: Callable[[], str | None] = private.environment_reader(VARIABLE)

# Of batch-invariant calls: rows of a split, more where a CTA can take a query's splits in turn (`fp8_sm90`), and the
# number of queries for which kernel and division are chosen, whatever the batch.
INVARIANT_ROWS, INVARIANT_ROWS_IN_TURN, INVARIANT_QUERIES = 512, 704, 32

# With at most so many queries of 9 to 16 heads V32_FP8 decode is faster on `fp8_sm90` with 32 heads a CTA, half of them
# padding.
PADDED_QUERIES = 8
# V32_FP8 decode of up to 16 heads: waves of queries, more than the first number and at most the second, with which all
# rows are divided evenly: of equal lists where the last wave would be little more than half full (measured up to 400
# queries, in docs/kernels/few_heads_sm90.md), and of lists with lengths. And the pairs of tiles that a split has at
# least then.
FEW_SHARE_WAVES, FEW_SHARE_WAVES_UNEVEN = ((1, 1.6), (2, 2.5), (3, 3.18)), ((0.5, inf),)
FEW_SHARE_LEAST_SPLIT = 2
# Up to so many work items the kernels for few heads are faster for prefill of many heads, too.
FEW_ITEMS = 28
# Up to so many splits of a query `bf16_few_heads_sm90` is the faster kernel for bf16 rows; and with clusters of the
# second number in decode of up to 16 heads: its two warpgroups then have as many tiles each, three would not.
BF16_FEW_HEADS_SPLITS, BF16_FEW_HEADS_CLUSTER = 2, 4
# For flat bf16 rows of more than 16 heads `bf16_cluster_sm90` is the faster kernel: always, of lists with so many pairs
# of tiles; of at least the second number of them, from so many work items of 32 heads on; of shorter ones, from so many
# work items of 64 heads on, the second number with up to 32 heads.
CLUSTER_PAIRS_ALWAYS, CLUSTER_PAIRS_OFTEN, CLUSTER_HALVES = 8, 3, 3
CLUSTER_ITEMS, CLUSTER_HALF_ITEMS = 4, 8
# For 9 to 16 heads, too, of lists with at least so many pairs of tiles, from so many queries on: with at most so many
# pairs a split; or with one more and splits that fill more than this share of the GPU. For decode of up to 8 heads from
# so many on, with one pair a split.
CLUSTER_FEW_HEADS = ((8, 1), (4, 8), (3, 10))
CLUSTER_FEW_HEADS_EACH, CLUSTER_FEW_HEADS_FULL = 3, 0.75
CLUSTER_FEWEST_HEADS = ((16, 1), (8, 5), (4, 10))
# From so many waves of work items on, looking for the end of prefill's lists takes less than 1 % of the time.
COUNTED_WAVES = 8
# Of flat bf16 rows that are divided evenly over CTAs: pairs of tiles that a split has at least; waves of work items,
# more than the first number and at most the second. Of up to 8 and up to 16 heads, without lengths: lists of at least
# so many entries, and the waves at most.
SHARE_LEAST_SPLIT = 1
SHARE_WAVES = (0.5, 4)
SHARE_MOST_WAVES_FEW_HEADS = {8: ((2048, 1.2),), 16: ((2048, 1.3), (1024, 1.07))}
# Waves of queries of 17 to 32 heads, and the fewest list entries, for which two queries a CTA of `bf16_few_heads_sm90`
# are faster than equal shares and whole work items.
TWO_QUERIES_WAVES, TWO_QUERIES_ROWS = (1.45, 1.9), 2048
# CTAs a work item with which the GPU is full where clusters of as many do not all run at a time: then equal splits of a
# query, a CTA each, are merged by the last of them. And the pairs of tiles that such a split has at least.
SHARE_SPLITS, SHARE_SPLIT_PAIRS = 3, 2
# Of lists with fewer pairs of tiles, whole work items are faster than clusters of two where those fill more than two
# thirds of the GPU.
CLUSTER_PAIRS, CLUSTER_FULL = 6, 2 / 3
LEAST_FULL = 0.5  # share of the GPU that query groups must fill

MAX_CHOICES = 1 << 16  # sizes that a chooser remembers
USUAL_ROWS = 64  # lists of models, and those that other kernels take, are multiples of it


class Choice(NamedTuple):
    """What runs.

    Attributes:
        kernel: its name: of the .cu file, the module, and what CUPY_MLA_KERNELS says.
        heads: of a CTA.
        splits: of a query's rows; `EVENLY`: wherever an equal share of all rows ends.
        cluster: splits that the CTAs of a cluster merge; splits / cluster partial results are left for `combine.cu`.
        ctas: of `fp8_sm90`, `few_heads_sm90` and `portable`: among which the work is divided; 0: none, each item has a
            cluster, or a CTA for each split. Up to MAX_CLUSTER splits of `fp8_sm90` that are no cluster are taken in
            turn by one of them.
        counted: lists without lengths end with their last valid entry, which a launch before finds.
        teams: of `fp8_sm90`: the splits of an item are CTAs that are no cluster; EVENLY: an item has as many of them as
            the length of its lists asks for.
        least_split: pairs of tiles that a split has at least, where rows are divided among CTAs.
        item_cost: what a work item costs beside its pairs of tiles, where equally long lists are divided among CTAs.
        cut_cost: what a share of other lists costs more because items are cut; where it would save less, items stay
            whole.
        queries: of a CTA; of a query group.
        longest_first: CTAs that take several queries begin with those that have the longest lists.
        most_rows: of query groups: a group is worked on as one where the union of its lists has at most this share of
            the lists' entries.
        rest: of query groups: the kernel, with heads and queries of a CTA, for the queries that are left.
    """

    kernel: str
    heads: int
    splits: int = 1
    cluster: int = 1
    ctas: int = 0
    teams: bool = False
    least_split: int = 0
    item_cost: int = ITEM_COST
    cut_cost: int = CUT_COST
    queries: int = 1
    longest_first: bool = False
    counted: bool = False
    most_rows: float = 0.0
    rest: tuple[str, int, int] | None = None


class Facts(NamedTuple):
    """What a choice depends on beside sizes.

    Attributes:
        gpu: the GPU.
        layout: of the cache; flat bf16 rows are one as well.
        prefill: whether it is a prefill.
        aligned: rows and q are, to 16 bytes.
        flat: one stride leads from every bf16 row to the next, also from block to block, and there is one cache.
        uneven: queries have lengths of their own.
        batch_invariant: the choice must not depend on the number of queries.
        groupable: `sm_scale` lets query groups mask rows.
    """

    gpu: Gpu
    layout: Layout
    prefill: bool
    aligned: bool = True
    flat: bool = True
    uneven: bool = False
    batch_invariant: bool = False
    groupable: bool = True


class Sizes(NamedTuple):
    """The sizes that a choice depends on: heads, query tokens, entries of a query's lists, splits asked for."""

    h_q: int
    queries: int
    rows: int
    splits: int | None = None


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        kernel: its name.
        can: whether the kernel can serve calls with these facts.
        takes: whether it can serve those of these sizes.
        wanted: whether it was measured to be the fastest for a call that no row above is for.
        choice: how it serves the call.
    """

    kernel: str
    can: Callable[[Facts], bool]
    takes: Callable[[Sizes], bool]
    wanted: Callable[[Facts, Sizes], bool]
    choice: Callable[[Facts, Sizes], Choice]


def _on_hopper(f: Facts) -> bool:
    return f.gpu.capability == 90 and f.aligned


def _items(s: Sizes, heads: int) -> int:
    """Work items of a call: a query and a tile of heads each."""
    return s.queries * ceil_div(s.h_q, heads)


# --- query groups ---------------------------------------------------------------------------------------------


def _can_group(f: Facts) -> bool:
    return _on_hopper(f) and f.prefill and f.groupable


def _takes_group(s: Sizes) -> bool:
    return s.h_q <= bf16_grouped_sm90.MAX_HEADS and s.queries > 0 and s.splits in (None, 1)


def _full(f: Facts, s: Sizes) -> float:
    """Share of the GPU that query groups keep busy, over all waves of CTAs."""
    groups = ceil_div(s.queries, bf16_grouped_sm90.group_queries(s.h_q))
    return groups / (ceil_div(groups, f.gpu.sms) * f.gpu.sms)


def _group(f: Facts, s: Sizes) -> Choice:
    few = s.h_q <= bf16_grouped_sm90.REST_FEW_HEADS
    limit = bf16_grouped_sm90.MOST_ROWS_FEW_HEADS if few else bf16_grouped_sm90.MOST_ROWS
    rest = (_bf16_few_heads_whole if few else _bf16)(f, s)
    return Choice(
        "bf16_grouped_sm90", bf16_sm90.HEADS, queries=bf16_grouped_sm90.group_queries(s.h_q),
        longest_first=rest.longest_first, most_rows=1.0 if asked_kernel() else min(limit, _full(f, s)),
        rest=(rest.kernel, rest.heads, rest.queries),
    )  # fmt: skip


# --- few heads ------------------------------------------------------------------------------------------------


def _few_heads_splits(f: Facts, s: Sizes) -> Choice:
    """The cheapest division over `few_heads_sm90`; of more than 16 heads, 16 or 32 a CTA."""
    most = few_heads_sm90.block_heads(s.h_q)
    heads = (16, most) if most > 16 else (most,)
    at_once = f.gpu.clusters_at_once(few_heads_sm90.cluster_kernel(most))
    tiles = ceil_div(s.rows, few_heads_sm90.TILE_ROWS)
    return Choice("few_heads_sm90", *few_heads_candidates(heads, s.h_q, tiles, at_once, s.splits).cheapest(s.queries))


def _few_heads(f: Facts, s: Sizes) -> Choice:
    """The same, or all rows divided evenly."""
    return _few_heads_shares(f, s) if _few_heads_shares_wanted(f, s) else _few_heads_splits(f, s)


def _few_heads_shares(f: Facts, s: Sizes) -> Choice:
    heads, pairs = few_heads_sm90.block_heads(s.h_q), ceil_div(s.rows, 2 * few_heads_sm90.TILE_ROWS)
    most = min(f.gpu.sms, few_heads_sm90.MOST_SHARES)
    ctas = max(1, min(most, s.queries * pairs // FEW_SHARE_LEAST_SPLIT))
    return Choice("few_heads_sm90", heads, EVENLY, ctas=ctas, least_split=FEW_SHARE_LEAST_SPLIT)


def _few_heads_shares_wanted(f: Facts, s: Sizes) -> bool:
    if f.prefill or not f.layout.quantized or f.batch_invariant or s.splits is not None:
        return False
    ranges, waves = FEW_SHARE_WAVES_UNEVEN if f.uneven else FEW_SHARE_WAVES, s.queries / f.gpu.sms
    return s.h_q <= max(few_heads_sm90.EVEN_HEADS) and any(least < waves <= most for least, most in ranges)


def _few_heads_wanted(f: Facts, s: Sizes) -> bool:
    return s.h_q <= 16 or (f.prefill and _items(s, few_heads_sm90.block_heads(s.h_q)) <= FEW_ITEMS)


def _bf16_few_heads_splits(f: Facts, s: Sizes) -> Choice:
    """The same, but for bf16 rows three partial results for `combine.cu` take longer than a cluster with two splits."""
    divided = _few_heads_splits(f, s)
    apart = s.splits is None and divided.splits == 3 and divided.cluster == 1
    return divided._replace(splits=2, cluster=2) if apart else divided


def _bf16_few_heads(f: Facts, s: Sizes) -> Choice:
    divided = _bf16_few_heads_splits(f, s)
    if divided.splits == 1 or _two_queries(f, s):
        return _bf16_few_heads_whole(f, s)
    return divided._replace(kernel="bf16_few_heads_sm90")


def _two_queries(f: Facts, s: Sizes) -> bool:
    """Whether CTAs of `bf16_few_heads_sm90` work on two queries: where there are more work items than SMs."""
    return s.splits in (None, 1) and _items(s, few_heads_sm90.block_heads(s.h_q)) > f.gpu.sms


def _bf16_few_heads_whole(f: Facts, s: Sizes) -> Choice:
    """Unsplit."""
    heads, two = few_heads_sm90.block_heads(s.h_q), _two_queries(f, s)
    return Choice("bf16_few_heads_sm90", heads, queries=1 + two, longest_first=two and f.uneven)


def _bf16_few_heads_wanted(f: Facts, s: Sizes) -> bool:
    """Few splits of bf16 rows; the kernel depends on how many queries there are."""
    if f.batch_invariant:
        return False
    divided = _bf16_few_heads_splits(f, s)
    four = divided.splits == divided.cluster == BF16_FEW_HEADS_CLUSTER and s.h_q <= 16 and not f.prefill
    return _two_queries(f, s) or divided.splits <= BF16_FEW_HEADS_SPLITS or four


def _two_queries_wanted(f: Facts, s: Sizes) -> bool:
    """Of 17 to 32 heads, in decode without lengths."""
    least, most = TWO_QUERIES_WAVES
    return (
        16 < s.h_q <= 32 and least < s.queries / f.gpu.sms <= most and s.rows >= TWO_QUERIES_ROWS
        and not (f.prefill or f.uneven or f.batch_invariant)
    )  # fmt: skip


# --- many heads -----------------------------------------------------------------------------------------------


def _fp8(f: Facts, s: Sizes) -> Choice:
    tiles = ceil_div(s.rows, fp8_sm90.TILE_ROWS)
    heads, splits, cluster = _fp8_division(f, s, tiles)
    if cluster > 1:
        return Choice("fp8_sm90", heads, splits, cluster)
    items, sms = _items(s, heads), f.gpu.sms
    if cluster == TEAM:
        return Choice("fp8_sm90", heads, splits, ctas=items * splits or sms, teams=True)
    if splits == EVENLY:
        pairs = ceil_div(tiles, 2)
        ctas = max(1, min(sms, items * pairs // FP8_LEAST_SPLIT))
        cost = fp8_item_cost(items, pairs, ctas) if heads == 64 and not f.uneven else ITEM_COST
        return Choice("fp8_sm90", heads, EVENLY, ctas=ctas, least_split=FP8_LEAST_SPLIT, item_cost=cost)
    splits = min(splits, fp8_sm90.MOST_SPLITS)
    return Choice("fp8_sm90", heads, splits, ctas=min(items, sms) if splits == 1 else items * splits)


def _fp8_division(f: Facts, s: Sizes, tiles: int) -> Division:
    """The cheapest division."""
    at_once = f.gpu.clusters_at_once(fp8_sm90.cluster_kernel())
    return fp8_candidates(fp8_sm90.HEADS, s.h_q, tiles, at_once, s.splits, f.uneven).cheapest(s.queries)


def _in_turn(f: Facts, s: Sizes, queries: int, clusters: Choice) -> Choice:
    """The splits that are wanted, by CTAs that take those of an item in turn where that is faster for so many queries:
    to the same bits."""
    if s.splits is None or clusters.kernel != "fp8_sm90" or clusters.cluster == 1:
        return clusters
    tiles, items = ceil_div(s.rows, fp8_sm90.TILE_ROWS), _items(s._replace(queries=queries), clusters.heads)
    at_once = f.gpu.clusters_at_once(fp8_sm90.cluster_kernel())
    if not fp8_in_turn(clusters.heads, items, tiles, clusters.splits, at_once):
        return clusters
    return clusters._replace(cluster=1, ctas=min(items, f.gpu.sms))


def _fp8_wanted_first(f: Facts, s: Sizes) -> bool:
    return f.layout.scales_apart or (8 < s.h_q <= 16 and s.queries <= PADDED_QUERIES)


def _bf16(f: Facts, s: Sizes) -> Choice:
    waves = _items(s, bf16_sm90.HEADS) / f.gpu.sms
    return Choice(
        "bf16_sm90", bf16_sm90.HEADS, longest_first=f.uneven and waves > 1,
        counted=f.prefill and not f.uneven and waves >= COUNTED_WAVES,
    )  # fmt: skip


def _bf16_pairs(s: Sizes) -> int:
    """Pairs of tiles of a query's rows."""
    return max(1, ceil_div(s.rows, 2 * bf16_sm90.TILE_ROWS))


def _cluster_splits(f: Facts, s: Sizes) -> int:
    """Splits of a query: the fewest with the least pairs of tiles a split, while all clusters run at a time."""
    if s.splits is not None:
        return min(s.splits, MAX_CLUSTER)
    work, pairs = _items(s, bf16_sm90.HEADS), _bf16_pairs(s)
    if pairs < CLUSTER_PAIRS and 2 * work > CLUSTER_FULL * f.gpu.sms:
        return 1
    at_once = f.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())
    fit = (n for n, clusters in enumerate(at_once, start=1) if work <= clusters)
    return min(fit, key=lambda n: (ceil_div(pairs, n), n), default=1)


def _clusters_wanted(f: Facts, s: Sizes) -> bool:
    if f.batch_invariant:
        return False
    return _few_heads_clusters_wanted(f, s) if s.h_q <= 16 else _bf16_wanted(s) and _cluster_splits(f, s) > 1


def _few_heads_clusters_wanted(f: Facts, s: Sizes) -> bool:
    """Of up to 16 heads."""
    pairs, fewest = _bf16_pairs(s), s.h_q <= 8
    wanted = CLUSTER_FEWEST_HEADS if fewest else CLUSTER_FEW_HEADS
    if s.splits is not None or (fewest and f.prefill) or not any(pairs >= p and s.queries >= q for p, q in wanted):
        return False
    splits = _cluster_splits(f, s)
    full = splits * s.queries > CLUSTER_FEW_HEADS_FULL * f.gpu.sms
    most = 1 if fewest else CLUSTER_FEW_HEADS_EACH + full  # pairs of a split
    return splits > 1 and ceil_div(pairs, splits) <= most


def _bf16_cluster(f: Facts, s: Sizes) -> Choice:
    splits = max(2, _cluster_splits(f, s))
    return Choice("bf16_cluster_sm90", _cluster_heads(f, s, splits), splits, splits)


def _cluster_heads(f: Facts, s: Sizes, splits: int) -> int:
    """Heads of a work item: the fewest with which all clusters run at a time, or are as many as with the most."""
    at_once = f.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())[splits - 1]
    most = max(at_once, _items(s, bf16_sm90.HEADS))
    return next(heads for heads in bf16_cluster_sm90.HEADS if _items(s, heads) <= most)


def _shares_alike(f: Facts, s: Sizes) -> int:
    """Splits of a query where equal ones, a CTA each, are wanted; otherwise 1."""
    items = _items(s, bf16_sm90.HEADS)
    clusters = f.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())[SHARE_SPLITS - 1]
    fill = f.gpu.sms // items == SHARE_SPLITS and items > clusters
    return SHARE_SPLITS if fill and _bf16_pairs(s) >= SHARE_SPLITS * SHARE_SPLIT_PAIRS and s.h_q > 16 else 1


def _bf16_shares(f: Facts, s: Sizes) -> Choice:
    items = _items(s, bf16_sm90.HEADS)
    splits = _shares_alike(f, s) if s.splits is None else min(s.splits, fp8_sm90.MOST_SPLITS)
    if s.splits is not None or splits > 1:
        return Choice("bf16_shares_sm90", bf16_sm90.HEADS, splits, ctas=items * splits)
    ctas = max(1, min(f.gpu.sms, items * _bf16_pairs(s) // SHARE_LEAST_SPLIT))
    return Choice("bf16_shares_sm90", bf16_sm90.HEADS, EVENLY, ctas=ctas, least_split=SHARE_LEAST_SPLIT)


def _bf16_shares_wanted(f: Facts, s: Sizes) -> bool:
    """Equal splits that fill the GPU, or so many waves of work items that equal shares were measured to be faster."""
    items, sms = _items(s, bf16_sm90.HEADS), f.gpu.sms
    if f.batch_invariant or s.splits is not None:
        return False
    if _shares_alike(f, s) > 1:
        return True
    least, most = _share_waves_few_heads(f, s) if s.h_q <= 16 else SHARE_WAVES
    if not least < items / sms <= most:
        return False
    return bf16_evenly(items, items // s.queries, _bf16_pairs(s), sms, f.prefill, f.uneven)


def _share_waves_few_heads(f: Facts, s: Sizes) -> tuple[float, float]:
    if f.prefill or f.uneven:
        return 1, 1
    waves = SHARE_MOST_WAVES_FEW_HEADS[few_heads_sm90.block_heads(s.h_q)]
    return 1, next((most for rows, most in waves if s.rows >= rows), 1)


def _bf16_wanted(s: Sizes) -> bool:
    """Of more than 16 heads."""
    pairs = _bf16_pairs(s)
    if pairs >= CLUSTER_PAIRS_OFTEN:
        return (s.splits is None and pairs >= CLUSTER_PAIRS_ALWAYS) or _items(s, 32) >= CLUSTER_HALVES
    return _items(s, bf16_sm90.HEADS) >= (CLUSTER_ITEMS if s.h_q > 32 else CLUSTER_HALF_ITEMS)


def _portable(f: Facts, s: Sizes) -> Choice:
    heads, sms = portable.block_heads(s.h_q), f.gpu.sms
    items, steps = _items(s, heads), ceil_div(s.rows, portable.STEP_ROWS)
    splits = s.splits or portable_splits(items, steps, sms)
    if splits == EVENLY:
        ctas = max(1, min(sms, items * steps))
        return Choice("portable", heads, EVENLY, ctas=ctas, least_split=portable.LEAST_SPLIT)
    return Choice("portable", heads, splits)


def _portable_99kb(f: Facts, s: Sizes) -> Choice:
    return _portable(f, s)._replace(kernel="portable_99kb")


def _always(f: Facts, s: Sizes) -> bool:
    return True


def _any(s: Sizes) -> bool:
    return True


def _unsplit(s: Sizes) -> bool:
    return s.splits in (None, 1)


def _may_split(s: Sizes) -> bool:
    return s.splits != 1


def _fp8_rows(f: Facts) -> bool:
    return _on_hopper(f) and f.layout in fp8_sm90.LAYOUTS


def _bf16_rows(f: Facts) -> bool:
    return _on_hopper(f) and not f.layout.quantized


def _flat_bf16_rows(f: Facts) -> bool:
    return _bf16_rows(f) and f.flat


def _rows_of_few_heads(f: Facts) -> bool:
    return _on_hopper(f) and f.layout in few_heads_sm90.LAYOUTS


# The numbers are where a kernel was measured to be the faster one.
TABLE = (
    # Neighbouring queries with few heads that fill half of the GPU in groups.
    Row("bf16_grouped_sm90", _can_group, _takes_group, lambda f, s: _full(f, s) >= LEAST_FULL, _group),
    # V4_FP8, and V32_FP8 of 9 to 16 heads and at most 8 queries.
    Row("fp8_sm90", _fp8_rows, _any, _fp8_wanted_first, _fp8),
    # Flat bf16 rows, queries of 17 to 32 heads that fill somewhat less than two waves.
    Row("bf16_few_heads_sm90", _flat_bf16_rows, _unsplit, _two_queries_wanted, _bf16_few_heads_whole),
    # Flat bf16 rows, a quarter to a third of a wave of work items in equal splits, or somewhat more than half or whole
    # waves.
    Row("bf16_shares_sm90", _flat_bf16_rows, _may_split, _bf16_shares_wanted, _bf16_shares),
    # Flat bf16 rows of more than 8 heads, split over clusters while work items do not fill the GPU.
    Row("bf16_cluster_sm90", _flat_bf16_rows, _may_split, _clusters_wanted, _bf16_cluster),
    # Up to 16 heads, and small prefills: bf16 rows in at most 2 splits, or in decode 4, then all others.
    Row(
        "bf16_few_heads_sm90", _bf16_rows, _any,
        lambda f, s: _few_heads_wanted(f, s) and _bf16_few_heads_wanted(f, s), _bf16_few_heads,
    ),
    Row("few_heads_sm90", _rows_of_few_heads, _any, _few_heads_wanted, _few_heads),
    # Many heads: FP8 rows; flat bf16 rows.
    Row("fp8_sm90", _fp8_rows, _any, _always, _fp8),
    Row("bf16_sm90", _flat_bf16_rows, _unsplit, lambda f, s: _bf16_wanted(s) and not f.batch_invariant, _bf16),
    # Decode of many heads over bf16 rows that are few or not flat.
    Row(
        "bf16_few_heads_sm90", _bf16_rows, _any,
        lambda f, s: not f.prefill and _bf16_few_heads_wanted(f, s), _bf16_few_heads,
    ),
    Row("few_heads_sm90", _rows_of_few_heads, _any, lambda f, s: not f.prefill, _few_heads_splits),
    # Any call: GPUs with much shared memory, any GPU.
    Row("portable", lambda f: f.gpu.shared_kb >= portable.LARGE, _any, _always, _portable),
    Row("portable_99kb", lambda f: True, _any, _always, _portable_99kb),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(row.kernel for row in TABLE))


def choose(facts: Facts, sizes: Sizes, asked: str | None = None, table: Sequence[Row] | None = None) -> Choice:
    """The kernel that serves a call, and how.

    Args:
        asked: the kernel that is to run, by name; None or "": the fastest.
        table: the rows of `TABLE` whose kernels can serve calls with these facts; None: they are looked for.

    Raises:
        ValueError: no kernel has that name, or it cannot serve this call.
    """
    queries = max(1, sizes.queries)
    if facts.batch_invariant:
        sizes = sizes._replace(queries=INVARIANT_QUERIES)
        in_turn = _fp8_rows(facts) and (_fp8_wanted_first(facts, sizes) or not _few_heads_wanted(facts, sizes))
        rows = INVARIANT_ROWS_IN_TURN if in_turn else INVARIANT_ROWS
        splits = sizes.splits or max(1, min(ceil_div(sizes.rows, rows), MAX_CLUSTER))
        sizes = sizes._replace(splits=splits)
    else:
        sizes = sizes._replace(queries=queries)
    able = rows_for(facts) if table is None else table
    if asked:
        row = _asked_row(facts, sizes, asked, able)
    else:
        row = next(row for row in able if row.takes(sizes) and row.wanted(facts, sizes))
    return _in_turn(facts, sizes, queries, row.choice(facts, sizes))


def _asked_row(facts: Facts, sizes: Sizes, asked: str, able: Sequence[Row]) -> Row:
    if asked not in NAMES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(NAMES)}, got {asked!r}")
    row = next((row for row in able if row.kernel == asked and row.takes(sizes)), None)
    if row is None:
        raise ValueError(
            f"{VARIABLE} is {asked}, which cannot serve this call: {'prefill' if facts.prefill else 'decode'} of "
            f"{sizes.h_q} heads over {facts.layout.name} rows of {facts.layout.d_qk}, {sizes.queries} queries, "
            f"compute capability {facts.gpu.capability / 10}"
            + ("" if facts.aligned else ", rows or q not aligned to 16 bytes")
            + ("" if facts.flat else ", rows not in one flat array")
        )
    return row


def rows_for(facts: Facts) -> list[Row]:
    """The rows of `TABLE` whose kernels can serve calls with these facts."""
    return [row for row in TABLE if row.can(facts)]


# Of a choice: the kernel that is asked for, heads, queries, rows, splits that are asked for.
Key = tuple[str | None, int, int, int, int | None]


class Chooser(dict[Key, Choice]):
    """The choices of `choose` for calls of one signature, made when they are asked for.

    A server meets another number of queries at every step, and lists of few lengths, which are whole `USUAL_ROWS`. So
    the choices of `TOGETHER` neighbouring numbers of queries are made at once when such a length comes; for another
    length, when a second one of these numbers does. That takes 2 ms; with the item costs of equal shares up to some 20
    ms.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self._table = rows_for(facts)
        self._met: set[tuple[Any, ...]] = set()  # as keys, with a range of numbers of queries

    def __missing__(self, key: Key) -> Choice:
        """Choose for a number of queries, and for its neighbours."""
        asked, h_q, queries, rows, splits = key
        neighbours = decided_with(queries)
        met = (asked, h_q, neighbours, rows, splits)
        alone = rows % USUAL_ROWS > 0 and met not in self._met
        wanted = (queries,) if alone else (queries, *neighbours)
        if len(self) + len(wanted) > MAX_CHOICES:
            self.clear()
            self._met.clear()
        self._met.add(met)
        made = {n: choose(self.facts, Sizes(h_q, n, rows, splits), asked, self._table) for n in wanted}
        self.update({(asked, h_q, n, rows, splits): choice for n, choice in made.items()})
        return made[queries]


@cache
def chooser(facts: Facts) -> Chooser:
    """The chooser of calls with these facts."""
    return Chooser(facts)
