"""What an operation costs the host, paid once for each signature.

Checks, shapes of results, the choice of kernels and their parameters depend on what a call is like. The first call of
a signature is traced (`program.py`) and compiled; later ones run the compiled form. A signature is what can not differ
from one call to the next of a serving engine: the arrays' library, dtypes, ranks and devices, which arguments are
there, and settings that are no integers. Sizes, strides, addresses and integers are the compiled form's arguments, and
its guards say for which of them it holds. A call that fails leaves nothing behind, so whatever a compiled form repeats
has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from .. import arrays
from ..bridges import library_of
from .form import Form
from .program import TracedCall, run

Run = Callable[..., Any]  # of a `Form`
Operation = TypeVar("Operation", bound=Callable[..., Any])

RECENT = 4  # forms that a call is offered before its signature is looked up
MAX_SIGNATURES, MAX_FORMS = 256, 16  # of an operation, and forms of a signature

_graph_operation: Callable[[str], Callable[..., Any]] | None = None


def register_graph_operations(find: Callable[[str], Callable[..., Any]]) -> None:
    """Say what finds, by an operation's name, what it becomes in a graph of torch.compile."""
    global _graph_operation
    _graph_operation = find


def traced_by_torch() -> bool:
    """Whether torch.compile is reading this code instead of running it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


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


_every: list[Signatures] = []


def forget_calls() -> None:
    """Let every operation see every call for the first time again."""
    for signatures in _every:
        signatures.forget()


def operation(function: Operation) -> Operation:
    """Make a public operation of its body.

    The body describes its arrays (`bind`, `Place.optional`), checks them, has results by `Place.output`, and hands
    all to `Place.call`. It returns None, or a tuple or one of: its arguments, `obj` of its outputs, constants. On the
    host it runs as it is. On a GPU it is traced; there it must not look at its arguments in other ways.
    """
    signatures = Signatures(function)
    recent = signatures.recent
    _every.append(signatures)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if traced_by_torch():
            return in_graph(function.__name__)(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        written = (len(args), *kwargs)
        forms = () if arrays.CHECK_VALUES else recent.get(written, ())
        for place, form in enumerate(forms):
            result = form(*values)
            if result is not NotImplemented:
                if place > 1:  # two in turn, as of two kinds of layers, stay where they are
                    recent[written] = [form, *(other for other in forms if other is not form)]
                return result
        return signatures.call(args, kwargs, values)

    call.signatures = signatures  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


class Signatures:
    """The signatures of one operation, and their compiled forms.

    Attributes:
        forms: compiled forms by signature, the last one that a call ran first.
        recent: those that the last calls ran, by how the arguments are written.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = signature(function).parameters.values()
        self._names = [p.name for p in parameters]
        self._positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.forms: dict[Any, list[Run]] = {}
        self.recent: dict[tuple[Any, ...], list[Run]] = {}

    def forget(self) -> None:
        self.forms.clear()
        self.recent.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: tuple[Any, ...]) -> Any:
        """Make a call that none of the recent forms holds for."""
        if not any(map(_on_gpu, values)):
            return self._function(*args, **kwargs)
        names = [*self._names[: len(args)], *kwargs]
        if len(args) > self._positional or not kwargs.keys() <= set(self._names[len(args) :]):
            return self._function(*args, **kwargs)  # Python says what is wrong
        if arrays.CHECK_VALUES:
            return run(TracedCall(self._function, names, values))
        try:
            key = (tuple(names), *map(_facts, values))
            forms = self.forms.get(key, [])
        except (RuntimeError, TypeError, AttributeError):  # a setting without hash, a tensor without memory
            return run(TracedCall(self._function, names, values))  # the checks say it better
        written = (len(args), *kwargs)
        for form in forms:
            result = form(*values)
            if result is not NotImplemented:
                self._remember(key, written, form)
                return result
        traced = TracedCall(self._function, names, values)
        if not traced.holds_for_others:
            return run(traced)
        form = Form(traced).run
        result = form(*values)
        assert result is not NotImplemented, f"{self._function.__name__}: a call does not meet its own guards"
        self._remember(key, written, form)
        return result

    def _remember(self, key: Any, written: tuple[Any, ...], form: Run) -> None:
        """Make a form that a call ran the first to be asked."""
        if key not in self.forms and len(self.forms) >= MAX_SIGNATURES:
            self.forget()
        forms, recent = self.forms.get(key, []), self.recent.get(written, [])
        self.forms[key] = [form, *(other for other in forms if other is not form)][:MAX_FORMS]
        self.recent[written] = [form, *(other for other in recent if other is not form)][:RECENT]


def _on_gpu(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.on_gpu(value)


def _facts(value: Any) -> Any:
    """What a signature says of an argument."""
    if type(value) is int:
        return int
    library = library_of(value)
    return (type(value), value) if library is None else (type(value), *library.facts_of(value), len(value.shape))
