"""DeepSeek-V4.1's attention layers of vLLM's wheel with our attention and indexer, as `wheel_v4`: the layers of a small
model make a profiling run and take several steps on the buffers that they share, beside float64."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests import oracle
from tests.backends.test_sparse_mla import assert_result
from tests.integrations import steps_v41, wheel_v4
from tests.integrations.steps_v4 import MAX_LEN, SCALE, WINDOW
from tests.integrations.steps_v41 import (
    BLOCK,
    CANDIDATE_SOURCE,
    CANDIDATES,
    INDEX_SOURCES,
    KV_SOURCES,
    RATIOS,
    WINDOW_BLOCK,
    Asked,
    Model,
)
from tests.integrations.test_vllm import HOSTILE
from tests.integrations.wheel_v4 import CPU, batch_of, configured, context, profile

HEADS = 8


def draft_windows(
    lists: torch.Tensor, lens: torch.Tensor, window: int, width: int, starts: torch.Tensor, seq_lens: torch.Tensor,
    requests: torch.Tensor, valid: torch.Tensor, table: torch.Tensor, block_size: int, *, num_tokens: int,
    token_offset: int,
) -> None:  # fmt: skip
    """vLLM's kernel of a draft model's windows: all tokens of the block, and those of a window before it."""
    assert token_offset == 0
    for t in range(num_tokens):
        r = int(requests[t])
        before = int(seq_lens[r] - starts[r + 1] + starts[r])
        at = torch.arange(max(before - window, 0), int(seq_lens[r]))
        lists[t], lens[t] = -1, len(at) if valid[t] else 0
        lists[t, 0, : int(lens[t])] = table[r, at // block_size] * block_size + at % block_size


def uniform_decodes(
    seq_lens: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, tables: torch.Tensor, ones: torch.Tensor,
    tokens: int, each: int,
) -> None:  # fmt: skip
    """vLLM's kernel of that: each token becomes a request."""
    t = torch.arange(tokens)
    lens[:tokens] = seq_lens[t // each] - each + 1 + t % each
    tables[:tokens, : table.shape[1]], ones[:tokens] = table[t // each], 1


def drive(rng: np.random.Generator, made: Any) -> None:
    """Steps of a model's layers. `wheel_v4` has put its stand-ins into the modules that both kinds of layers use.

    Args:
        made: makes what vLLM's classes read of a configuration, of some heads and a cache type.
    """
    ours = importlib.import_module("cupy_mla.integrations.vllm.deepseek_v41").CupyMLADeepseekV41Attention
    swa = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")
    keys = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    attention = importlib.import_module("vllm.models.deepseek_v41.attention")
    flashmla = importlib.import_module("vllm.models.deepseek_v41.nvidia.flashmla")
    vars(swa)["_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL"] = draft_windows
    vars(keys)["_PREPARE_UNIFORM_DECODE_KERNEL"] = uniform_decodes
    wheel_v4.leave_out_parts(attention)
    vars(flashmla)["compute_fp8_einsum_recipe"] = lambda _: (0, 0)
    if "register_dsv41_o_proj_warmup" in vars(flashmla):
        vars(flashmla)["register_dsv41_o_proj_warmup"] = lambda _: None

    config = configured(
        made, HEADS, RATIOS, kv_source_layer_ids=list(KV_SOURCES), index_source_layer_ids=list(INDEX_SOURCES),
        candidate_source_layer_id=CANDIDATE_SOURCE, candidate_topk_blocks=CANDIDATES, candidate_block_size=8,
    )  # fmt: skip
    config.attention_config.indexer_sparse_logits, config.cache_config.swa_bounded_replay = False, True
    which_class(config, ours)
    model = Model(rng, HEADS)
    layers = layers_of(ours, config, model)
    builders = builders_of(layers, config)
    for name in steps_v41.ORDER:
        step(layers, builders, model, model.step(name))
    print(f"{len(steps_v41.ORDER)} steps of DeepSeek-V4.1's layers, ratios {RATIOS}")

    config.speculative_config = SimpleNamespace(
        num_speculative_tokens=2, enable_adaptive_verification=False, use_dspark=lambda: True,
        parallel_drafting=False,
    )  # fmt: skip
    config.num_speculative_tokens = 2
    for native in (False, True):  # where DeepGEMM takes requests with several query tokens, or each as a request
        vars(keys)["_supports_native_decode"] = lambda n, native=native: native
        config.compilation_config.static_forward_context.clear()
        layers = layers_of(ours, config, model)
        builders = builders_of(layers, config)
        for name in steps_v41.GUESSED:
            step(layers, builders, model, model.step(name))
    print(f"{len(steps_v41.GUESSED)} steps of DeepSeek-V4.1's layers with guessed tokens")
    draft(layers[0], builders[layers[0].swa_cache_layer.prefix], model)
    print("a draft model's layer")


def which_class(config: Any, ours: Any) -> None:
    """Ours where vLLM takes FlashMLA's and stores V4's rows."""
    model = importlib.import_module("vllm.models.deepseek_v41.nvidia.model")
    attention = importlib.import_module("vllm.models.deepseek_v41.attention")
    assert "_select_dsv4_attn_cls" in model.DeepseekV4DecoderLayer.__init__.__code__.co_names  # looked up there
    assert not attention._use_v41_mxfp8_kv_record()
    assert model._select_dsv4_attn_cls(config) is ours
    stock, of = model.DeepseekV4FlashMLAAttention, attention._use_v41_mxfp8_kv_record
    config.parallel_config.prefill_context_parallel_size = 2
    assert model._select_dsv4_attn_cls(config) is stock
    config.parallel_config.prefill_context_parallel_size = 1
    vars(attention)["_use_v41_mxfp8_kv_record"] = lambda: True
    assert model._select_dsv4_attn_cls(config) is stock
    vars(attention)["_use_v41_mxfp8_kv_record"] = of
    config.attention_config.backend = model.AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV41
    assert model._select_dsv4_attn_cls(config) is model.DeepseekV4FlashInferMLAAttention
    config.attention_config.backend = None


def layers_of(ours: Any, config: Any, model: Model) -> list[Any]:
    """The layers, as vLLM's model makes them; a profiling run comes before they get caches."""
    layers = [
        ours(
            config, prefix=f"model.layers.{number}.attn", topk_indices_buffer=model.chosen,
            candidate_block_buffer=model.candidates,
        )
        for number in range(len(RATIOS))
    ]  # fmt: skip
    for number, layer in enumerate(layers):
        assert (layer.compress_ratio, layer.padded_heads, layer.swa_bytes_per_token) == (RATIOS[number], HEADS, 584)
        assert (layer.indexer is not None) == (number in INDEX_SOURCES)
        profile(layer, HEADS)
        layer.attn_sink.data.copy_(model.sinks[number])
        layer.swa_cache_layer.kv_cache = model.windows[number]
        if number in KV_SOURCES:
            layer.kv_cache, layer.indexer.k_cache.kv_cache = model.compressed[number], model.keys[number]
    return layers


def builders_of(layers: list[Any], config: Any) -> dict[str, Any]:
    """vLLM's metadata builders of the layers' caches, by the caches' names; vLLM's own specs of the caches."""
    builders = {}

    def build(cache: Any, block_size: int, **more: Any) -> None:
        spec = cache.get_kv_cache_spec(config)
        assert spec.block_size == block_size
        builders[cache.prefix] = cache.get_attn_backend().get_builder_cls()(spec, [cache.prefix], config, CPU, **more)

    for number, layer in enumerate(layers):
        build(layer.swa_cache_layer, WINDOW_BLOCK)
        if number in KV_SOURCES:
            build(layer, BLOCK)
            build(layer.indexer.k_cache, BLOCK, block_table_width=MAX_LEN // BLOCK)
        assert (layer.get_kv_cache_spec(config) is None) == (number not in KV_SOURCES)
    return builders


def draft(layer: Any, builder: Any, model: Model) -> None:
    """A draft model's layer has a sliding window alone. Its tokens see all of their block, and a window before it."""
    asked = model.step("as many guessed tokens")
    context({layer.swa_cache_layer.prefix: builder.build(0, batch_of(asked, asked.window_table, causal=False))})
    q = asked.q[0]
    out = torch.full_like(q, torch.nan)
    layer._sparse_indexer_and_attn(q[:, 0], None, None, None, q, q[:, 0], torch.from_numpy(asked.positions), out)
    for t, r in enumerate(asked.requests):
        at = np.arange(max(asked.seq_lens[r] - asked.query_lens[r] - WINDOW, 0), asked.seq_lens[r])
        named = asked.window_table[r, at // WINDOW_BLOCK] * WINDOW_BLOCK + at % WINDOW_BLOCK
        rows = oracle.named_rows(oracle.V4, model.windows[0].numpy(), named)
        want = oracle.attend(q[t].double().numpy(), rows, SCALE, model.sinks[0].numpy())[0]
        assert_result(out[t].float().numpy(), want)


def step(layers: list[Any], builders: dict[str, Any], model: Model, asked: Asked) -> None:
    """Metadata by vLLM's builders, then the choice of rows and attention as the layers call them, beside what is
    right."""
    positions, replay = torch.from_numpy(asked.positions), torch.from_numpy(asked.replay)
    windows_of = {layer.swa_cache_layer.prefix for layer in layers}
    metadata = {
        name: builder.build(0, batch_of(asked, asked.window_table), replay_start=replay)
        if name in windows_of
        else builder.build(0, batch_of(asked, asked.table))
        for name, builder in builders.items()
    }
    context(metadata)
    tokens = len(positions)
    model.candidates.fill_(HOSTILE)
    for number, layer in enumerate(layers):
        choice: tuple[Any, Any, Any] = (None, None, None)
        asks = asked.choices.get(number)
        if asks is not None:
            model.chosen.fill_(HOSTILE)
            if asks.short:  # a kernel of the layer's chooses all
                model.chosen[:tokens] = asks.lists
            else:
                choice = asks.q, None, asks.weights
        q = asked.q[number]
        out = torch.full_like(q, torch.nan)
        layer._sparse_indexer_and_attn(q[:, 0], *choice, q, q[:, 0], positions, out)
        if asks is not None:
            assert torch.equal(model.chosen[:tokens], asks.lists), (number, asked.query_lens)
            assert (model.chosen[tokens:] == HOSTILE).all()
        if asks is not None and asks.blocks is not None and not asks.short:
            assert torch.equal(model.candidates[:tokens], asks.blocks)
            assert (model.candidates[tokens:] == HOSTILE).all()
        assert_result(out.float().numpy(), asked.want[number])
