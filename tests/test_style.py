"""The verdict of the checkers on the checkout. They are the hooks of `.pre-commit-config.yaml`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parent.parent
BIN = ".venv/bin/"  # in the hooks; the tests run what stands beside their own interpreter
CONFIG = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
HOOKS = {hook["id"]: hook for repo in CONFIG["repos"] for hook in repo["hooks"]}


def command(hook: dict) -> list[str]:
    """What pre-commit runs on all files of the checkout."""
    program, *arguments = shlex.split(hook["entry"])
    assert program.startswith(BIN)
    tool = arguments[1] if arguments[0] == "-m" else program.removeprefix(BIN)
    pytest.importorskip(tool.replace("-", "_"), reason=f"{tool} is not installed")
    words = [str(Path(sys.executable).parent / program.removeprefix(BIN)), *arguments]
    return words if hook.get("pass_filenames") is False else [*words, *files(hook["files"])]


def files(pattern: str) -> list[str]:
    """Paths of the checkout below folders without a leading dot that a hook's pattern fits."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    paths = [path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*")]
    return sorted(path for path in paths if re.search(pattern, path))


@pytest.mark.parametrize("name", HOOKS)
def test_no_complaints(name: str) -> None:
    result = subprocess.run(command(HOOKS[name]), cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[:5000]


def test_every_kernel_source_is_formatted() -> None:
    """The pattern of clang-format fits what is below these folders."""
    (pattern,) = [hook["files"] for hook in HOOKS.values() if "files" in hook]
    for folder, least in (("kernels_cu", 60), ("tests/emulator", 10)):
        sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
        assert len(sources) >= least
        assert {path.relative_to(ROOT).as_posix() for path in sources} <= set(files(pattern))


def test_every_pinned_checker_is_a_hook() -> None:
    """Of the test requirements, the ones that judge style and types of the package itself."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    assert {"ruff", "mypy", "clang-format"} <= pinned
    entries = " ".join(hook["entry"] for hook in HOOKS.values())
    for checker in ("ruff check", "ruff format", "mypy", "clang-format"):
        assert checker in entries


def test_the_workflow_runs_ci() -> None:
    """On each push and pull request, the script that runs the README's test command."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` so
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
