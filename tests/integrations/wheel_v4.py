"""DeepSeek-V4's attention layers of vLLM's wheel with our attention, part of what `wheel_vllm` drives: the wheel's own
choice of a class, layers, indexer and metadata builders make a profiling run and take several steps on one buffer, in
each kind of layer, beside float64. The Triton kernels of the builders are plain loops, here and in `wheel_vllm`."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests import oracle_v4
from tests.backends.test_sparse_mla import assert_result
from tests.integrations.steps_v4 import (
    BLOCK,
    INDEX_HEADS,
    MAX_LEN,
    MAX_TOKENS,
    ORDER,
    RATIOS,
    TOPK,
    WINDOW,
    WINDOW_BLOCK,
    Asked,
    Layer,
)
from tests.integrations.test_vllm import HOSTILE

HEADS = 16
CPU = torch.device("cpu")
# What a layer has beside its attention.
NO_PART_OF_ATTENTION = (
    "ColumnParallelLinear", "MergedColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear", "RMSNorm",
    "DeepseekCompressor", "build_deepseek_v4_rope",
)  # fmt: skip


class Part(torch.nn.Module):
    """Stands for one of these."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def windows(
    lists: torch.Tensor, lens: torch.Tensor, window: int, width: int, left: Any, right: Any, starts: torch.Tensor,
    seq_lens: torch.Tensor, requests: torch.Tensor, valid: torch.Tensor, table: torch.Tensor, block_size: int,
    replay_start: torch.Tensor, *, num_tokens: int, token_offset: int, has_image: bool = False,
) -> None:  # fmt: skip
    """vLLM's kernel of that: the slots of each token's window."""
    assert not has_image
    tokens = slice(token_offset, token_offset + num_tokens)
    found = oracle_v4.swa_indices_and_lens(
        starts.numpy(), seq_lens.numpy(), requests[: tokens.stop].numpy(), valid[: tokens.stop].numpy(), table.numpy(),
        block_size, window, replay_start.numpy(),
    )  # fmt: skip
    lists[:num_tokens, 0, :width] = torch.from_numpy(found[0])[tokens]
    lens[:num_tokens] = torch.from_numpy(found[1])[tokens]


def gather_lens(
    out: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, replay_start: torch.Tensor, prefills: int,
    decodes: int, window: int,
) -> None:  # fmt: skip
    found = oracle_v4.prefill_gather_lens(
        seq_lens.numpy(), starts.numpy(), decodes, window, replay_start.numpy()
    )  # fmt: skip
    out.copy_(torch.from_numpy(found))
    assert len(out) == prefills


def complete_rows(
    slots: torch.Tensor, lens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, ratio: int, most: int,
    decode_tokens: int, requests: torch.Tensor, table: torch.Tensor, block_size: int, slot_mapping: torch.Tensor,
) -> None:  # fmt: skip
    """vLLM's kernel of C128A's lists."""
    at = torch.arange(most)
    for t, p in enumerate(positions.tolist()):
        n = min((p + 1) // ratio, most) if slot_mapping[t] >= 0 else 0
        if t < decode_tokens:
            found = table[int(requests[t]), at[:n] // block_size] * block_size + at[:n] % block_size
            slots[t, :most], slots[t, :n], lens[t] = -1, found, n
        else:
            rows[t - decode_tokens, :most] = at.where(at < n, -1)


def leave_out_parts(attention: Any) -> None:
    """Replace, in vLLM's module of attention layers, what is no part of attention."""
    for name in NO_PART_OF_ATTENTION:
        assert name in vars(attention)
        vars(attention)[name] = Part


def configured(made: Any, heads: int, ratios: tuple[int, ...], **more: Any) -> Any:
    """A configuration of a small model; `more`: further fields of the model's own one."""
    config = made(heads, "fp8_ds_mla")
    text = SimpleNamespace(
        hidden_size=64, num_attention_heads=heads, q_lora_rank=64, o_lora_rank=64, head_dim=512, qk_rope_head_dim=64,
        o_groups=2, sliding_window=WINDOW, num_hidden_layers=len(ratios), compress_ratios=list(ratios),
        rms_norm_eps=1e-6, index_topk=TOPK, max_position_embeddings=MAX_LEN, index_n_heads=INDEX_HEADS,
        index_head_dim=128, **more,
    )  # fmt: skip
    config.model_config.hf_config = config.model_config.hf_text_config = text
    config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens = MAX_LEN, MAX_TOKENS
    config.kernel_config.sparse_indexer_topk_backend, config.parallel_config.pcp_shard_decode_requests = "auto", False
    device = SimpleNamespace(device_type="cpu")
    vars(config).update(quant_config=None, use_v2_model_runner=True, device_config=device)
    config.attention_config.backend = None
    return config


def drive(rng: np.random.Generator, made: Any) -> None:
    """Steps of layers of each kind.

    Args:
        made: makes what vLLM's classes read of a configuration, of some heads and a cache type.
    """
    ours = importlib.import_module("cupy_mla.integrations.vllm.deepseek_v4").CupyMLADeepseekV4Attention
    swa = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")
    sparse = importlib.import_module("vllm.models.deepseek_v4.sparse_mla")
    model = importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
    compressor = importlib.import_module("vllm.v1.attention.backends.mla.compressor_utils")
    vars(swa)["_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"] = windows
    vars(swa)["_COMPUTE_PREFILL_METADATA_KERNEL"] = gather_lens
    vars(swa)["get_mla_metadata"] = lambda *_, **__: (SimpleNamespace(), None)
    vars(sparse)["_BUILD_C128A_TOPK_METADATA_KERNEL"] = complete_rows
    vars(compressor)["_COMPRESSED_SLOT_MAPPING_KERNEL"] = lambda *_, **__: None
    vars(sparse)["triton"] = SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length())

    attention = importlib.import_module("vllm.models.deepseek_v4.attention")
    leave_out_parts(attention)
    flashmla = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    vars(flashmla)["compute_fp8_einsum_recipe"] = lambda: (0, 0)
    vars(torch.cuda)["Event"] = type("Event", (), {})

    config = configured(
        made, HEADS, RATIOS, layer_types=["swa", "c4a", "c128a"], compress_rates={"c4a": 4, "c128a": 128}
    )  # fmt: skip
    assert "_select_dsv4_attn_cls" in model.DeepseekV4DecoderLayer.__init__.__code__.co_names  # looked up there
    assert model._select_dsv4_attn_cls(config) is ours
    config.attention_config.backend = model.AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV4
    assert model._select_dsv4_attn_cls(config) is model.DeepseekV4FlashInferMLAAttention
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(CPU)
    for number, ratio in enumerate(RATIOS):
        held = Layer(rng, ratio, HEADS)
        layer = ours(config, prefix=f"layers.{number}.attn", topk_indices_buffer=held.chosen)
        hold(layer, held)
        builders = builders_of(layer, config)
        for name in ORDER:
            step(layer, builders, held.step(name))
        print(f"{len(ORDER)} steps of DeepSeek-V4's layers, a compressed row for {ratio} tokens")


def hold(layer: Any, held: Layer) -> None:
    """Give a layer its caches and sinks; a profiling run comes first, as in vLLM."""
    assert (layer.compress_ratio, layer.padded_heads, len(layer.attn_sink)) == (held.ratio, HEADS, HEADS)
    profile(layer, HEADS)
    layer.attn_sink.data.copy_(held.sink)
    layer.swa_cache_layer.kv_cache = held.window
    if held.compressed is not None:
        layer.kv_cache = held.compressed
    if layer.indexer is not None:
        layer.indexer.k_cache.kv_cache = torch.from_numpy(held.keys)


def profile(layer: Any, heads: int) -> None:
    """A profiling run, which has no metadata."""
    context(None)
    q = torch.ones(MAX_TOKENS, heads, 512, dtype=torch.bfloat16)
    out = layer._alloc_attn_out(MAX_TOKENS, q)
    layer.forward_mqa(layer._fused_qnorm_rope_kv_insert(q, q[:, 0], None, None), q[:, 0], None, out)
    assert not out.any()


def context(metadata: Any) -> None:
    """The step's, which layers ask vLLM for."""
    vars(importlib.import_module("vllm.forward_context"))["_forward_context"] = SimpleNamespace(attn_metadata=metadata)


def builders_of(layer: Any, config: Any) -> dict[str, Any]:
    """vLLM's metadata builders of a layer's caches, by the caches' names."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")

    def spec(kind: Any, size: int, ratio: int, **more: Any) -> Any:
        return kind(
            block_size=size, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=ratio,
            cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4", state_content_bytes=584, alignment=576, **more,
        )  # fmt: skip

    def built(cache: Any, rows: Any, **more: Any) -> Any:
        return cache.get_attn_backend().get_builder_cls()(rows, [cache.prefix], config, CPU, **more)

    window, ratio = layer.swa_cache_layer, layer.compress_ratio
    builders = {
        window.prefix: built(window, spec(interface.SlidingWindowMLASpec, WINDOW_BLOCK, 1, sliding_window=WINDOW))
    }
    if ratio > 1:
        builders[layer.prefix] = built(layer, spec(interface.MLAAttentionSpec, BLOCK, ratio))
    if layer.indexer is not None:
        keys = layer.indexer.k_cache
        rows = spec(interface.MLAAttentionSpec, BLOCK, ratio)
        builders[keys.prefix] = built(keys, rows, block_table_width=MAX_LEN // BLOCK)
    return builders


def batch_of(asked: Any, table: np.ndarray, **more: Any) -> Any:
    """vLLM's description of a step."""
    backend = importlib.import_module("vllm.v1.attention.backend")
    lens, starts = torch.tensor(asked.seq_lens, dtype=torch.int32), torch.from_numpy(asked.starts)
    return backend.CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(lens),
        num_actual_tokens=len(asked.slots), max_query_len=max(asked.query_lens), max_seq_len=max(asked.seq_lens),
        block_table_tensor=torch.from_numpy(table), slot_mapping=torch.from_numpy(asked.slots),
        positions=torch.from_numpy(asked.positions), seq_lens_cpu_upper_bound=lens, **more,
    )  # fmt: skip


def step(layer: Any, builders: dict[str, Any], asked: Asked) -> None:
    """Metadata by vLLM's builders, then the choice of rows and attention as the layer calls them, beside what is
    right."""
    window, positions = layer.swa_cache_layer.prefix, torch.from_numpy(asked.positions)
    context({
        name: builder.build(0, batch_of(asked, asked.window_table if name == window else asked.table))
        for name, builder in builders.items()
    })  # fmt: skip
    out, choice = torch.full_like(asked.q, torch.nan), (None, None, None)
    if layer.indexer is not None:
        layer.topk_indices_buffer.fill_(HOSTILE)
        index_q = torch.from_numpy(asked.index_q).view(torch.float8_e4m3fn)
        choice = index_q, None, torch.from_numpy(asked.weights)
    layer._sparse_indexer_and_attn(asked.q[:, 0], *choice, asked.q, asked.q[:, 0], positions, out)
    if layer.indexer is not None:
        assert torch.equal(layer.topk_indices_buffer[: len(asked.lists)], torch.from_numpy(asked.lists))
        assert (layer.topk_indices_buffer[len(asked.lists) :] == HOSTILE).all()
    assert_result(out.float().numpy(), asked.want)
