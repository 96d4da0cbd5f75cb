"""Symbolic sizes: a call on a GPU is traced once, and what the trace found holds for calls of other sizes.

While an operation checks its arguments and a launcher makes its program, every length, stride, address and integer
setting of the call is a `Size`: its number in this call, and how it follows from a call's arguments. Arithmetic with
sizes makes sizes. Where Python has to know a number (a comparison, an index, a key), the size gives that of this call,
and the trace notes a *guard*: the condition under which the answer is the same in another call. A trace holds for every
call of its signature that meets all guards. So the comparisons in checks of shapes become guards by themselves, and a
call never runs a trace that was made for other answers. What the guards so far say of a size is known from then on: it
leaves no second guard, and a size that they leave one number for is that number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

# ("read", text), ("call", function, *nodes), ("get", node, i), ("tuple", *nodes) or (operator, *nodes)
Node = tuple[Any, ...]
Term = Any  # a Node, or the number or other object that it is known to be
Bounds = tuple[float, float]  # the least and the greatest number that a term may be

TEXT = {
    "+": "{} + {}", "-": "{} - {}", "*": "{} * {}", "//": "{} // {}", "%": "{} % {}", "|": "{} | {}",
    "neg": "-{}", "abs": "abs({})", "min": "min({}, {})", "max": "max({}, {})", "bits": "{}.bit_length()",
    "==": "{} == {}", "<": "{} < {}", "<=": "{} <= {}", "not": "not {}",
}  # fmt: skip
ARITHMETIC: dict[str, Callable[..., int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "|": operator.or_, "neg": operator.neg, "abs": operator.abs, "min": min, "max": max, "bits": int.bit_length,
}  # fmt: skip


class Trace:
    """What a traced call depends on.

    Attributes:
        guards: conditions, as terms, in the order in which they were met.
        once: the call depended on more than a trace can tell; it holds for no other call.
        depends_on: tells what calls depend on beside their arguments; None: on nothing.
    """

    def __init__(self) -> None:
        self.guards: dict[Node, None] = {}
        self.once = False
        self.depends_on: Callable[[], Any] | None = None
        self._bounds: dict[Node, Bounds] = {}
        self._multiples: dict[Node, int] = {}
        self._known: dict[Node, Term] = {}  # what `known` found since the last guard

    def read(self, text: str, value: int, least: float = -inf, multiple_of: int = 1) -> Size:
        """A number that a compiled call reads by an expression.

        Args:
            least: it is at least that in every call.
            multiple_of: a power of two, of which it is a multiple in every call that the trace holds for.
        """
        node = ("read", text)
        self._bounds[node] = (least, inf)
        self._multiples[node] = multiple_of
        return Size(self, value, node)

    def depend(self, function: Callable[[], Any]) -> Node:
        """Note that calls depend on what a function returns; the term of that."""
        assert self.depends_on in (None, function), "a call depends on one such function"
        self.depends_on = function
        return "read", "now"

    def end(self) -> None:
        """Note that numbers are the multiples that `read` took them for, where no guard says so: a guard a divisor."""
        together: dict[int, Term] = {}
        for node, of in self._multiples.items():
            if of > 1 and self.known(node) is node:
                together[of] = ("|", together[of], node) if of in together else node
        for of, nodes in together.items():
            self.guard(("==", ("%", nodes, of), 0), True)

    def guard(self, condition: Node, holds: bool) -> None:
        """Note a condition that this call meets, or does not."""
        if holds and is_multiple(condition) and any(_implies(known, condition) for known in self.guards):
            return
        self.guards[condition if holds else ("not", condition)] = None

    def compare(self, sign: str, a: Term, b: Term, holds: bool) -> None:
        """Note how two integers compare in this call, where that is not known of every call."""
        a, b = self._undivided(self.known(a), self.known(b))
        b, a = self._undivided(b, a)
        if a == b:
            return
        if not self._decided(sign, a, b):
            self.guard((sign, a, b), holds)
            self._learn(sign, a, b, holds)

    def bounds(self, of: Term) -> Bounds:
        """The least and the greatest number that a term may be in calls that meet the guards."""
        if type(of) is int:
            return of, of
        least, most = self._bounds.get(of, (-inf, inf))
        if of[0] == "//" and type(of[2]) is int and of[2] > 0:
            first, last = (end if abs(end) == inf else end // of[2] for end in self.bounds(of[1]))
            return max(least, first), min(most, last)
        if of[0] == "*":
            (least_a, most_a), (least_b, most_b) = map(self.bounds, of[1:])
            if least_a >= 0 and least_b >= 0:
                return max(least, least_a * least_b), most if inf in (most_a, most_b) else min(most, most_a * most_b)
        return least, most

    def has_factor(self, of: Term, divisor: Term) -> bool:
        """Whether a term is a multiple of a positive number in all calls that the trace holds for."""
        return type(divisor) is int and divisor > 0 and self._multiples.get(of, 1) % divisor == 0

    def _undivided(self, of: Term, other: Term) -> tuple[Term, Term]:
        """Two terms; for a quotient without rest and a number, the dividend and a number that compare as these do."""
        if is_node(of) and of[0] == "//" and type(other) is int and self.has_factor(*of[1:]):
            return of[1], other * of[2]
        return of, other

    def known(self, of: Term) -> Term:
        """The number that the guards leave for a term; where they leave several, the term.

        Parts of it that they leave one number for are numbers.
        """
        if not is_node(of):
            return of
        if of not in self._known:
            self._known[of] = self._settled(of)
        return self._known[of]

    def _settled(self, of: Node) -> Term:
        least, most = self.bounds(of)
        if least == most:
            return least
        if of[0] not in ARITHMETIC:
            return of
        terms = tuple(map(self.known, of[1:]))
        if not any(map(is_node, terms)):
            return ARITHMETIC[of[0]](*terms)
        new = _simplified(self, of[0], *terms)
        return of if new == of else self.known(new)

    def _decided(self, sign: str, a: Term, b: Term) -> bool:
        (least_a, most_a), (least_b, most_b) = self.bounds(a), self.bounds(b)
        if sign == "==":
            return most_a < least_b or most_b < least_a or least_a == most_a == least_b == most_b
        less = sign == "<"
        return most_a <= least_b - less or most_b <= least_a - (not less)

    def _learn(self, sign: str, a: Term, b: Term, holds: bool) -> None:
        self._known.clear()
        (least_a, most_a), (least_b, most_b) = self.bounds(a), self.bounds(b)
        if sign != "==":
            less = (sign == "<") == holds
            if holds:  # a <= b - less
                most_a, least_b = min(most_a, most_b - less), max(least_b, least_a + less)
            else:  # b <= a - less
                most_b, least_a = min(most_b, most_a - less), max(least_a, least_b + less)
        elif holds:
            least_a, most_a = least_b, most_b = max(least_a, least_b), min(most_a, most_b)
        elif least_b == most_b:  # an end of a's may be the number that it is not
            least_a, most_a = least_a + (least_a == least_b), most_a - (most_a == most_b)
        for of, found in ((a, (least_a, most_a)), (b, (least_b, most_b))):
            if is_node(of):
                self._bounds[of] = found


class Size:
    """An integer of a traced call. Behaves as one; see the module."""

    __slots__ = ("node", "trace", "value")
    trace: Trace
    value: int
    node: Node

    def __init__(self, trace: Trace, value: int, node: Node) -> None:
        self.trace = trace
        self.value = value
        self.node = node

    # what Python wants to know

    def known(self) -> int:
        """The number; a guard makes sure that other calls of the trace have the same."""
        if type(self.value) is int:
            self.trace.compare("==", self.node, self.value, True)
        else:
            self.trace.guard(("==", self.node, self.value), True)
        return self.value

    def __int__(self) -> int:
        return self.known()

    def __index__(self) -> int:
        return self.known()

    def __trunc__(self) -> int:
        return self.known()

    def __float__(self) -> float:
        return float(self.known())

    def __hash__(self) -> int:
        return hash(self.known())

    def __bool__(self) -> bool:
        return self != 0

    def __repr__(self) -> str:  # for messages, which end a call
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def _compare(self, sign: str, a: Any, b: Any, holds: bool) -> bool:
        if type(number(a)) is type(number(b)) is int:
            self.trace.compare(sign, term(a), term(b), holds)
        else:
            self.trace.guard((sign, term(a), term(b)), holds)
        return holds

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, float, Size)):
            return False
        return self._compare("==", self, other, self.value == number(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self._compare("<", self, other, self.value < number(other))

    def __le__(self, other: Any) -> bool:
        return self._compare("<=", self, other, self.value <= number(other))

    def __gt__(self, other: Any) -> bool:
        return self._compare("<", other, self, number(other) < self.value)

    def __ge__(self, other: Any) -> bool:
        return self._compare("<=", other, self, number(other) <= self.value)

    # arithmetic

    def __add__(self, other: Any) -> Any:
        return self if _is(other, 0) else _computed("+", operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self if _is(other, 0) else _computed("+", operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self if _is(other, 0) else _computed("-", operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _computed("-", operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        if _is(other, 0):
            return 0
        return self if _is(other, 1) else _computed("*", operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        if _is(other, 0):
            return 0
        return self if _is(other, 1) else _computed("*", operator.mul, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self if _is(other, 1) else _computed("//", operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _computed("//", operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        if type(other) is int and factor(term(self)) % other == 0:
            return 0
        return _computed("%", operator.mod, self, other)

    def __neg__(self) -> Any:
        return _computed("neg", operator.neg, self)

    def __abs__(self) -> Any:
        return _computed("abs", operator.abs, self)

    def bit_length(self) -> Any:
        """As `int.bit_length`."""
        return _computed("bits", int.bit_length, self)


def factor(of: Term) -> int:
    """A number that a term is a multiple of in every call."""
    if type(of) is int:
        return of
    return factor(of[1]) * factor(of[2]) if of[0] == "*" else 1


def is_multiple(condition: Node) -> bool:
    """Whether a condition is that a term is a multiple of a number."""
    sign, left, right = condition
    return sign == "==" and right == 0 and type(left) is tuple and left[0] == "%" and type(left[2]) is int


def _implies(known: Node, condition: Node) -> bool:
    """Whether a condition like `known`, that a term is a multiple of a number, holds only where `condition` does."""
    if len(known) != 3 or not is_multiple(known):
        return False
    return known[1][1] == condition[1][1] and known[1][2] % condition[1][2] == 0


def number(value: Any) -> Any:
    """The number that a size is in this call; anything else as it is. Notes no guard."""
    return value.value if isinstance(value, Size) else value


def term(value: Any) -> Term:
    """A size's node, or the number that the guards so far leave for it; anything else as it is."""
    return value.trace.known(value.node) if isinstance(value, Size) else value


def is_node(of: Term) -> bool:
    """Whether a term differs from call to call."""
    return type(of) is tuple and bool(of) and (of[0] in ("read", "call", "get", "tuple") or of[0] in TEXT)


def least(a: int, b: int) -> int:
    """The smaller one of two integers; of sizes, a size."""
    return _computed("min", min, a, b)


def most(a: int, b: int) -> int:
    """The larger one of two integers; of sizes, a size."""
    return _computed("max", max, a, b)


def looked_up(table: Any, *arguments: Any) -> Any:
    """Look a tuple of values up by numbers, so that a trace holds for calls that find other numbers.

    A form looks it up again with its own call's numbers. Numbers in the tuple are sizes; the other entries become one
    guard.

    Args:
        table: a function, or a dictionary by tuples of the arguments.
        arguments: numbers, and at most one function, which stands for what it returns whenever a call is made.
    """
    trace = next((a.trace for a in arguments if isinstance(a, Size)), None)
    numbers = tuple(a() if callable(a) else number(a) for a in arguments)
    is_dictionary = isinstance(table, dict)
    result = table[numbers] if is_dictionary else table(*numbers)
    if trace is None:
        return result
    terms = tuple(trace.depend(a) if callable(a) else term(a) for a in arguments)
    node = ("call", table.__getitem__, ("tuple", *terms)) if is_dictionary else ("call", table, *terms)
    fixed = [i for i, value in enumerate(result) if type(value) not in (int, float)]
    if fixed:
        entries_of = _entries(*fixed)
        trace.guard(("==", ("call", entries_of, node), entries_of(result)), True)
    entries = [v if i in fixed else Size(trace, v, ("get", node, i)) for i, v in enumerate(result)]
    return type(result)(*entries) if hasattr(result, "_fields") else tuple(entries)


@cache
def _entries(*which: int) -> Callable[[tuple[Any, ...]], Any]:
    """Some of a tuple's entries; the same function for the same ones, so that equal terms are seen to be equal."""
    return operator.itemgetter(*which)


def _is(value: Any, this: int) -> bool:
    value = term(value)
    return type(value) is int and value == this


def _computed(sign: str, function: Callable[..., int], *operands: Any) -> Any:
    size = next((o for o in operands if isinstance(o, Size)), None)
    if size is None:
        return function(*operands)
    if not all(isinstance(o, (int, Size)) for o in operands):
        return NotImplemented
    value, terms = function(*map(number, operands)), tuple(map(term, operands))
    of: Term = _simplified(size.trace, sign, *terms) if any(map(is_node, terms)) else value
    return Size(size.trace, value, of) if is_node(of) else value


def _simplified(trace: Trace, sign: str, *terms: Term) -> Term:
    """A sum, difference or product in as few steps as it takes."""
    if sign in ("+", "-"):
        (a, more), (b, other) = map(_without_number, terms)
        if a == 0 and sign == "-":
            return "-", more - other, b
        number = more + other if sign == "+" else more - other
        of = a if b == 0 else b if a == 0 else (sign, a, b)
        return of if number == 0 else ("+", of, number) if number > 0 else ("-", of, -number)
    if sign == "*":
        (a, factor_a), (b, factor_b) = map(_without_factor, terms)
        number = factor_a * factor_b
        of = a if b == 1 else b if a == 1 else (sign, a, b)
        whole = is_node(of) and of[0] == "//" and type(of[2]) is int and number % of[2] == 0
        return _times(of[1], number // of[2]) if whole and trace.has_factor(*of[1:]) else _times(of, number)
    if sign == "//" and type(terms[1]) is int and terms[1]:
        of, number = _without_factor(terms[0])
        if number % terms[1] == 0:
            return _times(of, number // terms[1])
    if sign == "neg":
        of, number = _without_factor(terms[0])
        return _times(of, -number)
    if sign in ("min", "max"):
        (least_a, most_a), (least_b, most_b) = map(trace.bounds, terms)
        if most_a <= least_b or most_b <= least_a:
            return terms[(most_a <= least_b) == (sign == "max")]
    return (sign, *terms)


def _times(of: Term, number: int) -> Term:
    """A term times a number."""
    if number == 0:
        return 0
    times = of if abs(number) == 1 else ("*", of, abs(number))
    return times if number > 0 else ("neg", times)


def _without_factor(of: Term) -> tuple[Term, int]:
    """A term as another one, 1 for none, and a number that it is multiplied by."""
    if not is_node(of):
        return 1, of
    if of[0] == "neg":
        node, number = _without_factor(of[1])
        return node, -number
    return of[1:] if of[0] == "*" and type(of[2]) is int else (of, 1)


def _without_number(of: Term) -> tuple[Term, int]:
    """A term as another one, 0 for none, and a number that is added to it."""
    if not is_node(of):
        return 0, of
    if of[0] in ("+", "-") and type(of[2]) is int:
        return of[1], of[2] if of[0] == "+" else -of[2]
    return of, 0
