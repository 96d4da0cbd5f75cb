"""Kernels are ready before vLLM's first request: once a process and model, all that a step needs."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import DenseMLAConfig, SparseMLAConfig  # noqa: E402
from cupy_mla.cuda import all_kernels  # noqa: E402
from cupy_mla.integrations import vllm as plugin  # noqa: E402
from cupy_mla.integrations import warm  # noqa: E402
from cupy_mla.selfcheck import warmup as warmup_module  # noqa: E402
from tests.integrations.stub_vllm import engine, loaded  # noqa: E402
from tests.selfcheck.test_warmup import Layer  # noqa: E402

GPU = torch.device("cuda", 0)
SCALE, TOPK = 0.1, 2048


@pytest.fixture(autouse=True)
def nothing_is_ready(monkeypatch) -> None:
    """In this process."""
    monkeypatch.setattr(warm, "_ready", set())


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    return importlib.import_module(f"{plugin.__name__}.sparse_mla")


def layer(adapter: ModuleType, cache_type: str, rope: int = 64, heads: int = 12, device: Any = GPU) -> Any:
    """One whose lists lie on a GPU that is none."""
    lists = SimpleNamespace(shape=(40, TOPK), device=device)
    made = adapter.CupyMLASparseImpl(SCALE, cache_type, rope, lists, heads)
    attention = importlib.import_module("vllm.model_executor.layers.attention.mla_attention").MLAAttention()
    attention.impl = made
    return attention


def test_once_for_all_layers(adapter, asked, caplog) -> None:
    """By vLLM's hook after loading; a second model of the same sizes finds all ready, another kind does not."""
    loaded("vllm.config").current = engine()
    with caplog.at_level(logging.INFO):
        for each in [layer(adapter, "auto") for _ in range(61)]:
            each.process_weights_after_loading(torch.bfloat16)
    (((config,), device),) = asked
    assert device == 0
    assert (config.num_heads, config.d_qk, config.topk, config.cache_layout) == (12, 576, TOPK, "bf16")
    assert (config.max_num_batched_tokens, config.max_model_len, config.num_speculative_tokens) == (40, 700, 0)
    assert config.max_num_seqs == 40, "short extends are decodes: a batch of them has as many tokens as any"
    told = [record.getMessage() for record in caplog.records if "cupy_mla" in record.getMessage()]
    assert len(told) == 2
    assert "12 heads over bf16 rows, topk 2048" in told[0]
    loaded("vllm.config").current = engine()
    layer(adapter, "auto").process_weights_after_loading(torch.bfloat16)
    assert len(asked) == 1
    loaded("vllm.config").current = engine(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    layer(adapter, "fp8_ds_mla", rope=0).process_weights_after_loading(torch.bfloat16)
    layer(adapter, "fp8_ds_mla", rope=0).process_weights_after_loading(torch.bfloat16)
    ((config,), _) = asked[-1]
    assert len(asked) == 2
    assert (config.d_qk, config.cache_layout, config.num_speculative_tokens) == (512, "v32_fp8", 2)
    assert config.max_num_seqs * 3 >= 40


def test_ranks_attend_with_the_heads_of_all(adapter, asked, monkeypatch) -> None:
    """Under decode context parallelism vLLM gathers the queries."""
    loaded("vllm.config").current = engine()
    monkeypatch.setattr(loaded("vllm.v1.attention.backend"), "ranks", 4)
    layer(adapter, "fp8_ds_mla", heads=16).process_weights_after_loading(torch.bfloat16)
    assert asked[0][0][0].num_heads == 64


def test_the_cpu_has_no_kernels(adapter, asked) -> None:
    loaded("vllm.config").current = engine()
    layer(adapter, "auto", device=torch.device("cpu")).process_weights_after_loading(torch.bfloat16)
    assert asked == []


def model_of(heads: int, **hf_config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        max_model_len=700, hf_config=SimpleNamespace(**hf_config), get_num_attention_heads=lambda parallel: heads
    )


def test_models_without_an_indexer(vllm, asked, caplog) -> None:
    """When vLLM makes their builders: once for all groups of layers of a kind."""
    make = importlib.import_module(f"{plugin.__name__}.dense_mla").CupyMLADenseBuilder
    of = engine(model_config=model_of(16), parallel_config=None)
    bf16, fp8 = (SimpleNamespace(dtype=dtype) for dtype in (torch.bfloat16, torch.uint8))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            make(bf16, ["a", "b"], of, GPU)
    assert asked == [([DenseMLAConfig(16, max_num_seqs=5, max_model_len=700)], 0)]
    told = [record.getMessage() for record in caplog.records]
    assert "16 heads over bf16 rows ready" in told[0]
    assert len(told) == 2
    of.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    make(fp8, ["a"], of, GPU)
    make(fp8, ["a"], of, torch.device("cpu"))
    ((config,), _) = asked[-1]
    assert len(asked) == 2
    assert (config.cache_layout, config.num_speculative_tokens) == ("plain_fp8", 2)


@pytest.mark.parametrize(("gpu", "warned"), [((8, 0), 0), ((9, 0), 0), ((10, 3), 1), ((12, 1), 1)])
def test_a_newer_gpu_is_warned_of_portable_kernels(adapter, asked, monkeypatch, caplog, gpu, warned: int) -> None:
    """Once for all kinds of layers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    loaded("vllm.config").current = engine()
    for heads in (8, 16):
        layer(adapter, "auto", heads=heads).process_weights_after_loading(torch.bfloat16)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(asked) == 2
    assert len(messages) == warned
    assert all(f"compute capability {gpu[0]}.{gpu[1]} attention runs on the portable" in m for m in messages)


def test_ranks_without_an_indexer_attend_with_the_heads_of_all(vllm, asked, monkeypatch) -> None:
    adapter = importlib.import_module(f"{plugin.__name__}.dense_mla")
    monkeypatch.setattr(adapter.common.MLACommonMetadataBuilder, "dcp_world_size", 4)
    of = engine(model_config=model_of(16), parallel_config=None)
    adapter.CupyMLADenseBuilder(SimpleNamespace(dtype=torch.bfloat16), ["a"], of, GPU)
    assert asked[0][0][0].num_heads == 64


@pytest.mark.parametrize(("heads", "written"), [(4, 8), (16, 16), (96, 128)])
def test_deepseek_v4(vllm, asked, monkeypatch, heads: int, written: int) -> None:
    """When the model makes its first layer, for those of all kinds."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    make = importlib.import_module(f"{plugin.__name__}.deepseek_v4").DeepseekV4ForCausalLM
    ratios = {"0": 1, "1": 4, "2": 128, "3": 4, "4": 128}
    of = engine(
        model_config=model_of(heads, index_topk=512, sliding_window=96, ratios=ratios), parallel_config=None,
        device_config=SimpleNamespace(device_type="cuda"), speculative_config=SimpleNamespace(num_speculative_tokens=1),
        attention_config=SimpleNamespace(backend=None),
    )  # fmt: skip
    make(vllm_config=of)
    make(vllm_config=of)
    ((kinds, device),) = asked
    assert device == 1
    assert [config.compress_ratio for config in kinds] == [1, 4, 128]
    for config in kinds:
        assert (config.num_heads, config.topk, config.window, config.cache_layout) == (written, 512, 96, "v4_fp8")
        assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (5, 40, 700)
        assert config.num_speculative_tokens == 1
        assert config.max_image_tokens == 32, "a window and the guessed token, rounded up to 128, see one another"
    of.speculative_config, of.device_config.device_type = None, "cpu"
    make(vllm_config=of)
    of.device_config.device_type, of.attention_config.backend = "cuda", "FLASHINFER"
    make(vllm_config=of)
    assert len(asked) == 1


def test_deepseek_v41(vllm, asked, monkeypatch) -> None:
    """As V4. Some kinds of layers share caches and lists; their kernels are the same."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    make = importlib.import_module(f"{plugin.__name__}.deepseek_v41").DeepseekV41ForCausalLM
    text = {
        "index_topk": 512, "sliding_window": 96, "compress_ratios": (0, 0, 2, 2, 1, 1), "kv_source_layer_ids": (2, 4),
        "index_source_layer_ids": (2, 4, 5), "candidate_source_layer_id": 4, "candidate_topk_blocks": 64,
        "candidate_block_size": 8,
    }  # fmt: skip
    of = engine(
        model_config=model_of(16, **text), parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
        device_config=SimpleNamespace(device_type="cuda"), attention_config=SimpleNamespace(backend=None),
    )  # fmt: skip
    make(vllm_config=of)
    ((kinds, _),) = asked
    assert [(config.model, config.compress_ratio, config.block_size) for config in kinds] == [
        ("v41", 0, 64), ("v41", 1, 64), ("v41", 2, 64),
    ]  # fmt: skip
    for config in kinds:
        assert (config.num_heads, config.topk, config.window, config.cache_layout) == (16, 512, 96, "v4_fp8")


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 64])
def test_no_step_needs_another_kernel(adapter, gpu, monkeypatch, rng, cache: str, heads: int) -> None:
    """Decodes, prefills and batches of both, with lists and without, on an H200 that is none."""
    sizes = SimpleNamespace(max_num_seqs=9, max_num_batched_tokens=150)
    loaded("vllm.config").current = engine(scheduler_config=sizes)
    each = layer(adapter, cache, heads=heads)
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
        adapter.short.attend(
            torch.zeros(requests, heads, 576).bfloat16(), rows, adapter.short.DenseDecodes(lens, table, 1), 1.0
        )
    assert set(gpu.kernels.values()) == ready <= set(all_kernels())
