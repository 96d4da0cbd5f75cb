"""The indexer of the vLLM plug-in on stand-ins of its classes, on the CPU. `wheel_vllm` has the wheel's."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests import indexers, oracle_indexer  # noqa: E402
from tests.backends.test_sparse_mla import BLOCK_SIZE  # noqa: E402
from tests.integrations.stub_vllm import loaded  # noqa: E402
from tests.integrations.test_vllm import as_torch, float32_backend, valid_first  # noqa: E402
from tests.kinds import E4M3  # noqa: E402

K, HEADS, MAX_LEN = 6, 8, 32
CACHE = "layer.indexer.k_cache"


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    importlib.import_module("vllm.models.deepseek_v32.attention")  # as the model does
    return importlib.import_module(f"{plugin.__name__}.sparse_mla")


def made(adapter: ModuleType, lists: torch.Tensor, prefix: str = "layer.indexer", **op: Any) -> Any:
    """The indexer of a layer whose attention is ours."""
    indexer = loaded("vllm.models.deepseek_v32.attention").DeepseekV32Indexer(prefix, lists, **op)
    adapter.CupyMLASparseImpl(0.1, "auto", 64, lists, indexer=indexer)
    return indexer


def choose(
    q8: np.ndarray, weights: np.ndarray, lists: torch.Tensor, keys: np.ndarray, metadata: Any, prefix: str = CACHE,
    graphs: int = 0, attention: str = "layer.attn",
) -> Any:  # fmt: skip
    """The call of vLLM's layers."""
    context = loaded("vllm.forward_context").context
    context.attn_metadata, context.cudagraph_runtime_mode = metadata, graphs
    return loaded("vllm.models.deepseek_v32.attention").sparse_attn_indexer(
        torch.zeros(len(q8), 4), prefix, as_torch(keys), as_torch(q8.view(E4M3)), None, None, as_torch(weights), 128,
        "ue8m0", K, 128, MAX_LEN, 4 * MAX_LEN, lists, skip_k_cache_insert=True, use_pcp=False,
        pcp_shard_decode_requests=False, dense_mha_metadata_layer_name=attention,
    )  # fmt: skip


def batch_metadata(table, query_lens, seq_lens, starts, decodes: int, speculative: int):
    """What vLLM's builder makes of a batch, by its rules: uniform decodes, then chunks of prefills, one cut in two."""
    m, chunks, decode = loaded("vllm.v1.attention.backends.mla.indexer"), [], None
    if decodes:
        lens = np.array(query_lens[:decodes])
        seen = np.array(seq_lens[:decodes])[:, None] - lens.max() + 1 + np.arange(lens.max())
        decode = m.DeepSeekV32IndexerDecodeMetadata(
            as_torch(table[:decodes]), as_torch(seen.astype(np.int32)), as_torch(lens), bool(lens.min() != lens.max()),
            None,
        )  # fmt: skip
    for r in range(decodes, len(query_lens)):
        n, length = query_lens[r], seq_lens[r]
        for begin, end in ((0, n // 2), (n // 2, n)):
            ends = np.arange(length - n + begin + 1, length - n + end + 1, dtype=np.int32)
            chunks.append(
                m.DeepseekV32IndexerPrefillChunkMetadata(
                    as_torch(table[r : r + 1]), torch.zeros(end - begin, dtype=torch.int32), as_torch(ends),
                    torch.tensor([0, length], dtype=torch.int32), length, int(starts[r] + begin), int(starts[r] + end),
                    skip_kv_gather=False,
                )
            )  # fmt: skip
    return importlib.import_module(f"{plugin.__name__}.indexer").CupyMLAIndexerMetadata(
        as_torch(np.array(seq_lens)), max(seq_lens), torch.zeros(int(starts[-1]), dtype=torch.int64),
        decodes, int(starts[decodes]), len(query_lens) - decodes, int(starts[-1] - starts[decodes]),
        decode, m.DeepseekV32IndexerPrefillMetadata(chunks) if chunks else None,
    )  # fmt: skip


class Batch:
    """Requests of so many query tokens, and tokens that pad them; sums of the indexer are exact.

    Attributes:
        want: int32 [T, k] positions, -1 behind.
    """

    def __init__(self, rng: np.random.Generator, query_lens: list[int], speculative: int = 1, padding: int = 0) -> None:
        requests, tokens, width = len(query_lens), sum(query_lens), MAX_LEN // BLOCK_SIZE
        seq_lens = [n + int(rng.integers(0, MAX_LEN - n + 1)) if n else 0 for n in query_lens]
        table = rng.permutation(requests * width + 1)[: requests * width].reshape(requests, width).astype(np.int32)
        codes = indexers.exact_codes(rng, requests * width + 1, BLOCK_SIZE, 128)
        self.keys = indexers.key_cache(codes, np.ones(codes.shape[:2], np.float32))
        self.q8 = indexers.exact_codes(rng, tokens + padding, HEADS, 128)
        self.weights = indexers.exact_weights(rng, tokens + padding, HEADS)
        self.lists = torch.full((tokens + padding + 1, K), -1, dtype=torch.int32)
        decodes = next((i for i, n in enumerate(query_lens) if n > speculative), requests)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        self.metadata = batch_metadata(table, query_lens, seq_lens, starts, decodes, speculative)
        self.want = np.full((tokens + padding + 1, K), -1, np.int32)
        for r, (n, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            for j in range(n):
                t, seen = starts[r] + j, length - n + j + 1
                slots = [table[r, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(seen)]
                keys = codes.reshape(-1, 128)[slots]
                logits = oracle_indexer.logits(self.q8[t], keys, np.ones(seen), self.weights[t])
                self.want[t] = oracle_indexer.topk(logits, K, 0, seen)

    def choose(self, more: dict[str, Any] | None = None, **changed: Any) -> Any:
        return choose(self.q8, self.weights, self.lists, self.keys, {CACHE: self.metadata, **(more or {})}, **changed)


@pytest.mark.parametrize(
    ("query_lens", "speculative"),
    [([1, 1, 1], 1), ([9], 1), ([1, 1, 7, 4], 1), ([2, 2], 2), ([2, 2, 0], 2), ([1, 1, 0, 0], 1), ([2, 2, 8], 2),
     ([1, 3, 2], 3), ([3, 1, 0, 0], 3), ([3, 2, 7], 3), ([0, 7], 1), ([0, 0, 9], 3)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("exact", [False, True], ids=["ours", "float32"])
def test_positions_are_those_of_float64_logits(
    adapter, rng, monkeypatch, query_lens: list[int], speculative: int, padding: int, exact: bool
) -> None:
    """Of decodes as long as one another or not, and of prefills.

    The benchmark's float32 backend has logits and a top-k of its own, whose positions are in another order.
    """
    batch = Batch(rng, query_lens, speculative, padding)
    if exact:
        float32_backend(monkeypatch).get_impl_cls()(0.1, "auto", 64, batch.lists)
        assert adapter.indexer.select_rows.__module__ == "vllm_float32"
    made(adapter, batch.lists)
    assert batch.choose() is batch.lists
    got = batch.lists.numpy()
    np.testing.assert_array_equal(valid_first(np.sort(got)) if exact else got, batch.want)


def test_logits_take_no_more_memory_than_vllm_allows(adapter, rng, monkeypatch) -> None:
    """`VLLM_SPARSE_INDEXER_MAX_LOGITS_MB`, for decodes and for prefills."""
    ours, most = adapter.indexer, []
    for name in ("select_rows", "select_rows_paged"):
        select = getattr(ours, name)
        monkeypatch.setattr(
            ours, name, lambda *a, select=select, **k: (most.append(k["max_workspace_bytes"]), select(*a, **k))[1]
        )
    batch = Batch(rng, [1, 1, 7])
    made(adapter, batch.lists)
    monkeypatch.setattr(loaded("vllm.envs"), "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 3)
    batch.choose()
    assert most == [3 << 20] * 3  # two chunks of the prefill, and the decodes


def test_a_buffer_of_wider_lists(adapter, rng) -> None:
    """What lies behind the layer's topk columns stays."""
    batch = Batch(rng, [1, 1, 7])
    batch.lists = torch.full((len(batch.lists), K + 3), -5, dtype=torch.int32)
    batch.lists[:, :K] = -1
    made(adapter, batch.lists)
    batch.choose()
    np.testing.assert_array_equal(batch.lists[:, :K].numpy(), batch.want)
    assert (batch.lists[:, K:] == -5).all()


def test_keys_that_an_earlier_chunk_has_gathered_are_not_gathered_again(adapter, rng) -> None:
    batch = Batch(rng, [9])
    made(adapter, batch.lists)
    _, second = batch.metadata.prefill.chunks
    second.skip_kv_gather = True
    second.block_table = second.block_table.flip(1)  # a wrong one
    batch.choose()
    np.testing.assert_array_equal(batch.lists.numpy(), batch.want)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 1, 2], [2, 2, 0]], ids=str)
def test_tokens_that_pad_decodes_choose_nothing(adapter, rng, query_lens: list[int]) -> None:
    """vLLM may count them among the tokens of decodes, of no request."""
    batch = Batch(rng, query_lens, speculative=3, padding=3)
    made(adapter, batch.lists)
    batch.lists.fill_(77)
    batch.metadata.num_decode_tokens += 2
    batch.choose()
    tokens = sum(query_lens)
    np.testing.assert_array_equal(batch.lists[: tokens + 2].numpy(), batch.want[: tokens + 2])
    assert (batch.lists[tokens + 2 :] == 77).all()


@pytest.mark.parametrize("half", [2, 4, 9, 13])
def test_a_rank_chooses_for_its_part_of_the_prefills(adapter, rng, monkeypatch, half: int) -> None:
    """Of a tensor-parallel group, which then exchanges what was chosen."""
    shard = loaded("vllm.model_executor.layers.sparse_attn_indexer").PrefillRowShard
    monkeypatch.setattr(shard, "half", half)
    batch = Batch(rng, [1, 1, 7, 4])
    made(adapter, batch.lists)
    batch.choose()
    assert shard.decodes == 2, "query tokens in front of the prefills'"
    np.testing.assert_array_equal(batch.lists[half:].numpy(), batch.want[half:])
    assert (batch.lists[2:half] == 7).all()


@pytest.mark.parametrize(
    "op", [{"use_pcp": True}, {"dcp_world_size": 2}, {"use_fp4_cache": True}, {"candidate_blocks": 3}], ids=str
)
def test_indexers_that_ours_do_not_serve(adapter, rng, caplog, op: dict[str, Any]) -> None:
    """They are vLLM's, with one warning for all layers."""
    batch = Batch(rng, [1, 1])
    with caplog.at_level("WARNING", logger="vllm.cupy_mla"):
        for _ in range(2):
            indexer = made(adapter, batch.lists, **op)
    assert batch.choose() == "stock"
    assert indexer.k_cache.get_attn_backend is None
    (record,) = caplog.records
    assert record.getMessage().startswith("cupy_mla leaves the indexer to vLLM: ours serves none with ")


def test_mx_scales_are_read_by_vllm(adapter, rng, monkeypatch) -> None:
    """Of compute capability 10.x."""
    stock = loaded("vllm.model_executor.layers.sparse_attn_indexer")
    monkeypatch.setattr(stock, "mqa_logits_use_mx_scales", lambda: True)
    batch = Batch(rng, [1, 1])
    made(adapter, batch.lists)
    assert batch.choose() == "stock"


def test_layers_of_other_backends_keep_vllms(adapter, rng) -> None:
    batch = Batch(rng, [1, 1])
    made(adapter, batch.lists)
    assert batch.choose(prefix="draft.indexer.k_cache") == "stock"
    theirs = loaded("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerMetadata(**vars(batch.metadata))
    assert batch.choose({CACHE: theirs}) == "stock", "another engine's layer of the same name"
    assert choose(batch.q8, batch.weights, batch.lists, batch.keys, None) == "stock", "a profiling run"
    adapter.CupyMLASparseImpl(0.1, "auto", 64, batch.lists, indexer=SimpleNamespace())  # of another model


def test_metadata_are_built_without_deep_gemm(adapter) -> None:
    backend = made(adapter, torch.zeros(1, K, dtype=torch.int32)).k_cache.get_attn_backend()
    assert issubclass(backend, loaded("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerBackend)
    builder = backend.get_builder_cls()()
    assert isinstance(builder.build(0, None), adapter.indexer.CupyMLAIndexerMetadata)
    assert builder.update_draft_decode_metadata(None) == "updated"


@pytest.mark.parametrize(
    ("prefill", "decode_tokens", "graphs", "chosen"),
    [(True, 0, 0, False), (True, 0, 2, True), (True, 1, 0, True), (False, 0, 0, True), (None, 0, 0, True)],
)
def test_dense_prefills_choose_nothing(
    adapter, rng, prefill: bool | None, decode_tokens: int, graphs: int, chosen: bool
) -> None:
    """As vLLM's own; where a full graph is made, or decodes are among them, lists are read."""
    batch = Batch(rng, [5, 4])
    made(adapter, batch.lists)
    dense = None if prefill is None else SimpleNamespace(use_dense_mha=prefill)
    batch.lists.fill_(77)
    batch.choose({"layer.attn": SimpleNamespace(prefill=dense, num_decode_tokens=decode_tokens)}, graphs=graphs)
    assert (batch.lists == 77).all() == (not chosen)


def test_decodes_without_lists_choose_nothing(adapter, rng) -> None:
    batch = Batch(rng, [1, 1])
    made(adapter, batch.lists)
    batch.lists.fill_(77)
    attention = SimpleNamespace(prefill=None, num_decode_tokens=2)
    setattr(attention, adapter.short.NAME, "all rows")
    batch.choose({"layer.attn": attention})
    assert (batch.lists == 77).all()


def test_lists_that_later_steps_reuse_are_written(adapter, rng) -> None:
    """Those of a draft model's layer, for which vLLM names no attention."""
    batch = Batch(rng, [1, 1])
    made(adapter, batch.lists)
    attention = SimpleNamespace(prefill=None, num_decode_tokens=2)
    setattr(attention, adapter.short.NAME, "all rows")
    batch.choose({"layer.attn": attention}, attention="")
    np.testing.assert_array_equal(batch.lists.numpy(), batch.want)


@pytest.fixture
def captured(monkeypatch) -> None:
    """A CUDA graph of the step is being made, which will serve longer sequences, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_captured_step_of_dense_prefills_chooses(adapter, rng, captured) -> None:
    batch = Batch(rng, [5, 4])
    made(adapter, batch.lists)
    attention = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
    batch.choose({"layer.attn": attention})
    np.testing.assert_array_equal(batch.lists.numpy(), batch.want)


def test_a_captured_step_scores_as_many_keys_as_may_be(adapter, rng, captured) -> None:
    """Whatever the host says of the batch that it captures with."""
    batch = Batch(rng, [1] * 8)
    made(adapter, batch.lists)
    batch.metadata.max_seq_len = 1
    batch.choose()
    np.testing.assert_array_equal(batch.lists.numpy(), batch.want)


@pytest.mark.parametrize("longest", [K, K + 1])
def test_short_contexts_need_no_logits(adapter, rng, monkeypatch, longest: int) -> None:
    """Where no request has more keys than are chosen."""
    ours = adapter.indexer
    most, select = [], ours.select_rows_paged
    monkeypatch.setattr(ours, "select_rows_paged", lambda *a, **k: (most.append(a[5]), select(*a, **k))[1])
    batch = Batch(rng, [1, 1])
    made(adapter, batch.lists)
    batch.metadata.max_seq_len = longest
    batch.choose()
    assert most == [K if longest == K else MAX_LEN]
