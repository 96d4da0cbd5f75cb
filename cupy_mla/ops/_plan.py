"""What an operation costs the host, paid once: plans of calls that were seen before.

Checks, shapes of outputs, choice of kernels and their parameters depend on everything of a call except its pointers:
the shapes, strides, dtypes, devices and alignment of its arrays, and its settings. That is the call's signature. The
first call of a signature runs in full, under a `Recording`; a later one allocates, exchanges the pointers and launches.
A call that fails leaves no plan, so whatever a plan repeats has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np

from .. import arrays
from ..cuda.jit import current_device
from ..recording import ALIGNMENT, Recording, picker

Operation = TypeVar("Operation", bound=Callable[..., Any])

MAX_PLANS = 1024  # of an operation, for one way to write its arguments
RECENT = 4
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
        try:
            pointers = [*map(form.pointer, given)]
            low = 0
            for pointer in pointers:
                low |= pointer
            low %= ALIGNMENT
            plan = None
            if not low:
                for alike, of, recent in form.recent:
                    if alike(*given) and of == settings:
                        plan = recent
                        break
            if plan is None:
                key = form.key(settings, given, pointers if low else ())
                plan = form.plans.get(key)
                if plan is not None and not low:
                    form.remember(given, settings, plan)
        except (RuntimeError, TypeError):  # a tensor without memory, a setting without hash: the checks say it better
            return operation(*args, **kwargs)
        if plan is not None:
            return plan.run(given, pointers)
        with Recording(dict(zip(form.names, given, strict=True))) as record:
            result = operation(*args, **kwargs)
        plan = Plan.of(record, result)
        if plan is not None:
            if len(form.plans) >= MAX_PLANS:
                form.plans.clear()
            form.plans[key] = plan
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
        recent: the last plans that calls of aligned arrays went by, found faster than by `key`: what says whether
            arrays are like those of the plan, the call's settings, and the plan.
    """

    def __init__(self, names: list[str], values: tuple[Any, ...]) -> None:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        places = [i for i, value in enumerate(values) if not isinstance(value, SETTINGS)]
        self.names = [names[i] for i in places]
        self.arrays = picker(places)
        self.settings = picker([i for i in range(len(values)) if i not in places])
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
            self._compare = partial(_compared, *self._readers)

    def key(self, settings: Any, arrays: Sequence[Any], pointers: Sequence[int]) -> tuple[Any, ...]:
        """A call's signature.

        Args:
            settings: its constants.
            arrays: its arrays.
            pointers: their addresses, unless all are aligned.
        """
        key = [settings]
        for read in self._readers:
            key += map(read, arrays)
        key += [pointer % ALIGNMENT for pointer in pointers]
        return tuple(key)

    def remember(self, arrays: Sequence[Any], settings: Any, plan: Plan) -> None:
        """Make a plan that a call went by the first of the recent ones."""
        if self._compare is not None:
            others = [entry for entry in self.recent if entry[2] is not plan]
            self.recent = [(self._compare(arrays), settings, plan), *others[: RECENT - 1]]


def _guards(tensors: Sequence[Any]) -> Callable[..., bool]:
    """What says whether tensors are like these: the guards of torch.compile, which compare all in one call."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    make = sys.modules["torch"]._C._dynamo.guards.TensorGuards
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _compared(read: Callable[[Any], Any], arrays: Sequence[Any]) -> Callable[..., bool]:
    """What says whether arrays are like these in what `read` tells of each."""
    known = [*map(read, arrays)]
    return lambda *others: [*map(read, others)] == known


class Plan:
    """A call on a GPU, to be repeated with other arrays."""

    __slots__ = ("_address", "_constants", "_makers", "_pick", "_place", "_steps", "_stream")

    def __init__(self, record: Recording, constants: list[Any], pick: Callable[[list[Any]], Any]) -> None:
        """`pick` takes the result out of the arrays in the recording's slots and the constants behind them."""
        self._place = place = record.place
        self._stream, self._address = place.streams, place.address
        self._makers, self._steps = record.makers, record.steps
        self._constants, self._pick = constants, pick

    @classmethod
    def of(cls, record: Recording, result: Any) -> Plan | None:
        """The plan of a recorded call; None for one that ran on the CPU, or that a recording cannot repeat."""
        if not record.repeatable:
            return None
        constants: list[Any] = []
        places = []
        for leaf in result if type(result) is tuple else (result,):
            slot = record.slot(leaf)
            if slot is None:
                if not isinstance(leaf, SETTINGS):
                    return None  # a view of something
                slot = record.num_slots + len(constants)
                constants.append(leaf)
            places.append(slot)
        return cls(record, constants, itemgetter(*places))

    def run(self, arrays: Sequence[Any], pointers: list[int]) -> Any:
        """Make the call with other arguments.

        Args:
            arrays: its arrays, in order.
            pointers: their addresses.
        """
        if current_device() != self._place.device:
            with self._place.current():
                return self.run(arrays, pointers)
        slots = [*arrays]
        for make in self._makers:
            array = make()
            slots.append(array)
            pointers.append(self._address(array))
        stream = self._stream()
        for step in self._steps:
            step(pointers, stream)
        return self._pick(slots + self._constants)
