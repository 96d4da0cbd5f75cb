"""`operation` makes a public function of its body. On a GPU the body runs once for each key, and calls with a known key
repeat its launches.

`key.py` says what a key consists of. Before its key is made, a call is compared with the last few calls, which takes
less time. A call that fails is not remembered, so whatever is repeated has passed the checks.
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
from ..cuda.attention.choose import forced
from ..cuda.kernel import Kernel
from ..cuda.program import ALIGNMENT, Launch
from .graph import launch_graph
from .key import Key, Partition, Remembered, forced_by_environment, key_of, partition_of
from .prepared import Prepared, run_body

Operation = TypeVar("Operation", bound=Callable[..., Any])

# Keys that an operation remembers. The layers of a step share their sizes, and batches of decodes change by a few
# requests, so older keys seldom come again. Each is 40 to 60 objects that the garbage collector counts. With many more
# of them it would look at the whole process within an engine's step (docs/host_time.md).
MOST_KEYS = 128
RECENT = 4  # calls that others are compared with: more than a model has kinds of layers

_graph_operation: Callable[[str], Callable[..., Any]] | None = None


def register_graph_operations(find: Callable[[str], Callable[..., Any]]) -> None:
    """Register the function that finds, by an operation's name, its custom op for a graph of torch.compile."""
    global _graph_operation
    _graph_operation = find


def _torch_is_compiling() -> bool:
    """Whether torch.compile is tracing this code, also where torch is imported later than this module."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def trace_detector() -> Callable[[], bool]:
    """A function that tells whether torch.compile is tracing this code: torch's own where torch is imported already."""
    torch = sys.modules.get("torch")
    return _torch_is_compiling if torch is None else torch.compiler.is_dynamo_compiling


traced_by_torch: Callable[[], bool] = trace_detector()


def in_graph(name: str) -> Callable[..., Any]:
    """The custom op of the operation of that name."""
    assert _graph_operation is not None, "cupy_mla/__init__.py registers it"
    return _graph_operation(name)


def traceable(operation: Operation) -> Operation:
    """Decorate an operation without kernels, so that torch.compile can trace it. `operation` does so for all others."""

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (in_graph(operation.__name__) if traced_by_torch() else operation)(*args, **kwargs)

    return call  # type: ignore[return-value]


def differentiable(*results: str) -> Callable[[Operation], Operation]:
    """Mark the body of an operation whose custom op has a backward.

    A call with a tensor that requires a gradient is then made by that op, unless one of `results` is given.
    """

    def mark(function: Operation) -> Operation:
        function.differentiable = results  # type: ignore[attr-defined]
        return function

    return mark


_operations: list[Calls] = []  # one for each operation


def forget_calls() -> None:
    """Forget all calls of all operations."""
    for calls in _operations:
        calls.forget()
    launch_graph.cache_clear()


_listing: ContextVar[dict[Kernel, None] | None] = ContextVar("_listing", default=None)


@contextmanager
def listing() -> Iterator[dict[Kernel, None]]:
    """List kernels in a `with` block: calls of this thread over arrays on a GPU load and launch nothing, and return
    None. The kernels that they would launch become keys of the dict that `with` gives."""
    for calls in _operations:
        calls.recents.clear()  # a call like a recent one would be made
    found: dict[Kernel, None] = {}
    token = _listing.set(found)
    try:
        yield found
    finally:
        _listing.reset(token)


def operation(function: Operation) -> Operation:
    """Make a public operation of its body.

    The body describes its arrays (`bind`, `Place.optional`), checks them, gets results from `Place.output`, and hands
    all to `Place.call`. It returns None, one value, or a tuple of values. A value is an argument, `obj` of an output,
    or a constant. On the host the body runs at every call. On a GPU it runs once for a key, so what it does must follow
    from the key (`key.py`).
    """
    name, calls = function.__name__, Calls(function)
    recents = calls.recents
    _operations.append(calls)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if traced_by_torch():
            return in_graph(name)(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        now = forced.names, forced_by_environment()  # settings of the process that calls depend on
        if recents and not arrays.CHECK_VALUES:
            types = [*kwargs, *map(type, values)]
            for recent in recents:
                if recent.types == types and recent.settings_of(values) == recent.settings and recent.process == now:
                    given = recent.arrays_of(values)
                    addresses = recent.addresses_of(given)
                    if addresses is not None:
                        return recent.run(given, addresses, values)
        return calls.call((now, len(args), *kwargs), values, args, kwargs)

    return call  # type: ignore[return-value]


class _Recent:
    """A call on a GPU that others are compared with.

    Attributes:
        process: what was forced in the process.
        types: names of its keyword arguments, and the types of all arguments.
        settings: the values of the arguments that are neither arrays nor plans.
        arrays_of, settings_of: as of `Partition`.
        addresses_of: compares arrays with the call's; the addresses of arrays that are alike, else None
            (`Library.comparison`).
        run: `Prepared.run` of its key.
    """

    def __init__(
        self, head: tuple[Any, ...], of: Partition, values: tuple[Any, ...], addresses_of: Comparison, run: Any
    ) -> None:
        self.process, _, *names = head  # the number of positional arguments follows from names and types
        self.types = [*names, *of.types]
        self.arrays_of, self.settings_of, self.settings = of.arrays_of, of.settings_of, of.settings_of(values)
        self.addresses_of, self.run = addresses_of, run


class Calls:
    """The calls of one operation, and what is remembered of them.

    Attributes:
        known: the `Prepared` of each key.
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
        """Make a call that is not like the last ones.

        Args:
            head, values: as for `key_of`.
            args, kwargs: the same arguments as the caller gave them.
        """
        partition = partition_of(tuple(map(type, values)))
        found = partition.arrays_of(values)
        if self._differentiable and any(map(_wants_gradient, found)):
            named = {**dict(zip(self._positional, args, strict=False)), **kwargs}
            if all(named.get(result) is None for result in self._differentiable):
                return in_graph(self._function.__name__)(*args, **kwargs)
        listing = _listing.get()
        if listing is not None and any(map(_on_gpu, found)):
            names = (*self._positional[: len(args)], *kwargs)
            body = run_body(self._function, names, values, len(kwargs), partition, None)
            listing.update({step.kernel: None for step in body.place.program if isinstance(step, Launch)})
            return None
        key: Key | None = None
        read = prepared = None
        if not arrays.CHECK_VALUES:  # the body checks values, so it runs at every call
            try:
                key, read = key_of(head, partition, values)
                prepared = self.known.get(key)
            except (RuntimeError, TypeError):  # there is no key: a setting without hash, a tensor without memory
                key = read = None
        if prepared is not None and read is not None and partition.library is not None:
            addresses_of = partition.library.comparison(found, ALIGNMENT)
            if addresses_of is not None and addresses_of(found) is not None:
                recent = _Recent(head, partition, values, addresses_of, prepared.run)
                self.recents[:] = [recent, *self.recents[: RECENT - 1]]
            return prepared.run(found, read[1], values)
        if len(args) > len(self._positional) or not any(map(_on_gpu, found)):
            return self._function(*args, **kwargs)  # on the host; or an error, with too many arguments
        names = (*self._positional[: len(args)], *kwargs)
        body = run_body(self._function, names, values, len(kwargs), partition, read)
        prepared = Prepared(body)
        result = prepared.run(found, body.addresses, values)
        if key is not None and prepared.repeatable:
            self.known.put(key, prepared)
        return result


def _wants_gradient(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.wants_gradient(value)


def _on_gpu(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.on_gpu(value)
