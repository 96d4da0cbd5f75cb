"""The vLLM plug-in on stand-ins of vLLM's classes, on the CPU: what it registers, and when it registers nothing.

What it attends, caches and chooses: `test_vllm_sparse`, `test_vllm_indexer`, `test_vllm_dense`, `test_vllm_v4`,
`test_vllm_v41`.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import vllm as plugin  # noqa: E402
from cupy_mla.metadata.batch import BatchMetadata  # noqa: E402
from tests.integrations.stub_vllm import loaded  # noqa: E402

ROOT = Path(__file__).parents[2]
HOSTILE = 1 << 20  # a token of nobody


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
        return torch.from_numpy(array.view(f"u{array.itemsize}").copy()).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.array(array))


def vllm_batch(batch: BatchMetadata, tokens: int) -> SimpleNamespace:
    """vLLM's description of a batch, which may be padded to more tokens."""
    starts = as_torch(batch.query_start_loc)
    return loaded("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=as_torch(batch.seq_lens),
        num_reqs=len(batch.seq_lens), num_actual_tokens=tokens, max_query_len=int(batch.query_lens.max()),
        max_seq_len=int(batch.seq_lens.max()), block_table_tensor=as_torch(batch.block_table),
        slot_mapping=as_torch(batch.slot_mapping),
    )  # fmt: skip


def valid_first(positions: np.ndarray) -> np.ndarray:
    """Lists as the indexer writes them: -1 behind the positions."""
    return np.take_along_axis(positions, np.argsort(positions < 0, axis=1, kind="stable"), axis=1)


def float32_backend(monkeypatch) -> type:
    """The benchmark's, on this test's modules."""
    path = ROOT / "benchmarks" / "vllm_float32.py"
    spec = importlib.util.spec_from_file_location("vllm_float32", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm_float32", module)
    spec.loader.exec_module(module)
    return module.Float32Backend


@pytest.mark.parametrize(
    ("mode", "places", "path"),
    [*((mode, ["CUSTOM", "CUPY_MLA"], "custom.CupyMLABackend") for mode in (None, "", "custom")),
     ("override", ["FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"], "sparse_mla.CupyMLASparseBackend")],
)  # fmt: skip
def test_registers(vllm, monkeypatch, caplog, mode: str | None, places: list[str], path: str) -> None:
    """By a name of its own, too; on Hopper vLLM itself would choose FA3 for bf16 caches. The class that a name stands
    for is the backend; asking for it is what imports the adapter."""
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    if mode is not None:
        monkeypatch.setenv("CUPY_MLA_VLLM", mode)
    plugin.register()
    plugin.register()
    registered = loaded("vllm.v1.attention.backends.registry").registered
    assert registered == {place: f"cupy_mla.integrations.vllm.{path}" for place in places}
    assert f"{plugin.__name__}.sparse_mla" not in sys.modules
    assert "vllm.v1.attention.backends.mla.flashmla_sparse" not in sys.modules
    assert caplog.records == []


V4 = {"deepseek_v4": "DeepseekV4ForCausalLM", "deepseek_v41": "DeepseekV41ForCausalLM"}  # by module
OURS = {model: f"{plugin.__name__}.{module}:{model}" for module, model in V4.items()}


@pytest.mark.parametrize("mode", plugin.MODES)
def test_deepseek_v4_is_overridden_only_when_asked(vllm, monkeypatch, mode: str) -> None:
    """Its attention has no backend to select. The models' modules are named, not imported. V4.1 likewise."""
    monkeypatch.setenv("CUPY_MLA_VLLM", mode)
    plugin.register()
    models = loaded("vllm.model_executor.models.registry").ModelRegistry.models
    assert models == (OURS if mode == "override" else {})
    assert not {f"vllm.models.{module}" for module in V4} & sys.modules.keys()


@pytest.mark.parametrize("module", V4)
def test_another_deepseek_v4_is_left_alone(package, tmp_path, vllm, monkeypatch, caplog, module: str) -> None:
    """The backend is registered all the same, and the other of both models. V4.1 likewise."""
    path = another(package, tmp_path, monkeypatch) / f"models/{module}/nvidia/model.py"
    path.write_text(path.read_text().replace("_select_dsv4_attn_cls", "select"))
    monkeypatch.setenv("CUPY_MLA_VLLM", "override")
    plugin.register()
    (record,) = caplog.records
    name = {"deepseek_v4": "DeepSeek-V4", "deepseek_v41": "DeepSeek-V4.1"}[module]
    missing = f"models.{module}.nvidia.model: _select_dsv4_attn_cls(vllm_config)"
    assert record.getMessage() == f"cupy_mla leaves this vLLM's {name} alone. Missing: {missing}"
    assert list(loaded("vllm.v1.attention.backends.registry").registered) == list(plugin.PLACES["override"])
    models = loaded("vllm.model_executor.models.registry").ModelRegistry.models
    assert models == {model: path for model, path in OURS.items() if model != V4[module]}


def test_off_does_nothing(vllm, monkeypatch) -> None:
    monkeypatch.setenv("CUPY_MLA_VLLM", "off")
    plugin.register()
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)


def test_an_unknown_mode_is_an_error(vllm, monkeypatch) -> None:
    monkeypatch.setenv("CUPY_MLA_VLLM", "yes")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_VLLM must be one of .*got 'yes'"):
        plugin.register()


def test_the_entry_point_is_declared() -> None:
    """In setup.cfg; what is installed here may be older."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, value = setup["options.entry_points"]["vllm.general_plugins"].strip().partition(" = ")
    assert EntryPoint(name, value, "vllm.general_plugins").load() is plugin.register


BACKENDS = "v1/attention/backends/mla"
COMMON = "model_executor/layers/attention/sparse_mla_attention"
FAULTS = {
    "a renamed method": (
        COMMON, "def _convert_logical_to_physical_topk(", "def convert_topk(",
        "SparseMLACommonImpl._convert_logical_to_physical_topk(self, logical_topk_indices,",
    ),
    "a new parameter": (
        f"{BACKENDS}/sparse_utils", "flat_kv_row_view(kv_cache,", "flat_kv_row_view(layer, kv_cache,",
        "flat_kv_row_view(kv_cache, block_size)",
    ),
    "a lost field": (
        f"{BACKENDS}/indexer", "num_prefill_tokens: int", "prefill_tokens: int",
        "DeepseekV32IndexerMetadata(seq_lens, max_seq_len,",
    ),
    "a new field": (
        f"{BACKENDS}/indexer", "num_prefill_tokens: int", "num_prefill_tokens: int; positions: Any",
        "DeepseekV32IndexerMetadata(seq_lens, max_seq_len,",
    ),
    "a lost attribute": (COMMON, "self.dcp_world_size, self.use_pcp =", "self.dcp_world_size, _ =", "Builder.use_pcp"),
    "a lost field of a step": (COMMON, "cp_kv_cache_interleave_size = ", "", "Metadata.cp_kv_cache_interleave_size"),
    "a renamed keyword": (
        "v1/attention/backend", "use_dcp=False", "decode_ranks=False", "validate_configuration(cls, head_size, dtype,",
    ),
    "a renamed hook": (
        "model_executor/models/deepseek_v2", "get_attn_backend", "backend_of", "IndexerCache.get_attn_backend(self)",
    ),
    "a lost setting": ("envs", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "LOGITS", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"),
    "a lost name": (f"{BACKENDS}/indexer", "def has_deep_gemm", "def has_gemm", "indexer: has_deep_gemm"),
    "a lost module": (f"{BACKENDS}/sparse_utils", None, None, "module v1.attention.backends.mla.sparse_utils"),
}  # fmt: skip


def another(package: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stand-ins, to be changed, which is `vllm` from now on."""
    monkeypatch.syspath_prepend(str(folder))
    return Path(shutil.copytree(package, folder / "vllm"))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", plugin.PLACES)
def test_another_vllm_is_left_alone(package, tmp_path, vllm, monkeypatch, caplog, mode: str, fault: str) -> None:
    """DeepSeek-V4, too, with one warning that names the versions served and what is missing."""
    module, old, new, missing = FAULTS[fault]
    path = another(package, tmp_path, monkeypatch) / f"{module}.py"
    if old is None:
        path.unlink()
    else:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    monkeypatch.setenv("CUPY_MLA_VLLM", mode)
    with caplog.at_level(logging.INFO):
        plugin.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "cupy_mla serves vLLM 0.32 and 0.33 and leaves this one alone, nothing is registered."
    )
    assert missing in record.getMessage()
    assert record.getMessage().count(";") == 0, "one thing is missing"
    assert not {"vllm.v1.attention.backends.registry", "vllm.model_executor.models.registry"} & sys.modules.keys()


def test_a_vllm_that_lacks_much_is_left_alone(package, tmp_path, vllm, monkeypatch, caplog) -> None:
    """The warning stays short."""
    other = another(package, tmp_path, monkeypatch)
    for name in (COMMON, f"{BACKENDS}/indexer", f"{BACKENDS}/flashmla_sparse", "forward_context", "config/parallel"):
        other.joinpath(f"{name}.py").unlink()
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().count("module ") == 3
    assert record.getMessage().endswith("; and 2 more")


def test_the_stand_ins_are_what_the_plug_in_needs(package) -> None:
    assert plugin.missing(package, plugin.SPARSE_MLA) == []
    assert plugin.missing(package, plugin.DENSE_MLA) == []
    assert plugin.missing(package, plugin.DEEPSEEK_V4) == []
    assert plugin.missing(package, plugin.DEEPSEEK_V41) == []
