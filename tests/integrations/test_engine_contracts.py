"""The plug-in's adapters against the engines' wheels: what they need stands in the Python files, which are read, and
vLLM's own classes take our attention and indexer over several steps (`wheel_vllm`).

Wheels are large: tests with the mark `contracts` are skipped unless CUPY_MLA_ENGINE_WHEELS names a folder, into which
wheels that it lacks are downloaded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import megatron, sglang
from cupy_mla.integrations import vllm as plugin
from cupy_mla.integrations.contract import definitions, missing

PLATFORMS = {
    "vllm": ["manylinux_2_28_x86_64"], "sglang": ["manylinux_2_34_x86_64"],
    "megatron_core": ["manylinux_2_28_x86_64", "--python-version", "3.12"],
}  # fmt: skip
FOLDER = os.environ.get("CUPY_MLA_ENGINE_WHEELS")


def wheel(package: str, version: str) -> Path:
    """The package's wheel; the test is skipped where none is asked for, or pip cannot fetch it."""
    if not FOLDER:
        pytest.skip(f"CUPY_MLA_ENGINE_WHEELS names no folder for the wheel of {package} {version}")
    pattern = f"{package}-{version}-*.whl"
    if not list(Path(FOLDER).glob(pattern)):
        download = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--platform", *PLATFORMS[package]]
        fetched = subprocess.run(
            [sys.executable, "-m", *download, "-d", FOLDER, f"{package}=={version}"], capture_output=True, text=True
        )
        if fetched.returncode:
            pytest.skip(f"pip cannot fetch {package} {version}: {fetched.stderr.strip().splitlines()[-1]}")
    (found,) = Path(FOLDER).glob(pattern)
    return found


def sources(package: str, version: str, folder: str = "") -> zipfile.Path:
    """The package's folder in its wheel, which has its name unless `folder` says otherwise."""
    return zipfile.Path(wheel(package, version), f"{folder or package}/")


def unpacked(package: str, version: str) -> Path:
    """A folder with the Python files of the package, beside its wheel."""
    path = wheel(package, version)
    folder = path.parent / f"{package}-{version}-python"
    if not folder.exists():
        with zipfile.ZipFile(path) as archive, TemporaryDirectory(dir=path.parent) as whole:
            archive.extractall(whole, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
            Path(whole).rename(folder)
            Path(whole).mkdir()  # which is removed
    return folder


@pytest.mark.contracts
@pytest.mark.parametrize(
    ("version", "adapter"), [("0.22.1", "sparse_mla"), ("0.23.0", "sparse_mla"), ("0.33.0", "sparse_mla_common")]
)
def test_vllm(caplog, version: str, adapter: str) -> None:
    package = sources("vllm", version)
    assert missing(package, plugin.ADAPTERS[adapter]) == []
    assert plugin.adapter(package) == adapter
    assert plugin.has_dense_mla(package)
    assert caplog.records == []


@pytest.mark.contracts
@pytest.mark.parametrize("version", ["0.22.1", "0.23.0", "0.33.0"])
def test_deepseek_v4_in_vllm(caplog, vllm, version: str) -> None:
    """Each call that V4's layers make of a function that is replaced fits our function's parameters."""
    package = sources("vllm", version)
    assert plugin.has_deepseek_v4(package)
    assert caplog.records == []
    ours = importlib.import_module(f"{plugin.__name__}.deepseek_v4").OURS
    tree = ast.parse(package.joinpath("models", "deepseek_v4", "nvidia", "flashmla.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    called = {node.func.id: node for node in calls if node.func.id in ours}
    assert called.keys() == ours.keys()
    for node in calls:
        if node.func.id in ours:
            keywords = dict.fromkeys(keyword.arg for keyword in node.keywords)
            inspect.signature(ours[node.func.id]).bind(*node.args, **keywords)


@pytest.mark.contracts
@pytest.mark.parametrize("version", ["0.22.1", "0.23.0", "0.33.0"])
def test_steps_by_the_classes_of_the_wheel(rng_seed, version: str) -> None:
    """vLLM's builders and impl bases around our attention and indexer, on the CPU, in a process of their own."""
    pytest.importorskip("transformers", reason="transformers is not installed, which vLLM imports")
    command = [sys.executable, "-m", "tests.integrations.wheel_vllm", unpacked("vllm", version), version, str(rng_seed)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("steps of two layers") == 3
    assert result.stdout.count("two ranks that share rows") == (2 if version == "0.33.0" else 0)


@pytest.mark.contracts
def test_sglang() -> None:
    assert missing(sources("sglang", "0.5.23"), sglang.NEEDS) == []


@pytest.mark.contracts
@pytest.mark.parametrize("backend", megatron.BACKENDS)
def test_megatron(backend: str) -> None:
    """It has what `install` needs, and each call that it makes of a hook fits our function's named parameters."""
    package = sources("megatron_core", "0.19.2", "megatron/core")
    assert missing(package, megatron.needs(backend)) == []
    kernels = package.joinpath(*f"{megatron.KERNELS.replace('.', '/')}.py".split("/"))
    hooks = {
        node.name: [call for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call.func) == "fn"]
        for node in ast.parse(kernels.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("run_fused_")
    }
    assert hooks.keys() == {name for name in megatron.__all__ if name != "install"}
    for name, calls in hooks.items():
        assert calls
        for call in calls:
            keywords = dict.fromkeys(keyword.arg for keyword in call.keywords)
            bound = inspect.signature(getattr(megatron, name)).bind(*call.args, **keywords)
            assert bound.arguments.get("others", {}).keys() <= megatron.LAYOUT


def test_what_a_module_defines() -> None:
    found = definitions(
        "import a.b\nfrom c import d as e\nX: int = 1\nif X:\n    def f(x, /, y, *, z): ...\n"
        "try:\n    Y, Z = 1, 2\nexcept E:\n    Q = 1\n"
        "class C(B):\n    v: int\n    class D:\n        w = 1\n    def m(self, x):\n        self.s, other.t = x\n"
        "@dataclasses.dataclass(frozen=True)\nclass F:\n    a: int\n    b: int = 1\n    c: int\n"
    )
    assert found == {
        "a.b": None, "e": None, "X": None, "f": ["x", "y", "z"], "Y": None, "Z": None, "Q": None, "C": None,
        "C.v": None, "C.D": None, "C.D.w": None, "C.m": ["self", "x"], "C.s": None,
        "F": ("a", "c"), "F.a": None, "F.b": None, "F.c": None,
    }  # fmt: skip


def test_needs_that_are_not_met(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text(
        "class C:\n    def m(self, x, y): ...\nN = 1\n@dataclass\nclass D:\n    a: int\n    b: int\n"
    )
    of_p = ("C.m(self, x)", "C.m(self, y)", "C.n", "N", "N()", "C.m(self, x, y, z)", "D(a, b)", "D(a)", "D.b")
    needs = {"p": of_p, "q.r": ("A",)}
    assert missing(tmp_path, needs) == [
        "p: C.m(self, y)", "p: C.n", "p: N()", "p: C.m(self, x, y, z)", "p: D(a)", "module q.r",
    ]  # fmt: skip


def test_the_nearest_adapter_is_named(tmp_path: Path, caplog, monkeypatch) -> None:
    """Of several that do not fit, the one that lacks least."""
    (tmp_path / "a.py").write_text("X = 1\n")
    monkeypatch.setattr(plugin, "ADAPTERS", {"far": {"a": ("P", "Q", "X")}, "near": {"a": ("X", "Y")}})
    with caplog.at_level(logging.WARNING):
        assert plugin.adapter(tmp_path) is None
    assert caplog.records[0].getMessage().endswith("Missing: a: Y")
