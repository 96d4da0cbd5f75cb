"""Every kernel variant compiles within its promises on spills and shared memory. Needs no GPU.

A plain run compiles a variant of each `.cu` file for one architecture. `pytest -m every_arch`, of which CI runs a
share, compiles every variant for one, and a variant of each file for every one; with CUPY_MLA_EVERY_PAIR=1 all for all.
"""

from __future__ import annotations

import os
import random
import re
import struct
from pathlib import Path

import pytest

from cupy_mla.cuda import all_kernels
from cupy_mla.cuda.kernel import SHARED_BYTES, THREADS, Kernel, exported, kernels_root, sections

from .compiled import compile_kernel, kernels_hash, needs_nvrtc

KERNELS = all_kernels()
EVERY = [(kernel, arch) for kernel in KERNELS for arch in kernel.archs]


def covering() -> list[tuple[Kernel, str]]:
    """Every variant with one of its architectures, and every architecture of a file with one of its variants."""
    groups: dict[object, list[tuple[Kernel, str]]] = {}
    for kernel, arch in EVERY:
        for group in (kernel, (kernel.file, arch)):
            groups.setdefault(group, []).append((kernel, arch))
    rng = random.Random(kernels_hash())
    taken = {rng.choice(pairs) for pairs in groups.values()}
    return [pair for pair in EVERY if pair in taken]


# Bytes of shared memory a CTA may have.
SMALL_SHARED_BYTES, LARGE_SHARED_BYTES = 99 * 1024, 227 * 1024  # on sm_86, 89 and 120; on sm_90 and 100
SMALL_ARCHS = {"86", "89", "120"}


def spilled_bytes(report: str) -> int:
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))


def misaddressed_copies(cubin: bytes) -> int:
    """Asynchronous copies to shared memory on sm_90 whose address is a sum with a uniform register.

    Where such a copy has a cache policy, NVRTC 12.9 and 13.0 write `LDGSTS [R3+UR0], desc[UR1][R12.64]`: registers that
    nothing sets, and a pair that begins with an odd number, which is an illegal instruction.
    """
    opcode, wrong = 0xFFF, 0xDAE  # LDGSTS with a register alone is 0xFAE
    code = b"".join(content for name, content in sections(cubin) if name.startswith(".text."))
    return sum(word & opcode == wrong for word, _ in struct.iter_unpack("<QQ", code))


# Kernels whose wgmma find their operands in uniform registers, and the R2UR that may be in between nevertheless.
UNIFORM = {"fp8_sm90", "dense_fp8_sm90", "bf16_sm90", "bf16_cluster_sm90", "bf16_shares_sm90", "bf16_grouped_sm90"}
FEW_R2UR = 20


def moved_operands(cubin: bytes) -> int:
    """R2UR between the first and the last wgmma on sm_90.

    Where a loop's end seems to ptxas to depend on the thread, it keeps nothing of the loop in uniform registers: each
    wgmma then waits for two R2UR or four, in loops of 135 instructions more.
    """
    (code,) = [content for name, content in sections(cubin) if name.startswith(".text.")]
    opcodes = [word & 0xFFF for word, _ in struct.iter_unpack("<QQ", code)]
    wgmma = [i for i, opcode in enumerate(opcodes) if opcode & 0xFF == 0xF0]
    return opcodes[wgmma[0] : wgmma[-1]].count(0x2CA) if wgmma else 0


def check(kernel: Kernel, arch: str) -> None:
    """Compile, and hold the kernel to what it promises.

    Shared memory is held to the least of all GPUs that the kernel claims.
    """
    cubin, report = compile_kernel(kernel, arch)
    assert cubin.startswith(b"\x7fELF")
    assert "spill stores" in report, "ptxas no longer reports spills"
    assert "serialized" not in report, f"sm_{arch}: wgmma one after the other: {report}"
    assert spilled_bytes(report) <= kernel.spill_bytes, f"sm_{arch}: {report}"
    if arch == "90a":
        assert misaddressed_copies(cubin) == 0
        assert kernel.name not in UNIFORM or moved_operands(cubin) <= FEW_R2UR
    shared = exported(cubin, SHARED_BYTES)
    assert 0 <= shared <= (SMALL_SHARED_BYTES if SMALL_ARCHS & set(kernel.archs) else LARGE_SHARED_BYTES)
    threads = exported(cubin, THREADS)
    assert threads % 32 == 0
    assert 32 <= threads <= 1024


@pytest.mark.long(sample=24)
@needs_nvrtc
@pytest.mark.parametrize("file", sorted({kernel.file for kernel in KERNELS}))
def test_kernel_compiles(file, request):
    """A variant of each file for one of its architectures. They stay the same as long as the kernels do."""
    seed = request.config.getoption("--seed")
    seed = kernels_hash() if seed is None else seed
    kernel, arch = random.Random(f"{seed} {file}").choice([pair for pair in EVERY if pair[0].file == file])
    print(f"{kernel!r} for sm_{arch}")
    check(kernel, arch)


@needs_nvrtc
@pytest.mark.every_arch
@pytest.mark.parametrize(
    ("kernel", "arch"),
    EVERY if os.environ.get("CUPY_MLA_EVERY_PAIR") else covering(),
    ids=lambda value: f"sm_{value}" if isinstance(value, str) else None,
)
def test_every_variant_and_every_architecture(kernel, arch):
    check(kernel, arch)


def test_every_source_file_belongs_to_a_kernel():
    used = {kernel.file for kernel in KERNELS}
    there = {str(path.relative_to(kernels_root())) for path in kernels_root().rglob("*.cu")}
    assert there == used


def test_every_source_file_has_tests_under_its_name():
    """On the emulator or on a GPU: `test_<kernel>.py` below tests/emulator or tests/cuda."""
    tests = Path(__file__).resolve().parent
    named = {path.stem for folder in ("emulator", "cuda") for path in (tests / folder).rglob("test_*.py")}
    assert sorted({f"test_{path.stem}" for path in kernels_root().rglob("*.cu")} - named) == []


def test_every_kernel_claims_an_architecture():
    assert all(kernel.archs for kernel in KERNELS)
