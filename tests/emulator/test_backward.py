"""`backward` on an emulated GPU, in every shape of its CTAs, and the launches beside it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda.attention.choose import VARIABLE

from ..backward import FLOAT32, check, inputs, with_everything
from ..cases import sinks
from ..kinds import BF16
from ..ops import test_backward as of_operation
from .again import again
from .emulator import EmulatedGPU

EACH = (90, 80, 86)  # capabilities with 227, 163 and 99 KB of shared memory a CTA


@pytest.fixture(params=[90])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rng_seed: int) -> Iterator[EmulatedGPU]:
    """An emulated GPU of the compute capability that the test's parameter says."""
    pytest.importorskip("torch")  # whose memory it has
    monkeypatch.setenv(VARIABLE, "portable")
    forget_calls()
    yield EmulatedGPU(monkeypatch, capability=request.param, seed=rng_seed)
    forget_calls()


@pytest.mark.long(sample=5)
@pytest.mark.parametrize("emulated", EACH, indirect=True)
@pytest.mark.parametrize(("d_qk", "h_q"), [(576, 9), (512, 16), (576, 32), (512, 24), (576, 64), (512, 128), (576, 40)])
def test_shapes(kind, rng, d_qk, h_q):
    """Lists longer than a tile, and some that end within one."""
    check(kind, inputs(rng, 3, h_q, d_qk, 90, 150))


@pytest.mark.parametrize(("d_qk", "h_q", "gaps", "dtype"), [(576, 20, (1, 2, 8), BF16), (512, 70, (0, 1, 3), FLOAT32)])
def test_everything(kind, rng, d_qk, h_q, gaps, dtype):
    """Sinks of any value, lists of all lengths, duplicates, a gradient of lse, results of both dtypes, any strides."""
    check(kind, with_everything(rng, inputs(rng, 6, h_q, d_qk, 60, 90), sinks(rng, h_q)), gaps, dtype)


def test_rows_at_any_address(kind, rng):
    check(kind, inputs(rng, 2, 5, 576, 40, 30, row_gap=1))


test_logits_far_from_zero = again(of_operation.test_logits_far_from_zero, (-300,), (300,))
test_nothing_reaches_from_queries_without_rows = again(of_operation.test_nothing_reaches_from_queries_without_rows)
test_nan_stays_with_its_query = again(of_operation.test_nan_stays_with_its_query)
test_extreme_sinks = again(
    of_operation.test_extreme_sinks, (np.float32(np.inf),), (np.float32(-np.inf),), (np.float32(2.4e38),)
)


def test_no_queries_and_no_rows(kind, emulated, rng):
    of_operation.test_no_queries_and_no_rows(kind, rng)
    assert "backward" in emulated.launched
