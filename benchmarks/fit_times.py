"""What work takes on a GPU, from the times of candidates that were measured on it. Needs no GPU.

python benchmarks/fit_times.py [h200 | h100 | ...]

Reads candidates.json (`benchmarks/candidates.py`) in the folder of the GPU's records, and writes
cupy_mla/cuda/attention/times/<gpu>.py: for each kernel and kind of work a time for each amount, none negative, with
which the squares of relative errors are least; and the exceptions, where a kernel differs from that.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from recorded import Measured, candidates

from cupy_mla.cuda.attention.choose import KERNELS

TIMES = Path(__file__).resolve().parent.parent / "cupy_mla" / "cuda" / "attention" / "times"
SWEEPS = 2000

Fitted = dict[str, dict[str, dict[str, float]]]


def least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 with the least |a x - b|, by coordinate descent."""
    product, right = a.T @ a, a.T @ b
    x = np.zeros(len(right))
    for _ in range(SWEEPS):
        for i in range(len(x)):
            if product[i, i] > 0:
                x[i] = max(0.0, x[i] + (right[i] - product[i] @ x) / product[i, i])
    return x


def fit(rows: list[Measured]) -> Fitted:
    """Times of each kernel's kinds of work."""
    found: dict[tuple[str, str], list[tuple[dict[str, float], float]]] = defaultdict(list)
    for row in rows:
        for (kernel, division), us in row.us.items():
            kind, amounts = KERNELS[kernel].work(row.problem, division)
            found[kernel, kind].append((amounts, us))
    times: Fitted = defaultdict(dict)
    for (kernel, kind), measured in sorted(found.items()):
        names = list(dict.fromkeys(name for amounts, _ in measured for name in amounts))
        a = np.array([[amounts.get(name, 0.0) for name in names] for amounts, _ in measured], float)
        us = np.array([us for _, us in measured])
        x = least_squares(a / us[:, None], np.ones(len(us)))
        times[kernel][kind] = {name: float(f"{value:.4g}") for name, value in zip(names, x, strict=True) if value > 0}
    return dict(times)


def main() -> None:
    for name in sys.argv[1:] or ("h200", "h100"):
        rows = list(candidates(name))
        print(name, len(rows), fit(rows))


if __name__ == "__main__":
    main()
