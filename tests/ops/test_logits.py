"""The indexer's quantization and logits against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cupy_mla import (
    indexer_logits,
    paged_indexer_logits,
    paged_indexer_schedule,
    quantize_indexer_q,
    select_rows_paged,
)
from tests import indexers, oracle, oracle_indexer
from tests.kinds import BF16, POISON, gapped, poisoned

# --- queries --------------------------------------------------------------------------------------------------


def queries(rng: np.random.Generator, tokens: int, heads: int) -> np.ndarray:
    """Rows of many sizes, some of zeros, some with values that are small beside their row's largest."""
    q = rng.standard_normal((tokens, heads, 128)) * 10.0 ** rng.uniform(-14, 6, (tokens, heads, 1))
    q[rng.random((tokens, heads)) < 0.1] = 0
    q = np.where(rng.random(q.shape) < 0.05, rng.choice([0.0, -0.0, 1e-12], q.shape), q)
    return q.astype(BF16)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize(("tokens", "heads", "dtype"), [(0, 8, BF16), (1, 64, np.float32), (7, 24, BF16)])
def test_quantize(kind, rng, tokens: int, heads: int, dtype: np.dtype, scale_format: str) -> None:
    q, weights = queries(rng, tokens, heads), rng.standard_normal((tokens, heads)).astype(dtype)
    q8, w = quantize_indexer_q(
        kind.put(gapped(q, 0, 1, 8)), kind.put(gapped(weights, 0, 3)), scale_format=scale_format
    )  # fmt: skip
    q8, w = kind.take(q8).view(np.uint8), kind.take(w)
    assert (q8.shape, w.shape, w.dtype) == (q.shape, weights.shape, np.float32)
    for t, h in np.ndindex(tokens, heads):
        scale = oracle_indexer.q_scale(q[t, h], scale_format)
        np.testing.assert_array_equal(q8[t, h], oracle.e4m3_code(q[t, h].astype(np.float32) / scale))
        factor = np.float32((heads * 128) ** -0.5)
        assert w[t, h] == np.float32(np.float32(weights[t, h].astype(np.float32) * scale) * factor)


@pytest.mark.parametrize("rope_first", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_quantize_with_rope(kind, rng, rope_first: bool, interleaved: bool, dtype: np.dtype) -> None:
    """The values under their scales are those of float64 up to the roundings to bfloat16 and e4m3."""
    tokens, heads, places = 9, 16, 50
    q, weights = rng.standard_normal((tokens, heads, 128)).astype(BF16), np.ones((tokens, heads), np.float32)
    positions = rng.integers(0, places, tokens)
    positions[:2] = -1, places  # these have no angles
    angles = rng.uniform(0, 7, (places, 32))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(dtype)
    q8, w = quantize_indexer_q(
        kind.put(q), kind.put(weights), positions=kind.put(positions), cos_sin_cache=kind.put(cos_sin),
        rope_first=rope_first, interleaved=interleaved,
    )  # fmt: skip
    q8, scale = kind.take(q8).view(np.uint8), kind.take(w) * (heads * 128) ** 0.5
    for t, h in np.ndindex(tokens, heads):
        expected = q[t, h].astype(np.float64)
        if t >= 2:
            expected = oracle_indexer.rotated(expected, cos_sin[positions[t]], rope_first, interleaved)
        got = oracle.E4M3[q8[t, h]] * scale[t, h]
        np.testing.assert_allclose(got, expected, rtol=1 / 16 + 1 / 200, atol=np.abs(expected).max() * 2**-16)
        untouched = slice(64, None) if rope_first else slice(64)
        codes = oracle.e4m3_code(q[t, h, untouched].astype(np.float32) / np.float32(scale[t, h]))
        assert np.abs(q8[t, h, untouched].astype(int) - codes).max() <= 1  # the scale is known to a rounding only


def test_quantize_nan_and_infinity(kind) -> None:
    q = np.ones((1, 8, 128), BF16)
    q[0, 0, 5:7], q[0, 1, 7:9], q[0, 2, :64], q[0, 2, 64:] = (np.nan, -np.nan), (np.inf, -np.inf), np.nan, -np.nan
    codes, w = map(kind.take, quantize_indexer_q(kind.put(q), kind.put(np.ones((1, 8), np.float32))))
    codes = codes.view(np.uint8)[0]
    assert (codes[0, 5:7] == 0x7F).all()
    assert (oracle.E4M3[np.delete(codes[0], [5, 6])] == 448).all()
    assert (codes[1, 7:9] == 0x7F).all()
    assert (oracle.E4M3[np.delete(codes[1], [7, 8])] == 0).all()
    assert (codes[2] == 0x7F).all()
    assert np.isinf(w[0, 1])
    assert np.isfinite(np.delete(w[0], 1)).all()


# --- logits ---------------------------------------------------------------------------------------------------


def check(got: np.ndarray, expected: np.ndarray, size: np.ndarray | None = None) -> None:
    """The same entries are -inf, the others close (`indexers.assert_close`)."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    assert np.isfinite(got[np.isfinite(expected)]).all()
    indexers.assert_close(got, expected, size)


def with_sizes(oracle: Callable[..., np.ndarray], inputs: dict) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and their terms' magnitudes without relu added up: those of the queries and of their opposites."""
    sizes = {**inputs, "w": np.abs(inputs["w"])}
    negated = (inputs["q8"].view(np.uint8) ^ 0x80).view(inputs["q8"].dtype)
    return oracle(**inputs), oracle(**sizes) + oracle(**{**sizes, "q8": negated})


def ragged(
    rng: np.random.Generator,
    m: int,
    n: int,
    heads: int,
    exact: bool = False,
    e5m2: tuple[bool, bool] = (False, False),
) -> dict[str, np.ndarray]:
    """`e5m2`: whether queries are that, and keys."""
    weights = indexers.exact_weights if exact else indexers.weights
    q, k = (indexers.made(exact, of) for of in e5m2)
    starts, ends = indexers.ranges(rng, m, n)
    return {
        "q8": indexers.strided(rng, q(rng, m, heads, 128)), "k8": indexers.strided(rng, k(rng, n, 128)),
        "ks": np.full(n, 0.5, np.float32) if exact else indexers.scales(rng, n),
        "w": indexers.strided(rng, weights(rng, m, heads)), "starts": starts, "ends": ends,
    }  # fmt: skip


HEADS = range(8, 65, 8)
SHAPES = [(1, 1, 8), (3, 70, 64), (5, 129, 24), (9, 64, 32), (17, 301, 40), (2, 0, 64), (0, 5, 64)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("m", "n", "heads"), SHAPES)
def test_ragged(kind, rng, m: int, n: int, heads: int, exact: bool) -> None:
    inputs = ragged(rng, m, n, heads, exact)
    expected, size = with_sizes(oracle_indexer.ragged_logits, inputs)
    got = kind.take(indexer_logits(**{name: kind.put(a) for name, a in inputs.items()}))
    assert (got.shape, got.dtype) == ((m, n), np.float32)
    check(got, expected, size)
    if exact:
        np.testing.assert_array_equal(got, expected)


E5M2 = [(True, True), (True, False), (False, True)]  # queries, keys


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("e5m2", E5M2)
@pytest.mark.parametrize(("m", "n", "heads"), SHAPES[:5])
def test_ragged_of_e5m2(kind, rng, m: int, n: int, heads: int, e5m2: tuple[bool, bool], exact: bool) -> None:
    """In whole rows, and the same bits in compact ones."""
    inputs = ragged(rng, m, n, heads, exact, e5m2)
    inputs["starts"] = np.minimum(inputs["starts"], n - 1).clip(0)
    expected, size = with_sizes(oracle_indexer.ragged_logits, inputs)
    there = put(kind, inputs)
    got = kind.take(indexer_logits(**there))
    check(got, expected, size)
    if exact:
        np.testing.assert_array_equal(got, expected)
    compact = kind.take(indexer_logits(**there, compact_width=n))
    for row, whole, start in zip(compact, got, inputs["starts"], strict=True):
        np.testing.assert_array_equal(row[: n - start], whole[start:])


@pytest.mark.parametrize("heads", HEADS)
def test_ragged_of_every_head_count(kind, rng, heads: int) -> None:
    inputs = ragged(rng, int(rng.choice([1, 3, 20])), int(rng.integers(1, 400)), heads, exact=True)
    got = kind.take(indexer_logits(**put(kind, inputs)))
    np.testing.assert_array_equal(got, oracle_indexer.ragged_logits(**inputs))


def test_queries_that_see_nothing(kind, rng) -> None:
    """Whole tiles of them, first, last and between others."""
    inputs = ragged(rng, 45, 700, 64)
    inputs["starts"][:], inputs["ends"][:] = 0, np.arange(656, 701)
    for first, last in ((0, 17), (24, 25), (31, 40), (44, 45)):
        inputs["ends"][first:last] = 0
    expected = oracle_indexer.ragged_logits(**inputs)
    check(kind.take(indexer_logits(**{name: kind.put(a) for name, a in inputs.items()})), expected)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("m", "n", "heads"), SHAPES)
def test_compact_rows(kind, rng, m: int, n: int, heads: int, clean: bool) -> None:
    """Each starts at the first key of its range: the same bits as in whole rows, and nothing beyond the width."""
    inputs = ragged(rng, m, n, heads)
    there = {name: kind.put(a) for name, a in inputs.items()}
    whole_rows = kind.take(indexer_logits(**there))
    check(whole_rows, *with_sizes(oracle_indexer.ragged_logits, inputs))
    lens = np.minimum(inputs["ends"], n) - np.maximum(inputs["starts"], 0)
    for width in {0, 1, int(lens.max(initial=1).clip(1)), n + 3, n // 2}:
        out, memory = kind.put_with_allocation(gapped(poisoned((m, width), np.float32), 0, 5))
        assert indexer_logits(**there, clean=clean, compact_width=width, out=out) is out
        got = kind.take(out)
        if m:
            assert (kind.take(memory).reshape(m, -1)[:, 4 * width :] == POISON).all()
        for i, start in enumerate(inputs["starts"].clip(0)):
            count = min(max(int(lens[i]), 0), width)
            own = slice(start, start + count)
            assert np.isneginf(got[i, count:]).all() if clean else not np.isfinite(got[i, count:]).any()
            np.testing.assert_array_equal(got[i, :count], whole_rows[i, own])


def test_ragged_of_given_result(kind, rng) -> None:
    """Nothing beyond the row's items is written, and without `clean` what is not seen is old or -inf."""
    inputs = ragged(rng, 6, 140, 64)
    expected = oracle_indexer.ragged_logits(**inputs)
    for clean in (True, False):
        out, whole = kind.put_with_allocation(gapped(poisoned((6, 140), np.float32), 0, 5))
        returned = indexer_logits(**{name: kind.put(a) for name, a in inputs.items()}, clean=clean, out=out)
        assert returned is out
        got, seen = kind.take(out), np.isfinite(expected)
        assert (kind.take(whole).reshape(6, -1)[:, 4 * 140 :] == POISON).all()
        indexers.assert_close(got, expected)
        assert (np.isneginf(got[~seen]) if clean else np.isneginf(got[~seen]) | np.isnan(got[~seen])).all()


def test_nan_stays_with_its_key_and_query(kind, rng) -> None:
    inputs = ragged(rng, 7, 200, 64)
    inputs["starts"][:], inputs["ends"][:] = 10, 190
    for j in (0, 9, 50, 190, 199):
        inputs["k8"][j], inputs["ks"][j] = indexers.NAN_CODE, np.nan
    inputs["q8"][3, 40, 100] = indexers.NAN_CODE
    got = kind.take(indexer_logits(**{name: kind.put(a) for name, a in inputs.items()}))
    inputs["k8"][50], inputs["ks"][50] = 0, 0
    expected = oracle_indexer.ragged_logits(**inputs)
    assert np.isnan(got[:, 50]).all()
    assert np.isnan(got[3, 10:190]).all()
    got[:, 50], expected[:, 50], got[3], expected[3] = 0, 0, 0, 0
    check(got, expected)


def test_queries_do_not_depend_on_each_other(kind, rng) -> None:
    """The same bits alone as in a batch, whatever range of keys is given."""
    inputs = ragged(rng, 11, 333, 64)
    inputs["starts"], inputs["ends"] = np.arange(11, dtype=np.int32), np.arange(323, 334, dtype=np.int32)
    whole = kind.take(indexer_logits(**{name: kind.put(a) for name, a in inputs.items()}))
    for i in rng.permutation(11)[:4].tolist():
        one = {
            name: np.ascontiguousarray(a[i : i + 1]) if name not in ("k8", "ks") else a for name, a in inputs.items()
        }
        one["k8"], one["ks"] = (np.ascontiguousarray(inputs[name][i:]) for name in ("k8", "ks"))
        one["starts"], one["ends"] = one["starts"] - i, one["ends"] - i
        alone = kind.take(indexer_logits(**{name: kind.put(a) for name, a in one.items()}))
        np.testing.assert_array_equal(alone[0], whole[i, i:])


def paged(
    rng: np.random.Generator, b: int, n: int, heads: int, block_size: int, longest: int, exact: bool = False
) -> dict:
    codes, weights = (
        (indexers.exact_codes, indexers.exact_weights) if exact else (indexers.codes, indexers.weights)
    )  # fmt: skip
    width = -(-longest // block_size)
    num_blocks = b * width + 2
    scales = np.full((num_blocks, block_size), 0.5, np.float32)
    if not exact:
        scales = indexers.scales(rng, num_blocks, block_size)
    keys = codes(rng, num_blocks, block_size, 128)
    keys[-2:], scales[-2:] = indexers.NAN_CODE, np.nan  # blocks of nobody
    lens = rng.integers(0, longest + 1, b, dtype=np.int32)
    table = rng.permutation(b * width).reshape(b, width).astype(np.int32)
    for r in range(b):  # beyond the request's length
        for p in range(int(lens[r]), width * block_size):
            keys[table[r, p // block_size], p % block_size] = indexers.NAN_CODE
            scales[table[r, p // block_size], p % block_size] = np.nan
    return {
        "q8": indexers.strided(rng, codes(rng, b, n, heads, 128)),
        "kv_cache": indexers.key_cache(keys, scales, int(rng.choice([0, 1, 4]))),
        "w": weights(rng, b * n, heads), "context_lens": lens, "block_table": table, "max_context_len": longest,
    }  # fmt: skip


def put(kind, inputs: dict) -> dict:
    return {name: kind.put(a) if isinstance(a, np.ndarray) else a for name, a in inputs.items()}


PAGED = [(1, 1, 64, 64, 200), (3, 2, 32, 16, 100), (2, 1, 8, 1, 40), (4, 3, 64, 15, 90), (2, 5, 48, 7, 65)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), PAGED)
def test_paged(kind, rng, b: int, n: int, heads: int, block_size: int, longest: int, exact: bool) -> None:
    inputs = paged(rng, b, n, heads, block_size, longest, exact)
    cases = {"cache" if name == "kv_cache" else name: a for name, a in inputs.items()}
    expected, size = with_sizes(oracle_indexer.paged_logits, cases)
    got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    assert (got.shape, got.dtype) == ((b * n, longest), np.float32)
    check(got, expected, size)
    if exact:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [1, 2, 61, 64, 256])
def test_paged_of_any_heads_queries_and_blocks(kind, rng, heads: int, block_size: int) -> None:
    """One request and three, of 1 to 9 query tokens, with lengths of requests and of tokens."""
    b, n = int(rng.choice([1, 3])), int(rng.integers(1, 10))
    inputs = paged(rng, b, n, heads, block_size, int(rng.integers(1, 100)), exact=True)
    if rng.integers(2):
        lens = inputs["context_lens"][:, None] - rng.integers(0, 20, (b, n))
        inputs["context_lens"] = lens.clip(0).astype(np.int32)
    cases = {"cache" if name == "kv_cache" else name: a for name, a in inputs.items()}
    got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    np.testing.assert_array_equal(got, oracle_indexer.paged_logits(**cases), err_msg=f"{b} x {n}")


def test_paged_lengths_of_tokens(kind, rng) -> None:
    """A length a token; blocks that do not exist are -inf."""
    inputs = paged(rng, 3, 2, 64, 16, 120)
    inputs["context_lens"] = np.array([[0, 70], [120, 3], [200, -1]], np.int32)
    inputs["kv_cache"] = indexers.key_cache(
        indexers.codes(rng, 30, 16, 128), indexers.scales(rng, 30, 16)
    )  # fmt: skip
    inputs["block_table"][0, 1], inputs["block_table"][1, 2], inputs["block_table"][2, 0] = -1, 30, 2**31 - 1
    inputs["block_table"] = np.ascontiguousarray(inputs["block_table"][:, :7])
    cases = {"cache" if name == "kv_cache" else name: a for name, a in inputs.items()}
    check(kind.take(paged_indexer_logits(**put(kind, inputs))), oracle_indexer.paged_logits(**cases))


@pytest.mark.parametrize(
    ("b", "n", "blocks", "width", "longest"), [(0, 1, 3, 2, 9), (2, 1, 0, 2, 9), (2, 2, 3, 0, 9), (2, 1, 3, 2, 0)]
)
def test_paged_of_nothing(kind, rng, b: int, n: int, blocks: int, width: int, longest: int) -> None:
    """No request, no block, no column or no key: -inf, whatever there is of it."""
    cache = indexers.key_cache(indexers.codes(rng, blocks, 4, 128), indexers.scales(rng, blocks, 4))
    inputs = {
        "q8": indexers.codes(rng, b, n, 64, 128), "kv_cache": cache, "w": indexers.weights(rng, b * n, 64),
        "context_lens": np.full(b, 9, np.int32), "block_table": np.zeros((b, width), np.int32),
        "max_context_len": longest,
    }  # fmt: skip
    expected = oracle_indexer.paged_logits(**{"cache" if name == "kv_cache" else name: a for name, a in inputs.items()})
    check(kind.take(paged_indexer_logits(**put(kind, inputs))), expected)


def test_paged_agrees_with_ragged(kind, rng) -> None:
    """The same keys in blocks of any size and in rows give the same bits."""
    inputs = paged(rng, 1, 1, 64, 64, 300)
    inputs["context_lens"][:] = 300
    inputs["kv_cache"] = indexers.key_cache(indexers.codes(rng, 7, 64, 128), indexers.scales(rng, 7, 64))
    tokens = [
        oracle_indexer.token(inputs["kv_cache"], int(inputs["block_table"][0, p // 64]) * 64 + p % 64)
        for p in range(300)
    ]
    k8, ks = np.stack([key for key, _ in tokens]), np.concatenate([scale for _, scale in tokens])
    bounds = [np.array([value], np.int32) for value in (0, 300)]
    in_rows = indexer_logits(*map(kind.put, (inputs["q8"][0], k8, ks, inputs["w"], *bounds)))
    got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    np.testing.assert_array_equal(got, kind.take(in_rows))


@pytest.mark.parametrize("block_size", [15, 64])
@pytest.mark.parametrize(("n", "heads"), [(1, 64), (2, 32), (3, 64), (9, 24)])
def test_requests_do_not_depend_on_each_other(kind, rng, n: int, heads: int, block_size: int) -> None:
    """The same bits alone as in a batch, in rows and under tables of other widths."""
    b, longest = 7, 400
    inputs = paged(rng, b, n, heads, block_size, longest)
    whole = kind.take(paged_indexer_logits(**put(kind, inputs))).reshape(b, n, longest)
    for r in rng.permutation(b)[:3].tolist():
        seen = int(inputs["context_lens"][r])
        width = seen + int(rng.integers(0, 70))
        one = {name: inputs[name][r : r + 1].copy() for name in ("q8", "context_lens", "block_table")}
        one["block_table"] = one["block_table"][:, : max(-(-seen // block_size), 1)].copy()
        one["w"] = inputs["w"][r * n : (r + 1) * n].copy()
        alone = paged_indexer_logits(
            **put(kind, one), kv_cache=kind.put(inputs["kv_cache"]), max_context_len=width
        )  # fmt: skip
        np.testing.assert_array_equal(kind.take(alone)[:, :seen], whole[r, :, :seen])


# --- schedules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "n", "width", "block_size", "longest", "shares"),
    [
        (1, 0, 40, 64, 2500, 132), (70, 0, 9, 16, 140, 132), (5, 3, 30, 64, 1900, 7), (300, 1, 3, 256, 700, 264),
        (3, 2, 2, 64, 400, 1), (0, 0, 4, 64, 200, 3), (4, 0, 5, 64, 0, 2), (2, 0, 0, 64, 90, 2),
        (6, 0, 99, 1, 99, 1024), (5, 0, 90, 64, 5700, 288), (5, 0, 90, 64, 5700, 289), (7, 2, 120, 64, 7600, 792),
        (90, 0, 40, 64, 2500, 650),
    ],
)  # fmt: skip
def test_schedule(kind, rng, b: int, n: int, width: int, block_size: int, longest: int, shares: int) -> None:
    """Lengths below 0 and beyond the longest, tables that end too soon; a result with gaps is left as it is there."""
    lens = rng.integers(-3, longest + 50, (b, n) if n else b, dtype=np.int32)
    table = rng.integers(-1, 1000, (b, width), dtype=np.int32)
    expected = oracle_indexer.schedule(lens, table, longest, block_size, shares)
    there = kind.put(gapped(lens, *(0, 3)[: lens.ndim])), kind.put(gapped(table, 0, 2))
    got = kind.take(paged_indexer_schedule(*there, longest, block_size, shares))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected)
    out, whole = kind.put_with_allocation(gapped(poisoned((shares, 32), np.int32), 0, 5))
    assert paged_indexer_schedule(*there, longest, block_size, shares, out=out) is out
    np.testing.assert_array_equal(kind.take(out), expected)
    assert (kind.take(whole).reshape(shares, -1)[:, 4 * 32 :] == POISON).all()


@pytest.mark.long(sample=18)
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("shares", [1, 5, 132, 264, 300])
@pytest.mark.parametrize(
    ("b", "n", "heads", "block_size", "longest"),
    [(1, 1, 64, 64, 2500), (7, 2, 64, 64, 300), (40, 1, 32, 64, 200), (5, 3, 64, 15, 90), (3, 5, 64, 64, 200)],
)
def test_logits_of_a_schedule_are_the_same(
    kind, rng, b: int, n: int, heads: int, block_size: int, longest: int, shares: int, of_tokens: bool
) -> None:
    """The same bits, and the same rows chosen, at once and in chunks, which do without it."""
    inputs = paged(rng, b, n, heads, block_size, longest)
    inputs["kv_cache"] = np.ascontiguousarray(inputs["kv_cache"])
    if of_tokens:
        own = np.maximum(inputs["context_lens"][:, None] - rng.integers(0, 3, (b, n)), 0)
        inputs["context_lens"] = own.astype(np.int32)
    there = put(kind, inputs)
    lens, table = there["context_lens"], there["block_table"]
    schedule, _ = kind.put_with_allocation(gapped(poisoned((shares, 32), np.int32), 0, 3))
    paged_indexer_schedule(lens, table, longest, block_size, shares, out=schedule)
    np.testing.assert_array_equal(
        kind.take(paged_indexer_logits(**there, schedule=schedule)), kind.take(paged_indexer_logits(**there))
    )
    expected = kind.take(select_rows_paged(**there, k=20))
    for bytes_at_most in (1 << 29, 4 * longest * n):
        got = select_rows_paged(**there, k=20, schedule=schedule, max_workspace_bytes=bytes_at_most)
        np.testing.assert_array_equal(kind.take(got), expected)


def test_lengths_of_one_requests_tokens_may_be_a_broadcast_row(rng) -> None:
    """Nothing is shared."""
    one = paged(rng, 1, 2, 64, 8, 30)
    one["context_lens"] = np.int32([[5, 6]])
    expected = paged_indexer_logits(**one)
    one["context_lens"] = np.broadcast_to(np.int32([5, 6]), (1, 2))
    np.testing.assert_array_equal(paged_indexer_logits(**one), expected)
