"""Copies of another module's functions in which some global names have other values."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def rebound(function: Callable[..., Any], **names: Any) -> Any:
    """A copy of a function that sees other values for these globals. Its module is not changed.

    Raises:
        NameError: the function's module has no such name.

    Example:
        >>> from cupy_mla.integrations.vllm.rebound import rebound
        >>> import textwrap
        >>> rebound(textwrap.dedent, re=None).__globals__["re"] is None
        True
        >>> textwrap.dedent.__globals__["re"] is None
        False
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"expected a Python function, got {type(function).__name__}")
    unknown = [name for name in names if name not in function.__globals__]
    if unknown:
        raise NameError(f"{function.__module__} has no {', '.join(unknown)}")
    scope = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    return copy
