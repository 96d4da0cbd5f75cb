"""The front door: DeepGEMM's signatures, and what it hands on."""

from __future__ import annotations

import doctest
import inspect

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla import deep_gemm
from tests import indexers, oracle, oracle_indexer
from tests.ops.test_logits import paged, put, ragged

# Names and defaults of DeepGEMM's Python interface, as vLLM 0.22.1 ships it.
REQUIRED = inspect.Parameter.empty
ROWS = {
    "q": REQUIRED, "kv": REQUIRED, "weights": REQUIRED, "cu_seq_len_k_start": REQUIRED, "cu_seq_len_k_end": REQUIRED,
    "clean_logits": True, "max_seqlen_k": 0,
}  # fmt: skip
PAGED = {
    "q": REQUIRED, "kv_cache": REQUIRED, "weights": REQUIRED, "context_lens": REQUIRED, "block_table": REQUIRED,
    "schedule_meta": REQUIRED, "max_context_len": REQUIRED, "clean_logits": False,
}  # fmt: skip
METADATA = {"context_lens": REQUIRED, "block_kv": REQUIRED, "num_sms": REQUIRED}
SIGNATURES = {
    "fp8_mqa_logits": ROWS, "fp8_fp4_mqa_logits": ROWS, "fp8_paged_mqa_logits": PAGED,
    "fp8_fp4_paged_mqa_logits": PAGED, "get_paged_mqa_logits_metadata": METADATA,
}  # fmt: skip


def test_signatures() -> None:
    assert deep_gemm.__all__ == sorted(SIGNATURES)
    for name, expected in SIGNATURES.items():
        parameters = inspect.signature(getattr(deep_gemm, name)).parameters
        assert [(n, p.default) for n, p in parameters.items()] == list(expected.items())
        assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("spelling", ["fp8", "fp8_fp4"])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("m", "n", "heads"), [(9, 300, 64), (20, 90, 32)])
def test_rows(kind, rng, spelling: str, clean: bool, m: int, n: int, heads: int) -> None:
    inputs = ragged(rng, m, n, heads)
    q8, k8, ks, w, starts, ends = put(kind, inputs).values()
    call = getattr(deep_gemm, f"{spelling}_mqa_logits")
    got = kind.take(call(q8 if spelling == "fp8" else (q8, None), (k8, ks), w, starts, ends, clean))
    check(got, oracle_indexer.ragged_logits(**inputs), clean)


@pytest.mark.parametrize("spelling", ["fp8", "fp8_fp4"])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_paged(kind, rng, spelling: str, clean: bool, of_tokens: bool, n: int) -> None:
    """The cache has an axis of 1, context lengths are [B, n] or [B], the schedule is that of the front door."""
    inputs = paged(rng, 3, n, 64, 64, 300)
    inputs["kv_cache"] = np.ascontiguousarray(inputs["kv_cache"])
    if of_tokens:
        lens = inputs["context_lens"][:, None] - n + 1 + np.arange(n)
        inputs["context_lens"] = lens.clip(0).astype(np.int32)
    given = put(kind, inputs | {"kv_cache": inputs["kv_cache"][:, :, None]})
    schedule = deep_gemm.get_paged_mqa_logits_metadata(given["context_lens"], 64, 132)
    assert (tuple(schedule.shape), kind.take(schedule).dtype) == ((133, 2), np.int32)
    call = getattr(deep_gemm, f"{spelling}_paged_mqa_logits")
    q = given["q8"] if spelling == "fp8" else (given["q8"], None)
    got = call(q, given["kv_cache"], given["w"], given["context_lens"], given["block_table"], schedule, 300, clean)
    expected = oracle_indexer.paged_logits(**{"cache" if k == "kv_cache" else k: a for k, a in inputs.items()})
    check(kind.take(got), expected, clean)


# --- DeepGEMM's own test cases --------------------------------------------------------------------------------


def causal_ranges(rng: np.random.Generator, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The last m tokens of a sequence of n, each before itself."""
    return np.zeros(m, np.int32), np.arange(n - m, n, dtype=np.int32)


def one_ranks_ranges(rng: np.random.Generator, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Context parallelism: a sequence of n in 2 n / m portions, of which a rank has one from either end."""
    half, ranks = m // 2, n // m
    rank = ranks // 3
    firsts = (rank * half, (2 * ranks - 1 - rank) * half)
    return np.zeros(m, np.int32), np.concatenate([np.arange(f, f + half, dtype=np.int32) for f in firsts])


def packed_ranges(rng: np.random.Generator, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Four sequences side by side, where compressed logits are narrower than the keys."""
    length, own = n // 4, m // 4
    starts = np.repeat(np.arange(4) * length, own)
    ends = starts + np.tile(np.arange(length - own, length), 4) + 1
    return starts.astype(np.int32), ends.astype(np.int32)


def some_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Rows [*shape, 128] of e4m3 bytes, drawn from a few hundred."""
    return indexers.codes(rng, 500, 128)[rng.integers(500, size=shape)]


def exact_logits(q8: np.ndarray, k8: np.ndarray, ks: np.ndarray, w: np.ndarray) -> np.ndarray:
    """As `oracle_indexer.logits`, for tens of thousands of keys."""
    dots = oracle.E4M3[k8].astype(np.float64) @ oracle.E4M3[q8].astype(np.float64).T
    return ks.astype(np.float64) * (np.maximum(dots, 0) @ w.astype(np.float64))


def skip_unless_small(kind, entries: int) -> None:
    if entries > 100_000 and kind.name != "cupy":
        pytest.skip("takes long, and shows no more than CuPy does")


RANGES = {"causal": causal_ranges, "one rank's": one_ranks_ranges, "packed": packed_ranges}
FULL = [pytest.param(m, n, marks=pytest.mark.gpu) for m in (2048, 8192) for n in (8192, 65536)]
SAMPLED = 4  # rows that are compared with float64, beside the first and the last


def check_rows(kind, rng, got, expected_of, starts: np.ndarray, seen: np.ndarray, clean: bool) -> None:
    """Rows whose entries from `starts` on are `seen` logits: some against float64; of all, how many are -inf."""
    rows = np.unique(np.append(rng.integers(len(seen), size=SAMPLED), [0, len(seen) - 1]))
    sampled = np.concatenate([kind.take(got[int(i)])[starts[i] : starts[i] + seen[i]] for i in rows])
    assert np.isfinite(sampled).all()
    indexers.assert_close(sampled, np.concatenate([expected_of(i) for i in rows]))
    if clean:
        left_out = kind.take((got == float("-inf")).sum(-1))
        np.testing.assert_array_equal(left_out, got.shape[1] - seen)


@pytest.mark.parametrize("compressed", [False, True], ids=["whole", "compressed"])
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "as it is"])
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize(("m", "n"), [(32, 256), (128, 512), *FULL])
def test_cases_of_rows(kind, rng, m: int, n: int, ranges, clean: bool, compressed: bool) -> None:
    """64 heads; compressed rows are as wide as the longest range, and start at their first key."""
    skip_unless_small(kind, m * n)
    q8, k8 = some_codes(rng, m, 64), some_codes(rng, n)
    ks, w = indexers.scales(rng, n), indexers.weights(rng, m, 64)
    starts, ends = ranges(rng, m, n)
    seen = ends - starts
    width = int(seen.max()) if compressed else 0
    given = map(kind.put, (q8, k8, ks, w, starts, ends))
    q, keys, scales, *rest = given
    got = deep_gemm.fp8_mqa_logits(q, (keys, scales), *rest, clean, width)
    assert tuple(got.shape) == (m, width or n)

    def of_range(i: int) -> np.ndarray:
        own = slice(int(starts[i]), int(ends[i]))
        return exact_logits(q8[i], k8[own], ks[own], w[i])

    check_rows(kind, rng, got, of_range, starts * (not compressed), seen, clean)


FULL_BATCHES = [
    pytest.param(b, n, mean, 111_000, marks=pytest.mark.gpu)
    for b, n in ((64, 1), (64, 2), (128, 1)) for mean in (8192, 65536)
]  # fmt: skip


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "as it is"])
@pytest.mark.parametrize(("requests", "n", "mean", "longest"), [(4, 1, 200, 600), (3, 2, 130, 300), *FULL_BATCHES])
def test_cases_of_paged_batches(kind, rng, requests: int, n: int, mean: int, longest: int, clean: bool) -> None:
    """64 heads, blocks of 64; context lengths within 30 % of their mean, far below what rows have room for."""
    skip_unless_small(kind, requests * longest)
    lens = rng.integers(int(0.7 * mean), int(1.3 * mean), requests, dtype=np.int32)
    blocks = -(-lens // 64)
    table = np.zeros((requests, int(blocks.max())), np.int32)
    order = iter(np.split(rng.permutation(blocks.sum()), np.cumsum(blocks)[:-1]))
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    cache = indexers.key_cache(some_codes(rng, int(blocks.sum()), 64), indexers.scales(rng, int(blocks.sum()), 64))
    q8, w = some_codes(rng, requests, n, 64), indexers.weights(rng, requests * n, 64)
    per_token = lens[:, None] - n + 1 + np.arange(n, dtype=np.int32)
    q, keys, weights, context_lens, block_table = map(kind.put, (q8, cache[:, :, None], w, per_token, table))
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context_lens, 64, 132)
    got = deep_gemm.fp8_paged_mqa_logits(q, keys, weights, context_lens, block_table, schedule, longest, clean)
    assert tuple(got.shape) == (requests * n, longest)

    def of_request(i: int) -> np.ndarray:
        b, j = divmod(int(i), n)
        own = cache[table[b, : blocks[b]]].reshape(blocks[b], -1)
        codes = own[:, : 128 * 64].reshape(-1, 128)[: per_token[b, j]]
        scales = np.ascontiguousarray(own[:, 128 * 64 :]).view(np.float32).reshape(-1)[: per_token[b, j]]
        return exact_logits(q8[b, j], codes, scales, w[i])

    seen = per_token.reshape(-1)
    check_rows(kind, rng, got, of_request, 0 * seen, seen, clean)


def check(got: np.ndarray, expected: np.ndarray, clean: bool) -> None:
    """With `clean` all entries, else those that a token sees."""
    seen = ~np.isneginf(expected)
    assert seen.any()
    assert not clean or (np.isneginf(got) == ~seen).all()
    indexers.assert_close(np.where(seen, got, -np.inf), expected)


def test_what_is_not_there_is_an_error(rng) -> None:
    q8, k8, ks, w, starts, ends = ragged(rng, 3, 20, 64).values()
    rest = (w, starts, ends)
    with pytest.raises(ValueError, match=r"^max_seqlen_k must be >= 0, got -1"):
        deep_gemm.fp8_mqa_logits(q8, (k8, ks), *rest, False, -1)
    with pytest.raises(ValueError, match=r"^q\[0\]: expected shape"):
        deep_gemm.fp8_fp4_mqa_logits((q8, np.zeros((3, 64), np.int32)), (k8, ks), *rest)
    for q, kv, name in ((q8, (k8, ks), "q"), ((q8, None), k8, "kv")):
        with pytest.raises(TypeError, match=f"^{name}: expected a pair of values and scales, got ndarray"):
            deep_gemm.fp8_fp4_mqa_logits(q, kv, *rest)
    of_pages = paged(rng, 2, 1, 64, 64, 90)
    pages = (of_pages["kv_cache"], of_pages["w"], of_pages["context_lens"], of_pages["block_table"], None, 90)
    for call in (  # as of vLLM 0.33
        lambda: deep_gemm.fp8_fp4_mqa_logits((q8, None), (k8, ks), *rest, 20),
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits((of_pages["q8"], None), *pages, None),
    ):
        with pytest.raises(TypeError, match=r"^clean_logits: expected True or False, got "):
            call()
    for lens, error in ((np.zeros((2, 1), np.int64), TypeError), (np.zeros((2, 1, 1), np.int32), ValueError)):
        with pytest.raises(error, match=r"^context_lens: "):
            deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)


@pytest.mark.parametrize("name", ["fp8_mqa_logits", "fp8_paged_mqa_logits"])
def test_examples_in_docstrings(name: str) -> None:
    globs = {"np": np, "cupy_mla": cupy_mla, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
    example = doctest.DocTestParser().get_doctest(getattr(deep_gemm, name).__doc__, globs, name, None, None)
    assert any(name in part.source for part in example.examples)
    printed: list[str] = []
    doctest.DocTestRunner().run(example, out=printed.append)
    assert not printed, "".join(printed)


@pytest.mark.parametrize("packed", [False, True])
def test_fp4(kind, rng, packed: bool) -> None:
    """As bytes, and as DeepGEMM packs it: int8 of values, int32 of scales. The same bits as of widened queries."""
    heads, n = 16, 2
    codes, scales = rng.integers(0, 256, (3, n, heads, 64), dtype=np.uint8), rng.integers(120, 126, (3, n, heads, 4))
    keys, key_scales = rng.integers(0, 256, (40, 64), dtype=np.uint8), rng.integers(120, 126, (40, 4))
    scales, key_scales = scales.astype(np.uint8), key_scales.astype(np.uint8)
    weights = rng.standard_normal((3 * n, heads)).astype(np.float32)
    q8, w = cupy_mla.widen_mxfp4(codes.reshape(-1, heads, 64), scales.reshape(-1, heads, 4), weights)
    k8, ks = cupy_mla.widen_mxfp4(keys, key_scales)
    starts, ends = np.zeros(3 * n, np.int32), np.full(3 * n, 40, np.int32)
    cache = np.zeros((3, 16, 68), np.uint8)
    cupy_mla.indexer_k_quant_and_cache(rng.standard_normal((40, 128)).astype(ml_dtypes.bfloat16), cache, np.arange(40))
    table, lens = np.arange(3, dtype=np.int32)[[0, 1, 2] * 3].reshape(3, 3), np.array([40, 7, 39], np.int32)

    def put(values: np.ndarray, of: np.ndarray) -> tuple:
        if packed:
            values, of = values.view(np.int8), of.view(np.int32)[..., 0]
        return kind.put(values), kind.put(of)

    rows = [kind.put(a) for a in (weights, starts, ends)]
    flat = codes.reshape(-1, heads, 64), scales.reshape(-1, heads, 4)
    got = deep_gemm.fp8_fp4_mqa_logits(put(*flat), put(keys, key_scales), *rows)
    indexers.assert_close(kind.take(got), cupy_mla.indexer_logits(q8, k8, ks, w, starts, ends))
    fp8_keys, fp8_scales = indexers.codes(rng, 40, 128), indexers.scales(rng, 40)
    got = deep_gemm.fp8_fp4_mqa_logits(put(*flat), (kind.put(fp8_keys), kind.put(fp8_scales)), *rows)
    indexers.assert_close(kind.take(got), cupy_mla.indexer_logits(q8, fp8_keys, fp8_scales, w, starts, ends))
    pages = [kind.put(a) for a in (cache[:, :, None], weights, lens, table)]
    got = deep_gemm.fp8_fp4_paged_mqa_logits(put(codes, scales), *pages, None, 40, True)
    expected = cupy_mla.paged_indexer_logits(q8.reshape(3, n, heads, 128), cache, w, lens, table, 40)
    np.testing.assert_array_equal(np.isneginf(kind.take(got)), np.isneginf(expected))
    indexers.assert_close(kind.take(got), expected)
