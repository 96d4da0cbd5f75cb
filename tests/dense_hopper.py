"""Tests of the Hopper kernels of dense decode that hold for each of them, on an emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupy_mla.cuda.program import Plan
from cupy_mla.ops.dense import planned_dense_decode

from . import oracle
from .cases import poisoned_outputs, queries, scale_of, sinks
from .dense import (
    Requests,
    Sees,
    assert_dense,
    check_dense,
    dense_oracle,
    dense_queries,
    in_cache,
    off_zero,
    run_dense,
    some_view,
)
from .kinds import gapped

FORMATS = (oracle.BF16_576, oracle.BF16_512, oracle.FP16_576, oracle.FP16_512)
FP8_FORMATS = (oracle.V32, oracle.V4, oracle.V32_NOPE, oracle.V41, oracle.V41_SPLIT)


def some_lengths(rng: np.random.Generator, b: int) -> np.ndarray:
    """Mostly short ones, 0 among them, and one that is far longer."""
    lens = rng.integers(0, 200, b)
    lens[rng.integers(b)] = rng.integers(300, 1500)
    return lens


def some_requests(
    kind: Any, rng: np.random.Generator, b: int, heads: int, formats: Any = FORMATS, **options: Any
) -> None:
    """Lengths, tokens, heads, views and strides as they come."""
    fmt, block_size = formats[rng.integers(len(formats))], int(rng.choice([1, 16, 48, 64, 128, 256]))
    s_q, h_q = int(rng.choice([1, 2, 5, 8])), int(rng.integers(1, heads + 1))
    of = in_cache(rng, fmt, some_lengths(rng, b), block_size, s_q, some_view(rng), gap=8 * int(rng.integers(3)))
    q = off_zero(fmt, gapped(dense_queries(rng, fmt, b, s_q, h_q), 0, 0, 1, 8), of)
    check_dense(kind, fmt, q, of, sink=sinks(rng, h_q), out_gaps=(0, 1, 2, 8), **options)


def full_tiles_that_some_lines_see(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """All rows of a tile are there, but the first query does not see its last rows, nor the last one its first."""
    fmt, s_q = formats[rng.integers(len(formats))], int(rng.integers(2, 6))
    for window in (None, 65 - s_q, 193 - s_q):
        lens = 64 * rng.integers(1, 9, b) if window is None else rng.integers(250, 500, b)
        of = in_cache(rng, fmt, lens, 64, s_q, Sees(True, window))
        check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, b, s_q, 8), of), of)


def plain_requests(kind: Any, rng: np.random.Generator, b: int, heads: int, e4m3_q: bool, **options: Any) -> None:
    """Rows, and perhaps queries, in e4m3 with a scale of the call, which the host knows or the device."""
    scales = {"k_scale": np.float32(2.0 ** rng.uniform(-9, -4)), "q_scale": np.float32(2.0 ** rng.uniform(-4, 0))}
    fmt = replace((oracle.PLAIN_576, oracle.PLAIN_512)[rng.integers(2)], scale=float(scales["k_scale"]))
    s_q, h_q = int(rng.choice([1, 2, 5, 8])), int(rng.integers(1, heads + 1))
    of = in_cache(rng, fmt, some_lengths(rng, b), int(rng.choice([1, 16, 48, 64])), s_q, some_view(rng), gap=16)
    q = gapped(queries(rng, b, s_q, h_q, fmt.d_qk), 0, 0, 1, 16)
    codes = gapped(oracle.e4m3_code(q.astype(np.float32) / scales["q_scale"]), 0, 0, 1, 16)
    if e4m3_q:
        q = oracle.E4M3[codes] * float(scales["q_scale"])
    else:
        del scales["q_scale"]
    near_zero = off_zero(fmt, q, of) != q
    q[near_zero], codes[near_zero] = 0, 0
    on_device = bool(rng.integers(2))
    given = {name: kind.put(np.array([x])) if on_device else float(x) for name, x in scales.items()}
    sink = sinks(rng, h_q)
    got = run_dense(kind, codes if e4m3_q else q, of, sink=sink, **given, **options)
    assert_dense(got, dense_oracle(fmt, q, of, sink))


def blocks_that_are_not_there(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """Some are strays, whole tiles of them; the table is too narrow for some requests; a length is negative, and one
    may be the largest there is."""
    b = min(b, 5)
    fmt, lens = formats[rng.integers(len(formats))], [304, 200, 400, 64, 90][:b]
    of = in_cache(rng, fmt, lens, 16, 3, some_view(rng))
    strays = np.where(rng.random(of.table.shape) < 0.3, of.cache.shape[0] + rng.integers(0, 9), of.table)
    of.table = strays.astype(np.int32)
    of.table[0, 4:12] = -1
    of.table[1, :] = -(2**31)
    of.table = of.table[:, :20]
    of.lens[0], of.lens[-1] = rng.choice([304, 2**31 - 1]), -5
    out, _ = check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, b, 3, 20), of), of)
    assert not out[[1, b - 1]].astype(np.float32).any()


def lengths_that_differ_by_a_thousand(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """One request is a thousand times as long as others, and some have no row."""
    fmt, lens = formats[rng.integers(len(formats))], rng.integers(0, 3, b)
    lens[rng.choice(b, 2, replace=False)] = 2, int(rng.integers(2000, 2200))
    of = in_cache(rng, fmt, lens, int(rng.choice([1, 16, 64])), 2, some_view(rng))
    check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, b, 2, 20), of), of, sink=sinks(rng, 20))


def windows_longer_than_requests(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """Up to the largest there are: differences with them must not overflow, also where a query is before all rows."""
    fmt = formats[rng.integers(len(formats))]
    for window in (2**31 - 1, 2**31 - 1 - int(rng.integers(300)), 2**30):
        of = in_cache(rng, fmt, [1, *rng.integers(0, 300, b - 1)], 64, 5, Sees(True, window))
        check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, b, 5, 20), of), of)


def a_call_again_with_other_lengths(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """Nothing of a call stays from the one before: lengths are those that then lie in the arrays."""
    fmt = formats[rng.integers(len(formats))]
    of = in_cache(rng, fmt, some_lengths(rng, b), 64, 2)
    q, longest = dense_queries(rng, fmt, b, 2, 16), of.lens
    for _ in range(3):
        check_dense(kind, fmt, off_zero(fmt, q, of), of)
        of.lens = rng.integers(0, longest + 1, dtype=np.int32)


every_batch = pytest.mark.parametrize(
    "check",
    [
        blocks_that_are_not_there, lengths_that_differ_by_a_thousand, a_call_again_with_other_lengths,
        full_tiles_that_some_lines_see, windows_longer_than_requests,
    ],
    ids=lambda check: check.__name__,
)  # fmt: skip
every_heads = pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])


def calls_of_one_plan(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """The first call divides its rows, and the others divide theirs alike, however long their requests are: of no row
    at all, longer than in the first call, and where the first one found none."""
    fmt, h_q = formats[rng.integers(len(formats))], int(rng.choice([3, 16, 40]))
    longest = rng.integers(700, 1500, b)
    of, q = in_cache(rng, fmt, longest, 64, 2), dense_queries(rng, fmt, b, 2, h_q)
    some = rng.integers(0, longest + 1)
    for first, *others in ((longest, 0 * longest, some), (some, longest, some // 9), (some // 9, longest)):
        plan, bits = Plan(), []
        for lens in (first, *others, first):
            of.lens = lens.astype(np.int32)
            given = off_zero(fmt, q, of)
            with poisoned_outputs():
                results = planned_dense_decode(
                    *map(kind.put, (given, of.cache, of.table, of.lens)), scale_of(q, None), plan
                )
            out, lse = map(kind.take, results)
            assert_dense((out, lse), dense_oracle(fmt, given, of))
            bits.append((out.tobytes(), lse.tobytes()))
        assert plan.made, "no kernel divided rows by it"
        assert bits[0] == bits[-1]


def bits_of_a_request(kind: Any, rng: np.random.Generator, b: int, formats: Any = FORMATS) -> None:
    """They depend on nothing else in the batch, nor on the table's width, where a call asks for that."""
    fmt, h_q = formats[rng.integers(len(formats))], int(rng.choice([3, 16]))  # few lines alone, more than CTAs with all
    of, q = in_cache(rng, fmt, some_lengths(rng, b), 64, 2), dense_queries(rng, fmt, b, 2, h_q)
    out, lse = run_dense(kind, q, of, batch_invariant=True, layout=fmt.layout)
    for r in (int(rng.integers(b)), int(of.lens.argmax())):  # the longest has a partial result of each split
        table = np.pad(of.table[r : r + 1], ((0, 0), (0, int(rng.integers(200)))), constant_values=-1)
        alone = Requests(of.cache, table, of.lens[r : r + 1], 2, of.sees)
        got = run_dense(kind, q[r : r + 1], alone, batch_invariant=True, layout=fmt.layout)
        assert got[0].tobytes() == out[r].tobytes()
        assert got[1].tobytes() == lse[r].tobytes()
