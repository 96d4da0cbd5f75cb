"""What a user is told when a kernel cannot be had, what a cubin says, and launches. A stand-in for CuPy; no GPU."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cupy_mla.cuda import driver, kernel, logits_sm90, structs, topk
from cupy_mla.cuda.attention.kernels import combine
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.kernel import Kernel, exported, read_source, sections

from ..compiled import compile_kernel, needs_nvrtc


def stand_in(capability: str, failure: Exception | None) -> SimpleNamespace:
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=49152)

    @contextmanager
    def device(number):
        yield SimpleNamespace(compute_capability=capability)

    def module(code, options):
        def get_function(name):
            if failure:
                raise failure
            return function

        return SimpleNamespace(get_function=get_function)

    runtime = SimpleNamespace(getDeviceCount=lambda: 1)
    return SimpleNamespace(cuda=SimpleNamespace(Device=device, runtime=runtime), RawModule=module)


def load(monkeypatch, capability: str, failure: Exception | None = None) -> Kernel:
    monkeypatch.setitem(sys.modules, "cupy", stand_in(capability, failure))
    monkeypatch.setattr(kernel, "_exported", lambda module, name: 128)
    monkeypatch.setattr(driver, "plain_submitter", lambda *arguments: arguments)
    monkeypatch.setattr(driver, "overlaps", lambda kernel, device: False)
    made = combine.kernel.__wrapped__()
    made.load(0)
    return made


def test_the_first_load_is_logged_in_one_line(monkeypatch, caplog):
    with caplog.at_level("INFO", "cupy_mla"):
        made = load(monkeypatch, "90")
        made.load(0)
    (record,) = caplog.records
    assert record.name == "cupy_mla"
    assert "attention/combine.cu D_V=512 HALF_ITEMS=0 ready for sm_90 in " in record.message
    assert made.loaded(0)
    assert not made.loaded(1)


def test_one_variant_does_not_lower_the_shared_memory_of_another(monkeypatch):
    """CuPy loads the same source with the same options once: both kernels below have one CUfunction."""
    cupy = opting_in(monkeypatch)
    for order in ((True, False), (False, True)):
        function = cupy.RawModule("", ()).get_function("")
        function.max_dynamic_shared_size_bytes = 49152
        made = alone_and_not()
        assert made[True].source == made[False].source
        wanted = {alone: made[alone].load(0).shared_bytes for alone in order}
        assert wanted == {True: 116_736, False: 100_000}
        assert function.max_dynamic_shared_size_bytes == 116_736


def test_nor_does_it_from_another_thread(monkeypatch):
    """The second one reads what the function has while the first one is between reading and writing."""
    second_begins, second_has_read = threading.Event(), threading.Event()

    class Function:
        kernel = SimpleNamespace(ptr=1)
        size = 49152

        @property
        def max_dynamic_shared_size_bytes(self) -> int:
            size = self.size
            if threading.current_thread() is second:
                second_has_read.set()
            else:
                second_begins.set()
                second_has_read.wait(0.2)
            return size

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, size: int) -> None:
            if threading.current_thread() is second:
                first.join(10)
            self.size = size

    function, made = Function(), alone_and_not()
    opting_in(monkeypatch).RawModule = lambda code, options: SimpleNamespace(get_function=lambda name: function)
    first, second = (threading.Thread(target=made[alone].load, args=(0,)) for alone in (True, False))
    first.start()
    assert second_begins.wait(10)
    second.start()
    for thread in (first, second):
        thread.join(20)
    assert function.size == 116_736


def opting_in(monkeypatch) -> SimpleNamespace:
    """A stand-in for CuPy whose kernels need 100 000 bytes of shared memory, more of them where they are alone."""
    cupy = stand_in("90", None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(kernel, "_exported", lambda module, name: 100_000)
    monkeypatch.setattr(driver, "gpu", lambda device: SimpleNamespace(more_than_half=116_736))
    monkeypatch.setattr(driver, "attribute_submitter", lambda *arguments: arguments)
    monkeypatch.setattr(driver, "overlaps", lambda kernel, device: True)
    return cupy


def alone_and_not() -> dict[bool, Kernel]:
    tile = next(tile for tile in logits_sm90.FEW if tile.ctas > 1)
    of = 64, tile, logits_sm90.PAGED_FP8, False
    return {alone: logits_sm90.kernel.__wrapped__(*of, alone, False) for alone in (True, False)}


def test_cupy_sees_few_sets_of_options(monkeypatch):
    """For each set it compiles an empty file: constants stand in the text, which tells kernels apart."""
    cupy, seen = opting_in(monkeypatch), []
    inner = cupy.RawModule
    cupy.RawModule = lambda code, options: seen.append((code, options)) or inner(code, options)
    for half in (False, True):
        combine.kernel.__wrapped__(half).load(0)
    (one, options), (other, others) = seen
    assert options == others
    assert one != other


def test_nvrtc_is_missing(monkeypatch):
    missing = RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: cannot open shared object file")
    with pytest.raises(RuntimeError, match=r"NVRTC.*was not found: in a checkout of cupy_mla, pip install"):
        load(monkeypatch, "90", missing)


def test_other_failures_are_handed_on(monkeypatch):
    with pytest.raises(RuntimeError, match="out of memory"):
        load(monkeypatch, "90", RuntimeError("out of memory"))


def test_the_gpu_is_too_old(monkeypatch):
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or later, this one has 7\.5"):
        load(monkeypatch, "75", RuntimeError("not reached"))


def test_a_kernel_has_the_name_of_its_file():
    assert combine.kernel().name == "combine"
    assert repr(combine.kernel()) == "attention/combine.cu D_V=512 HALF_ITEMS=0"


def test_sources_include_each_header_behind_a_guard():
    text = read_source("attention/combine.cu")
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.count("#define INCLUDED_PTX_TYPES_CUH") == 1


def test_a_header_is_there_whatever_the_constants_are(monkeypatch, tmp_path):
    """Also where it was included before in a branch that is not compiled; else once."""
    (tmp_path / "a.cu").write_text(
        '#if A\n#include "b.cuh"\n#include "c.cuh"\n#elif B\n#include "c.cuh"\n#else\n#endif\n#include "b.cuh"\n'
        '#if A\n#include "c.cuh"\n#endif\n'
    )
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "c.cuh"\nint b;\n')
    (tmp_path / "c.cuh").write_text("#pragma once\nint c;\n")
    monkeypatch.setattr(kernel, "kernels_root", lambda: tmp_path)
    text = read_source("a.cu")
    read_source.cache_clear()
    assert text.count("int b;") == 2
    assert text.count("int c;") == 3
    # A plain preprocessor finds each of them once, for any constants.
    for constants in ((), ("A",), ("B",)):
        lines, taken = [], []
        defined = {*constants}
        for line in text.splitlines():
            word, _, name = line.partition(" ")
            if word in ("#if", "#ifndef"):
                taken.append([(name in defined) is (word == "#if")])
            elif word in ("#elif", "#else"):
                taken[-1].append(not any(taken[-1]) and (word == "#else" or name in defined))
            elif word == "#endif":
                taken.pop()
            elif all(branches[-1] for branches in taken):
                lines += [line] if line.startswith("int") else []
                defined |= {name} if word == "#define" else set()
        assert lines == ["int c;", "int b;"]


def test_a_file_that_includes_itself_is_refused(monkeypatch, tmp_path):
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "a.cu"\n')
    monkeypatch.setattr(kernel, "kernels_root", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"kernels_cu/a\.cu includes itself through a\.cu -> b\.cuh"):
        read_source("a.cu")
    read_source.cache_clear()


@needs_nvrtc
def test_a_wrong_source_gives_the_words_of_the_compiler():
    wrong = Kernel("attention/combine.cu", structs.ATTENTION, {"D_V": "not_a_name ("})
    with pytest.raises(RuntimeError, match=r"combine|results|params|convert") as error:
        wrong.compile("80")
    assert "error" in str(error.value)


@needs_nvrtc
def test_what_a_cubin_says():
    """Its exported numbers, zero included, and its machine code."""
    cubin = compile_kernel(combine.kernel(), "80").cubin
    assert exported(cubin, "kernel_threads") == 128
    assert exported(cubin, "kernel_shared_bytes") == 0
    with pytest.raises(KeyError, match="no_such_name"):
        exported(cubin, "no_such_name")
    found = dict(sections(cubin))
    assert len(found[".text.combine"]) > 1000


def test_every_launch_has_its_own_stream_and_grid(monkeypatch):
    """Launch configs are used again, and only what is another one is set."""
    api = pytest.importorskip("cuda.bindings.driver")
    launched = []

    def launch(config, function, params, extra):
        attributes = [int(a.id) for a in config.attrs]
        launched.append((int(config.hStream), config.gridDimX, config.gridDimY, config.gridDimZ, attributes))
        return (0,)

    monkeypatch.setattr(api, "cuLaunchKernelEx", launch)
    submit = driver.attribute_submitter(7, 128, 0, overlapping=False)
    cluster = int(api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    calls = [(0, 2, 3, 4, 1), (0, 2, 3, 4, 2), (5, 2, 3, 4, 2), (5, 8, 1, 1, 2), (0, 8, 1, 1, 1), (5, 8, 1, 1, 1)]
    for *place, ctas in calls:
        submit(*place, b"params", ctas)
    assert launched == [(*place, [cluster] * (ctas > 1)) for *place, ctas in calls]


@pytest.mark.parametrize(("of_cta", "of_sm"), [(227, 228), (163, 164), (99, 100)])
def test_more_than_half_of_the_shared_memory(of_cta: int, of_sm: int) -> None:
    """As CUDA's programming guide has them; 1 KB of each CTA is CUDA's own."""
    nbytes = Gpu(0, 1, 80, of_cta).more_than_half
    assert nbytes <= of_cta * 1024
    assert 2 * (nbytes + 1024) > of_sm * 1024


@pytest.mark.gpu
def test_ctas_that_are_alone_share_no_sm() -> None:
    """Whatever is loaded later: variants that are not alone have the same CUfunction."""
    device = driver.THREAD.current_device()
    kernels = [
        topk.kernel(topk.choose(Gpu(0, 132, 80, 163), 1, width, 2048)[0], False) for width in (4096, 8192, 32768)
    ]
    kernels += [k for k in logits_sm90.kernels() if k.alone]
    for variant in [*kernels, *logits_sm90.kernels()]:
        if variant.suits(driver.gpu(device).capability):
            variant.load(device)
    for alone in kernels:
        if alone.suits(driver.gpu(device).capability):
            loaded = alone.load(device)
            resident = driver.call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor", loaded.handle, loaded.threads, loaded.shared_bytes
            )
            assert (alone.alone, resident) == (True, 1)
            allowed = driver.api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            assert driver.call("cuFuncGetAttribute", allowed, loaded.handle) >= loaded.shared_bytes
