"""Logits over MXFP4 keys, candidate blocks, and logits over these alone, against float64 and plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import (
    candidate_blocks,
    candidate_logits,
    paged_indexer_logits,
    select_candidate_rows,
    select_rows,
    select_rows_paged,
    topk_indices,
)
from tests import indexers, oracle_indexer, oracle_mxfp4
from tests.kinds import gapped, poisoned

from .test_logits import check, put, ragged

FP8, MXFP4 = 132, 68


def key_cache(rng: np.random.Generator, token_bytes: int, blocks: int, block_size: int, exact: bool) -> np.ndarray:
    """Keys of any size, of MXFP4 under scales up to 2^28 apart; exact: such that sums of products are."""
    if token_bytes == FP8:
        codes = (indexers.exact_codes if exact else indexers.codes)(rng, blocks, block_size, 128)
        scales = np.full((blocks, block_size), 0.5, np.float32) if exact else indexers.scales(rng, blocks, block_size)
        return indexers.key_cache(codes, scales, int(rng.choice([0, 1, 4])))
    raw = poisoned((blocks, 68 * block_size + int(rng.choice([0, 4, 16]))), np.uint8)
    shape = blocks, 64 * block_size
    ones = rng.choice(np.array([0] * 14 + [2, 10]), (2, *shape))  # 0, 1 and -1
    raw[:, : 64 * block_size] = ones[0] | ones[1] << 4 if exact else rng.integers(0, 256, shape)
    scales = rng.integers(*((126, 129) if exact else (99, 128)), (blocks, block_size, 4))
    raw[:, 64 * block_size : 68 * block_size] = scales.reshape(blocks, -1)
    return raw[:, : 68 * block_size].reshape(blocks, block_size, 68)


def queries(rng: np.random.Generator, exact: bool, e5m2: bool, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    weights = indexers.exact_weights if exact else indexers.weights
    return indexers.strided(rng, indexers.made(exact, e5m2)(rng, *shape, 128)), weights(
        rng, int(np.prod(shape[:-1])), shape[-1]
    )


def paged(
    rng: np.random.Generator,
    b: int,
    n: int,
    heads: int,
    block_size: int,
    longest: int,
    exact: bool = False,
    token_bytes: int = MXFP4,
    e5m2: bool | None = None,
) -> dict:
    """`e5m2`: whether queries are that; if it is not given, where keys are MXFP4."""
    width = -(-longest // block_size)
    q8, w = queries(rng, exact, token_bytes == MXFP4 if e5m2 is None else e5m2, b, n, heads)
    table = rng.permutation(b * width).reshape(b, width).astype(np.int32)
    table[rng.random(table.shape) < 0.1] = rng.choice([-1, b * width + 2])
    return {
        "q8": q8, "kv_cache": key_cache(rng, token_bytes, b * width + 2, block_size, exact), "w": w,
        "context_lens": rng.integers(0, longest + 1, b, dtype=np.int32), "block_table": table,
        "max_context_len": longest,
    }  # fmt: skip


def of_oracle(inputs: dict) -> dict:
    return {"cache" if name == "kv_cache" else name: a for name, a in inputs.items()}


PAGED = [(1, 1, 64, 64, 200), (3, 2, 32, 16, 100), (2, 1, 8, 1, 40), (4, 3, 64, 15, 90), (2, 7, 48, 7, 65)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), PAGED)
def test_logits_over_mxfp4(kind, rng, b: int, n: int, heads: int, block_size: int, longest: int, exact: bool) -> None:
    inputs = paged(rng, b, n, heads, block_size, longest, exact)
    expected = oracle_mxfp4.paged_logits(**of_oracle(inputs))
    got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    assert (got.shape, got.dtype) == ((b * n, longest), np.float32)
    check(got, expected)
    if exact:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("token_bytes", [FP8, MXFP4])
@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), PAGED)
def test_queries_unlike_keys(kind, rng, b, n, heads, block_size, longest, token_bytes: int) -> None:
    """E5m2 queries over FP8 keys, e4m3 queries over MXFP4 keys."""
    for exact in (False, True):
        inputs = paged(rng, b, n, heads, block_size, longest, exact, token_bytes, e5m2=token_bytes == FP8)
        expected = oracle_mxfp4.paged_logits(**of_oracle(inputs))
        got = kind.take(paged_indexer_logits(**put(kind, inputs)))
        check(got, expected)
        if exact:
            np.testing.assert_array_equal(got, expected)


def whole(rng: np.random.Generator, exact: bool = False) -> dict:
    """Two requests of 60 keys, in blocks of 16 that are one behind the other; blocks allow 16-byte loads."""
    inputs = paged(rng, 2, 1, 32, 16, 60, exact)
    inputs["kv_cache"] = np.ascontiguousarray(inputs["kv_cache"])
    inputs["context_lens"][:], inputs["block_table"] = 60, np.arange(8, dtype=np.int32).reshape(2, 4)
    return inputs


@pytest.mark.parametrize("apart", [1, 14, 20, 26, 27, 28])
def test_small_groups_are_exact(kind, rng, apart: int) -> None:
    """Queries are 0 where a key's group of the largest scale is, so that only its small groups count."""
    inputs = whole(rng)
    inputs["q8"], inputs["w"] = queries(rng, True, True, 2, 1, 32)
    for request, large in enumerate(rng.integers(0, 4, 2)):
        inputs["q8"][request, 0, :, 32 * large : 32 * large + 32] = 0
        for slot in range(64 * request, 64 * request + 64):
            oracle_mxfp4.token(inputs["kv_cache"], slot)[1][:] = np.where(np.arange(4) == large, 127, 127 - apart)
    expected = oracle_mxfp4.paged_logits(**of_oracle(inputs))
    np.testing.assert_array_equal(kind.take(paged_indexer_logits(**put(kind, inputs))), expected)


def test_far_groups(kind, rng) -> None:
    """Values of groups more than 2^28 below a key's largest scale are off by less than 2^-29 of it. Some are 0."""
    inputs = whole(rng)
    for slot in range(8 * 16):
        codes, scales = oracle_mxfp4.token(inputs["kv_cache"], slot)
        scales[:] = rng.choice([1, *range(80, 128)], 4)
        codes.reshape(4, 16)[scales == 1] = 0
    expected = oracle_mxfp4.paged_logits(**of_oracle(inputs))
    check(kind.take(paged_indexer_logits(**put(kind, inputs))), expected)


def test_nan_scale_of_mxfp4(kind, rng) -> None:
    """Makes the logits of its key NaN, and no others."""
    inputs = whole(rng)
    oracle_mxfp4.token(inputs["kv_cache"], 16 + 3)[1][2] = 255
    got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    assert np.isnan(got[0, 19])
    assert np.isnan(got).sum() == 1


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(kind, rng, weight: float) -> None:
    """Infinity times a product that relu makes 0 is NaN. So is every logit of a query with a NaN."""
    inputs = whole(rng, exact=True)
    inputs["w"][0, 5] = weight
    inputs["q8"][1, 0, 7, 100] = np.nan
    with np.errstate(invalid="ignore"):
        expected = oracle_mxfp4.paged_logits(**of_oracle(inputs)).astype(np.float32)
        got = kind.take(paged_indexer_logits(**put(kind, inputs)))
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(got[1]).all()


def candidates_of(
    rng: np.random.Generator, tokens: int, heads: int, block_size: int, blocks: int, exact: bool, token_bytes: int
) -> dict:
    """Tokens of 3 requests of up to 200 keys, whose candidates are any blocks and their last one."""
    width = -(-200 // block_size)
    q8, w = queries(rng, exact, token_bytes == MXFP4, tokens, heads)
    table = rng.permutation(3 * width).reshape(3, width).astype(np.int32)
    table[rng.random(table.shape) < 0.05] = rng.choice([-1, 3 * width + 2])
    lens = rng.integers(-1, 201, tokens).astype(np.int32)
    lens[: min(tokens, 3)] = np.array([0, 8 * blocks, 8 * blocks + 3])[:tokens]
    chosen = np.full((tokens, blocks), -1, np.int32)
    for t in range(tokens):
        all_blocks = -(-max(int(lens[t]), 0) // 8)
        some = sorted(rng.permutation(max(all_blocks - 1, 0))[: blocks - 1].tolist())
        some = [*some, all_blocks - 1][: min(blocks, all_blocks)]
        chosen[t, : len(some)] = some
    return {
        "q8": q8, "kv_cache": key_cache(rng, token_bytes, 3 * width + 2, block_size, exact), "w": w,
        "candidates": gapped(chosen, 0, int(rng.integers(0, 3))), "lens": lens,
        "req_id": rng.integers(0, 3, tokens, dtype=np.int32), "block_table": table,
    }  # fmt: skip


CANDIDATES = [(1, 32, 64, 12), (9, 64, 16, 3), (5, 8, 1, 1), (140, 24, 15, 7), (0, 32, 64, 4), (3, 32, 8, 30)]


@pytest.mark.parametrize("token_bytes", [FP8, MXFP4])
@pytest.mark.parametrize(("tokens", "heads", "block_size", "blocks"), CANDIDATES)
def test_candidate_logits(kind, rng, tokens: int, heads: int, block_size: int, blocks: int, token_bytes: int) -> None:
    tokens = tokens if kind.on_gpu else min(tokens, 20)  # more than that are for many CTAs
    for exact in (False, True):
        inputs = candidates_of(rng, tokens, heads, block_size, blocks, exact, token_bytes)
        expected = oracle_mxfp4.candidate_logits(**of_oracle(inputs))
        out = kind.put(poisoned((tokens, 8 * blocks), np.float32))
        got = kind.take(candidate_logits(**put(kind, inputs), out=out))
        check(got, expected)
        if exact:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("token_bytes", [FP8, MXFP4])
@pytest.mark.parametrize("k", [1, 20, 39, 300])
def test_select_candidate_rows(kind, rng, k: int, token_bytes: int) -> None:
    """The largest of the logits of candidates, by positions; in chunks as well."""
    inputs = candidates_of(rng, 11, 24, 16, 5, True, token_bytes)
    logits = oracle_mxfp4.candidate_logits(**of_oracle(inputs))
    positions = (8 * inputs["candidates"].astype(int)[:, :, None] + np.arange(8)).reshape(11, 40)
    for limit in (1 << 20, 4 * 40 * 3):
        got = kind.take(select_candidate_rows(**put(kind, inputs), k=k, max_workspace_bytes=limit))
        assert (got.shape, got.dtype) == ((11, k), np.int32)
        for t in range(11):
            seen = (inputs["candidates"][t].repeat(8) >= 0) & (positions[t] < inputs["lens"][t])
            columns = oracle_indexer.topk(logits[t, seen], k, 0, 40)
            expected = np.where(columns < 0, -1, np.append(positions[t][seen], -1)[columns])
            np.testing.assert_array_equal(got[t], expected, err_msg=f"token {t}")


def test_hostile_candidates(kind, rng) -> None:
    """Blocks and requests that do not exist are not read."""
    inputs = candidates_of(rng, 6, 32, 16, 4, True, MXFP4)
    inputs["lens"][:] = 200
    inputs["candidates"][:4] = [[0, 1, 25, 2**28], [2**31 - 1, -(2**31), -5, 3], [-1] * 4, [24, 25, 26, 27]]
    inputs["candidates"][4:] = 1
    inputs["req_id"][-2:] = -1, 3
    got = kind.take(candidate_logits(**put(kind, inputs)))
    np.testing.assert_array_equal(got, oracle_mxfp4.candidate_logits(**of_oracle(inputs)))
    assert np.isneginf(got[-2:]).all()


@pytest.mark.parametrize("count", [1, 5, 64, 2048])
@pytest.mark.parametrize("n", [1, 8, 9, 300, 3001])
def test_blocks(kind, rng, n: int, count: int) -> None:
    """Plateaus, so that ties decide, infinities and NaN."""
    logits = np.maximum(rng.standard_normal((9, n)), rng.choice([-9, 0, 2])).astype(np.float32)
    logits[rng.random(logits.shape) < 0.002] = np.nan
    logits[rng.random(logits.shape) < 0.01] = rng.choice([np.inf, -np.inf])
    starts, ends = indexers.ranges(rng, 9, n)
    rows = gapped(logits, 0, int(rng.integers(0, 5)))
    for bounds in ((starts, ends), (None, ends), (None, None)):
        got = kind.take(candidate_blocks(kind.put(rows), count, *(None if b is None else kind.put(b) for b in bounds)))
        assert (got.shape, got.dtype) == ((9, count), np.int32)
        for i in range(9):
            start, end = (0 if bounds[0] is None else starts[i]), (n if bounds[1] is None else ends[i])
            assert got[i].tolist() == oracle_mxfp4.best_blocks(logits[i], count, int(start), int(end)), i


@pytest.mark.parametrize("limit", [1 << 20, 1])
def test_blocks_beside_rows(kind, rng, limit: int) -> None:
    """`select_rows` and `select_rows_paged` give the blocks of the logits that they choose rows by."""
    of_pages = paged(rng, 3, 2, 32, 16, 150, exact=True)
    logits = paged_indexer_logits(**of_pages)
    ends = (of_pages["context_lens"][:, None] + [-1, 0]).reshape(-1).clip(0).astype(np.int32)
    blocks = kind.put(poisoned((6, 5), np.int32))
    rows = select_rows_paged(**put(kind, of_pages), k=9, max_workspace_bytes=limit, blocks=blocks)
    np.testing.assert_array_equal(kind.take(rows), topk_indices(logits, 9, ends=ends))
    np.testing.assert_array_equal(kind.take(blocks), candidate_blocks(logits, 5, ends=ends))

    of_rows = ragged(rng, 7, 90, 16, exact=True)
    expected = select_rows(**of_rows, k=9, blocks=(wanted := np.zeros((7, 5), np.int32)))
    blocks = kind.put(poisoned((7, 5), np.int32))
    rows = select_rows(**put(kind, of_rows), k=9, max_workspace_bytes=limit, blocks=blocks)
    np.testing.assert_array_equal(kind.take(rows), expected)
    np.testing.assert_array_equal(kind.take(blocks), wanted)


@pytest.mark.parametrize("token_bytes", [FP8, MXFP4])
def test_candidates_of_a_layer_serve_the_next(kind, rng, token_bytes: int) -> None:
    """A second layer chooses the rows that dense logits of the candidate blocks' rows choose, those of -inf too."""
    first, second = (paged(rng, 2, 2, 32, 16, 180, exact=True, token_bytes=token_bytes) for _ in range(2))
    first["context_lens"][:] = second["context_lens"][:] = 180, 33
    blocks = kind.put(poisoned((4, 6), np.int32))
    select_rows_paged(**put(kind, first), k=5, blocks=blocks)
    logits = paged_indexer_logits(**second)
    lens = (second["context_lens"][:, None] + [-1, 0]).reshape(-1).astype(np.int32)
    want = np.full((4, 20), -1, np.int32)
    for row, chosen in enumerate(kind.take(blocks)):
        (rows,) = np.nonzero(np.isin(np.arange(lens[row]) // 8, chosen))
        places = topk_indices(logits[row, rows][None], 20)[0]
        want[row, : np.count_nonzero(places >= 0)] = rows[places[places >= 0]]
    there = put(kind, {name: second[name] for name in ("kv_cache", "w", "block_table")})
    got = select_candidate_rows(
        kind.put(np.ascontiguousarray(second["q8"].reshape(4, 32, 128))), candidates=blocks, lens=kind.put(lens),
        req_id=kind.put(np.array([0, 0, 1, 1], np.int32)), k=20, **there,
    )  # fmt: skip
    np.testing.assert_array_equal(kind.take(got), want)
