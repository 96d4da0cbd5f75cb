"""Plans: a call like one that was seen before does what the first one did, with its own arrays, and nothing else."""

from __future__ import annotations

import gc
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import layouts
from cupy_mla.arrays import Array, Place, aligned_up
from cupy_mla.cuda import attention
from cupy_mla.ops import _plan
from cupy_mla.recording import Code
from tests.fake_gpu import FakeGPU, HostCuPy, Submitted
from tests.kinds import NumPy, Torch
from tests.operations import OPERATIONS, Call

torch = pytest.importorskip("torch")

every_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.fixture
def gpu(monkeypatch) -> Iterator[FakeGPU]:
    _plan.forget_plans()
    yield FakeGPU(monkeypatch)
    _plan.forget_plans()


@pytest.fixture
def repeats(monkeypatch) -> list[_plan.Plan]:
    """The plans that calls went by."""
    seen: list[_plan.Plan] = []
    make = _plan.plan_of

    def noted(*call: Any) -> _plan.Plan | None:
        plan = make(*call)

        def run(*arguments: Any) -> Any:
            result = plan(*arguments)
            if result is not NotImplemented:
                seen.append(plan)
            return result

        return plan and run

    monkeypatch.setattr(_plan, "plan_of", noted)
    return seen


@pytest.fixture(params=["torch", "cupy"])
def kind(request, gpu) -> Iterator[NumPy]:
    """Arrays that pass for some on a GPU."""
    if request.param == "torch":
        yield Torch()
        return
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.using_allocator(gpu.malloc):
        yield HostCuPy()


def put(kind: NumPy, call: Call) -> dict[str, Any]:
    return {name: kind.put(a) for name, a in call.arrays.items()}


def submit(gpu: FakeGPU, call: Call, arrays: dict[str, Any]) -> tuple[list[Submitted], list[Any]]:
    """What one call hands to the driver, and where what it returns lies."""
    gpu.log.clear()
    gpu.used = 0
    result = call.operation(**arrays, **call.settings)
    leaves = [Array("leaf", a) for a in (result if isinstance(result, tuple) else (result,)) if a is not None]
    return list(gpu.log), [(a.kind, a.ptr, a.shape, a.strides, a.dtype) for a in leaves]


@every_operation
@pytest.mark.parametrize("given", [False, True], ids=["allocates", "writes"])
@pytest.mark.parametrize("calls", [2, 3], ids=["by key", "at a glance"])
def test_a_call_seen_before_does_the_same(gpu, repeats, rng, kind, name, given, calls):
    first, second = (OPERATIONS[name](rng) for _ in range(2))
    first, second = (call.with_outputs() if given else call for call in (first, second))
    second.settings = first.settings  # one schedule
    for _ in range(calls):  # flash_mla makes its schedule at the first
        submit(gpu, first, put(kind, first))
    del repeats[:]
    arrays = put(kind, second)
    got = submit(gpu, second, arrays)
    assert len(repeats) == 1, "the call went by no plan"
    _plan.forget_plans()
    want = submit(gpu, second, arrays)
    assert len(repeats) == 1
    assert got == want
    assert got[0]


def test_results_of_cupy_share_memory_and_nothing_else_does(gpu, repeats, rng):
    """Partial results are let go with the call, results as the caller likes."""
    cupy = pytest.importorskip("cupy")
    asked = []

    def malloc(nbytes: int) -> Any:
        asked.append(nbytes)
        return gpu.malloc(nbytes)

    arrays = put(HostCuPy(), OPERATIONS["sparse_prefill"](rng)) | {"sm_scale": 0.1}
    with cupy.cuda.using_allocator(malloc):
        for _ in range(2):
            del asked[:]
            results = cupy_mla.sparse_prefill(**arrays)
    assert len(repeats) == 1
    assert asked[0] == sum(aligned_up(a.nbytes) for a in results)
    assert len({id(a.data.mem) for a in results}) == 1


def grouped() -> dict[str, Any]:
    """Prefill in groups of queries, which are three launches."""
    return tensors(
        q=((512, 16, 576), torch.bfloat16), kv=((999, 1, 576), torch.bfloat16), indices=((512, 1, 700), torch.int32)
    ) | {"sm_scale": 0.1}


def test_launches_in_a_row_are_one_graph(gpu, repeats):
    first, second = grouped(), grouped()

    def run(arrays: dict[str, Any]) -> list[Submitted]:
        gpu.log.clear()
        gpu.used = 0
        cupy_mla.sparse_prefill(**arrays)
        return list(gpu.log)

    launched = run(first)
    assert len(launched) == 3
    assert gpu.graphs.runs == 0
    assert run(first) == launched
    assert (gpu.graphs.runs, gpu.graphs.changes) == (1, 0)
    changed = run(second)
    assert (gpu.graphs.runs, gpu.graphs.changes) == (2, 3)
    assert run(second) == changed != launched
    assert (gpu.graphs.runs, gpu.graphs.changes) == (3, 3)
    gpu.stream = 7
    assert run(first) == [launch._replace(stream=7) for launch in launched]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (4, 6)
    gpu.capturing = True
    assert run(second) == [launch._replace(stream=7) for launch in changed]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (4, 6)
    assert len(repeats) == 5


def test_graphs_are_let_go_with_their_plans(gpu, repeats):
    for _ in range(2):
        cupy_mla.sparse_prefill(**grouped())
    assert len(gpu.graphs.made) == 2  # one and its executable
    _plan.forget_plans()
    del repeats[:]
    gc.collect()
    assert not gpu.graphs.made


def test_threads_share_a_graph(gpu, repeats):
    """Each finds its own parameters in what it launched."""
    calls = [grouped() for _ in range(4)]
    cupy_mla.sparse_prefill(**calls[0])
    gpu.log.clear()

    def run(arrays: dict[str, Any]) -> None:
        for _ in range(50):
            gpu.used = 0
            cupy_mla.sparse_prefill(**arrays)

    threads = [threading.Thread(target=run, args=(arrays,)) for arrays in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.log) == 3 * 50 * len(calls)
    owners = [
        [i for i, arrays in enumerate(calls) if struct.pack("Q", arrays["q"].data_ptr()) in launch.params]
        for launch in gpu.log
    ]
    assert all(len(owner) == 1 for owner in owners)
    assert all(owners[i] == owners[i + 1] == owners[i + 2] for i in range(0, len(owners), 3)), "two calls in one graph"
    assert [owners.count([i]) for i in range(len(calls))] == [150] * len(calls)


def test_the_driver_refuses_a_graph(gpu, repeats, monkeypatch):
    cupy_mla.sparse_prefill(**grouped())
    monkeypatch.setattr(gpu.graphs, "cuGraphInstantiateWithFlags", lambda *arguments: 2)
    with pytest.raises(RuntimeError, match=r"^cuGraphInstantiateWithFlags failed: CUDA driver error 2$"):
        cupy_mla.sparse_prefill(**grouped())


# --- what must not go by a plan --------------------------------------------------------------------------------


def tensors(**shapes: tuple[Any, ...]) -> dict[str, Any]:
    """Tensors by name, each of a shape and a dtype."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}


def prefill(s_q: int = 3, **change: Any) -> dict[str, Any]:
    arrays = tensors(
        q=((s_q, 4, 576), torch.bfloat16), kv=((9, 1, 576), torch.bfloat16), indices=((s_q, 1, 7), torch.int32)
    )
    return {**arrays, "sm_scale": 0.1, **change}


@pytest.fixture
def seen(gpu, repeats) -> list[_plan.Plan]:
    """The plans that calls went by, once a call has been seen."""
    cupy_mla.sparse_prefill(**prefill())
    cupy_mla.sparse_prefill(**prefill())
    assert len(repeats) == 1
    del repeats[:]
    return repeats


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"s_q": 4},
        lambda: {"sm_scale": 0.2},
        lambda: {"sm_scale": np.float64(0.1)},
        lambda: {"q": torch.zeros(3, 8, 576, dtype=torch.bfloat16)[:, ::2]},
        lambda: {"q": torch.zeros(3 * 4 * 576 + 1, dtype=torch.bfloat16)[1:].view(3, 4, 576)},
        lambda: {"kv": torch.zeros(8, 1, 576, dtype=torch.bfloat16)},
        lambda: {"attn_sink": torch.zeros(4)},
        lambda: {"topk_length": torch.zeros(3, dtype=torch.int32)},
        lambda: {"out": torch.zeros(3, 4, 512, dtype=torch.bfloat16)},
    ],
    ids=["shape", "setting", "type of a setting", "strides", "alignment", "rows", "sink", "length", "out"],
)
def test_another_signature_is_another_plan(seen, change):
    for _ in range(3):
        cupy_mla.sparse_prefill(**prefill(**change()))
    assert len(seen) == 2, "the first went by the other's plan, or a later one by none"
    cupy_mla.sparse_prefill(**prefill())
    assert seen[0] is seen[1] is not seen[2]


def test_the_environment_names_kernels_at_any_time(gpu, seen, monkeypatch):
    gpu.log.clear()
    for kernels in ("sm90", "portable"):
        monkeypatch.setenv("CUPY_MLA_KERNELS", kernels)
        cupy_mla.sparse_prefill(**prefill())
    assert not seen
    assert gpu.log[0].kernel is not gpu.log[1].kernel


def test_checks_stay_on(seen):
    for wrong, error in (
        ({"indices": torch.zeros(3, 1, 7)}, TypeError),
        ({"kv": torch.zeros(9, 1, 512, dtype=torch.bfloat16)}, ValueError),
        ({"q": torch.zeros(3, 4, 576, dtype=torch.bfloat16).to_sparse()}, TypeError),
        ({"q": np.zeros((3, 4, 576))}, TypeError),
        ({"out": torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(3, 4, 512)}, ValueError),
        ({"d_v": [512]}, ValueError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                cupy_mla.sparse_prefill(**prefill(**wrong))
    assert not seen


def test_values_are_checked_when_asked(seen, monkeypatch):
    monkeypatch.setattr("cupy_mla.arrays.CHECK_VALUES", True)
    cupy_mla.sparse_prefill(**prefill())
    assert not seen


def test_the_value_of_a_tensor_is_no_setting(gpu, seen):
    """A scale that is a tensor is read at every call."""
    for value in (0.5, 0.25):
        gpu.log.clear()
        gpu.used = 0
        arguments = prefill()
        cupy_mla.sparse_prefill(**{**arguments, "sm_scale": torch.tensor(value)})
        as_tensor = gpu.log.pop()
        gpu.used = 0
        cupy_mla.sparse_prefill(**{**arguments, "sm_scale": value})
        assert as_tensor == gpu.log[-1]
    assert not seen


def test_one_array_under_two_names(gpu, repeats):
    """In place once, not in place the next time: both write where they are told."""
    arrays = tensors(req_id=((4,), torch.int32), block_table=((2, 3), torch.int32), token_indices=((4, 8), torch.int32))
    other = torch.zeros(4, 8, dtype=torch.int32)
    for out in (arrays["token_indices"], other, arrays["token_indices"], other):
        gpu.log.clear()
        got = cupy_mla.convert_req_index_to_global_index(**arrays, block_size=4, out=out)
        assert got is out
        addresses = np.frombuffer(gpu.log[0].params[: len(gpu.log[0].params) // 8 * 8], np.uint64)
        assert out.data_ptr() in addresses
        assert (other.data_ptr() in addresses) == (out is other)


def test_gradients(seen):
    wanting = prefill()["q"].requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^q requires a gradient, and cupy_mla has no backward: call under"):
            cupy_mla.sparse_prefill(**prefill(q=wanting))
        with torch.no_grad():
            cupy_mla.sparse_prefill(**prefill(q=wanting))
    assert not seen


def test_the_stream_is_that_of_the_moment(gpu, seen):
    gpu.log.clear()
    for gpu.stream in (0, 77, 5):
        cupy_mla.sparse_prefill(**prefill())
    assert [s.stream for s in gpu.log] == [0, 77, 5]
    assert len(seen) == 3


def test_a_thread_has_a_context_before_it_launches(gpu, seen):
    """A driver's launch does not make one, and a thread's first call may go by a plan of another's."""
    for _ in range(2):
        thread = threading.Thread(target=lambda: cupy_mla.sparse_prefill(**prefill()))
        thread.start()
        thread.join()
        assert gpu.threads.count(thread) == 1
    assert gpu.threads.count(threading.current_thread()) == 1
    assert len(seen) == 2


def test_cupy_arrays_are_told_apart():
    """With and without gaps, and with an axis whose stride says nothing."""

    def array(shape: tuple[int, ...], step: int = 1, **change: Any) -> SimpleNamespace:
        of = np.zeros((*shape[:-1], shape[-1] * step), change.get("dtype", np.int32))[..., ::step]
        contiguous, data = of.flags.c_contiguous, SimpleNamespace(device_id=change.get("device", 0), ptr=0)
        strides = change.get("strides", of.strides)
        return SimpleNamespace(dtype=of.dtype, shape=shape, strides=strides, _c_contiguous=contiguous, data=data)

    def arrays(**change: Any) -> list[SimpleNamespace]:
        return [array((3, 4), **change), array((3, 4), 2, **change), array((3, 1, 4), **change)]

    def alike(*others: SimpleNamespace) -> bool:
        return seen(*others) is not NotImplemented

    code = Code()
    _plan._write_starts(code, Place("cupy", 0), arrays())
    seen = code.function(["a0", "a1", "a2"])
    assert alike(*arrays())
    for change in ({"dtype": np.int64}, {"dtype": np.float32}, {"device": 1}):
        for i, other in enumerate(arrays(**change)):
            assert not alike(*arrays()[:i], other, *arrays()[i + 1 :])
    plain, strided, flat = arrays()
    assert not alike(array((4, 4)), strided, flat)
    assert not alike(array((3, 4), 2), strided, flat)
    assert not alike(plain, array((3, 4)), flat)
    assert not alike(plain, array((3, 4), 3), flat)
    assert not alike(plain, strided, array((3, 1, 4), 2))
    assert alike(plain, strided, array((3, 1, 4), strides=(16, 99, 4)))


def test_parameters_are_tensors(gpu, repeats):
    sink = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    for _ in range(2):
        cupy_mla.sparse_prefill(**prefill(attn_sink=sink))
    assert len(repeats) == 1


def kept_by(operation: Any) -> _plan.Plans:
    """The plans of an operation."""
    return next(c.cell_contents for c in operation.__closure__ if isinstance(c.cell_contents, _plan.Plans))


def test_plans_do_not_pile_up(gpu, seen, monkeypatch):
    monkeypatch.setattr(_plan, "MAX_PLANS", 5)
    for s_q in range(1, 20):
        cupy_mla.sparse_prefill(**prefill(s_q))
    assert 0 < sum(len(form.plans) for form in kept_by(cupy_mla.sparse_prefill).forms.values()) <= 2 * 5


def test_many_signatures_in_turn(gpu, seen):
    """More than are found at a glance: each finds its plan, in inference mode too."""
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for s_q in (*range(1, 4 + _plan.RECENT), *range(1, 4 + _plan.RECENT)):
            gpu.log.clear()
            with mode():
                out, _, _ = cupy_mla.sparse_prefill(**prefill(s_q))
            assert out.shape[0] == s_q
            assert len(gpu.log) == 1
        assert len(set(seen)) == 3 + _plan.RECENT
        del seen[:]
    assert [len(plans) for plans in kept_by(cupy_mla.sparse_prefill).recent.values()] == [_plan.RECENT]


def test_cpu_arrays_leave_no_plan(rng, repeats):
    for _ in range(3):
        cupy_mla.sparse_prefill(**prefill())
        OPERATIONS["sparse_prefill"](rng).run(NumPy())
    assert not repeats


# --- calls whose bits do not depend on the batch ---------------------------------------------------------------


def launches(
    gpu: FakeGPU, layout: layouts.Layout, h_q: int, topk: int, b: int, batch_invariant: bool
) -> list[tuple[Any, ...]]:
    """What the arithmetic of one request depends on in the launches of a decode: kernels, splits, clusters."""
    shape, dtype = (1, 64, layout.last_axis), torch.uint8 if layout.quantized else torch.bfloat16
    arrays = tensors(
        q=((b, 1, h_q, layout.d_qk), torch.bfloat16), k_cache=(shape, dtype), indices=((b, 1, topk), torch.int32)
    )
    gpu.log.clear()
    gpu.used = 0
    cupy_mla.sparse_decode(**arrays, batch_invariant=batch_invariant)
    return [(launch.kernel, launch.grid[1:]) for launch in gpu.log]


@pytest.mark.parametrize("layout", layouts.ATTENTION_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("h_q", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("topk", [64, 1000, 2048])
def test_batch_invariant_decode_takes_the_same_kernels(gpu, layout, h_q, topk):
    seen = [launches(gpu, layout, h_q, topk, b, True) for b in (1, 3, 40, 300)]
    assert seen[0]
    assert all(launched == seen[0] for launched in seen)


def test_other_decode_takes_what_suits_the_batch(gpu):
    few, many = (launches(gpu, layouts.V32_FP8, 64, 2048, b, False) for b in (1, 300))
    assert few != many


# --- decode of a cache that is one array of rows ----------------------------------------------------------------


@pytest.mark.parametrize("d_qk", [576, 512])
def test_decode_of_flat_bf16_rows_is_prefill_of_them(gpu, d_qk):
    """The same kernel gets the same parameters, but for pages, max_logits, and where lse lies."""
    arrays = tensors(
        q=((80, 1, 64, d_qk), torch.bfloat16), k_cache=((3, 16, d_qk), torch.bfloat16),
        indices=((80, 1, 90), torch.int32), topk_length=((80,), torch.int32), attn_sink=((64,), torch.float32),
        out=((80, 1, 64, 512), torch.bfloat16),
    )  # fmt: skip
    gpu.log.clear()
    cupy_mla.sparse_decode(**arrays, sm_scale=0.1, num_splits=1)
    flat = {name: arrays[name] for name in ("indices", "topk_length", "attn_sink")}
    kv = arrays["k_cache"].view(48, 1, d_qk)
    cupy_mla.sparse_prefill(arrays["q"][:, 0], kv, sm_scale=0.1, out=arrays["out"][:, 0], **flat)
    decode, prefill = gpu.log
    assert decode.kernel is prefill.kernel
    assert decode.kernel.file == "attention/bf16_sm90.cu"
    assert decode.grid == prefill.grid
    a, b = (attention._PARAMS.struct.unpack(launch.params) for launch in gpu.log)
    block_stride, index_stride_s, block_size = 3, 6, 9  # of struct Source
    q_s, out_s, lse, max_logits, lse_s = 22, 26, 28, 29, 31
    differ = {i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y}
    assert differ <= {block_stride, index_stride_s, block_size, q_s, out_s, lse, max_logits, lse_s}
