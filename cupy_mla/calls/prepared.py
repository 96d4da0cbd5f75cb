"""Prepared calls: an operation's body run once for a key, and its program ready to run again with new addresses.

The body gets descriptions of its arrays whose addresses are `Pointer`s, in a `CallPlace`: there results become slots
and the launcher's program is kept, so that nothing is allocated before all checks are done. `Prepared` is what this
program comes to: the bytes of parameter structs between the fields that differ from run to run, and where those go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, aligned_up, arrays_in
from ..bridges import Place, dense_strides, describe, library_of, must_be_apart, require_apart
from ..cuda import driver
from ..cuda.program import Clear, Launch, Nonce, PlanField, Pointer, Program, Slot, Step
from .graph import LaunchGraph, launch_graph
from .plan import PlanMemory
from .scratch import scratch_memory

OF_A_RUN = frozenset((Pointer, Nonce, PlanField))  # the types of fields that differ from run to run


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
        given = [a for a in arrays_in(arguments) if type(a.obj) is not Slot]
        for a in given:
            a.require_no_gradient()
        self.apart = list(must_be_apart(given))
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
    prepared = Prepared(place, arrays, result)
    given = [array.obj for array in arrays]
    for_others = len({*map(id, given)}) == len(given) and not any(array.read for array in arrays)
    return prepared, given, addresses, for_others


class _Other(NamedTuple):
    """An array that one that is written must not share memory with.

    Attributes:
        number: of the array.
        start, end: bytes from its address to its first byte and to that behind its last.
        alike: the one that is written may be this one, whole, and is where it has its address.
        check: takes a call's arrays, and looks at every item of both; a ValueError where they overlap.
    """

    number: int
    start: int
    end: int
    alike: bool
    check: Callable[[Sequence[Any]], None]


def _apart(pairs: Sequence[tuple[Array, Array]]) -> list[tuple[int, int, int, list[_Other]]]:
    """Of every array that is written its number, start and end as of `_Other`, and the others.

    Args:
        pairs: arrays that are written, each with another one.
    """
    found: dict[int, tuple[int, int, int, list[_Other]]] = {}
    for written, other in pairs:
        number, other_number = (a.ptr.slot.argument for a in (written, other))  # type: ignore[attr-defined]
        may_be = written.may_be is other
        alike = may_be and (written.shape, written.strides) == (other.shape, other.strides)
        check = partial(_require_apart, number, written.name, other_number, other.name, may_be)
        _, _, _, others = found.setdefault(number, (number, *written.extent(), []))
        others.append(_Other(other_number, *other.extent(), alike, check))
    return list(found.values())


def _require_apart(written: int, name: str, other: int, other_name: str, may_be: bool, arrays: Sequence[Any]) -> None:
    require_apart(name, arrays[written], other_name, arrays[other], may_be)


class _Launch(NamedTuple):
    """A launch: `params` is the number of its parameters."""

    submit: driver.Submit
    x: int
    y: int
    z: int
    params: int
    cluster: int


class _Clear(NamedTuple):
    """Memory to be cleared: `item` is the number of its address."""

    item: int
    nbytes: int


class _Together(NamedTuple):
    """Neighbouring launches that one CUDA graph makes."""

    graph: LaunchGraph
    grids: tuple[tuple[int, int, int], ...]
    launches: list[Any]

    @classmethod
    def of(cls, steps: Sequence[Any], launches: list[Any], device: int) -> _Together:
        graph = launch_graph(tuple(step.kernel for step in steps), device)
        return cls(graph, tuple(step.grid for step in steps), launches)


class Prepared:
    """A program ready to run. It holds no array of the call that it was made of.

    A run makes a list of *items*: constant bytes of parameters; addresses of the arrays, of results and of scratch
    memory; what a plan gives; nonces; addresses within that memory. Parameters are packed from these.

    Args:
        place: of a call, after its body ran.
        arrays: of the call; their slots have their numbers here.
        result: what the body returned: arguments, results, constants, or a tuple of these.
    """

    def __init__(self, place: CallPlace, arrays: Sequence[Array], result: Any) -> None:
        self.device: int = place.device
        self._library = place.library
        self._stream = self._library.stream_reader(self.device)
        self._apart = _apart(place.apart)
        self._make = self._library.result_maker([(s.shape, s.dtype) for s in place.results]) if place.results else None
        self._prepare_steps(place, len(arrays))
        numbers = {id(array.obj): i for i, array in reversed([*enumerate(arrays)])}
        numbers |= {id(slot): len(arrays) + i for i, slot in enumerate(place.results)}
        self._result = _result_of(result, numbers)

    def _prepare_steps(self, place: CallPlace, arrays: int) -> None:
        """Number the items, and say which of them parameters and steps take."""
        program, device = place.program, place.device
        structs = {id(step.params): step.params for step in program if isinstance(step, Launch)}  # launches share them
        split = [packed.of.split(packed.values, OF_A_RUN) for packed in structs.values()]
        parts = {(k, i): part for k, (_, of_struct) in enumerate(split) for i, part in enumerate(of_struct)}
        numbers: dict[Any, int] = {}  # of items, in the order in which `_launch` lists them

        def start_of(slot: Slot) -> Any:
            return id(slot) if slot.argument is None else ("argument", slot.argument)

        def number(*keys: Any) -> None:
            numbers.update(zip(keys, range(len(numbers), len(numbers) + len(keys)), strict=True))

        self._constants = [part for part in parts.values() if type(part) is bytes]
        number(*(key for key, part in parts.items() if type(part) is bytes))
        number(*(("argument", n) for n in range(arrays)), *map(start_of, place.results))
        pointers = [part for part in parts.values() if type(part) is Pointer]
        pointers += [step.pointer for step in program if isinstance(step, Clear)]
        within: dict[int, int] = {}  # where a slot starts in the call's scratch memory
        self._scratch_bytes = 0
        for slot in (pointer.slot for pointer in pointers):
            if start_of(slot) not in numbers and id(slot) not in within:
                within[id(slot)] = aligned_up(self._scratch_bytes)
                self._scratch_bytes = within[id(slot)] + slot.nbytes
        if within:
            number("scratch")
        self._plan_key: Any = next((part.key for part in parts.values() if type(part) is PlanField), None)
        if self._plan_key is not None:
            number("address", "filled")
        nonces = [key for key, part in parts.items() if type(part) is Nonce]
        number(*nonces)
        self._nonces = range(len(nonces))
        self._derived: list[tuple[int, int]] = []  # the number of a start, and how many bytes from there

        def item(part: Any) -> int:
            """The number of a field that differs from run to run."""
            if type(part) is PlanField:
                return numbers[part.name]
            slot, offset = part.slot, part.offset + within.get(id(part.slot), 0)
            start = numbers["scratch" if id(slot) in within else start_of(slot)]
            if not offset:
                return start
            if (start, offset) not in numbers:
                self._derived.append((start, offset))
                number((start, offset))
            return numbers[start, offset]

        # Of every struct of parameters: what packs it, and what picks that from the items.
        self._packers: list[tuple[Callable[..., bytes], Callable[[Sequence[Any]], Sequence[Any]]]] = []
        for k, (packer, of_struct) in enumerate(split):
            picked = [numbers[k, i] if (k, i) in numbers else item(part) for i, part in enumerate(of_struct)]
            self._packers.append((packer.pack, itemgetter(*picked)))
        params = {key: k for k, key in enumerate(structs)}
        self._steps: list[_Launch | _Clear | _Together] = []
        for together, steps in groupby(program, lambda step: _joins_graphs(step, device)):
            neighbours = list(steps)
            made = [
                _Clear(item(step.pointer), step.nbytes) if isinstance(step, Clear)
                else _Launch(step.kernel.submitter(device), *step.grid, params[id(step.params)], step.cluster)
                for step in neighbours
            ]  # fmt: skip
            self._steps += [_Together.of(neighbours, made, device)] if together and len(made) > 1 else made
        graphs = any(type(step) is _Together for step in self._steps)
        self._ask = driver.runtime().streamIsCapturing if within or graphs or self._plan_key is not None else _no
        self._scratch = scratch_memory(self._library, device) if within else None
        self._plans = PlanMemory(self._library, device) if self._plan_key is not None else None

    def run(self, arrays: Sequence[Any], addresses: Sequence[int], plan: Any) -> Any:
        """Make a call.

        Args:
            arrays, addresses: of the call.
            plan: the argument that is one.

        Returns:
            what the operation returns.

        Raises:
            ValueError: an array that is written overlaps another one.
        """
        if driver.THREAD.current_device() != self.device:
            with self._library.to_device(self.device):
                return self.run(arrays, addresses, plan)
        for written, start, end, others in self._apart:
            start += (at := addresses[written])
            end += at
            for other, other_start, other_end, alike, check in others:
                address = addresses[other]
                if start < address + other_end and address + other_start < end and not (alike and address == at):
                    check(arrays)
        items = [*self._constants, *addresses]
        if self._make is not None:
            results, starts = self._make()
            items += starts
            arrays = [*arrays, *results]
        if self._steps:
            stream = self._stream()
            capturing = self._ask(stream)
            if self._scratch is None:
                self._launch(items, plan, stream, capturing)
            else:
                block = self._scratch.take(self._scratch_bytes, stream, capturing)
                items.append(block[0])
                try:
                    self._launch(items, plan, stream, capturing)
                finally:
                    block[1].append(block)
        return self._result(arrays)

    def _launch(self, items: list[Any], plan: Any, stream: int, capturing: bool) -> None:
        """Add what is left to the items, and make the steps."""
        if self._plans is not None:
            address, filled, made = self._plans.take(plan, self._plan_key, stream, capturing)
            items += address, filled
        for _ in self._nonces:
            items.append(Nonce.next())
        for start, offset in self._derived:
            items.append(items[start] + offset)
        params = [pack(*pick(items)) for pack, pick in self._packers]
        for step in self._steps:
            if type(step) is _Launch:
                submit, x, y, z, number, cluster = step
                submit(stream, x, y, z, params[number], cluster)
            elif type(step) is _Clear:
                driver.clear(items[step.item], step.nbytes, stream)
            elif type(step) is _Together:
                graph, grids, launches = step
                given = tuple([params[launch.params] for launch in launches])
                if capturing or not graph(stream, grids, given):
                    for submit, x, y, z, number, cluster in launches:
                        submit(stream, x, y, z, params[number], cluster)
        if self._plans is not None:
            plan.made = made


def _result_of(leaves: Any, numbers: Mapping[int, int]) -> Callable[[Sequence[Any]], Any]:
    """Makes what an operation returns of a call's arrays and results.

    Args:
        leaves: what the body returned.
        numbers: of arrays and results, by their `id`; all else is a constant.
    """
    if type(leaves) is not tuple:
        number = numbers.get(id(leaves))
        return (lambda arrays: leaves) if number is None else itemgetter(number)
    if len(leaves) > 1 and all(id(leaf) in numbers for leaf in leaves):
        return itemgetter(*(numbers[id(leaf)] for leaf in leaves))
    known = [(numbers.get(id(leaf)), None if id(leaf) in numbers else leaf) for leaf in leaves]
    return lambda arrays: tuple([constant if number is None else arrays[number] for number, constant in known])


def _no(stream: int) -> bool:
    return False


def _joins_graphs(step: Step, device: int) -> bool:
    """Whether a step may stand in a CUDA graph of ours: a launch without attributes."""
    if isinstance(step, Clear) or step.cluster != 1 or step.kernel.cooperative:
        return False
    return not driver.overlaps(step.kernel, device)
