"""The vLLM plug-in on stand-ins of vLLM's classes, on the CPU: what it registers, attends, caches and chooses."""

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

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cupy_mla.integrations import vllm as plugin  # noqa: E402
from cupy_mla.metadata.batch import BatchMetadata  # noqa: E402
from tests import indexers, oracle_indexer  # noqa: E402
from tests.backends.test_sparse_mla import BLOCK_SIZE, SCALE, TOPK, assert_result, make_step  # noqa: E402
from tests.integrations.steps import ORDER, Caches  # noqa: E402
from tests.integrations.stub_vllm import loaded  # noqa: E402
from tests.kinds import E4M3  # noqa: E402

ROOT = Path(__file__).parents[2]
K, HEADS, MAX_LEN = 6, 8, 32
HOSTILE = 1 << 20  # a token of nobody


def layer_indexer(buffer: torch.Tensor, fp4: bool = False) -> SimpleNamespace:
    """vLLM's indexer of a layer, with its op and its cache of keys."""
    cache = SimpleNamespace(prefix="layer.indexer.k_cache", kv_cache=torch.zeros(0))
    stock = loaded("vllm.model_executor.layers.sparse_attn_indexer")
    op = stock.SparseAttnIndexer(cache, 128, "ue8m0", K, 128, MAX_LEN, 10 * MAX_LEN, buffer, use_fp4_cache=fp4)
    return loaded("vllm.model_executor.models.deepseek_v2").Indexer(op, cache, buffer)


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
        return torch.from_numpy(array.view(f"u{array.itemsize}").copy()).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.array(array))


# --- registration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "place", "path"),
    [*((mode, "CUSTOM", "custom.sparse_mla") for mode in (None, "", "custom")),
     ("override", "FLASHMLA_SPARSE", "sparse_mla.CupyMLASparseBackend")],
)  # fmt: skip
def test_registers(vllm, monkeypatch, mode: str | None, place: str, path: str) -> None:
    """The class that it names is the backend; asking for it is what imports the adapter."""
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    if mode is not None:
        monkeypatch.setenv("CUPY_MLA_VLLM", mode)
    plugin.register()
    plugin.register()
    registered = loaded("vllm.v1.attention.backends.registry").registered
    assert registered == {place: f"cupy_mla.integrations.vllm.{path}"}
    assert f"{plugin.__name__}.sparse_mla" not in sys.modules
    assert "vllm.v1.attention.backends.mla.flashmla_sparse" not in sys.modules


@pytest.mark.parametrize(
    ("mode", "places", "path"),
    [("custom", ["CUSTOM", "CUPY_MLA"], "custom.sparse_mla_common"),
     ("override", ["FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"], "sparse_mla_common.CupyMLASparseBackend")],
)  # fmt: skip
def test_registers_in_a_later_vllm(vllm_33, monkeypatch, caplog, mode: str, places: list[str], path: str) -> None:
    """By a name of its own, too; on Hopper vLLM itself would choose FA3 for bf16 caches."""
    monkeypatch.setenv("CUPY_MLA_VLLM", mode)
    plugin.register()
    plugin.register()
    registered = loaded("vllm.v1.attention.backends.registry").registered
    assert registered == {place: f"cupy_mla.integrations.vllm.{path}" for place in places}
    assert caplog.records == []


@pytest.mark.parametrize("mode", plugin.MODES)
def test_deepseek_v4_is_overridden_only_when_asked(vllm, monkeypatch, mode: str) -> None:
    """Its attention has no backend to select. The model's module is named, not imported."""
    monkeypatch.setenv("CUPY_MLA_VLLM", mode)
    plugin.register()
    models = loaded("vllm.model_executor.models.registry").ModelRegistry.models
    name = "DeepseekV4ForCausalLM"
    assert models == ({name: f"{plugin.__name__}.deepseek_v4:{name}"} if mode == "override" else {})
    assert "vllm.models.deepseek_v4" not in sys.modules


def test_another_deepseek_v4_is_left_alone(package, tmp_path, vllm, monkeypatch, caplog) -> None:
    """The backend is registered all the same."""
    other = shutil.copytree(package, tmp_path / "vllm")
    path = other / "models/deepseek_v4/nvidia/flashmla.py"
    path.write_text(path.read_text().replace("dequantize_and_gather_k_cache", "gather"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUPY_MLA_VLLM", "override")
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().endswith("Missing: models.deepseek_v4.nvidia.flashmla: dequantize_and_gather_k_cache")
    assert list(loaded("vllm.v1.attention.backends.registry").registered) == ["FLASHMLA_SPARSE"]
    assert loaded("vllm.model_executor.models.registry").ModelRegistry.models == {}


def test_an_indexer_without_deep_gemm(vllm, monkeypatch) -> None:
    """Where vLLM cannot make its own, it makes ours; where it can, it goes on doing so."""
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    compilation = SimpleNamespace(splitting_ops=["vllm::sparse_attn_indexer"])
    loaded("vllm.config").current = SimpleNamespace(compilation_config=compilation)
    buffer = torch.zeros(4, K, dtype=torch.int32)
    plugin.register()
    assert type(layer_indexer(buffer).indexer_op).__name__ == "SparseAttnIndexer"
    monkeypatch.setattr(loaded("vllm.utils.import_utils"), "deep_gemm", False)
    with pytest.raises(RuntimeError, match="DeepGEMM"):
        layer_indexer(buffer)
    plugin.register()
    plugin.register()
    op = layer_indexer(buffer).indexer_op
    indexer = loaded(f"{plugin.__name__}.indexer")
    assert type(op) is indexer.CupyMLAIndexer
    assert op.topk_tokens == K
    assert compilation.splitting_ops == ["vllm::sparse_attn_indexer", "cupy_mla_vllm::sparse_attn_indexer"]
    indexer.LIBRARY._destroy()


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


FAULTS = {
    "a renamed method": (
        "flashmla_sparse", "def forward_mqa(", "def forward(", "FlashMLASparseImpl.forward_mqa(self, q,",
    ),
    "a new parameter": (
        "flashmla_sparse", "forward_mqa(self, q,", "forward_mqa(self, layer_idx, q,", "FlashMLASparseImpl.forward_mqa(",
    ),
    "a lost field": (
        "flashmla_sparse", "req_id_per_token: Any", "request: Any", "FlashMLASparseMetadata(num_reqs, max_query_len,",
    ),
    "a new field": (
        "flashmla_sparse", "req_id_per_token: Any", "req_id_per_token: Any; positions: Any",
        "FlashMLASparseMetadata(num_reqs, max_query_len,",
    ),
    "a lost attribute": ("flashmla_sparse", "self.q_concat_buffer,", "_,", "FlashMLASparseImpl.q_concat_buffer"),
    "a lost name": ("indexer", "def has_deep_gemm", "def has_gemm", "indexer: has_deep_gemm"),
    "a lost module": ("indexer", None, None, "module v1.attention.backends.mla.indexer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_another_vllm_is_left_alone(package, tmp_path, vllm, monkeypatch, caplog, fault: str) -> None:
    """With one warning that names what is missing."""
    module, old, new, missing = FAULTS[fault]
    other = shutil.copytree(package, tmp_path / "vllm")
    path = other / "v1/attention/backends/mla" / f"{module}.py"
    if old is None:
        path.unlink()
    else:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    with caplog.at_level(logging.INFO):
        plugin.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert missing in record.getMessage()
    assert record.getMessage().count(";") == 0, "one thing is missing"
    assert "vllm.v1.attention.backends.registry" not in sys.modules


def test_the_stand_ins_are_what_the_adapter_needs(package) -> None:
    assert plugin.missing(package, plugin.FLASHMLA_SPARSE) == []
    assert plugin.missing(package, plugin.DENSE_MLA) == []
    assert plugin.missing(package, plugin.DEEPSEEK_V4) == []


def test_the_later_stand_ins_are_what_the_adapter_needs(package_33) -> None:
    assert plugin.missing(package_33, plugin.SPARSE_MLA_COMMON) == []
    assert plugin.missing(package_33, plugin.DENSE_MLA) == []
    assert plugin.missing(package_33, plugin.DEEPSEEK_V4) == []


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


# --- the backend ----------------------------------------------------------------------------------------------


def test_backend(modules) -> None:
    backend = modules.sparse_mla.CupyMLASparseBackend
    capability = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 1)]
    supported = [backend.supports_compute_capability(SimpleNamespace(major=a, minor=b)) for a, b in capability]
    assert supported == [False, True, True, True, True, True]
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert backend.get_impl_cls() is modules.sparse_mla.CupyMLASparseImpl
    assert backend.get_builder_cls() is modules.sparse_mla.CupyMLASparseBuilder


PATHS = {"bf16": ("auto", 8), "mixed": ("fp8_ds_mla", 8), "separate": ("fp8_ds_mla", 64)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [7], [1, 1, 6, 3], [2, 5], [1, 0, 0]], ids=str)
@pytest.mark.parametrize("pair", [True, False], ids=["parts", "whole"])
def test_attention(modules, rng, path: str, query_lens: list[int], pair: bool) -> None:
    """Against float64 attention over the chosen rows. Metadata are built without FlashMLA's schedule."""
    cache_type, heads = PATHS[path]
    step = make_step(rng, heads, query_lens, all_listed=True)
    tokens = sum(query_lens)
    padded = tokens + 2 if path != "separate" or max(query_lens) > 1 else tokens  # graphs pad the batch
    topk_buffer = torch.full((64, step.topk_indices.shape[1]), -1, dtype=torch.int32)
    topk_buffer[:tokens] = as_torch(valid_first(step.topk_indices))
    builder = modules.sparse_mla.CupyMLASparseBuilder(heads, BLOCK_SIZE, cache_type == "fp8_ds_mla")
    metadata = builder.build(0, vllm_batch(step.batch, padded))
    separate = hasattr(metadata.fp8_extra_metadata, "num_decodes")
    assert (path == "separate" and query_lens not in ([1], [1, 1, 1])) == separate
    impl = modules.sparse_mla.CupyMLASparseImpl(heads, 576, SCALE, cache_type, indexer=layer_indexer(topk_buffer))
    impl.prefill_bf16_workspace.fill_(float("nan"))
    q = torch.zeros(padded, heads, 576, dtype=torch.bfloat16)
    q[:tokens] = as_torch(step.q)
    query = (q[..., :512], q[..., 512:].clone()) if pair else q
    got, lse = impl.forward_mqa(query, as_torch(step.caches["bf16" if path == "bf16" else "v32_fp8"]), metadata, None)
    assert lse is None
    assert got.shape == (padded, heads, 512)
    assert_result(got[:tokens].float().numpy(), step.want)


@pytest.mark.parametrize(("heads", "whole"), [(16, True), (32, True), (63, True), (64, False), (128, False)])
def test_ranks_below_64_heads_give_whole_batches_to_the_decode_kernel(modules, rng, heads: int, whole: bool) -> None:
    """Those with prefills as well, as docs/vllm.md says."""
    batch = vllm_batch(make_step(rng, 1, [1, 1, 6]).batch, 8)
    extra = modules.sparse_mla.CupyMLASparseBuilder(heads, BLOCK_SIZE, True).build(0, batch).fp8_extra_metadata
    assert isinstance(extra, modules.stock.FlashMLASparseMetadata.FP8KernelMetadata) == whole
    assert whole or extra.num_decode_tokens == 2


def vllm_batch(batch: BatchMetadata, tokens: int) -> SimpleNamespace:
    """vLLM's description of a batch, which may be padded to more tokens."""
    starts = as_torch(batch.query_start_loc)
    return loaded("vllm.v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=as_torch(batch.seq_lens),
        num_reqs=len(batch.seq_lens), num_actual_tokens=tokens, max_query_len=int(batch.query_lens.max()),
        max_seq_len=int(batch.seq_lens.max()), block_table_tensor=as_torch(batch.block_table),
        slot_mapping=as_torch(batch.slot_mapping),
    )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("query_lens", "decode_len", "known"),
    [([1], 1, True), ([1, 1, 1], 1, True), ([1, 1, 0, 0], 1, True), ([1, 1, 2], 1, False), ([1, 1], 2, False)],
    ids=str,
)
def test_nothing_is_computed_for_decodes_of_one_token(
    modules, rng, monkeypatch, path: str, query_lens: list[int], decode_len: int, known: bool
) -> None:
    """The metadata of attention and of the indexer are as vLLM's; requests of no token pad the batch."""
    cache_type, heads = PATHS[path]
    tokens = max(sum(query_lens), len(query_lens))
    batch = vllm_batch(make_step(rng, 8, query_lens).batch, tokens)
    builder = modules.sparse_mla.CupyMLASparseBuilder(heads, BLOCK_SIZE, cache_type == "fp8_ds_mla", decode_len)
    want = builder._build(0, batch)
    indexer_builder = modules.indexer.CupyMLAIndexerBuilder(decode_len)
    assert (indexer_builder.build(0, batch) == "built") == (not known)
    assert modules.indexer.CupyMLAIndexerBuilder(decode_len, compress_ratio=4).build(0, batch) == "built"
    if known:
        monkeypatch.setattr(builder, "_build", None)
    got = builder.build(0, batch)
    for name in ("num_reqs", "max_query_len", "max_seq_len", "num_actual_tokens", "block_size", "topk_tokens"):
        assert getattr(got, name) == getattr(want, name)
    for name in ("query_start_loc", "slot_mapping", "block_table"):
        assert getattr(got, name) is getattr(want, name)
    live = sum(query_lens)  # vLLM gives the others to request 0
    assert torch.equal(got.req_id_per_token[:live], want.req_id_per_token[:live])
    assert got.req_id_per_token.shape == (tokens,)
    assert got.req_id_per_token.max() < len(query_lens)
    assert (got.fp8_extra_metadata is None) == (path == "bf16")
    if known:
        assert builder.build(0, batch).fp8_extra_metadata is got.fp8_extra_metadata
        metadata = indexer_builder.build(0, batch)
        assert (metadata.num_decodes, metadata.num_decode_tokens) == (len(query_lens), tokens)
        assert (metadata.num_prefills, metadata.num_prefill_tokens, metadata.prefill) == (0, 0, None)
        assert metadata.slot_mapping is batch.slot_mapping
        assert metadata.decode.block_table is batch.block_table_tensor
        assert torch.equal(metadata.decode.seq_lens, batch.seq_lens[:, None])
        assert metadata.decode.seq_lens.data_ptr() == batch.seq_lens.data_ptr()
        assert not metadata.decode.requires_padding
        assert modules.indexer._same_decodes(got, metadata, BLOCK_SIZE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("longest", [TOPK - 1, TOPK, TOPK + 1])
@pytest.mark.parametrize(
    ("query_lens", "decode_len", "decodes"),
    [([1, 1, 1], 1, True), ([1, 1, 0], 1, True), ([2, 2], 2, True), ([2, 1, 1], 2, False), ([5], 1, False),
     ([1, 6], 1, False)],
    ids=str,
)  # fmt: skip
def test_short_contexts(
    modules, rng, path: str, longest: int, query_lens: list[int], decode_len: int, decodes: bool
) -> None:
    """Decodes alone of contexts of at most topk tokens attend over all rows; their lists are poisoned."""
    cache_type, heads = PATHS[path]
    lens = [longest, *query_lens[1:]]
    step = make_step(rng, heads, query_lens, lens, all_listed=True)
    tokens = len(query_lens) * max(query_lens) if max(query_lens) <= decode_len else sum(query_lens)  # padded
    builder = modules.sparse_mla.CupyMLASparseBuilder(heads, BLOCK_SIZE, cache_type == "fp8_ds_mla", decode_len)
    metadata = builder.build(0, vllm_batch(step.batch, tokens))
    dense = modules.short.dense_decodes_of(metadata)
    assert (dense is not None) == (decodes and longest <= TOPK)
    lists = torch.full((64, TOPK), HOSTILE, dtype=torch.int32)
    if dense is None:
        lists[: sum(query_lens)] = as_torch(valid_first(step.topk_indices))
    impl = modules.sparse_mla.CupyMLASparseImpl(heads, 576, SCALE, cache_type, indexer=layer_indexer(lists))
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    q[: sum(query_lens)] = as_torch(step.q)
    cache = as_torch(step.caches["bf16" if path == "bf16" else "v32_fp8"])
    got, _ = impl.forward_mqa((q[..., :512], q[..., 512:].clone()), cache, metadata, None)
    assert_result(got[: sum(query_lens)].float().numpy(), step.want)


def test_a_captured_step_takes_lists(modules, rng, monkeypatch) -> None:
    """vLLM says `max_model_len` of a step that it captures. Should one say less, the capture is seen."""
    batch = vllm_batch(make_step(rng, 8, [1, 1], [TOPK, 3]).batch, 2)
    builder = modules.sparse_mla.CupyMLASparseBuilder(8, BLOCK_SIZE, False)
    metadata = builder.build(0, batch)
    batch.max_seq_len = MAX_LEN
    assert modules.short.dense_decodes_of(builder.build(0, batch)) is None
    assert modules.short.dense_decodes_of(metadata) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert modules.short.dense_decodes_of(metadata) is None


@pytest.mark.parametrize("longest", [K - 1, K, K + 1])
def test_the_indexer_chooses_for_attention_that_takes_lists(modules, rng, longest: int) -> None:
    """In a step whose attention takes all rows it only writes keys. Whoever takes lists all the same is told."""
    table = as_torch(rng.permutation(9)[:8].reshape(2, 4).astype(np.int32))
    batch = modules.metadata.DeepseekV32IndexerMetadata(
        None, longest, torch.tensor([1, 2]), 2, 2, 0, 0,
        modules.metadata.DeepSeekV32IndexerDecodeMetadata(
            table, torch.tensor([[longest], [2]], dtype=torch.int32), None, False, None
        ),
    )  # fmt: skip
    buffer = torch.full((2, K), 77, dtype=torch.int32)
    indexer = layer_indexer(buffer)
    cache = indexer.k_cache.kv_cache = torch.zeros(9, BLOCK_SIZE, 132, dtype=torch.uint8)
    impl = modules.sparse_mla.CupyMLASparseImpl(HEADS, 576, SCALE, "auto", indexer=indexer)
    builder = modules.sparse_mla.CupyMLASparseBuilder(HEADS, BLOCK_SIZE, False)
    builder.topk_tokens = K
    starts = torch.arange(3)
    attention = builder.build(0, loaded("vllm.v1.attention.backend").CommonAttentionMetadata(
        starts, starts, batch.decode.seq_lens[:, 0], 2, 2, 1, longest, table, batch.slot_mapping,
    ))  # fmt: skip
    modules.context.attn_metadata = {"layer.indexer.k_cache": batch, "layer.attn": attention}
    q8, w = torch.ones(2, HEADS, 128).to(torch.float8_e4m3fn), torch.ones(2, HEADS)
    indexer.indexer_op(torch.zeros(2, 4), q8, torch.ones(2, 128).bfloat16(), w)
    assert cache[0, 1:3].any(), "the keys"
    rows = torch.randn(9, BLOCK_SIZE, 576).bfloat16()
    q = torch.randn(2, HEADS, 576).bfloat16()
    got = impl.forward_mqa(q, rows, attention, None)[0]
    vars(attention)[modules.short.NAME] = None
    if longest <= K:
        assert (buffer == 77).all()
        with pytest.raises(RuntimeError, match="the indexer chose nothing"):
            impl.forward_mqa(q, rows, attention, None)
        indexer.indexer_op(torch.zeros(2, 4), q8, torch.ones(2, 128).bfloat16(), w)
    assert torch.allclose(impl.forward_mqa(q, rows, attention, None)[0].float(), got.float(), rtol=1 / 64, atol=1e-3)


@pytest.mark.parametrize("path", ["bf16", "mixed"])
def test_the_benchmark_measures_against_exact_attention(modules, rng, monkeypatch, path: str) -> None:
    """Its float32 backend is float64 attention but for the rounding of the result."""
    float32, cache_type = float32_backend(monkeypatch), PATHS[path][0]
    step = make_step(rng, 8, [1, 40, 3])
    topk_buffer = as_torch(step.topk_indices)
    batch = vllm_batch(step.batch, 44)
    builder = float32.get_builder_cls()(8, BLOCK_SIZE, cache_type == "fp8_ds_mla")
    impl = float32.get_impl_cls()(8, 576, SCALE, cache_type, indexer=layer_indexer(topk_buffer))
    q, cache = as_torch(step.q), as_torch(step.caches["bf16" if path == "bf16" else "v32_fp8"])
    cache.view(torch.uint8)[(cache.view(torch.uint8) == 0xFF).all(-1)] = 0  # it multiplies rows that nobody names by 0
    got, _ = impl.forward_mqa((q[..., :512], q[..., 512:]), cache, builder.build(0, batch), None)
    np.testing.assert_allclose(got.float().numpy(), step.want, rtol=1.01 / 256, atol=1e-6)


@pytest.mark.parametrize("cache_type", ["auto", "bfloat16", "fp8_ds_mla"])
def test_cache_write(modules, rng, cache_type: str) -> None:
    """What `concat_and_cache_mla` writes; profiling runs have no cache."""
    from cupy_mla import concat_and_cache_mla

    impl = modules.sparse_mla.CupyMLASparseImpl(
        8, 576, SCALE, cache_type, indexer=layer_indexer(torch.zeros(1, K, dtype=torch.int32))
    )
    fp8 = cache_type == "fp8_ds_mla"
    shape, dtype = ((3, 16, 656), torch.uint8) if fp8 else ((3, 16, 576), torch.bfloat16)
    got, want = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    kv_c, k_pe = torch.randn(4, 512).bfloat16(), torch.randn(4, 1, 64).bfloat16()
    slots = torch.tensor([5, -1, 40, 17])
    impl.do_kv_cache_update(kv_c, k_pe, got, slots[:, None], cache_type, torch.ones(()))
    concat_and_cache_mla(kv_c, k_pe, want, slots)
    assert want.any()
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    impl.do_kv_cache_update(kv_c, k_pe, torch.zeros(0), slots, cache_type, torch.ones(()))


def test_a_cache_of_another_type_is_an_error(modules) -> None:
    impl = modules.sparse_mla.CupyMLASparseImpl(
        8, 576, SCALE, "auto", indexer=layer_indexer(torch.zeros(1, K, dtype=torch.int32))
    )
    row = torch.zeros(1, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: expected one of .*, got 'fp8_e5m2'"):
        impl.do_kv_cache_update(row, row[:, None, :64], torch.zeros(1), torch.zeros(1), "fp8_e5m2", torch.ones(()))


# --- the indexer ----------------------------------------------------------------------------------------------


def test_a_layer_brings_its_indexer_along(modules) -> None:
    """A model of another backend keeps vLLM's: nothing changes before a layer of ours is made."""
    buffer = torch.zeros(4, K, dtype=torch.int32)
    indexer = layer_indexer(buffer)
    stock = type(indexer.indexer_op)
    modules.sparse_mla.CupyMLASparseImpl(8, 576, SCALE, "auto", indexer=indexer)
    assert isinstance(indexer.indexer_op, modules.indexer.CupyMLAIndexer)
    assert indexer.indexer_op._forward_method.__func__ is modules.indexer.CupyMLAIndexer.forward_cuda
    backend = indexer.k_cache.get_attn_backend()
    prefills = SimpleNamespace(max_query_len=2)
    assert backend.get_builder_cls()().build(0, prefills) == "built"  # without DeepGEMM's schedule
    with pytest.raises(RuntimeError, match="DeepGEMM"):
        modules.metadata.DeepseekV32IndexerMetadataBuilder().build(0, prefills)
    assert type(layer_indexer(buffer).indexer_op) is stock
    modules.sparse_mla.CupyMLASparseImpl(8, 576, SCALE, "auto", indexer=layer_indexer(buffer))
    assert modules.splitting_ops == ["vllm::sparse_attn_indexer", "cupy_mla_vllm::sparse_attn_indexer"]


def test_an_fp4_indexer_is_an_error(modules) -> None:
    buffer = torch.zeros(4, K, dtype=torch.int32)
    with pytest.raises(ValueError, match="FP4"):
        modules.indexer.adopt(layer_indexer(buffer, fp4=True))


@pytest.mark.parametrize(
    ("query_lens", "speculative"),
    [([1, 1, 1], 1), ([9], 1), ([1, 1, 7, 4], 1), ([2, 2], 2), ([2, 2, 0], 2), ([1, 1, 0, 0], 1), ([2, 2, 8], 2)],
    ids=str,
)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("exact", [False, True], ids=["ours", "float32"])
def test_indexer(modules, rng, monkeypatch, query_lens: list[int], speculative: int, padding: int, exact: bool) -> None:
    """The op's positions are a stable sort's of float64 logits; keys are such that these are exact.

    The benchmark's float32 backend has logits and a top-k of its own, whose positions are in another order.
    """
    requests, tokens = len(query_lens), sum(query_lens)
    seq_lens = [n + int(rng.integers(0, MAX_LEN - n + 1)) if n else 0 for n in query_lens]
    width = MAX_LEN // BLOCK_SIZE
    table = rng.permutation(requests * width + 1)[: requests * width].reshape(requests, width).astype(np.int32)
    codes = indexers.exact_codes(rng, requests * width + 1, BLOCK_SIZE, 128)
    cache = indexers.key_cache(codes, np.ones(codes.shape[:2], np.float32))
    q8, w = (
        indexers.exact_codes(rng, tokens + padding, HEADS, 128),
        indexers.exact_weights(rng, tokens + padding, HEADS),
    )
    buffer = torch.full((tokens + padding + 1, K), 77, dtype=torch.int32)
    indexer = layer_indexer(buffer)
    indexer.k_cache.kv_cache = as_torch(cache)
    indexer.indexer_op.skip_k_cache_insert = True
    if exact:
        float32_backend(monkeypatch).get_impl_cls()(8, 576, SCALE, "auto", indexer=indexer)
        assert modules.indexer.select_rows.__module__ == "vllm_float32"
    modules.indexer.adopt(indexer)

    decodes = next((i for i, n in enumerate(query_lens) if n > speculative), requests)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    modules.context.attn_metadata = {
        "layer.indexer.k_cache": batch_metadata(modules, table, query_lens, seq_lens, starts, decodes, speculative)
    }
    hidden = torch.zeros(tokens + padding, 4)
    got = indexer.indexer_op(hidden, as_torch(q8.view(E4M3)), torch.zeros(tokens + padding, 128), as_torch(w))
    assert got is buffer
    want = np.full((tokens + padding + 1, K), -1, np.int32)
    want[-1] = 77
    for r, (n, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for j in range(n):
            t, seen = starts[r] + j, length - n + j + 1
            slots = [table[r, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(seen)]
            keys = codes.reshape(-1, 128)[slots]
            logits = oracle_indexer.logits(q8[t], keys, np.ones(seen), w[t])
            want[t] = oracle_indexer.topk(logits, K, 0, seen)
    np.testing.assert_array_equal(valid_first(np.sort(buffer.numpy())) if exact else buffer.numpy(), want)


@pytest.mark.parametrize(
    ("query_lens", "speculative", "case"),
    [
        ([1, 1, 1], 1, "slots"), ([2, 2], 2, "slots"), ([1, 1, 4], 1, "a prefill"), ([1, 2], 2, "unequal decodes"),
        ([1, 1, 1], 1, "another table"), ([1, 1, 1], 1, "another block size"), ([1, 1, 1], 1, "attention of its own"),
        ([2, 2], 2, "gathered"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", [8, 64])
def test_decodes_choose_slots(
    modules, rng, monkeypatch, query_lens: list[int], speculative: int, case: str, heads: int
) -> None:
    """Of the layer's attention, if it is over the same batch by the same table; its results are the same bits."""
    requests, tokens, width = len(query_lens), sum(query_lens), MAX_LEN // BLOCK_SIZE
    seq_lens = [n + int(rng.integers(0, MAX_LEN - n + 1)) for n in query_lens]
    seq_lens[0] = query_lens[0]  # fewer than k
    table = as_torch(rng.permutation(requests * width + 1)[: requests * width].reshape(requests, width).astype("i4"))
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    decodes = next((i for i, n in enumerate(query_lens) if n > speculative), requests)
    batch = batch_metadata(modules, table.numpy(), query_lens, seq_lens, starts, decodes, speculative)
    batch.decode.block_table = table[:decodes]
    q8 = as_torch(indexers.exact_codes(rng, tokens, HEADS, 128).view(E4M3))
    weights = as_torch(indexers.exact_weights(rng, tokens, HEADS))
    codes = indexers.exact_codes(rng, requests * width + 1, BLOCK_SIZE, 128)
    rows = torch.randn(requests * width + 1, BLOCK_SIZE, 576).bfloat16()
    q = torch.randn(tokens, heads, 576).bfloat16()
    extra = SimpleNamespace(prefill=SimpleNamespace(chunks=[])) if case == "gathered" else None
    converted = []
    convert = modules.sparse_mla.convert_req_index_to_global_index
    monkeypatch.setattr(
        modules.sparse_mla, "convert_req_index_to_global_index",
        lambda *a, **k: (converted.append(True), convert(*a, **k))[1],
    )  # fmt: skip

    def outcome(its_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.full((tokens + 1, K), 77, dtype=torch.int32)
        indexer = layer_indexer(buffer)
        indexer.k_cache.kv_cache = as_torch(indexers.key_cache(codes, np.ones(codes.shape[:2], np.float32)))
        indexer.indexer_op.skip_k_cache_insert = True
        impl = modules.sparse_mla.CupyMLASparseImpl(heads, 576, SCALE, "auto", indexer=indexer)
        if case == "attention of its own":
            modules.indexer.taking_slots.clear()
        request = torch.arange(requests).repeat_interleave(torch.tensor(query_lens)).int()
        block_size = BLOCK_SIZE * (1 + (case == "another block size"))
        attention = modules.stock.FlashMLASparseMetadata(
            requests, max(query_lens), max(seq_lens), tokens, as_torch(starts), batch.slot_mapping, its_table, request,
            block_size, K, extra,
        )  # fmt: skip
        modules.context.attn_metadata = {"layer.indexer.k_cache": batch, "layer.attn": attention}
        indexer.indexer_op(torch.zeros(tokens, 4), q8, torch.zeros(tokens, 128), weights)
        attention.block_size, attention.fp8_extra_metadata = BLOCK_SIZE, None
        return buffer.clone(), impl.forward_mqa(q, rows, attention, None)[0]

    positions, want = outcome(table.clone())
    assert converted
    converted.clear()
    buffer, got = outcome(table.clone() if case == "another table" else table)
    assert bool(converted) == (case != "slots")
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    if case == "slots":
        request = np.repeat(np.arange(requests), query_lens)[:, None]
        at = positions[:tokens].numpy()
        slots = table.numpy()[request, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        np.testing.assert_array_equal(buffer[:tokens].numpy(), np.where(at < 0, -1, slots))
    else:
        assert torch.equal(buffer, positions)


@pytest.mark.parametrize("path", PATHS)
def test_steps_on_one_buffer(modules, rng, path: str) -> None:
    """A step must not take what an earlier one has chosen, as slots or not at all, for its own lists."""
    cache_type, heads = PATHS[path]
    caches = Caches(rng, BLOCK_SIZE, heads, K)
    lists = torch.full((64, K), HOSTILE, dtype=torch.int32)
    indexer = layer_indexer(lists)
    indexer.k_cache.kv_cache, indexer.indexer_op.skip_k_cache_insert = as_torch(caches.keys), True
    impl = modules.sparse_mla.CupyMLASparseImpl(heads, 576, SCALE, cache_type, indexer=indexer)
    builder = modules.sparse_mla.CupyMLASparseBuilder(heads, BLOCK_SIZE, cache_type == "fp8_ds_mla", topk=K)
    for name in ORDER:
        asked = caches.step(name)
        tokens = max(sum(asked.query_lens), len(asked.query_lens))
        unread = [0] * sum(asked.query_lens)  # slots of new rows, positions
        batch = vllm_batch(BatchMetadata(asked.starts, asked.seq_lens, asked.table, unread, unread), tokens)
        decodes = next((i for i, n in enumerate(asked.query_lens) if n > 1), len(asked.query_lens))
        keys = batch_metadata(modules, asked.table, asked.query_lens, asked.seq_lens, asked.starts, decodes, 1)
        if keys.decode is not None:
            keys.decode.block_table = batch.block_table_tensor[:decodes]
        modules.context.attn_metadata = {"layer.indexer.k_cache": keys, "layer.attn": builder.build(0, batch)}
        live = sum(asked.query_lens)
        q8, w, q = (
            torch.zeros(tokens, *a.shape[1:], dtype=as_torch(a).dtype)
            for a in (asked.index_q.view(E4M3), asked.weights, asked.q)
        )
        q8[:live], w[:live], q[:live] = as_torch(asked.index_q.view(E4M3)), as_torch(asked.weights), as_torch(asked.q)
        indexer.indexer_op(torch.zeros(tokens, 4), q8, torch.zeros(tokens, 128), w)
        cache = as_torch(caches.rows["bf16" if path == "bf16" else "v32_fp8"])
        got, _ = impl.forward_mqa(q, cache, modules.context.attn_metadata["layer.attn"], None)
        assert_result(got[:live].float().numpy(), asked.want)


def test_slots_of_another_block_table_are_an_error(modules) -> None:
    """Of a layer that takes another layer's choice."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    slots = modules.indexer.ChosenSlots(table, torch.ones(2, dtype=torch.int32))
    assert slots.checked(table[:1]) is slots
    with pytest.raises(RuntimeError, match="another block table"):
        slots.checked(table.clone())


def batch_metadata(modules, table, query_lens, seq_lens, starts, decodes: int, speculative: int):
    """What vLLM's builder makes of a batch, by its rules: uniform decodes, then chunks of prefills, one cut in two."""
    m, chunks, decode = modules.metadata, [], None
    if decodes:
        lens = np.array(query_lens[:decodes])
        seen = np.array(seq_lens[:decodes])[:, None] - lens.max() + 1 + np.arange(lens.max())
        decode = m.DeepSeekV32IndexerDecodeMetadata(
            as_torch(table[:decodes]), as_torch(seen.astype(np.int32)), as_torch(lens), bool(lens.min() != lens.max()),
            None,
        )  # fmt: skip
    for r in range(decodes, len(query_lens)):
        n, length = query_lens[r], seq_lens[r]
        for begin, end in ((0, n // 2), (n // 2, n)):
            ends = np.arange(length - n + begin + 1, length - n + end + 1, dtype=np.int32)
            chunks.append(
                m.DeepseekV32IndexerPrefillChunkMetadata(
                    as_torch(table[r : r + 1]), torch.zeros(end - begin, dtype=torch.int32), as_torch(ends),
                    torch.tensor([0, length], dtype=torch.int32), length, int(starts[r] + begin), int(starts[r] + end),
                    skip_kv_gather=False,
                )
            )  # fmt: skip
    return m.DeepseekV32IndexerMetadata(
        as_torch(np.array(seq_lens)), max(seq_lens), torch.zeros(int(starts[-1]), dtype=torch.int64),
        decodes, int(starts[decodes]), len(query_lens) - decodes, int(starts[-1] - starts[decodes]),
        decode, m.DeepseekV32IndexerPrefillMetadata(chunks) if chunks else None,
    )  # fmt: skip


def test_indexer_writes_keys(modules, rng) -> None:
    """The step's keys, whose batch may be padded, before they are looked for."""
    from cupy_mla import indexer_k_quant_and_cache

    buffer = torch.zeros(4, K, dtype=torch.int32)
    indexer = layer_indexer(buffer)
    cache = indexer.k_cache.kv_cache = torch.zeros(2, BLOCK_SIZE, 132, dtype=torch.uint8)
    modules.indexer.adopt(indexer)
    slots = torch.tensor([3, BLOCK_SIZE, -1])
    metadata = modules.metadata.DeepseekV32IndexerMetadata(None, 0, slots, 0, 0, 0, 0)
    modules.context.attn_metadata = {"layer.indexer.k_cache": metadata}
    k, q = torch.randn(4, 128).bfloat16(), torch.zeros(4, HEADS, 128).to(torch.float8_e4m3fn)
    indexer.indexer_op(torch.zeros(4, 4), q, k, torch.zeros(4, HEADS))
    want = torch.zeros_like(cache)
    indexer_k_quant_and_cache(k[:3], want, slots, "ue8m0")
    assert want.any()
    assert torch.equal(cache, want)
    assert (buffer == -1).all()


def test_a_profiling_run_takes_the_memory_of_the_logits(modules) -> None:
    """As much as steps may, so that vLLM leaves it to them."""

    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.nbytes = max(self.nbytes, made.nbytes)
            return made

    indexer = layer_indexer(torch.zeros(4, K, dtype=torch.int32))
    modules.indexer.adopt(indexer)
    modules.context.attn_metadata = None
    loaded("vllm.envs").VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = 3
    op = indexer.indexer_op
    with Largest() as largest:
        modules.indexer.sparse_attn_indexer(
            torch.zeros(4, 4), op.k_cache.prefix, op.k_cache.kv_cache, torch.zeros(4, HEADS, 128), torch.zeros(4, 128),
            torch.zeros(4, HEADS), "ue8m0", K, MAX_LEN, 1, op.topk_indices_buffer, False,
        )  # fmt: skip
    assert largest.nbytes == 3 << 20


def test_a_profiling_run_reserves_memory(modules, monkeypatch) -> None:
    buffer = torch.full((4, K), 5, dtype=torch.int32)
    indexer = layer_indexer(buffer)
    modules.indexer.adopt(indexer)
    asked = []
    manager = SimpleNamespace(get_simultaneous=lambda *what: asked.append(what))
    monkeypatch.setattr(modules.indexer, "current_workspace_manager", lambda: manager)
    modules.context.attn_metadata = None
    q = torch.zeros(4, HEADS, 128).to(torch.float8_e4m3fn)
    indexer.indexer_op(torch.zeros(4, 4), q, torch.zeros(4, 128), torch.zeros(4, HEADS))
    assert asked == [(((10 * MAX_LEN, 128), torch.float8_e4m3fn), ((10 * MAX_LEN,), torch.float32))]
    assert (buffer == 5).all()
