"""Divisions as values and as text, and how many CTAs and how much memory they take."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.divide import (
    HALF_PARTIAL_BYTES,
    ITEM_COST,
    PAIR_COST,
    Clusters,
    Segments,
    Shares,
    Teams,
    Whole,
    division,
    largest_cluster,
    parse,
    split_numbers,
    text_of,
)
from cupy_mla.cuda.attention.kernels.bf16_shares_sm90 import slowest_share
from cupy_mla.cuda.attention.problem import Problem
from cupy_mla.cuda.kernel import kernels_root
from cupy_mla.cuda.program import Pointer
from cupy_mla.layouts import V32_FP8

from .h200 import GPU

DIVISIONS = [
    (Whole(64), "whole(heads=64)"),
    (Whole(16, queries=2), "whole(heads=16, queries=2)"),
    (Clusters(32, 8, 4), "clusters(heads=32, splits=8, cluster=4)"),
    (Shares(64), "shares(heads=64)"),
    (Shares(64, ctas=7, least_split=1, item_cost=0), "shares(heads=64, ctas=7, least_split=1, item_cost=0)"),
    (Segments(64, 3), "segments(heads=64, splits=3)"),
    (Teams(32), "teams(heads=32)"),
    (Teams(32, 5), "teams(heads=32, splits=5)"),
]


@pytest.mark.parametrize(("value", "text"), DIVISIONS, ids=[text for _, text in DIVISIONS])
def test_a_division_prints_itself_and_is_read_again(value, text):
    assert str(value) == text
    for written in (text, text.replace(" ", ""), text_of(value, whole=True)):
        read = division(written)
        assert (read, type(read)) == (value, type(value))


def test_a_kind_may_come_with_some_of_its_fields():
    assert parse("teams") == (Teams, {})
    assert parse(" clusters( splits = 4 ) ") == (Clusters, {"splits": 4})


@pytest.mark.parametrize(
    "text", ["", "teem", "teams(", "teams()x", "teams(4)", "teams(split=4)", "teams(splits=many)", "whole(splits=2)"]
)
def test_text_that_is_no_division_is_an_error(text):
    with pytest.raises(ValueError, match=r"^(a division is one of|the fields of)"):
        parse(text)


def test_a_division_needs_the_fields_without_defaults():
    with pytest.raises(ValueError, match="lacks heads, cluster"):
        division("clusters(splits=4)")


@pytest.mark.parametrize(("parts", "most"), [(1, 16), (2, 16), (16, 16), (17, 16), (32, 16), (32, 132), (7, 3)])
def test_numbers_of_splits_are_the_least_with_so_few_parts_each(parts, most):
    found = [1, *split_numbers(parts, most)]
    for splits in range(1, min(parts, most) + 1):
        of = max(n for n in found if n <= splits)
        assert -(-parts // of) == -(-parts // splits)  # no other number has shorter splits
    assert len({-(-parts // n) for n in found}) == len(found)


def test_the_largest_cluster_of_splits():
    assert [largest_cluster(n) for n in (1, 7, 16, 17, 32, 34, 1024)] == [1, 7, 16, 1, 16, 2, 16]


PROBLEM = Problem(GPU, V32_FP8, False, heads=64, queries=20, entries=2048)
EACH = 64 * HALF_PARTIAL_BYTES


def nbytes(pointer: Pointer) -> int:
    return pointer.buffer.nbytes


def test_memory_for_partial_results():
    """Of each CTA that leaves some; and a number of the run where CTAs say that they are there."""
    clusters = Clusters(64, 8, 4).memory(PROBLEM, EACH)
    assert nbytes(clusters["cluster_parts"]) == 20 * 8 * EACH + 4 * 2 * 20 * 64 * (512 + 2)
    assert clusters["part_lse"].offset - clusters["part_out"].offset == 4 * 2 * 20 * 64 * 512
    assert Clusters(64, 4, 1).memory(PROBLEM, EACH)["part_out"].offset == 0
    assert nbytes(Segments(64, 3).memory(PROBLEM, EACH)["cluster_parts"]) == 20 * 3 * EACH
    teams, by_length = Teams(64, 3).memory(PROBLEM, EACH), Teams(64).memory(PROBLEM, EACH)
    assert nbytes(teams["cluster_parts"]) == 60 * (EACH + 16)
    assert nbytes(by_length["cluster_parts"]) == 132 * (EACH + 16)
    assert teams["ready"].offset == 60 * EACH
    assert "nonce" in teams


def test_shares_are_no_shorter_than_a_split_may_be():
    """And no more than are asked for."""
    assert Shares(64).filled(PROBLEM, 132, least_split=2).ctas == 132
    few = PROBLEM._replace(queries=2)
    assert Shares(64).filled(few, 132, least_split=2).ctas == 2 * 16 // 2
    assert Shares(64, least_split=1).filled(few, 132, least_split=2).ctas == 2 * 16
    assert Shares(64, ctas=7).filled(few, 132, least_split=2).ctas == 7
    assert Shares(64, splits=3).filled(few, 132, least_split=2).ctas == 2 * 3
    assert Shares(64).filled(few._replace(queries=1, entries=0), 132, least_split=2).ctas == 1


def test_shares_have_the_kernels_cost_of_a_pair():
    assert "PAIR_COST = 8;" in (kernels_root() / "attention/division/find_share.cuh").read_text()


def boundary(items: int, pairs: int, ctas: int, cta: int) -> tuple[int, int]:
    """Before which item and pair a share begins, as `even_boundary` in shares.cuh finds it."""
    cost = ITEM_COST + PAIR_COST * pairs
    item, rest = divmod(items * cost * cta // ctas, cost)
    pair = (max(rest - ITEM_COST, 0) + PAIR_COST // 2) // PAIR_COST
    return (item, pair) if pair < pairs else (item + 1, 0)


@pytest.mark.parametrize(
    ("items", "pairs", "ctas"), [(402, 2, 132), (430, 3, 132), (90, 11, 132), (132, 5, 132), (1, 16, 16), (7, 1, 7)]
)
def test_the_slowest_share_is_one_of_the_kernels(items, pairs, ctas):
    """None has more pairs and more items."""
    shares = set()
    for cta in range(ctas):
        (first, begin), (last, end) = boundary(items, pairs, ctas, cta), boundary(items, pairs, ctas, cta + 1)
        shares.add((last - first + (end > 0), (last - first) * pairs + end - begin, (begin > 0) + (end > 0)))
    slowest = slowest_share(items, pairs, ctas)
    assert slowest in shares
    assert not [
        of for of in shares if of != slowest and all(mine <= theirs for mine, theirs in zip(slowest, of, strict=True))
    ]


def test_a_problem_prints_itself_in_one_line():
    text = str(PROBLEM._replace(extra_entries=64, uneven=True, num_splits=3, kernel="fp8_sm90", division="teams"))
    assert text == (
        "decode of 64 heads over v32_fp8 rows of 576, 20 queries, 2048+64 entries, of unequal lengths, num_splits 3, "
        "kernel fp8_sm90, division teams, 132 SMs of compute capability 9.0"
    )
