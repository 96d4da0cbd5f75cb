"""Traced calls: an operation's body run over symbolic sizes, and its program run for the call that was traced.

The body of an operation runs once for a signature, over descriptions with symbolic sizes (`cupy_mla.sizes`) in a
`TracedPlace`. There it allocates nothing and launches nothing: results become slots, and the launcher's `Program` is
kept. `run` runs the program with this call's numbers; `form.py` compiles it for later calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Array, arrays_in
from ..bridges import Place, dense_strides, describe, library_of, must_be_apart, require_apart
from ..cuda import driver
from ..cuda.program import Clear, Launch, Nonce, Plan, PlanField, Pointer, Program, Slot, Step
from ..dtypes import UINT8
from ..sizes import Trace, number

# --- tracing --------------------------------------------------------------------------------------------------


class TracedArray(Array):
    """An array argument of a traced call."""

    __slots__ = ("dense", "trace")
    trace: Trace
    dense: bool

    def __float__(self) -> float:
        """The value, for code that needs a number. It differs from call to call, so the trace holds for no other."""
        self.trace.once = True
        return float(self.obj)


class Apart:
    """Two arguments of a traced call that must not share memory, as the first is written.

    Attributes:
        arguments: their numbers.
        extents: of each, bytes that lie before its address, where strides are negative, and bytes from there on.
        may_be: the first may be the second, whole.
        check: takes two arrays that come for them; an error where they overlap.
    """

    def __init__(self, written: Array, other: Array) -> None:
        pair = (written, other)
        self.arguments: tuple[Any, ...] = tuple(a.ptr.slot.argument for a in pair)  # type: ignore[attr-defined]
        self.extents: tuple[tuple[Any, Any], ...] = tuple(map(_extent, pair))
        self.may_be: bool = written.may_be is other
        names, may_be = (written.name, other.name), self.may_be
        self.check: Callable[[Any, Any], None] = lambda a, b: require_apart(names[0], a, names[1], b, may_be)


def _extent(array: Array) -> tuple[Any, Any]:
    size = array.dtype.itemsize
    if array.dense:
        return 0, math.prod(array.shape) * size
    before: list[tuple[Any, Any]] = []
    behind: list[tuple[Any, Any]] = []
    for n, stride in zip(array.shape, array.strides, strict=True):
        (before if stride < 0 else behind).append((n, stride * size))
    return -_reach(before), _reach(behind) + size


def _reach(axes: list[tuple[Any, Any]]) -> Any:
    return sum(n * stride for n, stride in axes) - sum(stride for _, stride in axes)


class TracedPlace(Place):
    """Where the arrays of a traced call live.

    Attributes:
        program: what the launcher returned.
        results: the arrays that the call allocates and may return.
        apart: arguments that must not share memory.
    """

    program: Program
    results: list[Slot]
    apart: list[Apart]

    @classmethod
    def at(cls, place: Place) -> TracedPlace:
        """The place of a call whose arrays live at `place`."""
        traced = cls(*place)
        traced.program = ()
        traced.results = []
        traced.apart = []
        return traced

    def new(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        slot = Slot(name, shape=shape, dtype=dtype)
        self.results.append(slot)
        return Array(name, slot, self, slot.dtype, slot.shape, dense_strides(slot.shape), slot.ptr)  # type: ignore[arg-type]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        raise TypeError("a traced call has results by `new`, and its launcher scratch memory by `Slot`")

    def call(self, launcher: Callable[..., Program], reference: Callable[..., None], *arguments: Any) -> None:
        """Keep the program of a launcher.

        Raises:
            RuntimeError: a tensor wants a gradient, which no launcher can give.
            ValueError: an array that is written overlaps another one.
        """
        given = [a for a in arrays_in(arguments) if isinstance(a, TracedArray)]
        for a in given:
            a.require_no_gradient()
        for written, other in must_be_apart(given):
            apart = Apart(written, other)
            apart.check(written.obj, other.obj)
            self.apart.append(apart)
        self.program = launcher(driver.gpu(self.device), *arguments)


class TracedCall:
    """One call of an operation, traced.

    Args:
        function: the operation's body.
        names: of its parameters.
        values: what a call has for them, at least one array on a GPU.
        dense: which of the values are arrays without gaps, in C order. Their strides follow from their shapes; that of
            an axis of length 1 may be another one, and does not matter.

    Attributes:
        arrays: which of the values are arrays.
        plan: which of them is a `Plan`; None: none.
        result: what the body returned: arguments, slots, constants, or a tuple of these.
        holds_for_others: whether later calls may run what this one is compiled to.
    """

    def __init__(
        self, function: Callable[..., Any], names: Sequence[str], values: Sequence[Any], dense: Collection[int] = ()
    ) -> None:
        self.trace: Trace = Trace()
        self.values = values
        self.plan: int | None = next((i for i, value in enumerate(values) if isinstance(value, Plan)), None)
        self.arrays: list[int] = [i for i, value in enumerate(values) if library_of(value) is not None]
        described = {i: describe(names[i], values[i]) for i in self.arrays}
        on_gpu = next(array.place for array in described.values() if array.place.on_gpu)
        self.place: TracedPlace = TracedPlace.at(on_gpu)
        arguments = list(values)
        for i, value in enumerate(values):
            if i in described:
                arguments[i] = self._symbolic(i, described[i], i in dense)
            elif type(value) is int:
                arguments[i] = self.trace.read(f"a{i}", value)
            elif is_numbers(value):
                arguments[i] = tuple(self.trace.read(f"a{i}[{k}]", n) for k, n in enumerate(value))
        self.result: Any = function(**dict(zip(names, arguments, strict=True)))
        self.trace.end()
        given = {id(values[i]) for i in self.arrays}
        one_each = len(given) == len(self.arrays)  # one array under two names may be two arrays in a later call
        self.holds_for_others: bool = one_each and not self.trace.once

    def _symbolic(self, i: int, array: Array, dense: bool) -> TracedArray:
        """Argument i, an array, as the body gets it."""
        read, size = self.trace.read, array.dtype.itemsize
        shape = tuple(read(f"n{i}_{k}", n, least=0) for k, n in enumerate(array.shape))
        strides: Sequence[Any]
        if dense:
            strides = dense_strides(shape)  # type: ignore[arg-type]
        elif array.library.strides_in_bytes:
            strides = [read(f"t{i}_{k}", s * size, multiple_of=size) // size for k, s in enumerate(array.strides)]
        else:
            strides = [read(f"t{i}_{k}", s, least=0) for k, s in enumerate(array.strides)]  # torch has no others
        place = self.place if array.place == self.place else array.place
        ptr: Any = Pointer(Slot(array.name, i), 0, read(f"p{i}", array.ptr))
        traced = TracedArray(array.name, array.obj, place, array.dtype, shape, tuple(strides), ptr)  # type: ignore[arg-type]
        traced.trace, traced.dense = self.trace, dense
        return traced

    @cached_property
    def scratch(self) -> list[Slot]:
        """Memory that the program's steps name and the call does not return."""
        named = {id(p.slot): p.slot for step in self.place.program for p in pointers_of(step)}
        results = {id(slot) for slot in self.place.results}
        return [slot for key, slot in named.items() if slot.argument is None and key not in results]

    @property
    def plan_field(self) -> PlanField | None:
        """A field that says where the plan of the program's launches lies."""
        launches = (step for step in self.place.program if isinstance(step, Launch))
        return next((v for launch in launches for v in launch.params.values if isinstance(v, PlanField)), None)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """What the body returned, as a tuple."""
        return self.result if type(self.result) is tuple else (self.result,)

    def argument_of(self, leaf: Any) -> int | None:
        """The number of the argument that a leaf of the result is; None where it is no argument."""
        return next((i for i in self.arrays if self.values[i] is leaf), None)


def is_numbers(value: Any) -> bool:
    """Whether a setting is an integer or a tuple of integers, which differ from call to call as sizes do."""
    return type(value) is int or (type(value) is tuple and all(type(n) is int for n in value))


def pointers_of(step: Step) -> Iterator[Pointer]:
    """The places in memory that a step names."""
    if isinstance(step, Clear):
        yield step.pointer
    else:
        yield from (value for value in step.params.values if isinstance(value, Pointer))


# --- running --------------------------------------------------------------------------------------------------


def run(call: TracedCall) -> Any:
    """Run the program of a traced call for this call."""
    place, library = call.place, call.place.library
    device = place.device
    with library.to_device(device):
        driver.current_device()
        here = Place(*place)
        made = {id(slot): here.new(slot.name, _numbers(slot.shape), slot.dtype) for slot in place.results}
        starts = {key: array.ptr for key, array in made.items()}
        if call.scratch:
            memory = [library.empty(device, (number(slot.nbytes),), UINT8) for slot in call.scratch]
            starts |= {id(s): describe(s.name, m).ptr for s, m in zip(call.scratch, memory, strict=True)}

        def address_of(value: Any) -> Any:
            if isinstance(value, Nonce):
                return value.next()
            if isinstance(value, PlanField):
                return 0  # no plan
            if not isinstance(value, Pointer):
                return number(value)
            start = starts[id(value.slot)] if value.address is None else number(value.address)
            return start + number(value.offset)

        stream = library.stream_reader(device)()
        for step in place.program:
            if isinstance(step, Clear):
                driver.clear(address_of(step.pointer), number(step.nbytes), stream)
            else:
                params = step.params.of.pack([*map(address_of, step.params.values)])
                submit, (x, y, z) = step.kernel.submitter(device), _numbers(step.grid)
                submit(stream, x, y, z, params, number(step.cluster))
    leaves = tuple(made[id(leaf)].obj if id(leaf) in made else _plain(leaf) for leaf in call.leaves)
    return leaves if type(call.result) is tuple else leaves[0]


def _plain(leaf: Any) -> Any:
    return _numbers(leaf) if type(leaf) is tuple else number(leaf)


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(number, sizes))
