"""The calls of the self-check, and when two runs agree."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

import cupy_mla
from cupy_mla.selfcheck.cases import cases, float64_error

from .stand_in import ROOT


def test_every_operation_with_two_twins_is_checked():
    operations = {name: f for name, f in vars(cupy_mla).items() if inspect.isfunction(f) and ".ops." in f.__module__}
    twins = {name for name, f in operations.items() if hasattr(inspect.getmodule(f), "cuda")}
    assert {case.operation.name for case in cases(np.random.default_rng(0))} == twins - {
        "empty_cache",
        "plan_splits",
    }  # which have none


def test_numpy_agrees_with_itself_and_not_with_something_else(rng):
    for case in cases(rng):
        results, again = [result.copy() for result in case.run(np.asarray)], case.run(np.asarray)
        assert case.agrees(results, again), case.name
        top_bytes = results[0].reshape(-1).view(np.uint8)[results[0].dtype.itemsize - 1 :: 4]
        top_bytes ^= 0x5A  # the exponent's highest bit among them: zeros become large as well
        assert not case.agrees(results, again), case.name


def test_float64_error(rng):
    """That of results rounded to bf16."""
    assert 1e-4 < float64_error(rng) < 4e-3


@pytest.mark.gpu
def test_eight_processes_at_once(tmp_path):
    """They share an empty cache, and all of them compile and compute."""
    code = """
import numpy as np
from cupy_mla import layouts, to_cupy
from cupy_mla.ops.table import Wanted
from cupy_mla.selfcheck.cases import cases
for case in cases(np.random.default_rng(0), Wanted((layouts.V32_FP8,), many=160)):
    assert case.agrees(case.run(to_cupy), case.run(np.asarray)), case.name
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": str(tmp_path / "cache")}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE) for _ in range(8)]
    failures = [process.communicate()[1].decode() for process in running if process.wait()]
    assert not failures, failures[0]
    assert list((tmp_path / "cache").glob("*.cubin"))
