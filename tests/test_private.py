"""Private names of other libraries: each way, and the public one that stands in for it, do the same."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_mla import private

from .kinds import BF16

NAME = "CUPY_MLA_TEST_VARIABLE"


# --- the environment ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [private.environment_reader, private.public_environment_reader])
def test_a_variable_is_read_anew_every_time(monkeypatch, make):
    read = make(NAME)
    assert read() is None
    for value in ("portable", "", "wörter"):
        monkeypatch.setenv(NAME, value)
        assert read() == value == os.environ[NAME]
    monkeypatch.delenv(NAME)
    assert read() is None


def test_without_the_private_name_the_public_one_reads(monkeypatch):
    monkeypatch.setattr(private, "os", SimpleNamespace(environ={NAME: "x"}))
    read = private.environment_reader(NAME)
    assert read() == "x"
    assert private.environment_reader("not there")() is None


@pytest.mark.parametrize("make", [private.environment_snapshots, private.public_environment_snapshots])
def test_snapshots_of_the_environment_tell_every_change(monkeypatch, make):
    names = NAME, "CUPY_MLA_OTHER"
    read = make(*names)
    seen = [read()]
    for name in names:
        for value in ("a", "", "wörter"):
            monkeypatch.setenv(name, value)
            assert read() == read()
            assert read() not in seen
            seen.append(read())
    for name in names:
        monkeypatch.delenv(name)
    assert read() == seen[0]


def test_snapshots_without_the_private_name(monkeypatch):
    monkeypatch.setattr(private, "os", SimpleNamespace(environ={NAME: "x"}))
    assert private.environment_snapshots(NAME, "not there")() == ("x", None)


# --- torch ----------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_without_torchs_private_names_the_public_ones_are_taken(monkeypatch):
    made = []
    stream_of = lambda device: SimpleNamespace(cuda_stream=100 + device)  # noqa: E731
    cuda = SimpleNamespace(current_stream=stream_of, current_device=lambda: 5)
    empty_strided = lambda *arguments, **more: made.append((arguments, more)) or "tensor"  # noqa: E731
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=object(), cuda=cuda, empty_strided=empty_strided))
    assert private.torch_stream_reader(3)() == 103
    assert private.torch_device_reader()() == 5
    assert private.torch_empty()((2, 3), (3, 1), "dtype") == "tensor"
    assert made == [(((2, 3), (3, 1)), {"dtype": "dtype", "device": "cuda"})]


def tensors(torch):
    """Two tensors, the second with gaps, and calls that differ from them in one thing each."""

    def pair(rows=4, gap=2, dtype=torch.float32, wanting=False):
        first = torch.zeros(rows, 3, dtype=dtype, requires_grad=wanting)
        return [first, torch.zeros(rows, 5 * gap, dtype=torch.int32)[:, ::gap]]

    changed = {"sizes": pair(rows=5), "strides": pair(gap=3), "dtype": pair(dtype=torch.float64)}
    return pair(), changed | {"gradient": pair(wanting=True), "rank": [pair()[0][None], pair()[1]]}


def test_torchs_guards_compare_tensors(torch):
    same, changed = tensors(torch)
    like = private.torch_guards(same)
    if like is None:
        pytest.skip("this torch has no such guards")
    assert like(*same)
    assert like(*tensors(torch)[0])
    for what, other in changed.items():
        assert not like(*other), what


def test_a_tensor_that_comes_twice_has_no_guards(torch):
    tensor, other = torch.zeros(4), torch.zeros(4)
    like = private.torch_guards([tensor, tensor])
    assert like is None or like(other, other)


def test_without_torchs_guards_there_are_none(torch, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert private.torch_guards([torch.zeros(1)]) is None


@pytest.mark.gpu
def test_both_ways_tell_torchs_current_stream(torch):
    readers = private.torch_stream_reader(0), private.public_torch_stream_reader(0)
    stream = torch.cuda.Stream()
    for expected in (torch.cuda.current_stream(), stream):
        with torch.cuda.stream(expected):
            assert [read() for read in readers] == [expected.cuda_stream] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("make", [private.torch_empty, private.public_torch_empty])
def test_both_ways_make_the_same_tensors(torch, make):
    for shape, strides, dtype in (
        ((2, 3), (3, 1), torch.bfloat16),
        ((0, 4), (4, 1), torch.int32),
        ((5,), (1,), torch.uint8),
    ):
        tensor = make()(shape, strides, dtype)
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, dtype)
        assert tensor.device == torch.device("cuda", torch.cuda.current_device())
        assert not tensor.requires_grad
        assert type(tensor) is torch.Tensor


def test_this_torch_has_the_private_names(torch):
    """A torch that lost one costs every call microseconds: look for another way then."""
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    assert private.torch_empty() is not private.public_torch_empty
    assert private.torch_device_reader() is not torch.cuda.current_device
    assert hasattr(torch._C, "_cuda_getCurrentRawStream")


# --- CuPy -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


WAYS = pytest.mark.parametrize("make", [private.cupy_empty, private.public_cupy_empty])


@WAYS
def test_both_ways_make_the_same_arrays_in_given_memory(cupy, make):
    """Memory of the host will do: nothing is read."""
    memory = np.zeros(64, np.uint8)
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.ctypes.data, 64, memory, 0), 16)
    for shape, dtype in (((2, 3), "f"), ((4,), np.dtype(np.int32)), ((0, 5), "B"), ((), "q"), ((3, 2), BF16)):
        array = make()(shape, dtype, pointer)
        assert type(array) is cupy.ndarray
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.strides == np.empty(shape, dtype).strides
        assert array.flags.c_contiguous
        assert array.data.ptr == memory.ctypes.data + 16


@pytest.mark.gpu
@WAYS
def test_both_ways_make_the_same_arrays_in_new_memory(cupy, make):
    array = make()((4, 5), "f")
    array[...] = 3
    assert array.get().tolist() == [[3] * 5] * 4
    assert array.device.id == cupy.cuda.Device().id


def test_without_cupys_private_name_the_public_one_is_taken(monkeypatch):
    class Base:
        pass

    class Array(Base):
        def __init__(self, shape, dtype, memory):
            self.given = (shape, dtype, memory)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
    assert private.cupy_empty()((2,), "f", "memory").given == ((2,), np.dtype(np.float32), "memory")


def test_this_cupy_has_the_private_name(cupy):
    (base,) = cupy.ndarray.__bases__
    assert hasattr(base, "_init")
