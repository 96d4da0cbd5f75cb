"""The serving example runs as it stands, on both caches, and fails where attention or indexer do not agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "examples" / "03_serve_batch.py"

pytest.importorskip("rich", reason="rich is not installed")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(program), *arguments], env=env, capture_output=True, text=True)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "bf16"])
def test_serve_batch(cache: str) -> None:
    result = run(PROGRAM, "--cache", cache, "--requests", "7")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"served +│ 7 requests in \d+ steps", result.stdout)
    assert re.search(r"speed +│ \d+ tokens/s", result.stdout)
    assert re.search(r"cache use +│ \d+% at most", result.stdout)
    assert "within the tolerances" in result.stdout
    done = re.findall(r"(\d+)/(\d+)", result.stdout)
    assert len(done) == 2
    assert all(a == b for a, b in done)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    ("what", "instead"),
    [("self.cache, metadata, topk_indices)", "self.cache, metadata, topk_indices // 2)"),
     ("forward(keys, q8, w,", "forward(keys, q8, -w,")],
    ids=["attention", "indexer"],
)  # fmt: skip
def test_it_fails_where_something_is_wrong(tmp_path: Path, what: str, instead: str) -> None:
    """Attention over other rows than the chosen ones, and a choice by other logits, are noticed."""
    program = PROGRAM.read_text()
    assert program.count(what) == 1
    (tmp_path / "spoilt.py").write_text(program.replace(what, instead))
    result = run(tmp_path / "spoilt.py", "--requests", "4")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "OUT OF THE TOLERANCES" in result.stdout
