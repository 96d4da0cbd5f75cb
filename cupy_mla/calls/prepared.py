"""Prepared calls: an operation's body runs once for a key, and its program is run again with new addresses.

The body gets descriptions of its arrays whose addresses are `Pointer`s. Their place is a `CallPlace`: it describes
results as buffers and keeps the launcher's program, so nothing is allocated before all checks are done. `Prepared`
makes of the program what a run needs: the constant bytes of parameter structs, and which addresses go between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..arrays import HOST, Array, aligned_up, arrays_in
from ..bridges import Place, dense_strides, describe, place_at, require_apart
from ..cuda import driver
from ..cuda.program import Buffer, Clear, Nonce, Plan, PlanField, Pointer, Program, Step
from ..cuda.structs import picker
from .graph import LaunchGraph, launch_graph
from .key import Partition, ReadArrays, starts_of
from .plan import PlanMemory
from .scratch import ScratchMemory, scratch_memory

RUN_FIELDS = frozenset((Pointer, Nonce, PlanField))  # the types of fields that differ from run to run

_OBJ, _PLACE, _READ, _WRITTEN = map(attrgetter, ("obj", "place", "read", "written"))
_WANTS_GRADIENT = attrgetter("wants_gradient")
_ON_GPU, _NUMBER = map(attrgetter, ("on_gpu", "number"))


class CallPlace(Place):
    """Where the arrays of a call on a GPU live.

    Attributes:
        program: what the launcher returned.
        arrays: how many arrays the caller gave.
        results: the arrays that the call allocates and may return.
        given: all arrays that the launcher got.
    """

    program: Program
    arrays: int
    results: list[Array]
    given: list[Array]

    @classmethod
    def at(cls, place: Place, arrays: int) -> CallPlace:
        """The place of a call whose arrays live at `place`."""
        made = tuple.__new__(cls, place)
        made.program, made.arrays, made.results, made.given = (), arrays, [], []
        return made

    def new(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """The description of a result, which each run allocates."""
        pointer: Any = Pointer.to(name, self.arrays + len(self.results))
        array = Array(name, pointer.buffer, self, dtype, shape, dense_strides(shape), pointer)
        self.results.append(array)
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        raise TypeError("a call on a GPU has results by `new`, and its launcher scratch memory by `Buffer`")

    def call(self, launcher: Callable[..., Program], reference: Callable[..., None], *arguments: Any) -> None:
        """Keep the program of a launcher.

        Raises:
            RuntimeError: a tensor wants a gradient, which no launcher can give.
        """
        self.given = arrays_in(arguments)
        if True in map(_WANTS_GRADIENT, self.given):
            for a in self.given:
                a.require_no_gradient()
        self.program = launcher(driver.gpu(self.device), *arguments)


class Body(NamedTuple):
    """What an operation's body did for a call on a GPU.

    Attributes:
        place: the call's place, which has the program.
        arrays: descriptions of the caller's arrays.
        addresses: theirs.
        types: of all arguments.
        result: what the body returned: an argument, a result, a constant, or a tuple of these.
    """

    place: CallPlace
    arrays: Sequence[Array]
    addresses: list[int]
    types: tuple[Any, ...]
    result: Any


def run_body(
    function: Callable[..., Any],
    names: Sequence[str],
    values: Sequence[Any],
    keywords: int,
    partition: Partition,
    read: ReadArrays | None,
) -> Body:
    """Run an operation's body for a call with an array on a GPU.

    Args:
        function: the operation's body.
        names: of the arguments.
        values: all arguments.
        keywords: how many of them, the last ones, come by name.
        partition: of the arguments.
        read: what was read of the call's arrays when its key was made; None: there is no key.
    """
    names_of_arrays, objs, arrays = partition.arrays_of(names), partition.arrays_of(values), None
    if read is not None and partition.library is not None:
        facts, addresses, starts = read
        device = partition.library.device_of(objs[0])
        if device not in (None, HOST):
            place = CallPlace.at(place_at(partition.library.name, device), len(objs))
            pointers = map(Pointer.to, names_of_arrays, count(), starts)
            arrays = partition.library.described(names_of_arrays, objs, facts, place, pointers)
    if arrays is None:  # described one by one, they raise the error that names the argument
        arrays = [*map(describe, names_of_arrays, objs)]
        addresses = [array.ptr for array in arrays]
        on_gpu = next(filter(_ON_GPU, map(_PLACE, arrays)))
        place = CallPlace.at(on_gpu, len(arrays))
        pointers = map(Pointer.to, names_of_arrays, count(), starts_of(addresses))
        for array, pointer in zip(arrays, pointers, strict=True):
            array.ptr = pointer  # type: ignore[assignment]
            array.place = place if array.place is on_gpu else array.place
    values = partition.with_others((*values, *arrays))
    by_place = len(values) - keywords
    result = function(*values[:by_place], **dict(zip(names[by_place:], values[by_place:], strict=True)))
    return Body(place, arrays, addresses, partition.types, result)


# The bytes of an array: its number; from its address to its first byte, and to the byte behind its last; its name.
_Span = tuple[int, int, int, str]


def _overlap_checks(place: CallPlace) -> list[tuple[_Span, int, list[_Span]]]:
    """For every array of the caller that is written: its bytes; the number of the input that it may be, or -1; and the
    arrays that it must not overlap."""
    given = [a for a in place.given if a not in place.results] if place.results else place.given
    others: dict[Array, _Span] = {a: (a.ptr.number, *a.extent(), a.name) for a in given}  # type: ignore[attr-defined]
    found = []
    for a in filter(_WRITTEN, [*others]):
        span = others.pop(a)
        alike = a.may_be is not None and (a.shape, a.strides) == (a.may_be.shape, a.may_be.strides)
        found.append((span, a.may_be.ptr.number if alike else -1, [*others.values()]))  # type: ignore[union-attr]
    return found


class _Launch(NamedTuple):
    """A launch. `pick` takes its items from those of a run, `pack` makes the bytes of its parameters of them."""

    submit: driver.Submit
    x: int
    y: int
    z: int
    cluster: int
    pack: Callable[..., bytes]
    pick: Callable[[Sequence[Any]], Sequence[Any]]


class _Clear(NamedTuple):
    """Memory to be cleared. `item` is the number of its address among the items of a run."""

    item: int
    nbytes: int


class _Together(NamedTuple):
    """Neighbouring launches that one CUDA graph makes."""

    graph: LaunchGraph
    grids: tuple[tuple[int, int, int], ...]
    launches: list[Any]


def _with_graphs(program: Program, made: Sequence[Any], device: int) -> list[Any]:
    """The steps of a program, with neighbouring launches joined that one CUDA graph can make.

    Args:
        made: a `_Launch` or `_Clear` for each step.
    """
    joined: list[Any] = []
    for joins, steps in groupby(zip(program, made, strict=True), lambda pair: _joins_graphs(pair[0], device)):
        neighbours: list[Any] = list(steps)
        launches = [launch for _, launch in neighbours]
        if joins and len(launches) > 1:
            graph = launch_graph(tuple(step.kernel for step, _ in neighbours), device)
            joined.append(_Together(graph, tuple(step.grid for step, _ in neighbours), launches))
        else:
            joined += launches
    return joined


class Prepared:
    """The program of a body, ready to run. It holds no array of the call that it was made of.

    A run makes a list of *items*, from which parameters are packed:

    - the addresses of the arrays, of the results, and of the scratch memory;
    - the address of a plan, and whether it is filled;
    - in the order in which parameters need them: constant bytes of parameters, nonces, and addresses that lie within
      the arrays, results and scratch memory.

    Attributes:
        device: the GPU.
        repeatable: whether it can make other calls of this key. It cannot if the body looked at the values in an array,
            or if one array was given under two names, where another call may have two arrays.
    """

    _plans: PlanMemory | None = None
    _plan_key: Any = None
    _scratch: ScratchMemory | None = None
    _scratch_bytes = 0

    def __init__(self, body: Body) -> None:
        place, arrays, _, types, result = body
        held = [*map(id, map(_OBJ, (*arrays, *place.results)))]  # what the call may return beside constants
        self.repeatable: bool = len({*held}) == len(held) and True not in map(_READ, arrays)
        self.device: int = place.device
        self._library = place.library
        self._device = self._library.device_reader()
        self._stream = self._library.stream_reader(self.device)
        # Whether a stream is being captured. That is asked only for programs to which it makes a difference.
        self._is_capturing: Callable[[int], bool] = _never
        self._overlap_checks = _overlap_checks(place) if True in map(_WRITTEN, place.given) else ()
        self._make_results = self._library.result_maker(place.results) if place.results else None
        self._number_steps(place.program, len(held))
        if self._plan_key is not None:
            self._plan_argument = types.index(Plan)
        picked: list[int] = []
        self._constants: list[Any] = []  # that the call returns
        for leaf in result if type(result) is tuple else (result,):
            if id(leaf) in held:
                picked.append(held.index(id(leaf)))
            else:
                picked.append(len(held) + len(self._constants))
                self._constants.append(leaf)
        # Picks what the call returns from its arrays, its results and the constants.
        self._pick_result = picker(picked) if type(result) is tuple else itemgetter(*picked)
        place.given, place.results = [], []  # they refer to the place: a cycle would be left to the garbage collector

    def _number_steps(self, program: Program, scratch: int) -> None:
        """Number the items, and make the steps, which take items by their numbers.

        Args:
            scratch: the number of the scratch memory's address.
        """
        self._scratch_number = scratch
        self._scratch_offsets: dict[Buffer, int] = {}  # where buffers start in the scratch memory
        self._later_items: list[Any] = []  # the items behind the plan's: constants, and 0 for those that a run computes
        self._nonces: list[int] = []  # numbers of items
        # Numbers of the items that are addresses within memory, by the number of its start and the bytes from there.
        self._derived: dict[tuple[int, int], int] = {}
        packers: dict[int, tuple[Any, Any]] = {}  # `pack` and `pick` of each struct, by its `id`
        made: list[Any] = []
        launches = 0
        for step in program:
            if isinstance(step, Clear):
                made.append(_Clear(self._number_of(step.pointer), step.nbytes))
                continue
            kernel, grid, params, cluster = step
            packing = packers.get(id(params))
            if packing is None:  # launches may share a struct
                packer, fields, between = params.of.split(params.values, RUN_FIELDS)
                picked = [0] * (len(fields) + len(between))
                picked[::2] = self._add_items(between)
                numbers = [*map(_NUMBER, fields)]
                while None in numbers:
                    i = numbers.index(None)
                    numbers[i] = self._number_of(fields[i])
                picked[1::2] = numbers
                packing = packers[id(params)] = packer.pack, picker(picked)
            made.append(_Launch(kernel.submitter(self.device), *grid, cluster, *packing))
            launches += 1
        self._steps: list[Any] = made
        if launches > 1:
            self._steps = _with_graphs(program, made, self.device)
            if _Together in map(type, self._steps):
                self._is_capturing = driver.runtime().streamIsCapturing

    def _add_items(self, items: Sequence[Any]) -> range:
        """Add items behind all others; their numbers."""
        start = self._scratch_number + 3 + len(self._later_items)
        self._later_items += items
        return range(start, start + len(items))

    def _number_of(self, field: Any) -> int:
        """The number of the item that goes into a field of the types `RUN_FIELDS`, except the start of an array."""
        if type(field) is Nonce:
            self._nonces += self._add_items((0,))
            return self._nonces[-1]
        if type(field) is PlanField:
            if self._plans is None:
                self._plans, self._plan_key = PlanMemory(self._library, self.device), field.key
                self._is_capturing = driver.runtime().streamIsCapturing
            return self._scratch_number + 1 + (field.name == "filled")
        buffer, offset = field.buffer, field.offset
        start = buffer.number
        if start is None:
            start = self._scratch_number
            if buffer not in self._scratch_offsets:
                self._scratch = scratch_memory(self._library, self.device)
                self._is_capturing = driver.runtime().streamIsCapturing
                self._scratch_offsets[buffer] = aligned_up(self._scratch_bytes)
                self._scratch_bytes = self._scratch_offsets[buffer] + buffer.nbytes
            offset += self._scratch_offsets[buffer]
        if not offset:
            return start
        if (start, offset) not in self._derived:
            (self._derived[start, offset],) = self._add_items((0,))
        return self._derived[start, offset]

    def run(self, arrays: Sequence[Any], addresses: Sequence[int], values: Sequence[Any]) -> Any:
        """Make a call.

        Args:
            arrays: the call's arrays.
            addresses: of the arrays.
            values: all arguments.

        Returns:
            what the operation returns.

        Raises:
            ValueError: an array that is written overlaps another one.
        """
        if not driver.THREAD.current_device() == self._device() == self.device:
            with self._library.to_device(self.device):
                return self.run(arrays, addresses, values)
        for (written, start, end, name), may_be, others in self._overlap_checks:
            start += (at := addresses[written])
            end += at
            for other, other_start, other_end, other_name in others:
                address = addresses[other]
                if start < address + other_end and address + other_start < end and (other != may_be or address != at):
                    require_apart(name, arrays[written], other_name, arrays[other], other == may_be)
        items = [*addresses]
        results: Sequence[Any] = ()
        if self._make_results is not None:
            results, starts = self._make_results()
            items += starts
        stream = self._stream()
        capturing = self._is_capturing(stream)
        block, start, address, filled, made = None, 0, 0, 0, None
        try:
            if self._scratch is not None:
                block = self._scratch.take(self._scratch_bytes, stream, capturing)
                start = block[0]
            if self._plans is not None:
                address, filled, made = self._plans.take(values[self._plan_argument], self._plan_key, stream, capturing)
            items += start, address, filled, *self._later_items
            for number in self._nonces:
                items[number] = Nonce.next()
            for (base, offset), number in self._derived.items():
                items[number] = items[base] + offset
            for step in self._steps:
                if type(step) is _Launch:
                    submit, x, y, z, cluster, pack, pick = step
                    submit(stream, x, y, z, pack(*pick(items)), cluster)
                elif type(step) is _Clear:
                    driver.clear(items[step.item], step.nbytes, stream)
                elif type(step) is _Together:
                    graph, grids, launches = step
                    given = tuple([launch.pack(*launch.pick(items)) for launch in launches])
                    if capturing or not graph(stream, grids, given):
                        for (submit, x, y, z, cluster, _, _), params in zip(launches, given, strict=True):
                            submit(stream, x, y, z, params, cluster)
            if self._plans is not None:
                values[self._plan_argument].made = made
        finally:
            if block is not None:
                block[1].append(block)
        return self._pick_result((*arrays, *results, *self._constants))


def _never(stream: int) -> bool:
    return False


def _joins_graphs(step: Step, device: int) -> bool:
    """Whether one of our CUDA graphs may have a step: only launches without attributes."""
    return not isinstance(step, Clear) and step.cluster == 1 and not driver.overlaps(step.kernel, device)
