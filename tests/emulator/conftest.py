"""Fixtures: an emulated Hopper GPU, whose arrays are tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import all_kernels

from ..kinds import Torch
from .emulator import EmulatedGPU, needs_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a kernel are `long`, of each file a plain run has a few; those of the emulator itself all run. All need
    the compiler."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(needs_compiler)
        if item.path.name != "test_machine.py" and not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.long(part=1))


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rng_seed: int) -> Iterator[EmulatedGPU]:
    """An emulated GPU of six SMs, or as many as the test's parameter says. Calls that were
    compiled for another GPU are forgotten before and after."""
    pytest.importorskip("torch")  # whose memory it has
    forget_calls()
    yield EmulatedGPU(monkeypatch, sms=getattr(request, "param", 6), seed=rng_seed)
    forget_calls()


@pytest.fixture
def kind(emulated: EmulatedGPU) -> Torch:
    return Torch()


@pytest.fixture(autouse=True)
def runs_its_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test in a module under a kernel's name launches that kernel."""
    name = request.module.__name__.rpartition(".test_")[2]
    if name not in {kernel.name for kernel in all_kernels()}:
        yield
        return
    emulated = request.getfixturevalue("emulated")
    yield
    assert name in emulated.launched, f"{name} was never launched, only {sorted(emulated.launched)}"
