"""The oracle's own parts: its number formats against ml_dtypes, and that its checks can fail."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from . import oracle
from .cases import normal


def test_e4m3_values_are_those_of_ml_dtypes():
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracle.E4M3, theirs)


def test_e4m3_codes_are_those_of_ml_dtypes(rng):
    values = oracle.E4M3[:127]
    ties = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, ties, rng.uniform(0, 448, 5000), 2.0 ** rng.uniform(-15, 8.8, 5000), [1e9, np.inf]])
    x = np.concatenate([x, -x])
    theirs = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(oracle.e4m3_code(x), theirs)
    assert oracle.e4m3_code(np.array([np.nan, -np.nan])).tolist() == [0x7F, 0x7F]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # signalling NaN
def test_bf16_values_are_those_of_ml_dtypes():
    every = np.arange(2**16, dtype=np.uint16)
    theirs = every.view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(oracle.bf16_values(every.tobytes()), theirs)


def test_attention_is_the_softmax_of_two_rows():
    """Two rows by hand: logits 0 and log 3, so weights 1/4 and 3/4; a sink of log 4 halves the output."""
    q, rows = np.zeros((1, 512)), np.zeros((2, 512))
    q[0, 0], rows[1, 0], rows[0, 1] = 1, np.log(3), 8
    out, top, lse = oracle.attend(q, rows, 1.0, None)
    np.testing.assert_allclose([top[0], lse[0], out[0, 0], out[0, 1]], [np.log(3), np.log(4), 0.75 * np.log(3), 2])
    halved, _, same = oracle.attend(q, rows, 1.0, np.array([np.log(4)]))
    np.testing.assert_allclose(halved, out / 2)
    assert same == lse


@pytest.mark.parametrize("result", oracle.TOLERANCES)
def test_checks_pass_what_is_within_bounds(rng, result):
    want = rng.standard_normal((7, 512))
    _, relative, _ = oracle.TOLERANCES[result]
    want[0, :3] = 0, np.inf, -np.inf
    got = want.copy()
    got[3, 5] *= 1 + 0.9 * relative
    got[0, 0] = 0.9 * oracle.TOLERANCES[result][0]
    oracle.assert_close(got, want, result)


@pytest.mark.parametrize("result", oracle.TOLERANCES)
@pytest.mark.parametrize("fault", ["one element", "near zero", "nan", "infinity", "lost infinity", "its sign", "shape"])
def test_checks_find_what_is_not(rng, result, fault):
    absolute, relative, _ = oracle.TOLERANCES[result]
    want = rng.standard_normal((7, 512))
    want[0, :3] = 0, np.inf, 2
    got = want.copy()
    if fault == "one element":
        got[0, 2] *= 1 + 1.1 * relative
    elif fault == "near zero":
        got[0, 0] = 1.1 * absolute
    elif fault == "nan":
        got[4, 4] = np.nan
    elif fault == "infinity":
        got[4, 4] = -np.inf
    elif fault == "lost infinity":
        got[0, 1] = 3e38
    elif fault == "its sign":
        got[0, 1] = -np.inf
    else:
        got = got[:6]
    with pytest.raises(AssertionError, match=result):
        oracle.assert_close(got, want, result)


@pytest.mark.parametrize("result", [name for name, bounds in oracle.TOLERANCES.items() if bounds[2]])
def test_checks_find_drift_that_no_element_shows(rng, result):
    """Every element wrong by nearly the relative bound."""
    _, relative, cosine = oracle.TOLERANCES[result]
    want = normal(rng, 30, 512).astype(np.float64)
    got = want * (1 + 0.9 * relative * rng.choice([-1, 1], want.shape))
    assert 0.5 * (0.9 * relative) ** 2 > cosine
    with pytest.raises(AssertionError, match="cosine"):
        oracle.assert_close(got, want, result)
