"""GPUs for xdist's workers."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Give workers the GPUs in turn: each has its own first and the others behind it, before it imports anything.

    One GPU, or none, is left as it is.
    """
    from benchmarks.run import visible_gpus  # a copy of the tests may be without

    gpus = visible_gpus()
    for number, spec in enumerate(specs if len(gpus) > 1 else ()):
        own = number % len(gpus)
        spec.env["CUDA_VISIBLE_DEVICES"] = ",".join([*gpus[own:], *gpus[:own]])
