"""The front door: DeepGEMM's signatures, and what it hands on."""

from __future__ import annotations

import doctest
import inspect

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla import deep_gemm
from tests import indexers, oracle_indexer
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


def check(got: np.ndarray, expected: np.ndarray, clean: bool) -> None:
    """With `clean` all entries, else those that a token sees."""
    seen = ~np.isneginf(expected)
    assert seen.any()
    assert not clean or (np.isneginf(got) == ~seen).all()
    assert oracle_indexer.calc_diff(np.where(seen, got, -np.inf), expected) < indexers.TOLERANCE


def test_what_is_not_there_is_an_error(rng) -> None:
    q8, k8, ks, w, starts, ends = ragged(rng, 3, 20, 64).values()
    rest = (w, starts, ends)
    with pytest.raises(ValueError, match=r"^max_seqlen_k is 16, which asks for compressed logits"):
        deep_gemm.fp8_mqa_logits(q8, (k8, ks), *rest, False, 16)
    with pytest.raises(ValueError, match=r"^q: scales were given"):
        deep_gemm.fp8_fp4_mqa_logits((q8, np.zeros((3, 64), np.int32)), (k8, ks), *rest)
    for q, kv, name in ((q8, (k8, ks), "q"), ((q8, None), k8, "kv")):
        with pytest.raises(TypeError, match=f"^{name}: expected a pair, got ndarray"):
            deep_gemm.fp8_fp4_mqa_logits(q, kv, *rest)
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
