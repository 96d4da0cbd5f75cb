"""Fixtures: the kind of array a test runs over, random numbers that can be had again, and choices of kernels."""

from __future__ import annotations

import gc
import importlib
import math
import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import hypothesis
import numpy as np
import pytest

import cupy_mla
from cupy_mla.calls.operation import forget_calls

from . import kinds
from .compiled import kernels_hash
from .emulator import emulator
from .fake_gpu import FakeGPU
from .spread import pytest_xdist_setupnodes as pytest_xdist_setupnodes

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
    parser.addoption(
        "--share", type=float, default=1.0, help="of the cases of a test that -m asks for by `long` or `every_arch`"
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    sms = config.getoption("--emulate")
    if sms is not None and sms < 1:
        raise pytest.UsageError(f"--emulate takes a number of SMs from 1 on, got {sms}")
    if not 0 < config.getoption("--share") <= 1:
        raise pytest.UsageError(f"--share takes a number above 0 and up to 1, got {config.getoption('--share')}")
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


OPT_IN = ("every_arch", "long", "contracts")  # marks of what runs only where -m names it
EMULATED = 1  # of the cases of a file in tests/emulator, all of which are `long`
EMULATED_FILES = 0.5  # the part of these files that a run has which does not name the folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes and was not asked for, and all skips of a test but one where there is no GPU.

    Tests that are named by `::` are asked for.
    """
    left_out: set[pytest.Item] = set()
    if not any("::" in argument for argument in config.args):
        left_out.update(_not_asked_for(config, items))
        left_out.update(_emulated_too_long(config, [item for item in items if item not in left_out]))
    if why_no_gpu() and not config.getoption("--emulate"):
        of_gpu = _by_function(item for item in items if item.get_closest_marker("gpu"))
        left_out.update(item for cases in of_gpu.values() for item in cases[1:])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What there is before the first test stays: the garbage collector is not to look at it again and again."""
    gc.collect()
    gc.freeze()


def _not_asked_for(config: pytest.Config, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Tests with a mark of OPT_IN, but for a sample where the mark names its size: `@pytest.mark.long(sample=3)`, or
    `long(part=6)`, one in six. Of those that -m asks for, all but the --share.

    Every process of a run draws the same sample, and so does the next run, whose kernels are then compiled: it is
    another one when the kernels change, or by --seed. Cases on a GPU are never left out.
    """
    for mark in OPT_IN:
        asked = mark in config.getoption("-m")
        share = config.getoption("--share") if mark != "contracts" else 1.0
        if asked and share == 1.0:
            continue
        marked = _by_function(i for i in items if i.get_closest_marker(mark) and not i.get_closest_marker("gpu"))
        for name, cases in marked.items():
            size = math.ceil(share * len(cases)) if asked else max(_sample(case, mark, cases) for case in cases)
            taken = random.Random(f"{_seed(config)} {name}").sample(range(len(cases)), size)
            yield from (case for number, case in enumerate(cases) if number not in taken)


def _emulated_too_long(config: pytest.Config, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of the cases of a file of the emulator that were drawn all but EMULATED, unless -m asks for them, and all of the
    files that are not among EMULATED_FILES."""
    if "long" in config.getoption("-m"):
        return
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name == "emulator" and item.get_closest_marker("long"):
            files.setdefault(item.path.name, []).append(item)
    named = any("emulator" in argument for argument in config.args)
    run = len(files) if named else math.ceil(EMULATED_FILES * len(files))
    kept = random.Random(_seed(config)).sample(sorted(files), run)
    for name, cases in files.items():
        most = EMULATED if name in kept else 0
        taken = random.Random(f"{_seed(config)} {name}").sample(cases, min(most, len(cases)))
        yield from (case for case in cases if case not in taken)


@cache
def _seed(config: pytest.Config) -> int:
    """Of the samples."""
    seed = config.getoption("--seed")
    return kernels_hash() if seed is None else seed


def _sample(case: pytest.Item, mark: str, cases: list[pytest.Item]) -> int:
    """How many of a test's cases the mark of one of them wants."""
    given = case.get_closest_marker(mark).kwargs
    return math.ceil(len(cases) / given["part"]) if "part" in given else min(given.get("sample", 0), len(cases))


def _by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Cases of each test function."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    return importlib.import_module


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


def marks_of(cls: type[kinds.NumPy]) -> list[pytest.MarkDecorator]:
    """Of the tests of a kind. Tensors on the CPU run the code of NumPy's arrays, behind a bridge."""
    if cls.on_gpu:
        return [pytest.mark.gpu]
    return [pytest.mark.long(part=6)] if cls is kinds.Torch else []


@pytest.fixture(scope="session", params=[pytest.param(name, marks=marks_of(cls)) for name, cls in kinds.KINDS.items()])
def kind(request: pytest.FixtureRequest) -> kinds.NumPy:
    """One kind of array after the other."""
    return kinds.make(request.param)


@pytest.fixture(scope="module", autouse=True)
def memory_of_a_gpu() -> Iterator[None]:
    """Of a GPU that several processes of tests share, none keeps what a module's tests have allocated."""
    yield
    if why_no_gpu() is None:
        forget_calls()
        gc.collect()
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


@pytest.fixture
def checked() -> Iterator[None]:
    """Calls check the values of their arguments while the test lasts."""
    with cupy_mla.set_checks(True):
        yield


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
