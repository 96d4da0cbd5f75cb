"""The choice of a kernel and of a division of its work: the candidate that takes the least time.

`cupy_mla.forced` forces a kernel or a division, the environment variable CUPY_MLA_KERNELS a kernel. With
CUPY_MLA_EXPLAIN=1 each choice is printed with its rivals when it is first made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import starmap
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple

from ... import private
from ...checks.options import shown
from . import times
from .divide import Division, parse, text_of
from .kernels import (
    bf16_cluster_sm90,
    bf16_few_heads_sm90,
    bf16_grouped_sm90,
    bf16_shares_sm90,
    bf16_sm90,
    dense_cluster_sm90,
    dense_fp8_sm90,
    dense_portable,
    dense_portable_99kb,
    dense_sm90,
    dense_whole_sm90,
    fp8_short_sm90,
    fp8_sm90,
    portable,
    portable_99kb,
)
from .problem import INVARIANT_QUERIES, DenseProblem, Problem

VARIABLE, EXPLAIN = "CUPY_MLA_KERNELS", "CUPY_MLA_EXPLAIN"
MAX_CHOICES = 4096  # so many are remembered
KERNELS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        bf16_grouped_sm90, fp8_sm90, fp8_short_sm90, bf16_few_heads_sm90, bf16_shares_sm90, bf16_cluster_sm90,
        bf16_sm90, portable, portable_99kb,
    )
}  # fmt: skip
# The kernels of dense attention, for a `DenseProblem`.
DENSE_KERNELS: dict[str, ModuleType] = {
    "dense_cluster_sm90": dense_cluster_sm90, "dense_whole_sm90": dense_whole_sm90, "dense_sm90": dense_sm90,
    "dense_fp8_sm90": dense_fp8_sm90, "portable": dense_portable, "portable_99kb": dense_portable_99kb,
}  # fmt: skip
PORTABLE = ("portable", "portable_99kb")
EVERY_NAME = tuple(dict.fromkeys((*KERNELS, *DENSE_KERNELS)))

asked_kernel: Callable[[], str | None] = private.environment_reader(VARIABLE)
explained: Callable[[], str | None] = private.environment_reader(EXPLAIN)


# The fields of a `Choice`. Plain tuples cost less host time, and most rivals lose.
Rival = tuple[str, Division, float]
TIME: Callable[[Any], float] = itemgetter(2)


class Choice(NamedTuple):
    """The name of a kernel, a division, and the microseconds that the call should take with them."""

    kernel: str
    division: Division
    us: float

    def __str__(self) -> str:
        return f"{self.kernel} {self.division} {self.us:.1f} us"


@lru_cache(maxsize=MAX_CHOICES)
def choose(problem: Problem) -> Choice:
    """The kernel and division that take the least time.

    A batch-invariant call is chosen for as if it had INVARIANT_QUERIES queries. Of the divisions that give the same
    bits as the chosen one, it gets the fastest for the queries that it has.

    Raises:
        ValueError: the kernel or the division that is forced does not exist, or cannot serve this call.
    """
    rivals = _rivals(problem._replace(queries=INVARIANT_QUERIES) if problem.batch_invariant else problem)
    if not rivals:
        raise ValueError(why_not(problem, KERNELS))
    chosen = Choice(*min(rivals, key=TIME))
    if problem.batch_invariant:
        explain(problem._replace(queries=INVARIANT_QUERIES), chosen, rivals)
        name, kernel = chosen.kernel, KERNELS[chosen.kernel]
        same = getattr(kernel, "same_bits", lambda division: [division])(chosen.division)
        able = [division for division in same if kernel.fits(problem, division)]
        rivals = [(name, way, times.microseconds(problem.gpu, name, kernel.work(problem, way))) for way in able]
        chosen = Choice(*min(rivals, key=TIME))
    explain(problem, chosen, rivals)
    return chosen


_all_chosen: ContextVar[bool] = ContextVar("_all_chosen", default=False)


@contextmanager
def choosing_all() -> Iterator[None]:
    """In a `with` block programs of this thread have the launches of all candidates: for calls whose kernels are listed
    (`calls.operation.listing`), not for calls that run."""
    token = _all_chosen.set(True)
    try:
        yield
    finally:
        _all_chosen.reset(token)


def chosen(problem: Problem) -> list[Choice]:
    """What `choose` finds; within `choosing_all` every candidate, the fastest first."""
    fastest = choose(problem)
    if not _all_chosen.get():
        return [fastest]
    return [fastest, *(rival for rival in starmap(Choice, _rivals(problem)) if rival != fastest)]


def explain(problem: Problem | DenseProblem, chosen: Choice, rivals: list[Rival]) -> None:
    """Print a choice, if CUPY_MLA_EXPLAIN asks for it."""
    if explained() == "1":
        others = "".join(f"\n  {Choice(*rival)}" for rival in sorted(rivals, key=TIME)[1:])
        print(f"cupy_mla: {problem}\n  {chosen} is chosen{others}", file=sys.stderr)


def _rivals(problem: Problem) -> list[Rival]:
    """All candidates of all kernels that serve the problem, with their times."""
    microseconds, gpu = times.microseconds, problem.gpu
    rivals: list[Rival] = [
        (name, division, microseconds(gpu, name, kernel.work(problem, division)))
        for name, kernel in _serving(problem.kind)
        for division in offered(problem, kernel)
    ]
    exceptions = times.exceptions(problem)
    if exceptions:
        rivals = [(name, way, us * exceptions.get(f"{name} {way}", 1.0)) for name, way, us in rivals]
    return rivals


@lru_cache(maxsize=1024)
def _serving(kind: tuple[Any, ...]) -> list[tuple[str, ModuleType]]:
    """Names and modules of the kernels that serve problems of a kind (`Problem.kind`)."""
    one = Problem(*kind[:4], 1, 1, 0, *kind[4:])  # `serves` looks at no number of queries or entries
    return [(name, kernel) for name, kernel in KERNELS.items() if one.kernel in ("", name) and kernel.serves(one)]


def offered(problem: Problem | DenseProblem, kernel: ModuleType) -> Iterable[Division]:
    """The candidates of a kernel. Where a division is forced, those of its kind, with the fields that it gives."""
    if not problem.division:
        found: Iterable[Division] = kernel.candidates(problem)
        return found
    kind, fields = parse(problem.division)
    made = {division._replace(**fields): None for division in kernel.candidates(problem) if isinstance(division, kind)}
    return [division for division in made if kernel.fits(problem, division)]


def require_known() -> None:
    """Check the kernel that the environment asks for, also where NumPy serves a call and no kernel is chosen.

    Raises:
        ValueError: no kernel has that name.
    """
    if not forced.names[0]:
        _require_name(VARIABLE, asked_kernel())


def _require_name(by: str, name: str | None) -> None:
    if name and name not in EVERY_NAME:
        raise ValueError(f"{by} must be one of {', '.join(EVERY_NAME)}, got {name!r}")


def why_not(problem: Problem | DenseProblem, kernels: dict[str, ModuleType]) -> str:
    """The message of an error: the kernel or the division that is forced cannot serve a call.

    Raises:
        ValueError: no kernel has the name that is forced.
    """
    free = problem._replace(kernel="", division="")
    able = [
        name
        for name, kernel in kernels.items()
        for asked in [free._replace(kernel=name)]
        if kernel.serves(asked) and any(kernel.candidates(asked))
    ]
    if problem.kernel not in ("", *able):
        by = "kernel" if forced.names[0] or problem.kernel != asked_kernel() else VARIABLE
        _require_name(by, problem.kernel)
        return f"{by} is {problem.kernel}, which cannot serve this call: {free}; {', '.join(able)} can"
    found = dict.fromkeys(
        f"{name} {division}"
        for name in able
        if problem.kernel in ("", name)
        for division in kernels[name].candidates(problem._replace(kernel=name))
    )
    return f"division is {problem.division}, which does not fit this call: {free}; {', '.join(found)} do, among others"


class forced:
    """Name the attention kernel or the division of its work: from now on, or for a `with` block::

        cupy_mla.forced("fp8_sm90", "clusters(splits=4, cluster=4)")
        with cupy_mla.forced(division="shares"):
            ...

    For tests and experiments: every call of attention of every thread is then served so, or is a ValueError. The
    environment variable CUPY_MLA_KERNELS names a kernel where this does not.

    Args:
        kernel: its name, e.g. "fp8_sm90"; None: the fastest.
        division: a value of `cupy_mla.cuda.attention.divide`, or its text, e.g. "clusters(splits=4, cluster=4)",
            "teams"; fields that are not given are chosen. None: the fastest.

    Raises:
        TypeError: `division` is neither a division nor text.
        ValueError: no kernel has that name, or the text names no division.
    """

    names: tuple[str, str] = ("", "")  # kernel and division

    def __init__(self, kernel: str | None = None, division: Division | str | None = None) -> None:
        _require_name("kernel", kernel)
        if not isinstance(division, (str, Division, type(None))):
            raise TypeError(f"division: expected a division or its text, got {shown(division)}")
        text = division if isinstance(division, str) else "" if division is None else text_of(division, whole=True)
        if text:
            parse(text)
        self._before = forced.names
        forced.names = kernel or "", text

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        forced.names = self._before


def asked() -> tuple[str, str]:
    """The kernel and the division that are forced, each "" for none. Part of a call's key."""
    kernel, division = forced.names
    return kernel or asked_kernel() or "", division
