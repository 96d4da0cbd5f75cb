"""DeepSeek-V4 and V4.1 in the SGLang plug-in, on stand-ins, on the CPU: what is replaced, and attention against
float64."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import SparseMLAConfig  # noqa: E402
from cupy_mla.integrations import warm  # noqa: E402
from cupy_mla.integrations.sglang import deepseek_v4  # noqa: E402
from cupy_mla.selfcheck import warmup as warmup_module  # noqa: E402
from tests import oracle  # noqa: E402
from tests.backends.test_sparse_mla import assert_result  # noqa: E402
from tests.cases import latent, queries, sinks  # noqa: E402
from tests.integrations.test_vllm import as_torch  # noqa: E402
from tests.selfcheck.test_warmup import Layer  # noqa: E402

SCALE = 512**-0.5
# SGLang's names of layouts, and the oracle's of the cache and of an extra cache of FP4.
FORMATS = {
    "V4": (oracle.V4, None), "V41": (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT), "V41_NEW": (oracle.V41, oracle.V41_FP4),
}  # fmt: skip


def made(
    layout: str, ratios: tuple[int, ...] = (4, 128), heads: int = 64, device: str = "cpu", compressed: str = "",
    **kind: bool,
) -> Any:  # fmt: skip
    """A backend, after our hook.

    Args:
        layout: SGLang's name of it.
        ratios: of compressed caches.
        compressed: SGLang's name of their layout, default the same.
        kind: class attributes of the backend.
    """
    module = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    pools = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
    layouts = importlib.import_module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout
    runner = SimpleNamespace(
        token_to_kv_pool=pools.DeepSeekV4TokenToKVPool(
            layouts[layout], dict.fromkeys(ratios, layouts[compressed or layout])
        ),
        device=device, ratios=ratios, is_dsv41=max(ratios) < 4,
        model_config=SimpleNamespace(num_attention_heads=heads),
    )  # fmt: skip
    backend = type("Backend", (module.DeepseekV4AttnBackend,), kind)(runner, skip_prefill=True)
    assert deepseek_v4.replace(None, backend, runner, skip_prefill=True) is None
    return backend


def cache_of(rng: np.random.Generator, fmt: oracle.Format, pages: int, size: int) -> tuple[torch.Tensor, np.ndarray]:
    """Random rows, as SGLang's backend passes them: a view of pages whose bytes are padded, and without padding."""
    data = fmt.token_bytes * size
    pool = np.full((pages, data + -data % 576), 0xFF, np.uint8)
    for page in pool:
        for t, row in enumerate(latent(rng, size, 512)):
            oracle.write_token(fmt, page[:data], size, t, row)
    view = torch.from_numpy(pool)[:, :data].view(pages, size, 1, fmt.token_bytes)
    return view, pool[:, :data].reshape(pages, size, fmt.token_bytes)


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ("V4", None), ("V4", "same"), ("V41", None), ("V41", "same"), ("V41", "FP4"), ("V41_NEW", None),
        ("V41_NEW", "same"), ("V41_NEW", "FP4"),
    ],
)  # fmt: skip
def test_decode(sglang, rng, layout: str, extra: str | None) -> None:
    """With the keywords of SGLang's backend."""
    fmt, fp4 = FORMATS[layout]
    tokens, heads = 3, 5
    q, sink = queries(rng, tokens, heads, 512), sinks(rng, heads)
    caches = {"": (fmt, *cache_of(rng, fmt, 3, 32))}
    if extra is not None:
        of_extra = fmt if extra == "same" else fp4
        caches["extra_"] = (of_extra, *cache_of(rng, of_extra, 5, 8))
    lists, lens = {}, {}
    for name, (_, _, rows) in caches.items():
        slots = np.full((tokens, 64), -1, np.int32)
        lens[name] = np.array([19, 1, 30], np.int32)
        for t, n in enumerate(lens[name]):
            slots[t, :n] = rng.permutation(rows.shape[0] * rows.shape[1])[:n]
        slots[0, 20:40] = 0  # behind the list's length
        lists[name] = slots
    given: dict[str, Any] = {
        "k_cache": caches[""][1], "indices": as_torch(lists[""])[:, None], "topk_length": as_torch(lens[""]),
        "attn_sink": as_torch(sink),
    }  # fmt: skip
    given |= dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
    if extra is not None:
        given |= {
            "extra_k_cache": caches["extra_"][1], "extra_indices_in_kvcache": as_torch(lists["extra_"])[:, None],
            "extra_topk_length": as_torch(lens["extra_"]),
        }  # fmt: skip
    out = made(layout)._flash_mla_with_kvcache(
        q=as_torch(q)[:, None], head_dim_v=512, block_table=None, cache_seqlens=None, tile_scheduler_metadata=object(),
        softmax_scale=SCALE, is_fp8_kvcache=True, **given,
    )[0]  # fmt: skip
    assert out.shape == (tokens, 1, heads, 512)
    for t in range(tokens):
        rows = [oracle.named_rows(f, bytes_, lists[n][t, : lens[n][t]]) for n, (f, _, bytes_) in caches.items()]
        want, _, _ = oracle.attend(q[t].astype(np.float64), np.concatenate(rows), SCALE, sink)
        assert_result(out[t, 0].float().numpy(), want)


def test_other_backends_keep_what_they_have(sglang, asked, caplog) -> None:
    with caplog.at_level(logging.INFO):
        for kind in ({"trtllm_attn": True}, {"mega_attn": True}):
            assert made("UNIFORM_FP8", device="cuda:0", **kind)._flash_mla_with_kvcache == "FlashMLA's"
        assert caplog.records == []
        assert made("UNIFORM_FP8", device="cuda:0")._flash_mla_with_kvcache == "FlashMLA's"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "UNIFORM_FP8" in record.getMessage()
    assert asked == []


def test_compute_capability_12_keeps_what_it_has(sglang, asked, caplog) -> None:
    """There SGLang calls other kernels than FlashMLA's."""
    importlib.import_module("sglang.srt.runtime_context").platform.is_sm120 = True
    with caplog.at_level(logging.INFO):
        assert made("V4", device="cuda:0")._flash_mla_with_kvcache == "FlashMLA's"
    assert caplog.records == asked == []


def test_a_backend_without_flash_mla(sglang, asked) -> None:
    """As on other devices than CUDA's."""
    backend = SimpleNamespace(trtllm_attn=False, mega_attn=False)
    deepseek_v4.replace(None, backend)
    assert vars(backend) == {"trtllm_attn": False, "mega_attn": False}


@pytest.mark.parametrize(("heads", "ranks", "padded"), [(64, 1, 64), (64, 2, 64), (128, 4, 64), (128, 1, 128)])
def test_backends_are_warmed_up(sglang, asked, heads: int, ranks: int, padded: int) -> None:
    """Once for all kinds of layers, and for several draft steps."""
    importlib.import_module("sglang.srt.runtime_context").parallel.attn_tp_size = ranks
    made("V4", device="cpu")
    assert asked == []
    for _ in range(2):
        made("V4", heads=heads, device="cuda:1")
    ((kinds, device),) = asked
    assert device == 1
    assert [config.compress_ratio for config in kinds] == [1, 4, 128]
    for config in kinds:
        assert (config.num_heads, config.topk, config.window, config.cache_layout) == (padded, 512, 128, "v4_fp8")
        assert (config.max_model_len, config.model) == (9000, "v4")


def test_v41_is_warmed_up(sglang, asked) -> None:
    """Over any rows, as V4 is."""
    made("V41_NEW", ratios=(2,), device="cuda:0", compressed="V41_FP4_NEW")
    made("V41", ratios=(1,), device="cuda:0", compressed="V41_FP4")
    made("V41", ratios=(1,), device="cuda:0")
    made("V4", ratios=(1,), device="cuda:0")
    made("V41", ratios=(128,), device="cuda:0")
    found = [(c.model, c.compress_ratio, c.cache_layout, c.compressed_layout) for kinds, _ in asked for c in kinds]
    assert found == [
        ("v41", 0, "v41_fp8", None), ("v41", 2, "v41_fp8", "v41_fp4"), ("v41", 0, "v41_fp8_split", None),
        ("v41", 1, "v41_fp8_split", "v41_fp4_split"), ("v41", 0, "v41_fp8_split", None),
        ("v41", 1, "v41_fp8_split", None), ("v41", 0, "v4_fp8", None), ("v41", 1, "v4_fp8", None),
        ("v4", 1, "v41_fp8_split", None), ("v4", 128, "v41_fp8_split", None),
    ]  # fmt: skip


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    ("layout", "compressed", "ratios"),
    [
        ("V4", "V4", (4, 128)), ("V4", "V4", (1, 2)), ("V41", "V41", (1, 2)), ("V41", "V41_FP4", (1, 2)),
        ("V41_NEW", "V41_FP4_NEW", (1,)), ("V41", "V41", (4, 128)),
    ],
)  # fmt: skip
def test_no_decode_needs_another_kernel(
    sglang, gpu, monkeypatch, rng, layout: str, compressed: str, ratios: tuple[int, ...]
) -> None:
    """Of any number of tokens, on an H200 that is none."""
    monkeypatch.setattr(warm, "_ready", set())
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, SparseMLAConfig(64)).cupy)
    backend = made(layout, ratios, device="cuda:0", compressed=compressed)
    ready = set(gpu.kernels.values())
    assert ready
    width = FORMATS[layout][0].token_bytes
    window = torch.zeros(3, 256, 1, width, dtype=torch.uint8)
    nothing = torch.full((1, 1, 1), -1, dtype=torch.int32)
    # Of compressed caches.
    lists = [(256 // ratio, 128 if ratio == 128 else 512) for ratio in ratios]
    bytes_ = 288 if "FP4" in compressed else width
    for tokens in (1, 2, 133, 300, 2048, 2500, *rng.integers(1, 2500, 6).tolist()):
        q = torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16).expand(tokens, 1, 64, 512).contiguous()
        lens, sink = torch.zeros(tokens, dtype=torch.int32), torch.zeros(64)
        for rows, entries in [(0, 0), *lists]:
            gpu.used = 0
            extra: dict[str, Any] = {}
            if rows:
                extra = {
                    "extra_k_cache": torch.zeros(3, rows, 1, bytes_, dtype=torch.uint8), "extra_topk_length": lens,
                    "extra_indices_in_kvcache": nothing.expand(tokens, 1, entries).contiguous(),
                }  # fmt: skip
            backend._flash_mla_with_kvcache(
                q=q, k_cache=window, indices=nothing.expand(tokens, 1, 128).contiguous(), softmax_scale=SCALE,
                topk_length=lens, attn_sink=sink, **extra,
            )  # fmt: skip
    assert set(gpu.kernels.values()) == ready
