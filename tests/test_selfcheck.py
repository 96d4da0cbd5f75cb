"""`python -m cupy_mla`: what it says without a GPU, without CuPy and, with a stand-in for the GPU, of what is wrong."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_mla
from cupy_mla import SparseMLAConfig, __main__, checks, selfcheck
from cupy_mla.cuda import all_kernels, jit
from cupy_mla.warmup import warmup

ROOT = Path(cupy_mla.__file__).parents[1]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    whole = os.environ | {"PYTHONPATH": path} | env
    return subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True)


RUN = "import sys; from cupy_mla.__main__ import main; sys.exit(main({}))"


def test_without_cupy():
    result = python("import sys; sys.modules['cupy'] = None; " + RUN.format([]))
    assert result.returncode == selfcheck.NO_GPU, result.stderr
    assert "pip install 'cupy_mla[cuda12]'" in result.stdout
    assert "relative: right" in result.stdout


def test_without_a_gpu():
    result = python(RUN.format(["check"]), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == selfcheck.NO_GPU, result.stderr
    assert "Running on a GPU needs" in result.stdout


def test_warmup_without_a_gpu():
    result = python(RUN.format(["warmup", "--heads", "16"]), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == selfcheck.NO_GPU
    assert "warmup needs" in result.stderr


def test_warmup_of_no_config(capsys):
    assert __main__.main(["warmup", "--heads", "129"]) == selfcheck.WRONG
    assert "num_heads must be in 1..128" in capsys.readouterr().err


def test_every_operation_with_two_twins_is_checked():
    operations = {name: f for name, f in vars(cupy_mla).items() if inspect.isfunction(f) and ".ops." in f.__module__}
    twins = {name for name, f in operations.items() if hasattr(inspect.getmodule(f), "cuda") and name != "plan_splits"}
    assert {case.operation.__name__ for case in checks.cases(np.random.default_rng(0))} == twins


def test_numpy_agrees_with_itself_and_not_with_something_else(rng):
    for case in checks.cases(rng):
        results = case.run(np.asarray)
        assert case.agrees(results, case.run(np.asarray)), case.name
        results[0].reshape(-1).view(np.uint8)[results[0].dtype.itemsize // 2 :: 4] ^= 0x11
        assert not case.agrees(results, case.run(np.asarray)), case.name


class StandIn(SimpleNamespace):
    """NumPy in the place of CuPy, with one GPU of compute capability 9.0."""

    def __init__(self, **more: object) -> None:
        runtime = SimpleNamespace(
            driverGetVersion=lambda: 13000,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda device: {"name": b"stand-in"},
        )
        device = type("Device", (nullcontext,), {"synchronize": lambda self: None})
        names = ("asarray", "zeros", "full", "broadcast_to")
        functions = {name: getattr(np, name) for name in names}
        super().__init__(cuda=SimpleNamespace(runtime=runtime, Device=device), **{**functions, **more})


def check_with(monkeypatch, cupy: StandIn, failure: Exception | None = None) -> int:
    def load(kernel, device):
        if failure and kernel.target:
            raise failure

    monkeypatch.setattr(selfcheck, "require_cupy", lambda why: cupy)
    monkeypatch.setattr(selfcheck, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(selfcheck, "compute_capability", lambda device: 90)
    monkeypatch.setattr(selfcheck, "num_sms", lambda device: 4)
    monkeypatch.setattr(jit.Kernel, "load", load)
    return selfcheck.run()


def test_all_is_well(monkeypatch, capsys):
    assert check_with(monkeypatch, StandIn()) == selfcheck.ALL_WELL
    printed = capsys.readouterr().out
    for kernel in all_kernels():
        assert kernel.file in printed
    assert "WRONG" not in printed


def test_a_kernel_does_not_compile(monkeypatch, capsys):
    assert check_with(monkeypatch, StandIn(), RuntimeError("error: no such thing")) == selfcheck.WRONG
    assert "FAILED: error: no such thing" in capsys.readouterr().out


def test_a_result_is_wrong(monkeypatch, capsys):
    def asarray(array):  # queries of the wrong size
        return array * 2 if array.ndim == 4 and array.shape[-1] == 512 else array

    assert check_with(monkeypatch, StandIn(asarray=asarray)) == selfcheck.WRONG
    printed = capsys.readouterr().out
    assert "WRONG  sparse_decode v4_fp8" in printed
    assert "WRONG  sparse_prefill" not in printed


def test_nvrtc_version():
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs CuPy and NVRTC (extra cuda12 or cuda13)")
    assert float(selfcheck.nvrtc_version()) >= 12


def test_nvrtc_is_missing(monkeypatch, capsys):
    def missing(name):
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")

    monkeypatch.setattr(selfcheck, "require_cupy", lambda why: StandIn())
    monkeypatch.setattr(selfcheck.importlib, "import_module", missing)
    assert selfcheck.run() == selfcheck.NO_GPU
    assert "NVRTC, which compiles the kernels, was not found: pip install" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "d_qk", "more"),
    [
        ("bf16", 576, {}),
        ("v32_fp8", 576, {"num_speculative_tokens": 1}),
        ("v32_fp8", 576, {"mixed_below_heads": 1}),
        ("v4_fp8", 512, {"compress_ratio": 4, "block_size": 12}),
        ("v4_fp8", 512, {"compress_ratio": 128, "block_size": 256}),
    ],
)
def test_warmup_makes_calls_that_are_right(monkeypatch, layout, d_qk, more):
    """Their arguments pass the operations' checks; nothing is compiled."""
    config = SparseMLAConfig(
        3, d_qk, topk=5, cache_layout=layout, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=300, **more
    )
    monkeypatch.setattr("cupy_mla.warmup.require_cupy", lambda why: StandIn())
    before = [kernel for kernel in all_kernels() if kernel.loaded(0)]  # other tests of this process, on a GPU
    assert warmup(config) == before


def test_kernels_suit_generations():
    kernels = {kernel.target: kernel for kernel in all_kernels()}
    assert [c for c in (75, 80, 90, 100, 120) if kernels[None].suits(c)] == [80, 90, 100, 120]
    assert [c for c in (80, 89, 90, 100) if kernels["90a"].suits(c)] == [90]


@pytest.mark.gpu
def test_this_gpu(capsys):
    assert selfcheck.run(0) == selfcheck.ALL_WELL, capsys.readouterr().out


@pytest.mark.gpu
def test_nothing_is_compiled_after_warmup(rng):
    """In a process of its own: what the checks call at a config's heads is ready."""
    code = """
import cupy, numpy as np, cupy_mla
from cupy_mla.warmup import warmup
from cupy_mla.cuda import all_kernels
ready = {repr(k) for k in warmup(cupy_mla.SparseMLAConfig(16, cache_layout="v32_fp8", max_num_seqs=64))}
assert len(ready) < len(all_kernels())
cache = cupy.zeros((4, 64, 656), np.uint8)
for b in (1, 3, 7, 33, 60):
    q = cupy.zeros((b, 1, 16, 576), cupy_mla.layouts.BFLOAT16)
    cupy_mla.sparse_decode(q, cache, cupy.zeros((b, 1, 2048), np.int32))
assert {repr(k) for k in all_kernels() if k.loaded(0)} == ready
"""
    result = python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
def test_eight_processes_at_once(tmp_path):
    """They share an empty cache, and all of them compile and compute."""
    code = """
import numpy as np, cupy_mla
from cupy_mla import checks, layouts
import cupy
for case in checks.cases(np.random.default_rng(0), (layouts.V32_FP8,), many=160):
    assert case.agrees(case.run(cupy.asarray), case.run(np.asarray)), case.name
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": str(tmp_path / "cache")}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) for _ in range(8)]
    failures = [process.communicate()[1].decode() for process in running if process.wait()]
    assert not failures, failures[0]
    assert list((tmp_path / "cache").glob("*.cubin"))
