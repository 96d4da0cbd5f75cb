"""Every operation's example calls on an emulated Hopper GPU, beside NumPy, as the self-check compares them on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_mla.ops.table import OPERATIONS, Wanted
from cupy_mla.selfcheck.cases import Case

MOST_CALLS = 4  # of an operation in a run; others in each run


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_example_calls(emulated, kind, rng, name):
    def put(array: np.ndarray) -> Any:
        return kind.put(array)

    operation = OPERATIONS[name]
    calls = list(operation.calls(rng, Wanted(many=8)))
    for number in rng.permutation(len(calls))[:MOST_CALLS]:
        case = Case(operation, calls[number])
        want = case.run(np.asarray)
        for _ in range(2):  # from the second on they run a compiled form
            got = [r if isinstance(r, np.ndarray) else kind.take(r) for r in case.run(put)]
            assert case.agrees(got, want), case.name
    assert emulated.launched or not hasattr(operation, "results")
