"""Remembered calls: a call of a key that was seen before does what it would do by itself, and nothing else."""

from __future__ import annotations

import gc
import inspect
import random
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import flash_mla, layouts, private
from cupy_mla.arrays import aligned_up
from cupy_mla.bridges import TorchLibrary, bind, describe
from cupy_mla.calls import operation
from cupy_mla.calls.operation import forget_calls
from cupy_mla.calls.prepared import Prepared
from cupy_mla.cuda import driver
from cupy_mla.cuda.attention.call import DECODE
from cupy_mla.cuda.attention.kernels import fp8_sm90
from cupy_mla.cuda.cache import PACK
from cupy_mla.cuda.structs import ATTENTION
from cupy_mla.dtypes import BFLOAT16
from tests.fake_gpu import FakeGPU, HostCuPy, Submitted
from tests.kinds import NumPy, Torch
from tests.operations import OPERATIONS, Call, in_threads

torch = pytest.importorskip("torch")

every_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.fixture
def first(monkeypatch) -> list[str]:
    """Names of the operations' bodies that ran for a call on a GPU: a call of a known key runs none."""
    seen: list[str] = []
    run_body = operation.run_body

    def noted(function: Any, *arguments: Any) -> Any:
        seen.append(function.__name__)
        return run_body(function, *arguments)

    monkeypatch.setattr(operation, "run_body", noted)
    return seen


@pytest.fixture(params=["torch", "torch without guards", "cupy"])
def kind(request, gpu, monkeypatch) -> Iterator[NumPy]:
    """Arrays that pass for some on a GPU; torch's also with a torch that has no guards for calls."""
    if request.param == "torch without guards":
        monkeypatch.setattr(private, "torch_guards", lambda tensors: None)
    if request.param != "cupy":
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
    leaves = [describe("leaf", a) for a in (result if isinstance(result, tuple) else (result,)) if a is not None]
    return list(gpu.log), [(a.kind, a.ptr, a.shape, a.strides, a.dtype) for a in leaves]


@every_operation
@pytest.mark.parametrize("given", [False, True], ids=["allocates", "writes"])
def test_a_call_seen_before_does_the_same(gpu, first, rng, kind, name, given):
    """With other arrays: what is repeated is what the call would hand to the driver if it were the first."""
    one, other = (OPERATIONS[name](rng) for _ in range(2))
    one, other = (call.with_outputs() if given else call for call in (one, other))
    other.settings = one.settings  # one schedule
    for _ in range(3):  # flash_mla makes its schedule at the first
        submit(gpu, one, put(kind, one))
    arrays = put(kind, other)
    first.clear()
    got = [submit(gpu, other, arrays) for _ in range(3)]
    assert not first
    forget_calls()
    alone = submit(gpu, other, arrays)
    assert first
    assert [without_nonces(launched) for launched, _ in got] == [without_nonces(alone[0])] * 3
    assert [leaves for _, leaves in got] == [alone[1]] * 3
    assert alone[0]


def without_nonces(launched: list[Submitted]) -> list[Submitted]:
    """Launches, without the numbers that each run has for itself."""
    plain = []
    for launch in launched:
        if launch.kernel is not None and "nonce" in launch.kernel.params.index:
            start = launch.kernel.params.offsets[launch.kernel.params.index["nonce"]]
            launch = launch._replace(params=launch.params[:start] + bytes(8) + launch.params[start + 8 :])
        plain.append(launch)
    return plain


@every_operation
def test_checked_calls_do_the_same(gpu, first, rng, kind, name, monkeypatch):
    """Under CUPY_MLA_CHECK every call runs its body."""
    call = OPERATIONS[name](rng)
    arrays = put(kind, call)
    submit(gpu, call, arrays)
    launched, leaves = submit(gpu, call, arrays)
    monkeypatch.setattr("cupy_mla.arrays.CHECK_VALUES", True)
    first.clear()
    for _ in range(2):
        checked = submit(gpu, call, arrays)
        assert (without_nonces(checked[0]), checked[1]) == (without_nonces(launched), leaves)
    assert len(first) == 2


def test_random_sizes(gpu, first):
    """Decodes, prefills and packs of sizes that come again at random: each launch is what a first call makes."""
    draw = random.Random(5)
    calls = []
    for _ in range(25):
        b, s_q, topk, blocks = (draw.randint(1, most) for most in (150, 3, 300, 40))
        heads = draw.choice([8, 16, 64, 128])
        decode = tensors(
            q=((b, s_q, heads, 576), torch.bfloat16), k_cache=((blocks, 64, 656), torch.uint8),
            indices=((b, s_q, topk), torch.int32),
        )  # fmt: skip
        calls.append((cupy_mla.sparse_decode, decode | {"sm_scale": 0.1}))
        calls.append((cupy_mla.sparse_prefill, prefill(s_q=b * s_q)))
        pack = tensors(
            kv_c=((b, 512), torch.bfloat16), k_pe=((b, 64), torch.bfloat16), kv_cache=((blocks, 64, 656), torch.uint8),
            slot_mapping=((b,), torch.int64),
        )  # fmt: skip
        calls.append((cupy_mla.concat_and_cache_mla, pack))
    alone = []
    for function, arguments in calls:
        forget_calls()
        alone.append(launches_of(gpu, function, arguments))
    forget_calls()
    for i in draw.choices(range(len(calls)), k=600):
        assert launches_of(gpu, *calls[i]) == alone[i]
    first.clear()
    for i in range(len(calls)):
        launches_of(gpu, *calls[i])
        launches_of(gpu, *calls[i])
    assert len(first) < len(calls) // 4, "most of them were known"


def launches_of(gpu: FakeGPU, function: Any, arguments: dict[str, Any]) -> list[Submitted]:
    gpu.log.clear()
    gpu.used = 0
    function(**arguments)
    return without_nonces(gpu.log)


AS_ATTENTION = "=" + "".join(ATTENTION.codes)


def test_sizes_do_not_pile_up(gpu, first):
    """However much traffic, an operation keeps a bounded number of calls, those that were used last."""
    most = operation.MOST_KEYS
    kvc, kpe = torch.zeros(3 * most, 512, dtype=torch.bfloat16), torch.zeros(3 * most, 64, dtype=torch.bfloat16)
    cache, slots = torch.zeros(64, 64, 656, dtype=torch.uint8), torch.zeros(3 * most, dtype=torch.int64)

    def pack(n: int) -> None:
        gpu.log.clear()
        cupy_mla.concat_and_cache_mla(kvc[:n], kpe[:n], cache, slots[:n])

    for n in range(1, 3 * most):
        pack(n)
        pack(1)  # stays, since it comes again and again
    first.clear()
    for n in (1, *range(2 * most + 2, 3 * most)):
        pack(n)
    assert not first
    pack(most)
    assert len(first) == 1
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o) is Prepared]
    assert len(kept) <= most + 2, "something holds calls that are forgotten"


def test_traffic_leaves_few_objects_to_the_garbage_collector(gpu):
    """The more there are, the sooner it looks at all of a process, which stops an engine's step."""
    q = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16).expand(1000, 1, 64, 576)
    cache, lists = torch.zeros(9, 64, 656, dtype=torch.uint8), torch.zeros(1000, 1, 512, dtype=torch.int32)
    gc.collect()
    before = len(gc.get_objects())
    for n in range(1, 1001):
        gpu.used = 0
        gpu.log.clear()
        cupy_mla.sparse_decode(q[:n], cache, lists[:n], 0.1)
    gc.collect()
    assert len(gc.get_objects()) - before < 12_000


def test_results_of_cupy_share_memory_and_nothing_else_does(gpu, rng):
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
    assert asked[0] == sum(aligned_up(a.nbytes) for a in results[:-1]) + results[-1].nbytes
    assert len({id(a.data.mem) for a in results}) == 1


@pytest.mark.long(sample=12)
@every_operation
def test_first_calls_leave_nothing_to_the_garbage_collector(gpu, rng, kind, name):
    """What refers to itself would be looked at by the calls that come later."""
    call = OPERATIONS[name](rng)
    arrays = put(kind, call)
    submit(gpu, call, arrays)  # kernels are made
    gc.collect()
    gc.disable()
    try:
        forget_calls()
        gpu.used = 0
        call.operation(**arrays, **call.settings)
        assert gc.collect() == 0
    finally:
        gc.enable()


# --- graphs of launches -----------------------------------------------------------------------------------------


def grouped() -> dict[str, Any]:
    """Prefill in query groups, which are three launches."""
    return tensors(
        q=((512, 16, 576), torch.bfloat16), kv=((999, 1, 576), torch.bfloat16), indices=((512, 1, 2048), torch.int32)
    ) | {"sm_scale": 0.1}


def prefill_in_groups(gpu: FakeGPU, arrays: dict[str, Any]) -> list[Submitted]:
    gpu.log.clear()
    gpu.used = 0
    cupy_mla.sparse_prefill(**arrays)
    return list(gpu.log)


def test_launches_in_a_row_are_one_graph(gpu, first):
    """From the second call of the same grids on. Two graphs serve two sets of arrays in turn without a change."""
    sets = [grouped() for _ in range(3)]
    launched = [prefill_in_groups(gpu, sets[0])]
    assert len(launched[0]) == 3
    assert gpu.graphs.runs == 0
    assert prefill_in_groups(gpu, sets[0]) == launched[0]
    launched.append(prefill_in_groups(gpu, sets[1]))
    for turn in range(6):
        assert prefill_in_groups(gpu, sets[turn % 2]) == launched[turn % 2]
    assert launched[0] != launched[1]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (8, 0)
    launched.append(prefill_in_groups(gpu, sets[2]))
    assert (gpu.graphs.runs, gpu.graphs.changes) == (9, 3)
    assert prefill_in_groups(gpu, sets[1]) == launched[1], "the other graph has changed"
    assert (gpu.graphs.runs, gpu.graphs.changes) == (10, 3)
    gpu.stream = 7
    assert prefill_in_groups(gpu, sets[0]) == [launch._replace(stream=7) for launch in launched[0]]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (11, 6)
    gpu.capturing = True
    assert prefill_in_groups(gpu, sets[1]) == [launch._replace(stream=7) for launch in launched[1]]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (11, 6)
    assert len(first) == 1


def of_queries(arrays: dict[str, Any], s_q: int) -> dict[str, Any]:
    """A call's first queries."""
    return {n: a[:s_q] if n in ("q", "indices", "topk_length") else a for n, a in arrays.items()}


def test_a_graph_serves_every_size(gpu, first):
    """Grids do not depend on the number of queries."""
    calls = [of_queries(grouped(), s_q) for s_q in (512, 500, 480)]
    one_by_one = []
    for arrays in calls:
        forget_calls()
        one_by_one.append(prefill_in_groups(gpu, arrays))
    assert (gpu.graphs.runs, len(first)) == (0, 3)
    for arrays, launched in zip(calls, one_by_one, strict=True):
        assert prefill_in_groups(gpu, arrays) == launched
    assert (gpu.graphs.runs, gpu.graphs.changes, len(first)) == (3, 3, 5)
    for arrays, launched in zip(calls, one_by_one, strict=True):
        assert prefill_in_groups(gpu, arrays) == launched
    assert (gpu.graphs.runs, len(first)) == (6, 5)


def test_a_graph_of_new_grids(gpu, first, force):
    """Groups with lengths have a CTA each: launched one by one, and by a graph when they come again."""
    force("bf16_grouped_sm90")
    whole = grouped() | tensors(topk_length=((512,), torch.int32))
    calls = [of_queries(whole, s_q) for s_q in (512, 500, 400)]
    one_by_one = [prefill_in_groups(gpu, arrays) for arrays in calls]
    for arrays, launched in zip(calls, one_by_one, strict=True):  # the last two sizes are remembered
        assert prefill_in_groups(gpu, arrays) == launched
    assert gpu.graphs.runs == 0
    for turn in range(1, 7):
        assert prefill_in_groups(gpu, calls[turn % 2 + 1]) == one_by_one[turn % 2 + 1]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (6, 0)
    for _ in range(2):
        assert prefill_in_groups(gpu, calls[0]) == one_by_one[0]
    assert (gpu.graphs.runs, gpu.graphs.changes) == (7, len(one_by_one[0]))
    assert len(first) == 3
    forget_calls()
    assert prefill_in_groups(gpu, calls[1]) == one_by_one[1]


def test_a_graph_whose_change_failed_is_changed_again(gpu, monkeypatch):
    sets = [grouped() for _ in range(4)]
    launched = [prefill_in_groups(gpu, arrays) for arrays in sets]
    refused = iter((0, 2))  # the second launch of a graph is not changed
    change = gpu.graphs.cuGraphExecKernelNodeSetParams
    with monkeypatch.context() as patch:
        patch.setattr(
            gpu.graphs, "cuGraphExecKernelNodeSetParams", lambda *given: change(*given) if not next(refused) else (2,)
        )
        with pytest.raises(RuntimeError, match="cuGraphExecKernelNodeSetParams failed"):
            prefill_in_groups(gpu, sets[0])
    for turn in (2, 3, 0, 1):  # the graph was that of the third call
        assert prefill_in_groups(gpu, sets[turn]) == launched[turn]


def test_graphs_are_let_go_with_their_calls(gpu):
    for _ in range(2):
        cupy_mla.sparse_prefill(**grouped())
    assert len(gpu.graphs.made) == 2  # one and its executable
    forget_calls()
    gc.collect()
    assert not gpu.graphs.made


def test_threads_share_a_graph(gpu):
    """Each finds its own parameters in what it launched."""
    calls = [grouped() for _ in range(4)]
    cupy_mla.sparse_prefill(**calls[0])
    gpu.log.clear()

    def run(arrays: dict[str, Any]) -> None:
        for _ in range(50):
            gpu.used = 0
            cupy_mla.sparse_prefill(**arrays)

    in_threads(run, calls)
    assert len(gpu.log) == 3 * 50 * len(calls)
    owners = [
        [i for i, arrays in enumerate(calls) if struct.pack("Q", arrays["q"].data_ptr()) in launch.params]
        for launch in gpu.log
    ]
    assert all(len(owner) == 1 for owner in owners)
    assert all(owners[i] == owners[i + 1] == owners[i + 2] for i in range(0, len(owners), 3)), "two calls in one graph"
    assert [owners.count([i]) for i in range(len(calls))] == [150] * len(calls)


def test_the_driver_refuses_a_graph(gpu, monkeypatch):
    monkeypatch.setattr(gpu.graphs, "cuGraphInstantiate", lambda *arguments: (2, None))
    cupy_mla.sparse_prefill(**grouped())
    with pytest.raises(RuntimeError, match=r"^cuGraphInstantiate failed: CUDA driver error 2$"):
        cupy_mla.sparse_prefill(**grouped())


# --- what no call of another key may serve ----------------------------------------------------------------------


def tensors(**shapes: tuple[Any, ...]) -> dict[str, Any]:
    """Tensors by name, each of a shape and a dtype."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}


def prefill(s_q: int = 3, **change: Any) -> dict[str, Any]:
    arrays = tensors(
        q=((s_q, 4, 576), torch.bfloat16), kv=((9, 1, 576), torch.bfloat16), indices=((s_q, 1, 7), torch.int32)
    )
    return {**arrays, "sm_scale": 0.1, **change}


@pytest.fixture
def seen(gpu, first) -> list[str]:
    """The bodies that ran once a call was seen twice."""
    cupy_mla.sparse_prefill(**prefill())
    cupy_mla.sparse_prefill(**prefill())
    assert len(first) == 1
    first.clear()
    return first


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"sm_scale": 0.2},
        lambda: {"sm_scale": np.float64(0.1)},
        lambda: {"q": torch.zeros(3 * 4 * 576 + 1, dtype=torch.bfloat16)[1:].view(3, 4, 576)},
        lambda: {"attn_sink": torch.zeros(4)},
        lambda: {"topk_length": torch.zeros(3, dtype=torch.int32)},
        lambda: {"out": torch.zeros(3, 4, 512, dtype=torch.bfloat16)},
    ],
    ids=["setting", "type of a setting", "alignment", "sink", "length", "out"],
)
def test_another_key_is_another_call(gpu, seen, change):
    for _ in range(3):
        cupy_mla.sparse_prefill(**prefill(**change()))
    assert len(seen) == 1
    cupy_mla.sparse_prefill(**prefill())
    assert len(seen) == 1, "that of before is forgotten"


def wide_lists(topk: int) -> Any:
    return torch.zeros(3, 1, 60 + topk, dtype=torch.int32)[..., :topk]


@pytest.mark.parametrize(
    "change",
    [
        lambda n: {"s_q": 2 + n},
        lambda n: {"q": torch.zeros(3, 8 + 4 * n, 576, dtype=torch.bfloat16)[:, :: 2 + n]},
        lambda n: {"kv": torch.zeros(7 + n, 1, 576, dtype=torch.bfloat16)},
        lambda n: {"indices": wide_lists(8 + n)},
    ],
    ids=["queries", "strides", "rows", "topk"],
)
def test_another_size_or_stride_is_another_call(gpu, seen, change):
    """Each does what it does alone, also when they come in turn."""
    calls = [prefill(**change(n)) for n in range(3)]
    alone = []
    for arrays in calls:
        forget_calls()
        alone.append(launches_of(gpu, cupy_mla.sparse_prefill, arrays))
    assert alone[0] != alone[1] != alone[2]
    for _ in range(3):
        assert [launches_of(gpu, cupy_mla.sparse_prefill, arrays) for arrays in calls] == alone


def test_another_rank_is_another_call(gpu, rng, kind):
    """The checks say what is wrong."""
    call = OPERATIONS["concat_and_cache_mla"](rng)
    arrays = put(kind, call)
    for _ in range(3):
        call.operation(**arrays, **call.settings)
    for name, rank in (("kv_c", 2), ("slot_mapping", 1)):
        with pytest.raises(ValueError, match=rf"^{name}: .*{rank}"):
            call.operation(**{**arrays, name: arrays[name][None]}, **call.settings)


def test_more_and_fewer_arguments_in_turn(gpu, seen):
    """By place and by name."""
    q, kv, indices = tensors(
        q=((3, 4, 576), torch.bfloat16), kv=((9, 1, 576), torch.bfloat16), indices=((3, 1, 7), torch.int32)
    ).values()
    sink, length, out = torch.zeros(4), torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, 512, dtype=torch.bfloat16)
    calls = [
        ((q, kv, indices, 0.1), {}),
        ((q, kv), {"indices": indices, "sm_scale": 0.1}),
        ((q, kv, indices, 0.1), {"attn_sink": sink, "topk_length": length, "out": out, "d_v": 512}),
        ((), {"sm_scale": 0.1, "q": q, "indices": indices, "kv": kv, "attn_sink": None, "topk_length": None}),
        ((q, kv, indices, 0.1), {"topk_length": length, "attn_sink": sink}),
        ((q, kv, indices, 0.1), {"attn_sink": sink, "topk_length": length}),
    ]

    def launched(args: Any, kwargs: Any) -> list[Submitted]:
        gpu.log.clear()
        gpu.used = 0
        cupy_mla.sparse_prefill(*args, **kwargs)
        return list(gpu.log)

    alone = []
    for call in calls:
        forget_calls()
        alone.append(launched(*call))
    assert alone[0] == alone[1] == alone[3] != alone[4] == alone[5]
    for i in random.Random(3).choices(range(len(calls)), k=100):
        assert launched(*calls[i]) == alone[i]
    for _ in range(3):  # one as the last call, then another
        for one in range(len(calls)):
            for other in range(len(calls)):
                assert [launched(*calls[i]) for i in (one, one, one, other)] == [
                    alone[i] for i in (one, one, one, other)
                ]


def test_threads_make_calls_of_their_own(gpu):
    """Known ones and new ones; each thread finds its arrays in what it launched, and gets results of its size."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(150):
            arrays = prefill(s_q=draw.randint(1, 12))
            out, _, lse = cupy_mla.sparse_prefill(**arrays)
            if (tuple(out.shape), tuple(lse.shape)) != ((len(arrays["q"]), 4, 512), (len(arrays["q"]), 4)):
                wrong.append(out.shape)
            given = struct.pack("Q", arrays["q"].data_ptr())
            if not any(given in launch.params for launch in list(gpu.log) if launch.kernel):
                wrong.append("its q was not launched")

    in_threads(work, range(4))
    assert not wrong
    assert len(gpu.log) == 4 * 150


def test_the_arrays_gpu_is_the_current_one_while_a_call_runs(gpu, monkeypatch):
    """Whichever was CUDA's and torch's before, at first calls and at known ones; results are there, too."""
    current = [0, 0]
    entered: list[int] = []

    @contextmanager
    def to_device(library: Any, device: int) -> Iterator[None]:
        before, current[:] = current[:], (device, device)
        entered.append(device)
        yield
        current[:] = before

    monkeypatch.setattr(driver.runtime(), "getDevice", lambda: current[0])
    monkeypatch.setattr(TorchLibrary, "device_reader", lambda library: lambda: current[1])
    monkeypatch.setattr(TorchLibrary, "to_device", to_device)
    monkeypatch.setattr(driver, "THREAD", driver._Threads())
    take, launched_on = gpu.take, []
    monkeypatch.setattr(gpu, "take", lambda submitted: (launched_on.append((*current,)), take(submitted)))
    for before in [(0, 0), (1, 1), (0, 1), (1, 0)] * 3:
        current[:] = before
        cupy_mla.sparse_prefill(**prefill())
        assert entered == [0] * (before != (0, 0))
        assert tuple(current) == before
        assert launched_on == [(0, 0)]
        entered.clear()
        launched_on.clear()


def test_the_environment_names_kernels_at_any_time(gpu, seen, monkeypatch):
    gpu.log.clear()
    names = ("bf16_sm90", "portable", "bf16_sm90", "portable")
    for name in names:
        monkeypatch.setenv("CUPY_MLA_KERNELS", name)
        cupy_mla.sparse_prefill(**prefill())
    assert tuple(launch.kernel.name for launch in gpu.log) == names
    monkeypatch.setenv("CUPY_MLA_KERNELS", "bf16_sm9")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_KERNELS must be one of .*portable_99kb.*, got 'bf16_sm9'$"):
        cupy_mla.sparse_prefill(**prefill())
    monkeypatch.setenv("CUPY_MLA_KERNELS", "fp8_sm90")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_KERNELS is fp8_sm90, which cannot serve this call: prefill of 4"):
        cupy_mla.sparse_prefill(**prefill())


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_whether_torch_reads_a_call(monkeypatch, torch_is_there):
    """By torch's own function, or, where torch may still be imported, by one that looks for it."""
    with monkeypatch.context() as imported:
        if not torch_is_there:
            imported.delitem(sys.modules, "torch")
        asked = operation.trace_detector()
        assert asked() is False
    assert (asked is torch.compiler.is_dynamo_compiling) == torch_is_there
    assert asked() is False
    assert torch.compile(lambda: asked(), backend="eager", fullgraph=True)() is True


def test_checks_stay_on(seen):
    for wrong, error in (
        ({"indices": torch.zeros(3, 1, 7)}, TypeError),
        ({"indices": torch.zeros(4, 1, 7, dtype=torch.int32)}, ValueError),
        ({"kv": torch.zeros(9, 1, 512, dtype=torch.bfloat16)}, ValueError),
        ({"q": torch.zeros(3, 4, 576, dtype=torch.bfloat16).to_sparse()}, TypeError),
        ({"q": np.zeros((3, 4, 576))}, TypeError),
        ({"q": torch.zeros(3, 4, 1152, dtype=torch.bfloat16)[..., ::2]}, ValueError),
        ({"out": torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(3, 4, 512)}, ValueError),
        ({"d_v": [512]}, TypeError),
        ({"d_v": 511}, ValueError),
    ):
        for _ in range(2):
            with pytest.raises(error):
                cupy_mla.sparse_prefill(**prefill(**wrong))
    seen.clear()
    cupy_mla.sparse_prefill(**prefill())
    assert not seen


@every_operation
@pytest.mark.parametrize("checked", [False, True])
def test_too_many_arguments_of_any_operation(gpu, rng, kind, name, checked):
    """Positional ones beyond the last parameter, some of them arrays."""
    call = OPERATIONS[name](rng)
    arrays = put(kind, call)
    parameters = inspect.signature(call.operation).parameters
    values = [arrays.get(p, call.settings.get(p)) for p in parameters]
    for more in ([kind.put(np.zeros(3, np.int32))], [5, kind.put(np.zeros(3, np.int32))], [None] * 3):
        with cupy_mla.set_checks(checked), pytest.raises(TypeError, match="positional argument"):
            call.operation(*values, *more)
    with cupy_mla.set_checks(checked), pytest.raises(TypeError, match="unexpected keyword"):
        call.operation(**arrays, **call.settings, no_such_setting=1.0)
    assert not gpu.log


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


def test_one_array_under_two_names(gpu):
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


@pytest.mark.parametrize("name", ["concat_mla_q", "sparse_decode", "cp_gather_and_upconvert_fp8_kv_cache"])
def test_overlaps_are_found_at_every_call(gpu, first, rng, kind, name):
    """At the first call of its kind and at later ones, by addresses."""
    written, other = {"concat_mla_q": ("out", "q_pe"), "sparse_decode": ("out", "q")}.get(name, ("dst", "src_cache"))
    call = OPERATIONS[name](rng).with_outputs()
    good = put(kind, call)
    size = {n: -(-call.arrays[n].nbytes // 256) * 256 for n in (written, other)}
    whole = np.zeros(sum(size.values()) + 256, np.uint8)
    start = -whole.__array_interface__["data"][0] % 256

    def placed(apart: bool) -> dict[str, Any]:
        raw, ends = kind.whole(whole), {}
        for n, at in ((written, 0), (other, size[written] if apart else (size[written] - 1) // 256 * 256)):
            a = call.arrays[n]
            ends[n] = kind.view(raw, a.dtype, a.shape, np.empty(a.shape, a.dtype).strides, start + at)
        return {**good, **ends}

    for apart in (False, True, False, True, True, False):
        gpu.log.clear()
        if apart:
            call.operation(**placed(apart), **call.settings)
            assert gpu.log
        else:
            with pytest.raises(ValueError, match=rf"^{written}: overlaps {other} in memory"):
                call.operation(**placed(apart), **call.settings)
            assert not gpu.log
    assert len(first) == 2, "the call that is in order was not remembered"


def test_overlaps_before_an_address_are_found(gpu):
    """The first row of what is read lies behind the others in memory."""
    pytest.importorskip("cupy")
    whole = HostCuPy().whole(np.zeros(1 << 14, np.uint8))
    logits = whole[1024:2048].view(np.float32).reshape(4, 64)[::-1]
    for start, apart in ((2048, True), (768, True), (4096, True), (2016, False), (1024, False), (784, False)):
        out = whole[start : start + 256].view(np.int32).reshape(4, 16)
        if apart:
            cupy_mla.topk_indices(logits, 16, out=out)
        else:
            with pytest.raises(ValueError, match=r"^out: overlaps logits in memory"):
                cupy_mla.topk_indices(logits, 16, out=out)


def test_rows_side_by_side_do_not_overlap(gpu):
    """Queries and results in the columns of one array: their addresses are among each other, their items apart."""
    for _ in range(3):
        whole = torch.zeros(3, 4, 1088, dtype=torch.bfloat16)
        cupy_mla.sparse_prefill(**prefill(q=whole[..., :576], out=whole[..., 576:]))
        with pytest.raises(ValueError, match=r"^out: overlaps q in memory"):
            cupy_mla.sparse_prefill(**prefill(q=whole[..., :576], out=whole[..., 512:1024]))


@pytest.fixture(params=["nested", "jagged", "sparse_coo", "sparse_csr"])
def strange(request) -> Any:
    """A tensor without sizes or strides."""
    dense = torch.zeros(3, 4, 576, dtype=torch.bfloat16)
    return {
        "nested": lambda: torch.nested.nested_tensor(list(dense)),
        "jagged": lambda: torch.nested.nested_tensor(list(dense), layout=torch.jagged),
        "sparse_coo": dense.to_sparse,
        "sparse_csr": dense.to_sparse_csr,
    }[request.param]()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("calls_before", [0, 2])
def test_tensors_without_sizes_or_strides_are_refused(gpu, strange, calls_before):
    """Also where other tensors were seen before: torch's guards end the process where they meet a nested one."""
    for _ in range(2):
        for _ in range(calls_before):
            cupy_mla.sparse_prefill(**prefill())
        with pytest.raises(TypeError, match=r"^q: expected a dense tensor, got (a nested one|layout torch\.sparse_)"):
            cupy_mla.sparse_prefill(**prefill(q=strange))
    cupy_mla.sparse_prefill(**prefill())


def test_gradients(seen):
    """A parameter that wants one is served where autograd is off; where it is on, not with a given result, and else as
    `test_autograd.py` has it."""
    wanting, out = prefill()["q"].requires_grad_(), torch.empty(3, 4, 512, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^q requires a gradient, and this call has no backward: call under"):
            cupy_mla.sparse_prefill(**prefill(q=wanting, out=out))
        with torch.no_grad():
            for _ in range(3):
                cupy_mla.sparse_prefill(**prefill(q=wanting))
    assert len(seen) == 2, "the bodies of the two calls that are errors"


def test_the_stream_is_that_of_the_moment(gpu, seen):
    gpu.log.clear()
    for gpu.stream in (0, 77, 5):
        cupy_mla.sparse_prefill(**prefill())
    assert [s.stream for s in gpu.log] == [0, 77, 5]
    assert not seen


def test_a_thread_has_a_context_before_it_launches(gpu, seen):
    """A driver's launch does not make one, and a thread's first call may repeat one of another's."""
    for _ in range(2):
        thread = threading.Thread(target=lambda: cupy_mla.sparse_prefill(**prefill()))
        thread.start()
        thread.join()
        assert gpu.threads.count(thread) == 1
    assert gpu.threads.count(threading.current_thread()) == 1
    assert not seen


def test_rows_of_wider_arrays(gpu, kind):
    """One row of one is as good as without a gap."""
    rope, cache = kind.put(np.zeros((5, 64), BFLOAT16)), kind.put(np.zeros((2, 4, 656), np.uint8))
    slots, wide = kind.put(np.zeros(5, np.int64)), kind.put(np.zeros((5, 520), BFLOAT16))[:, :512]
    whole = kind.put(np.zeros((5, 512), BFLOAT16))

    def stride(latent: Any, n: int) -> int:
        gpu.log.clear()
        cupy_mla.concat_and_cache_mla(latent[:n], rope[:n], cache, slots[:n])
        return struct.unpack_from("q", gpu.log[0].params, PACK.offsets[PACK.index["latent_stride"]])[0]

    for _ in range(3):
        assert [stride(whole, n) for n in (5, 4, 3)] == [512] * 3
        assert [stride(wide, n) for n in (5, 4, 3)] == [520] * 3


def test_parameters_are_tensors(gpu, first):
    sink = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    for _ in range(2):
        cupy_mla.sparse_prefill(**prefill(attn_sink=sink))
    assert len(first) == 1


def test_many_calls_in_turn(gpu, seen):
    """More than are compared with at first: each is found, in inference mode too."""
    scales = [0.5 + number for number in range(7)]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for scale in (*scales, *scales):
            gpu.log.clear()
            with mode():
                cupy_mla.sparse_prefill(**prefill(sm_scale=scale))
            (launch,) = gpu.log
            offset = ATTENTION.offsets[ATTENTION.index["scale_log2"]]
            assert struct.unpack_from("f", launch.params, offset)[0] == pytest.approx(scale * np.log2(np.e), rel=1e-6)
    assert len(seen) == len(scales)


def test_fresh_and_used_schedules_in_turn(gpu, first):
    """They make the same call: the body runs once for all layers of a step."""
    used, fresh = flash_mla.FlashMLASchedMeta(), flash_mla.FlashMLASchedMeta
    for schedule in (used, used, fresh(), used, fresh(), fresh()):
        arrays = tensors(q=((3, 1, 64, 576), torch.bfloat16), k_cache=((4, 64, 1, 656), torch.uint8))
        out, _ = flash_mla.flash_mla_with_kvcache(
            **arrays, block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=schedule,
            is_fp8_kvcache=True, indices=torch.zeros((3, 1, 128), dtype=torch.int32),
        )  # fmt: skip
        assert tuple(out.shape) == (3, 1, 64, 512)
    assert len(first) == 1


def test_cpu_arrays_are_no_calls_on_a_gpu(rng, first):
    for _ in range(3):
        cupy_mla.sparse_prefill(**prefill())
        OPERATIONS["sparse_prefill"](rng).run(NumPy())
    assert not first


@pytest.mark.parametrize(
    "wrong", [lambda: float("nan"), lambda: (1, float("nan")), lambda: [3]], ids=["NaN", "NaN in a tuple", "no hash"]
)
def test_settings_that_cannot_be_found_again(gpu, wrong):
    """A body that takes anything: each call runs by itself."""
    kept: list[int] = []

    def body(x: Any, setting: Any) -> Any:
        _, (x_,) = bind(x=x)
        kept.append(1)
        return x_.obj

    call = operation.operation(body)
    x = torch.zeros(3)
    for n in range(1, 4):
        assert call(x, wrong()) is x
        assert len(kept) == n
    for _ in range(3):
        assert call(x, 5) is x
    assert len(kept) == 4


def test_what_a_call_returns(gpu):
    """One of its arguments, results, constants; one value, a tuple of one, or nothing."""

    @operation.operation
    def body(x: Any, y: Any, which: str) -> Any:
        place, (x_, y_) = bind(x=x, y=y)
        made = place.output("made", None, (2,), np.dtype(np.int32))
        place.call(lambda gpu, *arrays: (), lambda *arrays: None, x_, y_, made)
        return {"none": None, "one": (y_.obj,), "all": (made.obj, x_.obj, 7, (1, 2)), "made": made.obj}[which]

    x, y = torch.zeros(3), torch.ones(3)
    for _ in range(4):
        assert body(x, y, "none") is None
        (got,) = body(x, y, "one")
        assert got is y
        made, first, seven, pair = body(x, y=y, which="all")
        assert (tuple(made.shape), made.dtype, first is x, seven, pair) == ((2,), torch.int32, True, 7, (1, 2))
        assert tuple(body(x, y, "made").shape) == (2,)
        x, y = torch.zeros(3), torch.ones(3)


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
    named = None if layout.told else layout.name
    cupy_mla.sparse_decode(**arrays, sm_scale=0.1, batch_invariant=batch_invariant, layout=named)
    return [(launch.kernel, launch.grid[1:]) for launch in gpu.log]


@pytest.mark.parametrize("layout", layouts.ATTENTION_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("h_q", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("topk", [64, 1000, 2048])
def test_batch_invariant_decode_takes_the_same_kernels(gpu, layout, h_q, topk):
    """Clusters, and CTAs that take splits in turn, are variants of one kernel that give the same bits."""
    in_turn, clusters = (f"DIVISION={division}" for division in (fp8_sm90.SEGMENTS, fp8_sm90.CLUSTERS))
    seen = [launches(gpu, layout, h_q, topk, b, True) for b in (1, 3, 40, 300)]
    kernels = [[repr(kernel).replace(in_turn, clusters) for kernel, _ in launched] for launched in seen]
    assert kernels[0]
    assert kernels == [kernels[0]] * len(seen)
    grids = [[grid for _, grid in launched] for launched in seen if in_turn not in repr(launched)]
    assert grids == [grids[0]] * len(grids)


def test_other_decode_takes_what_suits_the_batch(gpu):
    few, many = (launches(gpu, layouts.V32_FP8, 64, 2048, b, False) for b in (1, 300))
    assert few != many


# --- decode of a cache that is one array of rows ----------------------------------------------------------------


@pytest.mark.parametrize("d_qk", [576, 512])
def test_decode_of_flat_bf16_rows_is_prefill_of_them(gpu, d_qk):
    """The same kernel gets the same parameters, but for pages, max_logits, where lse lies, and the flag of decodes."""
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
    assert decode.kernel.name == "bf16_sm90"
    assert decode.grid == prefill.grid
    a, b = (struct.unpack_from(AS_ATTENTION, launch.params) for launch in gpu.log)
    differ = {name for name, number in ATTENTION.index.items() if a[number] != b[number]}
    assert differ <= {"main.block_stride", "main.index_stride_s", "main.block_size", "q_s", "out_s", "lse",
                      "max_logits", "lse_s", "flags"}  # fmt: skip
    flags = ATTENTION.index["flags"]
    assert a[flags] ^ b[flags] == DECODE
