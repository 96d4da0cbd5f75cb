"""Compares the machine code of all kernels with that of an earlier commit, without a GPU.

python benchmarks/machine_code.py save FILE       compile everything here, write one line a kernel
python benchmarks/machine_code.py compare FILE    compile everything here, report what differs

`--arch 90a` takes only that architecture, `--source attention/fp8` only kernels whose files begin so; both may be
repeated.

For changes that move or rename code and are not meant to change a kernel: the instructions of every variant must stay
the same bytes. Names of files, kernels and symbols do not count, so a variant is found again by its instructions; one
that changed is listed by its new name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from cupy_mla.cuda import all_kernels
from cupy_mla.cuda.kernel import sections

ADDRESSES = 4  # the constant bank with the addresses of a file's variables, in an order that follows from their names


def fingerprint(cubin: bytes) -> str:
    """A hash of the instructions of a cubin's kernel, without the places of addresses in their constant bank."""
    (code,) = [content for name, content in sections(cubin) if name.startswith(".text.")]
    words = np.frombuffer(code, np.uint64).copy().reshape(-1, 2)  # an instruction has 16 bytes
    form, bank = words[:, 0] >> np.uint64(9) & np.uint64(7), words[:, 0] >> np.uint64(54) & np.uint64(31)
    of_address = np.isin(form, (3, 5)) & (bank == ADDRESSES)  # forms of instructions with an operand of a bank
    words[of_address, 0] &= ~np.uint64(0xFFFF << 38)
    return hashlib.sha256(words.tobytes()).hexdigest()[:24]


def compiled(index: int, arch: str) -> tuple[str, str, str]:
    """A variant's name, the architecture, and its fingerprint."""
    kernel = all_kernels()[index]
    cubin, _ = kernel.compile(arch)
    return repr(kernel), arch, fingerprint(cubin)


def fingerprints(archs: list[str], sources: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Of every variant for each architecture it claims, or for those of `archs`, of files that begin with `sources`."""
    kernels = [(i, kernel) for i, kernel in enumerate(all_kernels()) if kernel.file.startswith(sources)]
    work = [(i, arch) for i, kernel in kernels for arch in kernel.archs if not archs or arch in archs]
    with ProcessPoolExecutor() as pool:
        return sorted(pool.map(compiled, *zip(*work, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "compare"], help="write the file, or say what differs from it")
    parser.add_argument("file", type=Path, help="machine code of every kernel, a line each")
    parser.add_argument("--arch", action="append", default=[], help="only these architectures")
    parser.add_argument("--source", action="append", default=[], help="only kernels whose files begin so")
    options = parser.parse_args()
    sources = tuple(options.source) or ("",)
    now = fingerprints(options.arch, sources)
    if options.what == "save":
        options.file.write_text("".join(json.dumps(line) + "\n" for line in now))
        print(f"{len(now)} variants written to {options.file}")
        return
    before = [json.loads(line) for line in options.file.read_text().splitlines()]
    before = [line for line in before if line[0].startswith(sources) and line[1] in (options.arch or [line[1]])]
    left = Counter((arch, code) for _, arch, code in before)
    changed = []
    for name, arch, code in now:
        if left[arch, code]:
            left[arch, code] -= 1
        else:
            changed.append(f"sm_{arch}  {name}")
    gone = sum(left.values())
    same = len(now) - len(changed)
    print(f"{len(now)} variants now, {len(before)} before: {same} the same, {len(changed)} changed or new")
    print("\n".join(changed))
    if gone:
        missing = {(arch, code) for (arch, code), n in left.items() if n}
        print("no longer there:")
        print("\n".join(f"sm_{arch}  {name}" for name, arch, code in before if (arch, code) in missing))
    raise SystemExit(bool(changed or gone))


if __name__ == "__main__":
    main()
