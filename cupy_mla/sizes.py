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


class Trace:
    """What a traced call depends on.

    Attributes:
        guards: conditions, as terms, in the order in which they were met.
        once: the call depended on more than a trace can tell; it holds for no other call.
    """

    def __init__(self) -> None:
        self.guards: dict[Node, None] = {}
        self.once = False
        self._bounds: dict[Node, Bounds] = {}
        self._multiples: dict[Node, int] = {}

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
        a, b = self._undivided(a, b)
        b, a = self._undivided(b, a)
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
        """The number that the guards leave for a term; the term where they leave several."""
        least, most = self.bounds(of) if is_node(of) else (0, 1)
        return least if least == most else of

    def _decided(self, sign: str, a: Term, b: Term) -> bool:
        (least_a, most_a), (least_b, most_b) = self.bounds(a), self.bounds(b)
        if sign == "==":
            return most_a < least_b or most_b < least_a or least_a == most_a == least_b == most_b
        less = sign == "<"
        return most_a <= least_b - less or most_b <= least_a - (not less)

    def _learn(self, sign: str, a: Term, b: Term, holds: bool) -> None:
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
        if type(other) is int and factor(self.node) % other == 0:
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


def looked_up(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of numbers that returns a tuple, so that a trace holds for calls where it returns other numbers.

    A form calls the function again with its own call's numbers. Numbers in the result are sizes; the other entries
    become guards.
    """
    trace = next((a.trace for a in arguments if isinstance(a, Size)), None)
    result = function(*map(number, arguments))
    if trace is None:
        return result
    node = ("call", function, *map(term, arguments))
    entries = []
    for i, value in enumerate(result):
        entry = ("get", node, i)
        if type(value) in (int, float):
            entries.append(Size(trace, value, entry))
        else:
            trace.guard(("==", entry, value), True)
            entries.append(value)
    return type(result)(*entries) if hasattr(result, "_fields") else tuple(entries)


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
        of, other = terms if is_node(terms[0]) else reversed(terms)
        whole = of[0] == "//" and type(other) is int and type(of[2]) is int and other % of[2] == 0
        if whole and trace.has_factor(*of[1:]):
            return of[1] if other == of[2] else ("*", of[1], other // of[2])
    return (sign, *terms)


def _without_number(of: Term) -> tuple[Term, int]:
    """A term as another one, 0 for none, and a number that is added to it."""
    if not is_node(of):
        return 0, of
    if of[0] in ("+", "-") and type(of[2]) is int:
        return of[1], of[2] if of[0] == "+" else -of[2]
    return of, 0
