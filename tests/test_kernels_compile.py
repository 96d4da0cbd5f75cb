"""Every kernel variant compiles for every architecture it claims, within its promise on spills. Needs no GPU."""

from __future__ import annotations

import re

import pytest

from cupy_mla.cuda import all_kernels
from cupy_mla.cuda.jit import Kernel, kernels_root, read_source

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs CuPy and NVRTC (extra cuda12 or cuda13)")


KERNELS = all_kernels()


def spilled_bytes(report: str) -> int:
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_kernel_compiles(kernel):
    assert kernel.archs
    for arch in kernel.archs:
        cubin, report = kernel.compile(arch)
        assert cubin.startswith(b"\x7fELF")
        assert "spill stores" in report, "ptxas no longer reports spills"
        assert "serialized" not in report, f"sm_{arch}: wgmma one after the other: {report}"
        assert spilled_bytes(report) <= kernel.spill_bytes, f"sm_{arch}: {report}"


def test_shared_memory_fits_every_claimed_gpu():
    """99 KB is what a block may have on sm_86, 89 and 120; 227 KB on sm_90 and sm_100."""
    for kernel in KERNELS:
        small = {"86", "89", "120"} & set(kernel.archs)
        assert kernel.shared_bytes <= (99 if small else 227) * 1024, kernel


def test_every_source_file_belongs_to_a_kernel():
    used = {kernel.file for kernel in KERNELS}
    there = {str(path.relative_to(kernels_root())) for path in kernels_root().rglob("*.cu")}
    assert there == used


def test_a_wrong_source_gives_the_words_of_the_compiler():
    kernel = Kernel("attention/combine.cu", "combine", {"D_V": 512, "max": "not_a_name ("}, threads=128)
    with pytest.raises(RuntimeError, match=r"combine|results|params|convert") as error:
        kernel.compile("80")
    assert "error" in str(error.value)


def test_sources_include_each_header_behind_a_guard():
    text = read_source("attention/combine.cu")
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("#define INCLUDED_PTX_TYPES_CUH") > 1
