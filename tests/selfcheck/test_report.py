"""`python -m cupy_mla`: what it says without a GPU, without CuPy and, with a stand-in for the GPU, of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cupy_mla import __main__, bridges
from cupy_mla.cuda import all_kernels
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.ops.table import OPERATIONS
from cupy_mla.selfcheck import report

from ..kinds import BF16
from .stand_in import RUN, StandIn, python


def test_without_cupy():
    result = python("import sys; sys.modules['cupy'] = None; " + RUN.format([]))
    assert result.returncode == report.NO_GPU, result.stderr
    assert "pip install '.[cuda12]'" in result.stdout
    assert "relative: right" in result.stdout


@pytest.mark.long
def test_without_a_gpu():
    result = python(RUN.format(["check"]), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == report.NO_GPU, result.stderr
    assert "Running on a GPU needs" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--verbose"], ["check", "--verbose"], ["--verbose", "check"]], ids=" ".join)
def test_verbose_names_every_call(arguments):
    """As docs/README.md says, with the command's name or without it."""
    quiet, verbose = (python(RUN.format(a), CUDA_VISIBLE_DEVICES="").stdout for a in ([], arguments))
    for operation in OPERATIONS:
        assert f"\n  {operation}" not in quiet
        assert f"\n  {operation}" in verbose


def check_with(monkeypatch, cupy: StandIn, failure: Exception | None = None, arguments: Sequence[str] = ()) -> int:
    def load(kernel, device):
        if failure and kernel.target:
            raise failure

    for module in (report, bridges):
        monkeypatch.setattr(module, "require_cupy", lambda why: cupy)
    monkeypatch.setattr(report, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(report, "gpu", lambda device: Gpu(device, 4, 90, 227))
    monkeypatch.setattr(Kernel, "load", load)
    return __main__.main(arguments)


@pytest.mark.long
def test_all_is_well(monkeypatch, capsys):
    assert check_with(monkeypatch, StandIn()) == report.ALL_WELL
    printed = capsys.readouterr().out
    for kernel in all_kernels():
        assert kernel.file in printed
    assert "WRONG" not in printed


@pytest.mark.parametrize("device", [1, -1])
def test_a_gpu_that_is_not_there(monkeypatch, capsys, device):
    assert check_with(monkeypatch, StandIn(), arguments=[f"--device={device}"]) == report.WRONG
    assert f"no GPU {device}: this machine has 1, counted from 0" in capsys.readouterr().out


@pytest.mark.long
def test_verbose_names_every_kernel(monkeypatch, capsys):
    check_with(monkeypatch, StandIn(), arguments=["--verbose"])
    printed = capsys.readouterr().out
    assert all(repr(kernel) in printed for kernel in all_kernels() if kernel.suits(90))


def test_a_kernel_does_not_compile(monkeypatch, capsys):
    assert check_with(monkeypatch, StandIn(), RuntimeError("error: no such thing")) == report.WRONG
    assert "FAILED: error: no such thing" in capsys.readouterr().out


def test_a_result_is_wrong(monkeypatch, capsys):
    def asarray(array):  # queries of the wrong size; bfloat16 comes as int16
        wrong = array.dtype == np.int16 and array.ndim == 4 and array.shape[-1] == 512
        return (array.view(BF16) * 2).view(array.dtype) if wrong else array

    assert check_with(monkeypatch, StandIn(asarray=asarray)) == report.WRONG
    printed = capsys.readouterr().out
    assert "WRONG  sparse_decode v4_fp8" in printed
    assert "WRONG  sparse_prefill" not in printed


def test_nvrtc_version():
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs CuPy and NVRTC (extra cuda12 or cuda13)")
    assert float(report.nvrtc_version()) >= 12


@pytest.mark.long
def test_nvrtc_is_missing(monkeypatch, capsys):
    def missing(name):
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")

    monkeypatch.setattr(report, "require_cupy", lambda why: StandIn())
    monkeypatch.setattr(report.importlib, "import_module", missing)
    assert report.run() == report.NO_GPU
    assert (
        "NVRTC, which compiles the kernels, was not found: in a checkout of cupy_mla, pip install"
        in capsys.readouterr().out
    )


def test_kernels_suit_generations():
    kernels = {(kernel.target, kernel.archs[0]): kernel for kernel in all_kernels()}
    assert [c for c in (75, 80, 90, 100, 120) if kernels[None, "80"].suits(c)] == [80, 90, 100, 120]
    assert [c for c in (80, 89, 90, 100) if kernels[None, "90"].suits(c)] == [90, 100]
    assert [c for c in (80, 89, 90, 100) if kernels["90a", "90a"].suits(c)] == [90]


@pytest.mark.gpu
def test_this_gpu(capsys):
    assert report.run(0) == report.ALL_WELL, capsys.readouterr().out
