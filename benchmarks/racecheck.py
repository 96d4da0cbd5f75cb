"""compute-sanitizer's racecheck, or its memcheck, on the small cases, several processes at a time: which are clean.

python benchmarks/racecheck.py [--tool memcheck] [--all-seconds S] [what names of small cases begin with ...]

The visible GPUs have the cases in turn. COMPUTE_SANITIZER names the tool. 2026.4 (`pip install
nvidia-cuda-sanitizer-api`, compute-sanitizer in its folder) is good; 2025.3, which comes with CUDA 13.0, reports races
that are none. Kernels are compiled with EVERY_LANE_ARRIVES (ptx/mbarrier.cuh). What racecheck sees and what it does
not: benchmarks/log/few_heads_sm90.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import small_cases
from run import kill, visible_gpus

FOUND = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
SANITIZER = os.environ.get("COMPUTE_SANITIZER", FOUND)
OPTIONS = "-lineinfo -DEVERY_LANE_ARRIVES"
SUMMARY = re.compile(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) (?:hazard|error)")
TOOLS = {
    "racecheck": ("--show-backtrace", "no", "--print-limit", "1000"),
    "memcheck": ("--report-api-errors", "no", "--error-exitcode", "1"),
}


def check(name: str, gpu: str | None, tool: str, options: str, seconds: float, log: Path) -> bool:
    """Run one case on a GPU, as CUDA_VISIBLE_DEVICES names it; what it prints goes to a file of its own."""
    if seconds <= 0:
        print(f"{name}: not begun")
        return False
    command = [SANITIZER, "--tool", tool, *TOOLS[tool], sys.executable]
    command += [small_cases.__file__, f"--options={options}", name]
    file, started = log / (name.replace(" ", "_") + ".txt"), time.perf_counter()
    env = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    with file.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            kill(process)
    summary = SUMMARY.search(file.read_text())
    clean = status == 0 and summary is not None and summary[1] == "0"
    if clean:
        verdict = "clean"
    elif status is None:
        verdict = "did not end"
    else:
        verdict = f"{summary[1]} reports, status {status}" if summary else f"no summary, status {status}"
    print(f"{name}: {verdict} ({time.perf_counter() - started:.0f} s)", flush=True)
    return clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without, all cases")
    parser.add_argument("--tool", choices=TOOLS, default="racecheck", help="of compute-sanitizer")
    parser.add_argument("--options", default=OPTIONS, help="NVRTC options for all kernels")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a case")
    parser.add_argument("--all-seconds", type=float, default=math.inf, help="for all cases together")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--log", type=Path, help="folder for what each case prints")
    arguments = parser.parse_args()
    tool, options = arguments.tool, arguments.options
    log = arguments.log or Path(tempfile.mkdtemp(prefix=tool))
    log.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in small_cases.cases() if small_cases.is_named(name, arguments.names)]
    until = time.monotonic() + arguments.all_seconds

    def check_one(name: str, gpu: str | None) -> bool:
        return check(name, gpu, tool, options, min(arguments.seconds, until - time.monotonic()), log)

    with ThreadPoolExecutor(arguments.at_once) as pool:
        clean = list(pool.map(check_one, names, itertools.cycle(visible_gpus() or [None])))
    print(f"{sum(clean)} of {len(names)} cases are clean; {log}")
    sys.exit(not (names and all(clean)))


if __name__ == "__main__":
    main()
