"""Registers, shared memory and CTAs an SM of every variant of the portable kernel, by architecture. Needs no GPU.

python benchmarks/kernel_table.py

Compiles all of them (minutes) and prints the table of docs/portable.md.
"""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from cupy_mla.cuda.attention.kernels import portable
from cupy_mla.cuda.kernel import SHARED_BYTES, THREADS, exported
from cupy_mla.layouts import ATTENTION_LAYOUTS, EXTRA_LAYOUTS

# Of an SM (CUDA programming guide, "Technical Specifications per Compute Capability"): KB of shared memory, threads.
# A CTA takes 1 KB more than it asks for; a warp gets registers in units of 256.
SM = {
    "80": (164, 2048),
    "86": (100, 1536),
    "89": (100, 1536),
    "90": (228, 2048),
    "100": (228, 2048),
    "120": (100, 1536),
}
REGISTERS, REGISTER_UNIT, RESERVED = 65536, 256, 1024
COLUMNS = (
    "layout and width", "heads", "shape", "rows of a tile", "shared memory", "registers of a thread", "spills",
    "CTAs an SM",
)  # fmt: skip


class Built(NamedTuple):
    """What the compiler made of a variant."""

    registers: int
    spilled: int
    shared: int
    threads: int

    def ctas(self, arch: str) -> int:
        """How many fit an SM."""
        shared, threads = SM[arch]
        of_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        return min(
            1024 * shared // (self.shared + RESERVED), threads // self.threads,
            REGISTERS // (of_warp * self.threads // 32),
        )  # fmt: skip


def build(number: int, arch: str) -> Built:
    cubin, report = [*portable.kernels()][number].compile(arch)
    registers, spilled = (
        int(re.findall(pattern, report)[0]) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores")
    )
    return Built(registers, spilled, exported(cubin, SHARED_BYTES), exported(cubin, THREADS))


def main() -> None:
    kernels = [*portable.kernels()]
    work = [(i, arch) for i, kernel in enumerate(kernels) for arch in kernel.archs]
    with ProcessPoolExecutor() as pool:
        built = dict(zip(work, pool.map(build, *zip(*work, strict=True)), strict=True))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for number, kernel in enumerate(kernels):
        found = {arch: built[number, arch] for arch in kernel.archs}
        layout = next(x for x in ATTENTION_LAYOUTS if x.defines().items() <= kernel.defines.items())
        heads, rows, limit = (kernel.defines[name] for name in ("HEADS", "TILE_ROWS", "SHARED_LIMIT"))
        registers = ", ".join(f"sm_{arch} {b.registers}" for arch, b in found.items())
        spills, shared, ctas = (
            "/".join(str(x) for x in sorted(set(values)))
            for values in (
                [b.spilled for b in found.values()], [b.shared for b in found.values()],
                [b.ctas(arch) for arch, b in found.items()],
            )
        )  # fmt: skip
        extra = next((x.name for x in EXTRA_LAYOUTS if kernel.defines.get("EXTRA_ROW_STRIDE") == x.row_stride), "")
        name = f"{layout.name} {layout.d_qk}{extra and f', {extra}'}"
        print(f"| {name} | {heads} | {limit // 1024} KB | {rows} | {shared} | {registers} | {spills} | {ctas} |")


if __name__ == "__main__":
    main()
