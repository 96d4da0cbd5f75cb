"""Checks that an engine's Python sources have the names and signatures on which an adapter relies. The sources are
parsed, never imported.

A need is one such name, with its parameters if they matter: `Class.method(self, q, layer)`, `Class.attribute`,
`function(x)`, `NAME`. The parameters are the first ones of a function, in order, or all fields of a dataclass that have
no default. An attribute may be a class variable, a field, or an attribute that a method assigns to `self`. A name may
be defined in the module or imported into it.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path

# Module, relative to the engine's package: needs.
Needs = dict[str, tuple[str, ...]]
# Dotted name of a definition: a function's parameters (list), a dataclass's fields without default (tuple), or None.
Found = dict[str, "list[str] | tuple[str, ...] | None"]


def sources(package: str) -> Path:
    """The folder of an installed package. The package is not imported, but its parent packages are.

    Raises:
        RuntimeError: the package is not installed.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # a parent package is not installed
        spec = None
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{package} is not installed")
    return Path(spec.origin).parent


def missing(package: Path, needs: Needs) -> list[str]:
    """The needs that a package does not meet, each with its module.

    Args:
        package: folder of the package, or a `zipfile.Path` into a wheel.
    """
    lacking = []
    for module, names in needs.items():
        source = _source(package, module)
        if source is None:
            lacking.append(f"module {module}")
            continue
        found = definitions(source)
        lacking += [f"{module}: {name}" for name in names if not _met(name, found)]
    return lacking


def meets(package: Path, needs: Needs, what: str, logger: logging.Logger) -> bool:
    """Whether a package meets all needs. If not, a warning names what is missing and says that `what` is left alone."""
    lacking = missing(package, needs)
    if lacking:
        logger.warning("cupy_mla leaves this %s alone. Missing: %s", what, "; ".join(lacking))
    return not lacking


def definitions(source: str) -> Found:
    """All names that a module's source defines, those in its classes included."""
    found: Found = {}
    _collect(ast.parse(source).body, "", found)
    return found


def _source(package: Path, module: str) -> str | None:
    path = package.joinpath(*module.split("."))
    for file in (path.parent / f"{path.name}.py", path / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


def _met(need: str, found: Found) -> bool:
    name, parenthesis, rest = need.partition("(")
    if name not in found:
        return False
    if not parenthesis:
        return True
    wanted = [parameter.strip() for parameter in rest.rstrip(")").split(",") if parameter.strip()]
    parameters = found[name]
    if isinstance(parameters, tuple):
        return list(parameters) == wanted
    return parameters is not None and parameters[: len(wanted)] == wanted


def _collect(body: list[ast.stmt], scope: str, found: Found) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            found[scope + node.name] = [
                argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
            if scope:
                _collect_self(node, scope, found)
        elif isinstance(node, ast.ClassDef):
            found[scope + node.name] = _required_fields(node)
            _collect(node.body, f"{scope}{node.name}.", found)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                found[scope + name.id] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[scope + (alias.asname or alias.name)] = None
        else:  # branches and the like
            for field in ("body", "orelse", "finalbody"):
                _collect(getattr(node, field, []), scope, found)
            for handler in getattr(node, "handlers", []):
                _collect(handler.body, scope, found)


def _required_fields(node: ast.ClassDef) -> tuple[str, ...] | None:
    """A dataclass's fields without default; None: another class."""
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return None
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and n.value is None]
    return tuple(n.target.id for n in fields if isinstance(n.target, ast.Name))


def _collect_self(method: ast.FunctionDef | ast.AsyncFunctionDef, scope: str, found: Found) -> None:
    """Attributes that a method assigns to `self`."""
    for node in ast.walk(method):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            found.setdefault(scope + node.attr, None)
