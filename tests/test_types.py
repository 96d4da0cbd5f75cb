"""What type checkers say: of a user's program, of the pages' programs, of wrong calls, and of every public symbol.

They run in a folder outside the checkout and find the package where README's editable install leaves it: by a .pth file
that names the checkout (`tests/test_package.py` sees that one is written).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from .kinds import installed
from .test_docs import python_of

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
cupy_mla.SparseMLAConfig(16, cache_layout="fp16")
cupy_mla.SparseMLAConfig(16, model="v3")
cupy_mla.SparseMLAConfig("16")
"""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the package in it, as an editable install leaves it, and this one's libraries."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "editable.pth").write_text(f"{ROOT}\n{Path(np.__file__).parent.parent}\n")
    return folder / "bin" / "python"


def run(tool: str, *arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A checker, as in a user's folder."""
    command = [sys.executable, "-m", tool, *map(str, arguments)]
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(command, cwd=cwd, env=given | env, capture_output=True, text=True)


def errors_of_pyright(interpreter: Path, folder: Path) -> list[tuple[str, int, str]]:
    """File, line and text of each error in a folder. To basedpyright all that is one to pyright is one, and more."""
    result = run("basedpyright", "--pythonpath", interpreter, "--outputjson", cwd=folder)
    found = [d for d in json.loads(result.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    return [(Path(d["file"]).name, d["range"]["start"]["line"], d["message"]) for d in found]


def errors_of_mypy(interpreter: Path, folder: Path, *options: str) -> list[tuple[str, int, str]]:
    """The same of mypy. It takes torch for untyped: to read it takes 20 s."""
    libraries = "[mypy-torch.*,cupy.*]\nignore_missing_imports = true\nfollow_imports = skip\n"
    (folder / "mypy.ini").write_text(f"[mypy]\npython_executable = {interpreter}\n{libraries}")
    kept = ROOT / ".mypy_cache" / "".join(options)  # of the package's modules, read anew under other options
    result = run("mypy", *options, "--cache-dir", kept, *sorted(p.name for p in folder.glob("*.py")), cwd=folder)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    found = [line.split(":", 2) for line in result.stdout.splitlines() if ": error:" in line]
    return [(name, int(line) - 1, message) for name, line, message in found]


def program_in(folder: Path) -> None:
    (folder / "program.py").write_text("# pyright: strict\n" + PROGRAM.read_text())


def pages_in(folder: Path) -> None:
    """The Python of README and of each page of docs/, as it stands."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        if text := "".join(python_of(page)):
            (folder / f"page_{page.stem.lower()}.py").write_text(text)
    assert len([*folder.glob("*.py")]) > 5


def wrong_calls_in(folder: Path) -> set[int]:
    """The lines of the wrong calls."""
    (folder / "wrong.py").write_text(WRONG_CALLS)
    return {n for n, line in enumerate(WRONG_CALLS.splitlines()) if line.startswith("cupy_mla.")}


def test_the_program_runs() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_mypy
def test_mypy_strict(interpreter: Path, tmp_path: Path) -> None:
    """One run, for it reads the whole package: nothing in a right program, and every wrong call."""
    program_in(tmp_path)
    wrong = wrong_calls_in(tmp_path)
    found = errors_of_mypy(interpreter, tmp_path, "--strict")
    assert [error for error in found if error[0] != "wrong.py"] == []
    assert {line for _, line, _ in found} == wrong


@needs_mypy
def test_pages_in_mypy(interpreter: Path, tmp_path: Path) -> None:
    pages_in(tmp_path)
    assert errors_of_mypy(interpreter, tmp_path, "--check-untyped-defs") == []


@pytest.mark.long
@needs_pyright
def test_pyright(interpreter: Path, tmp_path: Path) -> None:
    """One run, as above."""
    program_in(tmp_path)
    pages_in(tmp_path)
    wrong = wrong_calls_in(tmp_path)
    found = errors_of_pyright(interpreter, tmp_path)
    optional = re.compile('Import "(torch|cupy)" could not be resolved')
    assert [error for error in found if error[0] != "wrong.py" and not optional.match(error[2])] == []
    assert {line for name, line, _ in found if name == "wrong.py"} == wrong


@pytest.mark.long
@needs_pyright
def test_every_public_symbol_has_a_type(tmp_path: Path) -> None:
    """Here pyright reads no .pth file, and of other packages stubs alone: it knows no class of torch's."""
    arguments = ("--pythonpath", sys.executable, "--outputjson", "--verifytypes", "cupy_mla", "--ignoreexternal")
    result = run("basedpyright", *arguments, cwd=tmp_path, PYTHONPATH=str(ROOT))
    symbols = json.loads(result.stdout)["typeCompleteness"]["symbols"]
    of_torch = {"Type of metaclass unknown", "Type of base class unknown"}
    wrong = {
        s["name"]: {d["message"] for d in s["diagnostics"] if d["severity"] == "error"}
        for s in symbols if s["isExported"] and not (s["isTypeKnown"] and not s["isTypeAmbiguous"])
    }  # fmt: skip
    assert len(symbols) > 1000
    assert {name: messages for name, messages in wrong.items() if messages != of_torch} == {}
