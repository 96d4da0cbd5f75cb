"""`backward_groups` on an emulated Hopper GPU: heads of neighbouring queries, over the union of their lists."""

from __future__ import annotations

import numpy as np
import pytest

from .. import backward, oracle_backward
from ..backward import check, check_bits_whatever, check_same_bits, inputs, with_everything
from ..cases import sinks
from ..oracle_backward import Inputs

GROUPED = [(3, 8), (8, 8), (9, 4), (16, 4), (21, 2), (32, 2)]  # heads, and queries of a group


@pytest.mark.parametrize(("h_q", "group"), GROUPED)
def test_groups(kind, rng, h_q, group):
    """Of all sizes; the last one is not whole. Lists share many rows, or few."""
    for s_kv in (30, 900):
        check(kind, inputs(rng, 2 * group + 1, h_q, 512, s_kv, 90))


def test_lists_that_are_equal_and_lists_without_common_rows(kind, rng):
    a = inputs(rng, 8, 16, 576, 800, 70, invalid=0)
    a.kv[...] = np.nan_to_num(a.kv.astype(np.float32))
    lists = np.empty_like(a.indices)
    lists[:4] = rng.permutation(800)[:70]
    lists[4:] = rng.permutation(800)[:280].reshape(4, 1, 70)
    check(kind, a._replace(indices=lists))


@pytest.mark.parametrize(("h_q", "group"), GROUPED)
def test_rows_of_a_group_are_multiplied_once(kind, emulated, rng, h_q, group):
    """Tokens of a group that have the same list take as many products as one token alone."""
    a = inputs(rng, group, h_q, 512, 300, 130, invalid=0)
    a.kv[...], a.dout[...] = rng.standard_normal(a.kv.shape), rng.standard_normal(a.dout.shape)
    a.indices[:] = rng.permutation(300)[:130]
    products = []
    for tokens in (group, 1):
        part = a._replace(q=a.q[:tokens], indices=a.indices[:tokens], dout=a.dout[:tokens])
        check(kind, part)
        products.append(emulated.products.pop("backward_sm90"))
    assert products[0] == products[1] > 0


def test_rows_listed_several_times(kind, rng):
    """By one query of a group, by all, or by none; by some once and by others more often."""
    a = inputs(rng, 8, 10, 512, 6, 40, invalid=0.5)
    lists = a.indices.copy()
    lists[2], lists[3, 0, :30] = a.entries(0)[0], a.entries(1)[0]
    check(kind, a._replace(indices=lists))


def test_ranges_of_rows_beyond_those_of_a_cta(kind, rng):
    """2048 rows are ranges of all threads; unions go on behind them."""
    check(kind, inputs(rng, 4, 16, 512, 7000, 300))


def test_bits(kind, rng):
    """Whatever order warps run in, how lists are ordered, and how queries are divided into chunks."""
    a = inputs(rng, 19, 8, 512, 200, 120)._replace(sink=sinks(rng, 8))
    check_same_bits(kind, a)
    check_bits_whatever(kind, a, (1, 3_000_000))


def test_some_queries_without_rows(kind, rng):
    a = with_everything(rng, inputs(rng, 21, 8, 576, 60, 50), sinks(rng, 8))
    length = a.length.copy()
    length[8:] = np.maximum(length[8:], 1)  # of the second group on all have rows
    length[18] = 0
    check(kind, a._replace(length=length))


def disjoint(rng: np.random.Generator) -> Inputs:
    """Queries of one group: rows 0 to 19 are those of the first, rows 10 to 29 those of the second, all are those of
    the others."""
    a = inputs(rng, 4, 16, 576, 60, 20, invalid=0)
    a.kv[...] = np.nan_to_num(a.kv.astype(np.float32))
    lists = rng.integers(0, 60, a.indices.shape, dtype=np.int32)
    lists[0, 0], lists[1, 0] = np.arange(20), np.arange(10, 30)
    lists[2:] = np.where((lists[2:] < 10) | (lists[2:] >= 40), 35, lists[2:])
    return a._replace(indices=lists)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("array", ["q", "kv", "dout"])
def test_what_is_not_finite_stays_with_its_query(kind, rng, array, bad):
    """It does not reach the gradients of the group's other queries, nor of rows that the query does not list."""
    a = disjoint(rng)
    results = backward.forward(a)
    wrong = getattr(a, array).copy()
    wrong[5 if array == "kv" else 0, 0, 70] = bad  # row 5 is listed by the first query alone
    got = backward.run(kind, a._replace(**{array: wrong}), results)
    dq, dkv = (kind.take(x).astype(np.float32) for x in got[:2])
    want_dq, want_dkv, _ = oracle_backward.backward(a, *results)
    heads = slice(None) if array == "kv" else slice(1)
    assert not np.isfinite(dq[0, heads]).all()
    assert not np.isfinite(dkv[:20]).all()
    dq[0, heads], dkv[:20, 0] = want_dq.value[0, heads], want_dkv.value[:20]
    oracle_backward.assert_gradient(dq, want_dq, "dq")
    oracle_backward.assert_gradient(dkv[:, 0], want_dkv, "dkv bfloat16")


def test_products_with_rows_of_other_queries_may_overflow(kind, rng):
    """dP of a query with a row that only another one of its group lists is infinite, and its logit as well."""
    a = disjoint(rng)
    a.kv[5, 0, 7], a.q[1:, :, 7], a.dout[1:, :, 7] = 1e30, 1e30, 1e30  # row 5 is listed by the first query alone
    a.q[0, :, 7], a.dout[0, :, 7] = 0, 0
    a.kv[[*range(5), *range(6, 60)], 0, 7] = 0
    results = backward.forward(a)
    dq, dkv = (kind.take(x).astype(np.float32) for x in backward.run(kind, a, results)[:2])
    assert np.isfinite(dq).all()
    want_dq, want_dkv, _ = oracle_backward.backward(a, *results)
    rest = np.arange(576) != 7
    for got, want, name in ((dq, want_dq, "dq"), (dkv[:, 0], want_dkv, "dkv bfloat16")):
        of_rest = oracle_backward.Sum(want.value[..., rest], want.squares[..., rest])
        oracle_backward.assert_gradient(got[..., rest], of_rest, name)
