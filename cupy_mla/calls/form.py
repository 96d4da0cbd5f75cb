"""Forms: a traced call as what it takes to make others, for the calls that meet its guards.

A form has its guards and the *values* that follow from sizes: shapes of results, grids, the bytes of parameter structs
between the pointers. `tree.py` writes the guards and values of all forms of a signature as one function, which runs
once for sizes that were not seen before. `body` is a function of straight lines. It takes the values and the arrays: it
allocates, puts pointers into the structs and launches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from ..arrays import aligned_up
from ..bridges import dense_strides
from ..cuda import driver
from ..cuda.program import Clear, Launch, Nonce, PlanField, Pointer, Program, Slot, Step
from ..cuda.structs import Packed
from ..sizes import Node, Term, is_node, term
from .code import Code
from .graph import LaunchGraph
from .plan import PlanMemory
from .program import TracedCall
from .scratch import scratch_memory

OF_A_RUN = (Pointer, Nonce, PlanField)  # fields that differ from run to run


class Form:
    """The compiled form of a traced call.

    Attributes:
        guards: conditions that a call must meet, in order: what one needs may hold only where those before it do.
        values: terms of what `body` needs.
        body: takes the values, the arrays' addresses and the arrays; returns what the operation returns.
        depends_on: tells what calls depend on beside their arguments; None: on nothing.
    """

    def __init__(self, call: TracedCall) -> None:
        writer = _Writer(call)
        self.guards: list[Node] = list(call.trace.guards)
        self.values: list[Term] = writer.values
        self.body: Callable[..., Any] = writer.body()
        self.depends_on: Callable[[], Any] | None = call.trace.depends_on


class _Writer:
    """Writes the body of a form, and notes the values that it needs."""

    def __init__(self, call: TracedCall) -> None:
        self.call = call
        self.place = call.place
        self.library = call.place.library
        self.code = Code()
        self.values: list[Term] = []
        self._starts: dict[int, tuple[str, Any]] = {}  # of slots, by their id: an address, and bytes from there
        self._write_apart()
        self._write_memory()
        self._write_steps()
        self._write_result()

    def _value(self, of: Term) -> str:
        """The name of a value."""
        if of not in self.values:
            self.values.append(of)
        return f"x{self.values.index(of)}"

    def _number(self, size: Any) -> str:
        of = term(size)
        return self._value(of) if is_node(of) else self.code.variable(of)

    def _tuple(self, sizes: Sequence[Any]) -> str:
        of = _tuple_of(map(term, sizes))
        return self._value(of) if is_node(of) else self.code.name(of)

    # what is written

    def _write_apart(self) -> None:
        """Compare the addresses of what is written with those of the other arguments."""
        for apart in self.place.apart:
            i, j = apart.arguments
            (start, end), (other_start, other_end) = (
                (f"p{k}{self._offset(before, '-')}", f"p{k} + {self._number(size)}")
                for k, (before, size) in zip((i, j), apart.extents, strict=True)
            )
            meet = f"{start} < {other_end} and {other_start} < {end}"
            self.code.line(f"if {meet}{f' and p{i} != p{j}' if apart.may_be else ''}:")
            self.code.line(f"    {self.code.name(apart.check)}(a{i}, a{j})")

    def _write_memory(self) -> None:
        """Allocate the results."""
        code, library, results = self.code, self.library, self.place.results
        if not results:
            return
        make = code.name(library.maker())
        if library.results_share_memory:
            offsets, nbytes = self._side_by_side(results, "memory")
            allocate, address = library.allocator()
            code.line(f"memory = {code.name(allocate)}({nbytes})")
            code.line(f"start_memory = {address.format(a='memory')}")
            for k, (slot, offset) in enumerate(zip(results, offsets, strict=True)):
                dtype = code.name(library.native_dtype(slot.dtype))
                code.line(f"r{k} = {make}({self._tuple(slot.shape)}, {dtype}, memory{offset})")
        else:
            for k, slot in enumerate(results):
                shape, strides = self._tuple(slot.shape), self._tuple(dense_strides(slot.shape))
                code.line(f"r{k} = {make}({shape}, {strides}, {code.name(library.native_dtype(slot.dtype))})")
                code.line(f"start_r{k} = {library.address.format(a=f'r{k}')}")
                self._starts[id(slot)] = f"start_r{k}", 0

    def _side_by_side(self, slots: Sequence[Slot], name: str) -> tuple[list[str], str]:
        """One allocation for several slots: what is added to its start for each of them, and its bytes."""
        offsets: list[str] = []
        end = 0
        for slot in slots:
            start = aligned_up(end)
            offsets.append(self._offset(start))
            self._starts[id(slot)] = f"start_{name}", start
            end = start + slot.nbytes
        return offsets, self._number(end)

    def _offset(self, nbytes: Any, sign: str = "+") -> str:
        return "" if term(nbytes) == 0 else f" {sign} {self._number(nbytes)}"

    def _address(self, pointer: Pointer) -> str:
        argument = pointer.slot.argument
        start, before = (f"p{argument}", 0) if argument is not None else self._starts[id(pointer.slot)]
        return start + self._offset(before + pointer.offset)

    def _of_run(self, value: Any) -> str:
        """A field that differs from run to run."""
        if isinstance(value, PlanField):
            return f"plan_{value.name}"
        return self._address(value) if isinstance(value, Pointer) else f"{self.code.name(Nonce.next)}()"

    def _params(self, params: Packed) -> str:
        """The expression of a parameter struct: what differs from run to run, and the bytes between that."""
        formats, values = [], []
        for differs, fields in groupby(params.of.fields(params.values), lambda f: isinstance(f[1], OF_A_RUN)):
            if differs:
                for code, value in fields:
                    formats.append(code)
                    values.append(self._of_run(value))
            else:
                packed, terms = _joined([(code, term(value)) for code, value in fields])
                formats.append(f"{packed.size}s")
                if any(map(is_node, terms)):
                    values.append(self._value(("call", packed.pack, *terms)))
                else:
                    values.append(self.code.name(packed.pack(*terms)))
        pack = self.code.name(_struct("=" + "".join(formats)).pack)
        return f"{pack}({', '.join(values)})"

    def _write_steps(self) -> None:
        """Write the launches."""
        code, place = self.code, self.place
        if not place.program:
            return
        code.line(f"stream = {code.name(self.library.stream_reader(place.device))}()")
        steps = list(in_graphs(place.program, place.device))
        planned = self.call.plan_field
        if self.call.scratch or planned or any(type(step) is list for step in steps):
            code.line(f"capturing = {code.name(driver.runtime().streamIsCapturing)}(stream)")
        if planned is not None:
            plan, take = f"a{self.call.plan}", code.name(PlanMemory(self.library, place.device).take)
            key = self._tuple(planned.key)
            code.line(f"plan_address, plan_filled, made = {take}({plan}, {key}, stream, capturing)")
        self._write_with_scratch(steps)
        if planned is not None:
            code.line(f"{plan}.made = made")

    def _write_with_scratch(self, steps: list[Step | list[Launch]]) -> None:
        """Write the launches, with the scratch memory that they need."""
        code, place = self.code, self.place
        if not self.call.scratch:
            self._write_launches(steps)
            return
        take = code.name(scratch_memory(self.library, place.device).take)
        _, nbytes = self._side_by_side(self.call.scratch, "scratch")
        code.line(f"scratch = {take}({nbytes}, stream, capturing)")
        code.line("start_scratch = scratch[0]")
        with code.block("try:"):
            self._write_launches(steps)
        with code.block("finally:"):
            code.line("scratch[1].append(scratch)")

    def _write_launches(self, steps: Iterable[Step | list[Launch]]) -> None:
        code, device = self.code, self.place.device
        known: tuple[Packed | None, str] = (None, "")

        def params(launch: Launch) -> str:
            nonlocal known
            if known[0] is not launch.params:  # launches in a row may share them
                name = f"params{len(code.lines)}"
                code.line(f"{name} = {self._params(launch.params)}")
                known = launch.params, name
            return known[1]

        for step in steps:
            if isinstance(step, Clear):
                clear = code.name(driver.clear)
                code.line(f"{clear}({self._address(step.pointer)}, {self._number(step.nbytes)}, stream)")
            elif isinstance(step, Launch):
                given, submit = params(step), code.name(step.kernel.submitter(device))
                arguments = [*map(self._number, step.grid), given, self._number(step.cluster)]
                code.line(f"{submit}(stream, {', '.join(arguments)})")
            else:
                graph = code.name(LaunchGraph([launch.kernel for launch in step], device))
                grids = self._tuple([_tuple_of(map(term, launch.grid)) for launch in step])
                packed = list(map(params, step))
                with code.block(f"if capturing or not {graph}(stream, {grids}, ({', '.join(packed)})):"):
                    for i, launch in enumerate(step):
                        submit = code.name(launch.kernel.submitter(device))
                        code.line(f"{submit}(stream, *{grids}[{i}], {packed[i]}, 1)")

    def _write_result(self) -> None:
        """Return what the operation returns."""
        results = {id(slot): f"r{k}" for k, slot in enumerate(self.place.results)}
        texts = []
        for leaf in self.call.leaves:
            argument = self.call.argument_of(leaf)
            plain = self._tuple if type(leaf) is tuple else self._number
            texts.append(results.get(id(leaf)) or (plain(leaf) if argument is None else f"a{argument}"))
        self.code.line(f"return {', '.join(texts)}" + ("," if type(self.call.result) is tuple else ""))

    def body(self) -> Callable[..., Any]:
        """The function that does what the call does."""
        arrays = self.call.arrays
        given = arrays if self.call.plan is None else [*arrays, self.call.plan]
        lines = [f"{' '.join(f'x{k},' for k in range(len(self.values)))} = values"] if self.values else []
        parameters = ["values", *(f"p{i}" for i in arrays), *(f"a{i}" for i in given)]
        return self.code.function("body", parameters, [*lines, *self.code.lines])


def _tuple_of(terms: Iterable[Term]) -> Term:
    """Terms as one: a tuple, in calls or known already."""
    known = tuple(terms)
    return ("tuple", *known) if any(map(is_node, known)) else known


@cache
def _struct(format: str) -> struct.Struct:
    """One for a format, so that equal bytes are seen to be equal."""
    return struct.Struct(format)


def _joined(fields: Iterable[tuple[str, Term]]) -> tuple[struct.Struct, list[Term]]:
    """A format for fields, and what goes in: terms, and the bytes of neighbours that are the same in every call."""
    formats: list[str] = []
    terms: list[Term] = []
    for differs, neighbours in groupby(fields, lambda field: is_node(field[1])):
        codes, values = zip(*neighbours, strict=True)
        if differs:
            formats += codes
            terms += values
        else:
            same = _struct("=" + "".join(codes))
            formats.append(f"{same.size}s")
            terms.append(same.pack(*(value for value in values if value is not None)))
    return _struct("=" + "".join(formats)), terms


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
