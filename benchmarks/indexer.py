"""The lightning indexer beside DeepGEMM's logits and vLLM's top-k: prefill and decode, the steps and the whole.

python benchmarks/indexer.py [--quick] [--only REGEX] [--limit SECONDS]

CUPY_MLA_INDEXER_PEERS names the folders that `get_indexer_peers.sh` filled, with ":" between them (default
.peer-indexer:.peer-indexer-033); the best of all is the peer of a row. Two versions cannot be loaded by one process, so
each has a process of its own. A row is timed by one process after the other, while the others wait. First, DeepGEMM's
kernels are compiled by several processes. A row of decode is timed in three windows of some ms, peers and ours in turn,
and the median of them counts: what slows one down for so long decides nothing.

Schedules of decode's logits, ours as DeepGEMM's, are made outside of what is timed: an engine makes one a step, for all
layers.

DeepGEMM's decode takes one or two queries a request. Requests of more are given to it as vLLM does: as that many
requests of one query each, with lengths and block tables repeated outside of what is timed. `peer` says so.

Rows have `calc_diff` of the logits from float64 on some queries, and in decode `keys_tb_s`, at which keys are read; or
`exact`: 1 where the chosen sets are those of a stable sort. Sizes are drawn anew in each run, under the record's
`seed`. Shapes come in order of importance; those that the limit leaves no time for are named in the record's
`left_out`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import INDEXER, judge
from harness import Options, Record, time_side_by_side
from indexer_peers import SPAWN, PeerProcess, Peers, answer_each, complaining, ready, unpacked

import cupy_mla
from cupy_mla.cuda import driver, logits, logits_sm90, topk
from cupy_mla.cuda.logits import PORTABLE, VARIABLE
from cupy_mla.layouts import INDEXER_FP8

HEADS, K, BLOCK = 64, 2048, 64
SETS = 3  # of inputs in rotation
WINDOWS = 3  # of a row of decode
LARGEST_SETS = 20 << 30  # bytes
SAMPLE = 24  # queries or rows that are compared
COMPILERS = 6  # processes a peer
COMPILE_SECONDS = 60  # at most

PREFILLS = ((4096, 8192), (4096, 32768), (2048, 131072), (256, 131072), (8192, 8192))
DECODES = (
    (1, 1, 4096), (1, 1, 32768), (1, 1, 131072), (8, 1, 32768), (8, 1, 131072), (64, 1, 8192), (64, 1, 32768),
    (64, 1, 131072), (64, 2, 32768), (128, 1, 8192), (128, 1, 65536), (256, 1, 4096),
)  # fmt: skip
QUICK = ((4096, 8192), (64, 1, 32768), (256, 131072), (64, 1, 131072), (1, 1, 32768), (64, 2, 32768))
DRAWN_PREFILLS, DRAWN_DECODES, DRAWN_SHORT = 5, 10, 3  # the last: decodes of at most K keys
PEERS_QUERIES = 2  # of a request, at most, in DeepGEMM's decode
Shape = tuple[int, ...]  # queries and keys, or requests, queries of each and keys
Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """A row: what is timed, of which shape."""

    work: str
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.work} {' x '.join(map(str, self.shape))}"

    @property
    def peers_work(self) -> Case:
        """The peers have one kernel for logits."""
        return Case(self.work.removeprefix("portable_"), self.shape)


def shapes(rng: np.random.Generator, quick: bool) -> list[Shape]:
    """Every shape, the most important ones first, drawn ones last."""
    if quick:
        return list(QUICK)
    drawn: list[Shape] = []
    for i in range(DRAWN_DECODES):
        b, n = int(2 ** rng.uniform(0, 8)), int(rng.choice([1, 1, 2, 3]))
        drawn.append((b, n, int(2 ** rng.uniform(12, min(17, 23 - np.log2(b * n)))) // 64 * 64))
        if i < DRAWN_PREFILLS:
            keys = int(2 ** rng.uniform(12, 17)) // 64 * 64
            drawn.append((min(int(2 ** rng.uniform(8, 13)), keys), keys))
    drawn += [(int(2 ** rng.uniform(0, 8)), 1, int(rng.integers(1, K // 64 + 1)) * 64) for _ in range(DRAWN_SHORT)]
    return list(dict.fromkeys((*QUICK, *DECODES, *PREFILLS, *drawn)))


def cases(shape: Shape) -> list[Case]:
    kind = "prefill" if len(shape) == 2 else "decode"
    works = (f"{kind}_logits", f"select_{kind}", f"topk_{kind}", f"portable_{kind}_logits")
    return [Case(work, shape) for work in works]


# --- inputs ---------------------------------------------------------------------------------------------------


def e4m3(*shape: int) -> torch.Tensor:
    """Rows of 128 normal numbers, quantized under a scale each."""
    rows = torch.empty(*shape, 128, device="cuda", dtype=torch.float8_e4m3fn)
    for part in rows.view(-1, 128).split(1 << 22):
        values = torch.randn(part.shape, device="cuda")
        part.copy_((values * (448 / values.abs().amax(-1, keepdim=True))).to(torch.float8_e4m3fn))
    return rows


def weights(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, device="cuda") * (HEADS * 128) ** -0.5 * 0.008


def ragged(m: int, n: int) -> Tensors:
    """Queries at the end of n keys: query i sees n - m + i + 1 of them."""
    ends = torch.arange(n - m + 1, n + 1, device="cuda", dtype=torch.int32)
    return (
        e4m3(m, HEADS),
        e4m3(n),
        torch.rand(n, device="cuda") * 0.01 + 0.002,
        weights(m),
        torch.zeros_like(ends),
        ends,
    )


def paged(b: int, n: int, context: int) -> Tensors:
    """Requests of the same length, blocks in random order."""
    width = -(-context // BLOCK)
    cache = torch.empty(b * width, BLOCK * 132, device="cuda", dtype=torch.uint8)
    cache[:, : BLOCK * 128] = e4m3(b * width * BLOCK).view(torch.uint8).view(b * width, -1)
    scales = torch.rand(b * width, BLOCK, device="cuda") * 0.01 + 0.002
    cache[:, BLOCK * 128 :] = scales.view(torch.uint8)
    table = torch.randperm(b * width, device="cuda").view(b, width).to(torch.int32)
    lens = context - n + 1 + torch.arange(n, device="cuda", dtype=torch.int32).expand(b, n)
    return e4m3(b, n, HEADS), cache.view(-1, BLOCK, 132), weights(b * n), lens.contiguous(), table


def sets_of(make: Callable[[], Tensors]) -> list[Tensors]:
    """Several sets of inputs, fewer where they are large."""
    first = make()
    nbytes = sum(t.numel() * t.element_size() for t in first)
    return [first, *(make() for _ in range(min(SETS, max(LARGEST_SETS // nbytes, 1)) - 1))]


class Inputs:
    """The inputs of a shape's cases, in several sets; kept until another shape is asked for."""

    def __init__(self) -> None:
        self._shape: Shape | None = None
        self._sets: list[Tensors] = []

    def of(self, case: Case) -> list[Tensors]:
        if case.shape != self._shape:
            self._sets = []
            torch.cuda.empty_cache()
            make = ragged if len(case.shape) == 2 else paged
            self._shape, self._sets = case.shape, sets_of(lambda: make(*case.shape))
        work, sets = case.work, self._sets
        if work == "topk_prefill":
            return [(cupy_mla.indexer_logits(*s), *s[4:]) for s in fitting(sets, case)]
        if work == "topk_decode":
            return [(cupy_mla.paged_indexer_logits(*s, case.shape[2]), s[3]) for s in fitting(sets, case)]
        if work == "select_prefill":
            m, n = case.shape
            table = torch.randperm(-(-n // BLOCK), device="cuda").to(torch.int32)[None]
            return [(*s, torch.zeros(m, device="cuda", dtype=torch.int32), table) for s in sets]
        return sets


def fitting(sets: list[Tensors], case: Case) -> list[Tensors]:
    """As many of them as have logits that fit."""
    nbytes = 4 * int(np.prod(case.shape))
    return sets[: max(LARGEST_SETS // nbytes, 1)]


# --- calls ----------------------------------------------------------------------------------------------------


def schedule(shape: Shape, s: Tensors) -> torch.Tensor:
    """Ours, of a decode's keys."""
    requests, queries, context = shape
    shares = logits_sm90.shares_of_schedule(driver.gpu(0), HEADS, requests, queries, context)
    return cupy_mla.paged_indexer_schedule(s[3], s[4], context, BLOCK, shares)


def ours(case: Case, sets: list[Tensors]) -> list[Callable[[], torch.Tensor]]:
    """One call of ours a set."""
    context, work = case.shape[-1], case.work.removeprefix("portable_")
    if work in ("decode_logits", "select_decode"):
        schedules = [schedule(case.shape, s) for s in sets]
        if work == "decode_logits":
            call = partial(cupy_mla.paged_indexer_logits, max_context_len=context, clean=False)
        else:
            call = partial(cupy_mla.select_rows_paged, max_context_len=context, k=K, slots=True)
        return [partial(call, *s, schedule=own) for s, own in zip(sets, schedules, strict=True)]
    made: dict[str, Callable[..., torch.Tensor]] = {
        "prefill_logits": lambda *a: cupy_mla.indexer_logits(*a, clean=False),
        "topk_prefill": lambda logits, starts, ends: cupy_mla.topk_indices(logits, K, starts, ends),
        "topk_decode": lambda logits, lens: cupy_mla.topk_indices(logits, K, None, lens.view(-1)),
        "select_prefill": lambda *a: cupy_mla.select_rows(
            *a[:6], K, req_id=a[6], block_table=a[7], block_size=BLOCK
        ),
    }  # fmt: skip
    return [partial(made[work], *s) for s in sets]


def theirs(case: Case, sets: list[Tensors], peers: Peers) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """The peers' calls, by what they are called."""
    context, work = case.shape[-1], case.work
    if work == "prefill_logits":
        return {"DeepGEMM": [lambda s=s: peers.logits(*s) for s in sets]}
    if work == "topk_prefill":
        outs = [torch.empty(len(s[0]), K, device="cuda", dtype=torch.int32) for s in sets]
        return {"per_row": [lambda s=s, o=o: peers.topk_prefill(*s, o) for s, o in zip(sets, outs, strict=True)]}
    if work == "select_prefill":
        outs = [torch.empty(len(s[0]), K, device="cuda", dtype=torch.int32) for s in sets]

        def select(s: Tensors, out: torch.Tensor) -> torch.Tensor:
            peers.topk_prefill(peers.logits(*s[:6]), s[4], s[5], out)
            return cupy_mla.convert_req_index_to_global_index(s[6], s[7], out, BLOCK)

        return {"DeepGEMM, per_row": [lambda s=s, o=o: select(s, o) for s, o in zip(sets, outs, strict=True)]}
    rows = case.shape[0] * case.shape[1]
    usable = [name for name in peers.names if name != "cooperative_topk" or rows <= 64]
    outs = [torch.empty(rows, K, device="cuda", dtype=torch.int32) for s in sets]
    if work == "topk_decode":
        return {
            name: [lambda s=s, o=o, name=name: peers.topk_decode(name, *s, o) for s, o in zip(sets, outs, strict=True)]
            for name in usable
        }
    gemm = "DeepGEMM" if case.shape[1] <= PEERS_QUERIES else "DeepGEMM, a request each query"
    given = [for_deep_gemm(s) for s in sets]
    schedules = [peers.schedule(s[3]) for s in given]

    def logits(s: Tensors, schedule: torch.Tensor) -> torch.Tensor:
        return peers.paged_logits(*s, schedule, context)

    if work == "decode_logits":
        return {gemm: [lambda s=s, m=m: logits(s, m) for s, m in zip(given, schedules, strict=True)]}
    requests = torch.arange(case.shape[0], device="cuda", dtype=torch.int32).repeat_interleave(case.shape[1])

    def select_paged(name: str, s: Tensors, g: Tensors, schedule: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        peers.topk_decode(name, logits(g, schedule), s[3], out)
        return cupy_mla.convert_req_index_to_global_index(requests, s[4], out, BLOCK)

    every = list(zip(sets, given, schedules, outs, strict=True))
    return {
        f"{gemm}, {name}": [lambda e=e, name=name: select_paged(name, *e) for e in every] for name in usable
    }  # fmt: skip


def for_deep_gemm(s: Tensors) -> Tensors:
    """A decode's inputs as DeepGEMM takes them: a query is a request where requests have too many."""
    q8, cache, w, lens, table = s
    queries = lens.shape[1]
    if queries <= PEERS_QUERIES:
        return s
    return q8.flatten(0, 1).unsqueeze(1), cache, w, lens.reshape(-1, 1), table.repeat_interleave(queries, 0)


# --- whether results are right --------------------------------------------------------------------------------


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


def float64_logits(q8: torch.Tensor, k8: torch.Tensor, ks: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Logits of one query [H, 128] over keys."""
    return (torch.relu(k8.double() @ q8.double().T) * w.double()).sum(1) * ks.double()


def check_logits(case: Case, s: Tensors, got: torch.Tensor) -> float:
    """calc_diff over some queries."""
    found, exact = [], []
    for row in torch.randint(0, len(got), (SAMPLE,)).tolist():
        if "prefill" in case.work:
            q8, k8, ks, w, _, ends = s
            seen = int(ends[row])
            exact.append(float64_logits(q8[row], k8[:seen], ks[:seen], w[row]))
        else:
            q8, cache, w, lens, table = s
            b, j = divmod(row, case.shape[1])
            seen, whole = int(lens[b, j]), cache.view(len(cache), -1)[table[b].long()]
            k8 = whole[:, : BLOCK * 128].reshape(-1, 128).view(torch.float8_e4m3fn)[:seen]
            ks = whole[:, BLOCK * 128 :].contiguous().view(torch.float32).reshape(-1)[:seen]
            exact.append(float64_logits(q8[b, j], k8, ks, w[row]))
        found.append(got[row, :seen])
    return calc_diff(torch.cat(found), torch.cat(exact))


def sorted_topk(logits: torch.Tensor) -> torch.Tensor:
    """Of one row, by a stable sort; ascending."""
    return logits.sort(descending=True, stable=True).indices[:K].sort().values


def check_topk(case: Case, s: Tensors, got: torch.Tensor) -> int:
    """1 where the sets of some rows are those of a stable sort."""
    if "select" in case.work:
        prefill = case.work == "select_prefill"
        logits = cupy_mla.indexer_logits(*s[:6]) if prefill else cupy_mla.paged_indexer_logits(*s, case.shape[2])
        ends = s[5] if prefill else s[3].view(-1)
    else:
        logits, ends = s[0], s[-1].view(-1)
    right = True
    for row in torch.randint(0, len(got), (SAMPLE,)).tolist():
        chosen = sorted_topk(logits[row, : int(ends[row])])
        if "select" in case.work:
            table = s[7][0] if case.work == "select_prefill" else s[4][row // case.shape[1]]
            chosen = table[chosen // BLOCK].long() * BLOCK + chosen % BLOCK
        right &= torch.equal(got[row, : len(chosen)].long(), chosen) and bool((got[row, len(chosen) :] == -1).all())
    return int(right)


# --- the peers' processes ------------------------------------------------------------------------------------


def serve(pipe: Connection, folder: Path) -> None:
    """Times of each case that is asked for, by the peers' names."""
    peers, every = Peers(folder), Inputs()
    answer_each(pipe, lambda case: times_of(case, every, peers, folder.name))


def times_of(case: Case, every: Inputs, peers: Peers, version: str) -> dict[str, float]:
    """Of those peers that can serve the case."""
    times = {}
    with complaining(f"{version} {case.name}"):
        for name, calls in theirs(case, every.of(case), peers).items():
            with complaining(f"{version} {case.name} {name}"):
                (times[name],) = time_side_by_side(calls)
    return times


def compile_kernels(folder: Path, some: list[Shape]) -> None:
    """Call DeepGEMM for so many queries each, over few keys: no kernel of its depends on more."""
    peers = Peers(folder, topk=False)
    for shape in some:
        if len(shape) == 2:
            peers.logits(*ragged(64, 128))
        else:
            s = for_deep_gemm(paged(*shape[:2], 128))
            peers.paged_logits(*s, peers.schedule(s[3]), 128)
    torch.cuda.synchronize()


def started(all_shapes: list[Shape], deadline: float) -> list[PeerProcess]:
    """The peers' processes, when all kernels are compiled."""
    folders = unpacked()
    several = list({shape[:-1] if len(shape) == 3 else "prefill": shape for shape in all_shapes}.values())
    compilers = [
        SPAWN.Process(target=compile_kernels, args=(folder, several[i::COMPILERS]), daemon=True)
        for folder in folders
        for i in range(COMPILERS)
    ]
    for process in compilers:
        process.start()
    processes = [PeerProcess(folder, serve) for folder in folders]
    kernels = [*logits.kernels(), *logits_sm90.kernels(), *topk.kernels()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: k.load(0), (k for k in kernels if k.defines.get("HEADS", HEADS) == HEADS)))
    until = min(deadline, time.monotonic() + COMPILE_SECONDS)
    for process in compilers:
        process.join(max(until - time.monotonic(), 0))
        process.kill()
    return ready(processes, deadline)


# --- the measuring process ------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--only", metavar="REGEX", default="", help="the rows in whose name this is found")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no row is begun")
    seed = int.from_bytes(os.urandom(4), "big")
    parser.add_argument("--seed", type=int, default=seed, help="of sizes and inputs (default: a new one)")
    parser.add_argument("--no-peer", action="store_true", help="time ours alone, and write no record")
    arguments = parser.parse_args()
    began = time.monotonic()
    deadline = began + arguments.limit
    options = Options(arguments.quick, arguments.only)
    every = shapes(np.random.default_rng(arguments.seed), options.quick)
    peers = [] if arguments.no_peer else started(every, deadline)
    record = Record("indexer", options, "ours us,peer us,ratio,check")
    print(f"{len(peers)} peers ready after {time.monotonic() - began:.0f} s", flush=True)
    inputs, left_out = Inputs(), []
    for shape in every:
        known: dict[Case, list[dict[str, float]]] = {}  # the peers' times, of each window
        for case in filter(lambda case: record.wants(case.name), cases(shape)):
            if time.monotonic() > deadline:
                left_out.append(case.name)
                continue
            ask = partial(times_of_peers, peers, case.peers_work, deadline)
            theirs = known.setdefault(case.peers_work, [])
            if not theirs:
                theirs.append(ask())
            if peers and not theirs[0]:
                left_out.append(case.name)
                continue
            measure(record, case, inputs.of(case), theirs, ask)
            torch.cuda.empty_cache()
    for peer in peers:
        peer.process.kill()
    record.note("seed", arguments.seed)
    if left_out:
        record.note("left_out", left_out)
    print(f"{len(record.rows)} rows, {len(left_out)} left out, {time.monotonic() - began:.0f} s", flush=True)
    if peers:
        judge(INDEXER, record.rows)
        print(record.write())


def times_of_peers(peers: list[PeerProcess], case: Case, deadline: float) -> dict[str, float]:
    """In one window."""
    return {name: us for peer in peers for name, us in peer.ask(case, deadline).items()}


def measure(
    record: Record, case: Case, sets: list[Tensors], theirs: list[dict[str, float]], ask: Callable[[], dict[str, float]]
) -> None:
    """Time ours, and write the row.

    Args:
        theirs: the peers' times, of each window so far. What further windows bring is added.
        ask: for the peers' times in a further window.
    """
    os.environ[VARIABLE] = PORTABLE if case.work.startswith("portable_") else ""
    calls = ours(case, sets)
    got = calls[0]()
    checked: dict[str, Any]
    if "logits" in case.work:
        checked = {"calc_diff": check_logits(case, sets[0], got)}
        wrong = not checked["calc_diff"] < 5e-6
    else:
        checked = {"exact": check_topk(case, sets[0], got)}
        wrong = not checked["exact"]
    if wrong:
        record.wrong.append(f"{case.name}: {checked}")
    del got
    ours_times = time_side_by_side(calls)
    for number in range(1, WINDOWS if "decode" in case.work else 1):
        torch.cuda.empty_cache()  # the next window's logits may stand elsewhere
        if number == len(theirs):
            theirs.append(ask())
        ours_times += time_side_by_side(calls)
    os.environ[VARIABLE] = ""
    ours_us = statistics.median(ours_times)
    peers = {name: statistics.median(times[name] for times in theirs if name in times) for name in theirs[0]}
    peer, peer_us = min(peers.items(), key=lambda item: item[1], default=("", float("nan")))
    fields = ("b", "next_n", "context") if len(case.shape) == 3 else ("m", "n")
    row = {
        "case": case.name, "work": case.work, **dict(zip(fields, case.shape, strict=True)), "heads": HEADS, "k": K,
        "ours_us": round(ours_us, 2), "peer_us": round(peer_us, 2), "peer": peer,
        "ratio": round(peer_us / ours_us, 3), **checked,
    }  # fmt: skip
    if case.work.endswith("decode_logits"):
        row["keys_tb_s"] = round(case.shape[0] * case.shape[2] * INDEXER_FP8.token_bytes / ours_us * 1e-6, 2)
    record.add_row(row, f"{ours_us:9.1f} {peer_us:9.1f} {peer_us / ours_us:9.2f} {next(iter(checked.values())):9.1e}")


if __name__ == "__main__":
    main()
