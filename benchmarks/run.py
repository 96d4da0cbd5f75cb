"""Runs the benchmarks, one program after the other, and puts their records into the README and docs/.

python benchmarks/run.py [--quick] [--only PROGRAM ...] [--rows REGEX]

FlashMLA is taken from the folder CUPY_MLA_PEER (default .peer), or from an installed flash_mla, vllm or sgl_kernel;
each result is compared with its. DeepGEMM and vLLM's top-k are taken from CUPY_MLA_INDEXER_PEERS (see `indexer.py`).
The peers of training are the packs in CUPY_MLA_PEER_BACKWARD (see `backward_peers.py`).
Programs whose peer, or second GPU, is not found are left out. `vllm_engine.py` needs a pack of vLLM and is run by
itself. Records go to benchmarks/results, or to $OUT where that is set; the README is rewritten when all rows of a
program were measured and $OUT is not set. Exit status 1: a program failed, or a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import report
from harness import NO_PEER
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
PROGRAMS = (
    "sparse_prefill", "small_prefill", "sparse_decode", "decode_batches", "dense_decode", "dense_fp8", "formats",
    "accuracy", "batch_invariant", "cache_ops", "portable", "thresholds", "host_overhead", "indexer", "indexer_v41",
    "served", "layer", "context_parallel", "training",
)  # fmt: skip
DONE, FAILED, LEFT_OUT = "done", "[red]failed", "[yellow]left out: its peer, or a second GPU, was not found"


def rows_of(program: str) -> int | None:
    """How many rows the program's last record has."""
    path = report.RESULTS / f"{program}.json"
    return len(json.loads(path.read_text())["rows"]) if path.exists() else None


def run(program: str, arguments: list[str], progress: Progress) -> str:
    """Run one program, its output above the progress display; returns how it ended."""
    task = progress.add_task(program, total=None if arguments else rows_of(program))
    command = [sys.executable, "-u", str(FOLDER / f"{program}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            progress.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    progress.update(task, total=1, completed=1)
    return {0: DONE, NO_PEER: LEFT_OUT}.get(process.returncode, FAILED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rows of each program")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", choices=PROGRAMS, default=PROGRAMS, help="these only")
    parser.add_argument("--rows", metavar="REGEX", help="rows in whose name this is found")
    options = parser.parse_args()
    arguments = ["--quick"] * options.quick + (["--only", options.rows] if options.rows else [])
    console = Console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    summary = Table("program", "ended", "seconds")
    ends = []
    with Progress(*columns, console=console) as progress:
        for program in options.only:
            started = time.perf_counter()
            ends.append(run(program, arguments, progress))
            summary.add_row(program, ends[-1], f"{time.perf_counter() - started:.0f}")
    console.print(summary)
    if DONE in ends and not arguments and "OUT" not in os.environ:
        report.write()
        console.print("README.md, docs/ and the plots are up to date with the records")
    return int(FAILED in ends)


if __name__ == "__main__":
    sys.exit(main())
