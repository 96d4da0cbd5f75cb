"""What a call's key consists of: all that its checks, its choices and its launches depend on, but for addresses.

Two calls with one key make the same launches, whose pointers alone differ. Of an address the key has what it is modulo
`ALIGNMENT`, of a `Plan` its type. Of every other argument it has the type and the value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

from ..bridges import library_of, library_of_class
from ..cuda.attention.choose import VARIABLE as ATTENTION_KERNELS
from ..cuda.attention.choose import forced
from ..cuda.logits import VARIABLE as INDEXER_KERNELS
from ..cuda.program import ALIGNMENT, Plan
from ..private import environment_snapshots

Key = tuple[Any, ...]


_kernels: Callable[[], tuple[Any, ...]] = environment_snapshots(ATTENTION_KERNELS, INDEXER_KERNELS)


def process_settings() -> tuple[Any, ...]:
    """What calls depend on beside their arguments: what is forced, and the kernels that the environment asks for. Read
    at every call."""
    return forced.names, _kernels()


def key_of(head: tuple[Any, ...], values: Sequence[Any]) -> tuple[Key, list[Any], list[int]]:
    """A call's key, its arrays, and their addresses.

    Args:
        head: what `process_settings` says, how many arguments came by place, and the names of the others.
        values: of all arguments, in that order.

    Raises:
        TypeError: an array lies in host memory. RuntimeError: a tensor has no strides, or no memory.
    """
    facts: list[Any] = [head]
    arrays: list[Any] = []
    addresses: list[int] = []
    for value in values:
        cls: Any = type(value)
        library = library_of_class(cls)
        if library is not None:
            facts += cls, library.key(value)
            arrays.append(value)
            addresses.append(library.address(value))
        elif cls is Plan:
            facts.append(cls)
        elif cls is tuple:
            facts += cls, value, tuple(map(type, value))
        else:
            facts += cls, value
    facts += [address % ALIGNMENT for address in addresses]
    return tuple(facts), arrays, addresses


def can_be_found(values: Sequence[Any]) -> bool:
    """Whether settings equal themselves, as NaN does not: a key with another one would never be found again."""
    return all(
        can_be_found(value) if type(value) is tuple else library_of(value) is not None or bool(value == value)
        for value in values
    )


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
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
