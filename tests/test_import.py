"""Importing cupy_mla is cheap and pulls in neither CuPy nor torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_mla

ROOT = Path(cupy_mla.__file__).parents[1]


def run(code: str) -> str:
    """What a fresh interpreter prints that finds the same cupy_mla."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


LOADED = """
import sys, numpy, ml_dtypes
before = set(sys.modules)
import cupy_mla
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """The modules that `import cupy_mla` loads beside NumPy's and ml_dtypes'."""
    return run(LOADED).split()


def test_import_takes_no_other_library(loaded):
    """Neither CuPy nor torch, above all."""
    others = {name.partition(".")[0] for name in loaded} - {"cupy_mla"}
    assert others <= set(sys.stdlib_module_names)


def test_import_takes_little(loaded):
    """Modules are counted, not seconds, of which a busy machine takes more: these take about a tenth of a second."""
    ours = [name for name in loaded if name.partition(".")[0] == "cupy_mla"]
    assert len(ours) < 140
    assert len(loaded) - len(ours) < 25
    assert not {"asyncio", "concurrent", "multiprocessing", "sqlite3", "unittest"} & set(loaded)


def test_numpy_calls_work_where_cupy_and_torch_are_missing():
    """None in sys.modules makes an import fail as if the library were not installed."""
    code = """
import sys
sys.modules["cupy"] = sys.modules["torch"] = None
import numpy as np, cupy_mla
from cupy_mla.dtypes import BFLOAT16
q, kv = np.ones((1, 2, 512), BFLOAT16), np.ones((3, 1, 512), BFLOAT16)
out, _, lse = cupy_mla.sparse_prefill(q, kv, np.zeros((1, 1, 4), np.int32), 1 / 512)
assert (out == 1).all() and not cupy_mla.cuda_available()
print(round(float(lse[0, 0]), 4))
"""
    assert run(code).strip() == "2.3863"  # 1 + log 4


def test_every_public_name_is_there():
    assert all(hasattr(cupy_mla, name) for name in cupy_mla.__all__)
    assert sorted(cupy_mla.__all__) == cupy_mla.__all__
