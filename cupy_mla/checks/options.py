"""Checks of arguments that are no arrays. An error names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

LARGEST_INT = int(np.iinfo(np.int32).max)
LARGEST_SCALE = float(np.finfo(np.float32).max) / 2  # the kernels multiply it by log2(e) in float32

_SHORT = (bool, int, float, str, bytes, np.generic, type(None))  # messages show values of these types


def number(value: Any) -> str:
    """A number for a message. Python refuses to write integers of thousands of digits."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >> 64 else str(value)


def shown(value: Any) -> str:
    """A value of the wrong type, for a message. Only the type is shown of a value that may hold arrays."""
    kind = type(value).__name__
    if not isinstance(value, _SHORT):
        return f"an object of type {kind}"
    return f"{number(value) if type(value) is int else repr(value):.80} of type {kind}"


def require_integer(name: str, value: Any, least: int, most: int | None = None, meaning: str = "") -> int:
    """Check an integer and its range; returns it as an int.

    Args:
        least, most: the range; `most` None: the largest int32.
        meaning: what `most` is, for the message.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {shown(value)}")
    if not least <= value <= (LARGEST_INT if most is None else most):
        beyond = f">= {least}" if value < least else "small enough for int32"
        wanted = beyond if most is None else f"in {least}..{most}{meaning and ', '}{meaning}"
        raise ValueError(f"{name} must be {wanted}, got {number(value)}")
    return int(value)


def require_bool(name: str, value: Any) -> bool:
    """Check a flag; returns it as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def require_instance(name: str, value: Any, wanted: type) -> None:
    """Check the class of an argument."""
    if not isinstance(value, wanted):
        article = "an" if wanted.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name}: expected {article} {wanted.__name__}, got {shown(value)}")


def require_together(**arguments: Any) -> None:
    """Check that arguments which go together are given together, or none of them."""
    given = [name for name, value in arguments.items() if value is not None]
    if 0 < len(given) < len(arguments):
        *others, last = arguments
        raise ValueError(f"{', '.join(others)} and {last} must be given together, got {' and '.join(given)} alone")


def require_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check a word that must be one of several."""
    choices = tuple(choices)
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {shown(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r:.80}")


def require_scale(name: str, value: Any) -> float:
    """Check a factor on dot products, which is a number or an array of one item; returns it as a float."""
    try:
        if value is None or isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        scale = float(value)
    except OverflowError:
        scale = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a number, got {shown(value)}") from None
    if not math.fabs(scale) <= LARGEST_SCALE:
        raise ValueError(f"{name}: expected a finite number that float32 can hold, got {number(value)}")
    return scale
