"""Selection against a stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import indexer_logits, paged_indexer_logits, select_rows, select_rows_paged, topk_indices
from cupy_mla.reference import topk as reference
from tests import indexers, oracle_indexer
from tests.kinds import BF16, POISON, gapped, poisoned

from .test_logits import paged, put, ragged

KS = [1, 63, 512, 1024, 2047, 2048, 3000, 4096]


def select(kind, logits: np.ndarray, k: int, starts=None, ends=None) -> np.ndarray:
    bounds = [None if a is None else kind.put(np.asarray(a, np.int32)) for a in (starts, ends)]
    got = kind.take(topk_indices(kind.put(logits), k, *bounds))
    assert (got.shape, got.dtype) == ((len(logits), k), np.int32)
    return got


def check(kind, logits: np.ndarray, k: int, starts=None, ends=None) -> None:
    got = select(kind, logits, k, starts, ends)
    for i, row in enumerate(logits):
        start, end = 0 if starts is None else int(starts[i]), len(row) if ends is None else int(ends[i])
        np.testing.assert_array_equal(got[i], oracle_indexer.topk(row, k, start, end), err_msg=f"row {i}")


@pytest.mark.parametrize("k", KS)
def test_random(kind, rng, k: int) -> None:
    n = int(rng.integers(4097, 9000))
    check(kind, gapped(rng.standard_normal((3, n), np.float32), 0, int(rng.integers(0, 5))), k)


@pytest.mark.parametrize("k", [1, 63, 512])
@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 1300])
def test_ranges(kind, rng, n: int, k: int) -> None:
    logits = rng.standard_normal((9, n), np.float32)
    starts, ends = indexers.ranges(rng, 9, n)
    for i in range(9):  # what is not in the range counts for nothing
        logits[i, : max(starts[i], 0)], logits[i, max(ends[i], 0) :] = np.inf, np.nan
    check(kind, logits, k, starts, ends)
    check(kind, logits, k, None, ends)
    check(kind, logits, k, starts, None)


@pytest.mark.parametrize("k", [1, 63, 2047])
def test_bfloat16(kind, rng, k: int) -> None:
    check(
        kind, gapped(rng.standard_normal((3, 4001), np.float32).astype(BF16), 0, 3), k, *indexers.ranges(rng, 3, 4001)
    )


def adversarial(rng: np.random.Generator, name: str, n: int) -> np.ndarray:
    """A row of n logits that is hard to select from."""
    bits = rng.integers(0, 1024, n, dtype=np.uint32)
    plateau = np.where(rng.random(n) < 0.2, rng.standard_normal(n), 0).astype(np.float32)
    return {
        "all equal": np.full(n, rng.standard_normal(), np.float32),
        "lowest ten bits": (np.float32(1.5).view(np.uint32) | bits).view(np.float32),
        "lowest ten bits, negative": (np.float32(-7).view(np.uint32) | bits).view(np.float32),
        "one coarse bin": (1 + rng.random(n) * 1e-3).astype(np.float32),
        "zeros": np.where(plateau > 0, plateau, 0),
        "zeros above": np.where(plateau < 0, plateau, 0),
        "signed zeros": rng.choice(np.array([0.0, -0.0], np.float32), n),
        "denormals": rng.choice([-1, 1], n) * rng.integers(0, 100, n).astype(np.uint32).view(np.float32),
        "infinities": rng.choice(np.array([-np.inf, np.inf, 0, 1], np.float32), n),
        "nan": np.where(rng.random(n) < 0.9, np.float32(np.nan), rng.choice(np.array([-np.inf, 2], np.float32), n)),
        "nan of both signs": rng.choice(np.array([0x7FC00001, 0xFFFFFFFF, 0xFF800001], np.uint32), n).view(np.float32),
        "rising": np.sort(rng.standard_normal(n)).astype(np.float32),
        "falling": -np.sort(rng.standard_normal(n)).astype(np.float32),
        "any bits": rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
    }[name].astype(np.float32)


ADVERSARIAL = [
    "all equal", "lowest ten bits", "lowest ten bits, negative", "one coarse bin", "zeros", "zeros above",
    "signed zeros", "denormals", "infinities", "nan", "nan of both signs", "rising", "falling", "any bits",
]  # fmt: skip


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial(kind, rng, name: str) -> None:
    logits = np.stack([adversarial(rng, name, 3001) for _ in range(2)])
    for k in KS:
        check(kind, logits, k)


def by_sort(row: np.ndarray, k: int) -> np.ndarray:
    """As the oracle, by a sort of a whole row: its loops would take too long for a long one."""
    by_size = np.argsort(np.where(np.isnan(row), np.inf, -row), kind="stable")
    if np.isnan(row).any():  # behind -inf, in order
        by_size = np.concatenate([by_size[~np.isnan(row[by_size])], np.flatnonzero(np.isnan(row))])
    return np.pad(np.sort(by_size[:k]), (0, max(k - len(row), 0)), constant_values=-1)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("most", [10, 100, 1000, 10_000, 100_000, 1 << 20])
def test_rows_of_1_to_1_m(kind, rng, most: int, k: int) -> None:
    """One row and three, of ten times fewer logits at least, whole or by ranges, of which every other one has ties."""
    if most > 10_000 and not kind.on_gpu and (kind.name != "numpy" or k not in (63, 4096)):
        pytest.skip("takes long, and shows no more")
    n, rows = int(rng.integers(most // 10, most + 1)), int(rng.choice([1, 3]))
    logits = rng.standard_normal((rows, n), np.float32)
    logits[::2] = logits[::2].round(2)
    logits = logits.astype(rng.choice([np.dtype(np.float32), BF16]))
    starts, ends = indexers.ranges(rng, rows, n) if rng.integers(2) else (np.zeros(rows, int), np.full(rows, n))
    got = select(kind, gapped(logits, 0, int(rng.integers(0, 5))), k, starts, ends)
    for i, row in enumerate(logits):
        own = row[max(starts[i], 0) : max(ends[i], 0)].astype(np.float32)
        np.testing.assert_array_equal(got[i], by_sort(own, k), err_msg=f"row {i} of {n}, {starts[i]} to {ends[i]}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["random", *ADVERSARIAL])
@pytest.mark.parametrize(("rows", "n"), [(1, 200_003), (3, 70_001), (150, 33_000), (1, 1 << 20)])
def test_long_rows(kind, rng, rows: int, n: int, name: str) -> None:
    if not kind.on_gpu:
        pytest.skip("takes long")
    few = min(rows, 3)
    drawn = [rng.standard_normal(n, np.float32) if name == "random" else adversarial(rng, name, n) for _ in range(few)]
    logits = np.stack([drawn[i % few] for i in range(rows)])
    ends = rng.integers(n // 2, n + 5, rows)
    starts = rng.integers(-2, n // 3, rows)
    for k in (63, 2048, 4096):
        got = select(kind, logits, k, starts, ends)
        for i in rng.permutation(rows)[:10]:
            np.testing.assert_array_equal(
                got[i], by_sort(logits[i, max(starts[i], 0) : ends[i]], k), err_msg=f"row {i} of {rows} x {n}, k {k}"
            )


def test_given_result(kind, rng) -> None:
    logits = rng.standard_normal((4, 100), np.float32)
    out, whole = kind.put_with_allocation(gapped(poisoned((4, 120), np.int32), 0, 3))
    assert topk_indices(kind.put(logits), 120, out=out) is out
    for i in range(4):
        np.testing.assert_array_equal(kind.take(out)[i], oracle_indexer.topk(logits[i], 120, 0, 100))
    assert (kind.take(whole).reshape(4, -1)[:, 480:] == POISON).all()


def test_unsorted_is_the_same_set(kind, rng) -> None:
    logits = kind.put(rng.standard_normal((3, 999), np.float32))
    a, b = (kind.take(topk_indices(logits, 200, sort=sort)) for sort in (True, False))
    np.testing.assert_array_equal(a, np.sort(b, axis=1))


@pytest.mark.parametrize(("rows", "n"), [(0, 5), (3, 0)])
def test_nothing(kind, rows: int, n: int) -> None:
    assert (select(kind, np.zeros((rows, n), np.float32), 7) == -1).all()


# --- selection ------------------------------------------------------------------------------------------------


def chosen(kind, logits: np.ndarray, k: int, starts, ends) -> np.ndarray:
    rows = zip(logits, starts, ends, strict=True)
    return np.array([oracle_indexer.topk(row, k, int(start), int(end)) for row, start, end in rows]).reshape(-1, k)


@pytest.mark.parametrize(("m", "n", "heads", "k"), [(7, 301, 64, 100), (3, 50, 32, 64), (5, 0, 8, 3), (0, 9, 8, 3)])
def test_select_rows(kind, rng, m: int, n: int, heads: int, k: int) -> None:
    """As the two steps, in chunks or at once, and as float64 where the logits are exact."""
    inputs = ragged(rng, m, n, heads, exact=True)
    there = put(kind, inputs)
    expected = chosen(kind, oracle_indexer.ragged_logits(**inputs), k, inputs["starts"], inputs["ends"])
    for nbytes in (512 << 20, 4 * n * 2 + 3, 1):
        np.testing.assert_array_equal(kind.take(select_rows(**there, k=k, max_workspace_bytes=nbytes)), expected)
    two_steps = topk_indices(indexer_logits(**there), k, there["starts"], there["ends"])
    np.testing.assert_array_equal(kind.take(two_steps), expected)


def test_logits_fit_the_workspace(monkeypatch, rng) -> None:
    """In chunks as large as it allows, of one query or, over a paged cache, one request at least."""
    sizes: list[tuple[int, int]] = []  # bytes of a chunk's logits, and of all that are at least in one

    def noted(name: str, at: int) -> None:
        make = getattr(reference, name)

        def made(*arguments) -> None:
            logits, queries = arguments[-1], arguments[0].q8.shape[:at]
            sizes.append((logits.nbytes, logits.nbytes // max(queries[0], 1)))
            make(*arguments)

        monkeypatch.setattr(reference, name, made)

    noted("indexer_logits", 1)
    noted("paged_indexer_logits", 1)
    for most in (1, 4 * 130, 3000, 9000, 1 << 20):
        for call, inputs in (
            (select_rows, ragged(rng, 13, 130, 8)), (select_rows_paged, paged(rng, 13, 2, 8, 64, 130))
        ):  # fmt: skip
            sizes.clear()
            call(**inputs, k=9, max_workspace_bytes=most)
            least = sizes[0][1]
            assert all(nbytes <= max(most, least) for nbytes, _ in sizes)
            assert len(sizes) == -(-13 // max(most // least, 1))


def test_select_rows_of_any_logits(kind, rng) -> None:
    inputs = ragged(rng, 9, 400, 64)
    there = put(kind, inputs)
    two_steps = topk_indices(indexer_logits(**there, clean=False), 50, there["starts"], there["ends"])
    got = select_rows(**there, k=50, max_workspace_bytes=5000)
    np.testing.assert_array_equal(kind.take(got), kind.take(two_steps))


@pytest.mark.parametrize("queries", [1, 40])
def test_queries_that_see_at_most_k_keys(kind, rng, queries: int) -> None:
    """They get no logits; beside others or alone, all that they see is chosen, whatever stands in the workspace."""
    k, keys = 100, 190
    of_rows, of_pages = ragged(rng, queries, keys, 64), paged(rng, 5, queries, 64, 64, keys)
    sizes = k + np.sort(rng.integers(-3, 4, queries))
    of_rows["starts"] = rng.integers(0, keys - k - 3, queries, dtype=np.int32)
    of_rows["ends"] = (of_rows["starts"] + sizes).astype(np.int32)
    there = put(kind, of_rows)
    expected = topk_indices(indexer_logits(**there), k, there["starts"], there["ends"])
    kind.put(np.full((queries, keys + 2), np.nan, np.float32))  # freed memory, which the workspace may get
    np.testing.assert_array_equal(kind.take(select_rows(**there, k=k)), kind.take(expected))

    of_pages["context_lens"] = rng.integers(k - 3, keys + 1, 5, dtype=np.int32)
    there = put(kind, of_pages)
    lens = [oracle_indexer.seen_keys(of_pages["context_lens"], queries, r, j) for r in range(5) for j in range(queries)]
    ends = kind.put(np.array(lens, np.int32))
    expected = topk_indices(paged_indexer_logits(**there), k, None, ends)
    kind.put(np.full((5 * queries, keys + 2), np.nan, np.float32))
    np.testing.assert_array_equal(kind.take(select_rows_paged(**there, k=k)), kind.take(expected))


@pytest.mark.parametrize("block_size", [1, 4, 15, 64])
def test_select_rows_slots(kind, rng, block_size: int) -> None:
    inputs = ragged(rng, 6, 130, 64, exact=True)
    table = rng.integers(-1, 50, (3, -(-100 // block_size)), dtype=np.int32)
    table[0, 0] = 2**31 - 1
    req_id = rng.integers(-1, 4, 6, dtype=np.int32)
    positions = chosen(kind, oracle_indexer.ragged_logits(**inputs), 77, inputs["starts"], inputs["ends"])
    expected = [oracle_indexer.slots(row, int(r), table, block_size) for row, r in zip(positions, req_id, strict=True)]
    out = kind.put(poisoned((6, 77), np.int32))
    got = select_rows(
        **put(kind, inputs), k=77, req_id=kind.put(req_id), block_table=kind.put(table), block_size=block_size, out=out,
        max_workspace_bytes=1500,
    )  # fmt: skip
    assert got is out
    np.testing.assert_array_equal(kind.take(got), expected)


@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), [(3, 1, 64, 64, 200), (4, 3, 32, 7, 100)])
def test_select_rows_paged(kind, rng, b: int, n: int, heads: int, block_size: int, longest: int) -> None:
    inputs, k = paged(rng, b, n, heads, block_size, longest, exact=True), 60
    there = put(kind, inputs)
    logits = oracle_indexer.paged_logits(**{"cache" if name == "kv_cache" else name: a for name, a in inputs.items()})
    lens = [oracle_indexer.seen_keys(inputs["context_lens"], n, r, j) for r in range(b) for j in range(n)]
    expected = chosen(kind, logits, k, [0] * len(lens), lens)
    slots = [oracle_indexer.slots(row, i // n, inputs["block_table"], block_size) for i, row in enumerate(expected)]
    for nbytes in (512 << 20, 4 * longest * n * 2, 1):
        got = select_rows_paged(**there, k=k, max_workspace_bytes=nbytes)
        np.testing.assert_array_equal(kind.take(got), expected)
        got = select_rows_paged(**there, k=k, slots=True, max_workspace_bytes=nbytes)
        np.testing.assert_array_equal(kind.take(got), slots)
    two_steps = kind.take(paged_indexer_logits(**there))
    np.testing.assert_array_equal(chosen(kind, two_steps, k, [0] * len(lens), lens), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("b", "longest"),
    [(3, 9000), (140, 7_000), (300, 10_500), (140, 14_000), (3, 20_000), (300, 20_000), (100, 40_000), (1, 150_000)],
)
def test_slots_of_long_contexts(kind, rng, b: int, longest: int) -> None:
    """Of requests that share blocks, so that many logits are equal."""
    if not kind.on_gpu:
        pytest.skip("takes long")
    blocks = 500
    table = rng.integers(0, blocks, (b, -(-longest // 64)), dtype=np.int32)
    there = put(kind, {
        "q8": indexers.codes(rng, b, 1, 8, 128),
        "kv_cache": indexers.key_cache(indexers.codes(rng, blocks, 64, 128), indexers.scales(rng, blocks, 64)),
        "w": indexers.weights(rng, b, 8), "context_lens": rng.integers(longest // 2, longest + 1, b, dtype=np.int32),
        "block_table": table, "max_context_len": longest,
    })  # fmt: skip
    k = int(rng.choice([500, 2048, 4096]))
    positions = kind.take(select_rows_paged(**there, k=k))
    logits = kind.take(paged_indexer_logits(**there))
    for i in rng.permutation(b)[:5]:
        row = logits[i, : int(kind.take(there["context_lens"])[i])]
        np.testing.assert_array_equal(positions[i], by_sort(row, k))
    slots = np.where(positions < 0, -1, np.take_along_axis(table, positions // 64, 1) * 64 + positions % 64)
    np.testing.assert_array_equal(kind.take(select_rows_paged(**there, k=k, slots=True)), slots)


def test_select_rows_paged_by_lengths_of_tokens(kind, rng) -> None:
    inputs = paged(rng, 2, 2, 64, 16, 90, exact=True)
    inputs["kv_cache"] = indexers.key_cache(indexers.exact_codes(rng, 14, 16, 128), np.ones((14, 16), np.float32))
    inputs["context_lens"] = np.array([[5, 80], [90, 1]], np.int32)
    logits = oracle_indexer.paged_logits(**{"cache" if name == "kv_cache" else name: a for name, a in inputs.items()})
    expected = chosen(kind, logits, 33, [0] * 4, inputs["context_lens"].reshape(-1))
    np.testing.assert_array_equal(kind.take(select_rows_paged(**put(kind, inputs), k=33)), expected)
