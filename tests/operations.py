"""One call of every operation in the table, and of FlashMLA's front doors: for what must hold of all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.ops import table

from .kinds import NumPy, poisoned


def in_threads(work: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    """Call it in a thread for each of the arguments, at the same time."""
    threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass
class Call:
    """An operation with arguments whose shapes are always the same and whose values are random.

    Attributes:
        arrays: array arguments by parameter.
        settings: the other arguments.
        written: which arrays are written in place.
        made: arrays that would be allocated and could be given instead, poisoned.
    """

    operation: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    settings: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    made: dict[str, np.ndarray] = field(default_factory=dict)

    def run(self, kind: NumPy, arrays: dict[str, Any] | None = None) -> list[np.ndarray]:
        """Make the call over a kind of array; what it returned and what it wrote, as NumPy arrays.

        Args:
            arrays: the array arguments, when they already are of that kind.
        """
        arrays = {name: kind.put(a) for name, a in self.arrays.items()} if arrays is None else arrays
        returned = self.operation(**arrays, **self.settings)
        returned = returned if isinstance(returned, tuple) else (returned,)
        results = [a for a in returned if a is not None] + [arrays[name] for name in self.written]
        return [kind.take(a).copy() for a in results]

    def with_outputs(self) -> Call:
        """The same call with every output given."""
        return Call(self.operation, self.arrays | self.made, self.settings, self.written + tuple(self.made))


def first_call(operation: table.Operation, rng: np.random.Generator) -> Call:
    """The first of an operation's example calls, which gives every array."""
    arguments = next(operation.calls(rng)).arguments
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    settings = {name: value for name, value in arguments.items() if name not in arrays}
    given = [result for result in operation.results if result.name in operation.parameters]
    made = {result.name: poisoned(result.shape(**arguments), result.dtype) for result in given}
    return Call(operation.function, arrays, settings, operation.written, made)


def flash_mla_sparse_fwd(rng: np.random.Generator) -> Call:
    """Over bf16 rows, which it has no scales for."""
    prefill = table.OPERATIONS["sparse_prefill"]
    of_bf16 = replace(prefill, examples=lambda *a: (c for c in prefill.examples(*a) if "k_scale" not in c.arguments))
    return replace(first_call(of_bf16, rng), operation=cupy_mla.flash_mla_sparse_fwd)


def flash_mla_with_kvcache(rng: np.random.Generator) -> Call:
    """A decode of two caches, by a schedule that it makes."""
    call = first_call(table.OPERATIONS["sparse_decode"], rng)
    arrays = {n: a for n, a in call.arrays.items() if n not in ("extra_indices", "extra_topk_length")}
    arrays["extra_indices_in_kvcache"] = call.arrays["extra_indices"]
    arrays["descale_q"], arrays["descale_k"] = arrays.pop("q_scale"), arrays.pop("k_scale")
    schedule, _ = flash_mla.get_mla_metadata()
    settings = {
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": schedule,
        "is_fp8_kvcache": True,
    }  # fmt: skip
    made = {"out": call.made["out"]}
    return replace(call, operation=cupy_mla.flash_mla_with_kvcache, arrays=arrays, settings=settings, made=made)


OPERATIONS: dict[str, Callable[[np.random.Generator], Call]] = {
    **{operation.name: partial(first_call, operation) for operation in table.TABLE},
    "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
    "flash_mla_with_kvcache": flash_mla_with_kvcache,
}
