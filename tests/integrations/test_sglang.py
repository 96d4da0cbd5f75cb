"""The SGLang plug-in on stand-ins, on the CPU: what it hooks, and attention against float64."""

from __future__ import annotations

import logging
import sys
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import SparseMLAConfig  # noqa: E402
from cupy_mla.integrations import sglang as plugin  # noqa: E402
from cupy_mla.integrations import warm  # noqa: E402
from cupy_mla.integrations.sglang import attention, deepseek_v4, indexer  # noqa: E402
from cupy_mla.selfcheck import warmup as warmup_module  # noqa: E402
from tests import oracle  # noqa: E402
from tests.backends.test_sparse_mla import BLOCK_SIZE, SCALE, Step, assert_result, make_step  # noqa: E402
from tests.cases import queries  # noqa: E402
from tests.integrations.sglang_calls import Choosing  # noqa: E402
from tests.integrations.test_vllm import as_torch  # noqa: E402
from tests.selfcheck.test_warmup import Layer  # noqa: E402


def hooks() -> dict:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry.hooks


OF_V32 = {
    "dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_sparse": (attention.forward_flashmla_sparse, "REPLACE"),
    "dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_kv": (attention.forward_flashmla_kv, "AROUND"),
    "dsa_backend.DeepseekSparseAttnBackend.__init__": (attention.warm_up, "AFTER"),
    "dsa.dsa_indexer.Indexer._get_topk_paged": (indexer.get_topk_paged, "AROUND"),
    "dsa.dsa_indexer.Indexer._get_topk_ragged": (indexer.get_topk_ragged, "AROUND"),
}


def test_override(sglang, monkeypatch) -> None:
    monkeypatch.setenv("CUPY_MLA_SGLANG", "override")
    plugin.register()
    of_v4 = {"deepseek_v4_backend.DeepseekV4AttnBackend.__init__": (deepseek_v4.replace, "AFTER")}
    assert hooks() == OF_V32 | of_v4
    assert {name for name in sys.modules if name.startswith("sglang.srt.layers")} == set()


@pytest.mark.parametrize("mode", [None, "", "off"])
def test_nothing_happens_unless_asked(sglang, monkeypatch, mode: str | None) -> None:
    monkeypatch.delenv("CUPY_MLA_SGLANG", raising=False)
    if mode is not None:
        monkeypatch.setenv("CUPY_MLA_SGLANG", mode)
    plugin.register()
    assert not any(name.partition(".")[0] == "sglang" for name in sys.modules)


def test_an_unknown_mode_is_an_error(sglang, monkeypatch) -> None:
    monkeypatch.setenv("CUPY_MLA_SGLANG", "yes")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_SGLANG must be one of .*got 'yes'"):
        plugin.register()


@pytest.mark.parametrize(
    ("file", "old", "new", "lacking"),
    [
        ("../radix_attention", "tp_q_head_num", "heads", "RadixAttention.tp_q_head_num"),
        ("../../model_executor/forward_batch_info", "is_target_verify", "verifies", "ForwardMode.is_target_verify"),
        ("dsa_backend", "def _forward_flashmla_kv(", "def _forward_kv(", "Backend._forward_flashmla_kv("),
        ("dsa_backend", "kv_cache, v_head_dim, page", "kv_cache, page", "_forward_flashmla_sparse(self, q_all,"),
        ("dsa_backend", "self.kv_cache_dim", "self.dim", "DeepseekSparseAttnBackend.kv_cache_dim"),
        ("dsa_backend", "self.dsa_index_topk", "self.topk", "DeepseekSparseAttnBackend.dsa_index_topk"),
        ("dsa/dsa_indexer", "_get_topk_paged(self, forward_batch", "_get_topk_paged(self, batch", "_get_topk_paged"),
        ("dsa/dsa_indexer", "n_heads", "heads", "Indexer.n_heads"),
        ("dsa/dsa_indexer_metadata", "def get_page_table_64", "def get_page_table", "get_page_table_64(self)"),
    ],
)
def test_another_sglang_is_left_alone(sglang, monkeypatch, caplog, file: str, old: str, new: str, lacking: str) -> None:
    path = sglang / f"srt/layers/attention/{file}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    monkeypatch.setenv("CUPY_MLA_SGLANG", "override")
    with caplog.at_level(logging.INFO):
        plugin.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert lacking in record.getMessage()
    assert record.getMessage().count(";") == 0, "one thing is missing"
    assert hooks() == {}


def test_another_deepseek_v4_is_left_alone(sglang, monkeypatch, caplog) -> None:
    path = sglang / "srt/layers/attention/deepseek_v4_backend.py"
    path.write_text(path.read_text().replace("self._flash_mla_with_kvcache", "self.decode"))
    monkeypatch.setenv("CUPY_MLA_SGLANG", "override")
    with caplog.at_level(logging.INFO):
        plugin.register()
    (record,) = caplog.records
    assert "leaves this SGLang's DeepSeek-V4 alone. Missing: " in record.getMessage()
    assert record.getMessage().endswith("DeepseekV4AttnBackend._flash_mla_with_kvcache")
    assert hooks() == OF_V32


def test_the_entry_point_is_declared() -> None:
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    name, _, value = setup["options.entry_points"]["sglang.srt.plugins"].strip().partition(" = ")
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is plugin.register


def made(rope: int, kv_cache_dim: int, *impls: str, device: str = "cuda:1") -> object:
    """A backend, after our hook."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    runner = SimpleNamespace(device=device, rope=rope, kv_cache_dim=kv_cache_dim, impls=impls)
    backend = DeepseekSparseAttnBackend(runner, skip_prefill=True)
    assert attention.warm_up(None, backend, runner, skip_prefill=True) is None
    return backend


@pytest.mark.parametrize(
    ("rope", "width", "d_qk", "layout"),
    [
        (64, 576, 576, "bf16"),
        (64, 656, 576, "v32_fp8"),
        (0, 512, 512, "bf16"),
        (0, 528, 512, "v32_nope_fp8"),
        (64, 528, 576, "bf16"),
    ],
)
def test_backends_are_warmed_up(sglang, asked, caplog, rope: int, width: int, d_qk: int, layout: str) -> None:
    """Once for all of a kind, as those of several draft steps, where an option selects what is replaced."""
    made(rope, width, "fa3", "tilelang")
    made(rope, width, "flashmla_sparse", "flashmla_kv", device="cpu")
    assert asked == []
    with caplog.at_level(logging.INFO):
        for number, impls in enumerate((("fa3", "flashmla_kv"), ("flashmla_sparse", "fa3"), ("flashmla_auto", "fa3"))):
            for _ in range(2):
                made(rope, width, *impls, device=f"cuda:{number}")
    assert [device for _, device in asked] == [0, 1, 2]
    (config,) = {config for (config,), _ in asked}
    assert isinstance(config, SparseMLAConfig)
    assert (config.num_heads, config.topk, config.block_size) == (64, 2048, 64)
    assert (config.d_qk, config.cache_layout, config.max_model_len, config.is_v4) == (d_qk, layout, 9000, False)
    assert len(caplog.records) == 6


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("cache", ["bf16", "v32_fp8", "v32_nope_fp8"])
def test_no_call_needs_another_kernel(sglang, gpu, monkeypatch, rng, cache: str) -> None:
    """Of attention and the indexer, in decodes and prefills of any number of tokens, on an H200 that is none."""
    monkeypatch.setattr(warm, "_ready", set())
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, SparseMLAConfig(64)).cupy)
    width, d = {"bf16": (576, 576), "v32_fp8": (656, 576), "v32_nope_fp8": (528, 512)}[cache]
    backend = made(d - 512, width, "flashmla_sparse", "flashmla_kv", device="cuda:0")
    ready = set(gpu.kernels.values())
    assert ready
    pool = torch.zeros(4 * 64, 1, width, dtype=torch.bfloat16 if width == 576 else torch.uint8)
    layer = SimpleNamespace(tp_q_head_num=64, head_dim=d)
    keys = torch.zeros(4, 64, 132, dtype=torch.uint8)
    choosing = Choosing(2048, keys, n_heads=64)
    for tokens in (1, 2, 133, 300, 2048, 2500, *rng.integers(1, 2500, 10).tolist()):
        gpu.used = 0
        q = torch.zeros(1, 1, d, dtype=torch.bfloat16).expand(tokens, 64, d).contiguous()
        table = torch.full((1, 2048), -1, dtype=torch.int32).expand(tokens, 2048)
        attention.forward_flashmla_kv(original, backend, q.flatten(1), pool, 512, SCALE, layer, None, table)
        rows = torch.zeros(500, 1, d, dtype=torch.bfloat16)
        for length in (None, torch.zeros(tokens, dtype=torch.int32)):
            gpu.used = 0
            attention.forward_flashmla_sparse(backend, q, rows, 512, table, SCALE, length)
        q8 = torch.zeros(1, 64, 128).to(torch.float8_e4m3fn).expand(tokens, 64, 128).contiguous()
        weights, lens = torch.zeros(tokens, 64, 1), torch.ones(tokens, dtype=torch.int32)
        blocks = torch.zeros(tokens, 9000 // 64, dtype=torch.int32)
        for fused in (True, False):
            gpu.used = 0
            choosing.paged(q8, weights, lens.tolist(), lens, blocks, fused=fused)
        for form in ("slots", "gathered", "positions"):
            gpu.used = 0
            choosing.ragged(q8, weights, [tokens], [4000], blocks[:1], form)
    assert set(gpu.kernels.values()) == ready


def slots(step: Step) -> torch.Tensor:
    """SGLang's page table of pages of one token: the chosen tokens' slots, -1 behind them."""
    batch = step.batch
    requests = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
    lists = np.full(step.topk_indices.shape, -1, np.int32)
    for t, row in enumerate(step.topk_indices):
        chosen = row[row >= 0]
        lists[t, : len(chosen)] = (
            batch.block_table[requests[t], chosen // BLOCK_SIZE] * BLOCK_SIZE + chosen % BLOCK_SIZE
        )
    return torch.from_numpy(lists)


@pytest.mark.parametrize("lengths", ["none", "of each token", "of another batch"])
def test_sparse(rng, lengths: str) -> None:
    """Over bf16 rows; lengths of a batch that was padded are not those of its tokens."""
    step = make_step(rng, 12, [1, 6, 3])
    table = slots(step)
    counts = (table >= 0).sum(1).int()
    length = {"none": None, "of each token": counts, "of another batch": counts[:-1]}[lengths]
    rows = as_torch(step.caches["bf16"]).view(-1, 1, 576)
    got = attention.forward_flashmla_sparse(
        object(), q_all=as_torch(step.q), kv_cache=rows, v_head_dim=512, page_table_1=table, sm_scale=SCALE,
        topk_length=length,
    )  # fmt: skip
    assert_result(got.float().numpy(), step.want)


def test_sparse_with_a_sink(rng) -> None:
    step = make_step(rng, 12, [4])
    sink = torch.randn(12)
    got = attention.forward_flashmla_sparse(
        object(), as_torch(step.q), as_torch(step.caches["bf16"]), 512, slots(step), SCALE, None, sink
    )
    assert_result(got.float().numpy(), step.want / (1 + np.exp(sink.numpy() - step.want_lse))[..., None])


@pytest.mark.parametrize("cache", ["bf16", "v32_fp8"])
def test_paged(rng, monkeypatch, cache: str) -> None:
    """Over the cache as it is: a bf16 one is not quantized first, and blocks stay blocks."""
    step = make_step(rng, 12, [1, 1, 1, 2])
    pool = as_torch(step.caches[cache])
    backend = SimpleNamespace(physical_page_size=BLOCK_SIZE, kv_cache_dim=pool.shape[-1], qk_rope_head_dim=64)
    decode, pages = attention.sparse_decode, []
    monkeypatch.setattr(
        attention, "sparse_decode", lambda q, k, *a, **m: (pages.append(k.shape), decode(q, k, *a, **m))[1]
    )
    got = attention.forward_flashmla_kv(
        original, backend, q_all=as_torch(step.q).flatten(1), kv_cache=pool.view(-1, 1, pool.shape[-1]), v_head_dim=512,
        sm_scale=SCALE, layer=SimpleNamespace(tp_q_head_num=12, head_dim=576), metadata=None, page_table_1=slots(step),
    )  # fmt: skip
    assert got.shape == (5, 1, 12, 512)
    assert_result(got[:, 0].float().numpy(), step.want)
    assert pages[0][1] == BLOCK_SIZE


def original(*arguments: object) -> object:
    return arguments


def test_rows_that_no_kernel_reads_stay_with_sglang() -> None:
    """Of 528 bytes, in a model that has RoPE; of another width."""
    for width, rope in ((528, 64), (1024, 0)):
        backend = SimpleNamespace(physical_page_size=64, kv_cache_dim=width, qk_rope_head_dim=rope)
        arguments = (backend, "q", "cache", 512, SCALE, "layer", "metadata", "table")
        assert attention.forward_flashmla_kv(original, *arguments) == arguments


@pytest.mark.parametrize("as_bytes", [True, False], ids=["uint8", "float8"])
def test_paged_rows_of_528_bytes(rng, as_bytes: bool) -> None:
    """Of a model without RoPE."""
    pages = rng.integers(0, 256, (9, 64, 528), dtype=np.uint8)
    pages[..., :512][pages[..., :512] & 0x7F == 0x7F] = 0
    pages[..., 512:] = np.ldexp(np.float32(1), rng.integers(-8, -4, (9, 64, 4))).astype("<f4").view(np.uint8)
    table = rng.permutation(9 * 64)[:200].reshape(4, 50).astype(np.int32)
    table[1, 20:] = table[2] = -1
    q = queries(rng, 4, 6, 512)
    pool = torch.from_numpy(pages).view(-1, 1, 528)
    backend = SimpleNamespace(physical_page_size=64, kv_cache_dim=528, qk_rope_head_dim=0)
    got = attention.forward_flashmla_kv(
        original, backend, as_torch(q).flatten(1), pool if as_bytes else pool.view(torch.float8_e4m3fn), 512, SCALE,
        SimpleNamespace(tp_q_head_num=6, head_dim=512), None, torch.from_numpy(table),
    )  # fmt: skip
    for t, slots in enumerate(table):
        rows = oracle.named_rows(oracle.V32_NOPE, pages, slots[slots >= 0])
        want, _, _ = oracle.attend(q[t].astype(np.float64), rows, SCALE, None)
        assert_result(got[t, 0].float().numpy(), want)
