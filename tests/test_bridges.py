"""Bridges between the libraries, descriptions of their arrays, and the places that calls are made in."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla.arrays import HOST
from cupy_mla.bridges import Place, bind, describe, require_cupy

from .cases import normal
from .kinds import BF16, E4M3, E5M2, gapped, installed

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
F32, I32, U8 = (np.dtype(t) for t in (np.float32, np.int32, np.uint8))
PLAIN = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64")
DTYPES = [BF16, E4M3, E5M2, E8M0, *map(np.dtype, PLAIN)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def random(rng: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    """Random values that every dtype can tell apart by their bytes."""
    return rng.integers(0, 100, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


# --- bridges --------------------------------------------------------------------------------------------------


@every_dtype
def test_numpy_to_torch_and_back(rng, torch, dtype):
    """The same memory, both ways."""
    values = random(rng, dtype, 5, 8)
    tensor = cupy_mla.to_torch(values)
    assert str(tensor.dtype) == f"torch.{dtype.name}"
    assert tensor.data_ptr() == values.ctypes.data
    back = cupy_mla.to_numpy(tensor)
    assert back.dtype == dtype
    assert back.ctypes.data == values.ctypes.data
    np.testing.assert_array_equal(bits(back), bits(values))


@every_dtype
def test_strides_stay(rng, torch, dtype):
    values = gapped(random(rng, dtype, 5, 8), 1, 3).T
    tensor = cupy_mla.to_torch(values)
    assert tuple(s * dtype.itemsize for s in tensor.stride()) == values.strides
    back = cupy_mla.to_numpy(tensor)
    assert back.strides == values.strides
    np.testing.assert_array_equal(bits(back), bits(values))


def test_values_stay(rng, torch):
    """bfloat16 and fp8 mean the same numbers in both libraries."""
    for dtype in (BF16, E4M3, E5M2):
        values = rng.standard_normal((4, 4)).astype(dtype)
        np.testing.assert_array_equal(cupy_mla.to_torch(values).float().numpy(), values.astype(np.float32))


def test_writes_show_on_the_other_side(torch):
    values = np.zeros(4, BF16)
    cupy_mla.to_torch(values)[2] = 1.5
    assert values.tolist() == [0, 0, 1.5, 0]
    tensor = torch.zeros(4, dtype=torch.float8_e4m3fn)
    cupy_mla.to_numpy(tensor)[1] = 2
    assert tensor.float().tolist() == [0, 2, 0, 0]


def test_to_torch_as_another_dtype_of_the_same_size(torch):
    raw = np.array([0x38, 0x40], np.uint8)
    assert cupy_mla.to_torch(raw, torch.float8_e4m3fn).float().tolist() == [1, 2]
    tensor = torch.from_numpy(raw)
    assert cupy_mla.to_torch(tensor, torch.float8_e4m3fn).float().tolist() == [1, 2]


def test_to_torch_refuses_negative_strides(torch):
    with pytest.raises(ValueError, match=r"^array: torch has no negative strides, got \[-1\]"):
        cupy_mla.to_torch(np.zeros(4)[::-1])


def test_to_torch_refuses_read_only_memory(torch):
    """torch knows no read-only memory, and wrote to it."""
    values = np.zeros(4, np.float32)
    values.flags.writeable = False
    with pytest.raises(ValueError, match=r"^array: expected a writable array, got a read-only one"):
        cupy_mla.to_torch(values)


@pytest.mark.parametrize("dtype", ["U3", object, np.longdouble, "datetime64[s]"])
def test_to_torch_refuses_dtypes_that_torch_has_not(torch, dtype):
    with pytest.raises(TypeError, match=r"^array: torch has no dtype for "):
        cupy_mla.to_torch(np.zeros(3, dtype))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.complex64, np.complex128, np.float16])
def test_to_torch_of_dtypes_that_no_operation_takes(torch, dtype):
    values = np.arange(3).astype(dtype)
    np.testing.assert_array_equal(cupy_mla.to_torch(values).numpy(), values)


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [("float16", TypeError, r"^dtype: expected a torch dtype, got 'float16'"),
     (np.float16, TypeError, r"^dtype: expected a torch dtype"),
     ("torch.float16", ValueError, r"^dtype: expected one of 4 bytes an item as torch.float32, got torch.float16")],
)  # fmt: skip
def test_to_torch_as_another_dtype_of_another_size(torch, dtype, error, message):
    dtype = torch.float16 if dtype == "torch.float16" else dtype
    with pytest.raises(error, match=message):
        cupy_mla.to_torch(np.zeros(4, np.float32), dtype)


def test_own_kind_comes_back_as_it_is(torch):
    array, tensor = np.zeros(3), torch.zeros(3)
    assert cupy_mla.to_numpy(array) is array
    assert cupy_mla.to_torch(tensor) is tensor


def test_to_numpy_of_a_tensor_with_gradient(torch):
    tensor = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert cupy_mla.to_numpy(tensor).tolist() == [1, 1, 1]


@pytest.mark.parametrize("bridge", ["to_numpy", "to_torch"])
def test_bridges_refuse_what_is_no_array(torch, bridge):
    for value in ([1.0], None, 3, memoryview(b"abc")):
        with pytest.raises(TypeError, match="expected a NumPy, CuPy or torch array, got"):
            getattr(cupy_mla, bridge)(value)


@pytest.mark.gpu
@every_dtype
def test_numpy_to_cupy_and_back(rng, dtype):
    """A copy; e4m3 and e8m0 come as uint8."""
    values = random(rng, dtype, 5, 8)
    moved = cupy_mla.to_cupy(values)
    assert moved.dtype == (U8 if dtype in (E4M3, E8M0) else dtype)
    np.testing.assert_array_equal(bits(cupy_mla.to_numpy(moved)), bits(values))
    assert cupy_mla.to_cupy(moved) is moved


@pytest.mark.gpu
@every_dtype
def test_cuda_torch_to_cupy_and_back(rng, torch, dtype):
    """The same memory, both ways."""
    tensor = cupy_mla.to_torch(random(rng, dtype, 5, 8)).cuda()
    moved = cupy_mla.to_cupy(tensor)
    assert moved.data.ptr == tensor.data_ptr()
    back = cupy_mla.to_torch(moved, tensor.dtype)
    assert back.data_ptr() == tensor.data_ptr()
    assert back.dtype == tensor.dtype
    assert back.device == tensor.device
    for a in (moved, back):
        np.testing.assert_array_equal(bits(cupy_mla.to_numpy(a)), bits(cupy_mla.to_numpy(tensor)))


@pytest.mark.gpu
def test_cuda_strides_stay(rng, torch):
    tensor = cupy_mla.to_torch(normal(rng, 5, 8)).cuda()[:, 1:].T
    moved = cupy_mla.to_cupy(tensor)
    assert moved.dtype == BF16
    assert moved.strides == tuple(2 * s for s in tensor.stride())
    assert cupy_mla.to_torch(moved).stride() == tensor.stride()


# --- without CuPy, without a GPU ------------------------------------------------------------------------------


def test_missing_cupy_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        RuntimeError, match=r"^a CUDA array needs CuPy: in a checkout of .* pip install '\.\[cuda12\]'.*cuda13"
    ) as e:
        require_cupy("a CUDA array")
    assert "\n" not in str(e.value)
    assert not cupy_mla.cuda_available()
    with pytest.raises(RuntimeError, match=r"^to_cupy needs CuPy"):
        cupy_mla.to_cupy(np.zeros(3))


def fake_cupy(count: int | Exception) -> SimpleNamespace:
    def get_device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(getDeviceCount=get_device_count, CUDARuntimeError=OSError)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), ndarray=type("ndarray", (), {}))


def test_missing_driver_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(OSError("cudaErrorInsufficientDriver: too old")))
    with pytest.raises(RuntimeError, match=r"needs an NVIDIA GPU with a driver for CUDA 12 or later: .*too old$"):
        require_cupy("this")
    assert not cupy_mla.cuda_available()


def test_no_gpu_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(0))
    with pytest.raises(RuntimeError, match=r"^this needs an NVIDIA GPU, and the driver sees none$"):
        require_cupy("this")
    assert not cupy_mla.cuda_available()


def test_missing_torch_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"^to_torch needs torch: pip install torch$"):
        cupy_mla.to_torch(np.zeros(3))


# --- descriptors ----------------------------------------------------------------------------------------------


@every_dtype
def test_description_of_a_numpy_array(rng, dtype):
    values = gapped(random(rng, dtype, 3, 4), 0, 2)
    a = describe("x", values)
    assert (a.name, a.kind, a.device) == ("x", "numpy", HOST)
    assert (a.shape, a.strides, a.dtype) == ((3, 4), (6, 1), dtype)
    assert a.ptr == values.ctypes.data
    assert a.numpy() is values


@every_dtype
def test_description_of_a_tensor(rng, torch, dtype):
    values = gapped(random(rng, dtype, 3, 4), 0, 2)
    a = describe("x", cupy_mla.to_torch(values))
    assert (a.name, a.kind, a.device) == ("x", "torch", HOST)
    assert (a.shape, tuple(a.strides), a.dtype) == ((3, 4), (6, 1), dtype)
    assert a.ptr == values.ctypes.data
    np.testing.assert_array_equal(bits(a.numpy()), bits(values))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_description_of_a_cuda_array(rng, library):
    moved = cupy_mla.to_cupy(normal(rng, 3, 6))[:, :4]
    if library == "torch":
        pytest.importorskip("torch")
        moved = cupy_mla.to_torch(moved)
    a = describe("x", moved)
    assert (a.kind, a.shape, tuple(a.strides), a.dtype) == (library, (3, 4), (6, 1), BF16)
    assert a.device == 0
    assert a.ptr % 256 == 0


@pytest.mark.parametrize("value", [None, [1], 1.0, "q", np.float32(3)], ids=repr)
def test_what_is_no_array_is_named(value):
    with pytest.raises(TypeError, match=r"^x: expected a NumPy, CuPy or torch array, got "):
        describe("x", value)


def test_foreign_byte_order_is_refused():
    with pytest.raises(TypeError, match=r"^x: expected native byte order, got dtype >i4"):
        describe("x", np.zeros(3, ">i4"))


def test_strides_between_items_are_refused():
    record = np.zeros(4, [("a", np.uint8), ("b", np.float32)])
    with pytest.raises(ValueError, match=r"^x: strides \(5,\) bytes"):
        describe("x", record["b"])


def test_tensors_that_cannot_be_used_are_refused(torch):
    for tensor in (torch.zeros(2, dtype=torch.complex32), torch.zeros(2, dtype=torch.float8_e4m3fnuz)):
        with pytest.raises(TypeError, match=r"^x: dtype torch.(complex32|float8_e4m3fnuz) is not supported"):
            describe("x", tensor)
    with pytest.raises(TypeError, match=r"^x: expected a dense tensor"):
        describe("x", torch.zeros(2, 2).to_sparse())
    with pytest.raises(TypeError, match=r"^x: expected a CPU or CUDA tensor, got device meta"):
        describe("x", torch.zeros(2, device="meta"))


def test_masked_arrays_are_refused():
    """Nothing looks at a mask: masked entries would count."""
    with pytest.raises(TypeError, match=r"^x: expected an array without a mask, got a masked one"):
        describe("x", np.ma.masked_array(np.zeros(3), mask=[0, 1, 0]))
    with pytest.raises(TypeError, match=r"^array: expected an array without a mask"):
        cupy_mla.to_numpy(np.ma.zeros(3))


def test_other_subclasses_are_arrays(tmp_path):
    """As np.matrix, whose slices and products are others, and memory-mapped files."""
    view = describe("x", np.zeros((2, 2)).view(np.matrix)).numpy()
    assert type(view) is np.ndarray
    assert view[0].shape == (2,)
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(3,))
    assert np.shares_memory(describe("x", mapped).numpy(), mapped)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_plain_memory_are_refused(torch):
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    nested = [torch.zeros(2), torch.zeros(3)]
    for tensor, message in (
        (conjugate.imag, "its memory holds other values: call resolve_neg"),
        (conjugate, "its memory holds other values"),
        (torch.nested.nested_tensor(nested), "expected a dense tensor, got a nested one"),
        (torch.nested.nested_tensor(nested, layout=torch.jagged), "expected a dense tensor, got a nested one"),
    ):
        with pytest.raises(TypeError, match=f"^x: {message}"):
            describe("x", tensor)
    with pytest.raises(TypeError, match=r"^x: expected a tensor with memory of its own.*as torch.vmap has it"):
        torch.vmap(lambda x: describe("x", x))(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Place("tensorflow", 0), ValueError, r"^kind must be one of \('numpy', 'cupy', 'torch'\), got 'tens"),
        (lambda: Place(None, 0), TypeError, "^kind: expected one of"),
        (lambda: Place("torch", "cuda"), TypeError, "^device: expected an integer, got 'cuda'"),
        (lambda: Place("numpy", 0), ValueError, r"^device must be in -1..-1, where NumPy arrays lie"),
        (lambda: Place("cupy", -1), ValueError, "^device must be >= 0, got -1"),
        (lambda: Place("torch", -2), ValueError, "^device must be >= -1, got -2"),
        (lambda: Place.from_pair("numpy"), TypeError, "^place: expected a kind of array and a device"),
        (lambda: Place.from_pair(None), TypeError, "^place: expected a kind of array and a device"),
        (lambda: Place.of(3), TypeError, "^array: expected a NumPy, CuPy or torch array"),
    ],
)
def test_places_that_are_none(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_place_of_a_library_that_is_not_there(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(RuntimeError, match=r"^a torch array needs torch: pip install torch"):
        Place("torch", HOST).empty((3,), np.dtype(np.float32))


def missing(name: str) -> None:
    raise ImportError(name)


# --- places ---------------------------------------------------------------------------------------------------


def test_bind_describes_in_order():
    x, y = np.zeros(2), np.zeros((3, 1), np.int32)
    place, (a, b) = bind(x=x, y=y)
    assert place == Place("numpy", HOST)
    assert not place.on_gpu
    assert (a.name, b.name) == ("x", "y")
    assert a.obj is x
    assert b.obj is y
    none, c = place.optional(s=None, t=y)
    assert none is None
    assert c.name == "t"


def test_mixed_kinds_are_named(torch):
    with pytest.raises(TypeError, match=r"^y: expected a numpy array as the others are, got a torch one"):
        bind(x=np.zeros(2), y=torch.zeros(2))
    place, _ = bind(x=torch.zeros(2))
    with pytest.raises(TypeError, match=r"^z: expected a torch array as the others are, got a numpy one"):
        place.optional(y=None, z=np.zeros(2))
    with pytest.raises(TypeError, match=r"^z: expected a NumPy, CuPy or torch array"):
        place.optional(z=3)


@pytest.mark.gpu
def test_mixed_devices_are_named(torch):
    with pytest.raises(ValueError, match=r"^y: expected it on cuda:0 as the others are, got the CPU"):
        bind(x=torch.zeros(2, device="cuda"), y=torch.zeros(2))
    with pytest.raises(ValueError, match=r"^y: expected it on the CPU as the others are, got cuda:0"):
        bind(x=torch.zeros(2), y=torch.zeros(2, device="cuda"))


@pytest.mark.gpu
def test_cupy_beside_cuda_torch_is_named(torch):
    with pytest.raises(TypeError, match=r"^y: expected a torch array as the others are, got a cupy one"):
        bind(x=torch.zeros(2, device="cuda"), y=cupy_mla.to_cupy(np.zeros(2)))


@pytest.mark.parametrize("dtype", [BF16, F32, I32, U8], ids=lambda dtype: dtype.name)
def test_empty_is_of_the_callers_kind(kind, dtype):
    x = kind.put(np.zeros(3, np.float32))
    array = bind(x=x)[0].empty((2, 5), dtype)
    assert kind.is_mine(array)
    assert tuple(array.shape) == (2, 5)
    assert kind.take(array).dtype == dtype


def test_output_is_the_given_one_or_a_new_one(kind):
    given = kind.put(np.zeros((2, 3), np.float32))
    place, (a,) = bind(out=given)
    assert place.output("out", a, (2, 3), F32).obj is given
    assert kind.is_mine(place.output("out", None, (2, 3), F32).obj)
    with pytest.raises(ValueError, match=r"^out: expected shape \[2, 4\]"):
        place.output("out", a, (2, 4), F32)
    with pytest.raises(TypeError, match=r"^out: expected dtype int32"):
        place.output("out", a, (2, 3), I32)


def test_call_hands_the_reference_the_callers_memory(torch):
    def reference(x, none, number, y):
        assert none is None
        y[...] = x * number

    def launcher(*arguments):
        raise AssertionError("a CPU call went to the launcher")

    for x, y in ((np.arange(3.0), np.zeros(3)), (torch.arange(3.0), torch.zeros(3))):
        place, (a, b) = bind(x=x, y=y)
        place.call(launcher, reference, a, None, 2, b)
        assert y.tolist() == [0, 2, 4]


@pytest.mark.gpu
def test_stream_is_the_callers(torch):
    cupy = pytest.importorskip("cupy")
    theirs, ours = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(theirs), ours:
        assert Place("torch", 0).stream() == theirs.cuda_stream
        assert Place("cupy", 0).stream() == ours.ptr
    assert Place("torch", 0).stream() == torch.cuda.current_stream().cuda_stream


def test_this_machine_says_whether_it_has_a_gpu():
    if not installed("cupy"):
        assert not cupy_mla.cuda_available()
    elif not cupy_mla.cuda_available():
        with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
            cupy_mla.to_cupy(np.zeros(3))
    else:
        assert cupy_mla.to_numpy(cupy_mla.to_cupy(np.arange(3))).tolist() == [0, 1, 2]
