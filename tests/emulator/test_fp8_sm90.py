"""`fp8_sm90` on an emulated GPU, in each of its divisions: tiles without a valid entry anywhere in the lists, on a GPU
so small that a CTA has several work items and an item several CTAs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cupy_mla
from cupy_mla.cuda.attention.choose import VARIABLE
from cupy_mla.cuda.attention.divide import Clusters, Segments, Teams

from .. import oracle
from ..cases import (
    Paged,
    check_decode,
    check_result,
    decode_oracle,
    off_zero,
    paged,
    queries,
    run_decode,
    scale_of,
    sinks,
    with_holes,
)
from ..cuda.attention import evenly
from ..kinds import BF16
from ..ops.test_named_formats import check_both_caches

KERNEL = "fp8_sm90"
B, TOPK = 5, 390


@pytest.fixture(autouse=True)
def forced(emulated, monkeypatch):
    monkeypatch.setenv(VARIABLE, KERNEL)
    yield
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


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(
    ("fmt", "emulated", "division"),
    [
        (oracle.V32, 6, "clusters(heads=64, splits=3, cluster=3)"),
        (oracle.V4, 2, "whole(heads=32)"),
        (oracle.V32, 1, "whole(heads=32)"),  # more of a CTA than the consumers look for
        (oracle.V32, 6, evenly.shares(32, ctas=7)),
        (oracle.V4, 4, "segments(heads=64, splits=3)"),
        (oracle.V32, 6, "teams(heads=64, splits=2)"),
        (oracle.V32_NOPE, 6, "clusters(heads=64, splits=3, cluster=3)"),
        (oracle.V32_NOPE, 2, "whole(heads=32)"),
        (oracle.V41, 6, "teams(heads=64, splits=2)"),
        (oracle.V41, 6, evenly.shares(32, ctas=7)),
        (oracle.V41_SPLIT, 6, "clusters(heads=32, splits=3, cluster=3)"),
        (oracle.V41_SPLIT, 4, "segments(heads=64, splits=3)"),
        (oracle.V32_NVFP4, 6, "clusters(heads=64, splits=3, cluster=3)"),
        (oracle.V32_NVFP4, 1, "whole(heads=32)"),
        (oracle.V32_NVFP4, 4, "segments(heads=64, splits=3)"),
        (oracle.V32_NVFP4, 6, evenly.shares(32, ctas=7)),
        (oracle.V4_NVFP4, 6, "teams(heads=64, splits=2)"),
        (oracle.V4_NVFP4, 2, "whole(heads=32)"),
        (oracle.V4_NVFP4, 6, "clusters(heads=32, splits=3, cluster=3)"),
        (oracle.V32, 6, "clusters(heads=16, splits=3, cluster=3)"),
        (oracle.V4, 6, "teams(heads=16, splits=2)"),
        (oracle.V41, 6, evenly.shares(16, ctas=7)),
        (oracle.V32_NVFP4, 2, "whole(heads=16)"),
        (oracle.V4_NVFP4, 4, "segments(heads=16, splits=3)"),
    ],
    ids=lambda x: x.name if isinstance(x, oracle.Format) else str(x),
    indirect=["emulated"],
)
def test_empty_tiles(force, kind, rng, fmt, division):
    """`emulated`: SMs, so few that a CTA has several items."""
    for turn in range(2):
        h_q = int(rng.integers(1, 33))
        main, extra = with_empty_tiles(rng, fmt, extra=turn == 1, lengths=turn == 1)
        q = off_zero(fmt, queries(rng, B, 1, h_q, fmt.d_qk), main, extra)
        force(division=division)
        check_decode(kind, fmt, q, main, extra, sink=sinks(rng, h_q), out_gaps=(0, 0, 0, 2))


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(
    ("fmt", "extra_fmt", "emulated", "division"),
    [
        (oracle.V41, oracle.V41_FP4, 2, "whole(heads=32)"),
        (oracle.V41, oracle.V41_FP4, 6, "clusters(heads=32, splits=3, cluster=3)"),
        (oracle.V41, oracle.V41_FP4_SPLIT, 6, evenly.shares(32, ctas=7)),
        (oracle.V41, oracle.V41_FP4_SPLIT, 4, "segments(heads=64, splits=3)"),
        (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT, 6, "clusters(heads=64, splits=2, cluster=2)"),
        (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT, 6, "teams(heads=64, splits=2)"),
        (oracle.V41, oracle.V41_FP4, 6, "clusters(heads=16, splits=3, cluster=3)"),
    ],
    ids=lambda x: x.name if isinstance(x, oracle.Format) else str(x),
    indirect=["emulated"],
)
def test_empty_tiles_of_two_layouts(force, kind, rng, fmt, extra_fmt, division):
    """Lists of which one or the other is empty, too."""
    main, extra = paged(rng, fmt, B, 1, 200, 64), paged(rng, extra_fmt, B, 1, TOPK, 2, lengths=True)
    with_holes(rng, main)
    with_holes(rng, extra)
    main.indices[0], extra.indices[1], extra.length[1:3] = -1, -1, TOPK
    force(division=division)
    check_both_caches(
        kind, rng, (fmt, extra_fmt), (main, extra), int(rng.integers(1, 33)), None, extra_layout=extra_fmt.name
    )


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    "division",
    ["whole(heads=16)", "whole(heads=32)", "clusters(splits=3, cluster=3)", evenly.shares(32, ctas=7)],
    ids=str,
)
@pytest.mark.parametrize("fmt", [oracle.PLAIN_576, oracle.PLAIN_512], ids=lambda fmt: fmt.name)
def test_a_scale_of_the_call(force, kind, rng, fmt, division):
    """It is that of all rows, which the host knows or the device; queries may be e4m3, too."""
    fmt, e4m3_q, on_device = replace(fmt, scale=float(np.float32(2.0 ** rng.uniform(-9, -4)))), *rng.integers(2, size=2)
    main, _ = with_empty_tiles(rng, fmt, extra=False, lengths=bool(rng.integers(2)))
    q, scales = queries(rng, B, 1, int(rng.integers(1, 33)), fmt.d_qk), {"k_scale": fmt.scale}
    codes = oracle.e4m3_code(4 * q.astype(np.float32))
    if e4m3_q:
        q, scales["q_scale"] = oracle.E4M3[codes] / 4, 0.25
    near_zero = off_zero(fmt, q, main) != q
    q[near_zero], codes[near_zero] = 0, 0
    force(division=division)
    arrays = map(kind.put, (codes if e4m3_q else q, main.cache, main.indices))
    given = {name: kind.put(np.array([x], np.float32)) if on_device else x for name, x in scales.items()}
    got = cupy_mla.sparse_decode(*arrays, scale_of(q, None), topk_length=kind.put(main.length), **given)
    want = decode_oracle(fmt, q, main)
    oracle.assert_close(check_result(kind, got[0], BF16), want[0], "decode out")
    oracle.assert_close(check_result(kind, got[1], np.dtype(np.float32)), want[1], "decode lse")


@pytest.mark.long
@pytest.mark.parametrize("emulated", [2], indirect=True)
@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4, oracle.V32_NVFP4], ids=lambda fmt: fmt.name)
def test_bits_of_divisions(force, kind, rng, fmt):
    """Splits of a cluster, of a team, and one after the other give the same bits, wherever tiles are empty."""
    heads, splits = int(rng.choice([16, 32, 64])), int(rng.integers(2, 5))
    main, extra = with_empty_tiles(rng, fmt, extra=bool(rng.integers(2)), lengths=bool(rng.integers(2)))
    q = queries(rng, B, 1, heads, fmt.d_qk)
    results = []
    for division in (Clusters(heads, splits, splits), Segments(heads, splits), Teams(heads, splits)):
        force(division=division)
        results.append(run_decode(kind, q, main, extra))
    for result in results[1:]:
        for part, first in zip(result, results[0], strict=True):
            assert np.array_equal(part.view(np.uint8), first.view(np.uint8))
