"""What a user is told when a kernel cannot be had. A stand-in for CuPy makes each thing go missing; needs no GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cupy_mla.cuda import jit
from cupy_mla.cuda.attention import combine_kernel


def stand_in(capability: str, failure: Exception | None) -> SimpleNamespace:
    @contextmanager
    def device(number):
        yield SimpleNamespace(compute_capability=capability)

    def module(code, options):
        def get_function(name):
            if failure:
                raise failure
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1))

        return SimpleNamespace(get_function=get_function)

    return SimpleNamespace(cuda=SimpleNamespace(Device=device), RawModule=module)


def load(monkeypatch, capability: str, failure: Exception | None = None) -> jit.Kernel:
    monkeypatch.setattr(jit, "require_cupy", lambda why: stand_in(capability, failure))
    kernel = combine_kernel.__wrapped__()
    kernel.load(0)
    return kernel


def test_the_first_load_is_logged_in_one_line(monkeypatch, caplog):
    with caplog.at_level("INFO", "cupy_mla"):
        kernel = load(monkeypatch, "90")
        kernel.load(0)
    (record,) = caplog.records
    assert record.name == "cupy_mla"
    assert "combine.cu:combine D_V=512 ready for sm_90 in " in record.message
    assert kernel.loaded(0)
    assert not kernel.loaded(1)


def test_nvrtc_is_missing(monkeypatch):
    with pytest.raises(RuntimeError, match=r"NVRTC.*was not found: pip install"):
        load(
            monkeypatch,
            "90",
            RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: cannot open shared object file"),
        )


def test_other_failures_are_handed_on(monkeypatch):
    with pytest.raises(RuntimeError, match="out of memory"):
        load(monkeypatch, "90", RuntimeError("out of memory"))


def test_the_gpu_is_too_old(monkeypatch):
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or later, this one has 7\.5"):
        load(monkeypatch, "75", RuntimeError("not reached"))
