"""The SGLang plug-in on stand-ins, on the CPU: what it hooks, and attention against float64."""

from __future__ import annotations

import logging
import sys
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import SparseMLAConfig  # noqa: E402
from cupy_mla.integrations import sglang as plugin  # noqa: E402
from cupy_mla.integrations import warm  # noqa: E402
from cupy_mla.selfcheck import warmup as warmup_module  # noqa: E402
from tests.backends.test_sparse_mla import BLOCK_SIZE, SCALE, Step, assert_result, make_step  # noqa: E402
from tests.integrations.test_vllm import as_torch  # noqa: E402
from tests.selfcheck.test_warmup import Layer  # noqa: E402

HOOKS = """
    from enum import Enum

    class HookType(Enum):
        AFTER = "after"
        AROUND = "around"
        REPLACE = "replace"

    class HookRegistry:
        hooks = {}

        @classmethod
        def register(cls, target, hook, hook_type=None, *, source=None):
            cls.hooks[target.rpartition(".")[2]] = hook, hook_type.name
    """
BACKEND = """
    class DeepseekSparseAttnBackend:
        def __init__(self, model_runner, skip_prefill=False):
            self.device, self.num_q_heads, self.dsa_index_topk = model_runner.device, 64, 2048
            self.physical_page_size, self.max_context_len, self.qk_rope_head_dim = 64, 9000, model_runner.rope
            self.kv_cache_dim = model_runner.kv_cache_dim
            self.dsa_prefill_impl, self.dsa_decode_impl = model_runner.impls

        def _forward_flashmla_sparse(
            self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, attn_sink=None
        ):
            pass

        def _forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
            pass
    """


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    files = {"srt/plugins/hook_registry": HOOKS, "srt/layers/attention/dsa_backend": BACKEND}
    for name in ("", "srt/", "srt/plugins/", "srt/layers/", "srt/layers/attention/"):
        files[f"{name}__init__"] = ""
    for name, source in files.items():
        path = tmp_path / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "sglang"
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def hooks() -> dict:
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry.hooks


def test_override(sglang, monkeypatch) -> None:
    monkeypatch.setenv("CUPY_MLA_SGLANG", "override")
    plugin.register()
    assert hooks() == {
        "_forward_flashmla_sparse": (plugin.forward_flashmla_sparse, "REPLACE"),
        "_forward_flashmla_kv": (plugin.forward_flashmla_kv, "AROUND"),
        "__init__": (plugin.warm_up, "AFTER"),
    }
    assert "sglang.srt.layers.attention.dsa_backend" not in sys.modules


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
    ("old", "new", "lacking"),
    [
        ("def _forward_flashmla_kv(", "def _forward_kv(", "DeepseekSparseAttnBackend._forward_flashmla_kv("),
        ("q_all, kv_cache, v_head_dim, page", "q_all, kv_cache, page", "_forward_flashmla_sparse(self, q_all,"),
        ("self.kv_cache_dim", "self.dim", "DeepseekSparseAttnBackend.kv_cache_dim"),
        ("self.dsa_index_topk", "self.topk", "DeepseekSparseAttnBackend.dsa_index_topk"),
    ],
)
def test_another_sglang_is_left_alone(sglang, monkeypatch, caplog, old: str, new: str, lacking: str) -> None:
    path = sglang / "srt/layers/attention/dsa_backend.py"
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


def test_the_entry_point_is_declared() -> None:
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    name, _, value = setup["options.entry_points"]["sglang.srt.plugins"].strip().partition(" = ")
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is plugin.register


@pytest.fixture
def asked(monkeypatch) -> list[tuple[SparseMLAConfig, int]]:
    """What `cupy_mla.warmup` is called with, in place of the call, in a process where nothing is ready."""
    calls: list[tuple[SparseMLAConfig, int]] = []
    monkeypatch.setattr(warm, "_ready", set())
    monkeypatch.setattr(warm, "warmup", lambda config, device, progress: calls.append((config, device)) or [])
    return calls


def made(rope: int, kv_cache_dim: int, *impls: str, device: str = "cuda:1") -> object:
    """A backend, after our hook."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    runner = SimpleNamespace(device=device, rope=rope, kv_cache_dim=kv_cache_dim, impls=impls)
    backend = DeepseekSparseAttnBackend(runner, skip_prefill=True)
    assert plugin.warm_up(None, backend, runner, skip_prefill=True) is None
    return backend


@pytest.mark.parametrize(
    ("rope", "width", "d_qk", "layout"),
    [(64, 576, 576, "bf16"), (64, 656, 576, "v32_fp8"), (0, 512, 512, "bf16"), (0, 528, 512, "bf16")],
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
    (config,) = {config for config, _ in asked}
    assert (config.num_heads, config.topk, config.block_size) == (64, 2048, 64)
    assert (config.d_qk, config.cache_layout, config.max_model_len, config.is_v4) == (d_qk, layout, 9000, False)
    assert len(caplog.records) == 6


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("cache", ["bf16", "v32_fp8"])
def test_no_call_needs_another_kernel(sglang, gpu, monkeypatch, rng, cache: str) -> None:
    """Of decodes and prefills of any number of tokens, on an H200 that is none."""
    monkeypatch.setattr(warm, "_ready", set())
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, SparseMLAConfig(64)).cupy)
    width = {"bf16": 576, "v32_fp8": 656}[cache]
    backend = made(64, width, "flashmla_sparse", "flashmla_kv", device="cuda:0")
    ready = set(gpu.kernels.values())
    assert ready
    pool = torch.zeros(4 * 64, 1, width, dtype=torch.uint8 if width == 656 else torch.bfloat16)
    layer = SimpleNamespace(tp_q_head_num=64, head_dim=576)
    for tokens in (1, 2, 133, 300, 2048, 2500, *rng.integers(1, 2500, 10).tolist()):
        gpu.used = 0
        q = torch.zeros(1, 1, 576, dtype=torch.bfloat16).expand(tokens, 64, 576).contiguous()
        table = torch.full((1, 2048), -1, dtype=torch.int32).expand(tokens, 2048)
        plugin.forward_flashmla_kv(original, backend, q.flatten(1), pool, 512, SCALE, layer, None, table)
        rows = torch.zeros(500, 1, 576, dtype=torch.bfloat16)
        for length in (None, torch.zeros(tokens, dtype=torch.int32)):
            gpu.used = 0
            plugin.forward_flashmla_sparse(backend, q, rows, 512, table, SCALE, length)
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
    got = plugin.forward_flashmla_sparse(
        object(), q_all=as_torch(step.q), kv_cache=rows, v_head_dim=512, page_table_1=table, sm_scale=SCALE,
        topk_length=length,
    )  # fmt: skip
    assert_result(got.float().numpy(), step.want)


def test_sparse_with_a_sink(rng) -> None:
    step = make_step(rng, 12, [4])
    sink = torch.randn(12)
    got = plugin.forward_flashmla_sparse(
        object(), as_torch(step.q), as_torch(step.caches["bf16"]), 512, slots(step), SCALE, None, sink
    )
    assert_result(got.float().numpy(), step.want / (1 + np.exp(sink.numpy() - step.want_lse))[..., None])


@pytest.mark.parametrize("cache", ["bf16", "v32_fp8"])
def test_paged(rng, monkeypatch, cache: str) -> None:
    """Over the cache as it is: a bf16 one is not quantized first, and blocks stay blocks."""
    step = make_step(rng, 12, [1, 1, 1, 2])
    pool = as_torch(step.caches[cache])
    backend = SimpleNamespace(physical_page_size=BLOCK_SIZE, kv_cache_dim=pool.shape[-1])
    decode, pages = plugin.sparse_decode, []
    monkeypatch.setattr(
        plugin, "sparse_decode", lambda q, k, *a, **m: (pages.append(k.shape), decode(q, k, *a, **m))[1]
    )
    got = plugin.forward_flashmla_kv(
        original, backend, q_all=as_torch(step.q).flatten(1), kv_cache=pool.view(-1, 1, pool.shape[-1]), v_head_dim=512,
        sm_scale=SCALE, layer=SimpleNamespace(tp_q_head_num=12, head_dim=576), metadata=None, page_table_1=slots(step),
    )  # fmt: skip
    assert got.shape == (5, 1, 12, 512)
    assert_result(got[:, 0].float().numpy(), step.want)
    assert pages[0][1] == BLOCK_SIZE


def original(*arguments: object) -> object:
    return arguments


def test_rows_that_no_kernel_reads_stay_with_sglang() -> None:
    """An FP8 cache without RoPE has rows of 528 bytes."""
    backend = SimpleNamespace(physical_page_size=64, kv_cache_dim=528)
    arguments = (backend, "q", "cache", 512, SCALE, "layer", "metadata", "table")
    assert plugin.forward_flashmla_kv(original, *arguments) == arguments
