"""compute-sanitizer's memcheck and racecheck on the small cases: which are clean.

python benchmarks/racecheck.py [--tool racecheck] [--all-seconds S] [what names of small cases begin with ...]

Some processes at a time check several cases each, by one tool, and then by the next, which finds their kernels
compiled: that takes most of the time. Cases of a process that is not clean are then checked alone. If all of these are
clean alone, none of them counts as clean, unless their process had no time to end.
The visible GPUs have the processes in turn. COMPUTE_SANITIZER names the tool. 2026.4 (`pip install
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import small_cases
from run import kill, visible_gpus

FOUND = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
SANITIZER = os.environ.get("COMPUTE_SANITIZER", FOUND)
CLEAN, NOT_BEGUN, DID_NOT_END = "clean", "not begun", "did not end"
MOST_CASES = 8  # of a process, which takes 10 s before its first case
OPTIONS = "-lineinfo -DEVERY_LANE_ARRIVES"
SUMMARY = re.compile(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) (?:hazard|error)")
TOOLS = {
    "memcheck": ("--report-api-errors", "no", "--error-exitcode", "1"),
    "racecheck": ("--show-backtrace", "no", "--print-limit", "1000"),
}


class Run(NamedTuple):
    """How cases are checked.

    Attributes:
        tools: of compute-sanitizer.
        options: NVRTC options for all kernels.
        seconds: for each case of a process, which is ended after these.
        at_once: processes.
        log: folder for what each process prints.
    """

    tools: Sequence[str]
    options: str
    seconds: float
    at_once: int
    log: Path


def check(names: Sequence[str], gpu: str | None, run: Run, until: float) -> str:
    """Check cases by each tool, in one process, on a GPU, as CUDA_VISIBLE_DEVICES names it: the first verdict that is
    not clean."""
    for tool in run.tools:
        verdict = check_by(tool, names, gpu, run, min(run.seconds * len(names), until - time.monotonic()))
        if verdict != CLEAN:
            return f"{verdict} ({tool})"
    return CLEAN


def check_by(tool: str, names: Sequence[str], gpu: str | None, run: Run, seconds: float) -> str:
    """The verdict of one tool.

    What the process prints goes to a file with the names of the tool and of its first case.
    """
    if seconds <= 0:
        return NOT_BEGUN
    command = [SANITIZER, "--tool", tool, *TOOLS[tool], sys.executable]
    command += [small_cases.__file__, f"--options={run.options}", "--exactly", *names]
    more = f"_and_{len(names) - 1}_more" * (len(names) > 1)
    file = run.log / f"{tool}_{names[0].replace(' ', '_')}{more}.txt"
    env = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    with file.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill(process)
            return DID_NOT_END
    summary = SUMMARY.search(file.read_text())
    if summary is None:
        return f"no summary, status {status}"
    return CLEAN if status == 0 and summary[1] == "0" else f"{summary[1]} reports, status {status}"


def check_all(groups: Sequence[Sequence[str]], run: Run, until: float) -> list[str]:
    """The verdicts of groups of cases, each in a process of its own. The visible GPUs have them in turn."""
    gpus = itertools.cycle(visible_gpus() or [None])
    with ThreadPoolExecutor(run.at_once) as pool:
        return [*pool.map(check, groups, gpus, itertools.repeat(run), itertools.repeat(until))]


def verdicts_of(groups: Sequence[Sequence[str]], run: Run, until: float) -> dict[str, str]:
    """The verdict of each case: together with its group, and then alone where the group is not clean."""
    together = check_all(groups, run, until)
    verdicts = {name: verdict for group, verdict in zip(groups, together, strict=True) for name in group}
    alone = [[name] for group in groups if len(group) > 1 for name in group if verdicts[name] != CLEAN]
    for (name,), verdict in zip(alone, check_all(alone, run, until), strict=True):
        if not verdict.startswith(NOT_BEGUN):
            verdicts[name] = verdict
    for group, verdict in zip(groups, together, strict=True):
        failed = not verdict.startswith((CLEAN, NOT_BEGUN, DID_NOT_END))
        if failed and all(verdicts[name] == CLEAN for name in group):
            verdicts |= dict.fromkeys(group, f"clean alone; {len(group)} cases together: {verdict}")
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without, all cases")
    parser.add_argument("--tool", choices=TOOLS, help="of compute-sanitizer; without, one after the other")
    parser.add_argument("--options", default=OPTIONS, help="NVRTC options for all kernels")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case of a process")
    parser.add_argument("--all-seconds", type=float, default=math.inf, help="for all cases together")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--log", type=Path, help="folder for what each process prints")
    arguments = parser.parse_args()
    log = arguments.log or Path(tempfile.mkdtemp(prefix="sanitizers"))
    log.mkdir(parents=True, exist_ok=True)
    run = Run(
        [arguments.tool] if arguments.tool else [*TOOLS], arguments.options, arguments.seconds, arguments.at_once, log
    )
    names = [name for name, _ in small_cases.cases() if small_cases.is_named(name, arguments.names)]
    until = time.monotonic() + arguments.all_seconds
    processes = max(min(run.at_once, len(names)), math.ceil(len(names) / MOST_CASES))
    groups = [names[start::processes] for start in range(processes)]  # neighbours take alike
    verdicts = verdicts_of(groups, run, until)
    for name in names:
        print(f"{name}: {verdicts[name]}")
    unclean = len(names) - [*verdicts.values()].count(CLEAN)
    print(f"{len(names) - unclean} of {len(names)} cases are clean; {log}")
    sys.exit(not names or unclean > 0)


if __name__ == "__main__":
    main()
