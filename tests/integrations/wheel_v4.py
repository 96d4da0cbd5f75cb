"""DeepSeek-V4's attention layers of vLLM's wheel with our attention, part of what `wheel_vllm` drives: the wheel's own
choice of a class, layers, indexer and metadata builders take several steps on one buffer, in each kind of layer, beside
float64. The Triton kernels of the builders are plain loops here, as `wheel_vllm` has them or as they stand below."""

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
    MAX_LEN,
    MAX_TOKENS,
    ORDER,
    RATIOS,
    SCALE,
    TOPK,
    WINDOW,
    WINDOW_BLOCK,
    Asked,
    Layer,
)
from tests.integrations.test_vllm import HOSTILE

HEADS = 16
CPU = torch.device("cpu")


def windows(
    lists: torch.Tensor, lens: torch.Tensor, window: int, width: int, left: Any, right: Any, starts: torch.Tensor,
    seq_lens: torch.Tensor, requests: torch.Tensor, valid: torch.Tensor, table: torch.Tensor, block_size: int,
    replay_start: torch.Tensor, *, num_tokens: int, token_offset: int, has_image: bool = False,
) -> None:  # fmt: skip
    """vLLM's kernel of that: the slots of each token's window."""
    assert not has_image
    for t in range(num_tokens):
        if not valid[t + token_offset]:
            lens[t] = 0
            continue
        r = int(requests[t + token_offset])
        p = oracle_v4.position(starts.numpy(), seq_lens.numpy(), r, t + token_offset)
        at = torch.arange(max(p - window + 1, 0), p + 1)
        lists[t, 0, : len(at)] = table[r, at // block_size] * block_size + at % block_size
        lens[t] = len(at)


def gather_lens(
    out: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor, replay_start: torch.Tensor, prefills: int,
    decodes: int, window: int,
) -> None:  # fmt: skip
    out.copy_(torch.from_numpy(oracle_v4.prefill_gather_lens(seq_lens.numpy(), starts.numpy(), decodes, window)))
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

    config = made(HEADS, "fp8_ds_mla")
    text = SimpleNamespace(sliding_window=WINDOW, index_topk=TOPK, compress_ratios=list(RATIOS))
    config.model_config.hf_config = config.model_config.hf_text_config = text
    config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens = MAX_LEN, MAX_TOKENS
    config.attention_config.backend = None
    assert "_select_dsv4_attn_cls" in model.DeepseekV4DecoderLayer.__init__.__code__.co_names  # looked up there
    assert model._select_dsv4_attn_cls(config) is ours
    config.attention_config.backend = model.AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV4
    assert model._select_dsv4_attn_cls(config) is model.DeepseekV4FlashInferMLAAttention
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(CPU)
    for ratio in RATIOS:
        held = Layer(rng, ratio, HEADS)
        layer = layer_of(ours, held)
        builders = builders_of(layer, config)
        op = indexer_of(held) if ratio == 4 else None
        for name in ORDER:
            step(layer, op, builders, held.step(name))
        print(f"{len(ORDER)} steps of DeepSeek-V4's layers, a compressed row for {ratio} tokens")


def layer_of(kind: Any, held: Layer) -> Any:
    """A layer without weights, of our class."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    padded = kind.get_padded_num_q_heads(HEADS)
    assert padded == HEADS
    given = {
        "prefix": "layer", "compress_ratio": held.ratio, "window_size": WINDOW, "max_image_tokens": 0, "scale": SCALE,
        "max_num_batched_tokens": MAX_TOKENS, "max_model_len": MAX_LEN, "attn_sink": held.sink, "padded_heads": padded,
        "n_local_heads": HEADS, "kv_cache": torch.tensor([]) if held.compressed is None else held.compressed,
        "swa_cache_layer": SimpleNamespace(prefix="swa", kv_cache=held.window), "topk_indices_buffer": held.chosen,
    }  # fmt: skip
    vars(layer).update(given)
    return layer


def builders_of(layer: Any, config: Any) -> dict[str, Any]:
    """vLLM's metadata builders of a layer's caches, by the caches' names."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")

    def spec(kind: Any, size: int, ratio: int, **more: Any) -> Any:
        return kind(
            block_size=size, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=ratio,
            cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4", state_content_bytes=584, alignment=576, **more,
        )  # fmt: skip

    window = spec(interface.SlidingWindowMLASpec, WINDOW_BLOCK, 1, sliding_window=WINDOW)
    builders = {"swa": layer.swa_backend_cls.get_builder_cls()(window, ["swa"], config, CPU)}
    if layer.compress_ratio > 1:
        rows = spec(interface.MLAAttentionSpec, BLOCK, layer.compress_ratio)
        keys = spec(interface.MLAAttentionSpec, BLOCK, layer.compress_ratio)
        backend = importlib.import_module("vllm.v1.attention.backends.mla.indexer").DeepseekV4IndexerBackend
        builders["keys"] = backend.get_builder_cls()(keys, ["keys"], config, CPU, block_table_width=MAX_LEN // BLOCK)
        builders["layer"] = layer.get_attn_backend().get_builder_cls()(rows, ["layer"], config, CPU)
    return builders


def indexer_of(held: Layer) -> Any:
    """What a layer's indexer calls to choose rows, of vLLM's class."""
    layers = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    op = layers.SparseAttnIndexer.__new__(layers.SparseAttnIndexer)
    torch.nn.Module.__init__(op)
    given = {
        "k_cache": SimpleNamespace(prefix="keys", kv_cache=torch.from_numpy(held.keys)), "topk_tokens": TOPK,
        "topk_indices_buffer": held.chosen, "max_model_len": MAX_LEN // held.ratio, "max_total_seq_len": 4 * MAX_LEN,
        "compress_ratio": held.ratio, "use_pcp": False, "dcp_world_size": 1, "use_fp4_cache": False,
        "candidate_blocks": None,
    }  # fmt: skip
    vars(op).update(given)
    importlib.import_module("cupy_mla.integrations.vllm.indexer").adopt_v4(op)
    return op


def step(layer: Any, op: Any, builders: dict[str, Any], asked: Asked) -> None:
    """Metadata by vLLM's builders, the choice of rows if there is an indexer, and attention, beside what is right."""
    backend = importlib.import_module("vllm.v1.attention.backend")
    lens, starts = torch.tensor(asked.seq_lens, dtype=torch.int32), torch.from_numpy(asked.starts)
    positions = torch.from_numpy(asked.positions)

    def batch(table: np.ndarray) -> Any:
        return backend.CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(lens),
            num_actual_tokens=len(positions), max_query_len=max(asked.query_lens), max_seq_len=max(asked.seq_lens),
            block_table_tensor=torch.from_numpy(table), slot_mapping=torch.from_numpy(asked.slots),
            positions=positions, seq_lens_cpu_upper_bound=lens,
        )  # fmt: skip

    tables = {"swa": asked.window_table, "layer": asked.table, "keys": asked.table}
    metadata = {name: builder.build(0, batch(tables[name])) for name, builder in builders.items()}
    context = SimpleNamespace(attn_metadata=metadata)
    vars(importlib.import_module("vllm.forward_context"))["_forward_context"] = context
    if op is not None:
        op.topk_indices_buffer.fill_(HOSTILE)
        op(
            asked.q[:, 0],
            torch.from_numpy(asked.index_q).view(torch.float8_e4m3fn),
            None,
            torch.from_numpy(asked.weights),
        )
        assert torch.equal(op.topk_indices_buffer[: len(asked.lists)], torch.from_numpy(asked.lists))
        assert (op.topk_indices_buffer[len(asked.lists) :] == HOSTILE).all()
    out = torch.full_like(asked.q, torch.nan)
    layer.forward_mqa(asked.q, asked.q[:, 0], positions, out)
    assert_result(out.float().numpy(), asked.want)
