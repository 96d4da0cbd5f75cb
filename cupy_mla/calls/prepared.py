"""Prepared calls: an operation's body run once for a key, and its program ready to run again with new addresses.

The body gets descriptions of its arrays whose addresses are `Pointer`s, in a `CallPlace`: there results become slots
and the launcher's program is kept, so that nothing is allocated before all checks are done. `Prepared` is what this
program comes to: the bytes of parameter structs between the fields that differ from run to run, and where those go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, aligned_up, arrays_in
from ..bridges import Place, dense_strides, describe, library_of, must_be_apart, require_apart
from ..cuda import driver
from ..cuda.program import Clear, Launch, Nonce, Plan, PlanField, Pointer, Program, Slot, Step
from .graph import LaunchGraph, launch_graph
from .plan import PlanMemory
from .scratch import scratch_memory

OF_A_RUN = frozenset((Pointer, Nonce, Plan, PlanField))  # the types of fields that differ from run to run


class CallPlace(Place):
    """Where the arrays of a call on a GPU live.

    Attributes:
        program: what the launcher returned.
        results: the arrays that the call allocates and may return.
        apart: arguments that are written, each with another one that must not share its memory.
    """

    program: Program
    results: list[Slot]
    apart: list[tuple[Array, Array]]

    @classmethod
    def at(cls, place: Place) -> CallPlace:
        """The place of a call whose arrays live at `place`."""
        made = tuple.__new__(cls, place)
        made.program, made.results, made.apart = (), [], []
        return made

    def new(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        slot = Slot(name, shape=shape, dtype=dtype)
        self.results.append(slot)
        return Array(name, slot, self, slot.dtype, slot.shape, dense_strides(slot.shape), slot.ptr)  # type: ignore[arg-type]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        raise TypeError("a call on a GPU has results by `new`, and its launcher scratch memory by `Slot`")

    def call(self, launcher: Callable[..., Program], reference: Callable[..., None], *arguments: Any) -> None:
        """Keep the program of a launcher.

        Raises:
            RuntimeError: a tensor wants a gradient, which no launcher can give.
        """
        given, wants_gradient = (
            [a for a in arrays_in(arguments) if type(a.obj) is not Slot],
            self.library.wants_gradient,
        )
        for a in given:
            if wants_gradient(a.obj):
                a.require_no_gradient()
        self.apart = list(must_be_apart(given)) if any([a.written for a in given]) else []
        self.program = launcher(driver.gpu(self.device), *arguments)


def prepare(
    function: Callable[..., Any], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Prepared, list[Any], list[int], bool]:
    """Run an operation's body for a call with an array on a GPU, and prepare its program.

    Args:
        function: the operation's body.
        names: of the arguments.

    Returns:
        what makes the call; the call's arrays and their addresses; and whether it makes the other calls of this key:
        not where the body looked at what an array holds, and not where one array has two names, for which another call
        may have two arrays.
    """
    values = [*args, *kwargs.values()]
    arrays: list[Array] = []
    addresses: list[int] = []
    for i, value in enumerate(values):
        if library_of(value) is not None:
            array = values[i] = describe(names[i], value)
            addresses.append(array.ptr)
            array.ptr = Pointer(Slot(names[i], len(arrays)), 0, array.ptr)  # type: ignore[assignment]
            arrays.append(array)
    on_gpu = next(array.place for array in arrays if array.place.on_gpu)
    place = CallPlace.at(on_gpu)
    for array in arrays:
        if array.place == on_gpu:
            array.place = place
    result = function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    prepared = Prepared(place, arrays, values, result)
    given = [array.obj for array in arrays]
    for_others = len({*map(id, given)}) == len(given) and not any(array.read for array in arrays)
    return prepared, given, addresses, for_others


# An array that one that is written must not share memory with: its number; bytes from its address to its first byte and
# to that behind its last; whether the one that is written is this one, whole, where it has its address, as it may be;
# whether it may be this one; both names.
_Other = tuple[int, int, int, bool, bool, tuple[str, str]]


def _apart(pairs: Sequence[tuple[Array, Array]]) -> list[tuple[int, int, int, list[_Other]]]:
    """Of every array that is written its number, its first byte and that behind its last, and the others.

    Args:
        pairs: arrays that are written, each with another one.
    """
    found: dict[int, tuple[int, int, int, list[_Other]]] = {}
    for written, other in pairs:
        number: int = written.ptr.slot.argument  # type: ignore[attr-defined]
        if number not in found:
            found[number] = number, *written.extent(), []
        may_be = written.may_be is other
        alike = may_be and (written.shape, written.strides) == (other.shape, other.strides)
        names, other_number = (written.name, other.name), other.ptr.slot.argument  # type: ignore[attr-defined]
        found[number][3].append((other_number, *other.extent(), alike, may_be, names))
    return list(found.values())


class _Launch(NamedTuple):
    """A launch, whose parameters are packed from those items that are picked."""

    submit: driver.Submit
    x: int
    y: int
    z: int
    cluster: int
    pack: Callable[..., bytes]
    pick: Callable[[Sequence[Any]], Sequence[Any]]


class _Clear(NamedTuple):
    """Memory to be cleared: `item` is the number of its address."""

    item: int
    nbytes: int


class _Together(NamedTuple):
    """Neighbouring launches that one CUDA graph makes."""

    graph: LaunchGraph
    grids: tuple[tuple[int, int, int], ...]
    launches: list[Any]


def _joined(program: Program, made: Sequence[Any], device: int) -> list[Any]:
    """A program's steps, where neighbours that may stand in a CUDA graph are one."""
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
    """A program ready to run. It holds no array of the call that it was made of.

    A run makes a list of *items*: addresses of the arrays, of results and of scratch memory; a plan's address, and
    whether it is filled; constant bytes of parameters; nonces; addresses within that memory. Parameters are packed from
    items.

    Args:
        place: of a call, after its body ran.
        arrays: of the call; their slots have their numbers here.
        values: all arguments.
        result: what the body returned: arguments, results, constants, or a tuple of these.
    """

    def __init__(self, place: CallPlace, arrays: Sequence[Array], values: Sequence[Any], result: Any) -> None:
        self.device: int = place.device
        self._library = place.library
        self._stream = self._library.stream_reader(self.device)
        self._apart = _apart(place.apart)
        self._plan = next((i for i, value in enumerate(values) if type(value) is Plan), -1)
        self._address = self._library.address
        self._make = self._library.result_maker([(s.shape, s.dtype) for s in place.results]) if place.results else None
        self._prepare_steps(place, len(arrays))
        numbers = {id(array.obj): i for i, array in reversed([*enumerate(arrays)])}
        numbers |= {id(slot): len(arrays) + i for i, slot in enumerate(place.results)}
        leaves = result if type(result) is tuple else (result,)
        self._returned = [leaf for leaf in leaves if id(leaf) not in numbers]  # constants
        picked = [numbers.get(id(leaf), -1) for leaf in leaves]
        for n, i in enumerate([i for i, number in enumerate(picked) if number < 0]):
            picked[i] = len(arrays) + len(place.results) + n
        # Makes what the call returns of its arrays, its results and the constants.
        self._result = picker(picked) if type(result) is tuple else itemgetter(*picked)

    def _prepare_steps(self, place: CallPlace, arrays: int) -> None:
        """Number the items, and say which of them parameters and steps take."""
        program, device = place.program, place.device
        structs = {id(step.params): step.params for step in program if isinstance(step, Launch)}  # launches share them
        split = [packed.of.split(packed.values, OF_A_RUN) for packed in structs.values()]
        self._constants = [part for _, parts in split for part in parts[::2]]
        fields = [part for _, parts in split for part in parts[1::2]]
        results = {id(slot): arrays + i for i, slot in enumerate(place.results)}
        scratch = arrays + len(results)
        self._nonces = range(sum(type(field) is Nonce for field in fields))
        constants = count(scratch + 3)
        nonces = count(scratch + 3 + len(self._constants))
        within: dict[int, int] = {}  # where a slot starts in the call's scratch memory
        derived: dict[tuple[int, int], int] = {}  # by the number of a start, and how many bytes from there
        end = scratch + 3 + len(self._constants) + len(self._nonces)
        self._scratch_bytes = 0

        def item(part: Any) -> int:
            """The number of a field that differs from run to run."""
            if type(part) is PlanField:
                return scratch + 1 + (part.name == "filled")
            if type(part) is Nonce:
                return next(nonces)
            slot, offset = part.slot, part.offset
            start = results.get(id(slot), scratch) if slot.argument is None else slot.argument
            if start == scratch:
                if id(slot) not in within:
                    within[id(slot)] = aligned_up(self._scratch_bytes)
                    self._scratch_bytes = within[id(slot)] + slot.nbytes
                offset += within[id(slot)]
            return derived.setdefault((start, offset), end + len(derived)) if offset else start

        packers: dict[int, tuple[Any, Any]] = {}  # of structs: what packs one, and what picks that from the items
        for key, (packer, parts) in zip(structs, split, strict=True):
            picked = [item(part) if i % 2 else next(constants) for i, part in enumerate(parts)]
            packers[key] = packer.pack, picker(picked)
        made: list[Any] = [
            _Clear(item(step.pointer), step.nbytes) if isinstance(step, Clear)
            else _Launch(step.kernel.submitter(device), *step.grid, step.cluster, *packers[id(step.params)])
            for step in program
        ]  # fmt: skip
        self._steps: list[Any] = made if len(made) < 2 else _joined(program, made, device)
        self._derived = list(derived)
        self._plan_key: Any = next((field.key for field in fields if type(field) is PlanField), None)
        self._plans = None if self._plan_key is None else PlanMemory(self._library, device)
        self._scratch = scratch_memory(self._library, device) if within else None
        graphs = any(type(step) is _Together for step in self._steps)
        self._ask = driver.runtime().streamIsCapturing if within or graphs or self._plans is not None else _no

    def run(self, arrays: Sequence[Any], addresses: Sequence[int], values: Sequence[Any]) -> Any:
        """Make a call.

        Args:
            arrays: of the call. addresses: of these.
            values: all arguments.

        Returns:
            what the operation returns.

        Raises:
            ValueError: an array that is written overlaps another one.
        """
        if driver.THREAD.current_device() != self.device:
            with self._library.to_device(self.device):
                return self.run(arrays, addresses, values)
        for written, start, end, others in self._apart:
            start += (at := addresses[written])
            end += at
            for other, other_start, other_end, alike, may_be, names in others:
                address = addresses[other]
                if start < address + other_end and address + other_start < end and not (alike and address == at):
                    require_apart(names[0], arrays[written], names[1], arrays[other], may_be)
        items = [*addresses]
        results: Sequence[Any] = ()
        if self._make is not None:
            results = self._make()
            items += map(self._address, results)
        if self._steps:
            self._launch(items, values)
        return self._result((*arrays, *results, *self._returned))

    def _launch(self, items: list[Any], values: Sequence[Any]) -> None:
        """Add what is left to the items, and make the steps."""
        stream = self._stream()
        capturing = self._ask(stream)
        block, start, address, filled, made = None, 0, 0, 0, None
        try:
            if self._scratch is not None:
                block = self._scratch.take(self._scratch_bytes, stream, capturing)
                start = block[0]
            if self._plans is not None:
                address, filled, made = self._plans.take(values[self._plan], self._plan_key, stream, capturing)
            items += start, address, filled, *self._constants
            for _ in self._nonces:
                items.append(Nonce.next())
            for number, offset in self._derived:
                items.append(items[number] + offset)
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
                values[self._plan].made = made
        finally:
            if block is not None:
                block[1].append(block)


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Picks the values of these numbers from a tuple or list, as another one."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


def _no(stream: int) -> bool:
    return False


def _joins_graphs(step: Step, device: int) -> bool:
    """Whether a step may stand in a CUDA graph of ours: a launch without attributes."""
    if isinstance(step, Clear) or step.cluster != 1 or step.kernel.cooperative:
        return False
    return not driver.overlaps(step.kernel, device)
