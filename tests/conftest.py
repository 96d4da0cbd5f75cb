"""Fixtures: the kind of array a test runs over, random numbers that can be had again, and choices of kernels."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator
from functools import cache

import hypothesis
import numpy as np
import pytest

import cupy_mla
from cupy_mla.calls.operation import forget_calls

from . import kinds
from .emulator import emulator
from .fake_gpu import FakeGPU

hypothesis.settings.register_profile(
    "cupy_mla", deadline=None, max_examples=25, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("cupy_mla")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the `rng` fixture (default: a fresh one a test)")
    parser.addoption(
        "--emulate", type=int, default=None, metavar="SMS",
        help="run the tests of kernels for Hopper on the CPU: tests/emulator, with so many SMs",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    sms = config.getoption("--emulate")
    if sms is not None and sms < 1:
        raise pytest.UsageError(f"--emulate takes a number of SMs from 1 on, got {sms}")
    lacking = None if sms is None else emulator.why_not()
    if lacking:
        raise pytest.UsageError(f"--emulate: {lacking}")


@cache
def why_no_gpu() -> str | None:
    return None if cupy_mla.cuda_available() else "needs CuPy and an NVIDIA GPU"


def pytest_runtest_setup(item: pytest.Item) -> None:
    emulated = item.config.getoption("--emulate") and "hopper_gpu" in getattr(item, "fixturenames", ())
    if item.get_closest_marker("gpu") and why_no_gpu() and not emulated:
        pytest.skip(why_no_gpu())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes and was not asked for: `-m every_arch`."""
    if "every_arch" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("every_arch")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture
def rng_seed(request: pytest.FixtureRequest) -> int:
    """A fresh random number; pytest shows that of a test that fails."""
    seed = request.config.getoption("--seed")
    seed = secrets.randbits(32) if seed is None else seed
    print(f"rng: pytest --seed={seed}")
    return seed


@pytest.fixture
def rng(rng_seed: int) -> np.random.Generator:
    """Fresh random numbers."""
    return np.random.default_rng(rng_seed)


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.gpu] if cls.on_gpu else []) for name, cls in kinds.KINDS.items()],
)
def kind(request: pytest.FixtureRequest) -> kinds.NumPy:
    """One kind of array after the other."""
    return kinds.make(request.param)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """One that is none. Calls that were compiled for other GPUs are forgotten, and afterwards those for this one."""
    pytest.importorskip("torch")  # whose memory it has
    forget_calls()
    fake = FakeGPU(monkeypatch)
    yield fake
    forget_calls()
    if fake.graphs.made:  # they are destroyed by the stand-in's driver
        gc.collect()


@pytest.fixture
def force() -> Iterator[type[cupy_mla.forced]]:
    """`cupy_mla.forced`, whose last call holds until the test ends."""
    with cupy_mla.forced():
        yield cupy_mla.forced
