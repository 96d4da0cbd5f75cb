"""Choices beside the records: how much slower the chosen candidate is than the fastest that was measured.

candidates.json has many candidates of each call. Other records have one a call: what they say is whether the
times that choices are made with are those that were measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import pytest

from cupy_mla.cuda.attention.dense import faster_than_lists
from cupy_mla.cuda.attention.problem import DenseProblem
from cupy_mla.cuda.attention.times import exceptions, lists_us, microseconds
from cupy_mla.cuda.driver import Gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from recorded import FOLDERS, Measured, candidates, kernels_of, other_records, short_contexts, us_of

MEAN, WORST = 0.01, 0.06
# Of calls, the part where a candidate that no kernel offers is faster by more than WORST: each one that is offered
# takes some 8 us of a first call.
MOST_NOT_OFFERED = 0.003
# Of prefill of many queries: whether neighbours list the same rows, and where lists end, nobody knows before. To look
# for groups of queries that do takes some 5 % of a call where there are none, and they are up to four times as fast.
MEAN_UNKNOWN = 0.02

MOST_ABOVE = 0.05  # of calls that no time was fitted to, the part that may be slower by more than WORST

# What all candidates of a call take, beside what they should: something else kept the GPU busy then.
DISTURBED, MOST_DISTURBED = 1.4, 0.02


class Replayed(NamedTuple):
    """A call of a record.

    Attributes:
        slower: how much slower the candidate that is chosen among the measured ones is than the fastest.
        slower_than_offered: than the fastest of those that a kernel offers.
        slowed: how the measured times of all compare with the expected ones.
        row: the call.
    """

    slower: float
    slower_than_offered: float
    slowed: float
    row: Measured


def replayed(row: Measured) -> Replayed:
    problem = row.problem._replace(kernel=row.kernel)
    times, kernels = {}, kernels_of(problem)
    factors = {} if isinstance(problem, DenseProblem) else exceptions(problem)
    for kernel, division in row.us:
        factor = factors.get(f"{kernel} {division}", 1.0)
        times[kernel, division] = factor * microseconds(problem.gpu, kernel, kernels[kernel].work(problem, division))
    offered = {
        (name, division)
        for name, kernel in kernels.items()
        if row.kernel in ("", name) and kernel.serves(problem)
        for division in kernel.candidates(problem)
    }
    chosen = row.us[min((way for way in times if way in offered), key=lambda way: times[way])]
    best, best_offered = min(row.us.values()), min(us for way, us in row.us.items() if way in offered)
    slowed = median(us / times[way] for way, us in row.us.items())
    return Replayed(chosen / best - 1, chosen / best_offered - 1, slowed, row)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_chosen_candidate_is_hardly_slower_than_the_fastest(name):
    rows = list(candidates(name))
    if not rows:
        pytest.skip(f"no candidates were measured on an {name}")
    found = [*map(replayed, rows)]
    assert len(rows) > 1700
    assert mean(of.slower for of in found) < MEAN
    unknown = [of for of in found if of.row.kind == "large prefill"]
    assert mean(of.slower for of in unknown) < MEAN_UNKNOWN
    known = [of for of in found if of.row.kind != "large prefill" and of.slowed < DISTURBED]
    worst = [of for of in known if of.slower_than_offered > WORST]
    assert not worst, f"{len(worst)} calls, {max(worst)}"
    not_offered = [of for of in known if of.slower > WORST]
    assert len(not_offered) < MOST_NOT_OFFERED * len(known), not_offered
    slowed = [of.slowed for of in found if not of.row.problem.prefill and not of.row.kernel]
    assert sum(by >= DISTURBED for by in slowed) < MOST_DISTURBED * len(slowed)


@pytest.mark.parametrize("name", FOLDERS)
def test_calls_that_no_time_was_fitted_to(name):
    """Few calls that the fit has not seen are served by a candidate that is much slower than the fastest."""
    rows = list(candidates(name, "candidates_held_out"))
    if not rows:
        pytest.skip(f"no other candidates were measured on an {name}")
    slower = [replayed(row).slower for row in rows]
    assert len(rows) > 750
    assert mean(slower) < MEAN
    assert sum(by > WORST for by in slower) < MOST_ABOVE * len(rows)


# Of dense attention: the host knows how long requests may be, not how long they are, of half of these calls.
DENSE_MEAN, DENSE_WORST, DENSE_MOST_ABOVE = 0.02, 0.10, 0.05


@pytest.mark.parametrize("record", ["dense_candidates", "dense_candidates_held_out"])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_chosen_candidate_of_dense_attention(name, record):
    rows = list(candidates(name, record))
    if not rows:
        pytest.skip(f"no {record} were measured on an {name}")
    found = [*map(replayed, rows)]
    assert len(rows) > 200
    assert mean(of.slower for of in found) < DENSE_MEAN
    above = [of for of in found if of.slower > DENSE_WORST]
    assert len(above) < DENSE_MOST_ABOVE * len(rows), max(above)


# Of the time that is expected, the middle half of a kernel's rows are within this.
CLOSE = 0.15
# Dense attention's are fitted to equal and to drawn lengths, of which only the first are compared.
DENSE_CLOSE = 0.35


@pytest.mark.parametrize("name", FOLDERS)
def test_times_are_those_of_other_records(name):
    """Of decode: prefills' depend on what lists hold."""
    errors: dict[str, list[float]] = {}
    for problem, kernel, division, us in other_records(name):
        if isinstance(problem, DenseProblem) or not problem.prefill:
            expected = microseconds(problem.gpu, kernel, kernels_of(problem)[kernel].work(problem, division))
            errors.setdefault(kernel, []).append(abs(expected / us - 1))
    assert len(errors) >= 6
    for kernel, found in errors.items():
        close = DENSE_CLOSE if kernel.startswith("dense") else CLOSE
        assert median(found) < close, (kernel, median(found))


# Of short contexts: the host knows how long they may be, not how long they are. Over bf16 rows of 128 heads and a
# sixth of these, lists took 10 and 11 % less time than the dense way, which was taken.
SHORT_MEAN, SHORT_WORST = 0.01, 0.12
LISTS_CLOSE = 0.1  # of the time of making lists


@pytest.mark.parametrize("name", FOLDERS)
def test_the_way_of_short_contexts(name):
    """The dense way or lists: the one that is taken is hardly slower than the other."""
    rows = list(short_contexts(name))
    if not rows:
        pytest.skip(f"short contexts were not measured on an {name}")
    slower = [us["dense" if faster_than_lists(of) else "lists"] / min(us.values()) - 1 for of, us in rows]
    assert len(rows) == 64
    assert mean(slower) < SHORT_MEAN
    assert max(slower) < SHORT_WORST


@pytest.mark.parametrize("name", FOLDERS)
def test_what_making_lists_takes(name):
    """As measured: the rows of short contexts can say that it is too little, not that it is too much."""
    lists, gpu = 4096, Gpu(0, 132, 90, 227, name.upper())
    us = us_of(name, "cache_ops", f"convert indices {lists} x 2048")
    assert abs(lists_us(gpu, lists) / us - 1) < LISTS_CLOSE
