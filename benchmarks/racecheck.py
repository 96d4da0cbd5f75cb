"""compute-sanitizer's racecheck on the small cases, several processes at a time: which are clean, and what is reported.

python benchmarks/racecheck.py [names of small cases begin so ...]

COMPUTE_SANITIZER names the tool (2026.4 is what comes with `pip install nvidia-cuda-sanitizer-api`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import small_cases

SANITIZER = (
    os.environ.get("COMPUTE_SANITIZER") or shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
)
OPTIONS = "-lineinfo -DEVERY_LANE_ARRIVES"  # ptx/mbarrier.cuh
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazard")


def check(name: str, options: str, seconds: float, log: Path) -> bool:
    """Run one case; its output goes to a file of its own."""
    command = [SANITIZER, "--tool", "racecheck", "--show-backtrace", "no", "--print-limit", "1000", sys.executable]
    command += [str(Path(small_cases.__file__)), f"--options={options}", name]
    started = time.perf_counter()
    file = log / (name.replace(" ", "_") + ".txt")
    with file.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)  # what the tool has started, too
    text = file.read_text()
    summary = SUMMARY.search(text)
    clean = status == 0 and summary is not None and summary[1] == "0"
    verdict = "clean" if clean else f"did not end in {seconds:.0f} s" if status is None else f"status {status}, "
    took = time.perf_counter() - started
    print(f"{name}: {verdict}{'' if clean or summary is None else summary[0].lower()} ({took:.0f} s)", flush=True)
    return clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without, all cases")
    parser.add_argument("--options", default=OPTIONS, help="NVRTC options for all kernels")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a case")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--log", type=Path, default=Path("racecheck"), help="folder for what each case prints")
    arguments = parser.parse_args()
    arguments.log.mkdir(parents=True, exist_ok=True)
    starts = arguments.names or [""]
    names = [name for name, _ in small_cases.cases() if any(f"{name} ".startswith(f"{s} ".lstrip()) for s in starts)]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        clean = list(pool.map(lambda name: check(name, arguments.options, arguments.seconds, arguments.log), names))
    print(f"{sum(clean)} of {len(names)} cases are clean")
    sys.exit(not all(clean))


if __name__ == "__main__":
    main()
