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
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np

from .. import arrays
from ..cuda import jit
from ..recording import ALIGNMENT, Code, Recording

Operation = TypeVar("Operation", bound=Callable[..., Any])

MAX_PLANS = 1024  # of an operation, for one way to write its arguments
RECENT = 4
Plan = Callable[..., Any]  # takes a call's arrays; NotImplemented when one starts at another address modulo ALIGNMENT
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
            if of == settings and alike(*given):
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
        recent: the last plans that calls went by, found faster than by `key`: what says whether arrays are like those
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
        self.recent: list[tuple[Callable[..., bool], Any, Plan]] = []
        self._readers: tuple[Callable[[Any], Any], ...] = ()
        self._compare: Callable[[Sequence[Any]], Callable[..., bool]] | None = None
        types = {type(values[i]) for i in places}
        if torch is not None and types and types <= {torch.Tensor, torch.nn.Parameter}:
            self.pointer = torch.Tensor.data_ptr
            self._readers = attrgetter("dtype", "shape", "device", "requires_grad"), torch.Tensor.stride
            self._compare = _guards if hasattr(torch._C._dynamo.guards, "TensorGuards") else None
        elif cupy is not None and types == {cupy.ndarray}:
            self.pointer = attrgetter("data.ptr")
            self._readers = (attrgetter("dtype", "shape", "strides", "data.device_id"),)
            self._compare = _compared

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


def _compared(arrays: Sequence[Any]) -> Callable[..., bool]:
    """What says whether CuPy arrays are like these; it soon knows when they are not, mostly by a shape."""
    code, names, alike = Code(), [f"a{i}" for i in range(len(arrays))], []
    for name, array in zip(names, arrays, strict=True):
        # Where no axis is of length 0 or 1, a shape has but one set of strides without gaps, and this is read faster.
        strides = "_c_contiguous" if array._c_contiguous and min(array.shape, default=0) > 1 else "strides"
        traits = ("dtype", strides, "data.device_id")
        known = tuple(attrgetter(trait)(array) for trait in traits)
        read = ", ".join(f"{name}.{trait}" for trait in traits)
        alike.append(f"{name}.shape == {code.name(array.shape)} and ({read}) == {code.name(known)}")
    code.line(f"return {' and '.join(alike)}")
    return code.function(names)


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
    for array, address in zip(parameters, addresses, strict=True):
        code.line(f"{address} = {array}{place.address}")
    if any(alignment):
        code.line(f"if ({''.join(f'{p} % {ALIGNMENT}, ' for p in addresses)}) != {code.name(alignment)}:")
    else:
        code.line(f"if ({' | '.join(addresses)}) % {ALIGNMENT}:")
    code.line("    return NotImplemented")
    code.line(f"if {code.name(jit.THREAD)}.current_device() != {code.name(place.device)}:")
    code.line(f"    with {code.name(place.current)}():")
    code.line(f"        return run({', '.join(parameters)})")
    for slot, make in enumerate(record.makers, len(parameters)):
        address = place.address
        if slot not in results:
            make, address = place.memory(record.nbytes(slot))
        code.line(f"a{slot} = {code.name(make)}()")
        code.line(f"p{slot} = a{slot}{address}")
    code.line(f"stream = {code.name(place.streams)}()")
    for write in record.steps:
        write(code)
    returned = [code.name(leaf) if slot is None else f"a{slot}" for slot, leaf in zip(results, leaves, strict=True)]
    code.line(f"return {', '.join(returned)}" + ("," if type(result) is tuple else ""))
    return code.function(parameters)
