"""What a call did to the GPU, written down so that the next call like it can do the same with other pointers.

While an operation runs under a `Recording`, the addresses of its arguments and of the memory it allocates are
`Pointer`s: integers that know what they point to, and how far behind its start. `Params` keeps them apart from the
other values of a kernel's parameter struct until the launch. What is left at the end is a list of allocations and a
list of steps, of which `Code` makes a function; see `cupy_mla.ops._plan`, which says when.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

# Launches choose kernels by alignment up to this many bytes, so calls that are alike agree on addresses modulo it.
ALIGNMENT = 16


class Pointer(int):
    """An address that knows which slot of the recording it lies in, and how many bytes from its start."""

    slot: int
    offset: int

    def __new__(cls, address: int, slot: int, offset: int = 0) -> Pointer:
        pointer = super().__new__(cls, address)
        pointer.slot, pointer.offset = slot, offset
        return pointer

    def __add__(self, nbytes: int) -> Pointer:
        return Pointer(int(self) + nbytes, self.slot, self.offset + nbytes)


class Packed(NamedTuple):
    """A kernel's parameters: a struct and the values of its fields."""

    layout: Params
    values: tuple[Any, ...]

    def __bytes__(self) -> bytes:
        return self.layout.struct.pack(*self.values)

    def parts(self) -> list[Pointer | bytes]:
        """The struct cut into its pointers and the bytes between them."""
        whole, end = bytes(self), 0
        parts: list[Pointer | bytes] = []
        for start, value in zip(self.layout.offsets, self.values, strict=True):
            if isinstance(value, Pointer):
                parts += [whole[end:start], value]
                end = start + 8
        return [*parts, whole[end:]]


class Params:
    """The layout of a kernel's parameter struct, in the format characters of the module `struct`.

    Attributes:
        offsets: bytes before each field.
    """

    def __init__(self, layout: str) -> None:
        self.struct = struct.Struct(layout)
        codes = "".join(code * int(count or 1) for count, code in re.findall(r"(\d*)([A-Za-z])", layout))
        self.offsets = [struct.calcsize("=" + codes[:at]) for at, code in enumerate(codes) if code != "x"]

    def pack(self, *values: Any) -> Packed:
        """The struct with these values in its fields; a pointer is an integer."""
        return Packed(self, values)


class Code:
    """A Python function under construction: straight lines, with a name for every object they use.

    Array i is called `a{i}`, its address `p{i}`, and the caller's current stream `stream`. Everything else goes by a
    name that `name` gives it, numbers included, so that calls that differ in nothing but those share the text.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._packed: tuple[Packed | None, str] = (None, "")

    def name(self, value: Any) -> str:
        """A name for an object."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def line(self, text: str) -> None:
        """Add a line."""
        self._lines.append(text)

    def address(self, pointer: Pointer) -> str:
        """What an address is in a call with other arrays."""
        return f"p{pointer.slot}" + (f" + {self.name(pointer.offset)}" if pointer.offset else "")

    def params(self, params: Packed) -> str:
        """A kernel's parameters in a call with other arrays; launches in a row may share them."""
        known, name = self._packed
        if known is not params:
            parts = [part for part in params.parts() if isinstance(part, Pointer) or part]
            layout = struct.Struct("=" + "".join("Q" if isinstance(p, Pointer) else f"{len(p)}s" for p in parts))
            fields = (self.address(p) if isinstance(p, Pointer) else self.name(p) for p in parts)
            name = f"params{len(self._lines)}"
            self.line(f"{name} = {self.name(layout.pack)}({', '.join(fields)})")
            self._packed = params, name
        return name

    def function(self, parameters: list[str], **more: Any) -> Callable[..., Any]:
        """The function; `more` are names for further objects."""
        names = self._names | more
        text = "\n    ".join([f"def run({', '.join(parameters)}):", *self._lines])
        exec(_compiled(text), names)
        return names["run"]


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    return compile(text, "<plan>", "exec")


Step = Callable[[Code], None]  # writes what it does


class Recording:
    """The allocations and steps of one call. Slots are numbered: array arguments first, then what it allocates.

    Args:
        arguments: the call's arrays by the name of the parameter, in the order of their slots.

    Attributes:
        makers: allocates each of the slots after the arguments, by slot.
        steps: writes what went to the stream, in order.
        place: where the call's kernels run; None for a call that launches none.
        complete: False once the call did what a recording cannot repeat.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._names = list(arguments)
        self._slots = list(arguments.values())
        self._described: set[str] = set()
        self.makers: dict[int, Callable[..., Any]] = {}
        self.steps: list[Step] = []
        self.place: Any = None
        self.complete = True

    def __enter__(self) -> Recording:
        _THREAD.recording = self
        return self

    def __exit__(self, *error: object) -> None:
        _THREAD.recording = None

    @property
    def repeatable(self) -> bool:
        """Whether this tells the whole call.

        It does not when the call ran on the CPU, when it described memory that it neither was given nor allocated,
        when it took the value of an array for a setting (it then never described that array), or when it was given
        one array under two names, which another call like it may not be.
        """
        different = len({id(array) for array in self._slots}) == len(self._slots)
        return self.place is not None and self.complete and different and len(self._described) == len(self._names)

    def pointer(self, name: str, array: Any, address: int) -> int:
        """The address of an array that the call describes under a name."""
        if getattr(array, "requires_grad", False):
            self.complete = False  # the next call may be one that autograd follows
        if name in self._names:
            slot = self._names.index(name)
            if self._slots[slot] is array:
                self._described.add(name)
                return Pointer(address, slot)
        known = self.slot(array)
        if known is None:
            self.complete = False
            return address
        return Pointer(address, known)

    def slot(self, array: Any) -> int | None:
        """The slot of an array, None for one that has none."""
        return next((slot for slot, known in enumerate(self._slots) if known is array), None)

    @property
    def arguments(self) -> list[Any]:
        """The call's arrays."""
        return self._slots[: len(self._names)]

    def array(self, slot: int) -> Any:
        """The array in a slot."""
        return self._slots[slot]

    def allocated(self, array: Any, make: Callable[..., Any]) -> None:
        """Note an allocation, and how to make it again."""
        self.makers[len(self._slots)] = make
        self._slots.append(array)


_THREAD = threading.local()


def recording() -> Recording | None:
    """The recording that this thread's current call runs under."""
    return getattr(_THREAD, "recording", None)
