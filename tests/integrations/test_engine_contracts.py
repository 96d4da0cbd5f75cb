"""The plug-in's adapters against the engines' wheels: what they need stands in the Python files, which are read, and
vLLM's own classes take our attention and indexer over several steps (`wheel_vllm`).

Tests with the mark `contracts` take the Python files of wheels from the folder that CUPY_MLA_ENGINE_WHEELS names, into
which `python -m tests.integrations.wheels FOLDER` fetches them. They are skipped where these are not there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import megatron, sglang
from cupy_mla.integrations import vllm as plugin
from cupy_mla.integrations.contract import definitions, missing
from tests.integrations import ranks, wheels
from tests.integrations.wheels import NEWEST, SERVED, NotFetchedError, python_files

of_vllm = pytest.mark.parametrize("version", SERVED["vllm"])


def unpacked(package: str, version: str | None = None) -> Path:
    """A folder with the package's Python files, of the newest version. The test is skipped where they are not there."""
    try:
        return python_files(package, version or NEWEST[package])
    except NotFetchedError as error:
        pytest.skip(str(error))


@pytest.mark.contracts
@of_vllm
def test_vllm(caplog, version: str) -> None:
    package = unpacked("vllm", version) / "vllm"
    assert plugin.is_served(package)
    assert missing(package, plugin.DENSE_MLA) == []
    assert missing(package, plugin.DEEPSEEK_V4) == []
    assert missing(package, plugin.DEEPSEEK_V41) == []
    assert caplog.records == []


@pytest.mark.contracts
@of_vllm
def test_steps_by_the_classes_of_the_wheel(rng_seed, version: str) -> None:
    """vLLM's builders and impl bases around our attention and indexer, on the CPU, in a process of their own."""
    pytest.importorskip("transformers", reason="transformers is not installed, which vLLM imports")
    command = [sys.executable, "-m", "tests.integrations.wheel_vllm", unpacked("vllm", version), str(rng_seed)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("steps of two layers and their indexer") == 3
    assert result.stdout.count("two ranks that share rows") == 2
    assert result.stdout.count("steps of DeepSeek-V4's layers") == 3
    assert result.stdout.count("registered by") == 2
    assert "bytes of the fused kernels below 8.9" in result.stdout
    assert "what stands in for TileLang and CuTe DSL" in result.stdout
    assert result.stdout.count("DeepSeek-V4's layers") == 3
    assert result.stdout.count("steps of DeepSeek-V4.1's layers") == 2
    assert "a draft model's layer" in result.stdout


@pytest.mark.contracts
def test_ranks_that_share_rows(rng_seed) -> None:
    """Two processes: the newest vLLM's layer, indexer and merge around our attention, and the benchmark's stand-ins."""
    pytest.importorskip("transformers", reason="transformers is not installed, which vLLM imports")
    result = ranks.start(2, "-m", "tests.integrations.wheel_ranks", str(unpacked("vllm")), str(rng_seed))
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert result.stdout.count(f"rank {rank}: 9 steps over every other") == 4


@pytest.mark.contracts
def test_sglang() -> None:
    package = unpacked("sglang") / "sglang"
    assert missing(package, sglang.NEEDS) == missing(package, sglang.V4_NEEDS) == []


@pytest.mark.contracts
def test_deepseek_v4_in_sglang() -> None:
    """Each keyword with which V4's backend calls FlashMLA is one of our function's, or of those that it ignores."""
    path = unpacked("sglang").joinpath("sglang", "srt", "layers", "attention", "deepseek_v4_backend.py")
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if ast.unparse(node.func) == "flash_mla_with_kvcache"]
    ours = importlib.import_module(f"{sglang.__name__}.deepseek_v4").flash_mla_with_kvcache
    bound = inspect.signature(ours).bind("v4_fp8", *call.args, **dict.fromkeys(each.arg for each in call.keywords))
    ignored = {"head_dim_v", "block_table", "cache_seqlens", "tile_scheduler_metadata", "is_fp8_kvcache"}
    assert bound.arguments["schedule"].keys() == ignored


@pytest.mark.contracts
def test_steps_by_sglangs_classes(rng_seed) -> None:
    """Its hooks, backends, metadata, indexer and pools around our functions, on the CPU, in a process of their own."""
    pytest.importorskip("transformers", reason="transformers is not installed, which SGLang imports")
    command = [sys.executable, "-m", "tests.integrations.wheel_sglang", unpacked("sglang"), str(rng_seed)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "6 hooks registered and applied" in result.stdout
    assert result.stdout.count("8 steps of a layer and its indexer") == 6
    assert result.stdout.count("4 steps with a graph's metadata") == 2
    assert result.stdout.count("kinds of layers") == 4


@pytest.mark.contracts
@pytest.mark.parametrize("backend", megatron.BACKENDS)
def test_megatron(backend: str) -> None:
    """It has what `install` needs, and each call that it makes of a hook fits our function's named parameters."""
    package = unpacked("megatron_core") / "megatron" / "core"
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


def test_the_python_files_of_a_wheel(tmp_path: Path) -> None:
    """And its name and version; nothing else takes room."""
    with zipfile.ZipFile(tmp_path / "a-1.whl", "w") as archive:
        for name in ("a/b.py", "a/c.so", "a-1.dist-info/METADATA", "a-1.dist-info/RECORD"):
            archive.writestr(name, name)
    wheels.unpack(tmp_path / "a-1.whl", tmp_path / "a-1-python")
    files = [path for path in (tmp_path / "a-1-python").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "a-1-python")) for path in files} == {"a/b.py", "a-1.dist-info/METADATA"}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("pip", "why"),
    [
        ("import time; time.sleep(60)", "not fetched within 1 s"),
        ("exit('no such wheel')", "pip cannot fetch it: no such wheel"),
    ],
)
def test_what_pip_cannot_fetch_is_said(tmp_path: Path, monkeypatch, pip: str, why: str) -> None:
    """And the time that it may take ends; tests that need it are skipped."""
    (tmp_path / "pip.py").write_text(pip)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(wheels.VARIABLE, str(tmp_path))
    with pytest.raises(NotFetchedError, match=why):
        wheels.fetch(tmp_path, "vllm", "0.33.0", seconds=1)
    with pytest.raises(NotFetchedError, match=r"^vllm 0\.33\.0 is not in"):
        python_files("vllm", "0.33.0")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"__pycache__"}  # of `pip.py`


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
