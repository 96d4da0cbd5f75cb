"""DeepSeek-V4's attention layers of vLLM's wheel on our operations, part of what `wheel_vllm` drives: the wheel's own
metadata builders and `forward_mqa` take a step of decodes and prefills, in each kind of layer, beside float64. The
Triton kernels of the builders are plain loops here."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import cupy_mla
from tests import oracle, oracle_v4
from tests.backends.test_sparse_mla import assert_result

HEADS, WINDOW, TOPK, BLOCK, WINDOW_BLOCK = 64, 32, 128, 256, 64
MAX_LEN, MAX_TOKENS, SCALE = 1024, 64, 512**-0.5
QUERY_LENS, SEQ_LENS = (1, 1, 9, 5), (300, 40, 270, 5)  # two decodes, a prefill behind a prefix, a whole one
RATIOS = (1, 4, 128)
CPU = torch.device("cpu")


def windows(
    lists: torch.Tensor, lens: torch.Tensor, window: int, width: int, left: Any, right: Any, starts: torch.Tensor,
    seq_lens: torch.Tensor, requests: torch.Tensor, valid: torch.Tensor, table: torch.Tensor, block_size: int,
    replay_start: torch.Tensor, *, num_tokens: int, token_offset: int, has_image: bool = False,
) -> None:  # fmt: skip
    """vLLM's kernel of that: the slots of each token's window."""
    assert not has_image
    assert valid[: token_offset + num_tokens].all()
    for t in range(num_tokens):
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
        n = min((p + 1) // ratio, most)
        if t < decode_tokens:
            found = table[int(requests[t]), at[:n] // block_size] * block_size + at[:n] % block_size
            slots[t, :most], slots[t, :n], lens[t] = -1, found, n
        else:
            rows[t - decode_tokens, :most] = at.where(at < n, -1)


def cache_of(rng: np.random.Generator, blocks: int, size: int) -> torch.Tensor:
    """Random rows; blocks are multiples of 576 bytes, as vLLM's."""
    stride = -(-size * 584 // 576) * 576
    cache = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8).as_strided((blocks, size, 584), (stride, 584, 1))
    k = torch.from_numpy(rng.standard_normal((blocks * size, 512)).astype(np.float32)).bfloat16()
    cupy_mla.quantize_and_insert_k_cache(k, cache, torch.arange(blocks * size))
    return cache


def drive(rng: np.random.Generator, made: Any) -> None:
    """A step of layers of each kind.

    Args:
        made: makes what vLLM's classes read of a configuration, of some heads and a cache type.
    """
    importlib.import_module("cupy_mla.integrations.vllm.deepseek_v4")  # puts ours into the layers' module
    swa = importlib.import_module("vllm.v1.attention.backends.mla.sparse_swa")
    sparse = importlib.import_module("vllm.models.deepseek_v4.sparse_mla")
    layers = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    compressor = importlib.import_module("vllm.v1.attention.backends.mla.compressor_utils")
    vars(swa)["_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"] = windows
    vars(swa)["_COMPUTE_PREFILL_METADATA_KERNEL"] = gather_lens
    vars(swa)["get_mla_metadata"] = lambda *_, **__: (SimpleNamespace(), None)
    vars(sparse)["_BUILD_C128A_TOPK_METADATA_KERNEL"] = complete_rows
    vars(compressor)["_COMPRESSED_SLOT_MAPPING_KERNEL"] = lambda *_, **__: None
    vars(sparse)["triton"] = SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    backend = importlib.import_module("vllm.v1.attention.backend")

    config = made(HEADS, "fp8_ds_mla")
    text = SimpleNamespace(sliding_window=WINDOW, index_topk=TOPK, compress_ratios=list(RATIOS))
    config.model_config.hf_config = config.model_config.hf_text_config = text
    config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens = MAX_LEN, MAX_TOKENS

    starts = np.cumsum([0, *QUERY_LENS]).astype(np.int32)
    seq_lens, tokens = np.array(SEQ_LENS, np.int32), int(starts[-1])
    requests = np.repeat(np.arange(len(SEQ_LENS)), QUERY_LENS)
    positions = np.array([oracle_v4.position(starts, seq_lens, r, t) for t, r in enumerate(requests)])

    def table(blocks: int) -> np.ndarray:
        return rng.permutation(len(SEQ_LENS) * blocks).reshape(len(SEQ_LENS), blocks).astype(np.int32)

    def batch(blocks: np.ndarray) -> Any:
        lens = torch.from_numpy(seq_lens)
        return backend.CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts), query_start_loc_cpu=torch.from_numpy(starts), seq_lens=lens,
            num_reqs=len(lens), num_actual_tokens=tokens, max_query_len=max(QUERY_LENS), max_seq_len=max(SEQ_LENS),
            block_table_tensor=torch.from_numpy(blocks), slot_mapping=torch.arange(tokens),
            positions=torch.from_numpy(positions), seq_lens_cpu_upper_bound=lens,
        )  # fmt: skip

    def spec(kind: Any, size: int, ratio: int, **more: Any) -> Any:
        return kind(
            block_size=size, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=ratio,
            cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4", state_content_bytes=584, alignment=576, **more,
        )  # fmt: skip

    window_table = table(MAX_LEN // WINDOW_BLOCK)
    window_cache = cache_of(rng, window_table.size, WINDOW_BLOCK)
    window_spec = spec(interface.SlidingWindowMLASpec, WINDOW_BLOCK, 1, sliding_window=WINDOW)
    window_builder = layers.DeepseekSparseSWAFlashMLABackend.get_builder_cls()(window_spec, ["swa"], config, CPU)
    q = torch.from_numpy(rng.standard_normal((tokens, HEADS, 512)).astype(np.float32)).bfloat16()
    sink = torch.from_numpy(rng.standard_normal(HEADS).astype(np.float32))
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(CPU)
    for ratio in RATIOS:
        blocks = table(MAX_LEN // BLOCK)
        cache = cache_of(rng, blocks.size, BLOCK // ratio)
        step = {"swa": window_builder.build(0, batch(window_table))}
        if ratio > 1:
            builder = layers.DeepseekV4FlashMLABackend.get_builder_cls()(
                spec(interface.MLAAttentionSpec, BLOCK, ratio), ["layer"], config, CPU
            )
            step["layer"] = builder.build(0, batch(blocks))
        chosen = np.full((tokens, TOPK), -1, np.int32)
        for t, p in enumerate(positions):
            rows = min((p + 1) // ratio, TOPK if ratio == 4 else MAX_LEN)
            chosen[t, :rows] = rng.permutation((p + 1) // ratio)[:rows] if ratio == 4 else np.arange(rows)[:TOPK]
        layer = layers.DeepseekV4FlashMLAAttention.__new__(layers.DeepseekV4FlashMLAAttention)
        torch.nn.Module.__init__(layer)
        given = {
            "prefix": "layer", "compress_ratio": ratio, "window_size": WINDOW, "max_image_tokens": 0, "scale": SCALE,
            "max_num_batched_tokens": MAX_TOKENS, "max_model_len": MAX_LEN, "attn_sink": sink, "kv_cache": cache,
            "swa_cache_layer": SimpleNamespace(prefix="swa", kv_cache=window_cache),
            "topk_indices_buffer": torch.from_numpy(np.pad(chosen, ((0, 9), (0, 0)), constant_values=-1)),
        }  # fmt: skip
        vars(layer).update(given)
        context = SimpleNamespace(attn_metadata=step)
        vars(importlib.import_module("vllm.forward_context"))["_forward_context"] = context
        out = torch.full_like(q, torch.nan)
        layer.forward_mqa(q, q[:, 0], torch.from_numpy(positions), out)
        for t, (r, p) in enumerate(zip(requests, positions, strict=True)):
            at = np.arange(max(p - WINDOW + 1, 0), p + 1)
            slots = window_table[r, at // WINDOW_BLOCK] * WINDOW_BLOCK + at % WINDOW_BLOCK
            rows = [oracle.named_rows(oracle.V4, window_cache.numpy(), slots)]
            if ratio > 1:
                size, own = BLOCK // ratio, chosen[t][chosen[t] >= 0]
                rows.append(oracle.named_rows(oracle.V4, cache.numpy(), blocks[r, own // size] * size + own % size))
            want, _, _ = oracle.attend(q[t].float().numpy(), np.concatenate(rows), SCALE, sink.numpy())
            assert_result(out[t].float().numpy(), want)
        print(f"DeepSeek-V4's layers, a compressed row for {ratio} tokens")
