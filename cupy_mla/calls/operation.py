"""Operations: a public function is its body, run once for each key; calls of a key that was seen repeat its launches.

What a key consists of says `key.py`. An operation remembers so many keys, the least recently used goes first. A call is
compared with the last few calls first, which takes less time than to make its key. A call that fails is not remembered,
so whatever is repeated has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from .. import arrays
from ..bridges import Comparison, library_of
from ..cuda.kernel import Kernel
from ..cuda.program import ALIGNMENT
from .graph import launch_graph
from .key import Key, Remembered, key_of, process_settings, sorted_by_type
from .prepared import kernels_of, prepare

Operation = TypeVar("Operation", bound=Callable[..., Any])

# Of an operation. Layers of a step share their sizes, and batches of decodes grow and shrink by a few: more are seldom
# asked for again. Each is 40 to 60 objects that the garbage collector counts; many more make it look at the whole
# process within an engine's step (docs/host_time.md).
MOST_KEYS = 128
RECENT = 4  # calls that others are compared with, more than kinds of layers

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


def differentiable(*results: str) -> Callable[[Operation], Operation]:
    """Mark the body of an operation whose custom op has a backward: `operation` makes a call with a tensor that wants a
    gradient by that op, unless one of these results is given."""

    def mark(function: Operation) -> Operation:
        function.differentiable = results  # type: ignore[attr-defined]
        return function

    return mark


_every: list[Calls] = []  # of every operation


def forget_calls() -> None:
    """Let every operation see every call for the first time again."""
    for calls in _every:
        calls.forget()
    launch_graph.cache_clear()


_listed: ContextVar[dict[Kernel, None] | None] = ContextVar("_listed", default=None)


@contextmanager
def listing() -> Iterator[dict[Kernel, None]]:
    """List kernels in a `with` block: calls of this thread over arrays on a GPU load and launch nothing, and return
    None; the kernels that they would launch become keys of what `with` gives."""
    for calls in _every:
        calls.recents.clear()  # of which calls would be made
    found: dict[Kernel, None] = {}
    token = _listed.set(found)
    try:
        yield found
    finally:
        _listed.reset(token)


def operation(function: Operation) -> Operation:
    """Make a public operation of its body.

    The body describes its arrays (`bind`, `Place.optional`), checks them, gets results from `Place.output`, and hands
    all to `Place.call`. It returns None, one value, or a tuple of values; a value is one of its arguments, `obj` of one
    of its outputs, or a constant. On the host it runs at every call. On a GPU it runs once for a key, so what it does
    must follow from the key (`key.py`).
    """
    name, calls = function.__name__, Calls(function)
    recents = calls.recents
    _every.append(calls)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if traced_by_torch():
            return in_graph(name)(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        now = process_settings()
        if recents and not arrays.CHECK_VALUES:
            seen = [*kwargs, *map(type, values)]
            for recent in recents:
                if recent.seen == seen and recent.settings_of(values) == recent.settings and recent.now == now:
                    given = recent.arrays_of(values)
                    addresses = recent.addresses_of(given)
                    if addresses is not None:
                        return recent.run(given, addresses, values)
        return calls.call((now, len(args), *kwargs), values, args, kwargs)

    return call  # type: ignore[return-value]


class _Recent:
    """A call on a GPU, to compare others with.

    Attributes:
        now: of `process_settings`.
        seen: names of arguments by keyword, and the types of all arguments.
        settings: the values of those that are neither arrays nor plans.
        arrays_of, settings_of: pick from the arguments the arrays, and what are neither arrays nor plans.
        addresses_of: of arrays that are like those of the call, None of others (`Library.comparison`).
        run: of what was prepared.
    """

    def __init__(self, head: tuple[Any, ...], values: tuple[Any, ...], addresses_of: Comparison, run: Any) -> None:
        types = tuple(map(type, values))
        _, _, self.arrays_of, self.settings_of, _ = sorted_by_type(types)
        self.now, _, *names = head  # that of arguments by place follows from the other numbers
        self.seen = [*names, *types]
        self.settings = self.settings_of(values)
        self.addresses_of, self.run = addresses_of, run


class Calls:
    """The calls of one operation, and what is remembered of them.

    Attributes:
        known: `Prepared` by keys.
        recents: the last `RECENT` calls whose keys were known.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = signature(function).parameters.values()
        self._function = function
        self._differentiable: tuple[str, ...] = getattr(function, "differentiable", ())
        self._positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.known: Remembered = Remembered(MOST_KEYS)
        self.recents: list[_Recent] = []

    def forget(self) -> None:
        self.recents.clear()
        self.known.clear()

    def call(
        self, head: tuple[Any, ...], values: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make a call that is not like the last ones."""
        if self._differentiable and any(map(_wants_gradient, values)):
            named = {**dict(zip(self._positional, args, strict=False)), **kwargs}
            if all(named.get(result) is None for result in self._differentiable):
                return in_graph(self._function.__name__)(*args, **kwargs)
        listed = _listed.get()
        if listed is not None and any(map(_on_gpu, values)):
            names = (*self._positional[: len(args)], *kwargs)
            listed.update(dict.fromkeys(kernels_of(self._function, names, values, len(kwargs))))
            return None
        key: Key | None = None
        given = prepared = None
        if not arrays.CHECK_VALUES:  # the body does that
            try:
                key, given = key_of(head, values)
                prepared = self.known.get(key)
            except (RuntimeError, TypeError):  # what has no key: a setting without hash, a tensor without memory
                key = given = None
        if prepared is not None and given is not None:
            found, _, addresses = given
            addresses_of = library_of(found[0]).comparison(found, ALIGNMENT)  # type: ignore[union-attr]
            if addresses_of is not None and addresses_of(found) is not None:
                self.recents[:] = [_Recent(head, values, addresses_of, prepared.run), *self.recents[: RECENT - 1]]
            return prepared.run(found, addresses, values)
        if len(args) > len(self._positional) or not any(map(_on_gpu, values)):
            return self._function(*args, **kwargs)
        names = (*self._positional[: len(args)], *kwargs)
        prepared, found, addresses, for_others = prepare(self._function, names, values, len(kwargs), given)
        result = prepared.run(found, addresses, values)
        if key is not None and for_others:
            self.known.put(key, prepared)
        return result


def _wants_gradient(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.wants_gradient(value)


def _on_gpu(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.on_gpu(value)
