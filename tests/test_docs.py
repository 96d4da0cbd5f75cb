"""The documentation: programs run, links lead somewhere, pictures and API reference are made without complaint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_mla

from .kinds import installed

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md"])


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def programs() -> list[tuple[str, str]]:
    """The Python of each page of docs/, as one program; what uses CuPy, only where there is a GPU."""
    found = []
    for page in (ROOT / "docs").glob("*.md"):
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        on_cpu = [block for block in blocks if "import cupy\n" not in block]
        if blocks:
            found.append((page.name, "".join(on_cpu)))
        if on_cpu != blocks:
            found.append((f"{page.name} gpu", "".join(blocks)))
    return sorted(found)


@pytest.mark.parametrize(
    "program",
    [pytest.param(text, id=name, marks=[pytest.mark.gpu] * name.endswith("gpu")) for name, text in programs()],
)
def test_programs_run(program: str) -> None:
    for line, library in (("import torch\n", "torch"), (".compile(", "cupy")):
        if line in program and not installed(library):
            pytest.skip(f"{library} is not installed")
    result = python("-c", program)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_linked() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [page for page in [*pages, "kernels"] if f"({page})" not in index] == []


def test_pictures_show_the_layouts() -> None:
    result = python("docs/draw_layouts.py", "--check")
    assert result.returncode == 0, result.stderr


def test_api_reference(tmp_path: Path) -> None:
    """The command of docs/README.md, with warnings as errors."""
    if not installed("pdoc"):
        pytest.skip("pdoc is not installed")
    (command,) = re.findall(r"^    python (-m pdoc .*) -o docs/api$", (ROOT / "docs" / "README.md").read_text(), re.M)
    result = python("-W", "error", *command.split(), "-o", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Warn" not in result.stderr
    page = (tmp_path / "cupy_mla.html").read_text()
    assert [
        name for name in cupy_mla.__all__ if f'id="{name}"' not in page and f"cupy_mla/{name}.html" not in page
    ] == []


def test_every_public_function_and_class_says_what_it_does() -> None:
    documented = {name: getattr(cupy_mla, name).__doc__ for name in cupy_mla.__all__ if name != "__version__"}
    made_up = "^{}\\("  # by dataclass or NamedTuple
    assert [n for n, text in documented.items() if not text or re.match(made_up.format(n), text)] == []
