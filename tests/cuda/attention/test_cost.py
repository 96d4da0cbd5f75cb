"""How launches are cut up: divisions, and the cheapest of them."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention import fp8_sm90
from cupy_mla.cuda.attention.cost import (
    EVENLY,
    FEW_CONSUMERS,
    FP8_LEAST_SPLIT,
    ITEM_COST,
    PAIR_COST,
    SHARE_COSTS,
    SHARE_GAIN,
    SHARE_ITEM,
    SHARE_LEFT,
    SHARE_MERGED,
    SHARE_RESULTS,
    TEAM,
    TOGETHER,
    Division,
    bf16_evenly,
    divisions,
    few_heads_candidates,
    fp8_candidates,
    fp8_in_turn,
    fp8_item_cost,
    portable_splits,
)
from cupy_mla.cuda.kernel import read_source

from .h200 import CLUSTERS_AT_ONCE


def test_a_portable_launch_that_fills_the_gpu_is_not_split():
    assert portable_splits(132, 64, 132) == portable_splits(264, 64, 132) == 1


@pytest.mark.parametrize("ctas", [67, 100, 133, 200, 300])
def test_portable_rows_are_divided_evenly_where_no_wave_is_full(ctas):
    assert portable_splits(ctas, 64, 132) == EVENLY


def test_the_portable_kernels_own_test_reaches_even_shares():
    """`test_portable.py`: 70 queries of 128 heads, 500 rows, without a number of splits."""
    assert portable_splits(140, 16, 132) == EVENLY


def test_a_portable_launch_of_few_ctas_has_many_splits():
    """No CTA then merges many partial results."""
    assert portable_splits(1, 64, 132) >= 16
    assert portable_splits(8, 64, 132) >= 8


@pytest.mark.parametrize(
    ("ctas", "measured"),  # us by splits, V32 of 64 and 128 heads, 2048 rows
    [
        (20, {0: 61, 3: 61, 6: 40, 7: 62, 12: 52}), (40, {0: 75, 1: 154, 3: 66, 4: 97, 6: 78}),
        (100, {0: 142, 1: 158, 2: 177}), (160, {0: 213, 1: 317, 2: 266}), (200, {0: 256, 1: 310, 2: 349}),
    ],
)  # fmt: skip
def test_the_portable_kernel_is_divided_as_was_fastest(ctas, measured):
    assert portable_splits(ctas, 64, 132) == min(measured, key=measured.__getitem__)


@pytest.mark.parametrize("steps", [0, 1, 2, 63])
@pytest.mark.parametrize("ctas", [1, 7, 131, 132, 1000])
def test_bounds_of_the_portable_kernels_splits(ctas, steps):
    splits = portable_splits(ctas, steps, 132)
    assert splits == EVENLY or 1 <= splits <= max(1, steps)
    if ctas % 132 == 0:
        assert splits == 1


def fp8(tiles: int, splits: int | None):
    return fp8_candidates(fp8_sm90.HEADS, 16, tiles, CLUSTERS_AT_ONCE, splits)


def few_heads(tiles: int, splits: int | None):
    return few_heads_candidates((16,), 16, tiles, CLUSTERS_AT_ONCE, splits)


@pytest.mark.parametrize("candidates", [fp8, few_heads])
@pytest.mark.parametrize("queries", [1, 3, 148, 5000])
@pytest.mark.parametrize("tiles", [0, 1, 2, 5, 33, 256, 4000])
def test_every_split_has_a_tile(candidates, queries, tiles):
    chosen = candidates(tiles, None).cheapest(queries)
    if chosen.splits == EVENLY:
        assert candidates is fp8
        assert chosen.cluster == 1
        assert tiles > 1
    else:
        assert 1 <= chosen.splits <= max(tiles, 1)
        assert chosen.splits == chosen.partials * (chosen.cluster or chosen.splits)
    assert candidates(tiles, 7).cheapest(queries).splits == 7


@pytest.mark.parametrize("candidates", [fp8, few_heads])
@pytest.mark.parametrize(("least", "most"), [(1, 32), (2, 16), (8, 16), (32, 4), (132, 1)])
def test_larger_batches_are_split_less(candidates, least, most):
    """2048 rows; a batch that fills the GPU is not split. Rows that are divided evenly are in few splits, too."""
    splits = [candidates(32, None).cheapest(queries).splits for queries in (least, 2 * least)]
    assert splits[1] <= splits[0] <= most or splits[0] == EVENLY


@pytest.mark.parametrize(
    ("h_q", "queries", "splits"),
    [
        (64, 66, 2),  # half a wave of clusters of two
        (64, 67, EVENLY),  # just over
        (64, 80, EVENLY),
        (64, 132, 1),  # whole waves are not split
        (64, 133, EVENLY),
        (64, 200, EVENLY),
        (64, 264, 1),
        (128, 66, 1),
        (128, 67, EVENLY),
        (128, 133, EVENLY),
        (128, 132, 1),
        (32, 67, EVENLY),
        (32, 130, 1),
        (32, 133, EVENLY),
    ],
)
def test_fp8_rows_of_no_whole_wave_are_divided_evenly(h_q, queries, splits):
    """2048 rows, as measured on an H200."""
    chosen = fp8_candidates(fp8_sm90.HEADS, h_q, 32, CLUSTERS_AT_ONCE, None).cheapest(queries)
    assert chosen.splits == splits


def test_lists_of_unequal_length_are_divided_evenly_sooner():
    even = [
        sum(
            fp8_candidates(fp8_sm90.HEADS, 128, 18, CLUSTERS_AT_ONCE, None, uneven).cheapest(queries).splits == EVENLY
            for queries in range(1, 265)
        )
        for uneven in (False, True)
    ]
    assert even[0] < even[1]


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("head_tiles", [1, 2])
@pytest.mark.parametrize("pairs", [8, 16, 32])
def test_whole_waves_of_bf16_rows_are_not_divided(prefill, head_tiles, pairs):
    """One work item more than a wave is."""
    for waves in (1, 2):
        whole, more = (bf16_evenly(132 * waves + n, head_tiles, pairs, 132, prefill) for n in (0, 1))
        assert not whole
        assert more
    assert not bf16_evenly(133, head_tiles, 1, 132, prefill)  # a merge takes longer than a pair


@pytest.mark.parametrize("candidates", [fp8, few_heads])
def test_batches_that_are_decided_ahead_are_like_those_that_are_not(candidates, monkeypatch):
    ahead = [candidates(32, None).cheapest(queries) for queries in range(1, TOGETHER + 3)]
    made = candidates(32, None)
    monkeypatch.setattr("cupy_mla.cuda.attention.cost.TOGETHER", 1)
    assert [made.cheapest(queries) for queries in range(1, TOGETHER + 3)] == ahead


def test_divisions():
    """Each number of splits alone and in the largest clusters that it can be cut into."""
    found = {(d.splits, d.cluster) for d in divisions((16,), 64, None).all}
    assert {(1, 1), (2, 1), (2, 2), (12, 12), (16, 16), (17, 1), (64, 16), (64, 1)} <= found
    assert not {(17, 17), (32, 32), (12, 6)} & found
    assert divisions((32, 64), 9, 6).all == [
        Division(32, 6, 1),
        Division(32, 6, 6),
        Division(64, 6, 1),
        Division(64, 6, 6),
    ]


def test_partial_results():
    assert Division(64, 1, 1).partials == Division(64, 16, 16).partials == Division(64, 3, TEAM).partials == 1
    assert Division(64, 32, 16).partials == 2


def test_every_size_of_cta_has_its_figures():
    candidates = [few_heads_candidates((heads,), heads, 32, CLUSTERS_AT_ONCE, None) for heads in FEW_CONSUMERS]
    assert [c.cheapest(1).heads for c in candidates] == list(FEW_CONSUMERS)


@pytest.mark.parametrize("tiles", [1, 7, 32, 140])
def test_a_batch_asked_for_first_and_one_asked_for_later_agree(tiles):
    """The first is decided alone, the others together."""
    for queries in (1, 5, 66, 512, 513):
        first = few_heads_candidates.__wrapped__((16,), 16, tiles, CLUSTERS_AT_ONCE, None)
        later = few_heads_candidates.__wrapped__((16,), 16, tiles, CLUSTERS_AT_ONCE, None)
        later.cheapest(3)
        assert first.cheapest(queries) == later.cheapest(queries) == later.cheapest(queries)


def slowest_share(items: int, pairs: int, ctas: int, item_cost: int) -> float:
    """How long the slowest share of `fp8_sm90` takes, in the time of a pair of tiles."""
    cost = item_cost + PAIR_COST * pairs

    def begin(cta: int) -> tuple[int, int]:
        """The item and the pair before which a share begins."""
        item, at = divmod(items * cost * cta // ctas, cost)
        pair = (max(at - item_cost, 0) + PAIR_COST // 2) // PAIR_COST
        if pair < FP8_LEAST_SPLIT:
            return item, 0
        return (item + 1, 0) if pairs - pair < FP8_LEAST_SPLIT else (item, pair)

    def time(cta: int) -> float:
        (first, before), (last, end) = begin(cta), begin(cta + 1)
        left, finished = end > 0, last - first
        total = (last - first) * pairs + end - before + (finished + left) * SHARE_ITEM
        return total + finished * SHARE_RESULTS + left * SHARE_LEFT + (before > 0) * SHARE_MERGED

    return max(map(time, range(ctas)))


@pytest.mark.parametrize("pairs", [1, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("ctas", [6, 78, 132])
def test_the_item_cost_is_that_of_the_fastest_division(pairs, ctas):
    changed = 0
    for items in range(1, 3 * ctas, 7):
        tried = range(SHARE_COSTS if items >= ctas else ITEM_COST + 1)
        times = [slowest_share(items, pairs, ctas, cost) for cost in tried]
        found = fp8_item_cost(items, pairs, ctas)
        if found == ITEM_COST:
            assert times[ITEM_COST] * (1.0 - SHARE_GAIN) <= min(times) * (1.0 + 1e-9)
        else:
            assert times[found] == pytest.approx(min(times))
        changed += found != ITEM_COST
    assert changed or pairs < 2 * FP8_LEAST_SPLIT


def test_an_item_of_shares_costs_no_more_than_usual_where_there_are_few():
    """With a cost of 17, 96 items of 16 pairs take 81 us for 77.5, though no share has more to do."""
    assert max(fp8_item_cost(items, 16, 132) for items in range(1, 132)) == fp8_item_cost(96, 16, 132) == ITEM_COST
    assert fp8_item_cost(143, 16, 132) > ITEM_COST


def test_shares_have_the_kernels_cost_of_a_pair():
    assert f"PAIR_COST = {PAIR_COST};" in read_source("attention/division/shares.cuh")


@pytest.mark.parametrize(("sms", "largest"), [(78, 10), (16, 14), (6, 6)])
def test_clusters_that_a_gpu_never_runs_are_not_chosen(sms: int, largest: int) -> None:
    """As on a part of a GPU, or where a GPC has fewer than 16 SMs."""
    at_once = tuple(sms // n if n <= largest else 0 for n in range(1, 17))
    for tiles in (4, 8, 32):
        for queries in (1, 2, 4, 16, 100):
            found = [
                *(fp8_candidates((32, 64), h_q, tiles, at_once, None).cheapest(queries) for h_q in (16, 64, 128)),
                *(few_heads_candidates((h_q,), h_q, tiles, at_once, None).cheapest(queries) for h_q in (8, 16, 32)),
            ]
            assert [division for division in found if division.cluster > largest] == []
    assert fp8_in_turn(64, 1, 32, 16, at_once)
