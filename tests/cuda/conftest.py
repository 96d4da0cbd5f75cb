"""What the tests of the kernels share: which ones were launched, and calls that are to run one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cupy_mla.calls.graph import LaunchGraph
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda.attention.choose import VARIABLE
from cupy_mla.cuda.kernel import Kernel

from ..emulator.emulator import EmulatedGPU
from ..kinds import CuPy, NumPy, Torch


@pytest.fixture
def launched(monkeypatch) -> Iterator[set[str]]:
    """The names of the kernels that were launched since the test began, alone or in a graph of launches."""
    names: set[str] = set()
    submitter, run_graph = Kernel.submitter, LaunchGraph.__call__

    def noting_submitter(kernel, device):
        submit = submitter(kernel, device)

        def noting_submit(*launch):
            names.add(kernel.name)
            submit(*launch)

        return noting_submit

    def noting_graph(graph, *launches):
        ran = run_graph(graph, *launches)
        if ran:  # otherwise the call launches them one by one
            names.update(kernel.name for kernel in graph.kernels)
        return ran

    monkeypatch.setattr(Kernel, "submitter", noting_submitter)
    monkeypatch.setattr(LaunchGraph, "__call__", noting_graph)
    forget_calls()  # compiled calls hold the submitters that they were compiled with
    yield names
    forget_calls()


class TorchEmulated(Torch):
    """Tensors on the CPU that an emulated GPU works on. What a GPU has beside, as streams, skips the test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        pytest.skip(f"needs an NVIDIA GPU: the emulated one has no `{name}`")


@pytest.fixture
def hopper_gpu(request, monkeypatch) -> NumPy:
    """CuPy arrays on a Hopper GPU, whose calls choose their kernels. With --emulate tensors on an emulated one."""
    emulated_sms = request.config.getoption("--emulate")
    if emulated_sms:
        pytest.importorskip("torch")
        EmulatedGPU(monkeypatch, emulated_sms, seed=request.getfixturevalue("rng_seed"))
        monkeypatch.delenv(VARIABLE, raising=False)
        return TorchEmulated()
    kind = CuPy()
    if kind.cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs a Hopper GPU")
    monkeypatch.delenv(VARIABLE, raising=False)
    return kind


@pytest.fixture
def two_gpus(request) -> None:
    """Skips the test where there is one GPU. It stands before `hopper`, which fails a test that launches nothing."""
    if request.config.getoption("--emulate") or CuPy().cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture
def hopper(request, hopper_gpu, launched, monkeypatch) -> Iterator[NumPy]:
    """CuPy arrays on a Hopper GPU, whose calls are to run the kernel that the test's module names in KERNEL.

    A test that wants another one says so: `@pytest.mark.parametrize("hopper", ["fp8_sm90"], indirect=True)`. A test
    that never launched the kernel fails.
    """
    kernel = getattr(request, "param", None) or request.module.KERNEL
    monkeypatch.setenv(VARIABLE, kernel)
    yield hopper_gpu
    if request.config.getoption("--emulate") and not launched:
        return  # a test that asks for a GPU itself, and was skipped
    assert kernel in launched, f"{kernel} was never launched, only {sorted(launched)}"
