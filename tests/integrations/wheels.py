"""The engines' wheels, of which tests read the Python files.

    python -m tests.integrations.wheels FOLDER [--seconds 120]

fetches them with pip, by name, and puts their Python files into the folder. Tests with the mark `contracts` find them
there when `CUPY_MLA_ENGINE_WHEELS` names it, and are skipped without; what cannot be fetched in time is said.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23", "megatron_core": "0.19.2"}
SERVED = {"vllm": (NEWEST["vllm"], "0.32.0")}  # where more than the newest is served
# A wheel that pip takes whatever Python runs it.
PLATFORMS = {
    "vllm": ("manylinux_2_28_x86_64", "3.12"), "sglang": ("manylinux_2_34_x86_64", "3.11"),
    "megatron_core": ("manylinux_2_28_x86_64", "3.12"),
}  # fmt: skip
VARIABLE = "CUPY_MLA_ENGINE_WHEELS"


class NotFetchedError(Exception):
    """Says which package is not there, and why."""


def python_files(package: str, version: str) -> Path:
    """The folder of a package's Python files, which holds the package's own.

    Raises:
        NotFetchedError: nobody has fetched it.
    """
    where = os.environ.get(VARIABLE)
    found = None if where is None else folder_of(Path(where), package, version)
    if found is None or not found.is_dir():
        raise NotFetchedError(f"{package} {version} is not in {where or 'a folder that ' + VARIABLE + ' names'}")
    return found


def folder_of(where: Path, package: str, version: str) -> Path:
    return where / f"{package}-{version}-python"


def fetch(where: Path, package: str, version: str, seconds: float) -> None:
    """Put a package's Python files into a folder, unless they are there.

    Raises:
        NotFetchedError: pip cannot fetch the wheel, or not in so many seconds.
    """
    if folder_of(where, package, version).is_dir():
        return
    platform, python = PLATFORMS[package]
    with TemporaryDirectory(dir=where) as made:
        download = [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--platform", platform,
            "--python-version", python, "--retries", "1", "-d", made, f"{package}=={version}",
        ]  # fmt: skip
        try:
            pip = subprocess.run(download, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise NotFetchedError(f"{package} {version}: not fetched within {seconds:.0f} s") from None
        if pip.returncode:
            raise NotFetchedError(f"{package} {version}: pip cannot fetch it: {pip.stderr.strip().splitlines()[-1]}")
        (wheel,) = Path(made).glob("*.whl")
        unpack(wheel, folder_of(where, package, version))


def unpack(wheel: Path, folder: Path) -> None:
    """The Python files of a wheel, and its name and version; another process never sees a part of them."""
    with zipfile.ZipFile(wheel) as archive, TemporaryDirectory(dir=wheel.parent) as made:
        whole = Path(made) / "whole"
        archive.extractall(whole, [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
        whole.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the Python files go")
    parser.add_argument("--seconds", type=float, default=120, help="after which what is not there is left")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def fetched(named: tuple[str, str]) -> str:
        try:
            fetch(options.folder, *named, options.seconds)
        except NotFetchedError as error:
            return f"not fetched: {error}"
        return f"{' '.join(named)} is there after {time.monotonic() - start:.0f} s"

    wanted = [(name, one) for name, newest in NEWEST.items() for one in SERVED.get(name, (newest,))]
    with ThreadPoolExecutor(len(wanted)) as pool:
        for line in pool.map(fetched, wanted):
            print(line, flush=True)


if __name__ == "__main__":
    main()
