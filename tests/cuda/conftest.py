"""What the tests of the Hopper kernels share."""

from __future__ import annotations

import pytest

from ..kinds import CuPy


@pytest.fixture
def hopper(request, monkeypatch) -> CuPy:
    """CuPy arrays on a Hopper GPU, whose calls take the kernels that the test's module names in KERNELS."""
    kind = CuPy()
    if kind.cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setenv("CUPY_MLA_KERNELS", request.module.KERNELS)
    return kind
