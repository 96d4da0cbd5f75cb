"""Writes Python functions of straight lines that compute symbolic sizes (`cupy_mla.sizes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from ..sizes import TEXT, Node, Term, is_node


class Code:
    """A Python function under construction: straight lines, and a name for every object that they use.

    Objects are named in the text, and a text is compiled once, so functions that differ only in objects share code.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.read: set[str] = set()  # what `variable` read
        self._variables: dict[Node, str] = {}

    def name(self, value: Any) -> str:
        """A name for an object."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def function(self, name: str, parameters: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
        """A function of these lines, which knows the named objects."""
        exec(_code_of("\n    ".join([f"def {name}({', '.join(parameters)}):", *lines])), self.names)
        return self.names[name]

    def line(self, text: str) -> None:
        """Add a line."""
        self.lines.append(text)

    def variable(self, of: Term) -> str:
        """The name of a term's value, after a line that computes it where it was not computed before."""
        if not is_node(of):
            return self.name(of)
        if of[0] == "read":
            self.read.add(of[1])
            return of[1]
        known = self._variables.get(of)
        if known is None:
            text = self._expression(of)
            known = self._variables[of] = f"v{len(self._variables)}"
            self.line(f"{known} = {text}")
        return known

    def condition(self, guard: Node) -> str:
        """A guard as an expression."""
        if guard[0] == "not":
            return f"not {self.condition(guard[1])}"
        return f"({self._expression(guard)})"

    def _expression(self, of: Node) -> str:
        if of[0] == "call":
            return f"{self.name(of[1])}({', '.join(map(self.variable, of[2:]))})"
        if of[0] == "get":
            return f"{self.variable(of[1])}[{of[2]}]"
        return TEXT[of[0]].format(*map(self._operand, of[1:]))

    def _operand(self, of: Term) -> str:
        if type(of) is int and of >= 0:
            return str(of)
        if is_node(of) and of not in self._variables and _is_short(of):
            return self._expression(of) if of[0] == "get" else f"({self._expression(of)})"  # cheaper than a variable
        return self.variable(of)


def _is_short(of: Node, depth: int = 2) -> bool:
    """Whether a term is so little arithmetic that a variable for it would cost more."""
    if of[0] == "get":
        return True
    return (
        depth > 0
        and of[0] in ("+", "-", "*", "%")
        and all(not is_node(o) or o[0] == "read" or _is_short(o, depth - 1) for o in of[1:])
    )


@lru_cache(maxsize=1024)
def _code_of(text: str) -> CodeType:
    return compile(text, "<compiled call>", "exec")
