"""Parameter structs of kernels, declared by the names of their fields. Here are those that several modules share; the
others are declared in the launcher's module.

The C++ structs in `kernels_cu` have the same names. A declaration makes the packer, and the `static_assert`s on size
and offsets with which the kernel is compiled. So a field that moves on one side only is a compiler error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

POINTER, INT64, UINT64, INT32, UINT32, FLOAT = "Q", "q", "Q", "i", "I", "f"  # format characters of the module `struct`


class Packed(NamedTuple):
    """A struct with its values, in the order of its fields. A pointer is a `Pointer` or 0."""

    of: Struct
    values: tuple[Any, ...]

    def replaced(self, **fields: Any) -> Packed:
        """A copy with other values in some fields."""
        values, index = list(self.values), self.of.index
        for name, value in fields.items():
            values[index[name]] = value
        return Packed(self.of, tuple(values))

    def part(self, base: Struct) -> Packed:
        """The part of `base`, which is this struct or the one that it derives from."""
        return self if self.of is base else Packed(base, self.values[: len(base.index)])


class Struct:
    """The layout of a parameter struct, with the alignment that C++ gives it.

    Args:
        name: of the C++ struct.
        base: the struct it derives from, whose fields come first.
        fields: a format character of the module `struct`, or a Struct, by the field's name.

    Attributes:
        codes: the format character of every field, with those of nested structs in their place.
        offsets: bytes before each field.
        index: the number of a field by its name; a nested struct's are named "main.topk".
        size: bytes.
    """

    def __init__(self, name: str, base: Struct | None = None, **fields: str | Struct) -> None:
        self.name = name
        self.codes: list[str] = []
        self.offsets: list[int] = []
        self.index: dict[str, int] = {}
        self._own: list[tuple[str, int]] = []  # the fields that C++ knows by these names, and their offsets
        self._nested: list[Struct] = []
        self._base = base
        own = {field: of if isinstance(of, Struct) else None for field, of in fields.items()}
        self._own_fields: _Fields = _Fields.of(own)
        self._fields: _Fields = _Fields.of(own if base is None else {**base._fields.inner, **own})
        self._alignment = 1
        end = 0
        if base is not None:
            self._nested.append(base)
            end = self._append("", base, 0)
        for field, of in fields.items():
            if isinstance(of, Struct):
                start = -(-end // of._alignment) * of._alignment
                self._nested.append(of)
                end = self._append(f"{field}.", of, start)
            else:
                size = struct.calcsize(f"={of}")
                start = -(-end // size) * size
                self._add(field, of, start)
                self._alignment = max(self._alignment, size)
                end = start + size
            self._own.append((field, start))
        self.size: int = -(-end // self._alignment) * self._alignment

    def _append(self, prefix: str, other: Struct, start: int) -> int:
        for field, number in other.index.items():
            self._add(prefix + field, other.codes[number], start + other.offsets[number])
        self._alignment = max(self._alignment, other._alignment)
        return start + other.size

    def _add(self, field: str, code: str, offset: int) -> None:
        self.index[field] = len(self.codes)
        self.codes.append(code)
        self.offsets.append(offset)

    def __repr__(self) -> str:
        return f"struct {self.name}"

    def __call__(self, *nested: Packed, **fields: Any) -> Packed:
        """The struct with these values. A nested struct is given as `Packed` under its field's name.

        Args:
            nested: at most one, the base's values. Without it they are among the fields.

        Raises:
            TypeError: a field is missing, there is no such field, or the values are of another struct.
        """
        inner, pick, structs, flat = self._own_fields if nested else self._fields
        if fields.keys() != inner.keys():
            raise self._misfit(nested, fields)
        values: Sequence[Any] = [*map(fields.__getitem__, inner)]
        if structs:
            kinds, parts = zip(*pick(values), strict=True)  # each is `Packed`
            if kinds != structs:
                raise self._misfit(nested, fields)
            values = flat((*values, *chain.from_iterable(parts)))
        for packed in nested:
            if packed.of is not self._base:
                raise self._misfit(nested, fields)
            values = *packed.values, *values
        return Packed(self, tuple(values))

    def _misfit(self, nested: Sequence[Packed], fields: Mapping[str, Any]) -> TypeError:
        """The error that names the fields that are missing or unknown."""
        given = {name for packed in nested for name in packed.of.index}
        for field, value in fields.items():
            given |= {f"{field}.{inner}" for inner in value.of.index} if isinstance(value, Packed) else {field}
        missing, unknown = self.index.keys() - given, given - self.index.keys()
        return TypeError(f"{self!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")

    @cached_property
    def _packer(self) -> struct.Struct:
        """Packs all fields and the padding between them."""
        text, end = "=", 0
        for code, offset in zip(self.codes, self.offsets, strict=True):
            text += f"{offset - end}x{code}"
            end = offset + struct.calcsize(f"={code}")
        return struct.Struct(f"{text}{self.size - end}x")

    def pack(self, values: Sequence[Any]) -> bytes:
        """The struct's bytes with these numbers, one a field, padding included."""
        return self._packer.pack(*values)

    def split(
        self, values: Sequence[Any], open: frozenset[type]
    ) -> tuple[struct.Struct, Sequence[Any], Sequence[bytes]]:
        """The struct as parts: the open fields, whose values have `open` types, and the constant bytes around them.

        Returns:
            what packs the parts in their order, with numbers for the open fields; the values of the open fields; and
            the bytes before, between and behind them.
        """
        cut = _cut(self, tuple(map(type, values)), open)
        between = cut.stretches.unpack(cut.others.pack(*cut.pick_others(values)))
        return cut.packer, cut.pick_open(values), between

    def asserts(self) -> Iterator[str]:
        """The `static_assert`s that hold the C++ structs to these declarations."""
        for nested in self._nested:
            yield from nested.asserts()
        yield f'static_assert(sizeof({self.name}) == {self.size}, "cupy_mla/cuda declares {self.name}");'
        for field, offset in self._own:
            said = f'"cupy_mla/cuda declares {self.name}::{field}"'
            # __INTADDR__ is what `offsetof` is made of in NVRTC, which has no <cstddef>.
            yield f"static_assert(__INTADDR__(&(({self.name}*)0)->{field}) == {offset}, {said});"


class _Fields(NamedTuple):
    """How the values of a struct are put together.

    Attributes:
        inner: the struct that a field is, by the field's name; None: a number.
        pick, structs: picks the fields that are structs; these structs.
        flat: picks the values from the fields and, behind them, those of the structs.
    """

    inner: dict[str, Struct | None]
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    structs: tuple[Struct, ...]
    flat: Callable[[Sequence[Any]], Sequence[Any]]

    @classmethod
    def of(cls, inner: dict[str, Struct | None]) -> _Fields:
        """Those of fields by their names."""
        places: list[int] = []
        flat: list[int] = []
        end = len(inner)
        for i, of in enumerate(inner.values()):
            if of is not None:
                places.append(i)
                end += len(of.index)
            flat += [i] if of is None else range(end - len(of.index), end)
        return cls(inner, picker(places), tuple(of for of in inner.values() if of is not None), picker(flat))


class _Cut(NamedTuple):
    """How to split a struct whose values have given types (`Struct.split`).

    Attributes:
        others, pick_others: packs the struct with gaps for the open fields; picks the values of the other fields.
        stretches: unpacks from those bytes the stretches before, between and behind the open fields.
        packer, pick_open: packs the struct from stretches and open fields in turn; picks the values of the open fields.
    """

    others: struct.Struct
    pick_others: Callable[[Sequence[Any]], Sequence[Any]]
    stretches: struct.Struct
    packer: struct.Struct
    pick_open: Callable[[Sequence[Any]], Sequence[Any]]


@lru_cache(maxsize=1024)
def _cut(of: Struct, types: tuple[type, ...], open: frozenset[type]) -> _Cut:
    """How to split a struct whose values have these types."""
    numbers = [[i for i, kind in enumerate(types) if (kind in open) is is_open] for is_open in (False, True)]
    others = stretches = packer = "="
    end = start = 0
    for code, offset, kind in zip(of.codes, of.offsets, types, strict=True):
        size = struct.calcsize(f"={code}")
        others += f"{offset - end}x" + (f"{size}x" if kind in open else code)
        end = offset + size
        if kind in open:
            stretches += f"{offset - start}s{size}x"
            packer += f"{offset - start}s{code}"
            start = end
    others, stretches, packer = f"{others}{of.size - end}x", *(f"{s}{of.size - start}s" for s in (stretches, packer))
    return _Cut(
        struct.Struct(others), picker(numbers[False]), struct.Struct(stretches), struct.Struct(packer),
        picker(numbers[True]),
    )  # fmt: skip


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the values at these places of a tuple or list, as a tuple or list."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


DIVISOR = Struct("Divisor", value=UINT32, multiplier=UINT32, shift=UINT32)  # rows/block_table.cuh
INTEGERS = Struct("Integers", first=POINTER, wide=INT32)
BLOCK_TABLE = Struct(
    "BlockTable", blocks=POINTER, stride=INT64, num_requests=INT32, width=INT32, block_size=DIVISOR, block_stride=INT32
)
OWNERSHIP = Struct("Ownership", interleave=DIVISOR, turn=DIVISOR, rank=INT32)  # indices/ownership.cuh
QUERIES = Struct("Queries", starts=POINTER, seq_lens=POINTER, num_requests=INT32, num_tokens=INT32)

CALL_SCALE = Struct("CallScale", on_device=POINTER, known=FLOAT)  # rows/call_scale.cuh
SOURCE = Struct(
    "Source", cache=POINTER, indices=POINTER, lengths=POINTER, block_stride=INT64, row_stride=INT64,
    index_stride_b=INT64, index_stride_s=INT64, num_slots=INT64, topk=INT32, block_size=INT32,
)  # fmt: skip
ATTENTION = Struct(
    "AttentionParams", main=SOURCE, extra=SOURCE, q=POINTER, q_b=INT64, q_s=INT64, q_h=INT64, out=POINTER, out_b=INT64,
    out_s=INT64, out_h=INT64, lse=POINTER, max_logits=POINTER, lse_b=INT64, lse_s=INT64, lse_h=INT64, part_out=POINTER,
    part_lse=POINTER, part_max=POINTER, cluster_parts=POINTER, sink=POINTER, scale_log2=FLOAT, s_q=INT32, h_q=INT32,
    num_queries=INT32, num_splits=INT32, flags=INT32, order=POINTER, ready=POINTER, nonce=UINT64, least_split=INT32,
    item_cost=INT32, cut_cost=INT32, whole_items=INT32, plan_filled=INT32, plan=POINTER,
    q_scale=CALL_SCALE, k_scale=CALL_SCALE,
)  # fmt: skip
GROUPED = Struct(
    "GroupedParams", ATTENTION, list_lengths=POINTER, rows=POINTER, excluded=POINTER, twice=POINTER,
    group_lengths=POINTER, left=POINTER, queries=INT32, first_group=INT32, num_groups=INT32, capacity=INT32,
    twice_capacity=INT32, most=FLOAT,
)  # fmt: skip
DENSE = Struct(
    "DenseParams", ATTENTION, table=BLOCK_TABLE, num_blocks=INT32, tokens=INT32, heads=DIVISOR, causal=INT32,
    window=INT32, num_shares=INT32, shares=POINTER,
)  # fmt: skip
SORT = Struct("SortParams", ATTENTION, sorted=POINTER, segments=INT32, shift=INT32)

LOGITS_WORK = Struct(
    "LogitsWork", table=BLOCK_TABLE, starts=POINTER, ends=POINTER, lens_stride=INT64, requests=INT32, queries=INT32,
    width=INT32, all_chosen=INT32, candidates=POINTER, req_id=POINTER, candidates_stride=INT64,
)  # fmt: skip
LOGITS = Struct(
    "LogitsParams", LOGITS_WORK, q8=POINTER, keys=POINTER, scales=POINTER, w=POINTER, out=POINTER, schedule=POINTER,
    q_request=INT64, q_query=INT64, q_head=INT64, w_stride=INT64, out_stride=INT64, key_stride=INT64,
    schedule_stride=INT64, heads=INT32, num_blocks=INT32, clean=INT32, compact_width=INT32, e5m2_queries=INT32,
)  # fmt: skip
