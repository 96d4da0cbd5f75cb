"""Operations: a public function is its body, run once for each key; calls of a key that was seen repeat its launches.

What a key consists of says `key.py`. An operation remembers so many keys, the least recently used goes first. The last
two calls of torch's tensors are compared with first: torch compares all tensors of a call at once, which takes less
time than to read what is in a key. A call that fails is not remembered, so whatever is repeated has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce, wraps
from inspect import signature
from operator import or_
from typing import Any, TypeVar

from .. import arrays
from ..bridges import library_of
from ..cuda.program import ALIGNMENT, Plan
from .graph import launch_graph
from .key import Remembered, can_be_found, form_of, key_of, process_settings
from .prepared import Prepared, prepare

Operation = TypeVar("Operation", bound=Callable[..., Any])

MOST_KEYS = 1024  # of an operation

_graph_operation: Callable[[str], Callable[..., Any]] | None = None


def register_graph_operations(find: Callable[[str], Callable[..., Any]]) -> None:
    """Register a function that finds, by an operation's name, what it becomes in a graph of torch.compile."""
    global _graph_operation
    _graph_operation = find


def _looks_for_torch() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def trace_detector() -> Callable[[], bool]:
    """A function that tells whether torch.compile is reading this code: torch's own where torch is imported already."""
    torch = sys.modules.get("torch")
    return _looks_for_torch if torch is None else torch.compiler.is_dynamo_compiling


traced_by_torch: Callable[[], bool] = trace_detector()


def in_graph(name: str) -> Callable[..., Any]:
    """What the operation of that name becomes in a graph."""
    assert _graph_operation is not None, "cupy_mla/__init__.py registers it"
    return _graph_operation(name)


def traceable(operation: Operation) -> Operation:
    """Let torch.compile take an operation that has no kernels; `operation` does it for the others."""

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (in_graph(operation.__name__) if traced_by_torch() else operation)(*args, **kwargs)

    return call  # type: ignore[return-value]


_every: list[Calls] = []  # of every operation


def forget_calls() -> None:
    """Let every operation see every call for the first time again."""
    for calls in _every:
        calls.forget()
    launch_graph.cache_clear()


def operation(function: Operation) -> Operation:
    """Make a public operation of its body.

    The body describes its arrays (`bind`, `Place.optional`), checks them, gets results from `Place.output`, and hands
    all to `Place.call`. It returns None, one value, or a tuple of values; a value is one of its arguments, `obj` of one
    of its outputs, or a constant. On the host it runs at every call. On a GPU it runs once for a key, so what it does
    must follow from the key (`key.py`).
    """
    name, calls = function.__name__, Calls(function)
    _every.append(calls)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if traced_by_torch():
            return in_graph(name)(*args, **kwargs)
        return calls.call(args, kwargs)

    return call  # type: ignore[return-value]


class _Recent:
    """A call of one library's arrays on a GPU, which all start at multiples of `ALIGNMENT`, to compare others with.

    Attributes:
        form, now, types: of `form_of` and `process_settings`, and the types of the arguments.
        arrays, settings: which arguments are arrays, and which others are no plans.
        values: of the settings.
        like: tells whether arrays have the same facts.
    """

    def __init__(
        self, form: tuple[Any, ...], now: tuple[Any, ...], values: Sequence[Any], prepared: Prepared,
        like: Callable[..., bool],
    ) -> None:  # fmt: skip
        self.form, self.now, self.prepared, self.like = form, now, prepared, like
        self.types = [*map(type, values)]
        self.arrays = [i for i, value in enumerate(values) if library_of(value) is not None]
        self.plan = next((i for i, cls in enumerate(self.types) if cls is Plan), None)
        self.settings = [i for i in range(len(values)) if i not in self.arrays and i != self.plan]
        self.values = [values[i] for i in self.settings]
        self.library: Any = library_of(values[self.arrays[0]])
        self.wanting = any(getattr(values[i], "requires_grad", False) for i in self.arrays)


class Calls:
    """The calls of one operation, and what is remembered of them.

    Attributes:
        known: `Prepared` by keys.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = signature(function).parameters.values()
        self._function = function
        self._positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.known: Remembered = Remembered(MOST_KEYS)
        self._recent: tuple[_Recent, ...] = ()

    def forget(self) -> None:
        self._recent = ()
        self.known.clear()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make a call."""
        values = (*args, *kwargs.values()) if kwargs else args
        if arrays.CHECK_VALUES:
            return self._first(args, kwargs, values, None)
        form, now, types = form_of(args, kwargs), process_settings(), [*map(type, values)]
        for recent in self._recent:
            if recent.types == types and recent.form == form and recent.now == now:
                given = [values[i] for i in recent.arrays]
                library = recent.library
                if (
                    [values[i] for i in recent.settings] == recent.values
                    and not any(map(library.unusable, given))
                    and recent.like(*given)
                    and not (recent.wanting and any(map(library.wants_gradient, given)))
                ):
                    addresses = [*map(library.address, given)]
                    if not reduce(or_, addresses) % ALIGNMENT:
                        plan = None if recent.plan is None else values[recent.plan]
                        return recent.prepared.run(given, addresses, plan)
        try:
            key, given, addresses = key_of(form, now, values)
            prepared = self.known.get(key)
        except (RuntimeError, TypeError):  # what has no key: a setting without hash, a tensor without memory
            return self._first(args, kwargs, values, None)
        if prepared is None:
            return self._first(args, kwargs, values, key)
        self._compare_with(form, now, values, given, addresses, prepared)
        return prepared.run(given, addresses, _plan_of(values))

    def _first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Sequence[Any], key: Any) -> Any:
        """Make a call of a key that is not known, and remember it; None: it has no key."""
        if len(args) > len(self._positional) or not any(map(_on_gpu, values)):
            return self._function(*args, **kwargs)
        names = (*self._positional[: len(args)], *kwargs)
        prepared, given, addresses, for_others = prepare(self._function, names, args, kwargs)
        result = prepared.run(given, addresses, _plan_of(values))
        if key is not None and for_others and can_be_found(values):
            self.known.put(key, prepared)
        return result

    def _compare_with(
        self, form: tuple[Any, ...], now: tuple[Any, ...], values: Sequence[Any], given: Sequence[Any],
        addresses: Sequence[int], prepared: Prepared,
    ) -> None:  # fmt: skip
        """Compare the next calls with one whose key was known."""
        if reduce(or_, addresses) % ALIGNMENT:
            return
        like = library_of(given[0]).guards(given)  # type: ignore[union-attr]
        if like is not None:
            self._recent = (_Recent(form, now, values, prepared, like), *self._recent[:1])


def _plan_of(values: Sequence[Any]) -> Plan | None:
    return next((value for value in values if type(value) is Plan), None)


def _on_gpu(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.on_gpu(value)
