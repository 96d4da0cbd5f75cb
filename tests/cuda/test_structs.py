"""Parameter structs by field names: their layout as C++ has it, how they are packed, and what the compiler holds."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import struct

import pytest

from cupy_mla import cuda
from cupy_mla.cuda import structs
from cupy_mla.cuda.attention.kernels import combine
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.cuda.structs import FLOAT, INT32, INT64, POINTER, UINT32, Packed, Struct

from ..compiled import needs_nvrtc

PAIR = Struct("Pair", small=INT32, large=INT64)
NESTED = Struct("Nested", flag=INT32, pair=PAIR, tail=INT32)
DERIVED = Struct("Derived", PAIR, more=FLOAT)

MODULES = [importlib.import_module(m.name) for m in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}.")]
DECLARED = {name: value for module in MODULES for name, value in vars(module).items() if isinstance(value, Struct)}
C_TYPES = {
    POINTER: ctypes.c_void_p, INT64: ctypes.c_int64, INT32: ctypes.c_int32, UINT32: ctypes.c_uint32,
    FLOAT: ctypes.c_float,
}  # fmt: skip


def pack(packed: Packed) -> bytes:
    return packed.of.pack(packed.values)


def layout(of: Struct) -> dict[str, int]:
    return {name: of.offsets[number] for name, number in of.index.items()}


def test_fields_are_aligned_to_their_size():
    assert layout(PAIR) == {"small": 0, "large": 8}
    assert PAIR.size == 16


def test_nested_structs_are_aligned_to_their_widest_field():
    assert layout(NESTED) == {"flag": 0, "pair.small": 8, "pair.large": 16, "tail": 24}
    assert NESTED.size == 32


def test_the_base_comes_first_with_its_padding():
    assert layout(DERIVED) == {"small": 0, "large": 8, "more": 16}
    assert DERIVED.size == 24


def test_a_struct_of_narrow_fields_may_lie_at_four_bytes():
    narrow = Struct("Narrow", a=UINT32, b=UINT32, c=UINT32)
    assert Struct("Around", x=INT32, narrow=narrow, y=POINTER).offsets == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("name", DECLARED)
def test_layouts_are_those_of_the_platforms_c(name):
    """ctypes lays them out by the rules of C."""
    made: dict[str, type] = {}

    def c_struct(of: Struct) -> type:
        nested = {n.name: n for n in of._nested}
        base = next((n for n in nested.values() if n.index.items() <= of.index.items()), None)
        fields = [("base", c_struct(base))] if base else []
        for field, _ in of._own:
            if field in of.index:
                fields.append((field, C_TYPES[of.codes[of.index[field]]]))
            else:
                inner = next(n for n in nested.values() if {f"{field}.{i}" for i in n.index} <= of.index.keys())
                fields.append((field, c_struct(inner)))
        return made.setdefault(of.name, type(of.name, (ctypes.Structure,), {"_fields_": fields}))

    of = DECLARED[name]
    made_struct = c_struct(of)
    assert ctypes.sizeof(made_struct) == of.size
    assert [getattr(made_struct, field).offset for field, _ in of._own] == [offset for _, offset in of._own]


def test_values_are_packed_by_name():
    packed = NESTED(tail=4, pair=PAIR(large=3, small=2), flag=1)
    assert pack(packed) == struct.pack("<i4xi4xqi4x", 1, 2, 3, 4)
    assert pack(DERIVED(PAIR(small=1, large=2), more=0.5)) == struct.pack("<i4xqf4x", 1, 2, 0.5)


def test_a_struct_in_parts():
    """Fields that are not known yet, and the bytes of all others and of the padding between them."""
    packed = NESTED(flag=1, pair=PAIR(small=2, large="later"), tail=Later())
    packer, fields, between = NESTED.split(packed.values, frozenset({str, Later}))
    assert list(fields) == ["later", packed.values[-1]]
    assert list(between) == [struct.pack("<i4xi4x", 1, 2), b"", bytes(4)]
    whole = packer.pack(between[0], 3, between[1], 4, between[2])
    assert whole == pack(NESTED(flag=1, pair=PAIR(small=2, large=3), tail=4))


class Later:
    """A value that is not known yet."""


def test_other_values_in_some_fields():
    packed = NESTED(flag=1, pair=PAIR(small=2, large=3), tail=4)
    changed = packed.replaced(**{"pair.large": 9, "flag": 8})
    assert pack(changed) == struct.pack("<i4xi4xqi4x", 8, 2, 9, 4)
    assert pack(packed) == struct.pack("<i4xi4xqi4x", 1, 2, 3, 4)
    with pytest.raises(KeyError, match="larger"):
        packed.replaced(larger=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PAIR(small=1), r"struct Pair: missing \['large'\], unknown \[\]"),
        (lambda: PAIR(small=1, large=2, larger=3), r"struct Pair: missing \[\], unknown \['larger'\]"),
        (lambda: PAIR(small=1, lrage=2), r"struct Pair: missing \['large'\], unknown \['lrage'\]"),
        (lambda: NESTED(flag=1, tail=2), r"missing \['pair\.large', 'pair\.small'\]"),
        (lambda: NESTED(flag=1, tail=2, pair=DERIVED(PAIR(small=1, large=2), more=3)), r"unknown \['pair\.more'\]"),
        (lambda: DERIVED(more=1), r"struct Derived: missing \['large', 'small'\]"),
    ],
)
def test_missing_and_unknown_fields_are_errors(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_asserts_name_every_struct_and_field():
    lines = list(NESTED.asserts())
    assert [line.partition("(")[2].partition(",")[0] for line in lines] == [
        "sizeof(Pair) == 16",
        "__INTADDR__(&((Pair*)0)->small) == 0",
        "__INTADDR__(&((Pair*)0)->large) == 8",
        "sizeof(Nested) == 32",
        "__INTADDR__(&((Nested*)0)->flag) == 0",
        "__INTADDR__(&((Nested*)0)->pair) == 8",
        "__INTADDR__(&((Nested*)0)->tail) == 24",
    ]


def attention_with(**changes: str | Struct | None) -> Struct:
    """`struct AttentionParams` with wrong fields: other types, or (None) fields left out."""
    fields: dict[str, str | Struct] = {}
    for field, _ in structs.ATTENTION._own:
        nested = structs.ATTENTION._fields.inner[field]
        fields[field] = nested or structs.ATTENTION.codes[structs.ATTENTION.index[field]]
    assert Struct("AttentionParams", **fields).offsets == structs.ATTENTION.offsets
    return Struct("AttentionParams", **{f: code for f, code in (fields | changes).items() if code is not None})


def swapped() -> Struct:
    """h_q and s_q in each other's place: the size is right, and so are all types."""
    of = attention_with()
    numbers = {field: number for number, (field, _) in enumerate(of._own)}
    a, b = numbers["s_q"], numbers["h_q"]
    of._own[a], of._own[b] = ("s_q", of._own[b][1]), ("h_q", of._own[a][1])
    return of


@needs_nvrtc
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (attention_with(order=None), "AttentionParams"),
        (attention_with(h_q=INT64), "AttentionParams::num_queries"),
        (attention_with(main=Struct("Source", structs.SOURCE, more=INT64)), "Source"),
        (attention_with(unheard_of=INT32), "unheard_of"),
        (swapped(), "AttentionParams::[sh]_q"),
    ],
    ids=["too small", "a wider field", "a nested one", "an unknown field", "two swapped"],
)
def test_a_wrong_declaration_does_not_compile(wrong, said):
    right = combine.kernel()
    with pytest.raises(RuntimeError, match=rf"(?s)structs\.py.*{said}"):
        Kernel(right.file, wrong, right.defines).compile("90")


def test_every_kernel_takes_a_declared_struct():
    from cupy_mla.cuda import all_kernels

    taken = {id(kernel.params) for kernel in all_kernels()}
    assert taken <= {id(of) for of in DECLARED.values()}
    nested = {id(n) for of in DECLARED.values() for n in of._nested}
    assert {name for name, of in DECLARED.items() if id(of) not in taken | nested} == set()
