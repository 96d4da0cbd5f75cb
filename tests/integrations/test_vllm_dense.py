"""The dense MLA backend for vLLM on stand-ins of its classes, on the CPU: attention, lse of a rank, who gets it."""

from __future__ import annotations

import importlib
import logging
import shutil
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.calls.operation import forget_calls  # noqa: E402
from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests import oracle  # noqa: E402
from tests.calls.test_plan import plan_of  # noqa: E402
from tests.cases import queries  # noqa: E402
from tests.dense import Requests, dense_oracle, in_cache  # noqa: E402
from tests.fake_gpu import FakeGPU  # noqa: E402
from tests.integrations.test_vllm import as_torch  # noqa: E402

SCALE = 0.07
HEADS = 6


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    return importlib.import_module(f"{plugin.__name__}.dense_mla")


def decodes(adapter: ModuleType, of: Requests) -> Any:
    """vLLM's metadata of the requests."""
    decode = adapter.common.MLACommonDecodeMetadata(as_torch(of.table), as_torch(of.lens))
    return adapter.common.MLACommonMetadata(len(of.lens), len(of.lens) * of.s_q, decode)


def spread(cache: np.ndarray) -> torch.Tensor:
    """The same blocks with rows of another layer behind each."""
    cache = as_torch(cache)
    whole = cache.new_full((len(cache), cache.shape[1] + 3, cache.shape[2]), torch.nan)
    whole[:, : cache.shape[1]] = cache
    return whole[:, : cache.shape[1]]


@pytest.mark.parametrize("s_q", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
@pytest.mark.parametrize("pair", [True, False], ids=["parts", "whole"])
def test_attention(adapter, rng, s_q: int, block_size: int, pair: bool) -> None:
    """Of decodes of equally many query tokens, against float64. A request of no token pads a batch."""
    lens = [s_q, 190, int(rng.integers(s_q, 200)), 0]
    of = in_cache(rng, oracle.BF16_576, lens, block_size, s_q)
    q = queries(rng, 4, s_q, HEADS, 576)
    whole = as_torch(q.reshape(-1, HEADS, 576))
    given = whole
    if pair:  # as vLLM has them: the absorbed part's heads come first in memory
        given = whole[..., :512].transpose(0, 1).contiguous().transpose(0, 1), whole[..., 512:]
    impl = adapter.CupyMLADenseImpl(SCALE)
    got, lse = impl.forward_mqa(given, spread(of.cache), decodes(adapter, of), None)
    assert lse is None
    assert got.shape == (4 * s_q, HEADS, 512)
    want = dense_oracle(oracle.BF16_576, q, of, sm_scale=SCALE)[0]
    oracle.assert_close(got.float().numpy(), want.reshape(got.shape), "decode out")


@pytest.mark.parametrize("quantized_q", [True, False])
def test_fp8_rows_of_one_scale(adapter, rng, quantized_q: bool) -> None:
    """vLLM's layer has their scale and, where it quantizes it, the query's."""
    of = in_cache(rng, oracle.BF16_576, [1, 100, 37], 16)
    q = queries(rng, 3, 1, HEADS, 576)
    layer = SimpleNamespace(_q_scale=torch.tensor(0.5), _k_scale=torch.tensor(0.25))
    codes = (as_torch(of.cache).float() / layer._k_scale).to(torch.float8_e4m3fn)
    of.cache = (codes.float() * layer._k_scale).bfloat16().view(torch.int16).numpy().view(of.cache.dtype)
    given = as_torch(q[:, 0])
    if quantized_q:
        given = (given.float() / layer._q_scale).to(torch.float8_e4m3fn)
        q = (given.float() * layer._q_scale).numpy()[:, None]
    got, _ = adapter.CupyMLADenseImpl(SCALE).forward_mqa(given, codes, decodes(adapter, of), layer)
    want = dense_oracle(oracle.BF16_576, q, of, sm_scale=SCALE)[0]
    oracle.assert_close(got.float().numpy(), want[:, 0], "decode out")


def test_the_parts_of_ranks_merge(adapter, rng) -> None:
    """Under context parallelism a rank has its rows' attention and lse: zeros and -inf where it has none."""
    of = in_cache(rng, oracle.BF16_576, [50, 1, 90], 16)
    q = queries(rng, 3, 1, HEADS, 576)
    want, want_lse = dense_oracle(oracle.BF16_576, q, of, sm_scale=SCALE)
    impl = adapter.CupyMLADenseImpl(SCALE)
    impl.need_to_return_lse_for_decode = True
    outs, lses = [], []
    first = np.array([32, 0, 16], np.int32)  # rows of the first rank
    for lens, columns in ((of.lens - first, first // 16), (first, first * 0)):
        table = np.stack([np.roll(row, -int(n)) for row, n in zip(of.table, columns, strict=True)])
        part = Requests(of.cache, table, lens.astype(np.int32), 1, of.sees)
        out, lse = impl.forward_mqa(as_torch(q[:, 0]), as_torch(of.cache), decodes(adapter, part), None)
        assert lse.shape == (3, HEADS)
        outs.append(out.double())
        lses.append(lse.double())
    assert lses[1][1].eq(-torch.inf).all()
    assert outs[1][1].eq(0).all()
    lse = torch.logaddexp(*lses)
    weights = [(part - lse).exp()[..., None] for part in lses]
    merged = sum(w * o for w, o in zip(weights, outs, strict=True))
    oracle.assert_close(merged.numpy(), want[:, 0], "prefill out")
    np.testing.assert_allclose(lse.numpy(), want_lse[..., 0], atol=2e-3)


def test_lse_of_several_query_tokens(adapter, rng) -> None:
    """A row a token, as vLLM merges them."""
    of = in_cache(rng, oracle.BF16_576, [20, 30], 16, 3)
    q = queries(rng, 2, 3, HEADS, 576)
    impl = adapter.CupyMLADenseImpl(SCALE)
    impl.need_to_return_lse_for_decode = True
    _, lse = impl.forward_mqa(as_torch(q.reshape(6, HEADS, 576)), as_torch(of.cache), decodes(adapter, of), None)
    want = dense_oracle(oracle.BF16_576, q, of, sm_scale=SCALE)[1]
    oracle.assert_close(lse.numpy(), want.swapaxes(1, 2).reshape(6, HEADS), "decode lse")


def test_layers_of_a_step_share_a_plan(adapter, monkeypatch) -> None:
    """The first one divides the requests' rows over the GPU, the others do as it did."""
    forget_calls()
    gpu, found = FakeGPU(monkeypatch), []
    decode = adapter.common.MLACommonDecodeMetadata(
        torch.zeros((67, 500), dtype=torch.int32), torch.zeros(67, dtype=torch.int32)
    )
    cache, impl = torch.zeros((4, 64, 576), dtype=torch.bfloat16), adapter.CupyMLADenseImpl(SCALE)
    for _ in range(2):
        step = adapter.common.MLACommonMetadata(67, 67, decode)
        for _ in range(3):
            gpu.log.clear()
            impl.forward_mqa(torch.zeros((67, 64, 576), dtype=torch.bfloat16), cache, step, None)
            found.append(plan_of(gpu))
    forget_calls()
    assert [filled for filled, _ in found] == [0, 1, 1] * 2
    assert len({address for _, address in found}) == 2


def test_backend(adapter) -> None:
    backend = adapter.CupyMLADenseBackend
    capability = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]
    supported = [backend.supports_compute_capability(SimpleNamespace(major=a, minor=b)) for a, b in capability]
    assert supported == [False, True, True, True, True]
    assert backend.is_mla()
    assert backend.get_supported_head_sizes() == [576]
    assert backend.supported_dtypes == [torch.bfloat16]
    assert "fp8_ds_mla" not in backend.supported_kv_cache_dtypes
    assert backend.get_impl_cls() is adapter.CupyMLADenseImpl
    builder = backend.get_builder_cls()
    assert builder.query_len_support is adapter.common.QueryLenSupport.UNIFORM
    assert builder._cudagraph_support.name == "UNIFORM_BATCH"


def model(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**fields)))


def test_custom_is_what_the_model_needs(vllm, monkeypatch) -> None:
    """vLLM resolves the path that is registered for each layer."""
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    plugin.register()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    module, _, name = registry.registered["CUSTOM"].rpartition(".")
    config = importlib.import_module("vllm.config")

    def chosen(current: Any) -> str:
        config.current = current
        return getattr(importlib.import_module(module), name).__name__

    assert chosen(model()) == "CupyMLADenseBackend"
    assert chosen(model(index_topk=2048)) == "CupyMLASparseBackend"
    assert chosen(model()) == "CupyMLADenseBackend"
    assert chosen(None) == chosen(SimpleNamespace(model_config=None)) == "CupyMLASparseBackend"
    with pytest.raises(AttributeError, match="has no attribute 'flashmla'"):
        _ = importlib.import_module(module).flashmla


def test_a_vllm_with_another_dense_backend(package, tmp_path, vllm, monkeypatch, caplog) -> None:
    """There CUSTOM is the sparse backend, with one warning."""
    other = shutil.copytree(package, tmp_path / "vllm")
    path = other / "model_executor/layers/attention/mla_attention.py"
    path.write_text(path.read_text().replace("UNIFORM", "EQUAL"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CUPY_MLA_VLLM", raising=False)
    with caplog.at_level(logging.INFO):
        plugin.register()
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "Missing: model_executor.layers.attention.mla_attention: QueryLenSupport.UNIFORM"
    )
    registered = importlib.import_module("vllm.v1.attention.backends.registry").registered
    path = f"{plugin.__name__}.sparse_mla.CupyMLASparseBackend"
    assert registered == dict.fromkeys(plugin.PLACES["custom"], path)
