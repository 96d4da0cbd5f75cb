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
@pytest.mark.parametrize("file", [SWEEP, "tests/emulator/test_slots.py"])
def test_a_plain_run_takes_a_case_of_each_emulated_file_and_a_mark_all(file: str) -> None:
    """Of a file whose tests have the mark themselves, and of one whose tests have it by their folder."""
    sample, whole = collected(file), collected(file, "-m", "long")
    assert len(sample) == 1
    assert set(sample) < set(whole)


@pytest.mark.long
def test_a_plain_run_takes_half_of_the_emulated_files() -> None:
    """Where their folder is not named."""
    some, every = ({name.partition("::")[0] for name in collected(of) if "/emulator/" in name} for of in (
        "tests", "tests/emulator"
    ))  # fmt: skip
    assert some < every
    assert 0.5 <= len(some) / len(every) <= 0.55


@pytest.mark.long
def test_a_plain_run_takes_a_sixth_of_the_cases_of_tensors() -> None:
    plain, long = (collected("tests/ops/test_swa.py", *of) for of in ((), ("-m", "long")))
    taken, whole = ({name for name in names if "[torch-" in name} for names in (plain, long))
    assert taken < whole
    assert 1 / 6 <= len(taken) / len(whole) <= 0.25
    assert {name.partition("[")[0] for name in taken} == {name.partition("[")[0] for name in whole}


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
