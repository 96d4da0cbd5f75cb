"""The fixture `launched` sees what a call launches, and a kernel that is asked for runs. With a stand-in for a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla
from cupy_mla.cuda.attention.choose import KERNELS, VARIABLE
from cupy_mla.cuda.attention.kernels.fp8_sm90 import CLUSTERS, SEGMENTS
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.dtypes import BFLOAT16

from ..fake_gpu import HostCuPy

pytest.importorskip("torch")


@pytest.fixture
def gpu(launched, gpu):
    """`launched` watches what goes to the stand-in's driver."""
    return gpu


@pytest.fixture
def kind(gpu):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.using_allocator(gpu.malloc):
        yield HostCuPy()


def prefill(kind: HostCuPy, s_q: int, h_q: int) -> None:
    q, kv = np.zeros((s_q, h_q, 576), BFLOAT16), np.zeros((64, 1, 576), BFLOAT16)
    cupy_mla.sparse_prefill(*map(kind.put, (q, kv, np.zeros((s_q, 1, 2048), np.int32))), 1.0)


def decode(
    kind: HostCuPy, row: int, dtype: np.dtype, splits: int | None = None, d_qk: int = 576, topk: int = 512
) -> None:
    q, cache = np.zeros((2, 1, 16, d_qk), BFLOAT16), np.zeros((3, 64, row), dtype)
    indices = np.zeros((2, 1, topk), np.int32)
    cupy_mla.sparse_decode(*map(kind.put, (q, cache, indices)), 0.04, num_splits=splits)


def test_launches_one_by_one_and_in_a_graph(gpu, kind, launched):
    """540 queries of 16 heads are worked on in groups. Each kernel is launched once a call, and the fixture sees it."""
    for graphs in (0, 1):
        prefill(kind, 540, 16)
        assert gpu.graphs.runs == graphs
        assert sorted(launch.kernel.name for launch in gpu.log) == sorted(launched)
        assert launched == {"group_lists", "bf16_grouped_sm90", "bf16_few_heads_sm90"}
        gpu.log.clear()
        launched.clear()
    decode(kind, 656, np.uint8)
    assert "fp8_sm90" in launched


@pytest.mark.parametrize("asked", KERNELS)
def test_a_kernel_that_is_asked_for_runs(kind, launched, monkeypatch, asked):
    monkeypatch.setenv(VARIABLE, asked)
    if asked == "fp8_sm90":
        decode(kind, 656, np.uint8)
    elif asked == "fp8_short_sm90":
        decode(kind, 584, np.uint8, d_qk=512, topk=128)
    elif asked == "bf16_cluster_sm90":
        decode(kind, 576, BFLOAT16, 4)
    else:
        prefill(kind, 5, 16)
    helpers = {"combine", "group_lists", "bf16_few_heads_sm90"} if asked != "bf16_few_heads_sm90" else {"combine"}
    name = asked.removesuffix("_99kb")  # one kernel in two shapes
    assert name in launched
    assert launched <= {name} | helpers


def test_what_is_forced_holds_for_calls_that_were_made_before(kind, launched, force):
    """It is part of a call's key."""
    found = []
    for kernel in ("fp8_sm90", "portable", "fp8_sm90"):
        launched.clear()
        force(kernel)
        decode(kind, 656, np.uint8)
        found.append(kernel in launched)
    force("fp8_sm90", "whole")
    decode(kind, 656, np.uint8)
    force("fp8_sm90", "whole(queries=2)")
    with pytest.raises(ValueError, match=r"^division is whole\(queries=2\), which does not fit this call"):
        decode(kind, 656, np.uint8)
    assert all(found)


def test_a_kernel_that_cannot_serve_a_call_launches_nothing(kind, launched, monkeypatch):
    monkeypatch.setenv(VARIABLE, "bf16_sm90")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_KERNELS is bf16_sm90, which cannot serve this call: decode of 16"):
        decode(kind, 656, np.uint8)
    assert not launched


def test_invariant_calls_of_both_divisions(kind, launched, monkeypatch):
    """Small batches go to clusters, large ones to CTAs that take splits in turn: one call after the other."""
    seen, plain = [], Kernel.submitter

    def noting(kernel, device):
        submit = plain(kernel, device)

        def noting_submit(stream, ctas, *more):
            seen.append((kernel.defines["DIVISION"], ctas))
            submit(stream, ctas, *more)

        return noting_submit

    monkeypatch.setattr(Kernel, "submitter", noting)
    cache = np.zeros((33, 64, 656), np.uint8)
    for b in (3, 128, 5, 120, 3):
        q, indices = np.zeros((b, 1, 64, 576), BFLOAT16), np.zeros((b, 1, 2048), np.int32)
        cupy_mla.sparse_decode(*map(kind.put, (q, cache, indices)), 0.04, batch_invariant=True)
    assert seen == [(CLUSTERS, 9), (SEGMENTS, 128), (CLUSTERS, 15), (SEGMENTS, 120), (CLUSTERS, 9)]
