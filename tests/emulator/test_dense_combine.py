"""`dense_combine` on an emulated GPU: items that many shares have a part of, and many items that few have."""

from __future__ import annotations

import numpy as np
import pytest

from .. import oracle
from ..cases import queries, sinks
from ..dense import check_dense, in_cache, off_zero


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("emulated", [2, 13, 40], indirect=True)
@pytest.mark.parametrize("lens", [[6000], [700, 5000], [400, 0, 300, 129, 500, 350, 1]], ids=len)
@pytest.mark.parametrize(
    ("kernel", "fmt"), [("dense_sm90", oracle.BF16_576), ("dense_fp8_sm90", oracle.V32)], ids=["bf16", "fp8"]
)
def test_lines_of_cut_items(kind, rng, force, kernel, fmt, lens):
    """Few lines beside the CTAs, some columns of which a CTA's warps merge together, and more, which a warp merges."""
    force(kernel, "shares(splits=0)")
    of = in_cache(rng, fmt, np.array(lens), 64, 2)
    h_q = int(rng.choice([1, 3, 9, 20, 50]))
    check_dense(kind, fmt, off_zero(fmt, queries(rng, len(lens), 2, h_q, 576), of), of, sink=sinks(rng, h_q))
