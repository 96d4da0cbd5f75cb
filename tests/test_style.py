"""The linters' verdict on the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "arguments", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_no_complaints(arguments: list[str]) -> None:
    pytest.importorskip(arguments[0], reason=f"{arguments[0]} is not installed")
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_kernels_and_their_emulator_are_formatted() -> None:
    clang_format = pytest.importorskip("clang_format", reason="clang-format is not installed")
    if not (ROOT / ".clang-format").is_file():
        pytest.skip("no .clang-format")
    folders = (ROOT / "kernels_cu", ROOT / "tests" / "emulator")
    sources = sorted(p for f in folders for p in f.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp"))
    command = [clang_format.get_executable("clang-format"), "--dry-run", "--Werror", *map(str, sources)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:5000]
