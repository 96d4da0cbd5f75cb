"""The examples and the README's programs run as they stand, and the README's commands are what CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .kinds import installed

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = dict(re.findall(r"^From (NumPy|CuPy|torch)[^`]*```python\n(.*?)```", README, re.S | re.M))
COMMANDS = re.findall(r"```bash\n(.*?)```", README, re.S)

needs_transformers = pytest.mark.skipif(
    not (installed("torch") and installed("transformers")), reason="torch or transformers is not installed"
)


def python(*arguments: str) -> str:
    """What a fresh interpreter prints that finds this checkout; fails with what it complained of."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_WAIT_POLICY": "passive",  # torch's threads spin otherwise, which takes minutes on a busy machine
    }
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_quickstart() -> None:
    printed = python("examples/01_quickstart.py")
    for operation in ("decode", "prefill"):
        assert re.search(rf"^{operation} .* queries x 128 heads x 2048 .* ms  ", printed, re.M)
    assert printed.endswith("within the tolerances\n")


@needs_transformers
def test_transformers_deepseek_v32() -> None:
    printed = python("examples/02_transformers_deepseek_v32.py", "--prompt", "300", "--new", "4")
    assert re.search(r"README\.md: 300 bytes prefilled, 4 decoded", printed)
    for part in ("prefill", "decode"):
        for cache in ("bf16", "FP8"):
            assert len(re.findall(rf"^  {part} +ours, {cache} cache( +[\d.]+%?){{6}}$", printed, re.M)) == 2
    assert len(re.findall(r"^  ours, FP8 cache +(\d+\*? *){4}$", printed, re.M)) == 2
    assert re.search(r"\(at most 1\.25\): agrees$", printed, re.M)


@needs_transformers
def test_transformers_deepseek_v32_fails_where_it_disagrees(tmp_path: Path) -> None:
    """With FP8 rows in the place of bf16 ones the difference is beyond the bound."""
    program = (ROOT / "examples/02_transformers_deepseek_v32.py").read_text()
    spoilt = program.replace('"ours, bf16 cache": "bf16"', '"ours, bf16 cache": "v32_fp8"')
    assert spoilt != program
    (tmp_path / "spoilt.py").write_text(spoilt)
    with pytest.raises(AssertionError, match="DISAGREES"):
        python(str(tmp_path / "spoilt.py"), "--prompt", "300", "--new", "4", "--text", "README.md")


@pytest.mark.parametrize(
    ("library", "shapes"),
    [
        ("NumPy", "(4, 1, 16, 512) (4, 16, 1)"),
        pytest.param("torch", "(4, 1, 16, 512) (4, 16, 1)", marks=needs_transformers),
        pytest.param("CuPy", "(128, 64, 512) (128, 64)", marks=pytest.mark.gpu),
    ],
)
def test_readme_program(library: str, shapes: str) -> None:
    assert python("-c", PROGRAMS[library] + "print(tuple(out.shape), tuple(lse.shape))").strip() == shapes


def test_ci_runs_the_readmes_test_command() -> None:
    shown = subprocess.run(["bash", ROOT / ".ci" / "run", "--show"], check=True, capture_output=True, text=True).stdout
    assert len(COMMANDS) == 2
    assert shown == COMMANDS[1]
    assert shown.endswith("-m pytest -n 2\n")
