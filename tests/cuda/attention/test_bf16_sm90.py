"""`bf16_sm90` and `bf16_cluster_sm90`, for flat bf16 rows, against the oracle and the portable kernel.

Needs a Hopper GPU.
"""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla

from ... import kinds, oracle
from ...cases import (
    LIFT,
    check_decode,
    check_prefill,
    check_unequal_prefill,
    latent,
    lift_logits,
    paged,
    prefill_inputs,
    queries,
    sinks,
)
from ...forwards import check_forwards_agree

pytestmark = pytest.mark.gpu

KERNEL = "bf16_sm90"

on_clusters = pytest.mark.parametrize("hopper", ["bf16_cluster_sm90"], indirect=True)


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"),
    [
        (1, 1, 1),
        (3, 7, 63),
        (2, 8, 64),
        (1, 16, 65),
        (3, 33, 127),
        (2, 64, 128),
        (2, 65, 129),
        (1, 128, 700),
        (300, 64, 130),
    ],
)
def test_sizes(hopper, rng, s_q, h_q, topk, d_qk):
    check_prefill(hopper, *prefill_inputs(rng, s_q, h_q, d_qk, 97, topk), 0.05)


@pytest.mark.parametrize("d_qk", [576, 512])
def test_sinks_lengths_and_strides(hopper, rng, d_qk):
    check_unequal_prefill(hopper, rng, 40, 72, d_qk)


def test_queries_without_rows_between_others(hopper, rng):
    """Empty pieces of work in a block's turn: more queries than SMs, most of them without a row."""
    q, kv, indices = prefill_inputs(rng, 700, 3, 576, 50, 5)
    indices[rng.random(700) < 0.7] = -1
    length = np.where(rng.random(700) < 0.5, 0, 5).astype(np.int32)
    lift_logits(q, kv, 0.05)
    check_prefill(hopper, q, kv, indices, 0.05, None, length)


def test_queries_without_rows_behind_one_of_nan(hopper, rng):
    """More queries than SMs. Some list a row of NaN, the others none: nothing of one reaches the next."""
    s_q = 300
    q, kv, indices = prefill_inputs(rng, s_q, 3, 576, 50, 5)
    named = rng.random(s_q) < 0.5
    kv[7] = np.nan
    indices[...] = np.where(named[:, None, None], 7, -1)
    out, _, lse = map(hopper.take, cupy_mla.sparse_prefill(*map(hopper.put, (q, kv, indices)), 0.05))
    assert np.isnan(out[named].astype(np.float32)).all()
    assert not out[~named].astype(np.float32).any()
    assert (lse[~named] == np.inf).all()


@pytest.mark.parametrize("topk", [1, 130, 1030])
def test_lists_end_with_their_last_valid_entry(hopper, rng, topk):
    """Of lists without lengths: none, few, and all entries valid, holes, rows that do not exist."""
    q, kv, indices = prefill_inputs(rng, 1100, 2, 512, 50, topk)
    lists = indices[:, 0]
    lists[np.arange(topk) >= rng.integers(0, topk + 1, (1100, 1))] = -1
    lists[::7, topk // 2 :] = 50
    lists[5] = -1
    lift_logits(q, kv, 0.05)
    check_prefill(hopper, q, kv, indices, 0.05, sinks(rng, 2) + LIFT)


@pytest.mark.parametrize("order", [1, -1])
def test_references_rise_late_and_far(hopper, rng, order):
    """Logits that grow, or fall, by hundreds from tile to tile: every way for references to differ."""
    s_kv, d = 640, 576
    direction = rng.standard_normal(d, np.float32)
    steps = np.repeat(np.sort(rng.uniform(-1, 1, 10))[::order], 64)[:, None]
    kv = (0.02 * rng.standard_normal((s_kv, d), np.float32) + 0.1 * steps * direction).astype(latent(rng, 1).dtype)
    q = (direction + 0.1 * rng.standard_normal((3, 64, d), np.float32)).astype(kv.dtype)
    indices = np.tile(np.arange(s_kv, dtype=np.int32), (3, 1, 1))
    for scale in (0.3, 6.0, -6.0, 0.0):
        check_prefill(hopper, q, kv[:, None], indices, scale)


def test_one_row_far_above_all_others(hopper, rng):
    q, kv, indices = prefill_inputs(rng, 4, 64, 512, 400, 512)
    q[...] = np.abs(q.astype(np.float32)).astype(q.dtype)
    valid = [int(i) for i in indices[0, 0] if 0 <= i < 400]
    kv[valid[0]] = 40.0  # logits of thousands
    indices[:, 0, [70, 300]] = valid[0]
    check_prefill(hopper, q, kv, indices, 0.05)


def test_the_largest_weight_of_a_short_list_is_not_rounded(hopper, rng):
    """It is in the second tile, and takes most of the softmax. Rounding it would make the error 1.84e-3 or more;
    rounding the output alone makes it 1.64 to 1.68e-3, by emulation."""
    s_q, h_q, rows = 4, 64, int(rng.integers(65, 129))
    largest = int(rng.integers(64, rows))
    kv = rng.standard_normal((rows, 1, 576), np.float32)
    towards = np.log(rows) + rng.uniform(0, 4, (s_q, h_q, 1))
    q = towards * kv[largest, 0] / np.sum(kv[largest] ** 2) + rng.normal(0, 0.5 / 24, (s_q, h_q, 576))
    q, kv = q.astype(latent(rng, 1).dtype), kv.astype(latent(rng, 1).dtype)
    indices = np.full((s_q, 1, 512), -1, np.int32)
    indices[..., :rows] = np.arange(rows)
    out = hopper.take(cupy_mla.sparse_prefill(*map(hopper.put, (q, kv, indices)), 1.0)[0]).astype(np.float64)
    values = kv[:, 0].astype(np.float64)
    p = np.exp(q.astype(np.float64) @ values.T)
    expected = p @ values[:, :512] / p.sum(-1, keepdims=True)
    assert np.linalg.norm(out - expected) < 1.75e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("d_qk", [576, 512])
def test_agrees_with_the_portable_kernel_and_with_itself(hopper, rng, monkeypatch, d_qk):
    arrays = [hopper.put(a) for a in prefill_inputs(rng, 260, 128, d_qk, 1000, 300)]
    first, second = (cupy_mla.sparse_prefill(*arrays, 0.05) for _ in range(2))
    monkeypatch.setenv("CUPY_MLA_KERNELS", "portable")
    portable = cupy_mla.sparse_prefill(*arrays, 0.05)
    for a, b, c in zip(first, second, portable, strict=True):
        a, b, c = (hopper.take(x) for x in (a, b, c))
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a.astype(np.float32), c.astype(np.float32), rtol=0.02, atol=1e-3)


FLAT = pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)


def check_flat_decode(kind, rng, fmt, b, s_q, h_q, block_size, num_splits):
    """Blocks without a gap between them: the cache is one array of rows."""
    main = paged(rng, fmt, b, s_q, 500, block_size, lengths=True)
    q = queries(rng, b, s_q, h_q, fmt.d_qk)
    check_decode(kind, fmt, q, main, sink=sinks(rng, h_q), num_splits=num_splits, out_gaps=(0, 1, 2, 3))


@FLAT
@pytest.mark.parametrize(("b", "s_q", "h_q", "block_size"), [(3, 2, 64, 64), (100, 1, 33, 2), (2, 1, 128, 61)])
@pytest.mark.parametrize("num_splits", [None, 1])
def test_decode_of_flat_caches(hopper, rng, fmt, b, s_q, h_q, block_size, num_splits):
    check_flat_decode(hopper, rng, fmt, b, s_q, h_q, block_size, num_splits)


READ_ONCE = [("bf16_sm90", 1), ("bf16_cluster_sm90", 2), ("bf16_cluster_sm90", 7)]


@pytest.mark.parametrize(("hopper", "num_splits"), READ_ONCE, indirect=["hopper"])
@FLAT
def test_decode_that_reads_rows_once(hopper, rng, fmt, num_splits):
    """Fewer list entries than the cache has rows."""
    main = paged(rng, fmt, 5, 1, 700, 64)
    main.indices = main.indices[..., :130].copy()
    assert main.indices.size < len(main.cache) * 64
    check_decode(hopper, fmt, queries(rng, 5, 1, 64, fmt.d_qk), main, num_splits=num_splits)


@on_clusters
@FLAT
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "block_size"),
    [(3, 2, 64, 64), (100, 1, 33, 2), (2, 1, 128, 61), (2, 2, 16, 64), (2, 2, 17, 64), (1, 1, 1, 64)],
)
@pytest.mark.parametrize("num_splits", [2, 3, 7, 17])
def test_decode_of_flat_caches_on_clusters(hopper, rng, fmt, b, s_q, h_q, block_size, num_splits):
    """Some splits have no rows; a cluster holds 16 of 17 splits, so 16 there are."""
    check_flat_decode(hopper, rng, fmt, b, s_q, h_q, block_size, num_splits)


@on_clusters
@FLAT
@pytest.mark.parametrize(("b", "s_q", "h_q", "block_size"), [(3, 2, 64, 64), (2, 1, 128, 61)])
def test_decode_of_flat_caches_in_as_many_splits_as_it_chooses(hopper, rng, fmt, b, s_q, h_q, block_size):
    check_flat_decode(hopper, rng, fmt, b, s_q, h_q, block_size, None)


@on_clusters
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(("s_q", "h_q"), [(1, 64), (30, 100)])
def test_prefill_of_few_queries_is_split(hopper, rng, d_qk, s_q, h_q):
    """Clusters share a query's rows, and merge the largest logits, too."""
    q, kv, indices = prefill_inputs(rng, s_q, h_q, d_qk, 700, 600)
    sink = sinks(rng, h_q)
    results = [check_prefill(hopper, q, kv, indices, 0.05, sink) for _ in range(2)]
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("h_q", [16, 64])
@pytest.mark.parametrize("topk", [300, 700])
def test_forwards_agree(hopper, rng, force, h_q, topk):
    """Training, prefill and decode, of more queries than there are SMs, and of three."""
    force(KERNEL, "whole")
    check_forwards_agree(hopper, rng, h_q, (30, 370), topk, autograd=False)


@pytest.mark.parametrize("h_q", [16, 64])
def test_forwards_of_training_agree(launched, rng, force, h_q):
    """The same with torch, through autograd."""
    kind = kinds.make("torch_cuda")
    if kind.torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    force(KERNEL, "whole")
    check_forwards_agree(kind, rng, h_q, (30, 700), 600)
    assert KERNEL in launched
