"""`few_heads_sm90` on an emulated GPU, beside the oracle: tiles without a valid entry, and V32_FP8 rows that are
divided evenly over CTAs. Lists are drawn anew in each run; tests/cuda/attention asks a GPU for more of them."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.cuda.attention.choose import VARIABLE

from .. import oracle
from ..cases import (
    Paged,
    assert_decoded,
    check_decode,
    decode_oracle,
    off_zero,
    paged,
    queries,
    run_decode,
    scale_of,
    sinks,
    with_holes,
)
from ..cuda.attention import evenly as divided
from .emulator import needs_compiler

pytestmark = needs_compiler

KERNEL = "few_heads_sm90"
HEADS = pytest.mark.parametrize("heads", [8, 16])


@pytest.fixture(autouse=True)
def forced(emulated, monkeypatch):
    monkeypatch.setenv(VARIABLE, KERNEL)
    yield
    assert KERNEL in emulated.launched


@pytest.fixture
def evenly(heads, rng, force):
    """Every call's rows are divided evenly over a few CTAs, into splits of a pair of tiles and more."""
    force(division=divided.shares(heads, ctas=int(rng.integers(2, 12))))


def drawn(rng: np.random.Generator, fmt: oracle.Format, most_heads: int) -> tuple[np.ndarray, Paged]:
    """A batch of short lists with holes or lengths, or both."""
    b, s_q, topk = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.choice([1, 63, 65, 300, 390, 700]))
    main = paged(rng, fmt, b, s_q, topk, int(rng.choice([1, 61, 64])), lengths=bool(rng.integers(2)))
    if main.length is None or rng.integers(2):
        with_holes(rng, main)
    return off_zero(fmt, queries(rng, b, s_q, int(rng.integers(1, most_heads + 1)), fmt.d_qk), main), main


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V32_NOPE, oracle.BF16_576], ids=lambda fmt: fmt.name)
def test_tiles_without_an_entry(kind, rng, fmt):
    """By clusters, partial results and CTAs alone."""
    for num_splits in (1, 2, 17, None):
        q, main = drawn(rng, fmt, 16)
        check_decode(kind, fmt, q, main, sink=sinks(rng, q.shape[2]), num_splits=num_splits)


@pytest.mark.long(sample=1)
@HEADS
@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V32_NOPE], ids=lambda fmt: fmt.name)
def test_shares(kind, emulated, evenly, rng, fmt):
    """The same bits in whatever order warps run."""
    for _ in range(3):
        q, main = drawn(rng, fmt, 20)
        sink = sinks(rng, q.shape[2])
        first = check_decode(kind, fmt, q, main, sink=sink, out_gaps=(0, 1, 2, 3))
        emulated.seed += 1000
        again = run_decode(kind, q, main, sink=sink, layout=fmt.layout)
        assert [r.tobytes() for r in first] == [r.tobytes() for r in again]


@pytest.mark.long(sample=1)
@HEADS
def test_shares_of_two_lists(kind, evenly, rng):
    main, extra = (paged(rng, oracle.V32, 5, 2, topk, 64, lengths=True) for topk in (300, 130))
    main.length[:], extra.length[:] = [0, 1, 300, 5000, 64], [65, 0, 130, 0, 0]
    with_holes(rng, extra)
    check_decode(kind, oracle.V32, off_zero(oracle.V32, queries(rng, 5, 2, 13, 576), main, extra), main, extra)


@pytest.mark.parametrize("heads", [16])
def test_shares_of_a_plan(kind, evenly, rng):
    """Calls with one schedule: the first one divides its lists, and the others divide theirs as it did."""
    main, q = paged(rng, oracle.V32, 4, 1, 390, 64, invalid=0), queries(rng, 4, 1, 16, 576)
    schedule, lists = flash_mla.get_mla_metadata()[0], main.indices
    for ends in ([5000, 60], [0, 128], [390]):
        main.indices = divided.ending(lists, ends)
        results = flash_mla.flash_mla_with_kvcache(
            kind.put(q), kind.put(main.cache), None, None, 512, schedule, softmax_scale=divided.SCALE,
            is_fp8_kvcache=True, indices=kind.put(main.indices),
        )  # fmt: skip
        assert_decoded(kind, results, decode_oracle(oracle.V32, q, main, sm_scale=divided.SCALE))
    assert schedule.plan.made


@pytest.mark.parametrize("heads", [8])
def test_replays_with_other_lists(kind, emulated, evenly, rng):
    """A launch that runs again, as a captured one does, divides anew and finds nothing of its last run."""
    main, q = paged(rng, oracle.V32, 4, 2, 300, 64, invalid=0), queries(rng, 4, 2, 8, 576)
    lists, put = main.indices.copy(), [kind.put(a) for a in (q, main.cache, main.indices)]
    results = cupy_mla.sparse_decode(*put, scale_of(q, None))
    launches = list(emulated.log)
    for _ in range(3):
        main.indices[:] = lists
        with_holes(rng, main)
        q = off_zero(oracle.V32, q, main)
        for place, array in zip(put, (q, main.cache, main.indices), strict=True):
            place.copy_(kind.put(array))
        for launch in launches:
            emulated.take(launch)
        assert_decoded(kind, results, decode_oracle(oracle.V32, q, main))
