"""`fp8_sm90` on an emulated GPU, in each of its divisions: tiles without a valid entry anywhere in the lists, on a GPU
so small that a CTA has several work items and an item several CTAs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_mla.cuda.attention.choose import EVENLY, VARIABLE, Choice

from .. import oracle
from ..cases import Paged, check_decode, off_zero, paged, queries, run_decode, sinks, with_holes
from ..cuda.attention.evenly import table_with
from .emulator import needs_compiler

pytestmark = needs_compiler

KERNEL = "fp8_sm90"
B, TOPK = 5, 390


@pytest.fixture
def divided(emulated, monkeypatch, replace_in_choose):
    """A function that makes every later call run the kernel, divided so."""
    monkeypatch.setenv(VARIABLE, KERNEL)

    def use(heads: int, splits: int, ctas: int = 0, **more: Any) -> None:
        choice = Choice(KERNEL, heads, splits, splits if not ctas else 1, ctas=ctas, **more)
        replace_in_choose("TABLE", table_with(KERNEL, lambda *sizes: choice))

    yield use
    assert KERNEL in emulated.launched


def with_empty_tiles(rng: np.random.Generator, fmt: oracle.Format, extra: bool, lengths: bool) -> list[Paged | None]:
    """Two caches. Of the lists one is empty, one full, and one ends with its only entry."""
    main = paged(rng, fmt, B, 1, TOPK, int(rng.choice([1, 61, 64])), lengths=lengths)
    full, last = main.indices[1].copy(), main.indices[2, :, -1].copy()
    with_holes(rng, main)
    main.indices[0], main.indices[1], main.indices[2] = -1, full, -1
    main.indices[2, :, -1] = last
    if not extra:
        return [main, None]
    more = paged(rng, fmt, B, 1, 130, 2, lengths=lengths)
    with_holes(rng, more)
    return [main, more]


@pytest.mark.long(sample=3)
@pytest.mark.parametrize(
    ("fmt", "division"),
    [
        (oracle.V32, {"heads": 64, "splits": 3}),  # a cluster
        (oracle.V4, {"heads": 32, "splits": 1, "ctas": 2}),  # whole items
        (oracle.V32, {"heads": 32, "splits": 1, "ctas": 1}),  # more of a CTA than the consumers look for
        (oracle.V32, {"heads": 32, "splits": EVENLY, "ctas": 7, "least_split": 1}),
        (oracle.V4, {"heads": 64, "splits": 3, "ctas": 4}),  # segments
        (oracle.V32, {"heads": 64, "splits": 2, "ctas": 2 * B, "teams": True}),
    ],
    ids=lambda x: x.name if isinstance(x, oracle.Format) else "-".join(f"{k}_{v}" for k, v in x.items()),
)
def test_empty_tiles(divided, kind, rng, fmt, division):
    for turn in range(2):
        h_q = int(rng.integers(1, division["heads"] + 1))
        main, extra = with_empty_tiles(rng, fmt, extra=turn == 1, lengths=turn == 1)
        q = off_zero(fmt, queries(rng, B, 1, h_q, fmt.d_qk), main, extra)
        divided(**division)
        check_decode(kind, fmt, q, main, extra, sink=sinks(rng, h_q), out_gaps=(0, 0, 0, 2))


@pytest.mark.long
@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_bits_of_divisions(divided, kind, rng, fmt):
    """Splits of a cluster, of a team, and one after the other give the same bits, wherever tiles are empty."""
    heads, splits = int(rng.choice([32, 64])), int(rng.integers(2, 5))
    main, extra = with_empty_tiles(rng, fmt, extra=bool(rng.integers(2)), lengths=bool(rng.integers(2)))
    q = queries(rng, B, 1, heads, fmt.d_qk)
    results = []
    for more in ({}, {"ctas": 2}, {"ctas": splits * B, "teams": True}):
        divided(heads, splits, **more)
        results.append(run_decode(kind, q, main, extra))
    for result in results[1:]:
        for part, first in zip(result, results[0], strict=True):
            assert np.array_equal(part.view(np.uint8), first.view(np.uint8))
