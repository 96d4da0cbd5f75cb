"""Context parallelism against plain loops, and several ranks in one process against one."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import (
    globalize_topk,
    local_seq_lens,
    localize_topk,
    merge_attention,
    merge_topk,
    sparse_decode,
    topk_indices,
)
from tests import oracle, oracle_context
from tests.kinds import BF16, gapped, poisoned

DIVISIONS = [(1, 0, 1), (2, 0, 1), (2, 1, 1), (3, 1, 5), (5, 4, 64), (8, 3, 1), (1024, 1023, 1 << 20)]


@pytest.mark.parametrize(("world_size", "rank", "interleave"), DIVISIONS)
def test_local_seq_lens(kind, rng, world_size: int, rank: int, interleave: int) -> None:
    lens = np.concatenate([rng.integers(0, 3 * world_size * min(interleave, 100), 50), [0, 1, 2]]).astype(np.int32)
    lens %= 20000
    expected = [len(oracle_context.tokens_of(int(n), world_size, rank, interleave)) for n in lens]
    np.testing.assert_array_equal(kind.take(local_seq_lens(kind.put(lens), world_size, rank, interleave)), expected)


def test_longest_lengths(kind) -> None:
    """What int32 can hold is divided without overflow; of tokens below 0 there are none."""
    lens = np.array([2**31 - 1, 2**31 - 2, -1, -(2**31)], np.int32)
    for world_size, interleave in ((1, 1), (2, 1), (1024, 1 << 20), (3, 7)):
        parts = [kind.take(local_seq_lens(kind.put(lens), world_size, r, interleave)) for r in range(world_size)]
        np.testing.assert_array_equal(np.sum(parts, 0, dtype=np.int64), lens.clip(0))


@pytest.mark.parametrize(("tokens", "width"), [(3, 2048), (5, 1023), (2, 4), (9, 1), (0, 8), (4, 0)])
@pytest.mark.parametrize(("world_size", "rank", "interleave"), DIVISIONS[:-1])
def test_localize_topk(kind, rng, tokens: int, width: int, world_size: int, rank: int, interleave: int) -> None:
    positions = rng.integers(-1, 6000, (tokens, width), dtype=np.int32)
    positions[rng.random(positions.shape) < 0.1] = -(2**31)
    lists = [oracle_context.localize(row, world_size, rank, interleave) for row in positions]
    expected = np.array([mine + [-1] * (width - len(mine)) for mine in lists], np.int32).reshape(tokens, width)
    given = kind.put(gapped(positions, 0, int(rng.integers(0, 5))))
    out, length = kind.put(poisoned((tokens, width), np.int32)), kind.put(poisoned(tokens, np.int32))
    got = localize_topk(given, world_size, rank, interleave, out=out, topk_length=length)
    assert got[0] is out
    assert got[1] is length
    for local, count in (got, localize_topk(given, world_size, rank, interleave, out=given)):  # in place, too
        np.testing.assert_array_equal(kind.take(local), expected)
        np.testing.assert_array_equal(kind.take(count), [len(mine) for mine in lists])


@pytest.mark.parametrize(
    ("tokens", "width", "keys"), [(3, 2048, 5000), (2, 300, 70), (9, 1, 1), (0, 8, 9), (4, 0, 3), (2, 3, 0)]
)
@pytest.mark.parametrize(("world_size", "rank", "interleave"), DIVISIONS)
def test_globalize_topk(
    kind, rng, tokens: int, width: int, keys: int, world_size: int, rank: int, interleave: int
) -> None:
    logits = rng.standard_normal((tokens, keys), np.float32)
    chosen = rng.integers(-1, keys + 1, (tokens, width), dtype=np.int32)  # -1 and `keys` are none
    chosen[rng.random(chosen.shape) < 0.1] = rng.choice([-(2**31), 2**31 - 1])
    values, positions = np.full((tokens, width), -np.inf, np.float32), np.full((tokens, width), -1, np.int32)
    turn = world_size * interleave
    for t, i in np.argwhere((chosen >= 0) & (chosen < keys)):
        values[t, i] = logits[t, chosen[t, i]]
        turns, in_turn = divmod(int(chosen[t, i]), interleave)
        positions[t, i] = turns * turn + rank * interleave + in_turn
    given = [kind.put(gapped(a, 0, int(rng.integers(0, 5)))) for a in (logits, chosen)]
    results = kind.put(poisoned((tokens, width), np.float32)), kind.put(poisoned((tokens, width), np.int32))
    got = globalize_topk(*given, world_size, rank, interleave, values=results[0], out=results[1])
    assert got[0] is results[0]
    assert got[1] is results[1]
    np.testing.assert_array_equal(kind.take(got[0]), values)
    np.testing.assert_array_equal(kind.take(got[1]), positions)


def test_globalize_is_the_inverse_of_localize(kind, rng) -> None:
    for world_size, rank, interleave in DIVISIONS[:-1]:
        mine = np.array(oracle_context.tokens_of(3000, world_size, rank, interleave), np.int32)[None]
        local, length = localize_topk(kind.put(mine), world_size, rank, interleave)
        logits = kind.put(rng.standard_normal((1, 3000), np.float32))
        _, back = globalize_topk(logits, local, world_size, rank, interleave)
        np.testing.assert_array_equal(kind.take(back), mine)
        assert kind.take(length) == [mine.size]


def logits_of_ranks(rng: np.random.Generator, ranks: int, tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and positions, some of them none; some values equal, both zeros, NaN or infinite."""
    values = rng.standard_normal((ranks, tokens, width), np.float32)
    odd = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.5, -1.5], np.float32)
    values = np.where(rng.random(values.shape) < 0.3, rng.choice(odd, values.shape), values)
    most = 2**31 - 1
    rows = [np.append(rng.permutation(2 * ranks * width)[: ranks * width - 1], most) for _ in range(tokens)]
    positions = np.array(rows, np.int32).reshape(tokens, ranks, width).swapaxes(0, 1)
    return values, np.where(rng.random(positions.shape) < 0.1, -1, positions).astype(np.int32)


@pytest.mark.parametrize(
    ("ranks", "tokens", "width", "k"),
    [(2, 3, 2048, 2048), (2, 2, 4096, 4096), (3, 4, 50, 149), (1, 5, 70, 7), (4, 2, 1, 3),
     (8, 1, 600, 1), (2, 0, 5, 5)],
)  # fmt: skip
def test_merge_topk(kind, rng, ranks: int, tokens: int, width: int, k: int) -> None:
    values, positions = logits_of_ranks(rng, ranks, tokens, width)
    expected = [oracle_context.merge_topk(values[:, t], positions[:, t], k) for t in range(tokens)]
    given = [kind.put(gapped(a, 0, int(rng.integers(0, 2)), int(rng.integers(0, 3)))) for a in (values, positions)]
    out = kind.put(poisoned((tokens, k), np.int32))
    assert merge_topk(*given, k, out=out) is out
    np.testing.assert_array_equal(kind.take(out), np.array(expected, np.int32).reshape(tokens, k))


@pytest.mark.parametrize(
    ("ranks", "tokens", "width", "k"),
    [(2, 3, 2048, 2048), (2, 1, 4096, 4096), (3, 4, 50, 100), (1, 2, 70, 7), (8, 2, 1024, 512), (9, 1, 1500, 2048),
     (40, 1, 30, 700)],
)  # fmt: skip
def test_merge_topk_of_ascending_lists(kind, rng, ranks: int, tokens: int, width: int, k: int) -> None:
    """What ranks pass on: each its own positions, ascending, and those that are none behind."""
    positions = np.full((ranks, tokens, width), -1, np.int32)
    least, interleave = rng.choice([-9, 0, 2]), int(rng.choice([1, 4]))
    values = np.maximum(rng.standard_normal((ranks, tokens, width), np.float32), np.float32(least))  # equal ones
    for r, t in np.ndindex(ranks, tokens):
        mine = np.array(oracle_context.tokens_of(3 * ranks * (width + 4), ranks, r, interleave))
        found = int(rng.integers(width // 2, width + 1))
        positions[r, t, :found] = np.sort(rng.choice(mine, found, replace=False))
    expected = [oracle_context.merge_topk(values[:, t], positions[:, t], k) for t in range(tokens)]
    out = kind.put(poisoned((tokens, k), np.int32))
    np.testing.assert_array_equal(kind.take(merge_topk(kind.put(values), kind.put(positions), k, out=out)), expected)


def test_merge_topk_of_a_plateau(kind) -> None:
    """Of equal ones those at the lowest positions, whichever rank they are of."""
    positions = np.arange(2 * 4096, dtype=np.int32).reshape(4096, 1, 2).transpose(2, 1, 0)  # every other one of a rank
    given = [kind.put(np.ascontiguousarray(a)) for a in (np.zeros((2, 1, 4096), np.float32), positions)]
    np.testing.assert_array_equal(kind.take(merge_topk(*given, 3001))[0], np.arange(3001))


def test_top_k_of_ranks_is_that_of_one(kind, rng) -> None:
    """Each rank chooses among its own logits; together they choose what one with all of them does."""
    logits, k = np.maximum(rng.standard_normal((4, 5000), np.float32), -0.5), 512
    expected = kind.take(topk_indices(kind.put(logits), k))
    values, positions = [], []
    for rank in range(3):
        mine = np.array(oracle_context.tokens_of(5000, 3, rank, 4))
        own = np.ascontiguousarray(logits[:, mine])
        chosen = kind.take(topk_indices(kind.put(own), k))
        values.append(np.take_along_axis(own, chosen, 1))
        positions.append(mine[chosen].astype(np.int32))
    got = merge_topk(kind.put(np.stack(values)), kind.put(np.stack(positions)), k)
    np.testing.assert_array_equal(kind.take(got), expected)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
@pytest.mark.parametrize(
    ("ranks", "tokens", "heads"), [(2, 3, 64), (3, 2, 5), (1, 1, 1), (9, 4, 2), (2, 0, 8), (2, 3, 0)]
)
def test_merge_attention(kind, rng, ranks: int, tokens: int, heads: int, dtype: np.dtype) -> None:
    outs = (3 * rng.standard_normal((ranks, tokens, heads, 512))).astype(dtype)
    lses = (5 * rng.standard_normal((ranks, tokens, heads))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.1] *= 30  # weights that vanish
    for without_rows in (np.inf, -np.inf):
        lses[rng.random(lses.shape) < 0.2] = without_rows
    outs[np.isinf(lses)] = np.nan
    if tokens and heads:
        lses[:, 0, 0] = np.inf
    sink = (3 * rng.standard_normal(heads)).astype(np.float32)
    sink[:2] = np.array([np.inf, -np.inf])[:heads]
    given = [kind.put(gapped(a, 0, *rng.integers(0, 2, 2))) for a in (outs, lses)]
    for z in (None, sink):
        out, lse = kind.put(poisoned((tokens, heads, 512), BF16)), kind.put(poisoned((tokens, heads), np.float32))
        got = merge_attention(*given, None if z is None else kind.put(z), out=out, lse=lse)
        assert got[0] is out
        assert got[1] is lse
        for t in range(tokens):
            for h in range(heads):
                want, want_lse = oracle_context.merge_attention(
                    outs[:, t, h], lses[:, t, h], None if z is None else z[h]
                )
                np.testing.assert_allclose(kind.take(out)[t, h].astype(np.float64), want, rtol=2**-8, atol=1e-6)
                np.testing.assert_allclose(kind.take(lse)[t, h], want_lse, rtol=2e-6, atol=2e-6)


def test_nan_of_a_rank_with_rows_is_seen(kind) -> None:
    outs, lses = np.zeros((2, 1, 2, 512), np.float32), np.zeros((2, 1, 2), np.float32)
    outs[0, 0, 0, 7] = lses[1, 0, 1] = np.nan
    out, lse = (kind.take(a) for a in merge_attention(kind.put(outs), kind.put(lses)))
    assert np.flatnonzero(np.isnan(out[0, 0].astype(np.float32))).tolist() == [7]
    assert np.isnan(out[0, 1].astype(np.float32)).all()
    assert np.isnan(lse).tolist() == [[False, True]]


@pytest.mark.parametrize(("world_size", "interleave"), [(2, 1), (3, 16)])
def test_ranks_in_one_process_attend_as_one(kind, rng, world_size: int, interleave: int) -> None:
    """Rows divided over ranks, each with a cache of its own, merged with the sink: as one rank with all rows."""
    tokens, heads, length, topk, block_size = 3, 8, 300, 64, 16
    q = (10 * rng.standard_normal((tokens, 1, heads, 576))).astype(BF16)
    rows = (0.1 * rng.standard_normal((length, 576))).astype(BF16)
    positions = np.stack([rng.permutation(length)[:topk] for _ in range(tokens)]).astype(np.int32)
    positions[1, 5:] = -1
    positions[2] = -1
    positions[2, 9] = 17  # a single row: the other ranks have none
    sink = rng.standard_normal(heads).astype(np.float32)
    scale = 576**-0.5
    want, _, want_lse = oracle.prefill(q[:, 0], rows[:, None], positions[:, None], scale, sink)
    outs, lses = [], []
    for rank in range(world_size):
        own = rows[oracle_context.tokens_of(length, world_size, rank, interleave)]
        cache = np.zeros((-(-length // block_size), block_size, 576), BF16)
        cache.reshape(-1, 576)[: len(own)] = own
        mine, count = localize_topk(kind.put(positions), world_size, rank, interleave)
        local = kind.put(kind.take(mine)[:, None])
        out, lse = sparse_decode(kind.put(q), kind.put(cache), local, scale, topk_length=count)
        outs.append(kind.take(out)[:, 0])
        lses.append(kind.take(lse)[:, :, 0])
    assert np.isinf(lses).any()
    out, lse = (
        kind.take(a) for a in merge_attention(kind.put(np.stack(outs)), kind.put(np.stack(lses)), kind.put(sink))
    )
    oracle.assert_close(out, want, "decode out")
    oracle.assert_close(lse, want_lse, "decode lse")
