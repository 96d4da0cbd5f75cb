"""FlashMLA's own cases of dense decode, small, by whichever kernel a Hopper GPU would choose."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from ..dense import check_case_of_flash_mla


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("kernel", ["", "dense_sm90"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("h_q", [16, 128])
def test_case(emulated, kind, rng, monkeypatch, kernel, causal, varlen, h_q):
    if kernel:
        monkeypatch.setenv(VARIABLE, kernel)
    check_case_of_flash_mla(
        kind, rng, 3, int(rng.integers(200, 500)), int(rng.integers(1, 3)), h_q, causal=causal, varlen=varlen
    )
    assert any(name.startswith("dense_") for name in emulated.launched)
