"""`attention_target` on an emulated GPU: every number of heads a CTA has at a time, and several times as many."""

from __future__ import annotations

import numpy as np
import pytest

from .. import backward
from ..cases import sinks
from ..training import check_target


@pytest.mark.parametrize(("h_q", "d_qk", "gap"), [(9, 512, None), (32, 576, 3), (100, 576, None)])
def test_sizes(kind, rng, h_q, d_qk, gap):
    """Lists longer than a CTA's round, and with lengths; with sinks; rows at any address."""
    a = backward.inputs(rng, 3, h_q, d_qk, 300, 270, row_gap=gap or 0)
    a.indices[1] = -1
    check_target(kind, a._replace(length=np.array([270, 270, 33], np.int32), sink=sinks(rng, h_q)), gap)
