"""Kernels are ready before vLLM's first request: once a process and kind of layers, all that a step needs."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import DenseMLAConfig, SparseMLAConfig  # noqa: E402
from cupy_mla.cuda import all_kernels  # noqa: E402
from cupy_mla.integrations import vllm as plugin  # noqa: E402
from cupy_mla.integrations import warm  # noqa: E402
from cupy_mla.selfcheck import warmup as warmup_module  # noqa: E402
from tests.integrations.stub_vllm import engine, loaded  # noqa: E402
from tests.integrations.test_vllm import layer_indexer  # noqa: E402
from tests.selfcheck.test_warmup import Layer  # noqa: E402

GPU = torch.device("cuda", 0)
SCALE, TOPK = 0.1, 2048


@pytest.fixture(autouse=True)
def nothing_is_ready(monkeypatch) -> None:
    """In this process."""
    monkeypatch.setattr(warm, "_ready", set())


@pytest.fixture
def later(vllm_33: None) -> ModuleType:
    """The adapter for 0.33."""
    return importlib.import_module(f"{plugin.__name__}.sparse_mla_common")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[Any, int]]:
    """What `cupy_mla.warmup` is called with, in place of the call."""
    calls: list[Any] = []
    monkeypatch.setattr(warm, "warmup", lambda config, device: calls.append((config, device)) or [])
    return calls


def layer(later: ModuleType, cache_type: str, rope: int = 64, heads: int = 12, device: Any = GPU) -> Any:
    """One whose lists lie on a GPU that is none."""
    lists = SimpleNamespace(shape=(40, TOPK), device=device)
    made = later.CupyMLASparseImpl(SCALE, cache_type, rope, lists, heads)
    attention = importlib.import_module("vllm.model_executor.layers.attention.mla_attention").MLAAttention()
    attention.impl = made
    return attention


def test_once_for_all_layers(later, asked, caplog) -> None:
    """By vLLM's hook after loading; a second model of the same sizes finds all ready, another kind does not."""
    loaded("vllm.config").current = engine()
    with caplog.at_level(logging.INFO):
        for each in [layer(later, "auto") for _ in range(61)]:
            each.process_weights_after_loading(torch.bfloat16)
    ((config, device),) = asked
    assert device == 0
    assert (config.num_heads, config.d_qk, config.topk, config.cache_layout) == (12, 576, TOPK, "bf16")
    assert (config.max_num_batched_tokens, config.max_model_len, config.num_speculative_tokens) == (40, 700, 0)
    assert config.max_num_seqs == 40, "short extends are decodes: a batch of them has as many tokens as any"
    told = [record.getMessage() for record in caplog.records if "cupy_mla" in record.getMessage()]
    assert len(told) == 2
    assert "12 heads over bf16 rows, topk 2048" in told[0]
    loaded("vllm.config").current = engine()
    layer(later, "auto").process_weights_after_loading(torch.bfloat16)
    assert len(asked) == 1
    loaded("vllm.config").current = engine(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    layer(later, "fp8_ds_mla", rope=0).process_weights_after_loading(torch.bfloat16)
    layer(later, "fp8_ds_mla", rope=0).process_weights_after_loading(torch.bfloat16)
    config = asked[-1][0]
    assert len(asked) == 2
    assert (config.d_qk, config.cache_layout, config.num_speculative_tokens) == (512, "v32_fp8", 2)
    assert config.max_num_seqs * 3 >= 40


def test_ranks_attend_with_the_heads_of_all(later, asked, monkeypatch) -> None:
    """Under decode context parallelism vLLM gathers the queries."""
    loaded("vllm.config").current = engine()
    monkeypatch.setattr(loaded("vllm.v1.attention.backend"), "ranks", 4)
    layer(later, "fp8_ds_mla", heads=16).process_weights_after_loading(torch.bfloat16)
    assert asked[0][0].num_heads == 64


def test_the_cpu_has_no_kernels(later, asked) -> None:
    loaded("vllm.config").current = engine()
    layer(later, "auto", device=torch.device("cpu")).process_weights_after_loading(torch.bfloat16)
    assert asked == []


def test_by_the_builder_where_there_is_no_hook(modules, asked) -> None:
    """In 0.22, whose attention layers do not call their impl after loading."""
    make = modules.sparse_mla.CupyMLASparseBuilder
    for _ in range(3):
        make(12, 8, True, device="cuda:0")
    make(12, 8, True)
    ((config, _),) = asked
    assert (config.num_heads, config.topk, config.cache_layout) == (12, 20, "v32_fp8")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (5, 40)


both = pytest.mark.parametrize("version", ["vllm", "vllm_33"])


def model_of(heads: int, **hf_config: int) -> SimpleNamespace:
    return SimpleNamespace(
        max_model_len=700, hf_config=SimpleNamespace(**hf_config), get_num_attention_heads=lambda parallel: heads
    )


@both
def test_models_without_an_indexer(request, asked, caplog, version: str) -> None:
    """When vLLM makes their builders: once for all groups of layers of a kind."""
    request.getfixturevalue(version)
    make = importlib.import_module(f"{plugin.__name__}.dense_mla").CupyMLADenseBuilder
    of = engine(model_config=model_of(16), parallel_config=None)
    bf16, fp8 = (SimpleNamespace(dtype=dtype) for dtype in (torch.bfloat16, torch.uint8))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            make(bf16, ["a", "b"], of, GPU)
    assert asked == [(DenseMLAConfig(16, max_num_seqs=5, max_model_len=700), 0)]
    told = [record.getMessage() for record in caplog.records]
    assert "16 heads over bf16 rows ready" in told[0]
    assert len(told) == 2
    of.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    make(fp8, ["a"], of, GPU)
    make(fp8, ["a"], of, torch.device("cpu"))
    (config, _) = asked[-1]
    assert len(asked) == 2
    assert (config.cache_layout, config.num_speculative_tokens) == ("plain_fp8", 2)


@both
def test_ranks_without_an_indexer_attend_with_the_heads_of_all(request, asked, monkeypatch, version: str) -> None:
    request.getfixturevalue(version)
    adapter = importlib.import_module(f"{plugin.__name__}.dense_mla")
    monkeypatch.setattr(adapter.common.MLACommonMetadataBuilder, "dcp_world_size", 4)
    of = engine(model_config=model_of(16), parallel_config=None)
    adapter.CupyMLADenseBuilder(SimpleNamespace(dtype=torch.bfloat16), ["a"], of, GPU)
    assert asked[0][0].num_heads == 64


@both
@pytest.mark.parametrize(("heads", "padded"), [(16, 64), (64, 64), (96, 128)])
def test_deepseek_v4(request, asked, monkeypatch, version: str, heads: int, padded: int) -> None:
    """When the model is made; its layers of each kind."""
    request.getfixturevalue(version)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    make = importlib.import_module(f"{plugin.__name__}.deepseek_v4").DeepseekV4ForCausalLM
    of = engine(
        model_config=model_of(heads, index_topk=512, sliding_window=96), parallel_config=None,
        device_config=SimpleNamespace(device_type="cuda"), speculative_config=SimpleNamespace(num_speculative_tokens=1),
    )  # fmt: skip
    assert make(vllm_config=of, prefix="draft").made_of == (of, "draft")
    make(vllm_config=of)
    assert [device for _, device in asked] == [1, 1, 1]
    assert [config.compress_ratio for config, _ in asked] == [1, 4, 128]
    for config, _ in asked:
        assert (config.num_heads, config.topk, config.window, config.cache_layout) == (padded, 512, 96, "v4_fp8")
        assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (5, 40, 700)
        assert config.num_speculative_tokens == 1
    of.device_config.device_type = "cpu"
    make(vllm_config=of)
    assert len(asked) == 3


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 64])
def test_no_step_needs_another_kernel(later, gpu, monkeypatch, rng, cache: str, heads: int) -> None:
    """Decodes, prefills and batches of both, with lists and without, on an H200 that is none."""
    sizes = SimpleNamespace(max_num_seqs=9, max_num_batched_tokens=150)
    loaded("vllm.config").current = engine(scheduler_config=sizes)
    each = layer(later, cache, heads=heads)
    step = Layer(gpu, SparseMLAConfig(heads))
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: step.cupy)
    each.process_weights_after_loading(torch.bfloat16)
    ready = set(gpu.kernels.values())
    impl, width = each.impl, 656 if cache == "fp8_ds_mla" else 576
    rows = torch.zeros(4, 64, width, dtype=torch.uint8 if width == 656 else torch.bfloat16)
    for tokens in (1, 2, 9, 64, 133, 150, *rng.integers(1, 151, 8).tolist()):
        q = torch.zeros(1, 1, 576, dtype=torch.bfloat16).expand(tokens, heads, 576)
        lists, counts = torch.full((tokens, TOPK), -1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
        for is_decode in (True, False):
            gpu.used = 0
            impl._forward_mqa_kernel(q, rows, lists, counts, layer=None, block_size=64, is_decode=is_decode)
    for requests in range(1, 10):
        gpu.used = 0
        table, lens = torch.zeros(requests, 2, dtype=torch.int32), torch.ones(requests, dtype=torch.int32)
        later.short.attend(
            torch.zeros(requests, heads, 576).bfloat16(), rows, later.short.DenseDecodes(lens, table, 1), 1.0
        )
    assert set(gpu.kernels.values()) == ready <= set(all_kernels())


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(("cache_type", "heads"), [("auto", 64), ("fp8_ds_mla", 16), ("fp8_ds_mla", 64)])
def test_no_step_of_0_22_needs_another_kernel(modules, gpu, monkeypatch, rng, cache_type: str, heads: int) -> None:
    """Attention in all batches, whole ones by the decode kernel and prefills over gathered rows."""
    sizes = SimpleNamespace(max_num_seqs=9, max_num_batched_tokens=60)
    loaded("vllm.config").current.scheduler_config = sizes
    fp8 = cache_type == "fp8_ds_mla"
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, SparseMLAConfig(heads)).cupy)
    builder = modules.sparse_mla.CupyMLASparseBuilder(heads, 64, fp8, device=GPU, topk=TOPK)
    ready = set(gpu.kernels.values())
    assert ready
    lists = torch.full((64, TOPK), -1, dtype=torch.int32)
    impl = modules.sparse_mla.CupyMLASparseImpl(heads, 576, SCALE, cache_type, indexer=layer_indexer(lists))
    rows = torch.zeros(4, 64, 656 if fp8 else 576, dtype=torch.uint8 if fp8 else torch.bfloat16)
    mixed = [[1] * int(n) + [int(m)] for n, m in rng.integers(1, 9, (6, 2))]
    for query_lens in ([1], [1] * 9, [7], [1, 1, 50], [60], *mixed):
        starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
        lens = torch.full((len(query_lens),), 2100, dtype=torch.int32)  # more than topk, so that lists are made
        table = torch.zeros(len(query_lens), 3, dtype=torch.int32)
        batch = loaded("vllm.v1.attention.backend").CommonAttentionMetadata(
            starts, starts, lens, len(lens), sum(query_lens), max(query_lens), 2100, table, torch.zeros(60)
        )
        gpu.used = 0
        metadata = builder.build(0, batch)
        impl.prefill_bf16_workspace = torch.zeros(2100, 576, dtype=torch.bfloat16)
        q = torch.zeros(sum(query_lens), heads, 576).bfloat16()
        impl.forward_mqa((q[..., :512], q[..., 512:].clone()), rows, metadata, None)
    assert set(gpu.kernels.values()) == ready
