"""`indexer_loss` on an emulated GPU: heads a CTA has, lists of no tile, a part of one, and several."""

from __future__ import annotations

import numpy as np
import pytest

from ..kinds import BF16, gapped
from ..ops import test_training as of_operation
from ..training import FLOAT32, check, inputs, of_all_sizes, with_everything
from .again import again


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_sizes(kind, rng, heads):
    a = with_everything(rng, inputs(rng, 4, heads - heads // 8, 90, 150))
    check(kind, a._replace(length=np.array([150, 64, 1, 0], np.int32)))


@pytest.mark.parametrize(("gaps", "dtype"), [((1, 2, 8), BF16), ((0, 1, 3), FLOAT32)])
def test_everything(kind, rng, gaps, dtype):
    """No relu, a sum over tokens, any strides, keys at any address; more entries than the CTA has at a time."""
    a = with_everything(rng, inputs(rng, 5, 60, 400, 300, relu=dtype == BF16, per_token=True))
    check(kind, a._replace(k=gapped(a.k, 0, 1)), dtype, gaps)


@pytest.mark.parametrize(("heads", "scale_format"), [(16, "fp32"), (32, "ue8m0"), (60, "fp32"), (128, "fp32")])
def test_quantized(kind, rng, heads, scale_format):
    """Queries and keys in e4m3; more entries than a tile, chunks of one token, and of all."""
    a = of_all_sizes(rng, inputs(rng, 4, heads, 90, 150, scale_format=scale_format))
    a = with_everything(rng, a)._replace(length=np.array([150, 64, 1, 0], np.int32))
    check(kind, a)
    check(kind, a, max_workspace_bytes=1)


test_predictions_that_underflow = again(of_operation.check_predictions_that_underflow)
test_nothing_reaches_from_what_does_not_count = again(of_operation.check_nothing_reaches, (64,))
