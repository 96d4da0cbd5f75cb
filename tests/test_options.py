"""Command-line options: each says what it is, in the package, the programs beside it, and those of the tests."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupy_mla.__main__ import parser

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cupy_mla", "examples", "benchmarks", "docs", "tests")
PROGRAMS = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
ADDING = ("add_argument", "add_parser", "addoption")


def without_help(source: str) -> Iterator[str]:
    """The calls that add an option or a command without a text."""
    if not any(word in source for word in ADDING):  # to parse all takes 3 s
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDING:
            texts = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            if not texts or (isinstance(texts[0], ast.Constant) and not texts[0].value):
                yield ast.unparse(node)


def test_every_option_says_what_it_is() -> None:
    found = {str(path.relative_to(ROOT)): [*without_help(path.read_text())] for path in PROGRAMS}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize("call", ["p.add_argument('--k')", "p.add_argument('--k', help='')", "p.add_parser('k')"])
def test_options_without_a_text_are_found(call: str) -> None:
    assert [*without_help(call)] == [call]


def every_action(of: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from every_action(command)
        else:
            yield f"{of.prog} {' '.join(action.option_strings)}", action


def test_options_that_have_a_default_say_it() -> None:
    actions = dict(every_action(parser()))
    assert "python -m cupy_mla warmup --topk" in actions
    silent = {
        name for name, action in actions.items()
        if not action.help or (type(action.default) in (int, list) and "(default: " not in action.help)
    }  # fmt: skip
    assert silent == set()
