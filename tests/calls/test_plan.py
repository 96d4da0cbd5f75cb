"""Plans that calls with one schedule share: which call fills one, and which take it from where."""

from __future__ import annotations

import copy
import gc
import pickle
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.arrays import HOST
from cupy_mla.calls import plan
from cupy_mla.calls.operation import forget_calls
from cupy_mla.calls.scratch import PER_THREAD_STREAM
from cupy_mla.cuda.program import PLAN_BYTES
from cupy_mla.cuda.structs import ATTENTION, DENSE
from tests.fake_gpu import FakeGPU

torch = pytest.importorskip("torch")

NO_PLAN = 0, 0


def schedule() -> flash_mla.FlashMLASchedMeta:
    return flash_mla.get_mla_metadata()[0]


def call(
    gpu: FakeGPU, of: flash_mla.FlashMLASchedMeta, *, b: int = 67, topk: int = 2048, **more: Any
) -> tuple[int, int]:
    """Whether an earlier call has filled a call's plan, and the plan's address."""
    gpu.log.clear()
    flash_mla.flash_mla_with_kvcache(
        torch.zeros((b, 1, 64, 576), dtype=torch.bfloat16), torch.zeros((4, 64, 1, 656), dtype=torch.uint8), None, None,
        512, of, is_fp8_kvcache=True, indices=torch.zeros((b, 1, topk), dtype=torch.int32), **more,
    )  # fmt: skip
    return plan_of(gpu)


def plan_of(gpu: FakeGPU) -> tuple[int, int]:
    launch, *merge = (launch for launch in gpu.log if launch.kernel.params in (ATTENTION, DENSE))
    assert all(kernel.name == "dense_combine" for kernel, *_ in merge)
    at = [ATTENTION.offsets[ATTENTION.index[name]] for name in ("plan_filled", "plan")]  # DENSE begins with them
    return struct.unpack_from("i", launch.params, at[0])[0], struct.unpack_from("Q", launch.params, at[1])[0]


ROWS = {"bf16": (576, torch.bfloat16), "v32_fp8": (656, torch.uint8), "plain_fp8": (576, torch.float8_e4m3fn)}


def dense_call(
    gpu: FakeGPU, of: Any, *, rows: str = "bf16", b: int = 67, h: int = 64, width: int = 500, **more: Any
) -> tuple[int, int]:
    """As `call`, of requests of up to `width` blocks."""
    gpu.log.clear()
    arrays = (
        torch.zeros((b, 1, h, 576), dtype=torch.bfloat16), torch.zeros((4, 64, 1, ROWS[rows][0]), dtype=ROWS[rows][1]),
        torch.zeros((b, width), dtype=torch.int32), torch.zeros(b, dtype=torch.int32),
    )  # fmt: skip
    if rows == "plain_fp8":
        flash_mla.flash_mla_with_kvcache_fp8(*arrays, 512, of, None, **more)
    else:
        flash_mla.flash_mla_with_kvcache(*arrays, 512, of, **more)
    return plan_of(gpu)


def test_the_first_call_fills_a_plan_for_the_others(gpu):
    for made in (schedule(), schedule()):
        (filled, address), *others = [call(gpu, made) for _ in range(4)]
        assert filled == 0 == address % 16
        assert address
        assert others == [(1, address)] * 3


@pytest.mark.parametrize("rows", ROWS)
def test_dense_calls_of_a_schedule_share_a_plan(gpu, rows):
    """Of equally many requests and heads; blocks of their tables may be more."""
    for made in (schedule(), schedule()):
        found = [dense_call(gpu, made, rows=rows, width=width) for width in (500, 500, 501, 500)]
        assert [filled for filled, _ in found] == [0, 1, 1, 1]
        assert len({address for _, address in found} - {0}) == 1
        filled = []
        for more in ({"b": 66}, {"b": 66}, {"b": 66, "h": 63}, {}):
            made.shapes = None  # by a schedule that forgets them
            filled.append(dense_call(gpu, made, rows=rows, **more)[0])
        assert filled == [0, 1, 0, 0]


def test_dense_calls_without_shares_have_no_plan(gpu):
    """Short requests, equal splits, and those of batch-invariant calls; and calls that no schedule is given."""
    made = schedule()
    for more in ({"width": 2}, {"b": 1, "width": 40}, {"enable_batch_invariant": True}):
        made.shapes = None
        assert [dense_call(gpu, made, **more) for _ in range(2)] == [NO_PLAN] * 2
    made.shapes, made.num_splits = None, 3
    assert dense_call(gpu, made) == NO_PLAN
    assert made.plan.made == ()
    assert [dense_call(gpu, None, rows="plain_fp8") for _ in range(2)] == [NO_PLAN] * 2


def test_dense_captures_have_plans_of_their_own(gpu):
    """Streams, too. The first call of a graph divides anew at each replay."""
    made = schedule()
    filled = [dense_call(gpu, made)[0] for _ in range(2)]
    for gpu.capture in (1, 2):
        gpu.capturing = True
        filled += [dense_call(gpu, made)[0] for _ in range(2)]
    gpu.capturing = False
    for gpu.stream in (5, 6, PER_THREAD_STREAM):
        filled += [dense_call(gpu, made)[0] for _ in range(2)]
    assert filled == [0, 1] * 5 + [0, 0]


def test_schedules_have_plans_of_their_own(gpu):
    one, other = schedule(), schedule()
    filled, addresses = zip(*[call(gpu, of) for of in (one, other, one, other)], strict=True)
    assert filled == (0, 0, 1, 1)
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]


def test_calls_without_a_schedule_have_no_plan(gpu):
    b = 67
    for _ in range(3):
        gpu.log.clear()
        cupy_mla.sparse_decode(
            torch.zeros((b, 1, 64, 576), dtype=torch.bfloat16), torch.zeros((4, 64, 656), dtype=torch.uint8),
            torch.zeros((b, 1, 2048), dtype=torch.int32), 0.1,
        )  # fmt: skip
        assert plan_of(gpu) == NO_PLAN


def check_plans_of_steps(gpu: FakeGPU, steps: list[Any], forward: Callable[[Any], Any]) -> None:
    """Layers of a step share a plan, which the first of them fills; another step has another."""
    found = []
    for step in (steps[0], steps[0], steps[0], steps[1], steps[1]):
        gpu.log.clear()
        forward(step)
        found.append(plan_of(gpu))
    forget_calls()
    gc.collect()
    assert [filled for filled, _ in found] == [0, 1, 1, 0, 1]
    addresses = [address for _, address in found]
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3] == addresses[4]


@pytest.mark.parametrize("mixed", [False, True])
def test_layers_of_the_backend_share_a_plan(monkeypatch, mixed):
    """That of the step's metadata."""
    forget_calls()
    config = cupy_mla.SparseMLAConfig(
        64, cache_layout="v32_fp8", max_num_seqs=67, max_num_batched_tokens=67, max_model_len=300,
        mixed_below_heads=65 if mixed else 1,
    )  # fmt: skip
    tokens = np.arange(67)
    batch = cupy_mla.BatchMetadata(np.arange(68), [1] * 67, tokens[:, None], 64 * tokens, 0 * tokens)
    builder = cupy_mla.SparseMLAMetadataBuilder(config, ("torch", HOST))
    steps = [builder.build(batch) for _ in range(2)]
    gpu = FakeGPU(monkeypatch)
    q, cache = torch.zeros((67, 64, 576), dtype=torch.bfloat16), torch.zeros((67, 64, 656), dtype=torch.uint8)
    chosen = torch.zeros((67, 2048), dtype=torch.int32)
    impl = cupy_mla.SparseMLAImpl(config, 0.1, cupy_mla.Workspace(cupy_mla.Place.of(q)))
    check_plans_of_steps(gpu, steps, lambda metadata: impl.forward_mqa(q, cache, metadata, chosen))


def test_layers_that_attend_over_all_rows_share_a_plan(monkeypatch):
    """Of the backend, in steps of short contexts: that of the step's metadata."""
    forget_calls()
    config = cupy_mla.SparseMLAConfig(
        64, max_num_seqs=67, max_num_batched_tokens=67, max_model_len=2048, dense_when_short=True
    )
    tokens = np.arange(67)
    batch = cupy_mla.BatchMetadata(np.arange(68), [1] * 67, tokens[:, None], 64 * tokens, 0 * tokens)
    builder = cupy_mla.SparseMLAMetadataBuilder(config, ("torch", HOST))
    steps = [builder.build(batch) for _ in range(2)]
    gpu = FakeGPU(monkeypatch)
    q, cache = torch.zeros((67, 64, 576), dtype=torch.bfloat16), torch.zeros((67, 64, 576), dtype=torch.bfloat16)
    impl = cupy_mla.SparseMLAImpl(config, 0.1, cupy_mla.Workspace(cupy_mla.Place.of(q)))
    chosen = torch.zeros((67, 2048), dtype=torch.int32)
    with cupy_mla.forced("dense_sm90", "shares(splits=0)"):
        check_plans_of_steps(gpu, steps, lambda metadata: impl.forward_mqa(q, cache, metadata, chosen))


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_layers_of_a_kind_share_a_plan(monkeypatch, ratio):
    """Of V4's backend: that of the kind in the step's sliding-window metadata."""
    forget_calls()
    settings = {
        "d_qk": 512, "cache_layout": "v4_fp8", "topk": 512, "max_num_seqs": 67, "max_num_batched_tokens": 67,
        "max_model_len": 4096, "block_size": 256,
    }  # fmt: skip
    plain, own = (cupy_mla.SparseMLAConfig(64, **settings, compress_ratio=r) for r in (1, ratio))
    lens = np.linspace(1, 4096, 67).astype(int)
    table = np.zeros((67, 16), int)
    batch = cupy_mla.BatchMetadata(np.arange(68), lens, table, -np.ones(67, int), lens - 1)
    windows = cupy_mla.SparseSWAMetadataBuilder(plain, ("torch", HOST))
    compressed = cupy_mla.SparseMLAMetadataBuilder(own, ("torch", HOST))
    steps = [(windows.build(batch), compressed.build(batch) if ratio > 1 else None) for _ in range(2)]
    gpu = FakeGPU(monkeypatch)
    q = torch.zeros((67, 64, 512), dtype=torch.bfloat16)
    layer = cupy_mla.DeepseekV4Layer(
        torch.zeros((1, 256, 584), dtype=torch.uint8), torch.zeros(64),
        torch.zeros((1, own.rows_per_block, 584), dtype=torch.uint8) if ratio > 1 else None,
        torch.zeros((67, 512), dtype=torch.int32) if ratio == 4 else None,
    )  # fmt: skip
    impl = cupy_mla.DeepseekV4Impl(own, 0.1, cupy_mla.Workspace(cupy_mla.Place.of(q)))
    with cupy_mla.forced("fp8_sm90", "shares"):
        check_plans_of_steps(gpu, steps, lambda step: impl.forward(q, layer, *step, torch.empty_like(q)))


def test_other_sizes_are_planned_anew(gpu):
    """Here by a schedule that forgets its shapes."""
    made = schedule()
    filled = []
    for more in ({}, {}, {"b": 70}, {"b": 70}, {"topk": 1900}, {"topk": 1900}, {}):
        made.shapes = None
        filled.append(call(gpu, made, **more)[0])
    assert filled == [0, 1, 0, 1, 0, 1, 0]


def test_lists_with_lengths_have_no_plan(gpu):
    """Each call divides its own: their lengths differ."""
    made = schedule()
    length = torch.zeros(67, dtype=torch.int32)
    assert [call(gpu, made, topk_length=length) for _ in range(3)] == [NO_PLAN] * 3
    assert [call(gpu, made)[0] for _ in range(2)] == [0, 1]


def test_two_lists_have_no_plan(gpu):
    """All of them are equally long, which the host knows."""
    made, b = schedule(), 150
    for _ in range(3):
        gpu.log.clear()
        flash_mla.flash_mla_with_kvcache(
            torch.zeros((b, 1, 64, 512), dtype=torch.bfloat16), torch.zeros((4, 256, 1, 584), dtype=torch.uint8), None,
            None, 512, made, is_fp8_kvcache=True, indices=torch.zeros((b, 1, 128), dtype=torch.int32),
            extra_k_cache=torch.zeros((4, 64, 1, 584), dtype=torch.uint8),
            extra_indices_in_kvcache=torch.zeros((b, 1, 512), dtype=torch.int32),
        )  # fmt: skip
        assert plan_of(gpu) == NO_PLAN
    assert made.plan.made == ()


def test_streams_have_plans_of_their_own(gpu):
    made, filled = schedule(), []
    for gpu.stream in (5, 5, 6, 6, 5, 5):
        filled.append(call(gpu, made)[0])
    assert filled == [0, 1] * 3


def test_a_stream_of_every_thread_has_no_plan(gpu):
    gpu.stream, made = PER_THREAD_STREAM, schedule()
    assert [call(gpu, made) for _ in range(3)] == [NO_PLAN] * 3


def test_captures_have_plans_of_their_own(gpu):
    made = schedule()
    filled = [call(gpu, made)[0], call(gpu, made)[0]]
    for gpu.capture in (1, 2):
        gpu.capturing = True
        filled += [call(gpu, made)[0] for _ in range(2)]
    gpu.capturing = False
    filled += [call(gpu, made)[0] for _ in range(2)]
    assert filled == [0, 1] * 4


def test_a_plan_serves_so_many_calls(gpu, monkeypatch):
    monkeypatch.setattr(plan, "MOST_CALLS", 3)
    made = schedule()
    assert [call(gpu, made)[0] for _ in range(7)] == [0, 1, 1, 0, 1, 1, 0]


def test_a_call_that_fails_does_not_count(gpu, monkeypatch):
    """Neither as the one that fills a plan, nor as one behind it."""
    made, broken = schedule(), []
    call(gpu, schedule())

    class Log(list):
        def append(self, launch: Any) -> None:
            if broken:
                raise RuntimeError(broken.pop())
            super().append(launch)

    monkeypatch.setattr(gpu, "log", Log())
    filled = []
    for _ in range(3):
        broken.append("no launch")
        with pytest.raises(RuntimeError, match="no launch"):
            call(gpu, made)
        filled.append(call(gpu, made)[0])
    assert filled == [0, 1, 1]
    assert made.plan.made[-1] == 3


def test_memory_goes_with_the_schedule(gpu):
    made = schedule()
    call(gpu, made)
    _, address, memory, _ = made.plan.made
    assert (memory.data_ptr(), memory.numel()) == (address, PLAN_BYTES)
    held = weakref.ref(memory)
    del made, memory
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_plans_of_their_own(gpu, copied):
    made = schedule()
    call(gpu, made)
    assert copied(made.plan).made == () != made.plan.made
