"""The arguments of operations that have many, as one value: made once by `ops`, taken by both twins.

A field is an `Array` for a launcher, and a NumPy view of the same memory for the reference (`Place.call`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .layouts import Layout


class Prefill(NamedTuple):
    """Of `sparse_prefill`: shapes and dtypes are those of `cupy_mla.sparse_prefill`, without axes of length 1.

    Attributes:
        sink: [h_q], or None.
        length: [s_q], or None.
        out, max_logits, lse: are written.
    """

    q: Any
    kv: Any
    indices: Any
    sm_scale: float
    sink: Any
    length: Any
    out: Any
    max_logits: Any
    lse: Any


class Decode(NamedTuple):
    """Of `sparse_decode`: shapes and dtypes are those of `cupy_mla.sparse_decode`, without axes of length 1.

    Attributes:
        layout: of the caches.
        sink: [h_q], or None.
        length: [b], of the main lists, or None.
        extra, extra_indices, extra_length: of the second cache, or None.
        num_splits: splits of each query's rows; None: to be chosen.
        out, lse: are written; None until `ops` has checked all else.
    """

    layout: Layout
    q: Any
    cache: Any
    indices: Any
    sm_scale: float
    sink: Any = None
    length: Any = None
    extra: Any = None
    extra_indices: Any = None
    extra_length: Any = None
    num_splits: int | None = None
    out: Any = None
    lse: Any = None
