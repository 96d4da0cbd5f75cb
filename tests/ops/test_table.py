"""The table of operations: what its rows say is so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import layouts
from cupy_mla.ops.table import OPERATIONS, TABLE, Call, Operation, Wanted
from tests.kinds import NumPy

every_operation = pytest.mark.parametrize("operation", TABLE, ids=lambda operation: operation.name)


def copied(call: Call) -> dict[str, Any]:
    """Its arguments, the arrays with the same strides."""
    return {n: NumPy().put(value) if isinstance(value, np.ndarray) else value for n, value in call.arguments.items()}


def test_rows_are_of_public_functions() -> None:
    assert len(OPERATIONS) == len(TABLE)
    assert all(getattr(cupy_mla, operation.name) is operation.function for operation in TABLE)


@every_operation
def test_parameters(operation: Operation) -> None:
    """A row names parameters that are there; arrays are annotated so, and nothing else is."""
    names = [*operation.written, *operation.optional]
    names += [n for r in operation.results for n in (r.setting, r.of, r.only_if, r.dtype_setting) if n]
    assert set(names) <= set(operation.parameters)
    if operation.writer:
        assert list(operation.parameters) == list(Operation(operation.writer, operation.examples).parameters)
    for call in operation.calls(np.random.default_rng(0)):
        for name, value in call.arguments.items():
            if value is not None:
                assert operation.is_array(name) == isinstance(value, np.ndarray), name
            elif operation.is_array(name):
                assert operation.is_optional(name), name


@every_operation
def test_first_call_gives_every_array(rng, operation: Operation) -> None:
    arrays = {name for name in operation.parameters if operation.is_array(name)}
    arrays -= {result.name for result in operation.results}
    given = next(operation.calls(rng)).arguments
    assert {name for name, value in given.items() if isinstance(value, np.ndarray)} == arrays


@every_operation
def test_results(rng, operation: Operation) -> None:
    for call in operation.calls(rng):
        arguments = copied(call)
        returned = operation.function(**arguments)
        returned = returned if isinstance(returned, tuple) else (returned,)
        arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
        made = [r for r in returned if r is not None and not any(np.shares_memory(r, a) for a in arrays)]
        asked = [r for r in operation.results if not r.setting or arguments.get(r.setting)]
        expected = [r for r in asked if r.is_there(arguments)]
        assert [(a.shape, a.dtype) for a in made] == [(r.shape(**arguments), r.dtype_in(arguments)) for r in expected]


@every_operation
def test_results_may_be_given(rng, operation: Operation) -> None:
    """Those that are parameters are returned themselves, and hold what they would."""
    call = next(operation.calls(rng))
    expected = operation.run(call, np.asarray)
    given = {r.name: np.zeros(r.shape(**call.arguments), r.dtype) for r in operation.results}
    given = {name: array for name, array in given.items() if name in operation.parameters}
    more = call._replace(arguments=call.arguments | given)
    assert [a.tobytes() for a in operation.run(more, np.asarray)] == [a.tobytes() for a in expected]


@every_operation
def test_written(rng, operation: Operation) -> None:
    """Arrays that a row says are written are, where they are given, and no others."""
    for call in operation.calls(rng, Wanted(strays=True)):
        arguments = copied(call)
        operation.function(**arguments)
        arrays = {name: a for name, a in call.arguments.items() if isinstance(a, np.ndarray)}
        changed = {name for name, a in arrays.items() if arguments[name].tobytes() != a.tobytes()}
        assert changed == set(operation.written) & arrays.keys(), call.detail


@every_operation
def test_draws_differ_in_values_alone(operation: Operation) -> None:
    first, second = ([*operation.calls(np.random.default_rng(seed))] for seed in (1, 2))
    for a, b in zip(first, second, strict=True):
        assert (a.detail, a.unaligned) == (b.detail, b.unaligned)
        assert a.arguments.keys() == b.arguments.keys()
        values = [(value, b.arguments[name]) for name, value in a.arguments.items()]
        arrays = [(x, y) for x, y in values if isinstance(x, np.ndarray)]
        assert [x for x, _ in values if not isinstance(x, np.ndarray)] == [
            y for _, y in values if not isinstance(y, np.ndarray)
        ]
        assert [(x.shape, x.dtype, x.strides) for x, _ in arrays] == [(y.shape, y.dtype, y.strides) for _, y in arrays]
        assert any(x.tobytes() != y.tobytes() for x, y in arrays), "the same values"


@every_operation
def test_names_of_calls_differ(rng, operation: Operation) -> None:
    details = [call.detail for call in operation.calls(rng)]
    assert len(set(details)) == len(details)


def test_wanted_layouts(rng) -> None:
    """Calls are of the wanted layouts alone; those of operations that have none are the same, whatever is wanted."""
    for number, layout in enumerate(layouts.ATTENTION_LAYOUTS):
        for operation in TABLE if number == 0 else (of for of in TABLE if of.layouts):
            calls = [*operation.calls(rng, Wanted((layout,)))]
            assert bool(calls) == (not operation.layouts or layout in operation.layouts)
            caches = [c.arguments.get(n) for c in calls for n in ("k_cache", "kv_cache", "src_cache")]
            widths = {cache.shape[-1] for cache in caches if cache is not None}
            assert widths <= {layout.last_axis, *(of.last_axis for of in layouts.INDEXER_LAYOUTS)}


def test_caches_keep_their_block_stride(rng) -> None:
    """Copies of a cache whose blocks are padded are padded, too."""
    seen = []

    def put(array: np.ndarray) -> np.ndarray:
        seen.append(array)
        return array

    operation = OPERATIONS["dequantize_and_gather_k_cache"]
    for call in operation.calls(rng, Wanted((layouts.V4_FP8,))):
        operation.run(call, put)
    padded = [a.shape for a in seen if a.ndim == 2 and a.dtype == np.uint8]
    assert padded == [(4, layouts.V4_FP8.block_bytes(block_size)) for block_size in (32, 15)]


def test_unaligned_rows(rng) -> None:
    operation = OPERATIONS["quantize_and_insert_k_cache"]
    plain, shifted, *_ = operation.calls(rng, Wanted((layouts.V4_FP8,)))
    assert (plain.unaligned, shifted.unaligned) == ((), ("k",))
    for a, b in zip(*(operation.run(call, np.asarray) for call in (plain, shifted)), strict=True):
        assert a.tobytes() == b.tobytes()
