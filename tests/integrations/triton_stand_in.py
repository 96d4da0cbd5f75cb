"""Triton's language on the CPU, of torch's tensors, as far as vLLM's kernels of DeepSeek-V3.2's layers use it. So a
wheel's kernel runs without Triton and without a GPU: `Kernel(function)[grid](*arguments)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch


class Pointer:
    """A place in a tensor's memory, or places of a block."""

    def __init__(self, items: torch.Tensor, at: Any = 0) -> None:
        self.items, self.at = items, at
        self.dtype = SimpleNamespace(element_ty=items.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pointer:
        """Its first item. Items of its whole memory can be reached from there."""
        reached = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((reached,), (1,), 0), tensor.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.items, self.at + offset)


def pointer(argument: Any) -> Any:
    return Pointer.of(argument) if isinstance(argument, torch.Tensor) else argument


def load(of: Pointer, mask: Any = None, other: float = 0.0) -> torch.Tensor:
    at = torch.as_tensor(of.at)
    if mask is None:
        return of.items[at]
    return torch.where(mask, of.items[at.where(mask, 0)], torch.tensor(other, dtype=of.items.dtype))


def store(to: Pointer, numbers: Any, mask: Any = None) -> None:
    at = torch.as_tensor(to.at)
    numbers = torch.as_tensor(numbers).to(to.items.dtype).expand(at.shape)
    if mask is not None:
        at, numbers = at[mask], numbers[mask]
    to.items[at] = numbers


def largest(x: torch.Tensor, axis: int | None = None, keep_dims: bool = False) -> torch.Tensor:
    return x.amax() if axis is None else x.amax(axis, keepdim=keep_dims)


def larger(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def smaller(a: Any, b: Any) -> torch.Tensor:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


class Kernel:
    """A kernel's function, run once for each program of a grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.arg_names = list(inspect.signature(function).parameters)
        self.constexprs = [name for name in self.arg_names if name.isupper()]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            named = {name: pointer(named[name]) for name in named if name in self.arg_names}
            pointers = [pointer(each) for each in arguments]
            for program in product(*map(range, grid)):
                language.program_id = lambda axis, program=program: torch.tensor(program[axis])
                self.function(*pointers, **named)

        return run


language = SimpleNamespace(
    arange=torch.arange, load=load, store=store, sum=torch.sum, max=largest, maximum=larger, minimum=smaller,
    abs=torch.abs, where=torch.where, reshape=torch.reshape, rsqrt=torch.rsqrt, div_rn=torch.div, exp=torch.exp,
    exp2=torch.exp2, log=torch.log, log2=torch.log2, int64=torch.int64, float32=torch.float32,
    bfloat16=torch.bfloat16, float8e4nv=torch.float8_e4m3fn,
    math=SimpleNamespace(exp2=torch.exp2, ceil=torch.ceil, log2=torch.log2),
)  # fmt: skip


def install(module: Any, *kernels: str) -> None:
    """Give a module, imported without Triton, its language, and make these functions of it kernels."""
    module.tl = language
    module.triton = SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    for name in kernels:
        setattr(module, name, Kernel(getattr(module, name)))
