"""DeepSeek-V4.1 of the vLLM plug-in: layers that share compressed rows, keys, lists and candidate blocks run on our
attention and indexer, over several steps on one buffer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests.backends.test_sparse_mla import assert_result  # noqa: E402
from tests.integrations.steps_v4 import MAX_LEN, MAX_TOKENS, TOPK, WINDOW  # noqa: E402
from tests.integrations.steps_v41 import (  # noqa: E402
    BLOCK,
    CANDIDATE_SOURCE,
    CANDIDATES,
    GUESSED,
    INDEX_SOURCES,
    KV_SOURCES,
    ORDER,
    OTHER_RATIOS,
    RATIOS,
    WINDOW_BLOCK,
    Asked,
    Model,
)
from tests.integrations.stub_vllm import engine, loaded  # noqa: E402
from tests.integrations.test_vllm import HOSTILE  # noqa: E402
from tests.integrations.test_vllm_v4 import window_metadata  # noqa: E402

HEADS = 5


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    return importlib.import_module(f"{plugin.__name__}.deepseek_v41")


def made(backend: str | None = None, ranks: int = 1, block: int = 8, ratios: tuple[int, ...] = RATIOS) -> list[Any]:
    """The attention of the layers that vLLM's model makes."""
    of = engine(
        model_config=SimpleNamespace(
            max_model_len=MAX_LEN, get_num_attention_heads=lambda parallel: HEADS,
            hf_config=SimpleNamespace(
                compress_ratios=ratios, sliding_window=WINDOW, index_topk=TOPK, kv_source_layer_ids=KV_SOURCES,
                index_source_layer_ids=INDEX_SOURCES, candidate_source_layer_id=CANDIDATE_SOURCE,
                candidate_topk_blocks=CANDIDATES, candidate_block_size=block,
            ),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=ranks),
        attention_config=SimpleNamespace(backend=backend), device_config=SimpleNamespace(device_type="cpu"),
    )  # fmt: skip
    layers = loaded("vllm.models.deepseek_v41").DeepseekV41ForCausalLM(vllm_config=of).layers
    return [layer.attn for layer in layers]


def holding(layers: list[Any], model: Model) -> list[Any]:
    """The layers, with caches and sinks."""
    for number, layer in enumerate(layers):
        layer.swa_cache_layer.kv_cache, layer.topk_indices_buffer = model.windows[number], model.chosen
        layer.attn_sink[:HEADS] = model.sinks[number]
        if number in KV_SOURCES:
            layer.kv_cache, layer.indexer.k_cache.kv_cache = model.compressed[number], model.keys[number]
        if number in INDEX_SOURCES:
            op = layer.indexer.indexer_op
            op.topk_indices_buffer = model.chosen
            op.candidate_blocks = None if op.candidate_blocks is None else model.candidates
    return layers


def key_metadata(asked: Asked, ratio: int) -> Any:
    """What vLLM's builder makes of a step: decodes, then chunks of three prefills, each cut in two."""
    m, decodes, requests = loaded("vllm.v1.attention.backends.mla.indexer"), asked.num_decodes, len(asked.query_lens)
    query_lens, seq_lens = torch.tensor(asked.query_lens), torch.tensor(asked.seq_lens, dtype=torch.int32)
    starts, table = asked.starts.tolist(), torch.from_numpy(asked.table)
    first = len(asked.slots) if decodes == requests else starts[decodes]
    decode, chunks = None, []
    if decodes:
        lens = query_lens[:decodes]
        most = max(int(lens.max()), 1)
        seen = ((seq_lens[:decodes, None] - most + 1 + torch.arange(most)).clamp(min=0) // ratio).int()
        decode = m.DeepSeekV32IndexerDecodeMetadata(table[:decodes], seen, lens, bool(lens.min() != lens.max()), None)
    for start in range(decodes, requests, 3):
        end = min(start + 3, requests)
        keys = torch.cat([torch.zeros(1), (seq_lens[start:end] // ratio).cumsum(0)]).int()
        tokens = torch.arange(starts[start], starts[end])
        ks = keys[torch.from_numpy(asked.requests)[tokens].long() - start]
        ke = (ks + (torch.from_numpy(asked.positions)[tokens] + 1) // ratio).int()
        cut = len(tokens) // 2
        for begin, stop in ((0, cut), (cut, len(tokens))):
            if begin < stop and keys[-1] > 0:
                chunks.append(
                    m.DeepseekV32IndexerPrefillChunkMetadata(
                        table[start:end], ks[begin:stop], ke[begin:stop], keys, int(keys[-1]), starts[start] + begin,
                        starts[start] + stop, begin > 0,
                    )
                )  # fmt: skip
    return m.DeepseekV32IndexerMetadata(
        seq_lens, max(asked.seq_lens), None, decodes, first, requests - decodes, len(asked.slots) - first, decode,
        m.DeepseekV32IndexerPrefillMetadata(chunks),
    )  # fmt: skip


def metadata_of(layers: list[Any], asked: Asked) -> dict[str, Any]:
    compressed = loaded("vllm.models.deepseek_v41.sparse_mla").DeepseekV4FlashMLAMetadata
    windows = window_metadata(asked, WINDOW_BLOCK, asked.replay)
    metadata = {layer.swa_cache_layer.prefix: windows for layer in layers}
    for number in KV_SOURCES:
        metadata[layers[number].prefix] = compressed(torch.from_numpy(asked.table), BLOCK)
        metadata[layers[number].indexer.k_cache.prefix] = key_metadata(asked, layers[number].compress_ratio)
    return metadata


@pytest.mark.parametrize(
    ("ratios", "names"),
    [(RATIOS, [*ORDER, *GUESSED]), (OTHER_RATIOS, ["both", *GUESSED])],
    ids=["as released", "others"],
)
def test_steps(adapter, rng, ratios: tuple[int, ...], names: list[str]) -> None:
    """Beside float64: decodes, prefills, both, requests without query tokens, windows that begin late, guessed
    tokens."""
    model = Model(rng, HEADS, ratios)
    layers = holding(made(ratios=ratios), model)
    for name in names:
        asked = model.step(name)
        loaded("vllm.forward_context").context.attn_metadata = metadata_of(layers, asked)
        model.candidates.fill_(HOSTILE)
        tokens = len(asked.slots)
        for number, layer in enumerate(layers):
            asks = asked.choices.get(number)
            q = torch.nn.functional.pad(asked.q[number], (0, 0, 0, layer.padded_heads - HEADS))
            if asks is not None:
                model.chosen.fill_(HOSTILE)
                if asks.short:
                    model.chosen[:tokens] = asks.lists
                else:
                    assert layer.indexer.indexer_op(q[:, 0], asks.q, None, asks.weights) is model.chosen
                assert torch.equal(model.chosen[:tokens], asks.lists)
                assert (model.chosen[tokens:] == HOSTILE).all()
            out = torch.full_like(q, torch.nan)
            layer.forward_mqa(q, q[:, 0], torch.zeros(tokens, dtype=torch.int64), out)
            assert_result(out[:, :HEADS].float().numpy(), asked.want[number])


def chosen(layers: list[Any], asked: Asked) -> Iterator[tuple[int, Any]]:
    """The layers that choose rows of their own, after each has done so: number, and what it is asked."""
    for number in INDEX_SOURCES:
        asks = asked.choices[number]
        layers[number].indexer.indexer_op(asked.q[0][:, 0], asks.q, None, asks.weights)
        yield number, asks


def test_each_rank_has_all_candidate_blocks(adapter, rng, monkeypatch) -> None:
    """In a tensor-parallel group that divides the prefills' tokens, layers with candidate blocks choose for all."""
    monkeypatch.setattr(loaded("vllm.model_executor.layers.sparse_attn_indexer").PrefillRowShard, "half", 3)
    model = Model(rng, HEADS)
    layers, asked = holding(made(), model), model.step("prefills after decodes")
    loaded("vllm.forward_context").context.attn_metadata = metadata_of(layers, asked)
    for number, asks in chosen(layers, asked):
        shared_out = (model.chosen[:3] == 7).all()
        assert shared_out == (number < CANDIDATE_SOURCE)
        assert torch.equal(model.chosen[3 : len(asks.lists)], asks.lists[3:])


def test_logits_take_no_more_memory_than_vllm_allows(adapter, rng, monkeypatch) -> None:
    """Among candidates, too."""
    keys, most = loaded(f"{plugin.__name__}.indexer"), []
    for name in ("select_rows", "select_rows_paged", "select_candidate_rows"):
        select = getattr(keys, name)
        monkeypatch.setattr(
            keys, name, lambda *a, select=select, **k: (most.append(k["max_workspace_bytes"]), select(*a, **k))[1]
        )
    monkeypatch.setattr(loaded("vllm.envs"), "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 3)
    model = Model(rng, HEADS)
    layers, asked = holding(made(), model), model.step("both")
    loaded("vllm.forward_context").context.attn_metadata = metadata_of(layers, asked)
    assert [number for number, _ in chosen(layers, asked)] == [*INDEX_SOURCES]
    assert len(most) >= 2 * len(INDEX_SOURCES)
    assert {*most} == {3 << 20}


def test_a_profiling_run_is_vllms(adapter) -> None:
    """There are no metadata; vLLM reserves memory, and writes zeros."""
    loaded("vllm.forward_context").context.attn_metadata = None
    for layer in made():
        out = torch.ones(3, 8, 512, dtype=torch.bfloat16)
        layer.forward_mqa(out, out[:, 0], torch.zeros(3), out)
        assert not out.any()


def test_candidate_blocks_of_another_size(adapter, caplog) -> None:
    """Layers with them keep vLLM's indexer, the one that chooses them, too; one warning says so."""
    loaded("vllm.forward_context").context.attn_metadata = None
    layers = made(block=16)
    ours = {n for n in INDEX_SOURCES if "forward" in vars(layers[n].indexer.indexer_op)}
    assert ours == {n for n in INDEX_SOURCES if n < CANDIDATE_SOURCE}
    (record,) = caplog.records
    assert "ours serves none with candidate blocks of 16 keys" in record.getMessage()


def test_the_model_takes_our_attention(adapter, monkeypatch) -> None:
    """Where vLLM would take FlashMLA's over V4's rows; V4.1's own rows and prefill context parallelism are left to
    vLLM. Only one name of vLLM's is bound to something else."""
    model = loaded("vllm.models.deepseek_v41.nvidia.model")
    assert {type(layer) for layer in made()} == {adapter.CupyMLADeepseekV41Attention}
    assert {type(layer) for layer in made("FLASHINFER")} == {model.DeepseekV4FlashInferMLAAttention}
    assert {type(layer) for layer in made(ranks=2)} == {model.DeepseekV4FlashMLAAttention}
    attention = loaded("vllm.models.deepseek_v41.attention")
    monkeypatch.setattr(attention, "_use_v41_mxfp8_kv_record", lambda: True)
    assert {type(layer) for layer in made()} == {model.DeepseekV4FlashMLAAttention}
    assert adapter.DeepseekV41ForCausalLM is model.DeepseekV41ForCausalLM
    for module in (model, attention, loaded("vllm.models.deepseek_v41.nvidia.flashmla")):
        ours = [name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith("cupy_mla")]
        assert ours == (["_select_dsv4_attn_cls"] if module is model else [])
