"""Kinds of torch's tensors, and a vLLM of stand-ins, for the tests of the plug-in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupy_mla.integrations import vllm as plugin
from tests import kinds
from tests.integrations import stub_sglang, stub_vllm


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


@pytest.fixture(autouse=True)
def a_gpu_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an H200, if torch is asked."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """What `cupy_mla.warmup` is called with by an engine's plug-in, in place of the call, in a process where nothing is
    ready: lists of configs and numbers of GPUs."""
    warm = importlib.import_module("cupy_mla.integrations.warm")
    calls: list[tuple[Any, int]] = []
    monkeypatch.setattr(warm, "_ready", set())
    warm._warn_of_portable_kernels.cache_clear()
    monkeypatch.setattr(warm, "warmup", lambda kinds, device, progress: calls.append((kinds, device)) or [])
    return calls


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_vllm.write(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def vllm(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins as `vllm`, and the modules of the plug-in that import it; both are gone afterwards."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    yield
    with_vllm = (
        "sparse_mla", "indexer", "fused", "v4_layers", "deepseek_v4", "deepseek_v41", "short", "dense_mla", "warm",
    )  # fmt: skip
    adapters = [f"{plugin.__name__}.{name}" for name in with_vllm]
    for name in with_vllm:
        vars(plugin).pop(name, None)
    for name in list(sys.modules):
        if name.partition(".")[0] == "vllm" or name in adapters:
            del sys.modules[name]


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-ins as `sglang`, in a folder of the test's own; they are gone afterwards."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield stub_sglang.write(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
