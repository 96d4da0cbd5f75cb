"""Choices beside the records: how much slower the chosen candidate is than the fastest that was measured.

candidates.json of an H100 has many candidates of each call. Other records have one a call: what they say is whether the
times that choices are made with are those that were measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import geometric_mean, mean, median

import pytest

from cupy_mla.cuda.attention.choose import KERNELS, choose
from cupy_mla.cuda.attention.times import exceptions, microseconds

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from recorded import FOLDERS, Measured, candidates, other_records

MEAN, WORST = 0.01, 0.06
# Of prefill of many queries: whether neighbours list the same rows, and where lists end, nobody knows before. Groups of
# queries are up to three times as fast as all else where they do, and so much slower at most where they do not.
WORST_UNKNOWN = 0.10


MOST_ABOVE = 0.05  # of calls that no time was fitted to, the part that may be slower by more than WORST

# What all candidates of a call take, beside what they should: something else kept the GPU busy then.
DISTURBED, MOST_DISTURBED = 1.4, 0.02


def replayed(row: Measured) -> tuple[float, float]:
    """How much slower the candidate that is chosen among the measured ones is than the fastest, and how the measured
    times of all compare with the expected ones."""
    problem = row.problem._replace(kernel=row.kernel)
    times = {}
    for kernel, division in row.us:
        factor = exceptions(problem).get(f"{kernel} {division}", 1.0)
        times[kernel, division] = factor * microseconds(problem.gpu, kernel, KERNELS[kernel].work(problem, division))
    offered = {
        (name, division)
        for name, kernel in KERNELS.items()
        if row.kernel in ("", name) and kernel.serves(problem)
        for division in kernel.candidates(problem)
    }
    chosen = min((way for way in times if way in offered), key=lambda way: times[way])
    return row.us[chosen] / min(row.us.values()) - 1, median(us / times[way] for way, us in row.us.items())


@pytest.mark.parametrize("name", FOLDERS)
def test_the_chosen_candidate_is_hardly_slower_than_the_fastest(name):
    rows = list(candidates(name))
    if not rows:
        pytest.skip(f"no candidates were measured on an {name}")
    found = [(*replayed(row), row) for row in rows]
    assert len(rows) > 2000
    assert mean(by for by, _, _ in found) < MEAN
    worst = [
        (by, row.problem)
        for by, slowed, row in found
        if by > (WORST_UNKNOWN if row.kind == "large prefill" else WORST) and slowed < DISTURBED
    ]
    assert not worst, f"{len(worst)} calls, {max(worst)}"
    known = [slowed for _, slowed, row in found if not row.problem.prefill and not row.kernel]
    assert sum(slowed >= DISTURBED for slowed in known) < MOST_DISTURBED * len(known)


@pytest.mark.parametrize("name", FOLDERS)
def test_calls_that_no_time_was_fitted_to(name):
    """Few calls that the fit has not seen are served by a candidate that is much slower than the fastest."""
    rows = list(candidates(name, "candidates_held_out"))
    if not rows:
        pytest.skip(f"no other candidates were measured on an {name}")
    slower = [replayed(row)[0] for row in rows]
    assert len(rows) > 900
    assert mean(slower) < MEAN
    assert sum(by > WORST for by in slower) < MOST_ABOVE * len(rows)


@pytest.mark.parametrize("name", FOLDERS)
def test_choices_beside_the_rules_of_the_record(name):
    """What is chosen now is in the mean no slower than what was chosen when the record was made."""
    rows = [row for row in candidates(name) if choose(row.problem._replace(kernel=row.kernel))[:2] in row.us]
    if not rows:
        pytest.skip(f"no candidates were measured on an {name}")
    ratios = [row.us[choose(row.problem._replace(kernel=row.kernel))[:2]] / row.us[row.chosen] for row in rows]
    assert len(rows) > 1500
    assert geometric_mean(ratios) < 0.995


# Of the time that is expected, the middle half of a kernel's rows are within this.
CLOSE = {"h200": 0.15, "h100": 0.15}


@pytest.mark.parametrize("name", FOLDERS)
def test_times_are_those_of_other_records(name):
    """Of decode: prefills' depend on what lists hold."""
    errors: dict[str, list[float]] = {}
    for problem, kernel, division, us in other_records(name):
        if not problem.prefill:
            expected = microseconds(problem.gpu, kernel, KERNELS[kernel].work(problem, division))
            errors.setdefault(kernel, []).append(abs(expected / us - 1))
    assert len(errors) >= 6
    for kernel, found in errors.items():
        assert median(found) < CLOSE[name], (kernel, median(found))
