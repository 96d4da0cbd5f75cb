"""The Hopper kernel for few heads against the oracle, and how it splits and what it fits."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import layouts
from cupy_mla.cuda import few_heads_sm90
from cupy_mla.cuda.jit import SM90_SHARED_BYTES

from ..cases import check_prefill, prefill_inputs, sinks

KERNELS = "few_heads"


@pytest.mark.gpu
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"),
    [
        (1, 1, 1),
        (3, 7, 63),
        (2, 8, 64),
        (1, 16, 65),
        (3, 33, 127),
        (2, 64, 129),
        (1, 128, 2100),
        (300, 16, 130),
        (300, 32, 70),
    ],
)
def test_sizes(hopper, rng, s_q, h_q, topk, d_qk):
    check_prefill(hopper, *prefill_inputs(rng, s_q, h_q, d_qk, 97, topk), 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("s_q", [40, 700])
def test_sinks_lengths_and_strides(hopper, rng, s_q, d_qk):
    """700 queries: warpgroups take several each, some of them without a row."""
    q, kv, indices = prefill_inputs(rng, s_q, 13, d_qk, 300, 200, q_gap=8, kv_gap=8)
    length = rng.integers(-1, 203, s_q, dtype=np.int32)
    length[:2] = 0, 200
    check_prefill(hopper, q, kv, indices, 0.05, sinks(rng, 13), length, out_gaps=(1, 2, 3))


# Clusters of 1, 2, ... 16 blocks that one H200 runs at a time.
H200 = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)


@pytest.mark.parametrize(
    ("items", "splits"), [(1, 16), (2, 16), (7, 16), (8, 8), (16, 6), (32, 3), (64, 2), (128, 1), (1000, 1)]
)
def test_splits_fill_the_gpu_with_clusters_that_fit(items, splits):
    """Measured best at 2048 rows and 16 heads."""
    assert few_heads_sm90.best_splits(items, 32, 3, H200) == splits


@pytest.mark.parametrize("items", [1, 3, 148, 5000])
@pytest.mark.parametrize("tiles", [0, 1, 2, 5, 33, 256, 4000])
def test_every_split_has_a_tile(items, tiles):
    splits = few_heads_sm90.best_splits(items, tiles, 3, H200)
    assert 1 <= splits <= max(tiles, 1)
    assert splits % few_heads_sm90.cluster_of(splits) == 0


def test_clusters():
    assert [few_heads_sm90.cluster_of(n) for n in (1, 2, 3, 12, 16, 17, 64)] == [1, 2, 3, 12, 16, 1, 16]


def test_every_layout_and_size_fits():
    for kernel in few_heads_sm90.kernels():
        assert kernel.shared_bytes <= SM90_SHARED_BYTES
        assert kernel.defines.get("UNITS", 4) >= 4
    assert all(2 in few_heads_sm90.queries_per_block(layouts.BF16_512, heads) for heads in few_heads_sm90.HEADS)
