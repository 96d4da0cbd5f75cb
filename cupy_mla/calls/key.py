"""The key of a call: all that its checks, its choices and its launches depend on.

Two calls with one key make the same launches; only pointers differ. The key has an array's address modulo `ALIGNMENT`,
its dtype, device, shape and strides; the type of a `Plan`; and the type and the value of every other argument.
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
from ..cuda.logits import VARIABLE as INDEXER_KERNELS
from ..cuda.program import ALIGNMENT, Plan
from ..cuda.structs import picker
from ..private import environment_snapshots

Key = tuple[Any, ...]


# Reads what the environment forces.
forced_by_environment: Callable[[], tuple[Any, ...]] = environment_snapshots(ATTENTION_KERNELS, INDEXER_KERNELS)


class Partition(NamedTuple):
    """A call's arguments divided into arrays and settings. Plans are neither.

    Attributes:
        types: of the arguments.
        numbers: places of the arrays among the arguments.
        library: the library of the arrays; None: there are no arrays, or they are of several libraries.
        arrays_of, settings_of: functions that pick the arrays and the settings from the arguments.
        with_others: picks the arguments from all arguments and, behind them, others in the places of the arrays.
        tuples: places of the settings that are tuples.
    """

    types: tuple[Any, ...]
    numbers: tuple[int, ...]
    library: Library | None
    arrays_of: Callable[[Sequence[Any]], Sequence[Any]]
    settings_of: Callable[[Sequence[Any]], Sequence[Any]]
    with_others: Callable[[Sequence[Any]], Sequence[Any]]
    tuples: tuple[int, ...]


@lru_cache(maxsize=1024)
def partition_of(types: tuple[Any, ...]) -> Partition:
    """The partition of arguments of these types."""
    libraries = [*map(library_of_class, types)]
    numbers = tuple(i for i, library in enumerate(libraries) if library is not None)
    theirs = {libraries[i] for i in numbers}
    settings = [i for i, cls in enumerate(types) if i not in numbers and cls is not Plan]
    others = [len(types) + numbers.index(i) if i in numbers else i for i in range(len(types))]
    return Partition(
        types, numbers, theirs.pop() if len(theirs) == 1 else None, picker(numbers), picker(settings), picker(others),
        tuple(i for i in settings if types[i] is tuple),
    )  # fmt: skip


def starts_of(addresses: Sequence[int]) -> tuple[int, ...]:
    """What launchers may know of addresses: each modulo ALIGNMENT."""
    return tuple(map(mod, addresses, repeat(ALIGNMENT)))


# What was read of a call's arrays: `Library.facts`, their addresses, and `starts_of` these.
ReadArrays = tuple[tuple[Any, ...], list[int], tuple[int, ...]]


def key_of(head: tuple[Any, ...], partition: Partition, values: Sequence[Any]) -> tuple[Key, ReadArrays]:
    """A call's key, and what was read of its arrays.

    Args:
        head: what is forced in the process, the number of positional arguments, and the names of the others.
        partition: of the arguments.
        values: all arguments, in that order.

    Raises:
        TypeError: an array lies in host memory, or the arrays are of several libraries.
        RuntimeError: a tensor has no strides, or no memory.
    """
    types, numbers, library, arrays_of, settings_of, _, tuples = partition
    facts, addresses = (), []
    if library is not None:
        arrays = arrays_of(values)
        facts, addresses = library.facts(arrays), library.addresses(arrays)
    elif numbers:
        raise TypeError("arrays of several libraries")
    inner = [tuple(map(type, values[i])) for i in tuples] if tuples else ()  # 1, 1.0 and True are equal
    starts = starts_of(addresses)
    return (head, types, settings_of(values), *inner, facts, starts), (facts, addresses, starts)


class Remembered:
    """Values by keys. Beyond a number of them, the least recently used one is forgotten. Safe from several threads.

    Args:
        most: so many values are kept.
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
            self._values[key] = value
            if len(self._values) > self._most:
                self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
