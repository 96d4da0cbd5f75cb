"""Training, prefill and decode of the same tokens give the same bits by each kernel that docs/training.md names."""

from __future__ import annotations

import pytest

from cupy_mla.cuda import driver
from tests.forwards import check_forwards_agree
from tests.kinds import make


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch_cuda"])
@pytest.mark.parametrize(("heads", "topk"), [(5, 20), (64, 600), (128, 80)])
@pytest.mark.parametrize("kernel", ["portable", "portable_99kb", "bf16_sm90"])
def test_whole_queries(rng, force, launched, kernel, heads, topk, library) -> None:
    kind = make(library)
    if kernel == "bf16_sm90" and driver.gpu(0).capability != 90:
        pytest.skip("needs a Hopper GPU")
    force(kernel, "whole")
    check_forwards_agree(kind, rng, heads, (9, 70), topk)
    assert kernel.removesuffix("_99kb") in launched
    assert "bf16_sm90" not in launched or kernel == "bf16_sm90"
