"""Kinds of torch's tensors, and a vLLM of stand-ins, for the tests of the plug-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupy_mla.integrations import vllm as plugin
from tests import kinds
from tests.integrations import stub_vllm
from tests.integrations.stub_vllm import loaded


@pytest.fixture(params=["torch", pytest.param("torch_cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> kinds.NumPy:
    return kinds.make(request.param)


@pytest.fixture
def nothing_is_compiled() -> Iterator[None]:
    """By torch.compile, before a test and after it."""
    dynamo = pytest.importorskip("torch")._dynamo
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_vllm.write(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="session")
def package_33(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_vllm.write(tmp_path_factory.mktemp("stub33"), stub_vllm.SOURCES_33)


@pytest.fixture
def vllm(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins as `vllm`, and the modules of the plug-in that import it; both are gone afterwards."""
    yield from imported(package, monkeypatch)


@pytest.fixture
def vllm_33(package_33: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from imported(package_33, monkeypatch)


@pytest.fixture
def modules(vllm: None) -> Iterator[SimpleNamespace]:
    """The adapter's modules, in a process whose vLLM has a configuration."""
    compilation = SimpleNamespace(splitting_ops=["vllm::sparse_attn_indexer"])
    loaded("vllm.config").current = stub_vllm.engine(compilation_config=compilation)
    indexer = loaded(f"{plugin.__name__}.indexer")
    yield SimpleNamespace(
        sparse_mla=loaded(f"{plugin.__name__}.sparse_mla"), indexer=indexer, short=loaded(f"{plugin.__name__}.short"),
        splitting_ops=compilation.splitting_ops,
        stock=loaded("vllm.v1.attention.backends.mla.flashmla_sparse"),
        metadata=loaded("vllm.v1.attention.backends.mla.indexer"), context=loaded("vllm.forward_context").context,
    )  # fmt: skip
    indexer.LIBRARY._destroy()


def imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    yield
    with_vllm = (*plugin.ADAPTERS, "indexer", "indexer_common", "deepseek_v4", "short", "dense_mla", "warm")
    adapters = [f"{plugin.__name__}.{name}" for name in with_vllm]
    for name in with_vllm:
        vars(plugin).pop(name, None)
    for name in list(sys.modules):
        if name.partition(".")[0] == "vllm" or name in adapters:
            del sys.modules[name]
