"""Fixtures: an emulated Hopper GPU, whose arrays are tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupy_mla.calls.operation import forget_calls

from ..kinds import Torch
from .emulator import EmulatedGPU


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
