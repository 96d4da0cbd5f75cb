"""The table of choices, row by row, as on an H200; needs no GPU.

Each number of `choose.py` is held by calls on both of its sides.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from cupy_mla.sizes import looked_up

from cupy_mla.cuda import driver
from cupy_mla.cuda.attention import bf16_cluster_sm90, bf16_grouped_sm90, choose, few_heads_sm90, fp8_sm90
from cupy_mla.cuda.attention.choose import EVENLY, NAMES, TABLE, VARIABLE, Choice, Facts, Row, Sizes
from cupy_mla.cuda.attention.cost import ITEM_COST, TEAM, TOGETHER, Division
from cupy_mla.cuda.driver import Gpu
from cupy_mla.layouts import ATTENTION_LAYOUTS, BF16_512, BF16_576, V4_FP8, V32_FP8, Layout

from . import evenly
from .h200 import CLUSTERS_AT_ONCE, GPU

BF16 = pytest.mark.parametrize("layout", [BF16_576, BF16_512], ids=lambda layout: layout.name)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    """Clusters as on an H200, and the choices of calls that no one forces."""
    monkeypatch.setattr(driver, "clusters_at_once", lambda kernel, device: CLUSTERS_AT_ONCE)
    monkeypatch.delenv(VARIABLE, raising=False)


def prefill(h_q: int, queries: int, rows: int = 2048, *, asked: str | None = None, **facts: Any) -> Choice:
    facts = {"gpu": GPU, "layout": BF16_576, "prefill": True} | facts
    return choose.choose(Facts(**facts), Sizes(h_q, queries, rows), asked)


def decode(
    layout: Layout, h_q: int, queries: int, rows: int = 2048, splits: int | None = None, *,
    asked: str | None = None, **facts: Any,
) -> Choice:  # fmt: skip
    facts = {"gpu": GPU, "layout": layout, "prefill": False} | facts
    return choose.choose(Facts(**facts), Sizes(h_q, queries, rows, splits), asked)


def division(choice: Choice) -> Division:
    """Of `fp8_sm90`."""
    return Division(choice.heads, choice.splits, TEAM if choice.teams else choice.cluster)


def row_of(facts: Facts, sizes: Sizes) -> Row:
    """The row of the table that a call is for."""
    return next(row for row in TABLE if row.can(facts) and row.takes(sizes) and row.wanted(facts, sizes))


# --- every row ------------------------------------------------------------------------------------------------

# What each row in turn is for: a prefill's or decode's layout, heads, queries, and what else is known of it.
FOR_ROWS = [
    ("prefill", BF16_576, 16, 1024, {}),
    ("decode", V4_FP8, 128, 64, {}),
    ("decode", BF16_576, 32, 215, {}),
    ("decode", BF16_576, 64, 150, {}),
    ("decode", BF16_576, 16, 7, {}),
    ("decode", BF16_576, 16, 128, {}),
    ("decode", V32_FP8, 16, 128, {}),
    ("decode", V32_FP8, 128, 64, {}),
    ("prefill", BF16_576, 128, 1024, {}),
    ("decode", BF16_576, 128, 128, {"flat": False}),
    ("decode", BF16_576, 128, 1, {"flat": False}),
    ("decode", V32_FP8, 64, 1, {"aligned": False}),
    ("decode", V32_FP8, 64, 1, {"gpu": Gpu(0, 128, 89, 99)}),
]


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_each_row_is_for_some_calls(number):
    assert len(FOR_ROWS) == len(TABLE)
    kind, layout, h_q, queries, facts = FOR_ROWS[number]
    facts = {"gpu": GPU, "layout": layout, "prefill": kind == "prefill", **facts}
    found = row_of(Facts(**facts), Sizes(h_q, queries, 2048))
    assert found is TABLE[number], f"it is for {found.kernel}"


def test_every_kernel_has_a_name():
    assert NAMES == (
        "bf16_grouped_sm90", "fp8_sm90", "bf16_few_heads_sm90", "bf16_shares_sm90", "bf16_cluster_sm90",
        "few_heads_sm90", "bf16_sm90", "portable", "portable_99kb",
    )  # fmt: skip


# --- query groups ---------------------------------------------------------------------------------------------


def test_how_many_queries_make_a_group():
    assert [bf16_grouped_sm90.group_queries(h) for h in (1, 7, 8, 9, 16, 24, 32)] == [8, 8, 8, 7, 4, 2, 2]


@BF16
@pytest.mark.parametrize(("h_q", "group"), [(1, 8), (8, 8), (9, 7), (16, 4), (32, 2)])
def test_groups_are_for_prefills_that_fill_half_of_the_gpu(layout, h_q, group):
    """66 groups on 132 multiprocessors; 133 groups take two rounds, the second nearly empty: 0.504 of the GPU."""
    least = 65 * group + 1
    assert prefill(h_q, least - 1, layout=layout).kernel != "bf16_grouped_sm90"
    assert prefill(h_q, least, layout=layout).kernel == "bf16_grouped_sm90"
    chosen = prefill(h_q, 133 * group, layout=layout)
    assert (chosen.kernel, chosen.heads, chosen.queries, chosen.splits) == ("bf16_grouped_sm90", 64, group, 1)
    assert chosen.most_rows == 133 / 264


def test_groups_take_up_to_32_heads():
    assert prefill(32, 2048).kernel == "bf16_grouped_sm90"
    assert prefill(33, 2048).kernel == "bf16_sm90"


def test_groups_need_a_scale_that_can_mask_rows():
    assert prefill(16, 2048, groupable=False).kernel == "bf16_few_heads_sm90"
    assert prefill(32, 2048, groupable=False).kernel == "bf16_sm90"
    assert prefill(16, 2048).kernel == "bf16_grouped_sm90"


def test_groups_are_for_prefills():
    assert decode(BF16_576, 16, 2048).kernel == "bf16_few_heads_sm90"


@pytest.mark.parametrize("uneven", [False, True])
def test_what_groups_leave_is_for_another_kernel(uneven):
    """Up to 16 heads for the one for few heads; those with the longest lists first where CTAs take several."""
    few = prefill(16, 132 * 4, uneven=uneven)
    assert few.rest == ("bf16_few_heads_sm90", 16, 2)
    assert few.most_rows == bf16_grouped_sm90.MOST_ROWS_FEW_HEADS
    many = prefill(17, 132 * 3, uneven=uneven)
    assert many.rest == ("bf16_sm90", 64, 1)
    assert many.most_rows == bf16_grouped_sm90.MOST_ROWS
    assert few.longest_first == many.longest_first == uneven


def test_forced_groups_are_worked_on_whatever_they_share(monkeypatch):
    assert prefill(16, 132 * 4).most_rows < 1
    monkeypatch.setenv(VARIABLE, "bf16_grouped_sm90")
    assert prefill(16, 3, asked="bf16_grouped_sm90").most_rows == 1


# --- FP8 rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
@pytest.mark.parametrize("queries", [1, 8, 128, 1000])
def test_v4_rows_are_for_one_kernel(h_q, queries):
    assert decode(V4_FP8, h_q, queries).kernel == "fp8_sm90"


@pytest.mark.parametrize(
    ("h_q", "queries", "kernel"),
    [
        (8, 1, "few_heads_sm90"),
        (9, 1, "fp8_sm90"),
        (9, 8, "fp8_sm90"),
        (9, 9, "few_heads_sm90"),
        (16, 8, "fp8_sm90"),
        (16, 9, "few_heads_sm90"),
        (17, 1, "fp8_sm90"),
        (17, 1000, "fp8_sm90"),
        (128, 1, "fp8_sm90"),
    ],
)
def test_v32_rows_are_for_two(h_q, queries, kernel):
    """Up to 8 queries of 9 to 16 heads are padded to 32."""
    assert decode(V32_FP8, h_q, queries).kernel == kernel


@pytest.mark.parametrize(("h_q", "queries"), [(128, 1), (128, 32), (64, 8), (16, 2)])
def test_fp8_rows_are_split_as_is_cheapest(h_q, queries):
    chosen = decode(V32_FP8, h_q, queries)
    candidates = choose.fp8_candidates(fp8_sm90.HEADS, h_q, 32, CLUSTERS_AT_ONCE, None)
    assert division(chosen) == candidates.cheapest(queries)
    assert chosen.splits > 1
    assert decode(V32_FP8, h_q, queries, splits=7).splits == 7


@pytest.mark.parametrize(
    ("layout", "h_q", "rows", "queries", "heads", "splits", "cluster"),
    [
        (V4_FP8, 128, 1152, 6, 64, 9, TEAM),
        (V4_FP8, 128, 1152, 12, 64, 5, TEAM),
        (V4_FP8, 128, 1152, 15, 64, 4, 4),
        (V4_FP8, 128, 1152, 16, 64, 4, TEAM),
        (V4_FP8, 128, 1152, 21, 64, 3, TEAM),
        (V4_FP8, 128, 1152, 24, 64, 2, 2),
        (V4_FP8, 128, 1152, 40, 64, 1, 1),
        (V4_FP8, 32, 640, 4, 32, 10, 10),
        (V4_FP8, 64, 128, 8, 32, 1, 1),
        (V4_FP8, 64, 256, 15, 32, 4, 4),
        (V4_FP8, 64, 640, 2, 32, 10, 10),
        (V32_FP8, 64, 512, 4, 32, 8, 8),
        (V4_FP8, 64, 640, 8, 32, 5, 5),
        (V4_FP8, 64, 640, 20, 64, 5, 5),
        (V4_FP8, 64, 640, 28, 64, 4, 4),
        (V4_FP8, 64, 640, 36, 64, 3, 3),
        (V4_FP8, 64, 640, 42, 64, 3, TEAM),
        (V4_FP8, 64, 640, 60, 64, 2, 2),
        (V4_FP8, 32, 640, 32, 32, 4, TEAM),
        (V32_FP8, 64, 2048, 4, 32, 16, TEAM),
        (V32_FP8, 64, 2048, 16, 64, 8, TEAM),
        (V32_FP8, 64, 2048, 20, 64, 6, TEAM),
        (V32_FP8, 64, 2048, 24, 64, 5, TEAM),
        (V32_FP8, 64, 2048, 33, 64, 4, TEAM),
        (V32_FP8, 64, 2048, 42, 64, 3, TEAM),
        (V32_FP8, 64, 2048, 50, 64, 2, 2),
        (V32_FP8, 64, 2048, 67, 64, EVENLY, 1),
        (V32_FP8, 64, 2048, 100, 64, 1, 1),
        (V32_FP8, 32, 2048, 41, 32, 3, TEAM),
        (V32_FP8, 128, 2048, 9, 64, 7, TEAM),
        (V32_FP8, 128, 2048, 133, 64, EVENLY, 1),
    ],
)
def test_fp8_splits_that_were_measured_to_be_the_fastest(layout, h_q, rows, queries, heads, splits, cluster):
    """Within 1 % of the fastest that were measured, of 32 or 64 heads: equal shares, clusters and teams."""
    chosen = decode(layout, h_q, queries, rows)
    assert division(chosen) == (heads, splits, cluster)


@pytest.mark.parametrize(
    ("layout", "h_q", "rows", "by_length", "otherwise"),
    [
        (V4_FP8, 128, 1152, (20, 21, 24, 26, 28, 34), (9, 15, 40, 42, 52, 55, 59)),
        (V4_FP8, 64, 640, (67,), (9, 20, 33, 41, 46, 60, 66, 80, 93)),
        (V4_FP8, 32, 640, (67, 69), (52, 58, 80, 84)),
        (V32_FP8, 128, 2048, (15, 17, 21, 31, 33), (6, 34, 40, 47)),
        (V32_FP8, 64, 2048, (19, 22, 42, 47, 60), (9, 67, 72, 80, 98, 102)),
        (V32_FP8, 32, 2048, (37, 60), (67, 75)),
    ],
)
def test_teams_by_length_where_they_were_measured_to_be_faster(layout, h_q, rows, by_length, otherwise):
    """Numbers of queries of random lengths, and not much slower if all lists are full: in teams, and in other ways."""
    chosen = {queries: decode(layout, h_q, queries, rows, uneven=True) for queries in by_length + otherwise}
    teams = Choice("fp8_sm90", 32 if h_q == 32 else 64, EVENLY, ctas=GPU.sms, teams=True)
    assert {queries for queries, choice in chosen.items() if choice == teams} == {*by_length}
    assert not any(chosen[queries].teams for queries in otherwise)


@pytest.mark.parametrize(
    ("layout", "h_q", "rows", "queries", "heads", "splits"),
    [
        (V4_FP8, 32, 640, 4, 32, 10),
        (V4_FP8, 64, 640, 1, 32, 10),
        (V4_FP8, 64, 640, 5, 32, 8),
        (V4_FP8, 64, 640, 18, 32, 3),
        (V4_FP8, 128, 1152, 3, 32, 8),
        (V4_FP8, 128, 1152, 6, 64, 8),
        (V4_FP8, 128, 1152, 7, 64, 8),
        (V32_FP8, 64, 2048, 10, 32, 5),
        (V32_FP8, 128, 2048, 2, 32, 9),
    ],
)
def test_splits_of_random_lengths_that_were_measured_to_be_faster(layout, h_q, rows, queries, heads, splits):
    """More clusters of splits than equal lists have, or smaller ones."""
    assert division(decode(layout, h_q, queries, rows, uneven=True)) == (heads, splits, splits)


# --- few heads ------------------------------------------------------------------------------------------------


@BF16
def test_up_to_16_heads_are_few(layout):
    assert decode(layout, 16, 20).kernel == "few_heads_sm90"
    assert decode(layout, 17, 20).kernel == "bf16_cluster_sm90"


@BF16
@pytest.mark.parametrize("h_q", [9, 16])
def test_few_queries_of_9_to_16_heads_are_for_clusters(layout, h_q):
    """Of six and more CTAs, or of four that fill more than three quarters of the GPU."""
    splits = {n: c.splits for n in range(1, 60) if (c := decode(layout, h_q, n)).kernel == "bf16_cluster_sm90"}
    assert splits == {n: 16 for n in range(1, 8)} | {n: 8 for n in range(8, 16)} | {16: 6, 17: 6} | {
        n: 4 for n in range(25, 31)
    }
    for queries in (1, 7, 30):
        for facts in ({"splits": 16}, {"flat": False}, {"batch_invariant": True}):
            assert decode(layout, h_q, queries, **facts).kernel != "bf16_cluster_sm90"
        assert prefill(h_q, queries, layout=layout).kernel == "bf16_cluster_sm90"


@BF16
@pytest.mark.parametrize("h_q", [1, 8])
@pytest.mark.parametrize(
    ("rows", "first", "last", "splits"),
    [(2048, 1, 7, 16), (1920, 5, 7, 15), (1024, 5, 15, 8), (512, 10, 30, 4), (384, 0, 0, 0)],
)
def test_few_queries_of_up_to_8_heads_are_for_clusters(layout, h_q, rows, first, last, splits):
    """Of a pair of tiles a CTA, in decode."""
    chosen = {n: c.splits for n in range(1, 60) if (c := decode(layout, h_q, n, rows)).kernel == "bf16_cluster_sm90"}
    assert chosen == ({n: splits for n in range(first, last + 1)} if splits else {})
    assert prefill(h_q, 5, rows, layout=layout).kernel != "bf16_cluster_sm90"


@BF16
@pytest.mark.parametrize(
    ("rows", "queries", "splits"),
    [
        (7 * 128 + 1, 1, 8),
        (1024, 6, 8),
        (1024, 15, 8),
        (1024, 16, 4),
        (1024, 30, 4),
        (1024, 36, 3),
        (1024, 45, 0),
        (768, 7, 0),
        (768, 8, 6),
        (512, 7, 0),
        (512, 8, 4),
        (512, 30, 4),
        (512, 44, 2),
        (512, 55, 0),
        (384, 9, 0),
        (384, 12, 3),
        (256, 12, 0),
    ],
)
def test_shorter_lists_of_9_to_16_heads_are_for_clusters(layout, rows, queries, splits):
    """Where they were measured to be the faster kernel: from 8 pairs of tiles, 8 or 10 queries on. 0: they are not."""
    chosen = decode(layout, 16, queries, rows)
    if splits:
        assert (chosen.kernel, chosen.splits, chosen.cluster) == ("bf16_cluster_sm90", splits, splits)
    else:
        assert chosen.kernel != "bf16_cluster_sm90"


@BF16
def test_bf16_rows_in_clusters_of_four_are_for_the_kernel_with_two_warpgroups(layout):
    """As are those in at most two splits; in decode of up to 16 heads."""
    four = Choice("bf16_few_heads_sm90", 8, 4, 4)
    assert [decode(layout, 8, queries) for queries in (23, 28)] == [four, four]
    assert decode(layout, 16, 24) == four._replace(heads=16)
    assert decode(layout, 8, 23, batch_invariant=True).kernel == "few_heads_sm90"
    assert decode(V32_FP8, 8, 23).kernel == "few_heads_sm90"
    assert decode(layout, 8, 31)[1:4] == (8, 4, 1)
    assert decode(layout, 8, 31).kernel == "few_heads_sm90"
    assert prefill(16, 20, layout=layout).kernel == "few_heads_sm90"


@BF16
@pytest.mark.parametrize(
    ("h_q", "most"), [(17, 28), (32, 28), (33, 14), (64, 14), (65, 9), (128, 7)], ids=lambda value: str(value)
)
def test_prefills_of_few_work_items_and_short_lists_are_for_the_kernels_for_few_heads(layout, h_q, most):
    """28 items, each a query and a tile of up to 32 heads, and a pair of tiles. Longer lists are for clusters."""
    few = ("few_heads_sm90", "bf16_few_heads_sm90")
    assert prefill(h_q, most, 128, layout=layout).kernel in few
    assert prefill(h_q, most + 1, 128, layout=layout).kernel not in few
    for queries in (1, most, most + 1):
        assert prefill(h_q, queries, layout=layout).kernel == "bf16_cluster_sm90"


@BF16
@pytest.mark.parametrize("splits", [1, 2])
def test_bf16_rows_in_at_most_two_splits_are_for_a_kernel_of_their_own(layout, splits):
    assert decode(layout, 16, 32, splits=splits).kernel == "bf16_few_heads_sm90"
    assert decode(layout, 16, 32, splits=splits, flat=False).kernel == "bf16_few_heads_sm90"
    assert decode(layout, 16, 32, splits=3).kernel == "few_heads_sm90"
    assert decode(V32_FP8, 16, 32, splits=splits).kernel == "few_heads_sm90"


@BF16
def test_the_splits_that_are_chosen_count_likewise(layout):
    kernels = {}
    for queries in (18, 33, 44, 64, 128, 500):
        chosen = decode(layout, 16, queries)
        kernels[chosen.splits] = chosen.kernel
        assert chosen.kernel == ("bf16_few_heads_sm90" if chosen.splits <= 2 else "few_heads_sm90")
    assert {1, 2} < kernels.keys()


@pytest.mark.parametrize(("h_q", "heads"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_heads_of_a_cta_for_few(h_q, heads):
    for queries in (1, 500):
        assert decode(BF16_576, h_q, queries, flat=False).heads == heads == few_heads_sm90.block_heads(h_q)


@pytest.mark.parametrize("h_q", [8, 16])
def test_two_queries_a_cta_rather_than_two_splits(h_q):
    """Where the GPU has one and a half waves of work items, `few_heads_candidates` thinks otherwise."""
    for queries in (188, 198):
        assert decode(BF16_576, h_q, queries) == Choice("bf16_few_heads_sm90", h_q, queries=2)
        assert choose.few_heads_candidates((h_q,), h_q, 32, CLUSTERS_AT_ONCE, None).cheapest(queries).splits == 2


@BF16
@pytest.mark.parametrize("h_q", [17, 32])
def test_two_queries_a_cta_where_17_to_32_heads_fill_somewhat_less_than_two_waves(layout, h_q):
    two = Choice("bf16_few_heads_sm90", 32, queries=2)
    for queries in (195, 215, 234):
        assert decode(layout, h_q, queries) == decode(layout, h_q, queries, splits=1) == two
        assert decode(layout, h_q, queries, batch_invariant=True) != two
        assert decode(layout, h_q, queries, uneven=True) != two
        assert decode(layout, h_q, queries, rows=2047) != two
        assert prefill(h_q, queries, layout=layout) != two
    assert two not in [decode(layout, h_q, queries) for queries in (150, 180, 257)]
    assert two not in [decode(layout, h, 215) for h in (16, 33)]


@BF16
@pytest.mark.parametrize(("h_q", "most"), [(17, 3), (32, 3), (33, 2), (64, 1), (128, 0)])
def test_few_queries_of_more_heads_have_16_a_cta(layout, h_q, most):
    """While all clusters run at a time, of lists too short for a pair of tiles in each CTA of a full cluster."""
    chosen = [decode(layout, h_q, queries, 15 * 128).heads for queries in range(1, 8)]
    assert chosen[:most] == [16] * most
    assert 16 not in chosen[most:]


def test_two_queries_a_cta_when_there_are_more_than_multiprocessors():
    one, two = (decode(BF16_576, 16, queries, splits=1, uneven=True) for queries in (132, 133))
    assert (one.queries, one.longest_first) == (1, False)
    assert (two.queries, two.longest_first) == (2, True)
    assert not decode(BF16_576, 16, 133, splits=1).longest_first


# --- many heads, bf16 rows ------------------------------------------------------------------------------------


@BF16
@pytest.mark.parametrize(("h_q", "heads"), [
    (17, (16, 16, 16)), (32, (16, 16, 16)), (33, (16, 16, 32)), (64, (16, 32, 32)), (65, (16, 32, 64)),
    (128, (32, 64, 64)),
])  # fmt: skip
def test_flat_rows_are_for_clusters_that_have_a_pair_of_tiles_for_each_cta(layout, h_q, heads):
    """From one query on; of as few heads as leave no more than the 7 work items that run at a time."""
    for queries in (1, 2, 3):
        for rows in (15 * 128 + 1, 2048, 4096):
            assert decode(layout, h_q, queries, rows) == Choice("bf16_cluster_sm90", heads[queries - 1], 16, 16)
        few = decode(layout, h_q, queries, flat=False)
        assert few.kernel == "few_heads_sm90"
        candidates = choose.few_heads_candidates((16, 32), h_q, 32, CLUSTERS_AT_ONCE, None)
        assert tuple(few[1:4]) == tuple(candidates.cheapest(queries))


@BF16
@pytest.mark.parametrize(("h_q", "least"), [(17, 3), (32, 3), (33, 2), (64, 2), (65, 1), (128, 1)])
def test_shorter_lists_are_for_clusters_from_3_work_items_of_32_heads_on(layout, h_q, least):
    """From 8 pairs of tiles on all are."""
    for rows in (257, 384, 512, 7 * 128):
        assert decode(layout, h_q, least, rows).kernel == "bf16_cluster_sm90"
        if least > 1:
            assert decode(layout, h_q, least - 1, rows).kernel == "few_heads_sm90"
            assert decode(layout, h_q, least - 1, splits=16).kernel == "few_heads_sm90"
    assert decode(layout, h_q, 1, 7 * 128 + 1).kernel == "bf16_cluster_sm90"


@BF16
@pytest.mark.parametrize(("h_q", "least"), [(17, 8), (32, 8), (33, 4), (64, 4), (65, 2), (128, 2)])
def test_lists_of_two_pairs_of_tiles_are_for_clusters_from_4_work_items_on(layout, h_q, least):
    """Each a query and a tile of up to 64 heads; up to 32 heads from 8 on."""
    for facts in ({"rows": 256}, {"rows": 256, "splits": 2}):
        assert decode(layout, h_q, least - 1, **facts).kernel in ("few_heads_sm90", "bf16_few_heads_sm90")
        assert decode(layout, h_q, least, **facts).kernel == "bf16_cluster_sm90"


@pytest.mark.parametrize(
    ("queries", "rows", "splits"),
    [
        (4, 2048, 16),
        (4, 512, 4),  # each has a pair of tiles
        (4, 385, 4),
        (4, 384, 3),
        (4, 128, 1),
        (15, 4096, 8),
        (16, 4096, 6),
        (17, 4096, 6),
        (18, 4096, 5),
        (18, 2048, 4),  # four pairs of tiles each, as with five splits
        (23, 4096, 4),
        (31, 4096, 3),
        (33, 4096, 3),
        (33, 512, 2),  # two pairs of tiles each, as with three splits
        (44, 512, 2),
        (45, 512, 1),  # whole items are faster
        (66, 640, 1),
        (45, 641, 2),
        (66, 2048, 2),
    ],
)
def test_clusters_have_the_fewest_splits_that_are_as_short_as_can_be(queries, rows, splits):
    chosen = decode(BF16_576, 64, queries, rows)
    assert chosen.splits == splits
    assert chosen.kernel == ("bf16_sm90" if splits == 1 else "bf16_cluster_sm90")


@BF16
@pytest.mark.parametrize(
    ("h_q", "queries", "rows", "splits"),
    [
        (17, 40, 2048, 3), (32, 44, 2048, 3), (64, 44, 2048, 3), (128, 20, 2048, 3), (128, 22, 2048, 3),
        (64, 40, 641, 3),
    ],
)  # fmt: skip
def test_three_splits_that_fill_the_gpu_are_merged_by_the_last(layout, h_q, queries, rows, splits):
    alike = Choice("bf16_shares_sm90", 64, splits, ctas=queries * (1 + (h_q > 64)) * splits)
    assert decode(layout, h_q, queries, rows) == prefill(h_q, queries, rows, layout=layout) == alike
    assert decode(layout, h_q, queries, rows, uneven=True) == alike
    assert decode(layout, h_q, queries, rows, flat=False).kernel != "bf16_shares_sm90"
    assert decode(layout, h_q, queries, rows, batch_invariant=True).kernel != "bf16_shares_sm90"


@BF16
@pytest.mark.parametrize(("h_q", "queries"), [(17, 34), (32, 39), (64, 37), (128, 19)])
def test_three_splits_are_clusters_where_those_all_run_at_a_time(layout, h_q, queries):
    three = Choice("bf16_cluster_sm90", 32 if h_q <= 32 else 64, 3, 3)
    assert decode(layout, h_q, queries) == decode(layout, h_q, queries, uneven=True) == three


def test_equal_splits_are_not_for_few_heads_or_rows():
    assert decode(BF16_576, 16, 44).kernel == "bf16_few_heads_sm90"
    assert decode(BF16_576, 64, 40, 640).kernel == "bf16_cluster_sm90"
    assert decode(BF16_576, 64, 33).kernel == decode(BF16_576, 64, 45).kernel == "bf16_cluster_sm90"


@BF16
@pytest.mark.parametrize("h_q", [8, 16])
def test_bf16_rows_of_few_heads_in_two_splits_rather_than_three_without_a_cluster(layout, h_q):
    for queries in (40, 44):
        candidates = choose.few_heads_candidates((h_q,), h_q, 32, CLUSTERS_AT_ONCE, None)
        assert candidates.cheapest(queries)[1:] == (3, 1)
        assert decode(layout, h_q, queries) == Choice("bf16_few_heads_sm90", h_q, 2, 2)
        assert decode(layout, h_q, queries, splits=3).splits == 3


@pytest.mark.parametrize("h_q", [1, 8, 9, 16])
def test_v32_of_few_heads_is_divided_evenly_where_the_last_wave_is_not_full(h_q):
    evenly = Choice("few_heads_sm90", 8 if h_q <= 8 else 16, EVENLY, ctas=132, least_split=2)
    for queries in (133, 150, 200, 211, 265, 330, 397, 419):
        assert decode(V32_FP8, h_q, queries) == evenly
        assert decode(V32_FP8, h_q, queries, batch_invariant=True).splits == 4
        assert decode(V32_FP8, h_q, queries, splits=2).splits == 2
        assert decode(BF16_576, h_q, queries, flat=False).splits != EVENLY
    for queries in (20, 70, 132, 212, 230, 264, 331, 396, 420, 1000):
        chosen = decode(V32_FP8, h_q, queries)
        assert (chosen.kernel, chosen.ctas) == ("few_heads_sm90", 0)
    assert decode(V32_FP8, h_q, 133, 1).ctas == 66


@pytest.mark.parametrize("h_q", [1, 8, 9, 16])
def test_v32_of_few_heads_with_lengths_is_divided_evenly_from_half_a_wave_on(h_q):
    for queries in (67, 78, 100, 132, 200, 264, 1000):
        chosen = decode(V32_FP8, h_q, queries, uneven=True)
        assert chosen == Choice("few_heads_sm90", 8 if h_q <= 8 else 16, EVENLY, ctas=132, least_split=2)
    for queries in (20, 66):
        assert decode(V32_FP8, h_q, queries, uneven=True).ctas == 0


def test_v32_of_many_heads_is_not_for_shares_of_few():
    assert decode(V32_FP8, 17, 133).kernel == "fp8_sm90"


# Decode of flat bf16 rows on an H200, by heads and rows: batches that were faster divided evenly, and those that were
# not. Those within 2 % are left out. Of h 8 b 155, h 16 b 164 and h 32 b 190 one of both times is computed from others.
DECODED_EVENLY = {
    (64, 2048): [67, 76, 80, 133, 150, 171, 200],
    (128, 2048): [37, 46, 67, 74, 96, 101, 113, 133, 145, 157, 175, 210, 237],
    (32, 2048): [133, 180, 190],
    (64, 1024): [140],
    (64, 512): [140],
    (128, 512): [72],
    (16, 2048): [133, 144, 148, 155, 164],
    (16, 1024): [140],
    (8, 2048): [133, 140, 147, 155],
}
DECODED_WHOLE = {
    (64, 2048): [94, 105, 128, 226, 232, 264],
    (128, 2048): [50, 66, 118, 132, 192, 250, 264],
    (64, 512): [70, 132, 200],
    (128, 1024): [48],
    (128, 512): [40, 64, 96, 150, 250],
    (32, 2048): [257],
    (16, 2048): [90, 120, 128, 180, 200, 229],
    (8, 2048): [170, 200, 207],
    (8, 1024): [140],
}


@BF16
@pytest.mark.parametrize(("h_q", "rows"), DECODED_EVENLY)
def test_flat_rows_of_no_whole_wave_are_divided_evenly(layout, h_q, rows):
    for queries in DECODED_EVENLY[h_q, rows]:
        assert decode(layout, h_q, queries, rows) == Choice("bf16_shares_sm90", 64, EVENLY, ctas=132, least_split=1)
        assert decode(layout, h_q, queries, rows, flat=False).kernel != "bf16_shares_sm90"
        assert decode(layout, h_q, queries, rows, batch_invariant=True).kernel != "bf16_shares_sm90"
        assert decode(layout, h_q, queries, rows, splits=1).kernel != "bf16_shares_sm90"


@BF16
@pytest.mark.parametrize(("h_q", "rows"), DECODED_WHOLE)
def test_flat_rows_of_nearly_a_whole_wave_are_not_divided(layout, h_q, rows):
    whole = "bf16_sm90" if h_q > 16 else "bf16_few_heads_sm90"
    assert {decode(layout, h_q, queries, rows).kernel for queries in DECODED_WHOLE[h_q, rows]} == {whole}


@BF16
def test_flat_rows_of_unequal_length_are_divided_evenly_elsewhere(layout):
    """Measured with random lengths up to 2048, and with lengths of 1030 or 2048 alike; not with 16 heads."""
    kernels = {queries: decode(layout, 64, queries, uneven=True).kernel for queries in (33, 70, 80, 120, 140, 200, 260)}
    assert kernels == {
        33: "bf16_cluster_sm90", 70: "bf16_shares_sm90", 80: "bf16_shares_sm90", 120: "bf16_sm90",
        140: "bf16_shares_sm90", 200: "bf16_shares_sm90", 260: "bf16_sm90",
    }  # fmt: skip
    assert decode(layout, 16, 140, uneven=True).kernel != "bf16_shares_sm90"


@BF16
@pytest.mark.parametrize(
    ("h_q", "evenly", "whole"),
    [(64, [79, 145, 200, 220], [132]), (128, [42, 47, 77, 100, 113, 151, 170, 180], [57, 66, 132, 190])],
)
def test_small_prefills_of_no_whole_wave_are_divided_evenly(layout, h_q, evenly, whole):
    assert {prefill(h_q, queries, layout=layout).kernel for queries in evenly} == {"bf16_shares_sm90"}
    assert {prefill(h_q, queries, layout=layout).kernel for queries in whole} == {"bf16_sm90"}
    assert prefill(h_q, 2048, layout=layout).kernel == "bf16_sm90"


def test_splits_that_the_caller_wants():
    assert decode(BF16_576, 64, 30, splits=1).kernel == "bf16_sm90"
    assert decode(BF16_576, 64, 30, splits=2) == Choice("bf16_cluster_sm90", 32, 2, 2)
    assert decode(BF16_576, 64, 30, splits=16) == Choice("bf16_cluster_sm90", 64, 16, 16)
    assert decode(BF16_576, 64, 30, splits=17) == Choice("bf16_cluster_sm90", 64, 16, 16)


def test_long_lists_first_when_ctas_take_several():
    def of_whole_items(h_q: int, queries: int, uneven: bool) -> bool:
        return prefill(h_q, queries, uneven=uneven, asked="bf16_sm90").longest_first

    assert not of_whole_items(64, 132, uneven=True)
    assert of_whole_items(64, 133, uneven=True)
    assert not of_whole_items(64, 133, uneven=False)
    assert of_whole_items(128, 67, uneven=True)


# --- batch invariance -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("h_q", [8, 16, 32, 64, 128])
def test_invariant_choices_do_not_depend_on_the_batch(layout, h_q):
    """But for who takes the splits of a work item: a cluster, or a CTA in turn, to the same bits."""
    chosen = {decode(layout, h_q, queries, batch_invariant=True) for queries in (1, 2, 8, 9, 33, 100, 133, 1000)}
    assert len({(c.kernel, c.heads, c.splits) for c in chosen}) == 1
    assert len({(c.cluster, c.ctas) for c in chosen if c.cluster > 1}) <= 1
    if h_q >= 64 and layout.quantized:
        assert {c.cluster for c in chosen} == {1, 3}
    flat = {decode(layout, h_q, 4, batch_invariant=True, flat=flat) for flat in (True, False)}
    assert len(flat) == 1


@pytest.mark.parametrize(
    ("layout", "h_q", "kernel"),
    [
        (BF16_576, 16, "few_heads_sm90"),
        (BF16_576, 128, "few_heads_sm90"),
        (V32_FP8, 16, "few_heads_sm90"),
        (V32_FP8, 17, "fp8_sm90"),
        (V4_FP8, 8, "fp8_sm90"),
    ],
)
def test_kernels_of_invariant_calls(layout, h_q, kernel):
    """Also where another kernel would be faster for few splits: it depends on the queries."""
    for splits in (None, 1, 2):
        assert decode(layout, h_q, 1, splits=splits, batch_invariant=True).kernel == kernel


@pytest.mark.parametrize(
    ("rows", "in_turn", "splits"),
    [
        (0, 1, 1), (1, 1, 1), (512, 1, 1), (513, 1, 2), (704, 1, 2), (705, 2, 2), (2048, 3, 4), (7681, 11, 16),
        (8192, 12, 16), (11265, 16, 16), (100_000, 16, 16),
    ],
)  # fmt: skip
def test_splits_of_invariant_calls_have_so_many_rows(rows, in_turn, splits):
    """More where a CTA of fp8_sm90 can take them in turn."""
    for layout, h_q in ((V32_FP8, 128), (V32_FP8, 17), (V4_FP8, 128), (V4_FP8, 8)):
        assert decode(layout, h_q, 3, rows, batch_invariant=True).splits == in_turn
    for layout, h_q in ((BF16_576, 128), (BF16_576, 8), (V32_FP8, 16), (V32_FP8, 1)):
        assert decode(layout, h_q, 3, rows, batch_invariant=True).splits == splits
    assert decode(V32_FP8, 128, 3, rows, 5, batch_invariant=True).splits == 5


def test_invariant_calls_are_cut_up_as_if_for_32_queries():
    """64 heads are 32 a CTA with 1 query, but 64 a CTA with 32."""
    heads = {queries: decode(V32_FP8, 64, queries, splits=4).heads for queries in (1, 32)}
    assert heads == {1: 32, 32: 64}
    for queries in (1, 8, 32, 39):
        assert decode(V32_FP8, 64, queries, batch_invariant=True) == Choice("fp8_sm90", 64, 3, 3)


@pytest.mark.parametrize(
    ("h_q", "queries", "ctas"),
    [
        (64, 66, 0),
        (64, 100, 100),
        (64, 128, 128),
        (64, 133, 0),  # two items for a CTA, where clusters have five rounds
        (128, 32, 0),
        (128, 64, 128),
        (128, 128, 132),
    ],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_splits_of_large_batches_are_taken_in_turn(h_q, queries, ctas, batch_invariant):
    """As measured on an H200 with 2048 rows, for calls that name splits as well."""
    cluster = 1 if ctas else 4
    chosen = decode(V32_FP8, h_q, queries, splits=4, batch_invariant=batch_invariant)
    assert chosen == Choice("fp8_sm90", 64, 4, cluster, ctas)


# --- what no kernel for Hopper can serve ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "shared_kb", "kernel"),
    [
        (80, 163, "portable"),
        (86, 99, "portable_99kb"),
        (87, 163, "portable"),
        (89, 99, "portable_99kb"),
        (100, 227, "portable"),
        (103, 227, "portable"),
        (120, 99, "portable_99kb"),
    ],
)
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: layout.name)
def test_other_gpus_run_the_portable_kernel(layout, capability, shared_kb, kernel):
    gpu = Gpu(0, 132, capability, shared_kb)
    for h_q, heads in ((16, 16), (32, 32), (33, 64), (128, 64)):
        chosen = decode(layout, h_q, 4, gpu=gpu)
        assert (chosen.kernel, chosen.heads, chosen.cluster) == (kernel, heads, 1)
        assert chosen.splits > 1
        if not layout.quantized:
            chosen = prefill(h_q, 2048, layout=layout, gpu=gpu)
            assert chosen == Choice(kernel, heads, EVENLY, ctas=132, least_split=2)


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: layout.name)
def test_unaligned_rows_run_the_portable_kernel(layout):
    assert decode(layout, 64, 64, aligned=False).kernel == "portable"
    if not layout.quantized:
        assert prefill(16, 2048, layout=layout, aligned=False).kernel == "portable"


def test_splits_of_the_portable_kernel():
    assert decode(V32_FP8, 128, 1, aligned=False, splits=9).splits == 9
    assert decode(V32_FP8, 64, 132, aligned=False) == Choice("portable", 64)
    evenly = decode(V32_FP8, 64, 100, aligned=False)
    assert evenly == Choice("portable", 64, EVENLY, ctas=132, least_split=2)
    assert decode(V32_FP8, 64, 100, aligned=False, batch_invariant=True).ctas == 0


# --- CUPY_MLA_KERNELS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", NAMES)
def test_a_kernel_that_is_asked_for_runs(asked):
    """Whatever would be faster."""
    chosen = set()
    for layout in ATTENTION_LAYOUTS:
        for h_q in (1, 16, 32, 64, 128):
            for queries in (1, 40, 1000):
                with suppress(ValueError):
                    chosen.add(decode(layout, h_q, queries, asked=asked).kernel)
                with suppress(ValueError):
                    chosen.add(prefill(h_q, queries, layout=BF16_512, asked=asked).kernel)
    assert chosen == {asked}


@pytest.mark.parametrize("asked", ["few_heads", "sm90", "grouped", "Portable", "portable ", "0"])
def test_a_name_that_does_not_exist_is_an_error(asked):
    with pytest.raises(ValueError, match=rf"^CUPY_MLA_KERNELS must be one of .*bf16_sm90.*portable.*, got '{asked}'$"):
        decode(V32_FP8, 64, 1, asked=asked)


@pytest.mark.parametrize(
    ("asked", "call"),
    [
        ("bf16_sm90", lambda asked: decode(V32_FP8, 64, 1, asked=asked)),
        ("bf16_sm90", lambda asked: decode(BF16_576, 64, 1, splits=2, asked=asked)),
        ("bf16_sm90", lambda asked: decode(BF16_576, 64, 1, flat=False, asked=asked)),
        ("bf16_cluster_sm90", lambda asked: decode(BF16_576, 64, 1, splits=1, asked=asked)),
        ("bf16_cluster_sm90", lambda asked: decode(BF16_576, 64, 1, flat=False, asked=asked)),
        ("bf16_few_heads_sm90", lambda asked: decode(V32_FP8, 16, 1, asked=asked)),
        ("few_heads_sm90", lambda asked: decode(V4_FP8, 16, 1, asked=asked)),
        ("fp8_sm90", lambda asked: decode(BF16_576, 16, 1, asked=asked)),
        ("fp8_sm90", lambda asked: prefill(64, 100, asked=asked)),
        ("bf16_grouped_sm90", lambda asked: decode(BF16_576, 16, 1000, asked=asked)),
        ("bf16_grouped_sm90", lambda asked: prefill(33, 1000, asked=asked)),
        ("bf16_grouped_sm90", lambda asked: prefill(16, 1000, groupable=False, asked=asked)),
        *((name, lambda asked: prefill(16, 9, gpu=Gpu(0, 132, 100, 227), asked=asked)) for name in NAMES[:-2]),
        *((name, lambda asked: prefill(16, 9, aligned=False, asked=asked)) for name in NAMES[:-2]),
        ("portable", lambda asked: prefill(16, 9, gpu=Gpu(0, 132, 120, 99), asked=asked)),
    ],
)
def test_a_kernel_that_cannot_serve_the_call_is_an_error(asked, call):
    with pytest.raises(ValueError, match=f"^CUPY_MLA_KERNELS is {asked}, which cannot serve this call: "):
        call(asked)


def test_the_error_says_what_the_call_is_like():
    with pytest.raises(ValueError, match=r"decode of 64 heads over bf16 rows of 576, 3 queries, .*9\.0, rows not in"):
        decode(BF16_576, 64, 3, flat=False, asked="bf16_sm90")
    with pytest.raises(ValueError, match=r"prefill of 8 heads .* rows or q not aligned to 16 bytes$"):
        prefill(8, 3, aligned=False, asked="bf16_sm90")


def test_a_chooser_looks_at_the_environment_at_every_call(monkeypatch):
    chosen = choose.Chooser(Facts(GPU, BF16_576, prefill=True))

    def chooser(*sizes: int | None) -> Choice:
        return looked_up(chosen, choose.asked_kernel, *sizes)

    fastest = chooser(64, 2048, 1024, None)
    assert fastest.kernel == "bf16_sm90"
    monkeypatch.setenv(VARIABLE, "portable")
    assert chooser(64, 2048, 1024, None).kernel == "portable"
    monkeypatch.setenv(VARIABLE, "")
    assert chooser(64, 2048, 1024, None) == fastest
    monkeypatch.setenv(VARIABLE, "portabel")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_KERNELS must be one of"):
        chooser(64, 2048, 1024, None)
    monkeypatch.delenv(VARIABLE)
    assert chooser(64, 2048, 1024, None) is fastest


def test_an_empty_value_is_none_for_groups_as_well(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    assert prefill(16, 132 * 4).most_rows == bf16_grouped_sm90.MOST_ROWS_FEW_HEADS


@pytest.mark.parametrize("lengths", [1, 30])
def test_a_chooser_does_not_grow_with_the_traffic(monkeypatch, lengths):
    monkeypatch.setattr(choose, "MAX_CHOICES", 1000)
    chooser = choose.Chooser(Facts(GPU, V32_FP8, prefill=False))
    for step in range(200):
        assert chooser[None, 128, 1 + 7 * step, 64 * (1 + step % lengths), None].kernel == "fp8_sm90"
        assert len(chooser) <= 1000


def test_choices_of_many_batches_are_those_of_each(rng):
    facts = Facts(GPU, V32_FP8, prefill=False)
    chooser = choose.Chooser(facts)
    for queries in map(int, rng.permutation(1500)[:60] + 1):
        assert chooser[None, 64, queries, 2048, None] == choose.choose(facts, choose.Sizes(64, queries, 2048))


@pytest.mark.parametrize(("rows", "calls"), [(2048, 1), (2000, 2)], ids=["usual length", "another one"])
def test_choices_of_many_batches_are_made_together(monkeypatch, rows, calls):
    """At once for lengths that come again, and when they do for all others."""
    chooser = choose.Chooser(Facts(GPU, V32_FP8, prefill=False))
    for queries in range(1, 1 + calls):
        assert len(chooser) < TOGETHER
        assert chooser[None, 64, queries, rows, None].kernel == "fp8_sm90"
    monkeypatch.setattr(choose, "choose", lambda *arguments: pytest.fail("is known"))
    assert {chooser[None, 64, queries, rows, None].kernel for queries in range(1, TOGETHER + 1)} == {"fp8_sm90"}


def test_clusters_are_counted_for_the_kernels_that_have_them(monkeypatch):
    """A GPU with other counts than an H200's gets other splits."""
    asked = []

    def counts(kernel, device):
        asked.append(kernel)
        return tuple(132 // n for n in range(1, 17))

    monkeypatch.setattr(driver, "clusters_at_once", counts)
    assert decode(BF16_576, 64, 16, 4096).splits == 8
    assert asked == [bf16_cluster_sm90.cluster_kernel()] * len(asked) != []


def test_the_end_of_lists_is_looked_for_in_long_prefills():
    assert not prefill(64, 8 * 132 - 1).counted
    assert prefill(64, 8 * 132).counted
    assert prefill(128, 4 * 132).counted
    assert not prefill(64, 2000, uneven=True).counted


def test_items_of_shares_cost_what_makes_the_slowest_share_fast():
    """With the usual cost, 77 and 168 items have a CTA with a pair of tiles more than need be."""
    assert {decode(V32_FP8, 64, queries).splits for queries in (67, 77, 168)} == {EVENLY}
    assert decode(V32_FP8, 64, 67).item_cost == decode(V32_FP8, 32, 77).item_cost == ITEM_COST
    assert ITEM_COST not in (decode(V32_FP8, 64, 77).item_cost, decode(V32_FP8, 64, 168).item_cost)
    assert decode(V32_FP8, 128, 84).item_cost == decode(V32_FP8, 64, 168).item_cost


def test_more_splits_than_a_cta_merges_are_fewer():
    chosen = decode(V32_FP8, 64, 3, rows=100_000, splits=1000)
    assert (chosen.splits, chosen.ctas) == (256, 3 * (64 // chosen.heads) * 256)


@pytest.mark.parametrize(("kernel", "layout"), [("bf16_shares_sm90", BF16_576), ("fp8_sm90", V32_FP8)])
def test_the_kernels_tests_divide_small_calls_over_many_ctas(replace_in_choose, kernel, layout):
    facts, sizes = Facts(GPU, layout, prefill=False), Sizes(64, 3, 700)
    before = choose.chooser(facts)[(None, *sizes)]
    replace_in_choose("TABLE", evenly.table(kernel, heads=64))
    assert before.splits != EVENLY
    assert choose.choose(facts, sizes, kernel) == Choice(kernel, 64, EVENLY, ctas=18, least_split=1, cut_cost=0)
