"""What a plain run leaves out, and what the marks of `.ci/run` run: together all tests."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SWEEP = "tests/emulator/test_portable.py"


@cache
def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.long
def test_a_plain_run_takes_a_sample_of_what_a_mark_runs_whole() -> None:
    sample, whole = collected(SWEEP), collected(SWEEP, "-m", "long")
    assert set(sample) < set(whole)
    assert len(sample) <= len(whole) / 10
    assert {name.partition("[")[0] for name in sample} == {name.partition("[")[0] for name in whole}


def test_ci_runs_every_mark_that_is_left_out() -> None:
    (marks,) = re.findall(r"-m \"([^\"]*)\"", (ROOT / ".ci" / "run").read_text())
    declared = set(re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.M))
    assert set(marks.split(" or ")) == declared - {"gpu"}


@pytest.mark.long
def test_a_share_of_a_mark_is_drawn_by_the_seed() -> None:
    """Of each function at least one case; with another seed other ones."""
    whole = set(collected(SWEEP, "-m", "long"))
    first, other = (set(collected(SWEEP, "-m", "long", "--share=0.3", f"--seed={n}")) for n in (1, 2))
    assert first != other
    for share in (first, other):
        assert share < whole
        assert 0.3 <= len(share) / len(whole) <= 0.4
        assert {name.partition("[")[0] for name in share} == {name.partition("[")[0] for name in whole}
