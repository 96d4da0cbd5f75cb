"""`backward_sm90` on an emulated Hopper GPU: heads of a query or of several; lists of no tile, of one, of several."""

from __future__ import annotations

import numpy as np
import pytest

from ..backward import FLOAT32, check, check_bits_whatever, check_same_bits, inputs, with_everything
from ..cases import sinks
from ..kinds import BF16
from ..ops import test_backward as of_operation
from .again import again


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(
    ("d_qk", "h_q", "topk"),
    [(576, 64, 200), (512, 128, 130), (576, 40, 30), (512, 33, 64), (576, 17, 2048), (576, 12, 100), (512, 1, 130)],
)
def test_shapes(kind, rng, d_qk, h_q, topk):
    """Lists that end within a tile, and with one."""
    a = inputs(rng, 3, h_q, d_qk, max(90, topk), topk)
    whole = a.indices.copy()
    whole[0] = rng.choice(a.entries(0), topk)
    check(kind, a._replace(indices=whole))


@pytest.mark.parametrize(
    ("d_qk", "h_q", "gaps", "dtype"),
    [
        (576, 64, (1, 2, 8), BF16),
        (512, 70, (0, 1, 3), FLOAT32),
        (576, 40, (0, 1, 2), BF16),
        (576, 20, (1, 0, 1), BF16),
        (512, 16, (0, 1, 8), BF16),
        (576, 5, (1, 2, 3), FLOAT32),
    ],
)
def test_everything(kind, rng, d_qk, h_q, gaps, dtype):
    """Sinks of any value, lists of all lengths, duplicates, a gradient of lse, results of both dtypes, any strides."""
    check(kind, with_everything(rng, inputs(rng, 6, h_q, d_qk, 60, 90), sinks(rng, h_q)), gaps, dtype)


def test_bits(kind, rng):
    """Whatever order warps run in, and however queries are divided."""
    a = inputs(rng, 5, 64, 576, 200, 180)._replace(sink=sinks(rng, 64))
    check_same_bits(kind, a)
    check_bits_whatever(kind, a, (1, 700_000))


@pytest.mark.parametrize("logit", [-300, 300])
def test_logits_far_from_zero(kind, rng, logit):
    a = of_operation.far_from_zero(rng, logit, 64)
    of_operation.check_far_from_zero(kind, a)


test_nothing_reaches_from_queries_without_rows = again(of_operation.check_queries_without_rows, (50,), (10,))
test_nan_stays_with_its_query = again(of_operation.check_nan, (48,), (16,))
test_extreme_sinks = again(
    of_operation.check_sink, (np.float32(np.inf), 40), (np.float32(-np.inf), 40), (np.float32(2.4e38), 40),
    (np.float32(np.inf), 20), (np.float32(-np.inf), 3),
)  # fmt: skip
