"""What the benchmarks share: inputs, the peer, timing side by side, and the records.

A record is `{"gpu", "driver", "cuda", "cupy", "commit", "date", "rows": [{"case", "ours_us", "peer_us", "ratio",
"max_abs_err"}, ...]}` with ratio = peer / ours, so above 1 we are faster.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

SETS = 4  # input sets in rotation, so that nothing stays in L2 that would not in service
REPEATS = 15

Call = Callable[[], Any]


def flash_mla_peer() -> ModuleType:
    """FlashMLA's own kernels, from the folder CUPY_MLA_PEER (default .peer, see shared/peers/get_flashmla.sh)."""
    folder = Path(os.environ.get("CUPY_MLA_PEER", ROOT / ".peer"))
    if not (folder / "flash_mla_interface.py").exists():
        sys.exit(f"{folder} holds no flash_mla_interface.py; fill it with get_flashmla.sh or set CUPY_MLA_PEER")
    sys.path.insert(0, str(folder))
    return importlib.import_module("flash_mla_interface")


def graph_of(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One CUDA graph that makes all calls, one after the other. Compiled and warmed up before the capture."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_side_by_side(*candidates: Sequence[Call]) -> list[float]:
    """Microseconds a call of each candidate, median over alternating replays.

    Args:
        candidates: for each, its calls on the input sets, in the same order for all.
    """
    graphs = [graph_of(calls) for calls in candidates]
    times: list[list[float]] = [[] for _ in graphs]
    for repeat in range(REPEATS + 2):
        for graph, taken in zip(graphs, times, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # so that the host has queued all before the first kernel starts
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if repeat >= 2:
                taken.append(start.elapsed_time(stop) * 1e3 / len(candidates[0]))
    return [statistics.median(t) for t in times]


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b|; NaN where either is NaN."""
    return (a.float() - b.float()).abs().max().item()


class Record:
    """The rows of one benchmark, printed as they come and written as JSON at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        print(f"{'case':<52} {'ours us':>9} {'peer us':>9} {'ratio':>6} {'max diff':>9}")

    def add(self, case: str, ours_us: float, peer_us: float, max_abs_err: float, **more: Any) -> None:
        ratio = peer_us / ours_us
        self.rows.append(
            {"case": case, "ours_us": round(ours_us, 2), "peer_us": round(peer_us, 2), "ratio": round(ratio, 3),
             "max_abs_err": max_abs_err, **more}
        )  # fmt: skip
        print(f"{case:<52} {ours_us:9.1f} {peer_us:9.1f} {ratio:6.2f} {max_abs_err:9.1e}", flush=True)

    def geometric_mean(self, select: Callable[[str], bool] = lambda case: True) -> float:
        logs = [math.log(row["ratio"]) for row in self.rows if select(row["case"])]
        return math.exp(sum(logs) / len(logs))

    def write(self, folder: Path | None = None) -> Path:
        """Write `<name>.json` into benchmarks/results, or into $OUT where that is set."""
        folder = folder or Path(os.environ.get("OUT", RESULTS))
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps({**environment(), "rows": self.rows}, indent=1) + "\n")
        return path


def environment() -> dict[str, str]:
    """The head of a record."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    gpu, driver = subprocess.check_output(query, text=True).strip().split(", ")
    cuda = cupy.cuda.runtime.runtimeGetVersion()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=False)
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "cupy": cupy.__version__,
        "commit": os.environ.get("CUPY_MLA_COMMIT") or git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
