"""DeepSeek-V4 of the vLLM plug-in: the functions that its layers call are ours, in vLLM's calling convention."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import cupy_mla  # noqa: E402
from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests import oracle_v4  # noqa: E402

T, WINDOW, TOPK = 5, 8, 6


@pytest.fixture
def layers(vllm: None) -> ModuleType:
    """The module whose names V4's layers call, after the model was loaded as vLLM loads it."""
    ours = importlib.import_module(f"{plugin.__name__}.deepseek_v4")
    for model in plugin.V4_MODELS:
        assert issubclass(getattr(ours, model), getattr(importlib.import_module("vllm.models.deepseek_v4"), model))
    return importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")


def v4_cache(rng: np.random.Generator, blocks: int, size: int) -> torch.Tensor:
    """A cache of random rows whose blocks have a gap behind them, as vLLM pads them."""
    stride = cupy_mla.layouts.V4_FP8.block_bytes(size)
    cache = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8).as_strided((blocks, size, 584), (stride, 584, 1))
    k = torch.from_numpy(rng.standard_normal((blocks * size, 512)).astype(np.float32)).bfloat16()
    cupy_mla.quantize_and_insert_k_cache(k, cache, torch.arange(blocks * size))
    return cache


def integers(rng: np.random.Generator, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape, dtype=np.int32))


@pytest.mark.parametrize("extra", [False, True], ids=["window", "window and compressed"])
def test_decode(layers, rng, extra: bool) -> None:
    """With the keywords of vLLM's call; lists of both caches, a sink for each head, out in place."""
    q = torch.randn(T, 1, 64, 512).bfloat16()
    window, compressed = v4_cache(rng, 3, 16), v4_cache(rng, 4, 8)
    lists = {"indices": integers(rng, 0, 48, (T, 1, WINDOW)), "topk_length": integers(rng, 1, WINDOW + 1, (T,))}
    more = integers(rng, 0, 32, (T, 1, TOPK)), integers(rng, 0, TOPK + 1, (T,))
    sink, out = torch.randn(64), torch.full((T, 64, 512), torch.nan).bfloat16()
    got, _ = layers.flash_mla_with_kvcache(
        q=q, k_cache=window.unsqueeze(-2), block_table=None, head_dim_v=512, tile_scheduler_metadata=object(),
        cache_seqlens=None, is_fp8_kvcache=True, **lists, softmax_scale=0.1, attn_sink=sink,
        extra_k_cache=compressed.unsqueeze(-2) if extra else None,
        extra_indices_in_kvcache=more[0] if extra else None, extra_topk_length=more[1] if extra else None,
        out=out.unsqueeze(1),
    )  # fmt: skip
    lists |= {"extra_k_cache": compressed, "extra_indices": more[0], "extra_topk_length": more[1]} if extra else {}
    want, _ = cupy_mla.sparse_decode(q, window, sm_scale=0.1, attn_sink=sink, **lists)
    assert torch.equal(out, want[:, 0])
    assert got.data_ptr() == out.data_ptr()


def test_prefill(layers, rng) -> None:
    q, kv = torch.randn(T, 64, 512).bfloat16(), torch.randn(20, 1, 512).bfloat16()
    indices, lens, sink = integers(rng, 0, 20, (T, 1, TOPK)), integers(rng, 0, TOPK + 1, (T,)), torch.randn(64)
    out = torch.full((T, 64, 512), torch.nan).bfloat16()
    layers.flash_mla_sparse_fwd(
        q=q, kv=kv, indices=indices, sm_scale=0.1, attn_sink=sink, topk_length=lens, out=out
    )  # fmt: skip
    want, _, _ = cupy_mla.sparse_prefill(q, kv, indices, 0.1, attn_sink=sink, topk_length=lens)
    assert torch.equal(out, want)


def test_gather(layers, rng) -> None:
    cache, table, seq_lens = v4_cache(rng, 4, 8), torch.tensor([[2, 0], [3, 1]]).int(), torch.tensor([13, 9]).int()
    out, want = torch.zeros(2, 20, 512).bfloat16(), torch.zeros(2, 20, 512).bfloat16()
    layers.dequantize_and_gather_k_cache(
        out, cache, seq_lens=seq_lens, gather_lens=None, block_table=table, block_size=8, offset=3
    )
    cupy_mla.dequantize_and_gather_k_cache(want, cache, seq_lens, None, table, 8, 3)
    assert want.any()
    assert torch.equal(out, want)


def test_slots(layers, rng) -> None:
    """The requests of a batch's other tokens stand behind those that are asked for."""
    chosen, table = integers(rng, 0, 16, (T, TOPK)), integers(rng, 0, 9, (2, 2))
    request, valid = torch.tensor([0, 0, 1, 1, 1, 0, 7]).int(), torch.tensor([True, True, True, False, True])
    slots, lens = layers.compute_global_topk_indices_and_lens(chosen, request, table, 8, valid)
    p = chosen.long()
    want = table.long()[request[:T].long()[:, None], p // 8] * 8 + p % 8
    assert torch.equal(slots.long(), want)
    assert lens.tolist() == [TOPK, TOPK, TOPK, 0, TOPK]


@pytest.mark.parametrize("ratio", [0, 1, 4])
@pytest.mark.parametrize("given", [False, True], ids=["returned", "in place"])
def test_lists(layers, rng, ratio: int, given: bool) -> None:
    """Of layers with compressed rows and without; the first token of the batch counts as 0."""
    topk = TOPK if ratio == 4 else 0
    chosen, starts = integers(rng, 0, 3, (T, TOPK)), torch.tensor([7, 9, 12]).int()
    seq_lens, gather_lens = torch.tensor([20, 15]).int(), torch.tensor([9, 10]).int()
    out = torch.full((T, 128), 99).int(), torch.full((T,), 99).int()
    rows, lens = layers.combine_topk_swa_indices(
        chosen, starts, seq_lens, gather_lens, WINDOW, ratio, topk, 30, 5,
        **({"out": out, "left_visible": None, "right_visible": None, "max_image_tokens": 0} if given else {}),
    )  # fmt: skip
    positions = [18, 19, 12, 13, 14]
    for t, (p, r) in enumerate(zip(positions, [0, 0, 1, 1, 1], strict=True)):
        own = (chosen[t, : min((p + 1) // ratio, topk)] + 30 * r).tolist() if topk else []
        first = int(seq_lens[r] - gather_lens[r])
        own += [30 * r + 5 + j - first for j in range(p - WINDOW + 1, p + 1)]
        assert rows[t].tolist() == own + [-1] * (128 - len(own))
        assert int(lens[t]) == len(own)
    if given:
        assert rows.data_ptr() == out[0].data_ptr()


def test_lists_of_a_model_with_images(layers, rng) -> None:
    """In vLLM's calling convention: lists as wide as the longest image makes them, with none in the batch or some."""
    chosen, starts = integers(rng, 0, 3, (T, TOPK)), torch.tensor([7, 9, 12]).int()
    seq_lens, gather_lens = torch.tensor([20, 15]).int(), torch.tensor([9, 10]).int()
    arguments = (chosen, starts, seq_lens, gather_lens, WINDOW, 4, TOPK, 200, 5)
    visible = torch.tensor([0, 3, 0, 1, 2]).int(), torch.tensor([1, 0, 2, 1, 0]).int()
    for left, right in (visible, (None, None)):
        images = {"left_visible": left, "right_visible": right, "max_image_tokens": 130}
        out = torch.full((T, 256), 99).int(), torch.full((T,), 99).int()
        rows, lens = layers.combine_topk_swa_indices(*arguments, out=out, **images)
        want, want_lens = oracle_v4.combined_indices(
            *(a.numpy() for a in arguments[:4]), *arguments[4:],
            *(v if v is None else v.numpy() for v in (left, right)), 130,
        )  # fmt: skip
        assert rows.data_ptr() == out[0].data_ptr()
        np.testing.assert_array_equal(rows.numpy(), want)
        np.testing.assert_array_equal(lens.numpy(), want_lens)
