"""The floors of the house: what imports and includes what. No import runs upward, none in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import cupy_mla
from cupy_mla.cuda.kernel import kernels_root
from cupy_mla.layouts import ATTENTION_LAYOUTS

PACKAGE = Path(cupy_mla.__file__).parent

# What a module may import of the package, by its name or the first part of it: a module, or a package with all in it.
# Modules of one package may import each other.
GROUND = ("_version", "dtypes", "layouts", "config", "typing", "private", "arrays", "arguments", "checks.options")
ON_BRIDGES = (*GROUND, "bridges", "checks")
ON_CUDA = (*ON_BRIDGES, "cuda", "calls")
ON_OPS = (*ON_CUDA, "reference", "ops")
ON_BACKENDS = (*ON_OPS, "metadata", "backends")
TOP = (*ON_BACKENDS, "flash_mla", "deep_gemm", "integrations", "selfcheck", "warmup", "__main__", "")
FLOORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GROUND, GROUND),
    **dict.fromkeys(("bridges", "checks"), ON_BRIDGES),
    "reference": (*ON_BRIDGES, "reference"),
    "cuda": (*ON_BRIDGES, "cuda"),
    "calls": ON_CUDA,
    "ops": ON_OPS,
    "metadata": (*ON_OPS, "metadata"),
    "backends": ON_BACKENDS,
    **dict.fromkeys(("flash_mla", "deep_gemm", "integrations", "selfcheck", "warmup", "__main__", ""), TOP),
}


class Import(NamedTuple):
    """One import of a module of the package: both by their names without "cupy_mla.", and how it is made.

    Attributes:
        runs: when the importing module is imported; not in a function, nor under TYPE_CHECKING.
        for_types: under TYPE_CHECKING.
    """

    by: str
    of: str
    runs: bool
    for_types: bool


def modules(package: Path) -> dict[str, Path]:
    """Every module by its name without the package's; the package itself is ""."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> Iterator[Import]:
    """Every import of one module of the package by another one."""
    known = modules(package)
    for name, path in known.items():
        here = name.split(".") if path.stem == "__init__" and name else name.split(".")[:-1]
        yield from _imports_of(ast.parse(path.read_text()), package.name, name, here, known, True, False)


@cache
def imports_of_package() -> list[Import]:
    """Of `cupy_mla`."""
    return [*imports(PACKAGE)]


def _imports_of(
    tree: ast.AST, root: str, name: str, here: list[str], known: dict[str, Path], runs: bool, for_types: bool
) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for of in _named(node, root, here, known):
                yield Import(name, of, runs, for_types)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from _imports_of(ast.Module([child], []), root, name, here, known, False, True)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports_of(node, root, name, here, known, runs and not later, for_types)


def _named(node: ast.Import | ast.ImportFrom, root: str, here: list[str], known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a statement names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first, _, rest = alias.name.partition(".")
            if first == root:
                yield rest
        return
    if node.level:
        base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
    elif (node.module or "").partition(".")[0] == root:
        base = node.module.split(".")[1:]
    else:
        return
    base = [part for part in base if part]
    for alias in node.names:  # a module of a package, or something in a module
        inner = ".".join([*base, alias.name])
        yield inner if inner in known else ".".join(base)


def floor(module: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    return module if module in FLOORS else module.partition(".")[0]


def upward(found: list[Import]) -> list[tuple[str, str]]:
    """Imports of what is not on a module's floor or below, those in functions too."""
    return [(i.by, i.of) for i in found if floor(i.of) not in FLOORS[floor(i.by)]]


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A way from a node back to itself; [] where there is none."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            found = visit(other, [*way, node])
            if found:
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := visit(node, []))), [])


# --- Python ---------------------------------------------------------------------------------------------------


def test_every_module_has_a_floor():
    assert {floor(name) for name in modules(PACKAGE)} <= FLOORS.keys()


def test_no_import_runs_upward():
    """Neither one that runs nor one for types."""
    found = imports_of_package()
    assert len(found) > 200
    assert upward(found) == []


def test_no_import_runs_in_a_circle():
    """At module level; a package's own module stands for what it imports."""
    edges: dict[str, set[str]] = {}
    for i in imports_of_package():
        if i.runs and i.by != i.of:
            edges.setdefault(i.by, set()).add(i.of)
    assert circle(edges) == []


def test_nothing_below_imports_an_integration():
    """Each is importable only with its library."""
    found = {i.by for i in imports_of_package() if floor(i.of) == "integrations" and i.runs}
    assert {floor(by) for by in found} <= {"integrations"}


def test_a_circle_and_an_import_upward_are_found(tmp_path):
    """So that the tests above would fail."""
    for name, text in (
        ("__init__", ""),
        ("layouts", "def f():\n    from .ops import attention\n"),
        ("arrays", "from . import layouts\nif typing.TYPE_CHECKING:\n    import house.bridges\n"),
        ("bridges", "from house.arrays import Array\nfrom .cuda.kernel import Kernel\n"),
        ("cuda/__init__", ""),
        ("cuda/kernel", "from .. import bridges\nfrom ..reference import attention\n"),
        ("reference/__init__", ""),
        ("reference/attention", "from ..arrays import Array as A\n"),
        ("ops/__init__", ""),
        ("ops/attention", "from ..cuda import kernel\nfrom ..reference import attention as reference\n"),
    ):  # fmt: skip
        path = tmp_path / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = list(imports(tmp_path / "house"))
    assert upward(found) == [
        (by, of) for by, of in ((i.by, i.of) for i in found) if (by, of) in {
            ("layouts", "ops.attention"), ("arrays", "bridges"), ("bridges", "cuda.kernel"),
            ("cuda.kernel", "reference.attention"),
        }
    ]  # fmt: skip
    assert len(upward(found)) == 4
    edges: dict[str, set[str]] = {}
    for i in found:
        if i.runs:
            edges.setdefault(i.by, set()).add(i.of)
    assert circle(edges) == ["bridges", "cuda.kernel", "bridges"]


# --- CUDA -----------------------------------------------------------------------------------------------------

# Folders with the parts of a kernel, which its .cu file puts together.
PARTS = tuple(f"attention/{kernel}" for kernel in ("bf16_few_heads_sm90", "bf16_sm90", "fp8_sm90", "portable"))

# What a file may include, by its folder: folders, or headers. A .cu file is a kernel, which nothing includes.
HEADERS = {
    "ptx": ("ptx",),
    "rows": ("ptx", "rows"),
    "tile": ("ptx", "rows", "tile"),
    "attention/division": (
        "ptx",
        "rows",
        "tile",
        "attention/params.cuh",
        "attention/dense.cuh",
        "attention/division",
    ),
    **{parts: ("ptx", "rows", "tile", "attention/division", "attention/role.cuh", parts) for parts in PARTS},
    "attention/fp8_short_sm90": (
        "ptx",
        "rows",
        "tile",
        "attention/division",
        "attention/fp8_sm90",
        "attention/fp8_short_sm90",
    ),
    "attention": ("ptx", "rows", "tile", "attention/division", *PARTS, "attention/fp8_short_sm90", "attention"),
    "cache": ("ptx", "rows", "tile", "cache"),
    "indexer/topk": ("ptx", "rows", "tile", "indexer/radix_key.cuh", "indexer/topk"),
    "indexer/indexer_loss": ("ptx", "rows", "tile", "indexer/indexer_loss"),
    "indexer/logits_sm90": ("ptx", "rows", "tile", "indexer/keys.cuh", "indexer/schedule.cuh", "indexer/logits_sm90"),
    "indexer": ("ptx", "rows", "tile", "indexer/topk", "indexer/indexer_loss", "indexer/logits_sm90", "indexer"),
    "indices": ("ptx", "rows", "tile", "indices"),
}
SIDEWAYS = {("indexer/gather_keys.cu", "cache/request_tokens.cuh")}  # a header of another folder on the same floor
SOURCES = sorted(p for p in kernels_root().rglob("*") if p.suffix in (".cu", ".cuh"))
ASM = re.compile(r"\basm\b\s*(?:volatile|__volatile__|goto)?\s*\(|\basm\s+volatile\b|\b__asm")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)

every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(kernels_root()).as_posix())


def name_of(path: Path) -> str:
    return path.relative_to(kernels_root()).as_posix()


def included(path: Path) -> list[str]:
    """What a file includes, a package-internal line or any other."""
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.M)


def without_comments_and_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', COMMENT.sub("", text))


def test_sources_lie_on_a_floor():
    assert {name_of(path).rpartition("/")[0] for path in SOURCES} == HEADERS.keys()


@every_source
def test_includes_lead_downward(path):
    """From the root of kernels_cu, to headers that exist, none of them a kernel."""
    folder = name_of(path).rpartition("/")[0]
    for include in included(path):
        assert (kernels_root() / include).is_file(), include
        assert include.endswith(".cuh"), include
        downward = {include, include.rpartition("/")[0]} & set(HEADERS[folder])
        assert downward or (name_of(path), include) in SIDEWAYS, include


def test_no_include_runs_in_a_circle():
    assert circle({name_of(path): set(included(path)) for path in SOURCES}) == []


def test_every_header_is_included():
    used = {include for path in SOURCES for include in included(path)}
    used |= {f"rows/{layout.reader}.cuh" for layout in ATTENTION_LAYOUTS}
    assert {name_of(path) for path in SOURCES if path.suffix == ".cuh"} == used


@every_source
def test_headers_say_once(path):
    """The loader puts a guard of its own around what it includes; editors and other compilers need this."""
    assert ("#pragma once" in path.read_text().splitlines()) == (path.suffix == ".cuh")


def instructions(text: str) -> set[str]:
    """The first parts of the names of the PTX instructions in a file's asm statements: "cp" of cp.async."""
    statements = re.findall(r'\basm\s*(?:volatile\s*)?\(((?:\s*(?:"(?:[^"\\\n]|\\.)*"|\w+))*)', COMMENT.sub("", text))
    lines = " ".join(statements).replace('"', " ").replace("\\n", ";")
    return set(re.findall(r"(?:^|[;{}]|@!?%?\w+)\s*([a-z][a-z0-9_]*)[.\s]", lines))


@every_source
def test_asm_statements_stand_in_ptx(path):
    """Each in a header of one family of instructions, which its first comment names as the PTX ISA does."""
    text = path.read_text()
    if not ASM.search(without_comments_and_strings(text)):
        return
    assert name_of(path).startswith("ptx/"), "asm outside ptx/"
    head = text.partition("#pragma once")[0]
    assert head.startswith("// PTX ISA: ")
    found = instructions(text)
    assert any(re.search(rf"\b{name}\b", head) for name in found), f"names none of {sorted(found)}"


def test_asm_is_found():
    """So that the test above would fail."""
    for line in (
        'asm volatile("bar.sync 0;");',
        'asm("mov.u32 %0, 1;" : "=r"(x));',
        'asm volatile ("x");',
        "__asm__(x);",
    ):
        assert ASM.search(without_comments_and_strings(line)), line
    block = 'asm volatile(\n"{\\n"\n".reg .pred p;\\n"\n"ld.global.b32 %0, [%1];\\n}" :: "r"(x));'
    assert instructions(block) == {"ld"}
    for line in ("// asm volatile(", '"asm("', "/* asm(\n */", "plasm(x)"):
        assert not ASM.search(without_comments_and_strings(line)), line
