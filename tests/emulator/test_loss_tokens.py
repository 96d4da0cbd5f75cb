"""`loss_tokens` on an emulated GPU: its number divides the loss and the gradients."""

from __future__ import annotations

import numpy as np

from ..ops import test_training as of_operation
from ..training import check, inputs
from .again import again


def test_which_tokens_count(kind, rng):
    """More than a CTA has; of some the first valid entry comes late, or behind the list's end."""
    a = inputs(rng, 19, 3, 30, 70)
    a.indices[::3, :40] = -1
    a.indices[5::3, :69] = 30
    length = rng.integers(-1, 72, 19, dtype=np.int32)
    check(kind, a._replace(length=length, counted=rng.random(19) < 0.8))


test_no_tokens_no_keys_and_no_gradients = again(of_operation.check_no_tokens_and_no_keys)
