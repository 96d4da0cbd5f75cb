"""Tests of operations that also run here, over an emulated GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def again(function: Callable[..., None], *cases: tuple[Any, ...]) -> Callable[..., None]:
    """A test of tests/ops as it is, or once with each of these arguments behind `kind` and `rng`."""
    takes_rng = "rng" in inspect.signature(function).parameters

    def of_case(kind: Any, rng: Any, case: tuple[Any, ...]) -> None:
        function(kind, *((rng,) if takes_rng else ()), *case)

    def as_it_is(kind: Any, rng: Any) -> None:
        of_case(kind, rng, ())

    return pytest.mark.parametrize("case", cases, ids=str)(of_case) if cases else as_it_is
