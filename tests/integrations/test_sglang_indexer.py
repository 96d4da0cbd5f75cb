"""The indexer of the SGLang plug-in on stand-ins, on the CPU: what is chosen against float64 logits, in each form that
SGLang's attention takes. `wheel_sglang` has the wheel's classes."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations.sglang import indexer  # noqa: E402
from tests.integrations.sglang_calls import Choosing  # noqa: E402
from tests.integrations.steps import Asked, Caches  # noqa: E402
from tests.integrations.test_vllm import as_torch  # noqa: E402
from tests.kinds import E4M3  # noqa: E402

K, TIMES, PAGE = 96, 8, 64
DECODES = [(0, 1, 30), (1, 1, 2), (2, 1, 29), (4, 1, 12)]
PREFILLS = [(3, 9, 26), (0, 1, 31), (1, 7, 4)]


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    indexer.warn_of.cache_clear()


class Step:
    """A step's arrays, with tokens behind the last that pad the batch; sums of the indexer are exact."""

    def __init__(self, rng: np.random.Generator, requests: list[tuple[int, int, int]], padding: int = 0) -> None:
        self.caches = Caches(rng, PAGE, 2, K, TIMES)
        self.asked: Asked = self.caches.of(requests)
        tokens = len(self.asked.lists)
        self.q8 = torch.zeros(tokens + padding, 8, 128, dtype=torch.float8_e4m3fn)
        self.q8[:tokens] = as_torch(self.asked.index_q.view(E4M3))
        self.weights = torch.full((tokens + padding, 8, 1), torch.nan)
        self.weights[:tokens, :, 0] = as_torch(self.asked.weights)
        self.padding = padding

    def choosing(self, **more: Any) -> Choosing:
        return Choosing(K, as_torch(self.caches.keys), **more)

    def want(self, form: str) -> np.ndarray:
        """In the form "positions", "slots" or "gathered"."""
        return np.concatenate([self.asked.listed(form, PAGE), np.full((self.padding, K), -1, np.int32)])


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("fused", [True, False], ids=["slots", "positions"])
def test_decodes(sglang, rng, padding: int, fused: bool) -> None:
    step = Step(rng, DECODES, padding)
    seen = torch.tensor(step.asked.seq_lens, dtype=torch.int32)
    got = step.choosing().paged(
        step.q8, step.weights, step.asked.seq_lens, seen, as_torch(step.asked.table), fused=fused
    )
    np.testing.assert_array_equal(got.numpy(), step.want("slots" if fused else "positions"))


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "drafted"])
@pytest.mark.parametrize("each", [2, 3])
def test_tokens_of_speculation(sglang, rng, each: int, verify: bool) -> None:
    """Several of each request, which SGLang gives a row of the page table each."""
    step = Step(rng, [(r, each, n) for r, _, n in DECODES], padding=2)
    seen = torch.tensor([n - each + 1 + j for n in step.asked.seq_lens for j in range(each)], dtype=torch.int32)
    table = as_torch(step.asked.table).repeat_interleave(each, 0)
    got = step.choosing().paged(step.q8, step.weights, step.asked.seq_lens, seen, table, each=each, verify=verify)
    np.testing.assert_array_equal(got.numpy(), step.want("slots"))


def test_a_batch_without_a_request(sglang, rng) -> None:
    step = Step(rng, DECODES[:1], padding=2)
    none = torch.zeros(0, dtype=torch.int32)
    for verify in (True, False):
        got = step.choosing().paged(step.q8, step.weights, [], none, none.view(0, 3), verify=verify)
        assert got.shape == (3, K)
        assert (got == -1).all()
    got = step.choosing().ragged(step.q8, step.weights, [0], [7], none.view(0, 3), "slots")
    assert got.shape == (3, K)
    assert (got == -1).all()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("given", [True, False], ids=["into a buffer", "new"])
@pytest.mark.parametrize("form", ["slots", "gathered", "positions"])
def test_prefills(sglang, rng, form: str, given: bool, padding: int) -> None:
    """Whole ones and with a prefix. The buffer of a graph has more rows, which stay."""
    step = Step(rng, PREFILLS, padding)
    out = torch.full((len(step.q8) + 2, K), -1, dtype=torch.int32) if given else None
    got = step.choosing().ragged(
        step.q8, step.weights, step.asked.query_lens, step.asked.seq_lens, as_torch(step.asked.table), form, out
    )
    np.testing.assert_array_equal(got[: len(step.q8)].numpy(), step.want(form))
    assert (got is out) == given
    assert (got[len(step.q8) :] == -1).all()


def test_prefills_take_no_more_memory_than_sglang_allows(sglang, rng, monkeypatch) -> None:
    step = Step(rng, PREFILLS)
    select, allowed = indexer.select_rows, []
    monkeypatch.setattr(
        indexer, "select_rows", lambda *a, **m: (allowed.append(m["max_workspace_bytes"]), select(*a, **m))[1]
    )
    for budget in (5000, 1 << 40):
        got = step.choosing(budget=budget).ragged(
            step.q8, step.weights, step.asked.query_lens, step.asked.seq_lens, as_torch(step.asked.table), "slots"
        )
        np.testing.assert_array_equal(got.numpy(), step.want("slots"))
    assert allowed == [5000, 512 << 20]


@pytest.mark.parametrize(
    ("what", "of", "said"),
    [
        ({"num_init_tokens": 1}, {}, "always chosen"), ({"num_local_tokens": 4}, {}, "always chosen"),
        ({"dsa_enable_prefill_cp": True}, {}, "context parallelism"), ({"n_heads": 12}, {}, "12 heads"),
        ({"index_topk": 8192}, {}, "more than 4096"), ({}, {"page_size": 128}, "pages other than of 64"),
    ],
    ids=str,
)  # fmt: skip
def test_what_ours_do_not_serve_is_sglangs(sglang, rng, caplog, what: dict, of: dict, said: str) -> None:
    """With one warning, however many layers and steps there are."""
    step = Step(rng, DECODES)
    choosing = step.choosing(**what)
    vars(choosing).update(of)
    seen, table = torch.tensor(step.asked.seq_lens, dtype=torch.int32), as_torch(step.asked.table)
    out = torch.full((4, K), -1, dtype=torch.int32)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert choosing.paged(step.q8, step.weights, step.asked.seq_lens, seen, table) == "paged by SGLang"
            found = choosing.ragged(step.q8, step.weights, [1] * 4, step.asked.seq_lens, table, "slots", out)
            assert found == ("ragged by SGLang", out)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert said in record.getMessage()


def test_other_pages_of_the_pool_are_sglangs(sglang, rng) -> None:
    step = Step(rng, DECODES)
    choosing = step.choosing()
    choosing.pool.index_page_size = 128
    seen, table = torch.tensor(step.asked.seq_lens, dtype=torch.int32), as_torch(step.asked.table)
    assert choosing.paged(step.q8, step.weights, step.asked.seq_lens, seen, table) == "paged by SGLang"


@pytest.mark.parametrize(
    ("prefill", "decode", "ours"),
    [
        ("fa3", "tilelang", False), ("trtllm", "trtllm", False), ("fa3", "flashmla_kv", True),
        ("flashmla_auto", "fa3", True),
    ],
)  # fmt: skip
def test_where_attention_is_sglangs_so_is_the_indexer(
    sglang, rng, caplog, prefill: str, decode: str, ours: bool
) -> None:
    step = Step(rng, DECODES)
    choosing = step.choosing()
    options = importlib.import_module("sglang.srt.runtime_context")
    options.kernel.dsa_prefill_backend, options.kernel.dsa_decode_backend = prefill, decode
    seen, table = torch.tensor(step.asked.seq_lens, dtype=torch.int32), as_torch(step.asked.table)
    with caplog.at_level(logging.INFO):
        got = choosing.paged(step.q8, step.weights, step.asked.seq_lens, seen, table)
    assert (got is not None and not isinstance(got, str)) == ours
    assert caplog.records == []
