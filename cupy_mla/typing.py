"""Types of arguments. Arrays are a protocol, so that neither CuPy nor torch has to be there to check a program."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

from .layouts import CacheLayout as CacheLayout  # names of the layouts of a model's cache
from .layouts import DenseLayout as DenseLayout  # of those that `cupy_mla.dense_decode` takes
from .layouts import PagedLayout as PagedLayout  # of all that are written, gathered and unpacked
from .layouts import WritableLayout as WritableLayout  # of those that `cupy_mla.concat_and_cache_mla` writes


class AnyArray(Protocol):
    """A NumPy, CuPy or torch array. Functions tell which by the class, and refuse all others."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""

    @property
    def dtype(self) -> Any:
        """Type of the items, as the library has it."""

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Kind and number of the device, as DLPack has them."""

    def __getitem__(self, index: Any, /) -> Any:
        """A part of the array, as the library has it."""

    def __len__(self) -> int:
        """Length of the first axis."""


A = TypeVar("A", bound=AnyArray)
"""The caller's kind of array: results are of that class. Their dtypes stand in the docstrings."""

ScaleFormat = Literal["fp32", "ue8m0"]
"""How scales of FP8 rows are chosen: any float32, or powers of two."""

ScaleRounding = Literal["up", "nearest"]
"""How e4m3 scales are chosen: the next that is large enough, or the nearest."""

GradientDtype = Literal["bfloat16", "float32"]
"""Dtypes of gradients."""

CallScale = AnyArray | float
"""A scale that a call brings: a number, or an array of one float32 where the others are, which is read there alone."""

QueryScaleFormat = Literal["fp32", "ue8m0", "mxfp4"]
"""How the indexer's queries are quantized: e4m3 under such a scale, or e2m1 under a power of two a group of 32."""

ModelKind = Literal["v32", "v4", "v41"]
"""Kinds of models: DeepSeek-V3.2 and those like it, DeepSeek-V4, DeepSeek-V4.1."""

LibraryName = Literal["numpy", "cupy", "torch"]
"""Kinds of arrays."""
