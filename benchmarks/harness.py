"""What the benchmarks share: inputs, the peer, timing side by side, and the records.

A record is `{"gpu", "driver", "cuda", "cupy", "commit", "date", "peer", "rows": [{"case", "ours_us", "peer_us",
"ratio", "max_abs_err"}, ...]}` with ratio = peer / ours, so above 1 we are faster.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cupy
import recorded
import torch
from run import NO_PEER

from cupy_mla.cuda import all_kernels, driver
from cupy_mla.selfcheck.warmup import MOST_THREADS, load_all

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

BEGAN = time.monotonic()
SETS = 4  # input sets in rotation, so that nothing stays in L2 that would not in service
# Even: of two candidates each then comes behind itself half of the time, where small batches take up to 9 % less.
REPEATS = 16
COPIED = 1 << 30  # bytes read, and bytes written, by the copy whose rate bounds what reads memory
PIECE = 1 << 28  # bytes: copies of 0.5 GB and more at once, or of odd sizes, take 1.5 times as long on an H200
DIFFERENCE = 0.03  # norm of the difference of two results, relative

Call = Callable[[], Any]


# Where FlashMLA's Python functions are found: a folder's module, FlashMLA's own package, and what engines ship.
PEERS = ("flash_mla_interface", "flash_mla", "vllm.v1.attention.ops.flashmla", "sgl_kernel.flash_mla")
PEER_FUNCTIONS = ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd")


def find_peer() -> ModuleType | None:
    """FlashMLA's own kernels: in the folder CUPY_MLA_PEER (default .peer), or in an installed package; None: nowhere.

    A module that does not load, or has an older interface (whose schedules are not planned at the first call), is
    passed over with a message.
    """
    folder = Path(os.environ.get("CUPY_MLA_PEER", ROOT / ".peer"))
    if folder.is_dir():
        sys.path.insert(0, str(folder))
    elif "CUPY_MLA_PEER" in os.environ:
        sys.exit(f"CUPY_MLA_PEER is {folder}, which is no folder")
    for name in PEERS:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            module = importlib.import_module(name)
            for function in PEER_FUNCTIONS:
                getattr(module, function)
            module.get_mla_metadata()
        except (ImportError, OSError, AttributeError, RuntimeError, TypeError) as error:
            print(f"{name} cannot be used: {error}", file=sys.stderr)
        else:
            return module
    return None


def peer_name() -> str | None:
    """The peer that was imported, with the version of its package where it has one."""
    name = next((name for name in PEERS if name in sys.modules), None)
    if name is None:
        return None
    try:
        return f"{name} {importlib.metadata.version(name.partition('.')[0])}"
    except importlib.metadata.PackageNotFoundError:
        return name


def flash_mla_peer() -> ModuleType:
    """As `find_peer`; a program that cannot do without it ends where there is none, with status NO_PEER."""
    peer = find_peer()
    if peer is None:
        print(
            "FlashMLA was not found: install flash_mla, vllm or sgl_kernel, or give a folder with its "
            "flash_mla_interface.py in CUPY_MLA_PEER",
            file=sys.stderr,
        )
        sys.exit(NO_PEER)
    return peer


def load_kernels(which: str) -> None:
    """Compile and load kernels, so that no timed call does.

    Args:
        which: a regular expression that is found in what is printed of them: file, then constants by name.
    """
    capability = driver.gpu(0).capability
    wanted = [kernel for kernel in all_kernels() if re.search(which, repr(kernel)) and kernel.suits(capability)]
    load_all(wanted, 0, MOST_THREADS)


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


def kernels_of(calls: Sequence[Call]) -> int:
    """How many kernels a CUDA graph of all calls launches. The calls were made before."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _kernel_nodes(graph.raw_cuda_graph())


def _kernel_nodes(graph: Any) -> int:
    """The kernels of a CUgraph and of the graphs within it."""
    kinds = driver.api().CUgraphNodeType
    _, number = driver.call("cuGraphGetNodes", graph, 0)
    nodes, _ = driver.call("cuGraphGetNodes", graph, number)
    found = 0
    for node in nodes[:number]:
        kind = driver.call("cuGraphNodeGetType", node)
        if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            found += _kernel_nodes(driver.call("cuGraphChildGraphNodeGetGraph", node))
        found += kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL
    return found


def time_side_by_side(*candidates: Sequence[Call]) -> list[float]:
    """Microseconds a call of each candidate, as `replay_times` has them.

    Args:
        candidates: for each, its calls on the input sets, in the same order for all.
    """
    return [time / len(candidates[0]) for time in replay_times([graph_of(calls) for calls in candidates])]


def copy_of(moved: int) -> Call:
    """A copy that reads and writes about so many bytes together, in pieces that begin and end at multiples of 512."""
    size = 512 * round(moved / 1024)
    source, target = (torch.empty(size, device="cuda", dtype=torch.uint8).split(PIECE) for _ in range(2))
    return lambda: [t.copy_(s) for t, s in zip(target, source, strict=True)]


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy of 1 GB."""
    (us,) = time_side_by_side([copy_of(2 * COPIED)])
    return 2e6 * COPIED / us


def replay_times(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int = REPEATS) -> list[float]:
    """Microseconds of each graph, as `times_in_turn` has them."""
    return times_in_turn([graph.replay for graph in graphs], repeats)


def times_in_turn(calls: Sequence[Call], repeats: int = REPEATS, untimed: int = 2) -> list[float]:
    """Microseconds of the GPU of each call, median over calls in turn, each time beginning with another one.

    Which is first matters: the same kernel took up to 3 us more in the first place than in the third. Each call is made
    `untimed` times before.
    """
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + untimed):
        for turn in range(len(calls)):
            number = (repeat + turn) % len(calls)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # so that the host has queued all before the first kernel starts
            start.record()
            calls[number]()
            stop.record()
            stop.synchronize()
            if repeat >= untimed:
                times[number].append(start.elapsed_time(stop) * 1e3)
    return [statistics.median(t) for t in times]


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b|; NaN where either is NaN."""
    return (a.float() - b.float()).abs().max().item()


def shown_difference(largest: float | None) -> str:
    """A difference for a row that is printed; None where nothing was compared."""
    return "        -" if largest is None else f"{largest:9.1e}"


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference of two large results, relative."""
    parts = [*zip(ours.split(1024), theirs.split(1024), strict=True)]
    apart = sum((x.float() - y.float()).square().sum(dtype=torch.float64) for x, y in parts)
    return float((apart / sum(y.float().square().sum(dtype=torch.float64) for _, y in parts)) ** 0.5)


def peak_bytes(call: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Memory that a call takes beside its results, from torch; it was made before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


class Options(NamedTuple):
    """What the command line of every benchmark takes."""

    quick: bool = False
    only: str = ""
    limit: float = math.inf

    @classmethod
    def parse(cls, description: str) -> Options:
        return cls(**vars(cls.parser(description).parse_args()))

    @classmethod
    def parse_with_seed(cls, description: str) -> tuple[Options, int]:
        """The same, and a seed of sizes and inputs: a new one, or that of `--seed`."""
        parser = cls.parser(description)
        parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of sizes and inputs")
        arguments = vars(parser.parse_args())
        seed = arguments.pop("seed")
        return cls(**arguments), seed

    @classmethod
    def parser(cls, description: str) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="a few rows, or smaller ones")
        parser.add_argument("--only", metavar="REGEX", default="", help="the rows in whose name this is found")
        parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no row is begun")
        return parser


class Record:
    """The rows of one benchmark, printed as they come and written as JSON at the end."""

    def __init__(self, name: str, options: Options, columns: str = "ours us,peer us,ratio,max diff") -> None:
        self.name = name
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.left_out: list[str] = []
        self.notes: dict[str, Any] = {}
        print(f"{'case':<52}", *(f"{column:>9}" for column in columns.split(",")))

    def note(self, name: str, value: Any) -> None:
        """Put something into the record's head, as the seed of drawn sizes."""
        self.notes[name] = value

    def wants(self, case: str) -> bool:
        """Whether the command line asks for this row, and there is time for it."""
        return re.search(self.options.only, case) is not None and self.in_time(case)

    def in_time(self, case: str) -> bool:
        """Whether a row may still be begun; one that may not is named in the record's `left_out`."""
        if time.monotonic() - BEGAN < self.options.limit:
            return True
        self.left_out.append(case)
        return False

    def compare(self, case: str, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        """`largest_difference` of two results of one attention. Those that differ by more than rounding explains
        (FlashMLA rounds V32's scales to bf16) make `write` fail, after all rows."""
        relative = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        if not relative < DIFFERENCE:
            self.wrong.append(f"{case}: ours and the peer's results differ by {relative:.1e}")
            print(f"WRONG {self.wrong[-1]}")
        return largest_difference(ours, theirs)

    def add(self, case: str, ours_us: float, peer_us: float, max_abs_err: float | None, **more: Any) -> None:
        """A row of two times; `more` goes into the record only. `max_abs_err`: None where nothing is compared."""
        ratio = peer_us / ours_us
        row = {"case": case, "ours_us": round(ours_us, 2), "peer_us": round(peer_us, 2), "ratio": round(ratio, 3)}
        shown = f"{ours_us:9.1f} {peer_us:9.1f} {ratio:9.2f} {shown_difference(max_abs_err)}"
        self.add_row({**row, "max_abs_err": max_abs_err, **more}, shown)

    def add_ways(self, case: str, times: dict[str, float], max_abs_err: float, **more: Any) -> None:
        """A row of two ways of ours by name: ratio = the second's time / the first's. `more` goes into the record."""
        first, second = times.values()
        ratio = second / first
        row = {"case": case, **{f"{name}_us": round(time, 1) for name, time in times.items()}, "ratio": round(ratio, 3)}
        shown = f"{first:9.1f} {second:9.1f} {ratio:9.2f} {max_abs_err:9.1e}"
        self.add_row({**row, "max_abs_err": max_abs_err, **more}, shown)

    def add_row(self, row: dict[str, Any], shown: str) -> None:
        """Any other row; `shown` is printed behind its name."""
        self.rows.append(row)
        print(f"{row['case']:<52} {shown}", flush=True)

    def write(self) -> Path:
        """Write the record into benchmarks/results, or into $OUT where that is set.

        `<name>.json` holds all rows of a run; when some were left out, it is `<name>.part.json`.

        Raises:
            SystemExit: a row's results were wrong.
        """
        part = ".part" if self.options.quick or self.options.only or self.left_out else ""
        if self.left_out:
            self.note("left_out", self.left_out)
        chosen = [row for row in self.rows if row.get("kind") != "dense"] if self.name in recorded.OTHERS else []
        for row in chosen:
            row["way"] = recorded.chosen_way(driver.gpu(0), row)
        path = Path(os.environ.get("OUT", RESULTS)) / f"{self.name}{part}.json"
        path.write_text(json.dumps({**environment(), **self.notes, "rows": self.rows}, indent=1) + "\n")
        if self.wrong:
            sys.exit("\n".join(self.wrong))
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
        **({"peer": peer} if (peer := peer_name()) else {}),
    }
