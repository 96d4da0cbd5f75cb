"""The documentation: programs run, links lead somewhere, pictures and the site are made without complaint."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from inspect import isfunction, ismodule
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ml_dtypes
import numpy as np
import pytest

import cupy_mla

from .kinds import installed

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([
    *(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "results" / "README.md", *(ROOT / "benchmarks" / "log").glob("*.md"),
])  # fmt: skip


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def python_of(page: Path) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def programs() -> list[tuple[str, str]]:
    """The Python of each page of docs/, as one program; what uses CuPy, only where there is a GPU."""
    found = []
    for page in (ROOT / "docs").glob("*.md"):
        blocks = python_of(page)
        on_cpu = [block for block in blocks if "import cupy\n" not in block]
        if blocks:
            found.append((page.name, "".join(on_cpu)))
        if on_cpu != blocks:
            found.append((f"{page.name} gpu", "".join(blocks)))
    return sorted(found)


@pytest.mark.long(sample=4)
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
    for promised in re.findall(r"^print\(.*\)  # (.*)$", program, re.M):
        assert promised in result.stdout.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_linked() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [page for page in [*pages, "kernels/README.md"] if f"({page})" not in index] == []


def test_pictures_show_the_layouts() -> None:
    result = python("docs/draw_layouts.py", "--check")
    assert result.returncode == 0, result.stderr


class Links(HTMLParser):
    """What a page refers to and can be referred to by."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []  # scripts, styles, pictures
        self.ids: set[str] = set()
        self.forms: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.targets += [found[name] for name in ("href", "src") if name in found]
        self.loaded += [found[name] for name in ("href", "src") if name in found and tag != "a"]
        self.ids |= {found["id"]} if "id" in found else set()
        self.forms += [found["action"]] if tag == "form" else []


@pytest.mark.long
def test_site(tmp_path: Path) -> None:
    """The command of docs/README.md makes it, in one test since it takes ten seconds; a warning is an error."""
    if not all(map(installed, ("sphinx", "myst_parser", "furo"))):
        pytest.skip("Sphinx, MyST or Furo is not installed")
    (command,) = re.findall(r"^    python (-m sphinx .*) docs/site$", (ROOT / "docs" / "README.md").read_text(), re.M)
    result = python(*command.split(), str(tmp_path))
    assert result.returncode == 0, result.stderr
    links_lead_somewhere(tmp_path)
    every_page_is_there_and_searches_all(tmp_path)
    every_public_name_is_there(tmp_path)
    five_entries_lead_to_all(tmp_path)
    no_internals_are_there(tmp_path)
    formulas_are_set(tmp_path)
    sources_are_pages(tmp_path)
    code_is_set_as_code(tmp_path)


def links_lead_somewhere(site: Path) -> None:
    """To a file of the site, and where they name a part of a page, to that part."""
    pages = {page.resolve(): Links(page) for page in site.rglob("*.html")}
    assert site / "docs" / "lse.html" in pages
    missing = []
    for page, links in pages.items():
        for target in links.targets:
            address, _, part = unquote(target).partition("#")
            if urlsplit(target).scheme or target.startswith("//"):
                continue
            leads_to = (page.parent / address.partition("?")[0]).resolve() if address else page
            if not leads_to.is_file() or (part and leads_to in pages and part not in pages[leads_to].ids):
                missing.append(f"{page.relative_to(site)}: {target}")
    assert missing == []


def every_page_is_there_and_searches_all(site: Path) -> None:
    """The README, what stands in docs/, and the API; every page has a box to search all of them."""
    names = [page.relative_to(ROOT).with_suffix(".html") for page in PAGES]
    assert [name for name in names if not (site / name).is_file()] == []
    for name in names:
        assert Path(site / name.parent / Links(site / name).forms[0]).resolve() == site / "search.html"
    index = (site / "searchindex.js").read_text()
    assert "sparse_prefill" in index
    assert all(f'"{name.with_suffix("")}"' in index for name in names)


def every_public_name_is_there(site: Path) -> None:
    ids = set().union(*(Links(page).ids for page in (site / "docs" / "api").glob("*.html")))
    modules = {f"module-cupy_mla.{name}" for name in ("deep_gemm", "flash_mla", "layouts", "warmup")}
    names = {f"cupy_mla.{name}" for name in cupy_mla.__all__ if not ismodule(getattr(cupy_mla, name))}
    assert (names | modules) - ids == {"cupy_mla.__version__"}


def five_entries_lead_to_all(site: Path) -> None:
    """In the tree at the side of a page."""
    page = (site / "README.html").read_text()
    tree = page[page.index('class="sidebar-tree"') : page.index("</aside>")]
    assert len(re.findall(r'"toctree-l1[ "]', tree)) == 5
    for name in ("docs/pipeline_v4", "docs/vllm", "docs/api/attention", "docs/kernels/portable", "benchmarks/log/topk"):
        assert f'href="{name}.html"' in tree


def no_internals_are_there(site: Path) -> None:
    ids = Links(site / "docs" / "api" / "arrays.html").ids
    assert {name for name in ids if name.startswith("cupy_mla.Place")} == {"cupy_mla.Place", "cupy_mla.Place.of"}


def formulas_are_set(site: Path) -> None:
    """As MathML, which needs nothing; and no page loads anything from elsewhere."""
    for name in ("lse", "api/attention", "api/cache"):
        page = (site / "docs" / f"{name}.html").read_text()
        assert '<math display="block" xmlns=' in page
        assert "∑</mo>" in page or "<mfrac>" in page
        assert r"\mathrm" not in page
    loaded = {what for page in site.rglob("*.html") for what in Links(page).loaded}
    assert {what for what in loaded if urlsplit(what).netloc} == set()


def sources_are_pages(site: Path) -> None:
    """A link to a file of the checkout shows it."""
    assert not (site / "_downloads").exists()
    assert "sources/examples/05_full_pipeline.py.html" in (site / "docs" / "pipeline.html").read_text()
    page = (site / "sources" / "examples" / "05_full_pipeline.py.html").read_text()
    assert 'class="highlight' in page


def code_is_set_as_code(site: Path) -> None:
    """An indented block of a docstring that no `::` comes before becomes a quotation, its lines one paragraph."""
    pages = list((site / "docs" / "api").glob("*.html"))
    assert [page.name for page in pages if "<blockquote>" in page.read_text()] == []
    assert any('class="highlight' in page.read_text() for page in pages)


FUNCTIONS = [name for name in cupy_mla.__all__ if isfunction(getattr(cupy_mla, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_in_docstrings(name: str) -> None:
    """Every public function has one, on NumPy arrays, which shows what it says."""
    globs = {"np": np, "cupy_mla": cupy_mla, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
    example = doctest.DocTestParser().get_doctest(getattr(cupy_mla, name).__doc__, globs, name, None, None)
    if "to_torch" in example.docstring and not installed("torch"):
        pytest.skip("torch is not installed")
    assert any(name in part.source for part in example.examples)
    printed: list[str] = []
    doctest.DocTestRunner().run(example, out=printed.append)
    assert not printed, "".join(printed)


def test_every_public_function_and_class_says_what_it_does() -> None:
    documented = {name: getattr(cupy_mla, name).__doc__ for name in cupy_mla.__all__ if name != "__version__"}
    made_up = "^{}\\("  # by dataclass or NamedTuple
    assert [n for n, text in documented.items() if not text or re.match(made_up.format(n), text)] == []


def test_readme_is_short() -> None:
    """Everything else has a page of its own."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_pages_of_kernels_are_short() -> None:
    """What was tried stands in benchmarks/log."""
    pages = sorted((ROOT / "docs" / "kernels").glob("*.md"))
    assert {page.name: n for page in pages if (n := len(page.read_text().splitlines())) > 120} == {}
    notes = {page.name for page in (ROOT / "benchmarks" / "log").glob("*.md")}
    assert notes >= {page.name for page in pages}


TEXTS = {".md", ".rst", ".py", ".cu", ".cuh", ".cpp", ".h", ".sh"}
NUMBERED = re.compile(
    r"(?<!\bCUDA )(?<!\bPython )(?<!\bNVRTC )\b[Vv]ersions?\s+\d{1,3}\b(?!\.\d)"  # "version 16", not "version 0.22"
    r"|\brows?\s+\d+\s+(?:(?:to|and)\s+\d+\s+)?of\s+\[\w+\]\("  # "row 90 of [logits_sm90](..."
    r"|\b\d{2,3}\s+to\s+\d{2,3}\s+in\s+\["  # "49 to 94 in [fp8_sm90]("
    r"|\(`\w+`,\s+\d+\)"  # "(`fp8_item_cost`, 80)"
)
IN_BRACKETS = re.compile(r"(?<=[a-z.,;:`] )\(\d{2,3}\)(?=[.,;:\s])")  # "schedules (111),"; in code it may be anything


def numbered_versions(text: str, prose: bool = True) -> list[str]:
    """Where a text names a version of a kernel by its number."""
    kinds = [NUMBERED, IN_BRACKETS] if prose else [NUMBERED]
    return [found.group() for kind in kinds for found in kind.finditer(text)]


@pytest.mark.parametrize(
    "text",
    ["as version 16 has it", "slower than version\n16.", "Versions 1 to 4", "rows 59 to 62 of [logits_sm90](x)",
     "and a plan (111), but", "what 49 to 94 in [fp8_sm90](x) say", "fast (`fp8_item_cost`, 80)."],
)  # fmt: skip
def test_numbered_versions_are_found(text: str) -> None:
    assert numbered_versions(text)


def test_numbered_versions_stand_in_the_lab_notes_alone() -> None:
    """Numbers of versions mean something in benchmarks/log only."""
    folders = [ROOT / name for name in ("docs", "kernels_cu", "cupy_mla", "tests", "benchmarks", "examples")]
    pages = [path for folder in folders for path in folder.rglob("*") if path.suffix in TEXTS]
    notes = ROOT / "benchmarks" / "log"
    pages = [path for path in pages if notes not in path.parents and path != Path(__file__)]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found = {path: numbered_versions(path.read_text(), prose=path.suffix == ".md") for path in pages}
    assert {str(path.relative_to(ROOT)): versions for path, versions in found.items() if versions} == {}
