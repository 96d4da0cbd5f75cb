"""A vLLM of stand-ins, for the tests of the plug-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupy_mla.integrations import vllm as plugin
from tests.integrations import stub_vllm


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


def imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    yield
    adapters = [
        f"{plugin.__name__}.{name}" for name in (*plugin.ADAPTERS, "indexer", "deepseek_v4", "short", "dense_mla")
    ]
    for name in list(sys.modules):
        if name.partition(".")[0] == "vllm" or name in adapters:
            del sys.modules[name]
