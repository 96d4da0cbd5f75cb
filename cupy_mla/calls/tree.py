"""The guards of a signature's forms as one decision tree, written as one function.

Forms of one signature are traces of one piece of code. So the guards of two of them are the same up to where the traces
part, and there they ask the same thing and got other answers. A call goes down the tree once: no guard is checked and
no size computed twice, however many forms there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf
from typing import Any

from ..sizes import Node, Term, is_multiple, is_node
from .code import Code
from .form import Form

# What serves a call: a form's body, the values that it needs, and a list for what tells arrays of the same sizes.
Served = tuple[Callable[..., Any], tuple[Any, ...], list[Callable[..., bool]]]


def measure_of(
    forms: Sequence[Form], parameters: Sequence[str], parts: dict[str, list[str]], checked: Collection[str] = ()
) -> Callable[..., Served | None]:
    """The function that finds a call's form.

    Args:
        forms: where two would hold for a call, the first one is taken.
        parameters: of the function.
        parts: of a parameter that is a tuple, the names under which its items are read.
        checked: of these, parameters of which a call may have more or fewer items, which is a ValueError.

    Returns:
        what serves a call, or None for one that meets no form's guards.
    """
    guards = {guard: None for form in forms for guard in form.guards}
    code = Code([*guards, *(value for form in forms for value in form.values)])
    _write(code, forms, 0)
    unpacked = {p: names for p, names in parts.items() if p in checked or code.read.intersection(names)}
    head = [f"({' '.join(f'{n},' for n in names)}) = {p}" for p, names in unpacked.items()]
    return code.function("measure", parameters, [*head, *code.lines])


def _write(code: Code, forms: Sequence[Form], start: int) -> None:
    """Write what is left to be found out of forms whose first `start` guards are met."""
    guards, end = forms[0].guards, start
    while all(end < len(form.guards) and form.guards[end] == guards[end] for form in forms):
        end += 1
    _require(code, guards[start:end])
    if any(end == len(form.guards) for form in forms):
        form = next(form for form in forms if end == len(form.guards))
        code.line(f"return {code.name(form.body)}, {code.expression(('tuple', *form.values))}, []")
        return
    ways: dict[Node, list[Form]] = {}
    for form in forms:
        ways.setdefault(form.guards[end], []).append(form)
    *others, (last, forms_of_last) = ways.items()
    for guard, forms_of_way in others:
        conditions = _conditions(code, [guard])
        with code.block(f"if {' and '.join(conditions)}:"):
            _write(code, forms_of_way, end + 1)
    if not any(_is_not(last, guard) for guard, _ in others):
        _require(code, [last])
    _write(code, forms_of_last, end + 1)


def _require(code: Code, guards: Sequence[Node]) -> None:
    """Write that a call which does not meet these guards has no form.

    What a guard needs is computed only where those before it are met.
    """
    pending: list[str] = []
    at = len(code.lines)

    def flush() -> None:
        if pending:
            code.line(f"if not ({' and '.join(pending)}):", at)
            code.line("    return None", at + 1)
            pending.clear()

    for condition in _conditions(code, guards):
        if len(code.lines) > at:
            flush()
        pending.append(condition)
        at = len(code.lines)
    flush()


def _conditions(code: Code, guards: Sequence[Node]) -> Iterator[str]:
    """Guards as expressions, each after lines that compute what it needs.

    Where several compare one term with numbers, the least and the greatest one that they leave is one condition, in the
    place of the first of them. So are all that want certain values of what a call reads, or of one function's result;
    and, in the last place, all that want multiples of one power of two.
    """
    left: dict[Term, tuple[Any, Any]] = {}
    multiples: dict[int, list[Term]] = {}
    for guard in guards:
        of, least, most = _leaves(guard)
        known = left.get(of)
        left[of] = (least, most) if known is None else (max(least, known[0]), min(most, known[1]))
        if _is_bits(guard):
            multiples.setdefault(guard[1][2], []).append(guard[1][1])
    values: dict[Term, dict[Term, Any]] = {}  # by what they are read from
    for of, (least, most) in left.items():
        if least == most and of[0] in ("read", "get", "call"):
            values.setdefault(_source(of), {})[of] = least
    written: set[Term] = {None}
    compared: set[Term] = set()  # keys of `values`
    for guard in guards:
        of, least, most = _leaves(guard)
        if _is_bits(guard):
            continue
        if of is not None and of in values.get(_source(of), ()):
            if _source(of) not in compared:
                compared.add(_source(of))
                yield _equal(code, values[_source(of)])
        elif of not in written:
            written.add(of)
            if left[of] != (-inf, inf):
                yield _within(code.expression(of), *left[of])
        if (least, most) == (-inf, inf) and not (of and _excluded(guard, *left[of])):
            yield code.condition(guard)
    for number, terms in multiples.items():
        yield f"({' | '.join(map(code.expression, terms))}) % {number} == 0"


def _source(of: Node) -> Term:
    """What the value of a term is read from: the result of a function, or None, a call's arguments."""
    return of[1] if of[0] == "get" else of if of[0] == "call" else None


def _equal(code: Code, values: dict[Term, Any]) -> str:
    """The condition that terms have these values."""
    terms, wanted = list(map(code.expression, values)), tuple(values.values())
    if len(terms) == 1:
        return f"{terms[0]} == {code.variable(wanted[0])}"
    return f"({', '.join(terms)}) == {wanted if all(type(n) is int for n in wanted) else code.name(wanted)}"


def _is_bits(guard: Node) -> bool:
    """Whether a guard says that a term is a multiple of a power of two: that its lowest bits are 0."""
    return guard[0] == "==" and is_multiple(guard) and guard[1][2].bit_count() == 1


def _leaves(guard: Node) -> tuple[Term, Any, Any]:
    """The term that a guard compares with a number, and the least and greatest one that it leaves; None: no term.

    For a term that must be something else than a number both are that.
    """
    sign, a, b = guard[1] if guard[0] == "not" else guard
    holds = guard[0] != "not"
    if is_node(a) and sign == "==" and holds and not is_node(b):
        return a, b, b
    if is_node(a) and type(b) is int:
        if sign == "==":
            return a, -inf, inf
        most = b - (sign == "<")
        return (a, -inf, most) if holds else (a, most + 1, inf)
    if type(a) is int and is_node(b) and sign != "==":
        least = a + (sign == "<")
        return (b, least, inf) if holds else (b, -inf, least - 1)
    return None, -inf, inf


def _excluded(guard: Node, least: float, most: float) -> bool:
    """Whether a guard that a term is not a number says nothing more than these bounds do."""
    _, (_, _, number) = guard
    return not least <= number <= most


def _within(text: str, least: float, most: float) -> str:
    if least == most:
        return f"{text} == {least}"
    return f"{f'{least} <= ' if least > -inf else ''}{text}{f' <= {most}' if most < inf else ''}"


def _is_not(a: Node, b: Node) -> bool:
    return a == ("not", b) or b == ("not", a)
