"""`bf16_grouped_sm90`, groups of queries as one tile of 64 heads, against the oracle and the kernel for few heads.

Needs a Hopper GPU.
"""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla
from cupy_mla.calls.graph import LaunchGraph
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda.attention.kernels import bf16_grouped_sm90

from ... import oracle
from ...cases import (
    check_prefill,
    check_unequal_prefill,
    entries,
    flat_rows,
    latent,
    lift_logits,
    prefill_inputs,
    queries,
    some,
)
from ...kinds import make

pytestmark = pytest.mark.gpu

KERNEL = "bf16_grouped_sm90"


@pytest.fixture
def all_grouped(hopper, monkeypatch):
    """Fails where a query is left to another kernel, which does not run: outputs stay poisoned."""
    monkeypatch.setattr(bf16_grouped_sm90, "_rest", lambda *arguments: [])
    return hopper


def local_lists(rng, s_q, topk, s_kv, repeats=0):
    """Neighbouring queries list mostly the same rows, each once but for the first `repeats` entries."""
    lists = np.stack([rng.permutation(s_kv)[:topk] for _ in range(-(-s_q // 8))]).repeat(8, 0)[:s_q]
    if repeats:
        lists[:, :repeats] = lists[:, repeats : 2 * repeats]
    own = rng.permutation(topk)[: topk // 8]
    lists[:, own] = np.where(rng.random((s_q, len(own))) < 0.5, lists[:, own], -1)
    return lists.astype(np.int32)[:, None]


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"),
    [(1, 1, 1), (3, 7, 63), (17, 8, 64), (5, 16, 65), (2, 32, 127), (5, 24, 130), (301, 16, 300), (150, 5, 700)],
)
def test_sizes(hopper, rng, s_q, h_q, topk, d_qk):
    """Lists with many duplicates; some groups are left."""
    check_prefill(hopper, *prefill_inputs(rng, s_q, h_q, d_qk, 97, topk), 0.05)


@pytest.mark.parametrize("repeats", [0, 30])
@pytest.mark.parametrize("h_q", [3, 8, 13, 16, 32])
def test_groups_need_no_other_kernel(all_grouped, rng, h_q, repeats):
    q, kv, _ = prefill_inputs(rng, 43, h_q, 576, 400, 1, share=1)
    check_prefill(all_grouped, q, kv, local_lists(rng, 43, 250, 400, repeats), 0.05)


@pytest.mark.parametrize("h_q", [9, 10, 12, 20, 32])
def test_lists_longer_than_a_block_has_threads(all_grouped, rng, h_q):
    """Groups of 7, 6, 5, 3 and 2 queries."""
    q, kv, _ = prefill_inputs(rng, 15, h_q, 512, 1700, 1, share=1)
    check_prefill(all_grouped, q, kv, local_lists(rng, 15, 1000, 1700), 0.05)


@pytest.mark.parametrize("scale", [1e-12, 0.05, 6.0])
def test_a_row_counts_as_often_as_it_is_listed(all_grouped, rng, scale):
    """Rows listed up to five times, by some queries of a group and not by others."""
    q, kv, indices = prefill_inputs(rng, 21, 8, 512, 200, 180, share=1)
    indices[:, 0, 20:40] = indices[:, 0, :20]
    indices[::2, 0, 40:43] = indices[::2, :1, 20]
    check_prefill(all_grouped, q, kv, indices, scale)


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("s_q", [40, 1501])
def test_sinks_lengths_and_strides(hopper, rng, s_q, d_qk):
    check_unequal_prefill(hopper, rng, s_q, 13, d_qk, nothing=slice(8, 16))  # a group of nothing


def test_unaligned_outputs_and_queries_without_rows(all_grouped, rng):
    q, kv, indices = prefill_inputs(rng, 70, 8, 576, 300, 100)
    indices[rng.random(70) < 0.5] = -1
    indices[::8, 0, 0] = np.flatnonzero(~np.isnan(kv[:, 0, 0].astype(np.float32)))[0]  # each group has a row
    check_prefill(all_grouped, q, kv, indices, 0.05, out_gaps=(0, 0, 1))


@pytest.mark.parametrize("h_q", [7, 8])
def test_row_numbers_in_several_windows(all_grouped, rng, h_q):
    s_kv = 150_000
    live = some(rng, s_kv, 0.01)
    kv = flat_rows(rng, s_kv, 512, live)
    check_prefill(all_grouped, queries(rng, 19, h_q, 512), kv, entries(rng, (19, 1, 777), live, s_kv), 0.05)


@pytest.mark.parametrize(("s_q", "h_q"), [(9, 16), (300, 16), (150, 32), (9, 5)])
def test_lists_that_are_left_of_a_large_cache_are_sorted(hopper, rng, s_q, h_q):
    """Left because they repeat rows too often; longer than what is sorted together, and of unequal lengths."""
    s_kv = 150_000
    assert s_kv * 2 * 512 > bf16_grouped_sm90.SORTED_CACHE_BYTES
    live = some(rng, s_kv, 0.002)
    length = rng.integers(-1, 2103, s_q, dtype=np.int32)
    length[:3] = 0, 2048, 2100
    lists = entries(rng, (s_q, 1, 2100), live, s_kv)
    q, kv = queries(rng, s_q, h_q, 512), flat_rows(rng, s_kv, 512, live)
    lift_logits(q, kv, 0.05)
    check_prefill(hopper, q, kv, lists, 0.05, None, length)


def test_several_launches(hopper, rng, monkeypatch):
    monkeypatch.setattr(bf16_grouped_sm90, "SCRATCH_BYTES", 20_000)
    check_prefill(hopper, *prefill_inputs(rng, 150, 16, 512, 500, 300), 0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_with_the_queries_that_name_it(hopper, rng, bad):
    """Their neighbours' tiles hold it, too."""
    q, kv, indices = prefill_inputs(rng, 48, 16, 576, 300, 200, share=1)
    indices[:, 0, 0] = 8
    indices[indices == 7] = 9
    indices[5, 0, 100] = 7
    kv[7, 0, [3, 300, 520]] = bad
    results = [hopper.take(r) for r in cupy_mla.sparse_prefill(*map(hopper.put, (q, kv, indices)), 0.05)]
    others = np.arange(48) != 5
    want = oracle.prefill(q[others], kv, indices[others], 0.05)
    for name, g, w in zip(("out", "max_logits", "lse"), results, want, strict=True):
        oracle.assert_close(g[others], w, f"prefill {name}")
    assert not np.isfinite(results[0][5].astype(np.float32)).all()


def test_references_rise_late_and_far(all_grouped, rng):
    """Logits that grow, or fall, by hundreds from tile to tile, which neighbouring queries see in part."""
    s_kv, d = 640, 576
    direction = rng.standard_normal(d, np.float32)
    steps = np.repeat(np.sort(rng.uniform(-1, 1, 10)), 64)[:, None]
    kv = (0.02 * rng.standard_normal((s_kv, d), np.float32) + 0.1 * steps * direction).astype(latent(rng, 1).dtype)
    q = (direction + 0.1 * rng.standard_normal((11, 16, d), np.float32)).astype(kv.dtype)
    indices = np.tile(np.arange(s_kv, dtype=np.int32), (11, 1, 1))
    indices[rng.random(indices.shape) < 0.2] = -1
    indices[3, 0, :320] = -1
    for scale in (0.3, 6.0):
        check_prefill(all_grouped, q, kv[:, None], indices, scale)


@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_other_scales_are_for_other_kernels(hopper_gpu, launched, rng, monkeypatch, scale):
    """600 queries of 16 heads would fill the GPU in groups."""
    inputs = prefill_inputs(rng, 600, 16, 576, 200, 180)
    check_prefill(hopper_gpu, *inputs, scale)
    assert launched
    assert KERNEL not in launched
    monkeypatch.setenv("CUPY_MLA_KERNELS", KERNEL)
    with pytest.raises(ValueError, match="CUPY_MLA_KERNELS is bf16_grouped_sm90, which cannot serve this call"):
        cupy_mla.sparse_prefill(*map(hopper_gpu.put, inputs), scale)


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("h_q", [8, 32])
def test_same_bits_every_time(hopper, force, rng, monkeypatch, h_q, forced):
    """All groups; and, by the division alone, those that share enough: about half of them."""
    if not forced:
        monkeypatch.delenv("CUPY_MLA_KERNELS")
        force(division=f"whole(heads=64, queries={min(64 // h_q, 8)})")
    q, kv, indices = prefill_inputs(rng, 1100, h_q, 576, 3000, 300)
    indices[:500] = local_lists(rng, 500, 300, 3000, 20)
    kv[np.isnan(kv.astype(np.float32))] = 0
    arrays = [hopper.put(a) for a in (q, kv, indices)]
    first, second = ([hopper.take(r) for r in cupy_mla.sparse_prefill(*arrays, 0.05)] for _ in range(2))
    force("bf16_few_heads_sm90")
    other = [hopper.take(r) for r in cupy_mla.sparse_prefill(*arrays, 0.05)]
    for a, b, c in zip(first, second, other, strict=True):
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a.astype(np.float32), c.astype(np.float32), rtol=0.02, atol=1e-3)


def test_launches_as_a_graph(hopper, rng, monkeypatch):
    """Launches as one CUDA graph, alone, beside a capture and in one, give the bits of launches one by one."""
    torch = pytest.importorskip("torch")
    kind = make("torch_cuda")
    calls = [[kind.put(a) for a in prefill_inputs(rng, 300, 16, 576, 97, 300, share=1)] for _ in range(3)]

    def prefill(arrays):
        return [tensor.clone() for tensor in cupy_mla.sparse_prefill(*arrays, 0.05)]

    with monkeypatch.context() as patch:
        patch.setattr(LaunchGraph, "__call__", lambda graph, *launches: False)  # as for grids that are new
        wanted = [prefill(arrays) for arrays in calls]

    def check(results, i):
        torch.cuda.synchronize()
        for got, want in zip(results, wanted[i], strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    capturing, other, held = torch.cuda.Stream(), torch.cuda.Stream(), calls[0][0].clone()
    with torch.cuda.stream(other):
        cupy_mla.sparse_prefill(*calls[0], 0.05)  # torch has the memory now: nothing may be allocated beside a capture
    torch.cuda.synchronize()
    forget_calls()
    with torch.cuda.stream(other):
        cupy_mla.sparse_prefill(*calls[0], 0.05)  # the second call of the same grids makes the graph of launches
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capturing):
        graph.capture_begin()  # torch.cuda.graph would free what torch has
        held.mul_(1)
        with torch.cuda.stream(other):
            beside = cupy_mla.sparse_prefill(*calls[1], 0.05)  # makes the graph of launches
        graph.capture_end()
    check(beside, 1)
    for i in (0, 0, 2, 1, 2):
        check(prefill(calls[i]), i)
    queued = [prefill(calls[i % 3]) for i in range(9)]
    for i, results in enumerate(queued):
        check(results, i % 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cupy_mla.sparse_prefill(*calls[2], 0.05)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    check(captured, 2)
