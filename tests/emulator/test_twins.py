"""Each header of kernels_cu/ptx and its twin for the emulator have the same functions and constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupy_mla.cuda.kernel import kernels_root

from .emulator import HERE

PTX, TWINS = kernels_root() / "ptx", HERE / "ptx"
HEADERS = sorted(path.name for path in PTX.glob("*.cuh"))

QUALIFIERS = re.compile(r"\b(?:__device__|__host__|__forceinline__|inline|constexpr) (?=[^=\n]*\()")
OF_THE_EMULATOR = re.compile(r"^namespace emu \{$.*?^\}  // namespace emu$", re.M | re.S)
FUNCTION = re.compile(r"^(?:template <(.*)>\n)?(\w+) (\w+)\(([^{]*)\) \{", re.M)
CONSTANT = re.compile(r"^(?:constexpr|enum class|#define INF) .*;?$", re.M)


def contents(header: Path) -> set[str]:
    """Signatures of a header's functions, and its constants.

    Where it has a function for each number of accumulators `c`, the twin may have a template: they count as the same.
    """
    text = QUALIFIERS.sub("", re.sub(r" *//.*", "", OF_THE_EMULATOR.sub("", header.read_text())))
    found = set(CONSTANT.findall(text))
    for template, result, name, parameters in FUNCTION.findall(text):
        if "(&c)[" in parameters:
            template = template.removesuffix("int N").removesuffix(", ")
            parameters = re.sub(r"\(&c\)\[\w+\]", "(&c)[]", parameters)
        found.add(f"<{template}> {result} {name}({' '.join(parameters.split())})")
    return found


@pytest.mark.parametrize("name", HEADERS)
def test_twins_are_alike(name: str) -> None:
    header = contents(PTX / name)
    if (TWINS / name).exists():
        assert sorted(header ^ contents(TWINS / name)) == []
    else:
        assert not any("(" in of for of in header), f"tests/emulator/ptx/{name} is missing"


def test_no_twin_is_alone() -> None:
    assert sorted({path.name for path in TWINS.glob("*.cuh")} - set(HEADERS)) == []


@pytest.mark.parametrize("name", HEADERS)
def test_every_function_is_seen(name: str) -> None:
    """What the pattern does not see would be alike in any twin."""
    names = re.findall(r"__forceinline__ .*?(\w+)\(", (PTX / name).read_text())
    assert [n for n in names if not any(f" {n}(" in of for of in contents(PTX / name))] == []
