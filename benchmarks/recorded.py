"""Records of attention calls as problems: what the choices of kernels are fitted to and judged by. Needs no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from cases import numbers

from cupy_mla.cuda.attention.choose import DENSE_KERNELS, KERNELS, choose
from cupy_mla.cuda.attention.dense import choose_dense
from cupy_mla.cuda.attention.divide import Division, division
from cupy_mla.cuda.attention.problem import DenseProblem, Problem
from cupy_mla.cuda.driver import Gpu, Launchable
from cupy_mla.cuda.paging import ceil_div
from cupy_mla.layouts import BF16_512, BF16_576, PLAIN_FP8_576, V4_FP8, V32_FP8

RESULTS = Path(__file__).resolve().parent / "results"
# Where the records of a GPU lie, by the name of its times: those of other GPUs than the first in folders of that name.
FOLDERS = {"h200": RESULTS} | {path.parent.name: path.parent for path in sorted(RESULTS.glob("*/*.json"))}
GONE = re.compile(r"^few_heads_sm90|counted=")  # kernels and divisions of `other_records` that are gone since
LAYOUTS = {"V32": V32_FP8, "V4": V4_FP8, "bf16": BF16_576}


@dataclass(frozen=True)
class RecordedGpu(Gpu):
    """A GPU that is not there.

    Attributes:
        at_once: how many clusters of 1, 2, ... CTAs it runs at a time, each CTA with an SM of its own.
    """

    at_once: tuple[int, ...] = ()

    def clusters_at_once(self, kernel: Launchable) -> tuple[int, ...]:
        return self.at_once


class Measured(NamedTuple):
    """A call and what it took.

    Attributes:
        problem: the call, without what is forced.
        us: microseconds by kernel and division.
        kernel: "portable" or "portable_99kb", if only that one was measured; else "".
    """

    problem: Problem | DenseProblem
    us: dict[tuple[str, Division], float]
    kernel: str
    kind: str


def kernels_of(problem: Problem | DenseProblem) -> dict[str, ModuleType]:
    """Those of sparse or of dense attention, by their names."""
    return DENSE_KERNELS if isinstance(problem, DenseProblem) else KERNELS


def gpu_of(record: dict[str, Any]) -> RecordedGpu:
    """The GPU of a record of candidates."""
    at_once = tuple(record["clusters_at_once"].get("fp8_sm90", ()))
    return RecordedGpu(0, record["sms"], record["capability"], record["shared_kb"], record["gpu"], at_once)


def problem_of(gpu: Gpu, row: dict[str, Any]) -> Problem:
    """The call of a row."""
    if "prefill" in row["kind"]:
        layout = BF16_576 if row["d_qk"] == 576 else BF16_512
        return Problem(gpu, layout, True, row["h"], row["s_q"], row["topk"], uneven="lengths" in row["lists"])
    return Problem(
        gpu, LAYOUTS[row["kind"].split()[0]], False, row["h"], row["b"] * row["s_q"], row["topk"], row["extra_topk"],
        uneven=bool(row["lengths"]), flat=row["extra_topk"] == 0,
    )  # fmt: skip


DENSE_LAYOUTS = {"dense bf16": BF16_576, "dense V32": V32_FP8, "dense plain": PLAIN_FP8_576}
DENSE_BLOCK = 64  # rows


def dense_problem_of(gpu: Gpu, row: dict[str, Any]) -> DenseProblem:
    """The dense call of a row."""
    rows = DENSE_BLOCK * ceil_div(row["length"], DENSE_BLOCK)
    return DenseProblem(gpu, DENSE_LAYOUTS[row["kind"]], row["h"], row["s_q"], row["b"], rows, rows, DENSE_BLOCK)


def way_of(text: str) -> tuple[str, Division]:
    """The kernel and division that a record names."""
    kernel, _, divided = text.partition(" ")
    return kernel, division(divided)


def candidates(name: str, record: str = "candidates") -> Iterator[Measured]:
    """The rows of a record of candidates of a GPU; none where there is no such record.

    `dense_candidates` has those of dense attention. `candidates_held_out` and `dense_candidates_held_out` have other
    calls: no times are fitted to them.
    """
    path = FOLDERS[name] / f"{record}.json"
    if not path.exists():
        return
    record = json.loads(path.read_text())
    gpu, found = gpu_of(record), {}
    for row in record["rows"]:
        problem = (dense_problem_of if row["kind"] in DENSE_LAYOUTS else problem_of)(gpu, row)
        us = {way_of(text): time for text, time in row["us"].items()}
        new = Measured(problem, us, row.get("kernel", ""), row["kind"])
        key = new.problem, new.kernel, row.get("lists"), row.get("rows")
        before = found.get(key, new)  # a call that was measured twice: the mean of what both rows have
        found[key] = new._replace(us={way: (us[way] + before.us[way]) / 2 for way in us if way in before.us})
    yield from found.values()


SHORT = {"v32_fp8": V32_FP8, "bf16": BF16_576}
TOPK = 2048  # entries of a list of short_contexts.json, and rows that a block table can name


def short_contexts(name: str) -> Iterator[tuple[DenseProblem, dict[str, float]]]:
    """The calls of a GPU's short_contexts.json, and microseconds of both ways, "dense" and "lists"; none without it."""
    path = FOLDERS[name] / "short_contexts.json"
    if not path.exists():
        return
    gpu = gpu_of(json.loads((FOLDERS[name] / "candidates.json").read_text()))
    for row in json.loads(path.read_text())["rows"]:
        layout, us = SHORT[row["layout"]], {way: row[f"{way}_us"] for way in ("dense", "lists")}
        yield DenseProblem(gpu, layout, row["h"], row["s_q"], row["b"], TOPK, TOPK, DENSE_BLOCK), us


def us_of(name: str, record: str, case: str) -> float:
    """What the row of that name took on a GPU; on the first one where there is no such record."""
    path = next(path for of in (FOLDERS[name], RESULTS) if (path := of / f"{record}.json").exists())
    return float(next(row["ours_us"] for row in json.loads(path.read_text())["rows"] if row["case"] == case))


OTHERS = (
    "decode_batches", "small_prefill", "sparse_decode", "sparse_prefill", "portable", "dense_decode", "dense_fp8"
)  # fmt: skip


def other_records(name: str) -> Iterator[tuple[Problem | DenseProblem, str, Division, float]]:
    """Calls of a GPU's other records, each with the one kernel and division that was measured, in microseconds."""
    heads = (folder / "candidates.json" for folder in (FOLDERS[name], RESULTS))  # the first GPU's where it has none
    head = next(path for path in heads if path.exists())
    gpu = replace(gpu_of(json.loads(head.read_text())), name=name.upper())
    for path in (FOLDERS[name] / f"{record}.json" for record in OTHERS):
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            known = "valid" not in row and "drawn" not in row["case"]  # else rows are fewer than the call says
            if known and "way" in row and not GONE.search(row["way"]):
                yield named_problem(gpu, row["case"]), *way_of(row["way"]), row["ours_us"]


def chosen_way(gpu: Gpu, row: dict[str, Any]) -> str:
    """The kernel and division that the package chooses on a GPU for the call of a row."""
    problem = named_problem(gpu, row["case"])
    if isinstance(problem, DenseProblem):
        chosen = choose_dense(problem)
    else:
        kernel = {163: "portable", 99: "portable_99kb"}.get(row.get("shape", 0), "")
        chosen = choose(problem._replace(kernel=kernel))
    return f"{chosen.kernel} {chosen.division}"


# What a row's name begins with, and the kind of its call.
DENSE_NAMES = {"dense": "dense bf16", "v32_fp8": "dense V32", "plain_fp8": "dense plain"}


def named_problem(gpu: Gpu, case: str) -> Problem | DenseProblem:
    """The call that a row's name says."""
    first, n = case.split()[0], numbers(case)
    if first in DENSE_NAMES:
        return dense_problem_of(gpu, {**n, "kind": DENSE_NAMES[first]})
    if first in ("prefill", "small", "causal"):
        layout = BF16_576 if n.get("d", n.get("d_qk")) == 576 else BF16_512
        return Problem(gpu, layout, True, n["h"], n["s_q"], n["topk"], uneven=case.endswith("lengths"))
    extra = n["topk"] - 128 if "+" in case else 0
    return Problem(
        gpu, LAYOUTS[first], False, n["h"], n["b"] * n["s_q"], n["topk"] - extra, extra, uneven="ragged" in case,
        flat=not extra,
    )  # fmt: skip
