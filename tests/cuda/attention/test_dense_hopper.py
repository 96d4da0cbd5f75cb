"""The Hopper kernels of dense decode, each of them forced, in the divisions that they have: against the oracle. Needs a
Hopper GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_mla import flash_mla

from ... import dense_hopper
from ...dense import assert_dense, dense_oracle, dense_queries, in_cache, off_zero
from ...dense_hopper import FORMATS, FP8_FORMATS
from ...kinds import make
from .replays import captured

pytestmark = pytest.mark.gpu

# A kernel, a division that is forced, and requests: all clusters must run at a time.
KERNELS = {
    "dense_sm90 shares": ("dense_sm90", "shares(splits=0)", 30, FORMATS),
    "dense_whole_sm90": ("dense_whole_sm90", "whole(heads=64)", 150, FORMATS),
    "dense_whole_sm90 16": ("dense_whole_sm90", "whole(heads=16)", 150, FORMATS),
    "dense_whole_sm90 32": ("dense_whole_sm90", "whole(heads=32)", 20, FORMATS),
    "dense_cluster_sm90": ("dense_cluster_sm90", None, 2, FORMATS),
    "dense_fp8_sm90 shares": ("dense_fp8_sm90", "shares(splits=0)", 30, FP8_FORMATS),
    "dense_sm90 splits": ("dense_sm90", "shares(splits=3)", 5, FORMATS),
    "dense_fp8_sm90 splits": ("dense_fp8_sm90", "shares(splits=3)", 5, FP8_FORMATS),
    "dense_fp8_sm90 whole": ("dense_fp8_sm90", "whole", 150, FP8_FORMATS),
    "dense_fp8_sm90 clusters": ("dense_fp8_sm90", "clusters", 2, FP8_FORMATS),
}
FP8 = [name for name in KERNELS if name.startswith("dense_fp8_sm90")]
SHARES = [name for name in KERNELS if name.endswith("shares")]
ASKED = {
    "dense_sm90": ("dense_sm90", None, 30, FORMATS),
    "dense_fp8_sm90": ("dense_fp8_sm90", "shares", 30, FP8_FORMATS),
}


def kernels(*names: str) -> pytest.MarkDecorator:
    """Cases of these: the fixture `hopper`, and what KERNELS or ASKED has beside."""
    cases = [{**KERNELS, **ASKED}[name] for name in names]
    return pytest.mark.parametrize(("hopper", "division", "b", "formats"), cases, ids=names, indirect=["hopper"])


@pytest.fixture(autouse=True)
def divided(request: pytest.FixtureRequest, force: Any) -> None:
    division = request.getfixturevalue("division")
    if division is not None:
        force(division=division)


@kernels(*KERNELS)
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_requests(hopper, rng, division, b, formats, heads):
    for _ in range(3):
        dense_hopper.some_requests(hopper, rng, b, heads, formats)


@kernels(*FP8)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("e4m3_q", [False, True], ids=["bf16 q", "e4m3 q"])
def test_a_scale_of_the_call(hopper, rng, division, b, formats, heads, e4m3_q):
    dense_hopper.plain_requests(hopper, rng, b, heads, e4m3_q)


@kernels(*KERNELS)
@dense_hopper.every_batch
def test_batches(hopper, rng, division, b, formats, check):
    check(hopper, rng, b, formats)


@kernels(*ASKED)
@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_equal_splits(hopper, rng, division, b, formats, num_splits):
    dense_hopper.some_requests(hopper, rng, b, 64, formats, num_splits=num_splits)


@kernels(*ASKED)
def test_bits_of_a_request(hopper, rng, division, b, formats):
    dense_hopper.bits_of_a_request(hopper, rng, b, formats)


@kernels(*SHARES)
@pytest.mark.parametrize("requests", [1, 3, 40, 150])
def test_calls_of_one_plan(hopper, rng, division, b, formats, requests):
    dense_hopper.calls_of_one_plan(hopper, rng, requests, formats[:2])


@kernels(*KERNELS)
def test_replays(hopper, rng, division, b, formats):
    """A graph of layers that share a schedule takes the lengths and blocks that lie in the arrays at each replay."""
    kind, fmt = make("torch_cuda"), formats[rng.integers(2)]  # of these the cache tells the layout
    longest = rng.integers(1, 900, b)
    of, q = in_cache(rng, fmt, longest, 64, 2), dense_queries(rng, fmt, b, 2, 16)
    arrays = [kind.put(a) for a in (q, of.cache[:, :, None], of.table, of.lens)]
    schedule, _ = flash_mla.get_mla_metadata()
    graph, results = captured(
        kind, lambda: flash_mla.flash_mla_with_kvcache(*arrays, 512, schedule, None, 0.04, True), 4
    )
    for share in (0.0, 0.1, 1.0, 0.5):
        of.lens = (share * longest).astype(np.int32)
        given = off_zero(fmt, q, of, sm_scale=0.04)
        arrays[0].copy_(kind.put(given))
        arrays[3].copy_(kind.put(of.lens))
        for _ in range(2):
            graph.replay()
        kind.synchronize()
        want = dense_oracle(fmt, given, of, sm_scale=0.04)
        for result in results:
            assert_dense(tuple(map(kind.take, result)), want)
