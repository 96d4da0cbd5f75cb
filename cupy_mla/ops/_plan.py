"""What an operation costs the host, paid once: plans of calls that were seen before.

Checks, shapes of outputs, choice of kernels and their parameters depend on everything of a call except its pointers:
the shapes, strides, dtypes, devices and alignment of its arrays, and its settings. That is the call's signature. The
first call of a signature runs in full, under a `Recording`, which becomes a function of straight lines: the signature's
plan. It checks that a call is of its signature, allocates, puts the pointers in their places and launches. A call that
fails leaves no plan, so whatever a plan repeats has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from .. import arrays
from ..arrays import Place, aligned_up
from ..cuda import jit
from ..cuda.launch_graph import in_graphs
from ..recording import ALIGNMENT, Code, Recording

Operation = TypeVar("Operation", bound=Callable[..., Any])

MAX_PLANS = 1024  # of an operation, for one way to write its arguments
RECENT = 4
Plan = Callable[..., Any]  # takes a call's arguments; NotImplemented for those of a call of another signature
SETTINGS = (int, float, str, tuple, np.generic, type(None))

# The variable that names the kernels to take, looked up at a tenth of what os.environ.get takes.
_environment, KERNELS = os.environ._data.get, os.environ.encodekey("CUPY_MLA_KERNELS")  # type: ignore[attr-defined]


def traced() -> bool:
    """Whether torch.compile is reading this code instead of running it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def in_graph(name: str) -> Callable[..., Any]:
    """What the operation of that name becomes in a graph."""
    from ..integrations.torch_ops import TRACED  # the one import that runs upward, when torch.compile is there

    return TRACED[name]


def traceable(operation: Operation) -> Operation:
    """Let torch.compile take an operation that has no kernels; `planned` does it for the others."""

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (in_graph(operation.__name__) if traced() else operation)(*args, **kwargs)

    return call  # type: ignore[return-value]


_forget: list[Callable[[], None]] = []


def forget_plans() -> None:
    """Let every operation see every call for the first time again."""
    for forget in _forget:
        forget()


def planned(operation: Operation) -> Operation:
    """Give an operation plans for arrays on a GPU.

    The operation must describe each array it is given (`bind`, `Place.optional`) under the name of its parameter,
    allocate through its `Place`, and leave all work on a GPU to kernels' `launch` and to `jit.clear`. It returns
    None, or a tuple or one of: its arguments, arrays it allocated, constants.
    """
    kept = Plans(operation)
    recent = kept.recent
    _forget.append(kept.forget)

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        if traced():
            return in_graph(operation.__name__)(*args, **kwargs)
        if arrays.CHECK_VALUES:
            return operation(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        written = (len(args), *kwargs)
        plans = recent.get(written, ())
        for place, plan in enumerate(plans):
            result = plan(*values)
            if result is not NotImplemented:
                if place > 1:  # two in turn, as of two kinds of layers, stay where they are
                    recent[written] = [plan, *(other for other in plans if other is not plan)]
                return result
        return kept.call(args, kwargs)

    return call  # type: ignore[return-value]


class Plans:
    """The plans of one operation.

    Attributes:
        forms: the ways in which it was called.
        recent: the last plans that calls went by, which are asked first, by how the arguments are written.
    """

    def __init__(self, operation: Callable[..., Any]) -> None:
        self._operation = operation
        self._names = list(signature(operation).parameters)
        self.forms: dict[tuple[Any, ...], Form] = {}
        self.recent: dict[tuple[Any, ...], list[Plan]] = {}

    def forget(self) -> None:
        self.forms.clear()
        self.recent.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that none of the recent plans fits."""
        operation, names, values = self._operation, [*self._names[: len(args)], *kwargs], (*args, *kwargs.values())
        kinds = (*map(type, values), *kwargs)
        form = self.forms.get(kinds)
        if form is None:
            form = self.forms[kinds] = Form(names, values)
        if form.pointer is None:
            return operation(*args, **kwargs)
        given = [values[i] for i in form.places]
        try:
            alignment = tuple(pointer % ALIGNMENT for pointer in map(form.pointer, given))
            key = form.key(values, given, alignment)
            known = form.plans.get(key)
        except (RuntimeError, TypeError):  # a tensor without memory, a setting without hash: the checks say it better
            return operation(*args, **kwargs)
        if known is not None:
            result = known(*values)
            if result is not NotImplemented:
                self._remember((len(args), *kwargs), known)
                return result
        with Recording(dict(zip(form.names, given, strict=True))) as record:
            result = operation(*args, **kwargs)
        made = plan_of(record, form.parameters, values, alignment, result)
        if made is not None:
            if len(form.plans) >= MAX_PLANS:
                form.plans.clear()
            form.plans[key] = made  # perhaps for one that did not fit tensors of another mode, as of inference mode
        return result

    def _remember(self, written: tuple[Any, ...], plan: Plan) -> None:
        """Make a plan that a call went by the first of the recent ones."""
        self.recent[written] = [plan, *self.recent.get(written, ())][:RECENT]


class Form:
    """One way to write an operation's arguments: how many, under which names, of which types.

    Attributes:
        places: of the arrays among the arguments; the others are settings.
        names: of the arrays' parameters.
        parameters: of plans: `a0`, `a1` for arrays, `s0`, `s1` for settings, in the order of the arguments.
        pointer: tells the address of an array; None when calls of this form have no plans: the arrays are neither all
            torch's nor all CuPy's, or something else is no constant.
        plans: the plans by `key`.
    """

    def __init__(self, names: list[str], values: tuple[Any, ...]) -> None:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        self.places = [i for i, value in enumerate(values) if not isinstance(value, SETTINGS)]
        self._others = [i for i in range(len(values)) if i not in self.places]
        self.names = [names[i] for i in self.places]
        self.parameters = [""] * len(values)
        for letter, places in (("a", self.places), ("s", self._others)):
            for number, i in enumerate(places):
                self.parameters[i] = f"{letter}{number}"
        self.plans: dict[Any, Plan] = {}
        self.pointer: Callable[[Any], int] | None = None
        self._readers: tuple[Callable[[Any], Any], ...] = ()
        types = {type(values[i]) for i in self.places}
        if torch is not None and types and types <= {torch.Tensor, torch.nn.Parameter}:
            self.pointer = torch.Tensor.data_ptr
            self._readers = attrgetter("dtype", "shape", "device", "requires_grad"), torch.Tensor.stride
        elif cupy is not None and types == {cupy.ndarray}:
            self.pointer = attrgetter("data.ptr")
            self._readers = (attrgetter("dtype", "shape", "strides", "data.device_id"),)

    def key(self, values: Sequence[Any], arrays: Sequence[Any], alignment: tuple[int, ...]) -> tuple[Any, ...]:
        """A call's signature."""
        key = [_environment(KERNELS), alignment, *(values[i] for i in self._others)]
        for read in self._readers:
            key += map(read, arrays)
        return tuple(key)


def _guards(tensors: Sequence[Any]) -> Callable[..., bool]:
    """What says whether tensors are like these: the guards of torch.compile, which compare all in one call."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    make = sys.modules["torch"]._C._dynamo.guards.TensorGuards
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _write_settings(code: Code, parameters: Sequence[str], values: Sequence[Any]) -> None:
    """Write the check of the arguments' types, and of those that are no arrays."""
    others = [(name, value) for name, value in zip(parameters, values, strict=True) if isinstance(value, SETTINGS)]
    read = [*(f"type({name})" for name in parameters), f"{code.name(_environment)}({code.name(KERNELS)})"]
    known = (*map(type, values), _environment(KERNELS), *(value for _, value in others))
    code.line(f"if ({', '.join([*read, *(name for name, _ in others)])}) != {code.name(known)}:")
    code.line("    return NotImplemented")


def _write_starts(code: Code, place: Place, arrays: Sequence[Any]) -> None:
    """Write the check of what arrays are like, and where they start.

    What is not like CuPy arrays mostly differs by a shape. The stride of an axis of length 1 says nothing, so a shape
    without gaps has but one set of strides.
    """
    if place.kind == "torch":
        code.line(f"if not alike({', '.join(f'a{i}' for i in range(len(arrays)))}):")
        code.line("    return NotImplemented")
        for i in range(len(arrays)):
            code.line(f"p{i} = a{i}{place.address}")
        return
    for i, array in enumerate(arrays):
        code.line(f"m{i} = a{i}.data")
        traits = ("shape", "dtype", "_c_contiguous" if array._c_contiguous else "strides", "data.device_id")
        known = [code.name(attrgetter(trait)(array)) for trait in traits]
        read = [f"a{i}.{trait}" for trait in traits[:-1]] + [f"m{i}.device_id"]
        code.line(f"if {' or '.join(f'{is_} != {was}' for is_, was in zip(read, known, strict=True))}:")
        code.line("    return NotImplemented")
        code.line(f"p{i} = m{i}.ptr")


def _write_alignment(code: Code, alignment: tuple[int, ...]) -> None:
    """Write the check of where arrays start."""
    addresses = [f"p{i}" for i in range(len(alignment))]
    if any(alignment):
        code.line(f"if ({''.join(f'{p} % {ALIGNMENT}, ' for p in addresses)}) != {code.name(alignment)}:")
    else:
        code.line(f"if ({' | '.join(addresses)}) % {ALIGNMENT}:")
    code.line("    return NotImplemented")


def _write_memory(code: Code, record: Recording, results: Sequence[int | None]) -> None:
    """Write what a call allocates: results, and one piece of memory for all that it does not return."""
    place, makers = record.place, record.makers
    returned = [slot for slot in makers if slot in results]
    if place.parts_are_cheap:
        _write_piece(code, record, returned, arrays=True)
    else:
        for slot in returned:
            code.line(f"a{slot} = {code.name(makers[slot])}()")
            code.line(f"p{slot} = a{slot}{place.address}")
    _write_piece(code, record, [slot for slot in makers if slot not in results], arrays=False)


def _write_piece(code: Code, record: Recording, slots: Sequence[int], *, arrays: bool) -> None:
    """Write the allocation of one piece of memory for these slots, and of arrays in its parts."""
    if not slots:
        return
    first, sizes = slots[0], [aligned_up(record.array(slot).nbytes) for slot in slots]
    make, address = record.place.memory(sum(sizes))
    code.line(f"m{first} = {code.name(make)}()")
    code.line(f"p{first} = m{first}{address}")
    for slot, start in zip(slots, accumulate(sizes[:-1], initial=0), strict=True):
        behind = f" + {code.name(start)}" if start else ""
        if slot != first:
            code.line(f"p{slot} = p{first}{behind}")
        if arrays:
            code.line(f"a{slot} = {code.name(record.makers[slot])}(m{first}{behind})")


def plan_of(
    record: Recording, parameters: list[str], values: tuple[Any, ...], alignment: tuple[int, ...], result: Any
) -> Plan | None:
    """The plan of a recorded call; None for one that ran on the CPU, or that a recording cannot repeat.

    Args:
        record: of the call.
        parameters: names for its arguments, see `Form`.
        values: its arguments.
        alignment: the addresses of its arrays modulo `ALIGNMENT`.
        result: what it returned.
    """
    if not record.repeatable:
        return None
    place, code = record.place, Code()
    leaves = result if type(result) is tuple else (result,)
    results = [record.slot(leaf) for leaf in leaves]
    if any(slot is None and not isinstance(leaf, SETTINGS) for slot, leaf in zip(results, leaves, strict=True)):
        return None  # a view of something
    _write_settings(code, parameters, values)
    _write_starts(code, place, record.arguments)
    _write_alignment(code, alignment)
    code.line(f"if {code.name(jit.THREAD)}.current_device() != {code.name(place.device)}:")
    code.line(f"    with {code.name(place.current)}():")
    code.line(f"        return run({', '.join(parameters)})")
    _write_memory(code, record, results)
    current, handle = place.streams
    code.line(f"stream = {code.name(current)}(){handle}")
    for write in in_graphs(record.steps):
        write(code)
    returned = [code.name(leaf) if slot is None else f"a{slot}" for slot, leaf in zip(results, leaves, strict=True)]
    code.line(f"return {', '.join(returned)}" + ("," if type(result) is tuple else ""))
    return code.function(parameters, alike=_guards(record.arguments) if place.kind == "torch" else None)
