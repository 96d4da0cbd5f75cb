"""Training, prefill and decode of the same tokens give the same bits by each kernel that docs/training.md names."""

from __future__ import annotations

import pytest

from cupy_mla.cuda import driver
from tests.forwards import check_forwards_agree
from tests.kinds import make


def forced(force, kernel) -> None:
    """Calls run this kernel on whole queries; the test is skipped where the GPU has none."""
    if kernel == "bf16_sm90" and driver.gpu(0).capability != 90:
        pytest.skip("needs a Hopper GPU")
    force(kernel, "whole")


def check_launched(launched, kernel) -> None:
    assert kernel.removesuffix("_99kb") in launched
    assert "bf16_sm90" not in launched or kernel == "bf16_sm90"


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch_cuda"])
@pytest.mark.parametrize(("heads", "topk"), [(5, 20), (64, 600), (128, 80)])
@pytest.mark.parametrize("kernel", ["portable", "portable_99kb", "bf16_sm90"])
def test_whole_queries(rng, force, launched, kernel, heads, topk, library) -> None:
    forced(force, kernel)
    check_forwards_agree(make(library), rng, heads, (9, 70), topk)
    check_launched(launched, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch_cuda"])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("kernel", ["portable", "portable_99kb", "bf16_sm90"])
def test_whole_queries_of_long_lists(rng, force, launched, kernel, d_qk, heads, library) -> None:
    """Lists of more entries than a split has by default, 512 or 704, with sinks and lengths."""
    forced(force, kernel)
    check_forwards_agree(make(library), rng, heads, (30, 1500), 1400, d_qk=d_qk, newest=150, options=True)
    check_launched(launched, kernel)
