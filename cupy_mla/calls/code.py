"""Writes Python functions that compute symbolic sizes (`cupy_mla.sizes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any

from ..sizes import TEXT, Node, Term, is_node


class Code:
    """A Python function under construction: its lines, and a name for every object that they use.

    Objects are named in the text, and a text is compiled once, so functions that differ only in objects share code.

    Args:
        roots: terms that will be written. What occurs in them more than once is computed once.
    """

    def __init__(self, roots: Iterable[Term] = ()) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.read: set[str] = set()  # what `variable` read
        self._variables: dict[Node, str] = {}  # those that are known at this place
        self._count = 0  # of all variables
        self._shared = _shared(roots)
        self._margin = ""

    def name(self, value: Any) -> str:
        """A name for an object."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def function(self, name: str, parameters: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
        """A function of these lines, which knows the named objects."""
        exec(_code_of("\n    ".join([f"def {name}({', '.join(parameters)}):", *lines])), self.names)
        return self.names[name]

    def line(self, text: str, at: int | None = None) -> None:
        """Add a line, as the last one or at a place."""
        self.lines.insert(len(self.lines) if at is None else at, self._margin + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Lines under a line that ends in a colon; what they compute is known to them alone."""
        self.line(head)
        before = self._margin, self._variables
        self._margin, self._variables = f"{self._margin}    ", dict(self._variables)
        yield
        self._margin, self._variables = before

    def variable(self, of: Term) -> str:
        """A term as a name or a number, after a line that computes it where it was not computed before."""
        if type(of) is int and of >= 0:
            return str(of)
        if not is_node(of):
            return self.name(of)
        if of[0] == "read":
            self.read.add(of[1])
            return of[1]
        known = self._variables.get(of)
        if known is None:
            text = self._computed(of)
            known, self._count = f"v{self._count}", self._count + 1
            self._variables[of] = known
            self.line(f"{known} = {text}")
        return known

    def expression(self, of: Term) -> str:
        """A term as an expression, after lines that compute what occurs elsewhere as well."""
        if not is_node(of) or of[0] == "read" or of in self._shared:
            return self.variable(of)
        text = self._computed(of)
        return f"({text})" if of[0] in TEXT else text

    def condition(self, guard: Node) -> str:
        """A guard as an expression."""
        if guard[0] == "not":
            return f"not {self.condition(guard[1])}"
        return f"({self._computed(guard)})"

    def _computed(self, of: Node) -> str:
        if of[0] == "call":
            return f"{self.name(of[1])}({', '.join(map(self.expression, of[2:]))})"
        operands = list(map(self.expression, _operands(of)))
        if of[0] == "tuple":
            return f"({' '.join(f'{o},' for o in operands)})"
        return f"{operands[0]}[{of[2]}]" if of[0] == "get" else TEXT[of[0]].format(*operands)


def _operands(of: Node) -> Sequence[Term]:
    """The terms that a term is computed from."""
    if of[0] == "read":
        return ()
    return of[1:2] if of[0] == "get" else of[2:] if of[0] == "call" else of[1:]


def _shared(roots: Iterable[Term]) -> set[Node]:
    """The terms that occur more than once in some terms."""
    seen: set[Node] = set()
    shared: set[Node] = set()
    left = list(roots)
    while left:
        of = left.pop()
        if not is_node(of):
            continue
        if of in seen:
            shared.add(of)
        else:
            seen.add(of)
            left += _operands(of)
    return shared


@lru_cache(maxsize=1024)
def _code_of(text: str) -> CodeType:
    return compile(text, "<compiled call>", "exec")
