"""What work takes on a GPU, from the times of candidates that were measured on it. Needs no GPU.

python benchmarks/fit_times.py [h200 | h100 | ...]

Writes cupy_mla/cuda/attention/times/<gpu>.py from what candidates.py and dense_candidates.py have written into the
folder of the GPU's records: for each kernel and kind of work a time for each amount, none negative. It begins with
those of the least squares of relative errors, candidates near the fastest of their call counting most; then it goes
down the gradient of what is to be small: how much slower the chosen candidate is than the fastest one. Where a choice
of sparse attention is still slower by more than `EXCEPTION`, a row says how much less time the fastest takes for that
call. The time of an index list is what 4096 of them take, less LAUNCH.

What was measured on the other GPU alone, a kind of work, a kernel, or all of a GPU without such a record, has the times
of that one, scaled: by the GPU's candidates of other kinds of that kernel, or, where it has none, by its other records.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from recorded import FOLDERS, Measured, candidates, kernels_of, other_records, us_of

from cupy_mla.cuda.attention.divide import Division
from cupy_mla.cuda.attention.problem import DenseProblem, Problem
from cupy_mla.cuda.attention.times import name_of, size_of

TIMES = Path(__file__).resolve().parent.parent / "cupy_mla" / "cuda" / "attention" / "times"
EXCEPTION = 0.04  # slower than the fastest, from which on a call is an exception
NEAR = 3  # the power of (fastest / candidate) that a candidate's error counts with
LAUNCH, MADE = 2.0, 4096  # us of a launch behind others in a graph; lists that cache_ops.py makes
RECORDS = "candidates", "dense_candidates"
# Kernels of which a record has few rows each: they are scaled alike.
TOGETHER = dict.fromkeys(("dense_cluster_sm90", "dense_whole_sm90", "dense_sm90"), "dense kernels of 16-bit rows")
STEPS, RATE = 2500, 0.01  # of the descent, on logarithms
SOFTNESS = 0.02  # relative difference of times at which the faster candidate is taken as often as not
HONESTY = 0.1  # weight of the times' own errors in the descent
MOST_COUNTED = 1.0  # of a slower choice: where one is twice as slow, it does not matter how much more

Fitted = dict[str, dict[str, dict[str, float]]]
Exceptions = dict[tuple[Any, ...], dict[str, float]]


class Candidates:
    """All candidates of all calls as arrays: those that are offered compete.

    Attributes:
        names: (kernel, kind of work, amount), of which each has a time.
        us, call, kind: of each candidate: what it took, the numbers of its call and of its kernel and kind.
        offered: whether the package looks at it.
        entry, name, amount: of each amount: its candidate, its time's number, and how much.
    """

    def __init__(self, rows: list[Measured]) -> None:
        self.rows = rows
        kinds: dict[tuple[str, str], int] = {}
        names: dict[tuple[str, str, str], int] = {}
        listed: list[tuple[float, int, int, bool]] = []
        entries: list[tuple[int, int, float]] = []
        self.ways: list[Any] = []
        for number, row in enumerate(rows):
            problem = row.problem._replace(kernel=row.kernel)
            offered = {
                (name, division)
                for name, kernel in kernels_of(problem).items()
                if problem.kernel in ("", name) and kernel.serves(problem)
                for division in kernel.candidates(problem)
            }
            for way, us in row.us.items():
                words, of_work, amounts = kernels_of(problem)[way[0]].work(row.problem, way[1])
                key = way[0], name_of(words)
                for name, amount in zip(of_work, amounts, strict=True):
                    entries.append((len(listed), names.setdefault((*key, name), len(names)), amount))
                listed.append((us, number, kinds.setdefault(key, len(kinds)), way in offered))
                self.ways.append(way)
        self.names = names
        self.us, self.call, self.kind, self.offered = map(np.array, zip(*listed, strict=True))
        self.entry, self.name, self.amount = map(np.array, zip(*entries, strict=True))
        fastest = np.full(len(rows), np.inf)
        np.minimum.at(fastest, self.call, self.us)
        self.slower = self.us / fastest[self.call] - 1

    def times(self, x: np.ndarray) -> np.ndarray:
        """Of each candidate, with these times of amounts."""
        return np.bincount(self.entry, self.amount * x[self.name], len(self.us))

    def chosen(self, times: np.ndarray) -> np.ndarray:
        """The number of the offered candidate with the least time, of each call."""
        order = np.lexsort((np.where(self.offered, times, np.inf), self.call))
        return order[np.flatnonzero(np.diff(self.call[order], prepend=-1))]


def least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |a x - b|, by coordinate descent."""
    product, right = a.T @ a, a.T @ b
    x = np.zeros(len(right))
    for _ in range(1500):
        for i in np.flatnonzero(product.diagonal() > 0):
            x[i] = max(0.0, x[i] + (right[i] - product[i] @ x) / product[i, i])
    return x


def begin(data: Candidates, weight: np.ndarray) -> np.ndarray:
    """Times of amounts with the least squares of weighted relative errors, of each kernel and kind by itself."""
    x = np.zeros(len(data.names))
    kind_of_name = np.zeros(len(x), int)
    kind_of_name[data.name] = data.kind[data.entry]
    for kind in range(data.kind.max() + 1):
        own, here = np.flatnonzero(kind_of_name == kind), np.flatnonzero(data.kind == kind)
        a = np.zeros((len(data.us), len(own)))
        mine = kind_of_name[data.name] == kind
        a[data.entry[mine], np.searchsorted(own, data.name[mine])] = data.amount[mine]
        x[own] = least_squares(a[here] * (weight / data.us)[here, None], weight[here])
    return x


def descend(data: Candidates, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Times with which choices are less slow: Adam on their logarithms. A candidate is taken with a probability that
    falls with its time, so that there is a gradient."""
    logs, kept = np.log(np.maximum(x, 1e-6)), x > 0
    mean, square = np.zeros_like(x), np.zeros_like(x)
    excess = np.minimum(data.slower, MOST_COUNTED)
    cost, calls = excess + 3 * excess**2, len(data.rows)
    for step in range(STEPS):
        x = np.exp(logs) * kept
        times = data.times(x)
        score = np.where(data.offered, -np.log(times) / SOFTNESS, -np.inf)
        highest = np.full(calls, -np.inf)
        np.maximum.at(highest, data.call, score)
        taken = np.exp(score - highest[data.call])
        taken /= np.bincount(data.call, taken, calls)[data.call]
        expected = np.bincount(data.call, taken * cost, calls)
        slope = -taken * (cost - expected[data.call]) / SOFTNESS
        slope += 2 * HONESTY * weight * np.log(times / data.us)  # by the logarithm of a candidate's time
        each = np.bincount(data.name, (slope / times)[data.entry] * data.amount, len(x)) * x / calls
        mean, square = 0.9 * mean + 0.1 * each, 0.99 * square + 0.01 * each**2
        logs -= RATE * (1 - step / STEPS) * mean / (np.sqrt(square) + 1e-7)
    return np.exp(logs) * kept


def fit(rows: list[Measured]) -> tuple[Fitted, Exceptions]:
    """Times of all kinds of work, and the calls for which candidates take another time than that."""
    data = Candidates(rows)
    weight = (1 + data.slower) ** -NEAR
    if isinstance(rows[0].problem, DenseProblem):
        weight *= data.offered  # items of few lines were measured in many rounds, too, where they take other times
    x = np.array([float(f"{time:.4g}") if time > 1e-4 else 0.0 for time in descend(data, begin(data, weight), weight)])
    fitted: Fitted = {}
    for (kernel, kind, name), i in sorted(data.names.items()):
        fitted.setdefault(kernel, {}).setdefault(kind, {})
        if x[i]:
            fitted[kernel][kind][name] = float(x[i])
    exceptions: Exceptions = {}
    times = data.times(x)
    chosen = data.chosen(times)
    for number, row in enumerate(rows):
        here = np.flatnonzero((data.call == number) & data.offered)
        taken, best = chosen[number], here[np.argmin(data.us[here])]
        if isinstance(row.problem, DenseProblem) or row.kind == "large prefill":  # lengths and lists decide
            continue
        if data.us[taken] > (1 + EXCEPTION) * data.us[best]:
            kernel, division = data.ways[best]
            factor = data.us[best] / data.us[taken] * times[taken] / times[best]
            exceptions.setdefault(size_of(row.problem), {})[f"{kernel} {division}"] = float(f"{factor:.3g}")
    slower = data.slower[chosen]
    print(
        f"{len(rows)} calls: chosen {slower.mean():.2%} slower than the fastest, {(slower > 0.06).sum()} more than 6 %"
    )
    return fitted, exceptions


def measured(name: str) -> Iterator[tuple[Problem | DenseProblem, str, Division, float]]:
    """All candidates of a GPU, and of its other records those of kernels that are no candidates there, in us."""
    rows = [row for record in RECORDS for row in candidates(name, record)]
    yield from ((row.problem, *way, us) for row in rows for way, us in row.us.items())
    known = {kernel for row in rows for kernel, _ in row.us}
    yield from (row for row in other_records(name) if row[1] not in known)


def scaled(fitted: Fitted, name: str) -> Fitted:
    """Times of another GPU, those of decode scaled to what was `measured` on this one: for each kernel, or all of
    TOGETHER, the times at load, which are those of memory, and all others. Rows of prefills come from L2, and cards of
    one kind do not differ there."""
    shares: dict[str, list[tuple[float, float, float]]] = {}
    for problem, kernel, division, us in measured(name):
        words, of_work, amounts = kernels_of(problem)[kernel].work(problem, division)
        known = fitted.get(kernel, {}).get(name_of(words))
        if known is not None and (isinstance(problem, DenseProblem) or not problem.prefill):
            each = {n: amount * known.get(n, 0.0) for n, amount in zip(of_work, amounts, strict=True)}
            load = sum(value for n, value in each.items() if at_load(n))
            shares.setdefault(TOGETHER.get(kernel, kernel), []).append((load, sum(each.values()) - load, us))
    scales: dict[str, Any] = {}
    for kernel, found in shares.items():
        a = np.array(found)
        scales[kernel] = load, other = least_squares(a[:, :2] / a[:, 2:], np.ones(len(a)))
        print(f"{name} {kernel}, {len(a)} rows: at load {load:.2f}, all else {other:.2f} of the other GPU's")

    def times(kernel: str, kind: str, each: dict[str, float]) -> dict[str, float]:
        load, other = (1.0, 1.0) if "prefill" in kind else scales.get(TOGETHER.get(kernel, kernel), (1.0, 1.0))
        return {n: float(f"{value * (load if at_load(n) else other):.4g}") for n, value in each.items()}

    return {k: {kind: times(k, kind, each) for kind, each in kinds.items()} for k, kinds in fitted.items()}


def missing(fitted: Fitted, other: Fitted) -> Fitted:
    """What another GPU has times for and this one has not."""
    found = {k: {kind: each for kind, each in of.items() if kind not in fitted.get(k, {})} for k, of in other.items()}
    return {kernel: kinds for kernel, kinds in found.items() if kinds}


def at_load(name: str) -> bool:
    """Whether an amount of work takes what memory makes of it."""
    return "load" in name or "mean" in name


def lists(name: str) -> tuple[float, float]:
    """Microseconds of making index lists: the launch, and each; of the first GPU where they were not measured."""
    us = us_of(name, "cache_ops", f"convert indices {MADE} x 2048")
    return LAUNCH, float(f"{(us - LAUNCH) / MADE:.3g}")


def write(name: str, source: str, fitted: Fitted, exceptions: Exceptions) -> None:
    """The module with these times."""
    lines = [f'"""What work takes on a GPU, in microseconds. Written by benchmarks/fit_times.py from {source}."""', ""]
    lines += ["# fmt: off", "# ruff: noqa: E501", "TIMES: dict[str, dict[str, dict[str, float]]] = {"]
    for kernel, kinds in fitted.items():
        lines += [f"    {json.dumps(kernel)}: {{"]
        lines += [f"        {json.dumps(kind)}: {json.dumps(each)}," for kind, each in kinds.items()]
        lines += ["    },"]
    lines += ["}", "", "# By `times.size_of` a call: a candidate that takes so many times as long as TIMES say.", ""]
    lines += ["EXCEPTIONS: dict[tuple[str, int, bool, bool, int, int, int, int], dict[str, float]] = {"]
    lines += [f"    {size!r}: {json.dumps(each)}," for size, each in exceptions.items()]
    lines += ["}", "", "# Of making index lists: the launch, and each list.", f"LISTS = {lists(name)}", ""]
    (TIMES / f"{name}.py").write_text("\n".join(lines))


def main() -> None:
    fits: dict[str, tuple[Fitted, Exceptions]] = {}
    for name in FOLDERS:
        fitted: Fitted = {}
        exceptions: Exceptions = {}
        for rows in filter(None, (list(candidates(name, record)) for record in RECORDS)):
            of_record, more = fit(rows)
            fitted, exceptions = {**fitted, **of_record}, {**exceptions, **more}
        if fitted:
            fits[name] = fitted, exceptions
    for name in sys.argv[1:] or FOLDERS:
        fitted, exceptions = fits.get(name, ({}, {}))
        source = f"{name}'s candidates" if fitted else ""
        for other in (other for other in fits if other != name):
            lacked = missing(fitted, fits[other][0])
            if lacked:
                which = ", ".join(f"parts of {k}" if k in fitted else k for k in sorted(lacked))
                source += f"; {which} from " if fitted else ""
                source += f"{other}'s, scaled to the records of {name}"
            known = {kernel: fits[other][0][kernel] for kernel in lacked}  # its other kinds help to scale a kernel
            for kernel, kinds in missing(fitted, scaled(known, name)).items():
                fitted[kernel] = {**fitted.get(kernel, {}), **kinds}
        write(name, source, dict(sorted(fitted.items())), exceptions)


if __name__ == "__main__":
    main()
