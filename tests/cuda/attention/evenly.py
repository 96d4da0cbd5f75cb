"""Divisions of the rows of any call evenly over CTAs, so that small calls are divided over many of them, too; and what
the tests of kernels that do so share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla.cuda.attention.divide import CUT_COST, ITEM_COST
from cupy_mla.cuda.program import Plan
from cupy_mla.ops.attention import planned_decode

from ... import oracle
from ...cases import Paged, assert_decoded, check_decode, decode_oracle, off_zero, paged, queries, sinks
from ...kinds import BF16, NumPy, poisoned

SCALE = 0.05
PAIR_ROWS = 128  # of a pair of tiles


def shares(heads: int, ctas: int = 132, item_cost: int = ITEM_COST, cut_cost: int = 0) -> str:
    """Shares of so many heads a CTA at most, and splits of a pair of tiles and more."""
    return f"shares(heads={heads}, splits=0, ctas={ctas}, least_split=1, item_cost={item_cost}, cut_cost={cut_cost})"


every_size = pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "block_size"),
    [
        (1, 1, 1, 1, 1),
        (1, 1, 64, 3000, 64),  # a query over 24 CTAs
        (3, 1, 7, 63, 2),
        (1, 2, 16, 65, 61),
        (3, 1, 100, 700, 256),
        (133, 1, 64, 300, 64),  # one more than there are multiprocessors
        (45, 2, 128, 390, 64),
    ],
)
unequal_lengths = pytest.mark.parametrize(
    "lengths",
    [
        [0, 1, 300, 5000],
        [0] * 69 + [300],  # one request with everything
        [300] + [0] * 69,
        [0],
        [-7, 64, 65],
    ],
    ids=str,
)


def unequal(rng: np.random.Generator, fmt: oracle.Format, lengths: list[int]) -> tuple[Paged, Paged]:
    """Two caches for 70 requests, with these lengths, in turn."""
    main, extra = paged(rng, fmt, 70, 2, 300, 64, lengths=True), paged(rng, fmt, 70, 2, 130, 2, lengths=True)
    main.length[:] = np.resize(lengths, 70)
    extra.length[:] = np.resize(lengths[::-1], 70)
    return main, extra


def check_nothing_valid(kind: NumPy, rng: np.random.Generator, fmt: oracle.Format, h_q: int) -> None:
    """But for the first five, lists have no valid entry."""
    main = paged(rng, fmt, 140, 1, 300, 64)
    main.indices[5:] = -1
    out, lse = check_decode(kind, fmt, queries(rng, 140, 1, h_q, fmt.d_qk), main)
    assert (out[5:].astype(np.float32) == 0).all()
    assert (lse[5:] == np.inf).all()


def ending(indices: np.ndarray, ends: Any) -> np.ndarray:
    """Lists that end there, in turn."""
    b, s_q, topk = indices.shape
    return np.where(np.arange(topk) < np.resize(ends, (b, s_q, 1)), indices, -1).astype(np.int32)


def check_plans_of_lists_with_ends(
    kind: NumPy,
    rng: np.random.Generator,
    fmt: oracle.Format,
    h_q: int,
    sizes: Iterable[tuple[int, int]] = ((1, 3000), (7, 700), (45, 390), (133, 300)),
) -> None:
    """Layers of a step, of these requests and list entries: a plan need not fit, shares are unequal then. The same bits
    every time."""
    steps = (
        ([5000], [60], [5000], [200, 0]),  # of the first layer and the others
        ([60], [5000], [0], [5000, 61, 0]),
        ([0, 5000], [5000, 0], [5000]),
        ([2000, 64, 65], [65, 2000], [129]),
    )
    for (b, topk), step in product(sizes, steps):
        q, bits = queries(rng, b, 1, h_q, fmt.d_qk), []
        layers = [paged(rng, fmt, b, 1, topk, 64, invalid=0) for _ in step]
        for layer, ends in zip(layers, step, strict=True):
            layer.indices, layer.length = ending(layer.indices, ends), np.resize(ends, b).astype(np.int32)
        arrays = [[kind.put(a) for a in (q, main.cache, main.indices, main.length)] for main in layers]
        for _ in range(2):
            plan, results = Plan(), []
            for layer in arrays:
                out = kind.put(poisoned((b, 1, h_q, 512), BF16))
                *rows, ends = layer
                results.append(planned_decode(*rows, SCALE, None, plan, padded=True, topk_length=ends, out=out))
            assert plan.made
            bits.append([kind.take(a).tobytes() for result in results for a in result])
        assert bits[0] == bits[1]
        for main, result in zip(layers, results, strict=True):
            assert_decoded(kind, result, decode_oracle(fmt, q, main, sm_scale=SCALE))


def check_plans_of_lists_with_lengths(
    kind: NumPy, rng: np.random.Generator, fmt: oracle.Format, h_q: int, sizes: Iterable[tuple[int, int, int]]
) -> None:
    """Layers of a step over two caches, of these requests and entries of both lists: the same bits as without a plan
    where lists end at the same places, and right results where they do not."""
    steps = (
        ([5000], [0], True), ([128], [5000, 60], True), ([5000, 0, 64], [65, 5000], True),
        ([5000], [5000], False), ([0], [0], False),
    )  # fmt: skip
    for b, topk, extra_topk in sizes:
        q, sink = queries(rng, b, 1, h_q, fmt.d_qk), sinks(rng, h_q)
        plan = Plan()
        for main_ends, extra_ends, alike in steps:
            if alike:
                plan = Plan()
            main = paged(rng, fmt, b, 1, topk, 64, lengths=True)
            extra = paged(rng, fmt, b, 1, extra_topk, 2, lengths=True)
            main.length[:], extra.length[:] = np.resize(main_ends, b), np.resize(extra_ends, b)
            given = {
                "attn_sink": sink, "topk_length": main.length, "extra_k_cache": extra.cache,
                "extra_indices": extra.indices, "extra_topk_length": extra.length,
            }  # fmt: skip
            others, arrays = (
                {n: kind.put(a) for n, a in given.items()},
                [kind.put(a) for a in (q, main.cache, main.indices)],
            )
            want, bits = decode_oracle(fmt, q, main, extra, sm_scale=SCALE, sink=sink), []
            for of_call in (None, plan, plan):
                if of_call is None:
                    result = cupy_mla.sparse_decode(*arrays, SCALE, **others)
                else:
                    result = planned_decode(*arrays, SCALE, None, of_call, **others)
                assert_decoded(kind, result, want)
                bits.append([kind.take(a).tobytes() for a in result])
            assert plan.made
            assert bits[1] == bits[2]
            assert not alike or bits[0] == bits[1]


CUT = (
    ([1024, 1024, 1024], False),
    ([1024, 1100, 960], False),  # up to topk; as many pairs of tiles
    ([1024, 1024], True),
    ([1024, 100, 0], True),
    ([200] * 5, False),  # a CTA has two
    ([1024] * 5, True),
)
"""Lengths of lists, and whether 4 CTAs cut their items."""
CUT_OF_FEW_ROWS = [(lengths, cut) for lengths, cut in CUT if sum(lengths) < 2500]


def check_items_stay_whole(
    kind: NumPy,
    rng: np.random.Generator,
    force: type[cupy_mla.forced],
    fmt: oracle.Format,
    heads: int,
    cases: Iterable[tuple[list[int], bool]] = CUT,
) -> None:
    """Items of lists with lengths, of 4 CTAs, are cut where the longest share then gets shorter by enough."""
    always, never = 0, 1 << 20
    for lengths, cut in cases:
        main = paged(rng, fmt, len(lengths), 1, 1024, 64, lengths=True)
        main.length[:] = lengths
        q = off_zero(fmt, queries(rng, len(lengths), 1, heads, fmt.d_qk), main)
        sink, bits = sinks(rng, heads), []
        for cost in (never, CUT_COST, always):
            force(division=shares(heads, ctas=4, cut_cost=cost))
            bits.append([r.tobytes() for r in check_decode(kind, fmt, q, main, sink=sink)])
        whole, found, split = bits
        assert whole != split
        assert found == (split if cut else whole), lengths
