"""`backward_sinks` on an emulated GPU: fewer heads than a CTA has, and more; more queries than warps."""

from __future__ import annotations

import numpy as np
import pytest

from ..backward import check, inputs
from ..ops import test_backward as of_operation
from .again import again


@pytest.mark.parametrize(("s_q", "h_q"), [(70, 3), (2, 33), (33, 128)])
def test_sums(kind, rng, s_q, h_q):
    a = inputs(rng, s_q, h_q, 512, 30, 8)
    check(kind, a._replace(sink=rng.standard_normal(h_q, np.float32)))


test_extreme_sinks = again(of_operation.test_extreme_sinks, (np.float32(np.inf),), (np.float32(-np.inf),))
