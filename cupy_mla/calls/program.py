"""Traced calls: what an operation's body finds out about a call on a GPU, and the function that later calls run.

The body of an operation runs once for a signature, over descriptions with symbolic sizes (`cupy_mla.sizes`) in a
`TracedPlace`. There it allocates nothing and launches nothing: results become slots, and the launcher's `Program` is
kept. `run` does what the program says with this call's numbers. `compiled` writes the same down as a Python function of
straight lines: is the call of this signature, does it meet the guards, allocate, put pointers and sizes in their
places, launch.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from types import CodeType
from typing import Any

import numpy as np

from ..arrays import Array, aligned_up
from ..bridges import Place, dense_strides, describe, library_of
from ..cuda import driver
from ..cuda.program import Clear, Launch, Pointer, Program, Slot, Step
from ..cuda.structs import Packed
from ..sizes import Trace, is_node, number, term
from .code import Code
from .graph import LaunchGraph

Compiled = Callable[..., Any]  # takes a call's arguments; NotImplemented for a call that it does not hold for


# --- tracing --------------------------------------------------------------------------------------------------


class TracedArray(Array):
    """An array argument of a traced call."""

    __slots__ = ("trace",)
    trace: Trace

    def __float__(self) -> float:
        """The value, where a number is asked for: it is another one in every call."""
        self.trace.once = True
        return float(self.obj)


class TracedPlace(Place):
    """Where the arrays of a traced call live.

    Attributes:
        program: what the launcher returned.
        results: the arrays that the call allocates and may return.
    """

    program: Program
    results: list[Slot]

    @classmethod
    def at(cls, place: Place) -> TracedPlace:
        """The place of a call whose arrays live at `place`."""
        traced = cls(*place)
        traced.program = ()
        traced.results = []
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
        """
        for a in arguments:
            if isinstance(a, TracedArray):
                a.require_no_gradient()
        self.program = launcher(driver.gpu(self.device), *arguments)


class TracedCall:
    """One call of an operation, traced.

    Args:
        function: the operation's body.
        names: of the parameters that were given.
        values: what was given for them, at least one array on a GPU.

    Attributes:
        arrays: which of the values are arrays.
        result: what the body returned: arguments, slots, constants, or a tuple of these.
        holds_for_others: whether later calls may run what this one is compiled to.
    """

    def __init__(self, function: Callable[..., Any], names: Sequence[str], values: Sequence[Any]) -> None:
        self.trace = Trace()
        self.values = values
        self.arrays = [i for i, value in enumerate(values) if library_of(value) is not None]
        described = {i: describe(names[i], values[i]) for i in self.arrays}
        self.place = TracedPlace.at(next(array.place for array in described.values() if array.place.on_gpu))
        arguments = list(values)
        for i, value in enumerate(values):
            if i in described:
                arguments[i] = self._symbolic(i, described[i])
            elif type(value) is int:
                arguments[i] = self.trace.read(f"a{i}", value)
        self.result = function(**dict(zip(names, arguments, strict=True)))
        given = {id(values[i]) for i in self.arrays}
        one_each = len(given) == len(self.arrays)  # what is one array under two names may be two in a later call
        self.holds_for_others = one_each and not self.trace.once

    def _symbolic(self, i: int, array: Array) -> TracedArray:
        """An array as the body gets it: argument i."""
        read, size = self.trace.read, array.dtype.itemsize
        shape = tuple(read(f"n{i}_{k}", n) for k, n in enumerate(array.shape))
        strides: list[Any]
        if array.library.strides_in_bytes:
            in_bytes = [read(f"t{i}_{k}", s * size) for k, s in enumerate(array.strides)]
            for stride in in_bytes if size > 1 else ():
                self.trace.guard(("==", term(stride % size), 0), True)
            strides = [stride // size for stride in in_bytes]
        else:
            strides = [read(f"t{i}_{k}", s) for k, s in enumerate(array.strides)]
        place = self.place if array.place == self.place else array.place
        ptr: Any = Pointer(Slot(array.name, i), 0, read(f"p{i}", array.ptr))
        traced = TracedArray(array.name, array.obj, place, array.dtype, shape, tuple(strides), ptr)  # type: ignore[arg-type]
        traced.trace = self.trace
        return traced

    @property
    def scratch(self) -> list[Slot]:
        """Memory that the program's steps name and the call does not return."""
        named = {id(p.slot): p.slot for step in self.place.program for p in pointers_of(step)}
        results = {id(slot) for slot in self.place.results}
        return [slot for key, slot in named.items() if slot.argument is None and key not in results]

    @property
    def leaves(self) -> tuple[Any, ...]:
        """What the body returned, as a tuple."""
        return self.result if type(self.result) is tuple else (self.result,)

    def argument_of(self, leaf: Any) -> int | None:
        """Which argument a leaf of the result is, None for one that is none."""
        return next((i for i in self.arrays if self.values[i] is leaf), None)


def pointers_of(step: Step) -> Iterator[Pointer]:
    """The places in memory that a step names."""
    if isinstance(step, Clear):
        yield step.pointer
    else:
        yield from (value for value in step.params.values if isinstance(value, Pointer))


# --- running --------------------------------------------------------------------------------------------------


def run(call: TracedCall) -> Any:
    """Do what the program of a traced call says, for this call."""
    place, library = call.place, call.place.library
    device = place.device
    with library.to_device(device):
        driver.current_device()
        here = Place(*place)
        made = {id(slot): here.new(slot.name, _numbers(slot.shape), slot.dtype) for slot in place.results}
        starts = {key: array.ptr for key, array in made.items()}
        if call.scratch:
            memory = [library.empty(device, (number(slot.nbytes),), np.dtype(np.uint8)) for slot in call.scratch]
            starts |= {id(s): describe(s.name, m).ptr for s, m in zip(call.scratch, memory, strict=True)}

        def address_of(value: Any) -> Any:
            if not isinstance(value, Pointer):
                return number(value)
            start = starts[id(value.slot)] if value.address is None else number(value.address)
            return start + number(value.offset)

        stream = library.stream_reader(device)()
        for step in place.program:
            if isinstance(step, Clear):
                driver.clear(address_of(step.pointer), 0, number(step.nbytes), stream)
            else:
                packed = step.params.of.chunks([*map(address_of, step.params.values)], lambda value: True)
                submit = step.kernel.submitter(device)
                submit(stream, *_numbers(step.grid), b"".join(value for _, value in packed), number(step.cluster))
    leaves = tuple(made[id(leaf)].obj if id(leaf) in made else number(leaf) for leaf in call.leaves)
    return leaves if type(call.result) is tuple else leaves[0]


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(number, sizes))


# --- compiling ------------------------------------------------------------------------------------------------


def compiled(call: TracedCall) -> Compiled:
    """The function that calls run for which this trace holds; it takes a call's arguments in the same order."""
    code = Code()
    _write_guards(code, call)
    _write_device(code, call)
    slots = _write_memory(code, call)
    _write_steps(code, call, slots)
    _write_result(code, call, slots)
    body, code.lines = code.lines, []
    _write_signature(code, call)
    _write_reads(code, call)
    text = "\n    ".join([f"def run({_parameters(call)}):", *code.lines, *body])
    exec(_code_of(text), code.names)
    return code.names["run"]


@lru_cache(maxsize=1024)
def _code_of(text: str) -> CodeType:
    return compile(text, "<compiled call>", "exec")


def _parameters(call: TracedCall) -> str:
    return ", ".join(f"a{i}" for i in range(len(call.values)))


def _write_signature(code: Code, call: TracedCall) -> None:
    """Is the call like the traced one in all that is no number?"""
    names = [f"a{i}" for i in range(len(call.values))]
    code.line(f"if ({' '.join(f'type({a}),' for a in names)}) != {code.name(tuple(map(type, call.values)))}:")
    code.line("    return NotImplemented")
    read, known, gradient = [], [], False
    for i, value in enumerate(call.values):
        if i in call.arrays:
            facts = [fact.format(a=f"a{i}") for fact in call.place.library.facts]
            read += [*facts, f"len(h{i} := {call.place.library.shape.format(a=f'a{i}')})"]
            of = {f"a{i}": value}
            known += [*(eval(fact, of) for fact in facts), len(value.shape)]
            gradient |= getattr(value, "requires_grad", False)
        elif type(value) is not int:
            read.append(f"a{i}")
            known.append(value)
    code.line(f"if ({' '.join(f'{text},' for text in read)}) != {code.name(tuple(known))}:")
    code.line("    return NotImplemented")
    if gradient:  # the traced call was under torch.no_grad
        code.line(f"if {code.name(sys.modules['torch'].is_grad_enabled)}():")
        code.line("    return NotImplemented")


def _write_reads(code: Code, call: TracedCall) -> None:
    """The numbers that differ from call to call."""
    library = call.place.library
    for i in call.arrays:
        for letter, text in (("n", f"h{i}"), ("t", library.strides.format(a=f"a{i}"))):
            wanted = [f"{letter}{i}_{k}" for k in range(len(call.values[i].shape))]
            if any(name in code.read for name in wanted):
                code.line(f"{' '.join(f'{name},' for name in wanted)} = {text}")
        if f"p{i}" in code.read:
            code.line(f"p{i} = {library.address.format(a=f'a{i}')}")


def _write_guards(code: Code, call: TracedCall) -> None:
    """Does the call meet the guards? What a guard needs is computed only when those before it are met."""
    pending: list[str] = []

    def flush(at: int) -> None:
        if pending:
            code.lines[at:at] = [f"if not ({' and '.join(pending)}):", "    return NotImplemented"]
            pending.clear()

    for guard in call.trace.guards:
        before = len(code.lines)
        condition = code.condition(guard)
        if len(code.lines) > before:
            flush(before)
        pending.append(condition)
    flush(len(code.lines))


def _write_device(code: Code, call: TracedCall) -> None:
    """Kernels are launched in the context of the arrays' GPU."""
    place = call.place
    code.line(f"if {code.name(driver.THREAD)}.current_device() != {place.device}:")
    code.line(f"    with {code.name(place.library.to_device)}({place.device}):")
    code.line(f"        return run({_parameters(call)})")


def _write_memory(code: Code, call: TracedCall) -> dict[int, str]:
    """Allocate results, and one piece of memory for all scratch. Returns the addresses of the slots by their id."""
    library, results, scratch = call.place.library, call.place.results, call.scratch
    if not results and not scratch:
        return {}
    starts: dict[int, str] = {}
    allocate, address = library.allocator()
    make = code.name(library.maker()) if results else ""

    def write_shared(slots: Sequence[Slot], name: str) -> list[str]:
        """One piece of memory for several slots; returns the offsets as text."""
        offsets: list[str] = []
        start, end = 0, 0
        for slot in slots:
            start = aligned_up(end) if offsets else 0
            offsets.append(f" + {code.variable(term(start))}" if offsets else "")
            end = start + slot.nbytes
        code.line(f"{name} = {code.name(allocate)}({code.variable(term(end))})")
        code.line(f"start_{name} = {address.format(a=name)}")
        for slot, offset in zip(slots, offsets, strict=True):
            starts[id(slot)] = f"start_{name}{offset}"
        return offsets

    def shape_of(lengths: Sequence[Any]) -> str:
        return f"({' '.join(f'{code.variable(term(n))},' for n in lengths)})"

    if results and library.results_share_memory:
        for k, (slot, offset) in enumerate(zip(results, write_shared(results, "memory"), strict=True)):
            dtype = code.name(library.native_dtype(slot.dtype))
            code.line(f"r{k} = {make}({shape_of(slot.shape)}, {dtype}, memory{offset})")
    else:
        for k, slot in enumerate(results):
            dtype = code.name(library.native_dtype(slot.dtype))
            code.line(f"r{k} = {make}({shape_of(slot.shape)}, {shape_of(dense_strides(slot.shape))}, {dtype})")
            code.line(f"start_r{k} = {library.address.format(a=f'r{k}')}")
            starts[id(slot)] = f"start_r{k}"
    if scratch:
        write_shared(scratch, "scratch")
    return starts


def _write_steps(code: Code, call: TracedCall, starts: dict[int, str]) -> None:
    """Give the stream its work."""
    place = call.place
    if not place.program:
        return
    packed: tuple[Packed | None, str] = (None, "")

    def address_of(pointer: Pointer) -> str:
        start = starts[id(pointer.slot)] if pointer.address is None else code.variable(term(pointer.address))
        offset = term(pointer.offset)
        return start if type(offset) is int and offset == 0 else f"{start} + {code.variable(offset)}"

    def params_of(params: Packed) -> str:
        nonlocal packed
        if packed[0] is not params:  # launches in a row may share them
            chunks = list(params.of.chunks(params.values, lambda v: not isinstance(v, Pointer) and not is_node(term(v))))
            values = [address_of(v) if isinstance(v, Pointer) else code.variable(term(v)) for _, v in chunks]
            pack = struct.Struct("=" + "".join(code for code, _ in chunks)).pack
            name = f"params{len(code.lines)}"
            code.line(f"{name} = {code.name(pack)}({', '.join(values)})")
            packed = params, name
        return packed[1]

    def launch_of(launch: Launch) -> str:
        return ", ".join([*(code.variable(term(n)) for n in launch.grid), params_of(launch.params)])

    code.line(f"stream = {code.name(place.library.stream_reader(place.device))}()")
    for step in in_graphs(place.program, place.device):
        if isinstance(step, Clear):
            clear = code.name(driver.clear)
            code.line(f"{clear}({address_of(step.pointer)}, 0, {code.variable(term(step.nbytes))}, stream)")
        elif isinstance(step, Launch):
            text, submit = launch_of(step), code.name(step.kernel.submitter(place.device))
            code.line(f"{submit}(stream, {text}, {code.variable(term(step.cluster))})")
        else:
            graph = LaunchGraph([launch.kernel for launch in step], place.device)
            texts = [f"({launch_of(launch)})" for launch in step]
            code.line(f"{code.name(graph)}(stream, {', '.join(texts)})")


def _write_result(code: Code, call: TracedCall, starts: dict[int, str]) -> None:
    """Return what the operation returns."""
    results = {id(slot): f"r{k}" for k, slot in enumerate(call.place.results)}
    texts = []
    for leaf in call.leaves:
        argument = call.argument_of(leaf)
        known = results.get(id(leaf))
        texts.append(known or (code.variable(term(leaf)) if argument is None else f"a{argument}"))
    code.line(f"return {', '.join(texts)}" + ("," if type(call.result) is tuple else ""))


def in_graphs(program: Program, device: int) -> Iterator[Step | list[Launch]]:
    """A program's steps; neighbouring launches that one CUDA graph can make come as a list."""
    for joins, steps in groupby(program, lambda step: isinstance(step, Launch) and joins_graphs(step, device)):
        neighbours: list[Any] = list(steps)
        if joins and len(neighbours) > 1:
            yield neighbours
        else:
            yield from neighbours


def joins_graphs(launch: Launch, device: int) -> bool:
    """Whether a launch may stand in a CUDA graph of ours: it has no attributes in any call."""
    kernel, cluster = launch.kernel, launch.cluster
    alone = type(cluster) is int and cluster == 1
    return alone and not kernel.cooperative and not driver.overlaps(kernel, device)
