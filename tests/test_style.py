"""The linters' verdict on the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("arguments", [["ruff", "check", "."], ["mypy"]], ids=["ruff", "mypy"])
def test_no_complaints(arguments: list[str]) -> None:
    pytest.importorskip(arguments[0], reason=f"{arguments[0]} is not installed")
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
