"""What the operations check of an array's description."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.arrays import Array, aligned_up
from cupy_mla.bridges import describe

from .kinds import BF16, gapped

F32, I32, U8 = (np.dtype(t) for t in (np.float32, np.int32, np.uint8))


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_require_returns_what_fits():
    a = describe("x", np.zeros((2, 3, 5), np.float32))
    assert a.require(F32, 2, "anything", (4, 5)) is a
    assert a.require((I32, F32), "a", "b", "c") is a


@pytest.mark.parametrize(
    ("dtype", "shape", "error", "message"),
    [
        (I32, (2, 3), TypeError, "x: expected dtype int32, got float32"),
        ((I32, U8), (2, 3), TypeError, "x: expected dtype int32 or uint8, got float32"),
        (F32, (2, 4), ValueError, r"x: expected shape \[2, 4\], got \[2, 3\]"),
        (F32, ("n", (4, 5)), ValueError, r"x: expected shape \[n, 4 or 5\], got \[2, 3\]"),
        (F32, ("n",), ValueError, r"x: expected shape \[n\], got \[2, 3\]"),
        (F32, (2, 3, 1), ValueError, r"x: expected shape \[2, 3, 1\], got \[2, 3\]"),
        (F32, (), ValueError, r"x: expected shape \[\], got \[2, 3\]"),
    ],
)
def test_require_names_what_does_not_fit(dtype, shape, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        describe("x", np.zeros((2, 3), np.float32)).require(dtype, *shape)


def test_require_a_last_axis_without_gaps():
    gaps = np.zeros((2, 6), np.float32)[:, ::2]
    with pytest.raises(ValueError, match=r"^x: the last axis must be contiguous, got strides \[6, 2\]"):
        describe("x", gaps).require(F32, 2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        describe("x", np.zeros((2, 3), np.float32)[:, ::-1]).require(F32, 2, 3)
    describe("x", gaps).require(F32, 2, 3, contiguous=False)
    describe("x", gaps[:, :1]).require(F32, 2, 1)
    describe("x", gaps[:0]).require(F32, 0, 3)


@pytest.mark.parametrize(
    ("view", "fits"),
    [
        (lambda a: a, True),
        (lambda a: a.T, True),
        (lambda a: a[:, ::2], True),
        (lambda a: a[::-1], True),
        (lambda a: a[:, None], True),
        (lambda a: a[:0], True),
        (lambda a: np.ndarray((4, 0), F32, a, 0, (0, 0)), True),
        (lambda a: np.ndarray((3, 2), F32, a, 0, (4, 4)), False),
        (lambda a: np.ndarray((3, 4), F32, a, 0, (12, 4)), False),
        (lambda a: np.ndarray((4, 6), F32, a, 0, (0, 4)), False),
        (lambda a: np.ndarray((2, 2, 2), F32, a, 0, (8, 16, 4)), True),
        (lambda a: np.ndarray((2, 3, 2), F32, a, 0, (8, 8, 4)), False),
    ],
)
def test_places_for_results(view, fits):
    a = view(np.zeros((4, 6), np.float32))
    if fits:
        describe("x", a).require_writable()
    else:
        with pytest.raises(ValueError, match=r"^x: items overlap in memory"):
            describe("x", a).require_writable()


def test_read_only_memory_is_no_place_for_results():
    a = np.zeros(3)
    a.flags.writeable = False
    with pytest.raises(ValueError, match=r"^x: expected a writable array"):
        describe("x", a).require_writable()


def test_expanded_tensor_is_no_place_for_results(torch):
    with pytest.raises(ValueError, match=r"^x: items overlap"):
        describe("x", torch.zeros(1, 3).expand(2, 3)).require_writable()


def test_without_axis():
    values = gapped(np.zeros((4, 1, 3), np.float32), 0, 1, 2)
    a = describe("x", values).without_axis(1)
    assert (a.shape, a.strides) == ((4, 3), (10, 1))
    assert a.numpy().shape == (4, 3)
    assert np.shares_memory(a.numpy(), values)
    with pytest.raises(ValueError, match=r"^x: axis 1 \(KV heads\) must have length 1, got shape \[4, 2, 3\]"):
        describe("x", np.zeros((4, 2, 3))).without_axis(1)


def test_aligned():
    whole = np.zeros(4096, np.uint8)
    start = -whole.ctypes.data % 64

    def at(offset: int, *strides: int) -> Array:
        return describe("x", np.ndarray((3,) * len(strides), BF16, whole, start + offset, strides))

    assert at(0, 64, 2).aligned(16)
    assert at(0, 48, 2).aligned(16)
    assert not at(0, 48, 2).aligned(32)
    assert not at(0, 40, 2).aligned(16)
    assert not at(8, 64, 2).aligned(16)
    assert at(8, 64, 2).aligned(8)
    assert not at(0, 64, 10, 2).aligned(4)
    assert describe("x", np.ndarray((1, 3), BF16, whole, start, (6, 2))).aligned(64)


def test_sizes_are_rounded_up():
    assert [aligned_up(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert aligned_up(17, 16) == 32


def test_a_description_shows_what_it_describes():
    described = describe("x", gapped(np.zeros((2, 3), BF16), 0, 1))
    assert repr(described) == "Array(x: bfloat16[2, 3], strides [4, 1], numpy)"


# --- memory of two arrays -------------------------------------------------------------------------------------

MEMORY = np.zeros(64, np.float32)
FOLDED = MEMORY.reshape(8, 8)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (MEMORY[:32], MEMORY[32:], True),
        (MEMORY[:33], MEMORY[32:], False),
        (MEMORY[32:], MEMORY[:33], False),
        (MEMORY, MEMORY, False),
        (MEMORY[:40][::-1], MEMORY[39:], False),
        (MEMORY[:40][::-1], MEMORY[40:], True),
        (FOLDED[:, :4], FOLDED[:, 4:], True),  # side by side, row for row
        (FOLDED[:, :5], FOLDED[:, 4:], False),
        (MEMORY[::2], MEMORY[1::2], True),
        (MEMORY[:0], MEMORY, True),
        (MEMORY.view(np.uint8)[::8], MEMORY.view(np.uint8)[7::8], True),
        (MEMORY[:8], np.zeros(8, np.float32), True),
    ],
)
def test_arrays_that_share_memory(a, b, apart):
    one, other = describe("out", a), describe("x", b)
    if apart:
        one.require_apart(other)
    else:
        with pytest.raises(ValueError, match=r"^out: overlaps x in memory"):
            one.require_apart(other)


def test_an_output_may_be_an_input_whole():
    out, x = describe("out", FOLDED), describe("x", FOLDED)
    out.may_be = x
    out.require_apart(x)
    for other in (FOLDED[:, 1:], FOLDED.T, FOLDED[:4]):
        with pytest.raises(ValueError, match=r"^out: overlaps x in memory"):
            out.require_apart(describe("x", other))
