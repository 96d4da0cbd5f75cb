"""What type checkers say: of a user's program, of wrong calls, and of every public symbol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .kinds import installed

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "typed_program.py"

needs_pyright = pytest.mark.skipif(not installed("basedpyright"), reason="basedpyright is not installed")
needs_mypy = pytest.mark.skipif(not installed("mypy"), reason="mypy is not installed")

WRONG_CALLS = """
import numpy as np
import cupy_mla
q = np.zeros((1, 1, 4, 576), np.uint16)
i32 = np.zeros((1, 1, 4), np.int32)
cupy_mla.sparse_decode(q, q, i32)  # no scale
cupy_mla.sparse_decode(q, q, i32, None)
cupy_mla.sparse_decode([[1]], q, i32, 0.1)
cupy_mla.sparse_decode(q, q, i32, 0.1, num_splits="4")
cupy_mla.concat_and_cache_mla(q, q, q, i32, scale_format="fp8")
cupy_mla.concat_and_cache_mla(q, q, q, i32, layout="v4_fp8")
cupy_mla.SparseMLAConfig(16, cache_layout="fp8")
cupy_mla.SparseMLAConfig(16, model="v3")
cupy_mla.SparseMLAConfig("16")
"""


def run(tool: str, *arguments: object, cwd: Path, path: str = "PYTHONPATH") -> subprocess.CompletedProcess[str]:
    """A checker, as in a user's folder, which finds the package where it is installed."""
    env = os.environ | {path: str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", tool, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True
    )


def pyright(*arguments: object, cwd: Path) -> dict:
    result = run("basedpyright", "--pythonpath", sys.executable, "--outputjson", *arguments, cwd=cwd)
    return json.loads(result.stdout)


def copied(text: str, folder: Path) -> Path:
    program = folder / "program.py"
    program.write_text(text)
    return program


def test_the_program_runs() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_mypy
def test_mypy_strict(tmp_path: Path) -> None:
    """One run, for it reads the whole package: nothing in a right program, and every wrong call."""
    (tmp_path / "wrong.py").write_text(WRONG_CALLS)
    program = copied(PROGRAM.read_text(), tmp_path)
    kept = ROOT / ".mypy_cache" / "strict"  # of the package's modules
    result = run("mypy", "--strict", "--cache-dir", kept, program, "wrong.py", cwd=tmp_path, path="MYPYPATH")
    found = [line.split(":") for line in result.stdout.splitlines() if ": error:" in line]
    assert not [f for f in found if f[0] == "program.py"], result.stdout
    wrong = {int(number) - 1 for name, number, *_ in found if name == "wrong.py"}
    assert wrong == {n for n, line in enumerate(WRONG_CALLS.splitlines()) if line.startswith("cupy_mla.")}


@needs_pyright
def test_pyright(tmp_path: Path) -> None:
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    found = pyright(copied(PROGRAM.read_text(), tmp_path), cwd=tmp_path)["generalDiagnostics"]
    assert [(d["range"]["start"]["line"] + 1, d["message"]) for d in found if d["severity"] == "error"] == []


@needs_pyright
def test_pyright_finds_wrong_calls(tmp_path: Path) -> None:
    found = pyright(copied(WRONG_CALLS, tmp_path), cwd=tmp_path)["generalDiagnostics"]
    lines = WRONG_CALLS.splitlines()
    wrong = {d["range"]["start"]["line"] for d in found if d["severity"] == "error"}
    assert wrong == {n for n, line in enumerate(lines) if line.startswith("cupy_mla.")}


@needs_pyright
def test_every_public_symbol_has_a_type(tmp_path: Path) -> None:
    report = pyright("--verifytypes", "cupy_mla", "--ignoreexternal", cwd=tmp_path)["typeCompleteness"]
    unknown = {
        s["name"] for s in report["symbols"] if s["isExported"] and not (s["isTypeKnown"] and not s["isTypeAmbiguous"])
    }
    assert len(report["symbols"]) > 1000
    assert unknown == set()
