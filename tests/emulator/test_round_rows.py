"""`round_rows` on an emulated GPU: the numbers and scales by which inference scores."""

from __future__ import annotations

from ..kinds import gapped
from ..ops import test_training as of_operation
from ..training import check, inputs, of_all_sizes
from .again import again

test_scores_of_inference = again(of_operation.check_scores_of_inference, ("fp32",), ("ue8m0",))


def test_rows_at_any_address(kind, rng):
    """The last warps have some rows only."""
    a = of_all_sizes(rng, inputs(rng, 3, 11, 45, 20, scale_format="fp32"))
    check(kind, a._replace(q=gapped(a.q, 1, 2, 1), k=gapped(a.k, 0, 3)))
