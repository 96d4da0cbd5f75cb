"""Compares the machine code of all kernels with that of an earlier commit, without a GPU.

python benchmarks/machine_code.py save FILE [--arch 90a ...]      compile everything here, write one line a kernel
python benchmarks/machine_code.py compare FILE                    compile everything here, report what differs

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

from cupy_mla.cuda import all_kernels
from cupy_mla.cuda.kernel import sections


def fingerprint(cubin: bytes) -> str:
    """A hash of the instructions of a cubin's kernel."""
    (code,) = [content for name, content in sections(cubin) if name.startswith(".text.")]
    return hashlib.sha256(code).hexdigest()[:24]


def compiled(index: int, arch: str) -> tuple[str, str, str]:
    """A variant's name, the architecture, and its fingerprint."""
    kernel = all_kernels()[index]
    cubin, _ = kernel.compile(arch)
    return repr(kernel), arch, fingerprint(cubin)


def fingerprints(archs: list[str]) -> list[tuple[str, str, str]]:
    """Of every variant for each architecture it claims, or for those of `archs`."""
    work = [(i, a) for i, kernel in enumerate(all_kernels()) for a in kernel.archs if not archs or a in archs]
    with ProcessPoolExecutor() as pool:
        return sorted(pool.map(compiled, *zip(*work, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", action="append", default=[], help="only these architectures")
    options = parser.parse_args()
    now = fingerprints(options.arch)
    if options.what == "save":
        options.file.write_text("".join(json.dumps(line) + "\n" for line in now))
        print(f"{len(now)} variants written to {options.file}")
        return
    before = [json.loads(line) for line in options.file.read_text().splitlines()]
    before = [line for line in before if not options.arch or line[1] in options.arch]
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
