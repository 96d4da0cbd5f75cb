"""What an operation costs the host, paid once: plans of calls that were seen before.

Checks, shapes of outputs, choice of kernels and their parameters depend on everything of a call except its pointers:
the shapes, strides, dtypes, devices and alignment of its arrays, and its settings. That is the call's signature. The
first call of a signature runs in full, under a `Recording`, which becomes a function of straight lines that allocates,
puts the pointers in their places and launches: the signature's plan, which serves later calls. A call that fails leaves
no plan, so whatever a plan repeats has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np

from .. import arrays
from ..arrays import Place, aligned_up
from ..cuda import jit
from ..recording import ALIGNMENT, Code, Recording

Operation = TypeVar("Operation", bound=Callable[..., Any])

MAX_PLANS = 1024  # of an operation, for one way to write its arguments
RECENT = 4
# Takes a call's arrays; NotImplemented for CuPy arrays unlike those of its signature, and for any of another alignment.
Plan = Callable[..., Any]
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
    names = list(signature(operation).parameters)
    forms: dict[tuple[Any, ...], Form] = {}
    _forget.append(forms.clear)

    @wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        if traced():
            return in_graph(operation.__name__)(*args, **kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        kinds = (*map(type, values), *kwargs)
        form = forms.get(kinds)
        if form is None:
            form = forms[kinds] = Form([*names[: len(args)], *kwargs], values)
        if form.pointer is None or arrays.CHECK_VALUES:
            return operation(*args, **kwargs)
        given, settings = form.arrays(values), (_environment(KERNELS), form.settings(values))
        for alike, of, plan in form.recent:
            if of == settings and (alike is None or alike(*given)):
                result = plan(*given)
                if result is not NotImplemented:
                    return result
        try:
            alignment = tuple(pointer % ALIGNMENT for pointer in map(form.pointer, given))
            key = form.key(settings, given, alignment)
            known = form.plans.get(key)
        except (RuntimeError, TypeError):  # a tensor without memory, a setting without hash: the checks say it better
            return operation(*args, **kwargs)
        if known is not None:
            form.remember(given, settings, known)
            return known(*given)
        with Recording(dict(zip(form.names, given, strict=True))) as record:
            result = operation(*args, **kwargs)
        made = plan_of(record, alignment, result)
        if made is not None:
            if len(form.plans) >= MAX_PLANS:
                form.plans.clear()
            form.plans[key] = made
        return result

    return call  # type: ignore[return-value]


class Form:
    """One way to write an operation's arguments: how many, under which names, of which types.

    Attributes:
        names: of the arrays' parameters.
        arrays: picks the arrays out of the arguments, as a tuple.
        settings: picks the others, which are constants.
        pointer: tells the address of an array; None when calls of this form have no plans: the arrays are neither all
            torch's nor all CuPy's, or something else is no constant.
        plans: the plans by `key`.
        recent: the last plans that calls went by, found faster than by `key`: what says whether tensors are like those
            of the plan, up to their alignment, the call's settings, and the plan.
    """

    def __init__(self, names: list[str], values: tuple[Any, ...]) -> None:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        places = [i for i, value in enumerate(values) if not isinstance(value, SETTINGS)]
        self.names = [names[i] for i in places]
        self.arrays = _picker(places)
        self.settings = _picker([i for i in range(len(values)) if i not in places])
        self.plans: dict[Any, Plan] = {}
        self.pointer: Callable[[Any], int] | None = None
        self.recent: list[tuple[Callable[..., bool] | None, Any, Plan]] = []
        self._readers: tuple[Callable[[Any], Any], ...] = ()
        self._compare: Callable[[Sequence[Any]], Callable[..., bool] | None] | None = None
        types = {type(values[i]) for i in places}
        if torch is not None and types and types <= {torch.Tensor, torch.nn.Parameter}:
            self.pointer = torch.Tensor.data_ptr
            self._readers = attrgetter("dtype", "shape", "device", "requires_grad"), torch.Tensor.stride
            self._compare = _guards if hasattr(torch._C._dynamo.guards, "TensorGuards") else None
        elif cupy is not None and types == {cupy.ndarray}:
            self.pointer = attrgetter("data.ptr")
            self._readers = (attrgetter("dtype", "shape", "strides", "data.device_id"),)
            self._compare = lambda arrays: None

    def key(self, settings: Any, arrays: Sequence[Any], alignment: tuple[int, ...]) -> tuple[Any, ...]:
        """A call's signature."""
        key = [settings, alignment]
        for read in self._readers:
            key += map(read, arrays)
        return tuple(key)

    def remember(self, arrays: Sequence[Any], settings: Any, plan: Plan) -> None:
        """Make a plan that a call went by the first of the recent ones."""
        if self._compare is not None:
            others = [entry for entry in self.recent if entry[2] is not plan]
            self.recent = [(self._compare(arrays), settings, plan), *others[: RECENT - 1]]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Picks the items in these places, as fast as Python can."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda items: ()
    (place,) = places
    return lambda items: (items[place],)


def _guards(tensors: Sequence[Any]) -> Callable[..., bool]:
    """What says whether tensors are like these: the guards of torch.compile, which compare all in one call."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    make = sys.modules["torch"]._C._dynamo.guards.TensorGuards
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _write_starts(code: Code, place: Place, arrays: Sequence[Any]) -> None:
    """Write where tensors start, or where CuPy arrays do, once these are known to be like the given ones.

    What is not like them mostly differs by a shape. The stride of an axis of length 1 says nothing, so a shape without
    gaps has but one set of strides.
    """
    for i, array in enumerate(arrays):
        if place.kind == "torch":
            code.line(f"p{i} = a{i}{place.address}")
            continue
        traits = ("dtype", "_c_contiguous" if array._c_contiguous else "strides")
        known = (*(getattr(array, trait) for trait in traits), array.data.device_id)
        read = ", ".join(f"a{i}.{trait}" for trait in traits)
        code.line(f"m{i} = a{i}.data")
        code.line(f"if a{i}.shape != {code.name(array.shape)} or ({read}, m{i}.device_id) != {code.name(known)}:")
        code.line("    return NotImplemented")
        code.line(f"p{i} = m{i}.ptr")


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
    for slot, start in zip(slots, accumulate(sizes, initial=0), strict=False):
        behind = f" + {code.name(start)}" if start else ""
        if slot != first:
            code.line(f"p{slot} = p{first}{behind}")
        if arrays:
            code.line(f"a{slot} = {code.name(record.makers[slot])}(m{first}{behind})")


def plan_of(record: Recording, alignment: tuple[int, ...], result: Any) -> Plan | None:
    """The plan of a recorded call; None for one that ran on the CPU, or that a recording cannot repeat.

    Args:
        record: of the call.
        alignment: the addresses of its arguments modulo `ALIGNMENT`.
        result: what it returned.
    """
    if not record.repeatable:
        return None
    place, code = record.place, Code()
    leaves = result if type(result) is tuple else (result,)
    results = [record.slot(leaf) for leaf in leaves]
    if any(slot is None and not isinstance(leaf, SETTINGS) for slot, leaf in zip(results, leaves, strict=True)):
        return None  # a view of something
    parameters = [f"a{slot}" for slot in range(len(alignment))]
    addresses = [f"p{slot}" for slot in range(len(alignment))]
    _write_starts(code, place, record.arguments)
    if any(alignment):
        code.line(f"if ({''.join(f'{p} % {ALIGNMENT}, ' for p in addresses)}) != {code.name(alignment)}:")
    else:
        code.line(f"if ({' | '.join(addresses)}) % {ALIGNMENT}:")
    code.line("    return NotImplemented")
    code.line(f"if {code.name(jit.THREAD)}.current_device() != {code.name(place.device)}:")
    code.line(f"    with {code.name(place.current)}():")
    code.line(f"        return run({', '.join(parameters)})")
    _write_memory(code, record, results)
    code.line(f"stream = {code.name(place.streams)}()")
    for write in record.steps:
        write(code)
    returned = [code.name(leaf) if slot is None else f"a{slot}" for slot, leaf in zip(results, leaves, strict=True)]
    code.line(f"return {', '.join(returned)}" + ("," if type(result) is tuple else ""))
    return code.function(parameters)
