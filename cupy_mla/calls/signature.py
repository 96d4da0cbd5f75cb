"""Signatures: checks and choices are paid for once, and later calls of the same signature repeat their outcome.

A signature is what does not differ from one step of a serving engine to the next: the arrays' library, dtypes, ranks
and devices, which arguments are there, and settings that are no integers. Sizes, strides, addresses and integers are
arguments of its forms (`form.py`), of which one function finds the one that holds (`tree.py`). A call for whose sizes
no form holds is traced (`program.py`), which makes another form: a signature has as many forms as there are ways to
serve it. It remembers the sizes it has seen; torch's tensors are compared with those of the last two calls before. A
call that fails leaves no form behind, so whatever a form repeats has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from .. import arrays
from ..bridges import library_of
from ..cuda import driver
from ..cuda.program import ALIGNMENT, Plan
from .code import Code
from .form import Form
from .program import TracedCall, is_numbers, run
from .tree import Served, measure_of

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
    _every.append(signatures)
    call = wraps(function)(_with_parameters_of(function, signatures))
    call.signatures = signatures  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _with_parameters_of(function: Callable[..., Any], signatures: Signatures) -> Callable[..., Any]:
    """An operation, written with the parameters of its body, so that Python puts what a call gives in order."""
    code, name = Code(), function.__name__
    names, by_keyword = signatures.names, signatures.names[signatures.positional :]
    declared = [
        p.name if p.default is p.empty else f"{p.name}={code.name(p.default)}"
        for p in signature(function).parameters.values()
    ]
    if by_keyword:
        declared.insert(signatures.positional, "*")
    given = ", ".join(names)
    passed = ", ".join([*names[: signatures.positional], *(f"{p}={p}" for p in by_keyword)])
    with code.block(f"if {code.name(traced_by_torch)}():"):
        code.line(f"return {code.name(in_graph)}({name!r})({passed})")
    with code.block(f"if not {code.name(arrays)}.CHECK_VALUES:"):
        code.line(f"found = {code.name(signatures.recent)}[0]({given})")
        with code.block("if found is not NotImplemented:"):
            code.line("return found")
    code.line(f"return {code.name(signatures.call)}({given})")
    return code.function(name, declared, code.lines)


def _unserved(*values: Any) -> Any:
    """The run of no signature."""
    return NotImplemented


class Signatures:
    """The signatures of one operation.

    Attributes:
        names: of the operation's parameters.
        positional: how many of them need no keyword.
        known: every signature, by what it consists of.
        recent: `Signature.run` of the last calls' signatures, the latest first.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = signature(function).parameters.values()
        self._function = function
        self.names: list[str] = [p.name for p in parameters]
        self.positional: int = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.known: dict[Any, Signature] = {}
        self.recent: list[Run] = [_unserved]

    def forget(self) -> None:
        self.known.clear()
        self.recent[:] = [_unserved]

    def call(self, *values: Any) -> Any:
        """Make a call that is not of the latest signature. The values are those of all parameters."""
        if arrays.CHECK_VALUES:
            return self._once(values) if any(map(_on_gpu, values)) else self._on_host(values)
        others = self.recent[1:]
        for served in others:
            result = served(*values)
            if result is not NotImplemented:
                if served is not others[0]:  # two signatures in turn, as of two kinds of layers, keep their order
                    self._put_first(served)
                return result
        if not any(map(_on_gpu, values)):
            return self._on_host(values)
        try:
            key = tuple(map(_facts, values))
            known = self.known.get(key)
        except (RuntimeError, TypeError, AttributeError):  # a setting without hash, a tensor without memory
            return self._once(values)  # the checks say it better
        if known is None:
            known = Signature(self._function, self.names, values)
        result = known.run(*values)
        if result is NotImplemented:  # a setting that does not equal itself, as NaN
            return self._once(values)
        if key not in self.known and len(self.known) >= MAX_SIGNATURES:
            self.forget()
        if known.forms:
            self.known[key] = known
            self._put_first(known.run)
        return result

    def _put_first(self, served: Run) -> None:
        """Make a signature the first that is tried."""
        self.recent[:] = [served, *(other for other in self.recent if other is not served)][:RECENT]

    def _on_host(self, values: tuple[Any, ...]) -> Any:
        by_keyword = zip(self.names[self.positional :], values[self.positional :], strict=True)
        return self._function(*values[: self.positional], **dict(by_keyword))

    def _once(self, values: tuple[Any, ...]) -> Any:
        """Trace a call, and run it by itself."""
        return run(TracedCall(self._function, self.names, values))


# What the next calls are compared with: a function that tells whether their arrays are like those of a recent call;
# that call's integers, what its choices depended on, and what served it.
Last = tuple[Callable[..., bool], tuple[Any, ...], tuple[Any, ...], Callable[..., Any], tuple[Any, ...]]


def _never(*arrays: Any) -> bool:
    return False


def _unmet(*numbers: Any) -> None:
    return None


_nothing: Callable[[], Any] = tuple  # what calls that depend on their arguments alone depend on beside them


class _Texts(NamedTuple):
    """What `Signature.run` calls things.

    Attributes:
        parameters: all arguments.
        arrays, addresses: the arrays among them, and where they begin.
        given: what the body of a form takes beside its values.
        integers: those of the call, as a tuple.
        last, finders, alike, seen: of the signature, see its `__init__`.
    """

    parameters: list[str]
    arrays: list[str]
    addresses: list[str]
    given: str
    integers: str
    last: str
    finders: str
    alike: str
    seen: str


class Signature:
    """Calls of an operation that differ in sizes, strides, addresses and integers alone.

    Args:
        function: the operation's body.
        names: of its parameters.
        values: of one call.

    Attributes:
        run: takes a call's arguments; NotImplemented for a call of another signature.
        forms: the one that was made last comes first.
    """

    def __init__(self, function: Callable[..., Any], names: Sequence[str], values: Sequence[Any]) -> None:
        self._function, self._names = function, names
        self._arrays = [i for i, value in enumerate(values) if library_of(value) is not None]
        self._library = next(library for i in self._arrays if (library := library_of(values[i])) and _on_gpu(values[i]))
        self._integers = [i for i, value in enumerate(values) if is_numbers(value)]
        self._plans = [i for i, value in enumerate(values) if isinstance(value, Plan)]
        self._ranks = [values[i].ndim for i in self._arrays]
        self._facts = [_facts(values[i]) for i in self._arrays]
        self._dense = [i for i, facts in zip(self._arrays, self._facts, strict=True) if facts[-2]]
        self.forms: list[Form] = []
        # What `run` reads, each the one item of a list, which another thread may replace at any time: what tells what
        # calls depend on now, with the function that finds a form; the one that tells arrays of this signature; the
        # last calls.
        self._finders: list[tuple[Callable[[], Any], Callable[..., Served | None]]] = [(_nothing, _unmet)]
        self._alike: list[Callable[..., bool]] = [_never]
        self._last: list[tuple[Last, ...]] = [()]
        self._seen: dict[Any, Served] = {}  # by sizes
        mixed = any(library_of(values[i]) is not self._library for i in self._arrays)
        self.run: Run = (lambda *values: run(TracedCall(function, names, values))) if mixed else self._written(values)

    def _written(self, values: Sequence[Any]) -> Run:
        """The function of a call's arguments: it finds what serves the call, and runs that."""
        code = Code()
        arrays, addresses = ([f"{letter}{i}" for i in self._arrays] for letter in "ap")
        texts = _Texts(
            parameters=[f"a{i}" for i in range(len(values))],
            arrays=arrays,
            addresses=addresses,
            given=", ".join([*addresses, *arrays, *(f"a{i}" for i in self._plans)]),
            integers=f"({' '.join(f'a{i},' for i in self._integers)})",
            last=f"{code.name(self._last)}[0]",
            finders=f"{code.name(self._finders)}[0]",
            alike=f"{code.name(self._alike)}[0]",
            seen=code.name(self._seen),
        )
        self._write_refusals(code, texts, values)
        code.line(f"depends_on, measure = {texts.finders}")
        code.line("now = depends_on()")
        guarded = self._library.guards([values[i] for i in self._arrays], sizes_too=True) is not None
        if guarded:
            self._write_last_calls(code, texts)
        self._write_facts(code, texts, guarded)
        self._write_search(code, texts)
        if guarded:
            with code.block("elif aligned:"):  # otherwise the next call is not compared with this one
                compared = f"{code.name(self._compared)}(found, now, {texts.integers}, {', '.join(arrays)})"
                code.line(f"{texts.last} = {compared}")
        code.line("body, values, _ = found")
        code.line(f"return body(values, {texts.given})")
        return code.function("run", texts.parameters, code.lines)

    def _write_refusals(self, code: Code, texts: _Texts, values: Sequence[Any]) -> None:
        """Leave calls of other signatures alone, and make the arrays' GPU the current one."""
        with code.block(f"if {self._differs(code, values)}:"):
            code.line("return NotImplemented")
        if any(getattr(values[i], "requires_grad", False) for i in self._arrays):
            with code.block(f"if {code.name(sys.modules['torch'].is_grad_enabled)}():"):  # the checks say what is wrong
                code.line("return NotImplemented")
        device = self._library.device_of(values[next(i for i in self._arrays if _on_gpu(values[i]))])
        with code.block(f"if {code.name(driver.THREAD)}.current_device() != {device}:"):
            code.line(f"with {code.name(self._library.to_device)}({device}):")
            code.line(f"    return run({', '.join(texts.parameters)})")

    def _write_last_calls(self, code: Code, texts: _Texts) -> None:
        """Run what served one of the last calls, where the call is like it."""
        same = [f"like({', '.join(texts.arrays)})", "now == before", f"{texts.integers} == integers"]
        head = f"if {' and '.join(same if self._integers else same[:2])}:"
        with code.block(f"for like, integers, before, body, values in {texts.last}:"), code.block(head):
            self._write_addresses(code, texts)
            with code.block(f"if ({' | '.join(texts.addresses)}) % {ALIGNMENT} == 0:"):
                code.line(f"return body(values, {texts.given})")

    def _write_addresses(self, code: Code, texts: _Texts) -> None:
        for array, address in zip(texts.arrays, texts.addresses, strict=True):
            code.line(f"{address} = {self._library.address.format(a=array)}")

    def _write_facts(self, code: Code, texts: _Texts, guarded: bool) -> None:
        """Leave calls alone whose arrays are others than those of the signature; `guarded`: by the library's guards."""
        library, differ = self._library, ""
        facts, known = [*library.facts, library.dense], [facts[1:-1] for facts in self._facts]
        if guarded:
            given = ", ".join(texts.arrays)
            differ = f"not {texts.alike}({given}) and not {code.name(self._admits)}({given}) or "
            facts, known = [library.dense], [facts[-2:-1] for facts in self._facts]
        read = "".join(f"{fact.format(a=a)}, " for a in texts.arrays for fact in facts)
        with code.block(f"if {differ}({read}) != {code.name(sum(known, ()))}:"):
            code.line("return NotImplemented")

    def _write_search(self, code: Code, texts: _Texts) -> None:
        """Find what serves a call by its sizes: known, measured, or from a trace."""
        library, parameters = self._library, ", ".join(texts.parameters)
        read = {i: library.shape if i in self._dense else f"{library.shape}, {library.strides}" for i in self._arrays}
        sizes = [text.format(a=f"a{i}") for i, text in read.items()]
        with code.block("try:"):
            self._write_addresses(code, texts)
            code.line(f"sizes = (now, {', '.join([*sizes, *(f'a{i}' for i in self._integers)])},)")
        with code.block("except RuntimeError:"):  # a tensor without memory: the checks say what is wrong
            code.line(f"return {code.name(self._refused)}({parameters})")
        code.line(f"aligned = ({' | '.join(texts.addresses)}) % {ALIGNMENT} == 0")
        with code.block("if not aligned:"):
            code.line(f"sizes += ({' '.join(f'{address} % {ALIGNMENT},' for address in texts.addresses)})")
        code.line(f"found = {texts.seen}.get(sizes)")
        with code.block("if found is None:"):
            with code.block("try:"):
                code.line("found = measure(*sizes)")
            with code.block("except ValueError:"):
                # Shapes of other ranks do not unpack. Where a choice cannot be made, a trace says what is wrong.
                code.line("return NotImplemented")
            with code.block("if found is None:"):
                code.line(f"found = {code.name(self._traced)}(sizes, {parameters})")
            with code.block("else:"):
                code.line(f"{texts.seen}[sizes] = found")
                with code.block(f"if len({texts.seen}) > {MAX_SIZES}:"):
                    code.line(f"{texts.seen}.clear()")

    def _differs(self, code: Code, values: Sequence[Any]) -> str:
        """The condition under which arguments are of other types than these, or settings have other values."""
        constants = [i for i, value in enumerate(values) if value is None or type(value) is bool]
        typed = [i for i in range(len(values)) if i not in constants]
        settings = [i for i in typed if i not in (*self._arrays, *self._integers, *self._plans)]
        known = (*(type(values[i]) for i in typed), *(values[i] for i in settings))
        texts = [f"a{i} is not {values[i]}" for i in constants]
        texts.append(
            f"({' '.join(f'type(a{i}),' for i in typed)} {' '.join(f'a{i},' for i in settings)}) != {code.name(known)}"
        )
        texts += [f"len(a{i}) != {len(values[i])}" for i in self._integers if type(values[i]) is tuple]
        if self._library.unusable:  # the checks say what is wrong
            texts += [self._library.unusable.format(a=f"a{i}") for i in self._arrays]
        return " or ".join(texts)

    def _admits(self, *arrays: Any) -> bool:
        """Whether arrays are of this signature that are not like the last ones, as in torch's inference mode."""
        try:
            if list(map(_facts, arrays)) != self._facts:
                return False
        except RuntimeError:  # a sparse tensor does not tell whether it has gaps
            return False
        self._alike[0] = self._library.guards(arrays, sizes_too=False) or _never
        return True

    def _compared(
        self, served: Served, now: tuple[Any, ...], integers: tuple[Any, ...], *arrays: Any
    ) -> tuple[Last, ...]:
        """What the next calls are compared with after one of sizes that were seen before."""
        body, values, like = served
        if not like or not like[0](*arrays):
            like[:] = [self._library.guards(arrays, sizes_too=True) or _never]
        return (like[0], integers, now, body, values), *self._last[0][:1]

    def _refused(self, *values: Any) -> Any:
        """Make a call by itself, whose checks say what is wrong."""
        return run(TracedCall(self._function, self._names, values))

    def _traced(self, sizes: tuple[Any, ...], *values: Any) -> Served:
        """Trace a call that no form holds for."""
        call = TracedCall(self._function, self._names, values, self._dense)
        if not call.holds_for_others:
            return lambda *arguments: run(call), (), []
        form = Form(call)
        forms = [form, *self.forms][:MAX_FORMS]
        depends_on = next((form.depends_on for form in forms if form.depends_on), _nothing)
        parts = {
            f"{letter}{i}": [f"{item}{i}_{k}" for k in range(rank)]
            for i, rank in zip(self._arrays, self._ranks, strict=True)
            for letter, item in ("hn", "st")
            if not (letter == "s" and i in self._dense)
        }
        addresses = [f"p{i}=0" for i in self._arrays]
        parameters = ["now", *parts, *(f"a{i}" for i in self._integers), *addresses]
        measure = measure_of(forms, parameters, parts, [f"h{i}" for i in self._arrays])
        self.forms, self._finders[0] = forms, (depends_on, measure)  # other threads see those of before or these
        found = measure(depends_on(), *sizes[1:])
        assert found is not None, f"{self._function.__name__}: a call does not meet its own guards"
        return found


def _on_gpu(value: Any) -> bool:
    library = library_of(value)
    return library is not None and library.on_gpu(value)


def _facts(value: Any) -> Any:
    """What a signature holds of an argument."""
    if is_numbers(value):
        return int if type(value) is int else (tuple, len(value))
    if isinstance(value, Plan):
        return Plan
    library = library_of(value)
    return (type(value), value) if library is None else (type(value), *library.facts_of(value), value.ndim)
