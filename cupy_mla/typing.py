"""Types of arguments. Arrays are a protocol, so a type checker needs neither CuPy nor torch."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

from .layouts import CacheLayout as CacheLayout  # names of the layouts of a model's cache
from .layouts import DenseLayout as DenseLayout  # of those that `cupy_mla.dense_decode` takes
from .layouts import PagedLayout as PagedLayout  # of all that are written, gathered and unpacked
from .layouts import WritableLayout as WritableLayout  # of those that `cupy_mla.concat_and_cache_mla` writes


class AnyArray(Protocol):
    """A NumPy, CuPy or torch array. At run time functions tell them apart by the class, and refuse all others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""

    @property
    def dtype(self) -> Any:
        """The library's type of the items."""

    def __dlpack_device__(self) -> tuple[Any, int]:
        """DLPack's kind and number of the device."""

    def __getitem__(self, index: Any, /) -> Any:
        """A part of the array."""

    def __len__(self) -> int:
        """Length of the first axis."""


A = TypeVar("A", bound=AnyArray)
"""The caller's kind of array. Results have that class; docstrings say their dtypes."""

ScaleFormat = Literal["fp32", "ue8m0"]
"""The scales of FP8 rows: any float32, or powers of two."""

ScaleRounding = Literal["up", "nearest"]
"""How e4m3 scales are rounded: up to the next that is large enough, or to the nearest."""

GradientDtype = Literal["bfloat16", "float32"]
"""Dtypes of gradients."""

CallScale = AnyArray | float
"""A scale as an argument: a number, or an array of one float32 beside the other arrays. The host does not read it."""

QueryScaleFormat = Literal["fp32", "ue8m0", "mxfp4"]
"""How the indexer's queries are quantized: e4m3 with such scales, or e2m1 with a power of two for each group of 32."""

ModelKind = Literal["v32", "v4", "v41"]
"""Kinds of models: DeepSeek-V3.2 and those like it, DeepSeek-V4, DeepSeek-V4.1."""

LibraryName = Literal["numpy", "cupy", "torch"]
"""Kinds of arrays."""
