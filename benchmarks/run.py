"""Runs benchmark programs, one at a time on each GPU, and puts their records into the README and docs/.

python benchmarks/run.py [PROGRAM ...] [--gpus 0,1] [--seconds S] [--limit S] [--quick] [--rows REGEX] [--log FOLDER]

A PROGRAM is the name of one, or a name and arguments in quotes: "training --long". Without any, all of PROGRAMS run,
after `load_kernels`, which compiles and loads all kernels, a part on each GPU. Programs with the longest limit begin
first; those that need several GPUs, or all CPU cores, run by themselves, with all, when the others have ended. A line
a program says its name, GPU, exit status, seconds and last line of output; the rest of its output is in the log folder.

FlashMLA is taken from the folder CUPY_MLA_PEER (default .peer), or from an installed flash_mla, vllm or sgl_kernel;
each result is compared with its. DeepGEMM and vLLM's top-k are taken from CUPY_MLA_INDEXER_PEERS (see `indexer.py`).
The peers of training are the packs in CUPY_MLA_PEER_BACKWARD (see `backward_peers.py`).
Programs whose peer, or second GPU, is not found are left out. `vllm_engine.py` needs a pack of vLLM and is run when it
is named. Records go to benchmarks/results, or to $OUT where that is set; the README is rewritten when all rows of a
program were measured and $OUT is not set. Exit status 1: a program failed, a result was wrong, or a program was not
begun or did not end in time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
# Seconds after which a program is ended: some three times what it takes on an H200, or more.
PROGRAMS = {
    "training": 360, "cache_ops": 240, "indexer": 180, "portable": 180, "decode_batches": 150, "host_overhead": 150,
    "layer": 150, "thresholds": 150, "served": 120, "formats": 120, "sparse_decode": 120, "sparse_prefill": 120,
    "indexer_v41": 120, "dense_decode": 120, "small_prefill": 120, "dense_fp8": 120, "dense_bandwidth": 120,
    "short_contexts": 120, "batch_invariant": 120, "accuracy": 120,
    "training_accuracy": 120, "context_parallel": 180, "warm_up": 360,
}  # fmt: skip
LIMIT = 600.0  # of all others
LOAD = "load_kernels"
NO_PEER = 3  # exit status of a program whose peer, or second GPU, was not found
DONE, LEFT_OUT, FAILED, TIMED_OUT, NOT_BEGUN = "done", "left out", "failed", "timed out", "not begun"


class Program(NamedTuple):
    """A program of this folder.

    Attributes:
        name: with its own arguments, as it was asked for.
        command: its name and all arguments.
        limit: seconds after which it is ended.
    """

    name: str
    command: list[str]
    limit: float

    @property
    def runs_alone(self) -> bool:
        alone = self.command[0] in ("context_parallel", "warm_up")
        return alone or any(a.startswith("--tensor-parallel") for a in self.command)


class Running(NamedTuple):
    """A program on its GPUs, since `began`, until `until` at most; times are `time.monotonic`'s."""

    program: Program
    gpus: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    until: float


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them: its own names where it is set, else the numbers of those that nvidia-smi
    lists; empty where there are none."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return []
    return [str(number) for number in range(len(re.findall(r"^GPU ", listed, re.M)))]


def package_path() -> str:
    """PYTHONPATH by which the package of this checkout is found."""
    return os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH"))))


def start(program: Program, gpus: str, log: Path, deadline: float) -> Running:
    """Start a program on GPUs, as CUDA_VISIBLE_DEVICES names them."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": package_path()}
    name, *arguments = program.command
    file = log / (re.sub(r"[^\w.-]+", "_", program.name) + ".log")
    with file.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", str(FOLDER / f"{name}.py"), *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
    now = time.monotonic()
    return Running(program, gpus, process, file, now, min(now + program.limit, deadline))


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it has started: its session, as engines are process groups of their own."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def ended(running: Running) -> str | None:
    """How a program ended, once nothing of it is left; prints its line. None: it goes on."""
    status, now = running.process.poll(), time.monotonic()
    if status is None and now < running.until:
        return None
    kill(running.process)
    lines = running.log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    end = TIMED_OUT if status is None else {0: DONE, NO_PEER: LEFT_OUT}.get(status, FAILED)
    shown = TIMED_OUT if status is None else f"status {status}"
    head = f"{running.program.name:<18} GPU {running.gpus:<3} {shown:<9} {now - running.began:4.0f} s"
    print(f"{head} | {last}"[:220], flush=True)
    return end


def run(programs: list[Program], places: list[str], log: Path, deadline: float) -> list[str]:
    """Run programs, the next one in whatever place is free; how they ended.

    Args:
        places: GPUs that one program has at a time, as CUDA_VISIBLE_DEVICES names them.
        log: folder for what each program prints.
        deadline: when what runs is ended, and no more is begun.
    """
    waiting = deque(programs)
    running: dict[str, Running] = {}
    ends: list[str] = []
    try:
        while running or (waiting and time.monotonic() < deadline):
            for place in places:
                if place in running and (end := ended(running[place])):
                    ends.append(end)
                    del running[place]
                if place not in running and waiting and time.monotonic() < deadline:
                    running[place] = start(waiting.popleft(), place, log, deadline)
            time.sleep(0.02)
    finally:  # Ctrl-C or SIGTERM
        for one in running.values():
            kill(one.process)
    for program in waiting:
        print(f"{program.name:<18} {NOT_BEGUN}", flush=True)
    return [*ends, *([NOT_BEGUN] * len(waiting))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="a name, or in quotes a name and arguments")
    parser.add_argument("--gpus", help="as in CUDA_VISIBLE_DEVICES: 0,1 (default: all visible ones)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all programs together")
    parser.add_argument("--limit", type=float, help="seconds for each program, in the place of its own limit")
    parser.add_argument("--quick", action="store_true", help="a few rows of programs without arguments of their own")
    parser.add_argument("--rows", metavar="REGEX", help="of these programs, rows in whose name this is found")
    parser.add_argument("--log", type=Path, help="folder for what programs print ($OUT/log, or a new one)")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    gpus = options.gpus.split(",") if options.gpus else visible_gpus()
    if not gpus:
        parser.error("no GPU was found")
    shared = ["--quick"] * options.quick + (["--only", options.rows] if options.rows else [])
    loads: list[Program] = []
    programs: list[Program] = []
    for text in dict.fromkeys(options.programs or [LOAD, *PROGRAMS]):
        name, *own = shlex.split(text)
        if not (FOLDER / f"{name}.py").is_file():
            parser.error(f"{name} is no program of {FOLDER}")
        limit = options.limit or PROGRAMS.get(name, LIMIT)
        if name == LOAD:
            parts = [[name, str(part), str(len(gpus))] for part in range(len(gpus))]
            loads += [Program(" ".join(part), part, limit) for part in parts]
        else:
            programs.append(Program(text, [name, *(own or shared)], limit))
    programs.sort(key=lambda program: -program.limit)
    log = options.log or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="benchmarks"), "log")
    log.mkdir(parents=True, exist_ok=True)
    print(f"{len(loads + programs)} programs on GPUs {','.join(gpus)}; logs: {log}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))
    loaded = run(loads, gpus, log, deadline)
    ends = run([program for program in programs if not program.runs_alone], gpus, log, deadline)
    ends += run([program for program in programs if program.runs_alone], [",".join(gpus)], log, deadline)
    print(", ".join(f"{number} {end}" for end, number in Counter(loaded + ends).items()), flush=True)
    failed = not {*loaded, *ends} <= {DONE, LEFT_OUT}
    whole = any(len(program.command) == 1 for program in programs)
    if DONE in ends and whole and "OUT" not in os.environ:
        env = os.environ | {"PYTHONPATH": package_path()}
        failed |= subprocess.run([sys.executable, str(FOLDER / "report.py")], env=env).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
