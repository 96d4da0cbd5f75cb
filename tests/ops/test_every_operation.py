"""What holds of every public operation: hostile NumPy arrays, streams, graphs, devices and memory pools."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import cupy_mla
from cupy_mla.ops.table import OPERATIONS as TABLE
from tests.kinds import NumPy, make
from tests.operations import OPERATIONS, Call

every_operation = pytest.mark.parametrize("name", OPERATIONS)
gpu_kinds = pytest.mark.parametrize("library", ["cupy", "torch_cuda"])


def test_none_is_left_out() -> None:
    """Every public function that takes arrays and is no wrapper of another's stands in the table."""
    others = {
        "absorb_q", "v_up_proj", "split_kv_b_proj",  # products of the caller's library
        "empty_cache", "plan_splits", "to_cupy", "to_numpy", "to_torch", "cuda_available", "get_mla_metadata",
        "flash_mla_with_kvcache_fp8", "get_mla_metadata_dense_fp8",  # dense_decode, and its schedule
        "prefill_workspace_size", "reshape_attn_output_for_spec_decode", "reshape_query_for_spec_decode",
        "split_decodes_and_prefills", "split_prefill_chunks", "layer_sources",
    }  # fmt: skip
    functions = {n for n in cupy_mla.__all__ if type(getattr(cupy_mla, n)) is type(test_none_is_left_out)}
    assert functions - others == set(OPERATIONS)


# --- NumPy ----------------------------------------------------------------------------------------------------


@every_operation
def test_read_only_results_are_refused(rng, name) -> None:
    call = OPERATIONS[name](rng).with_outputs()
    for refused in call.written:
        arrays = {n: a.copy() for n, a in call.arrays.items()}
        arrays[refused].flags.writeable = False
        with pytest.raises(ValueError, match=rf"^{refused}: expected a writable array, got a read-only one"):
            call.operation(**arrays, **call.settings)
        for n in call.written:
            assert arrays[n].tobytes() == call.arrays[n].tobytes(), f"{n} was written"


@every_operation
def test_read_only_inputs_are_fine(rng, name) -> None:
    call = OPERATIONS[name](rng).with_outputs()
    arrays = {n: a.copy() for n, a in call.arrays.items()}
    for n in set(arrays) - set(call.written):
        arrays[n].flags.writeable = False
    call.run(NumPy(), arrays)


@every_operation
def test_foreign_byte_order_is_refused(rng, name) -> None:
    call = OPERATIONS[name](rng).with_outputs()
    for refused, array in call.arrays.items():
        if array.dtype.kind not in "if":  # bytes have no order, and ml_dtypes has no other than the machine's
            continue
        swapped = array.astype(array.dtype.newbyteorder())
        with pytest.raises(TypeError, match=rf"^{refused}: expected native byte order, got dtype >"):
            call.operation(**(call.arrays | {refused: swapped}), **call.settings)


@every_operation
def test_overlapping_results_are_refused(rng, name) -> None:
    """What is written must not be part of what is read, but where an operation works in place."""
    call = OPERATIONS[name](rng).with_outputs()
    for written in call.written:
        for other in set(call.arrays) - {written}:
            if (written, other) in IN_PLACE.get(name, ()):
                continue
            arrays = {n: a.copy() for n, a in call.arrays.items()}
            arrays[written], arrays[other] = side_by_side(call.arrays[written], call.arrays[other])
            before = {n: a.tobytes() for n, a in arrays.items()}
            either = f"({written}|{other})"
            with pytest.raises(ValueError, match=rf"^{either}: overlaps {either} in memory"):
                call.operation(**arrays, **call.settings)
            assert {n: a.tobytes() for n, a in arrays.items()} == before


IN_PLACE = {
    "convert_req_index_to_global_index": [("out", "token_indices")],
    "compute_global_topk_indices_and_lens": [("out", "topk_indices")],
}


def side_by_side(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same shapes, dtypes and values (of the second) in one allocation; the second starts within the first."""
    first, second = a.copy(), b.copy()  # without gaps
    whole = np.zeros(first.nbytes + second.nbytes + 64, np.uint8)
    start = -whole.__array_interface__["data"][0] % 64
    into = start + (first.nbytes - 1) // 16 * 16
    one = np.ndarray(a.shape, a.dtype, whole, start)
    other = np.ndarray(b.shape, b.dtype, whole, into)
    other[...] = second
    return one, other


# --- GPUs -----------------------------------------------------------------------------------------------------


def check(name: str, got: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Attention agrees to rounding, sums of many terms to that of the largest one, all else to the bit."""
    of_largest = TABLE[name].of_largest if name in TABLE else 0.0
    for a, b in zip(got, want, strict=True):
        if a.dtype.kind == "f" or a.dtype.name == "bfloat16":
            a, b = a.astype(np.float32), b.astype(np.float32)
            bound = max(2e-3, of_largest * np.abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=0.03, atol=bound)
        else:
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def reference(call: Call) -> list[np.ndarray]:
    """The results of the same call in NumPy, under a schedule of its own."""
    settings = dict(call.settings)
    if "tile_scheduler_metadata" in settings:
        settings["tile_scheduler_metadata"] = cupy_mla.get_mla_metadata()[0]
    arrays = {n: a.copy() for n, a in call.arrays.items()}
    return Call(call.operation, arrays, settings, call.written).run(NumPy(), arrays)


@pytest.mark.gpu
@every_operation
@gpu_kinds
@pytest.mark.parametrize("given", [False, True], ids=["allocates", "writes"])
def test_calls_alike_have_results_of_their_own(rng, name, library, given) -> None:
    """From the second or third call on they run a compiled form."""
    kind, first = make(library), OPERATIONS[name](rng)
    for _ in range(4):
        call = OPERATIONS[name](rng)
        call.settings = first.settings
        call = call.with_outputs() if given else call
        check(name, call.run(kind), reference(call))


@pytest.mark.gpu
@every_operation
@gpu_kinds
def test_work_goes_to_the_current_stream(rng, name, library) -> None:
    """A call, compiled or not, waits for what is before it on the caller's stream, here what makes its inputs."""
    kind, first = make(library), OPERATIONS[name](rng).with_outputs()
    for _ in range(3):
        early, call = (OPERATIONS[name](rng).with_outputs() for _ in range(2))
        call.settings = first.settings
        inputs, late = ({n: kind.put(a) for n, a in c.arrays.items()} for c in (call, early))
        kind.synchronize()
        _, current = kind.stream()
        with current:
            kind.keep_busy()
            for n in call.arrays:
                late[n][...] = inputs[n]
            call.operation(**late, **call.settings)
            got = [kind.take(late[n]) for n in call.written]
        kind.synchronize()  # the arrays are not that stream's, so their memory may be had again at once
        want = reference(call)
        check(name, got, want[len(want) - len(got) :])


@pytest.mark.gpu
@every_operation
def test_cupy_graph(rng, name) -> None:
    """`stream.begin_capture` takes every operation once its kernels are there; a replay reads what is there then."""
    kind = make("cupy")
    cupy = kind.cupy
    first, second = (OPERATIONS[name](rng).with_outputs() for _ in range(2))
    second.settings = first.settings
    arrays = {n: kind.put(a) for n, a in first.arrays.items()}
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()  # replays write into its memory
    with stream:
        with cupy.cuda.using_allocator(pool.malloc):
            for _ in range(2):  # compile, and let the pool have what the call allocates
                first.operation(**arrays, **first.settings)
            stream.begin_capture()
            returned = first.operation(**arrays, **first.settings)
            graph = stream.end_capture()
        for n, a in second.arrays.items():
            arrays[n][...] = kind.put(a)
        graph.launch(stream)
    stream.synchronize()
    returned = returned if isinstance(returned, tuple) else (returned,)
    got = [kind.take(a) for a in (*(r for r in returned if r is not None), *(arrays[n] for n in first.written))]
    check(name, got, reference(second))


@pytest.mark.gpu
@every_operation
@gpu_kinds
def test_the_second_gpu(rng, name, library) -> None:
    """Arrays on device 1 are worked on there while device 0 is the current one."""
    kind = make(library)
    if cupy_mla.bridges.require_cupy("this test").cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    first = OPERATIONS[name](rng)
    for _ in range(4):
        call = OPERATIONS[name](rng)
        call.settings = first.settings
        with kind.on(1):
            arrays = {n: kind.put(a) for n, a in call.arrays.items()}
        returned = call.operation(**arrays, **call.settings)
        returned = [a for a in (returned if isinstance(returned, tuple) else (returned,)) if a is not None]
        assert all(cupy_mla.Place.of(a).device == 1 for a in returned)
        assert kind.current() == 0
        with kind.on(1):
            got = [kind.take(a) for a in (*returned, *(arrays[n] for n in call.written))]
        check(name, got, reference(call))


FIRST_ON_1 = """
import torch
import cupy_mla
q = torch.ones(3, 8, 128, dtype=torch.bfloat16)
with torch.cuda.device(1):
    q = q.cuda()
values, weights = cupy_mla.quantize_indexer_q(q, torch.ones(3, 8, device="cuda:1"))
assert values.device.index == weights.device.index == 1
with torch.cuda.device(1):
    assert torch.equal(values.cpu().float(), torch.full((3, 8, 128), 448.0))
"""


@pytest.mark.gpu
def test_the_second_gpu_in_a_process_that_has_not_used_the_first() -> None:
    """torch then stays on device 1, and makes arrays on device 0."""
    if cupy_mla.bridges.require_cupy("this test").cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    ran = subprocess.run([sys.executable, "-c", FIRST_ON_1], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
@every_operation
def test_cupy_allocates_from_the_callers_pool(rng, name) -> None:
    kind, call = make("cupy"), OPERATIONS[name](rng)
    pool = kind.cupy.cuda.MemoryPool()
    arrays = {n: kind.put(a) for n, a in call.arrays.items()}
    for _ in range(3):
        with kind.cupy.cuda.using_allocator(pool.malloc):
            returned = call.operation(**arrays, **call.settings)
        returned = [a for a in (returned if isinstance(returned, tuple) else (returned,)) if a is not None]
        fresh = [a for a in returned if a.data.mem.ptr not in {b.data.mem.ptr for b in arrays.values()}]
        assert pool.used_bytes() >= sum(a.nbytes for a in fresh)
        assert (pool.used_bytes() == 0) == (not fresh)
        del returned, fresh
