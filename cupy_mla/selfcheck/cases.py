"""Example calls from the table of operations, and when the results of two runs agree.

With a GPU its results are compared with NumPy's. Without one, NumPy's attention is compared with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import layouts
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..ops.table import ALL, OPERATIONS, TABLE, Call, Operation, Wanted
from ..reference.cache import rows_of

# The absolute and the relative difference that the rounding of both sides can make in results of attention.
BOUNDS = {BFLOAT16: (1e-3, 3.01 / 128), FLOAT16: (1e-3, 3.01 / 128), FLOAT32: (1e-5, 16.02 / 65536)}


class Case(NamedTuple):
    """An example call of an operation."""

    operation: Operation
    call: Call

    @property
    def name(self) -> str:
        return f"{self.operation.name} {self.call.detail}".strip()

    def run(self, put: Callable[[np.ndarray], Any]) -> list[np.ndarray]:
        """All results of the call on copies of its arrays, made by `put`."""
        return self.operation.run(self.call, put)

    def agrees(self, ours: list[np.ndarray], reference: list[np.ndarray]) -> bool:
        """Whether the results of two runs are the same: bit for bit if the operation is exact, else up to rounding."""
        if self.operation.exact:
            return all(a.tobytes() == b.tobytes() for a, b in zip(ours, reference, strict=True))
        return all(_close(a, b, self.operation.of_largest) for a, b in zip(ours, reference, strict=True))


def _close(a: np.ndarray, b: np.ndarray, of_largest: float) -> bool:
    absolute, relative = BOUNDS[b.dtype]
    a, b = a.astype(np.float64), b.astype(np.float64)
    if of_largest:
        absolute = max(absolute, of_largest * np.abs(b).max(initial=0))
    difference = np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=a != b))  # equal infinities differ by nothing
    return bool(((difference <= absolute) | (difference <= relative * np.abs(b))).all())


def cases(rng: np.random.Generator, wanted: Wanted = ALL) -> Iterator[Case]:
    """The example calls of all operations that are `wanted`, with inputs from `rng`."""
    for operation in TABLE:
        for call in operation.calls(rng, wanted):
            yield Case(operation, call)


def float64_error(rng: np.random.Generator) -> float:
    """‖out - ref‖ / ‖ref‖ of a decode in NumPy, where ref is computed in float64 over the rows of its cache."""
    decode, layout = OPERATIONS["sparse_decode"], layouts.QUANTIZED_OF_V32[0]
    call = next(decode.calls(rng, Wanted((layout,))))
    q, cache, indices, scale = (call.arguments[name] for name in ("q", "k_cache", "indices", "sm_scale"))
    out = decode.function(q, cache, indices, scale)[0].astype(np.float64)
    tokens = cache.shape[0] * cache.shape[1]
    rows = rows_of(cache, layout, np.arange(tokens)).astype(np.float64)
    ref = np.zeros(out.shape)
    for b, s in np.ndindex(out.shape[:2]):
        entries = indices[b, s]
        chosen = rows[entries[(entries >= 0) & (entries < tokens)]]
        p = np.exp(q[b, s].astype(np.float64) @ chosen.T * scale)
        ref[b, s] = (p / p.sum(-1, keepdims=True)) @ chosen[:, : layouts.D_V]
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))
