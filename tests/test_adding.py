"""Adding is short: a made-up operation and a made-up row format touch the files that CONTRIBUTING.md names, no others.

Both are written into a copy of the tree. There `tests/adding/checks.py` shows that they work, with tests of the table,
the floors and the layouts beside.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from .compiled import FOLDER

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("cupy_mla", "kernels_cu", "tests", "pyproject.toml")
TEMPLATES = Path(__file__).resolve().parent / "adding"


class Edit(NamedTuple):
    """One change of a file: text behind the first `after`, or at the end; a new file where there is none."""

    file: str
    text: str
    after: str = ""


NEGATE = (
    Edit("cupy_mla/ops/quant.py", '"negate", ', after="__all__ = ["),
    Edit(
        "cupy_mla/ops/quant.py",
        '''

@operation
def negate(x: A) -> A:
    """Negate float32 values of any shape, without gaps."""
    place, (x_,) = bind(x=x)
    x_.require(FLOAT32, *("any",) * len(x_.shape))
    out = place.new("out", x_.shape, FLOAT32)
    place.call(cuda.negate, reference.negate, x_, out)
    return out.obj
''',
    ),
    Edit(
        "cupy_mla/reference/quant.py",
        '''

def negate(x: np.ndarray, out: np.ndarray) -> None:
    """Minus x; see `cupy_mla.negate`."""
    np.negative(x, out=out)
''',
    ),
    Edit(
        "cupy_mla/cuda/quant.py",
        '''

NEGATE = Struct("NegateParams", x=POINTER, out=POINTER, size=INT64)


@cache
def negate_kernel() -> Kernel:
    """The kernel that negates."""
    return Kernel("cache/negate.cu", NEGATE, {})


def negate(gpu: Gpu, x: Array, out: Array) -> Program:
    """Twin of `reference.quant.negate`."""
    size = math.prod(x.shape)
    return [Launch(negate_kernel(), (ceil_div(size, 256), 1, 1), NEGATE(x=x.ptr, out=out.ptr, size=size))]
''',
    ),
    Edit(
        "cupy_mla/cuda/quant.py",
        "    yield negate_kernel()\n",
        after='"""Every kernel variant of this module, for the compile tests and for warming up."""\n',
    ),
    Edit("kernels_cu/cache/negate.cu", (TEMPLATES / "negate.cu").read_text()),
    Edit("tests/ops/test_negate.py", (TEMPLATES / "made_up_operation.py").read_text()),
    Edit(
        "cupy_mla/ops/table.py",
        """    Operation(
        quant.negate,
        lambda rng, wanted: iter([Call("", {"x": rng.standard_normal((7, 50), np.float32)})]),
        results=(Result("out", lambda x: x.shape, FLOAT32),),
    ),
""",
        after="TABLE = (\n",
    ),
)

MADE_UP = (
    Edit(
        "cupy_mla/layouts.py",
        """MADE_UP = Layout(
    "made_up", 576, 512, 64, token_bytes=648, row_stride=640, rope_offset=512,
    scale_kind="ue8m0", scale_tile=64, scale_offset=-1, scale_stride=8, block_align=16, reader="made_up",
)  # fmt: skip
""",
        after=")  # fmt: skip\n",
    ),
    Edit("cupy_mla/layouts.py", "MADE_UP, ", after="ATTENTION_LAYOUTS = ("),
    Edit("cupy_mla/layouts.py", '"made_up", ', after="CacheLayout = Literal["),
    Edit("cupy_mla/layouts.py", '"made_up", ', after="WritableLayout = Literal["),
    Edit("kernels_cu/rows/made_up.cuh", (TEMPLATES / "made_up.cuh").read_text()),
    Edit("cupy_mla/ops/examples.py", "    Format(layouts.MADE_UP),\n", after="    Format(layouts.FP16_512),\n"),
)


def apply(edit: Edit, root: Path) -> None:
    path = root / edit.file
    text = path.read_text() if path.exists() else ""
    assert edit.after in text, f"{edit.file} has no {edit.after!r}"
    at = text.index(edit.after) + len(edit.after) if edit.after else len(text)
    path.write_text(text[:at] + edit.text + text[at:])


def contents(root: Path) -> dict[str, str]:
    """A hash of each file below a folder."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def touched(edits: tuple[Edit, ...], root: Path) -> set[str]:
    """Make changes. Returns the files that are new or differ."""
    before = contents(root)
    for edit in edits:
        apply(edit, root)
    return {name for name, _ in contents(root).items() - before.items()}


def named(what: str) -> list[str]:
    """The files and folders that CONTRIBUTING.md's table names for an addition."""
    (row,) = re.findall(rf"^\| {what} \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return re.findall(r"`([^`]+)`", row)


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], set[str]]:
    """A copy of the tree with both, and the files that each of them touched."""
    root = tmp_path_factory.mktemp("adding")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(ROOT / part, root / part)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (root / ".pytest_cache").symlink_to(FOLDER.parent)  # where compiled kernels are found again
    return root, touched(NEGATE, root), touched(MADE_UP, root)


def test_files_are_those_that_the_table_names(added) -> None:
    """Each of them once: a file itself, or one in a folder."""
    _, operation, layout = added
    for what, files in (("an operation", operation), ("a cache row format", layout)):
        places = named(what)
        assert len(files) == len(places), f"{what} touched {sorted(files)}"
        in_folders = files - set(places)
        for place in places:
            found = [file for file in in_folders if file.startswith(place)] if place.endswith("/") else files & {place}
            assert len(found) == 1, f"{what}: {place} has {found}"


@pytest.mark.long
def test_both_work(added) -> None:
    root, _, _ = added
    tests = ("tests/adding/checks.py", "tests/ops/test_negate.py", "tests/test_layouts.py", "tests/test_floors.py")
    table = "tests/ops/test_table.py"
    for command in (
        [*tests, "--deselect", "tests/test_floors.py::test_a_circle_and_an_import_upward_are_found"],
        [table, "-k", "negate or public or wanted_layouts"],
    ):
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *command],
            cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
