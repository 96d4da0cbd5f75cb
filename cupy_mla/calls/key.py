"""What a call's key consists of: all that its checks, its choices and its launches depend on, but for addresses.

Two calls with one key make the same launches, whose pointers alone differ. Of an address the key has what it is modulo
`ALIGNMENT`, of a `Plan` its type. Of every other argument it has the type and the value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import mod
from threading import RLock
from typing import Any, NamedTuple

from ..bridges import Library, library_of_class
from ..cuda.attention.choose import VARIABLE as ATTENTION_KERNELS
from ..cuda.attention.choose import forced
from ..cuda.logits import VARIABLE as INDEXER_KERNELS
from ..cuda.program import ALIGNMENT, Plan
from ..cuda.structs import picker
from ..private import environment_snapshots

Key = tuple[Any, ...]


_kernels: Callable[[], tuple[Any, ...]] = environment_snapshots(ATTENTION_KERNELS, INDEXER_KERNELS)


def process_settings() -> tuple[Any, ...]:
    """What calls depend on beside their arguments: what is forced, and the kernels that the environment asks for. Read
    at every call."""
    return forced.names, _kernels()


class Sorted(NamedTuple):
    """Which of a call's arguments are arrays and which are settings, all but plans.

    Attributes:
        numbers: of the arrays.
        library: theirs; None: there are none, or several libraries'.
        arrays_of, settings_of: pick them from the arguments.
        tuples: the numbers of settings that are tuples.
    """

    numbers: tuple[int, ...]
    library: Library | None
    arrays_of: Callable[[Sequence[Any]], Sequence[Any]]
    settings_of: Callable[[Sequence[Any]], Sequence[Any]]
    tuples: tuple[int, ...]


@lru_cache(maxsize=1024)
def sorted_by_type(types: tuple[Any, ...]) -> Sorted:
    """Which arguments are what, by the types of all."""
    libraries = [*map(library_of_class, types)]
    numbers = tuple(i for i, library in enumerate(libraries) if library is not None)
    theirs = {libraries[i] for i in numbers}
    settings = [i for i, cls in enumerate(types) if i not in numbers and cls is not Plan]
    return Sorted(
        numbers, theirs.pop() if len(theirs) == 1 else None, picker(numbers), picker(settings),
        tuple(i for i in settings if types[i] is tuple),
    )  # fmt: skip


Given = tuple[Sequence[Any], tuple[Any, ...], list[int]]  # a call's arrays, their facts, and their addresses


def key_of(head: tuple[Any, ...], values: Sequence[Any]) -> tuple[Key, Given]:
    """A call's key, and what was read of its arrays.

    Args:
        head: what `process_settings` says, how many arguments came by place, and the names of the others.
        values: of all arguments, in that order.

    Raises:
        TypeError: an array lies in host memory, or arrays are several libraries'. RuntimeError: a tensor has no
            strides, or no memory.
    """
    types = tuple(map(type, values))
    numbers, library, arrays_of, settings_of, tuples = sorted_by_type(types)
    arrays, facts, addresses = arrays_of(values), (), []
    if library is not None:
        facts, addresses = library.facts(arrays), library.addresses(arrays)
    elif numbers:
        raise TypeError("arrays of several libraries")
    inner = [tuple(map(type, values[i])) for i in tuples] if tuples else ()
    key = head, types, settings_of(values), *inner, facts, *map(mod, addresses, repeat(ALIGNMENT))
    return key, (arrays, facts, addresses)


class Remembered:
    """Values by keys, at most so many. The one that was not asked for the longest time goes first.

    Several threads may share it.

    Args:
        most: the most values that it keeps.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = RLock()
        self._values: OrderedDict[Any, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any) -> Any:
        """The value of a key, None where there is none.

        Raises:
            TypeError: the key has no hash.
        """
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: Any, value: Any) -> None:
        """Keep a value."""
        with self._lock:
            self._values[key] = value  # a new one stands at the end
            if len(self._values) > self._most:
                self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
