"""The decision tree of a signature's forms: it finds the form that a call's guards ask for, and computes its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_mla.calls.tree import measure_of
from cupy_mla.sizes import Trace, is_node, least, looked_up, most, term

NAMES = ("a", "b", "c")


def kind_of(n: int, m: int) -> tuple[str, int, int]:
    """Stands for a choice: a name that is a guard, and numbers."""
    return "many" if n * m > 30 else "few", 1 + n % 3, m // 2


def program(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    """Stands for an operation: checks, branches and numbers, of sizes or of integers."""
    if a < 0 or not b >= 0:
        return ("negative",)
    if b == 0:
        return "nothing", a + c
    rest = a // b  # whose guard is that b is not 0
    if b > 1 and rest % 4 == 0:
        return "divided", rest, c * b
    kind, splits, half = looked_up(kind_of, a, b)
    if kind == "few":
        return kind, least(half, c), (c - a) % 7
    if splits == 1:
        return kind, 1, -(-a // 8) * 8
    if a in (9, 12):
        return kind, 2, half, int(a)
    if c == 3:  # a number from here on
        return kind, 3, c * a, c * 0
    return kind, splits, most(half, a * b), abs(c - a), a * b + abs(c - a)


def form_of(values: Sequence[int]) -> Any:
    """What a trace of the program is compiled to: the body is what does not depend on sizes."""
    trace = Trace()
    word, *sizes = program(*(trace.read(name, value) for name, value in zip(NAMES, values, strict=True)))
    terms = [term(size) for size in sizes]
    constants = tuple(None if is_node(of) else of for of in terms)

    def body(found: tuple[int, ...]) -> tuple[Any, ...]:
        left = iter(found)
        return word, *(next(left) if constant is None else constant for constant in constants)

    return SimpleNamespace(guards=list(trace.guards), values=[of for of in terms if is_node(of)], body=body)


def measure(forms: Sequence[Any]) -> Callable[..., Any]:
    return measure_of(forms, NAMES, {})


def test_every_call_finds_its_form(rng):
    """As a signature makes forms: one for each call that no form holds for, the last one first."""
    forms: list[Any] = []
    find = measure(forms) if forms else lambda *values: None
    for values in rng.integers(-2, 20, (2000, 3)).tolist():
        found = find(*values)
        if found is None:
            forms.insert(0, form_of(values))
            find = measure(forms)
            found = find(*values)
        body, sizes, _ = found
        assert body(sizes) == program(*values), values
    assert 8 <= len(forms) <= 40
    words = {form.body(form.values)[0] for form in forms}
    assert words == {"negative", "nothing", "divided", "few", "many"}


@pytest.mark.parametrize("values", [(40, 3, 3), (5, 0, 1), (8, 2, 2), (-1, 1, 1)])
def test_a_call_without_a_form_is_told(values):
    others = [form_of(other) for other in ((40, 3, 3), (5, 0, 1), (8, 2, 2), (-1, 1, 1)) if other != values]
    assert measure(others)(*values) is None
    body, sizes, _ = measure([form_of(values), *others])(*values)
    assert body(sizes) == program(*values)


def test_what_forms_share_is_computed_once():
    called = []

    def choice(n: int) -> tuple[str, int]:
        called.append(n)
        return ("odd" if n % 2 else "even"), n // 2

    def form(n: int) -> Any:
        trace = Trace()
        kind, half = looked_up(choice, trace.read("a", n))
        body = lambda found: (kind, *found)  # noqa: E731
        return SimpleNamespace(guards=list(trace.guards), values=[term(half), term(half * half)], body=body)

    find = measure([form(3), form(4)])
    del called[:]
    for n in (7, 8):
        body, sizes, _ = find(n, 0, 0)
        assert body(sizes) == ("odd" if n % 2 else "even", n // 2, (n // 2) ** 2)
    assert called == [7, 8]


def test_of_two_forms_that_hold_the_first_is_taken():
    forms = [SimpleNamespace(guards=[("<", ("read", "a"), n)], values=[], body=n) for n in (5, 10)]
    assert [measure(forms)(a, 0, 0) for a in (3, 7, 12)] == [(5, (), []), (10, (), []), None]
    assert [measure(forms[::-1])(a, 0, 0) for a in (3, 7, 12)] == [(10, (), []), (10, (), []), None]
