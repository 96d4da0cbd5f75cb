"""Signatures: checks and choices are paid for once, and later calls of the same signature repeat their outcome.

A signature is what does not differ from one step of a serving engine to the next: the arrays' library, dtypes, ranks
and devices, which arguments are there, and settings that are no integers. Sizes, strides, addresses and integers are
arguments of its forms (`form.py`). A call for whose sizes no form holds is traced (`program.py`), which makes another
form: a signature has as many forms as there are ways to serve it. It remembers the sizes it has seen; those of the last
call are compared first. A call that fails leaves no form behind, so whatever a form repeats has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from .. import arrays
from ..bridges import library_of
from ..cuda import driver
from ..cuda.program import ALIGNMENT
from .code import Code
from .form import Form
from .program import TracedCall, is_numbers, run

Run = Callable[..., Any]  # of a `Signature`
Operation = TypeVar("Operation", bound=Callable[..., Any])

RECENT = 4  # recent signatures that are tried before a call's own is looked up
MAX_SIGNATURES = 256  # of an operation
MAX_FORMS, MAX_SIZES = 32, 1024  # of a signature

_graph_operation: Callable[[str], Callable[..., Any]] | None = None


def register_graph_operations(find: Callable[[str], Callable[..., Any]]) -> None:
    """Register a function that finds, by an operation's name, what it becomes in a graph of torch.compile."""
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


_every: list[Signatures] = []  # of every operation


def forget_calls() -> None:
    """Let every operation see every call for the first time again."""
    for signatures in _every:
        signatures.forget()


def operation(function: Operation) -> Operation:
    """Make a public operation of its body.

    The body describes its arrays (`bind`, `Place.optional`), checks them, gets results from `Place.output`, and hands
    all to `Place.call`. It returns None, one value, or a tuple of values; a value is one of its arguments, `obj` of one
    of its outputs, or a constant. On the host it runs as it is. On a GPU it is traced; there it must not look at its
    arguments in other ways.
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
        asked = () if arrays.CHECK_VALUES else recent.get(written, ())
        for place, make in enumerate(asked):
            result = make(*values)
            if result is not NotImplemented:
                if place > 1:  # two signatures in turn, as of two kinds of layers, keep their order
                    recent[written] = [make, *(other for other in asked if other is not make)]
                return result
        return signatures.call(args, kwargs, values)

    call.signatures = signatures  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


class Signatures:
    """The signatures of one operation.

    Attributes:
        known: every signature, by what it consists of.
        recent: `Signature.run` of the last calls' signatures, the latest first, by how a call writes its arguments: the
            number of positional ones and the names of the others.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = signature(function).parameters.values()
        self._function = function
        self._names = [p.name for p in parameters]
        self._positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.known: dict[Any, Signature] = {}
        self.recent: dict[tuple[Any, ...], list[Run]] = {}

    def forget(self) -> None:
        self.known.clear()
        self.recent.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: tuple[Any, ...]) -> Any:
        """Make a call of none of the recent signatures."""
        if not any(map(_on_gpu, values)):
            return self._function(*args, **kwargs)
        names = [*self._names[: len(args)], *kwargs]
        if len(args) > self._positional or not kwargs.keys() <= set(self._names[len(args) :]):
            return self._function(*args, **kwargs)  # Python says what is wrong
        if arrays.CHECK_VALUES:
            return run(TracedCall(self._function, names, values))
        try:
            key = (tuple(names), *map(_facts, values))
            known = self.known.get(key)
        except (RuntimeError, TypeError, AttributeError):  # a setting without hash, a tensor without memory
            return run(TracedCall(self._function, names, values))  # the checks say it better
        if known is None:
            known = Signature(self._function, names, values)
        result = known.run(*values)
        if result is NotImplemented:  # a setting that does not equal itself, as NaN
            return run(TracedCall(self._function, names, values))
        self._remember(key, (len(args), *kwargs), known)
        return result

    def _remember(self, key: Any, written: tuple[Any, ...], known: Signature) -> None:
        """Make the signature of a call the first that is tried."""
        if key not in self.known and len(self.known) >= MAX_SIGNATURES:
            self.forget()
        if known.forms:
            self.known[key] = known
            recent = self.recent.get(written, [])
            self.recent[written] = [known.run, *(other for other in recent if other is not known.run)][:RECENT]


# What is known of a call: a function that tells whether other arrays are like its arrays, its integers, what its
# choices depended on, the body of the form that holds for it, and what that form's `measure` returned.
Seen = tuple[Callable[..., bool], tuple[int, ...], tuple[Any, ...], Callable[..., Any], tuple[Any, ...]]


def _never(*arrays: Any) -> bool:
    return False


class Signature:
    """Calls of an operation that differ in sizes, strides, addresses and integers alone.

    Args:
        function: the operation's body.
        names: of the parameters that were given.
        values: of one call.

    Attributes:
        run: takes a call's arguments; NotImplemented for a call of another signature.
        forms: the one that was made or found last comes first.
    """

    def __init__(self, function: Callable[..., Any], names: Sequence[str], values: Sequence[Any]) -> None:
        self._function, self._names = function, names
        self._arrays = [i for i, value in enumerate(values) if library_of(value) is not None]
        self._library = next(library for i in self._arrays if (library := library_of(values[i])) and _on_gpu(values[i]))
        self._integers = [i for i, value in enumerate(values) if is_numbers(value)]
        self.forms: list[Form] = []
        self._choices: list[Callable[[], Any]] = []
        self._chosen: list[Callable[[], tuple[Any, ...]]] = [tuple]  # what the choices depend on now
        self._seen: dict[Any, list[Seen]] = {}  # one each; none for sizes that no form held for when they came
        self._last: list[Seen] = [(_never, (), (), run, ())]
        self._mixed = any(library_of(values[i]) is not self._library for i in self._arrays)
        self._alike: Callable[..., bool] = _never
        self._facts = [_facts(values[i]) for i in self._arrays]
        library, arrays = self._library, [f"a{i}" for i in self._arrays]
        addresses = [library.address.format(a=a) for a in arrays]
        read = [f"{library.shape}, {library.strides}".format(a=a) for a in arrays]
        read += [f"a{i}" for i in self._integers]
        # Addresses modulo ALIGNMENT stand last; mostly all are 0, which one look at all of them tells.
        bits = ", ".join(f"{address} % {ALIGNMENT}" for address in addresses)
        aligned = f"{', '.join('0' for _ in addresses)}"
        read.append(f"*(({bits},) if ({' | '.join(addresses)}) % {ALIGNMENT} else ({aligned},))")
        self._numbers = tuple_of([f"a{i}" for i in range(len(values))], read)
        self.run: Run = self._written(values)

    def _written(self, values: Sequence[Any]) -> Run:
        """The function of a call's arguments."""
        code, library = Code(), self._library
        parameters = [f"a{i}" for i in range(len(values))]
        arrays, addresses = ([f"{letter}{i}" for i in self._arrays] for letter in "ap")
        integers = [f"a{i}" for i in self._integers]
        others = [i for i in range(len(values)) if i not in self._arrays and i not in self._integers]
        tuples = [i for i in self._integers if type(values[i]) is tuple]
        settings = [*(f"type({a})" for a in parameters), *(f"a{i}" for i in others)]
        known = (*map(type, values), *(values[i] for i in others))
        lengths = "".join(f" or len(a{i}) != {len(values[i])}" for i in tuples)
        code.line(f"if ({' '.join(f'{s},' for s in settings)}) != {code.name(known)}{lengths}:")
        code.line("    return NotImplemented")
        if library.unusable and not self._mixed:  # the checks say what is wrong
            code.line(f"if {' or '.join(library.unusable.format(a=a) for a in arrays)}:")
            code.line("    return NotImplemented")
        if any(getattr(values[i], "requires_grad", False) for i in self._arrays):
            code.line(f"if {code.name(sys.modules['torch'].is_grad_enabled)}():")  # the checks say what is wrong
            code.line("    return NotImplemented")
        device = library.device_of(values[next(i for i in self._arrays if _on_gpu(values[i]))])
        code.line(f"if {code.name(driver.THREAD)}.current_device() != {device}:")
        code.line(f"    with {code.name(library.to_device)}({device}):")
        code.line(f"        return run({', '.join(parameters)})")
        code.line(f"like, integers, chosen, body, sizes = {code.name(self._last)}[0]")
        same = [f"like({', '.join(arrays)})"]
        same += [f"({' '.join(f'{n},' for n in integers)}) == integers"] if integers else []
        same += [f"{code.name(self._chosen)}[0]() == chosen"]
        code.line(f"found = {' and '.join(same)}")
        code.line("if found:")
        for array, address in zip(arrays, addresses, strict=True):
            code.line(f"    {address} = {library.address.format(a=array)}")
        code.line(f"    found = ({' | '.join(addresses)}) % {ALIGNMENT} == 0")
        code.line("if not found:")
        code.line(f"    seen = {code.name(self._find)}({', '.join(parameters)})")
        code.line("    if seen is None:")
        code.line("        return NotImplemented")
        code.line("    _, _, _, body, sizes = seen")
        for array, address in zip(arrays, addresses, strict=True):
            code.line(f"    {address} = {library.address.format(a=array)}")
        code.line(f"return body(sizes, {', '.join([*addresses, *arrays])})")
        return code.function("run", parameters, code.lines)

    def _find(self, *values: Any) -> Seen | None:
        """What is known of a call that differs from the last one; None for a call of another signature."""
        arrays = [values[i] for i in self._arrays]
        if self._mixed:
            return self._traced(values)
        if not self._alike(*arrays):
            if list(map(_facts, arrays)) != self._facts:
                return None
            self._alike = self._library.like(arrays, sizes_too=False)  # of another mode, as torch's inference mode
        try:
            numbers, chosen = self._numbers(*values), self._chosen[0]()
        except RuntimeError:  # a tensor without memory: the checks say what is wrong
            return self._traced(values)
        known = self._seen.setdefault((numbers, chosen), [])
        if not known:
            seen = self._measured(values, numbers, chosen)
            if seen is None:
                return self._traced(values)
            known.append(seen)
            if len(self._seen) > MAX_SIZES:
                self._seen.clear()
            return seen
        if not any(numbers[-len(arrays) :]):  # `run` compares with the last call only where all addresses are aligned
            if not known[0][0](*arrays):
                known[0] = self._library.like(arrays, sizes_too=True), *known[0][1:]
            self._last[0] = known[0]
        return known[0]

    def _measured(self, values: tuple[Any, ...], numbers: tuple[Any, ...], chosen: tuple[Any, ...]) -> Seen | None:
        """What is to be known of a call whose sizes were not seen before; None where no form holds for them."""
        for place, form in enumerate(self.forms):
            sizes = form.measure(*numbers)
            if sizes is not None:
                if place:
                    self._put_first(form)
                return _never, tuple([values[i] for i in self._integers]), chosen, form.body, sizes
        return None

    def _put_first(self, form: Form) -> None:
        """Ask a form first from now on. Other threads see the list of before or the new one."""
        self.forms = [form, *(other for other in self.forms if other is not form)][:MAX_FORMS]

    def _traced(self, values: tuple[Any, ...]) -> Seen:
        """Trace a call that no form holds for."""
        call = TracedCall(self._function, self._names, values)
        if not call.holds_for_others or self._mixed:
            return _never, (), (), lambda *arguments: run(call), ()
        form = Form(call)
        self._put_first(form)
        self._choices += [choice for choice in form.choices if choice not in self._choices]
        if self._choices:
            self._chosen[0] = tuple_of([], [f"choice{i}()" for i in range(len(self._choices))], self._choices)
        sizes = form.measure(*self._numbers(*values))
        assert sizes is not None, f"{self._function.__name__}: a call does not meet its own guards"
        return _never, (), (), form.body, sizes


def tuple_of(
    parameters: Sequence[str], expressions: Sequence[str], choices: Sequence[Callable[[], Any]] = ()
) -> Callable[..., tuple[Any, ...]]:
    """A function that returns a tuple of these expressions, in which `choices` are called `choice0`, `choice1` ..."""
    text = f"lambda {', '.join(parameters)}: ({' '.join(f'{expression},' for expression in expressions)})"
    return eval(text, {f"choice{i}": choice for i, choice in enumerate(choices)})


def _on_gpu(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.on_gpu(value)


def _facts(value: Any) -> Any:
    """What a signature holds of an argument."""
    if is_numbers(value):
        return int if type(value) is int else (tuple, len(value))
    library = library_of(value)
    return (type(value), value) if library is None else (type(value), *library.facts_of(value), len(value.shape))
