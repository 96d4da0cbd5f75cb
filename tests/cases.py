"""Inputs for the operations, and checks that run one call over a kind of array and compare it with the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cupy_mla
from cupy_mla.bridges import CuPyLibrary, NumPyLibrary, TorchLibrary
from cupy_mla.calls.operation import forget_calls
from cupy_mla.calls.scratch import ScratchMemory
from cupy_mla.cuda import driver
from cupy_mla.cuda.paging import ceil_div

from . import oracle
from .kinds import BF16, E4M3, POISON, NumPy, allocation, gapped, poisoned

INVALID = np.array([-1, -2, -(2**31), 2**31 - 1, 2**30], np.int64)
BLOCK_SIZES = (1, 2, 3, 16, 61, 64, 128, 256)


def blocks_of(rng: np.random.Generator) -> tuple[int, int]:
    """A block size, and a gap between blocks for `empty_cache`."""
    return int(rng.choice(BLOCK_SIZES)), int(rng.integers(3))


# --- inputs ---------------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Unit normal bfloat16."""
    return rng.standard_normal(shape, np.float32).astype(BF16)


def queries(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bfloat16 queries of size 10: over rows of size 0.1, logits are of size 1."""
    return (10 * rng.standard_normal(shape, np.float32)).astype(BF16)


def latent(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bfloat16 rows of size 0.1, the size of the rows in FlashMLA's own tests, whose absolute bounds we share.

    P is rounded to 16 bits, so the error of an output near zero grows with the rows: unit normal rows break those
    bounds in short lists, whoever computes them.
    """
    return (0.1 * rng.standard_normal(shape, np.float32)).astype(BF16)


def entries(
    rng: np.random.Generator, shape: tuple[int, ...], live: np.ndarray, capacity: int, invalid: float = 0.2
) -> np.ndarray:
    """int32 index lists over the `live` rows, a part of them (`invalid`) negative or beyond the capacity."""
    chosen = rng.choice(live, shape) if len(live) else np.full(shape, -1)
    beyond = rng.choice(np.append(INVALID, [capacity, capacity + 1]), shape)
    return np.where(rng.random(shape) < invalid, beyond, chosen).astype(np.int32)


def some(rng: np.random.Generator, capacity: int, share: float = 0.7) -> np.ndarray:
    """A random part of the numbers below `capacity`, at least one."""
    return rng.permutation(capacity)[: max(1, int(share * capacity))]


def flat_rows(rng: np.random.Generator, s_kv: int, d_qk: int, live: np.ndarray, gap: int = 0) -> np.ndarray:
    """kv [s_kv, 1, d_qk]: live rows, NaN in all others and in the gap behind each row."""
    kv = gapped(poisoned((s_kv, 1, d_qk), BF16), 0, 0, gap)
    kv[live, 0] = latent(rng, len(live), d_qk)
    return kv


def prefill_inputs(
    rng: np.random.Generator,
    s_q: int,
    h_q: int,
    d_qk: int,
    s_kv: int,
    topk: int,
    q_gap: int = 0,
    kv_gap: int = 0,
    share: float = 0.7,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, kv and index lists over a part (`share`) of the rows."""
    live = some(rng, s_kv, share)
    q = gapped(queries(rng, s_q, h_q, d_qk), 0, 0, q_gap)
    return q, flat_rows(rng, s_kv, d_qk, live, kv_gap), entries(rng, (s_q, 1, topk), live, s_kv)


LIFT = 8.0


def lift_logits(q: np.ndarray, kv: np.ndarray, sm_scale: float) -> None:
    """Add LIFT to every logit. For lists of a few rows: their max_logits and lse come near zero by chance, where the
    bound is 1e-6 whatever the sizes of the products that float32 adds up."""
    q[..., -1], kv[..., -1] = 16.0, LIFT / (16.0 * sm_scale)


def empty_cache(fmt: oracle.Format, num_blocks: int, block_size: int, gap: int = 0) -> np.ndarray:
    """A poisoned cache [num_blocks, block_size, last axis]; `gap` widens the block stride, in units of the format."""
    nbytes = fmt.token_bytes * block_size
    stride = {oracle.V4: -(-nbytes // 576) * 576 + 576 * gap}.get(fmt, nbytes + 16 * gap)
    raw = poisoned((num_blocks, stride), np.uint8)
    cache = raw[:, :nbytes].reshape(num_blocks, block_size, fmt.token_bytes)
    return cache if fmt.quantized else cache.view(fmt.dtype)


def block_bytes(cache: np.ndarray, b: int) -> np.ndarray:
    """The bytes of one block, as a view."""
    return cache[b].reshape(-1).view(np.uint8)


def paged_rows(
    rng: np.random.Generator, fmt: oracle.Format, num_blocks: int, block_size: int, live: np.ndarray, gap: int = 0
) -> np.ndarray:
    """A cache whose live slots hold rows and whose every other byte is poison."""
    cache = empty_cache(fmt, num_blocks, block_size, gap)
    for slot, row in zip(live, latent(rng, len(live), fmt.d_qk), strict=True):
        b, t = divmod(int(slot), block_size)
        oracle.write_token(fmt, block_bytes(cache, b), block_size, t, row)
    return cache


@dataclass
class Paged:
    """A paged cache and the index lists into it; the slots in `dead` hold poison."""

    cache: np.ndarray
    indices: np.ndarray
    length: np.ndarray | None = None
    dead: np.ndarray | None = None


def paged(
    rng: np.random.Generator,
    fmt: oracle.Format,
    b: int,
    s_q: int,
    topk: int,
    block_size: int,
    *,
    gap: int = 0,
    lengths: bool = False,
    invalid: float = 0.2,
) -> Paged:
    """A cache of about `topk` slots, with a live part, and `b * s_q` lists of `topk` entries over that part."""
    num_blocks = topk // block_size + 2
    capacity = num_blocks * block_size
    live = some(rng, capacity)
    cache = paged_rows(rng, fmt, num_blocks, block_size, live, gap)
    length = rng.integers(-1, topk + 3, b, dtype=np.int32) if lengths else None
    dead = np.setdiff1d(np.arange(capacity), live)
    return Paged(cache, entries(rng, (b, s_q, topk), live, capacity, invalid), length, dead)


def with_holes(rng: np.random.Generator, main: Paged) -> None:
    """-1 for whole tiles of 64 entries, of a list none, some or all; half of the lists end sooner, one is as it was."""
    b, s_q, topk = main.indices.shape
    full, whole = rng.integers(b), main.indices.copy()
    holes = rng.random((b, s_q, ceil_div(topk, 64))) < rng.choice([0, 0.1, 0.5, 0.9, 1], (b, s_q, 1))
    main.indices[np.repeat(holes, 64, -1)[..., :topk]] = -1
    ends = rng.integers(0, topk + 1, (b, s_q, 1))
    main.indices[(np.arange(topk) >= ends) & (rng.random((b, s_q, 1)) < 0.5)] = -1
    main.indices[full] = whole[full]


def sinks(rng: np.random.Generator, h_q: int) -> np.ndarray:
    """Sinks around the size of lse, some of them infinite."""
    values = 3 * rng.standard_normal(h_q, np.float32) + 4
    extremes = rng.choice(np.array([np.inf, -np.inf], np.float32), h_q)
    return np.where(rng.random(h_q) < 0.3, extremes, values).astype(np.float32)


# --- checks ---------------------------------------------------------------------------------------------------


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Within it, what an operation allocates starts as NaN, on the host and, in compiled calls, on a GPU."""

    def fill(array: Any) -> Any:
        flat = array.reshape(-1)
        if type(array).__module__.partition(".")[0] == "torch":
            flat.view(sys.modules["torch"].uint8).fill_(POISON)
        else:
            flat.view(np.uint8).fill(POISON)
        return array

    def poisoned_maker(maker: Callable[..., Any]) -> Callable[..., Any]:
        def maker_of_poison(library: Any) -> Callable[..., Any]:
            make = maker(library)
            return lambda *arguments: fill(make(*arguments))

        return maker_of_poison

    take = ScratchMemory.take

    def take_poison(memory: ScratchMemory, nbytes: int, stream: int, capturing: bool) -> Any:
        block = take(memory, nbytes, stream, capturing)
        driver.runtime().memsetAsync(block[0], POISON, nbytes, stream)
        return block

    def poisoned_empty(empty: Callable[..., Any]) -> Callable[..., Any]:
        return lambda library, *arguments: fill(empty(library, *arguments))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ScratchMemory, "take", take_poison))
        for library in (NumPyLibrary, TorchLibrary):
            patches.enter_context(mock.patch.object(library, "empty", poisoned_empty(library.empty)))
        for library in (CuPyLibrary, TorchLibrary):
            patches.enter_context(mock.patch.object(library, "maker", poisoned_maker(library.maker)))
        forget_calls()  # compiled calls allocate by what they were compiled with
        patches.callback(forget_calls)
        yield


class Output:
    """A given result: poisoned, with gaps that the call must leave alone.

    Args:
        guards: entries of axis 0 in front of it, and as many behind it, that the call must leave alone, too.
    """

    def __init__(
        self, kind: NumPy, shape: tuple[int, ...], gaps: tuple[int, ...], dtype: Any = BF16, guards: int = 0
    ) -> None:
        self.kind = kind
        self.host = gapped(poisoned((shape[0] + 2 * guards, *shape[1:]), dtype), *gaps)[guards : guards + shape[0]]
        self.array, self.whole = kind.put_with_allocation(self.host)

    def check_gaps(self) -> None:
        self.host[...] = self.kind.take(self.array)
        expected = allocation(self.host)
        after = self.kind.take(self.whole)[: expected.size]
        assert np.array_equal(after, expected), "memory between the rows of a result, or round it, was written"


def check_result(kind: NumPy, array: Any, dtype: np.dtype) -> np.ndarray:
    """The result as NumPy, after checking that it is the caller's kind of array."""
    assert kind.is_mine(array), f"expected a {kind.name} array, got {type(array)}"
    values = kind.take(array)
    assert values.dtype == dtype
    return values


def check_prefill(
    kind: NumPy,
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    sm_scale: float,
    sink: np.ndarray | None = None,
    length: np.ndarray | None = None,
    out_gaps: tuple[int, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run `sparse_prefill` and compare it with the oracle; returns the results."""
    out = None if out_gaps is None else Output(kind, (*q.shape[:2], 512), out_gaps)
    with poisoned_outputs():
        results = cupy_mla.sparse_prefill(
            kind.put(q), kind.put(kv), kind.put(indices), sm_scale,
            attn_sink=kind.put(sink), topk_length=kind.put(length), out=out.array if out else None,
        )  # fmt: skip
    got = [check_result(kind, r, d) for r, d in zip(results, (BF16, np.float32, np.float32), strict=True)]
    if out:
        assert results[0] is out.array
        out.check_gaps()
    want = oracle.prefill(q, kv, indices, sm_scale, sink, length)
    for name, g, w in zip(("out", "max_logits", "lse"), got, want, strict=True):
        oracle.assert_close(g, w, f"prefill {name}")
    return tuple(got)


def check_unequal_prefill(
    kind: NumPy, rng: np.random.Generator, s_q: int, h_q: int, d_qk: int, nothing: slice = slice(0)
) -> None:
    """Lists of all lengths (none for the queries `nothing`), sinks, and strides of q, kv and out."""
    q, kv, indices = prefill_inputs(rng, s_q, h_q, d_qk, 300, 200, q_gap=8, kv_gap=8)
    length = rng.integers(-1, 203, s_q, dtype=np.int32)
    length[:2] = 0, 200
    length[nothing] = 0
    lift_logits(q, kv, 0.05)
    check_prefill(kind, q, kv, indices, 0.05, sinks(rng, h_q) + LIFT, length, out_gaps=(1, 2, 3))


def run_decode(
    kind: NumPy,
    q: np.ndarray,
    main: Paged,
    extra: Paged | None = None,
    *,
    sm_scale: float | None = None,  # default: the model's
    sink: np.ndarray | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    layout: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Run `sparse_decode` over one kind of array; returns the results as NumPy."""
    more = {}
    if extra is not None:
        more = {
            "extra_k_cache": kind.put(extra.cache),
            "extra_indices": kind.put(extra.indices),
            "extra_topk_length": kind.put(extra.length),
        }
    with poisoned_outputs():
        results = cupy_mla.sparse_decode(
            kind.put(q), kind.put(main.cache), kind.put(main.indices), scale_of(q, sm_scale),
            attn_sink=kind.put(sink), topk_length=kind.put(main.length), out=out, num_splits=num_splits,
            batch_invariant=batch_invariant, layout=layout, **more,
        )  # fmt: skip
    if out is not None:
        assert results[0] is out
    return check_result(kind, results[0], BF16), check_result(kind, results[1], np.dtype(np.float32))


def decode_oracle(
    fmt: oracle.Format | tuple[oracle.Format, ...],
    q: np.ndarray,
    main: Paged,
    extra: Paged | None = None,
    *,
    sm_scale: float | None = None,
    sink: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What `run_decode` should give, in float64."""
    lists = [(as_uint8(p.cache), p.indices, p.length) for p in (main, extra) if p is not None]
    return oracle.decode(fmt, q, lists, scale_of(q, sm_scale), sink)


def off_zero(
    fmt: oracle.Format | tuple[oracle.Format, ...], q: np.ndarray, main: Paged, extra: Paged | None = None, **more: Any
) -> np.ndarray:
    """The queries, with zeros for heads whose lse is within 0.03 of 0, as lists of a few rows sometimes have it. `more`
    is for `decode_oracle`.

    A logit is a float32 sum of hundreds of products, off by more than the absolute bound of an lse, whichever kernel
    computes it, and where the lse is that small the relative bound is no larger. Logits of zeros are exact.
    """
    lse = decode_oracle(fmt, q, main, extra, **more)[1]
    q = q.copy()
    q[np.abs(lse).swapaxes(1, 2) < 0.03] = 0
    return q


def assert_decoded(kind: NumPy, results: Any, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    """Results of `sparse_decode`, still over this kind of array, are what `decode_oracle` says."""
    for name, got, want in zip(("out", "lse"), results, wanted, strict=True):
        oracle.assert_close(kind.take(got), want, f"decode {name}")


def scale_of(q: np.ndarray, sm_scale: float | None) -> float:
    """The given factor, or that of the model whose queries have this width: DeepSeek-V3.2's or V4's."""
    return {576: 192**-0.5, 512: 512**-0.5}[q.shape[-1]] if sm_scale is None else sm_scale


def as_uint8(cache: np.ndarray) -> np.ndarray:
    """The cache [num_blocks, block_size, last axis] without a KV-head axis, fp8 as bytes."""
    cache = cache[:, :, 0] if cache.ndim == 4 else cache
    return cache.view(np.uint8) if cache.dtype == E4M3 else cache


def check_decode(
    kind: NumPy,
    fmt: oracle.Format,
    q: np.ndarray,
    main: Paged,
    extra: Paged | None = None,
    *,
    sm_scale: float | None = None,
    sink: np.ndarray | None = None,
    num_splits: int | None = None,
    out_gaps: tuple[int, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Run `sparse_decode` and compare it with the oracle; returns the results."""
    out = None if out_gaps is None else Output(kind, (*q.shape[:3], 512), out_gaps)
    got = run_decode(
        kind, q, main, extra, sm_scale=sm_scale, sink=sink, num_splits=num_splits, out=out.array if out else None,
        layout=fmt.layout,
    )  # fmt: skip
    if out:
        out.check_gaps()
    want = decode_oracle(fmt, q, main, extra, sm_scale=sm_scale, sink=sink)
    oracle.assert_close(got[0], want[0], "decode out")
    oracle.assert_close(got[1], want[1], "decode lse")
    return got


# Every batch from 1 to 300.
every_batch = pytest.mark.parametrize(
    "batches", [range(first, 301, 12) for first in range(1, 13)], ids=lambda r: f"{r[0]} to {r[-1]}"
)


def check_batches(kind: NumPy, rng: np.random.Generator, fmt: oracle.Format, batches: range) -> None:
    """Random heads and lists, lengths and holes."""
    for b in batches:
        h_q, topk = int(rng.integers(1, 9)), int(rng.integers(64, 400))
        main = paged(rng, fmt, b, 1, topk, 64, lengths=bool(rng.integers(2)))
        if rng.integers(2):
            with_holes(rng, main)
        check_decode(kind, fmt, off_zero(fmt, queries(rng, b, 1, h_q, fmt.d_qk), main), main)


def check_same_bits(kind: NumPy, q: np.ndarray, main: Paged, times: int = 4, **more: Any) -> None:
    """So many runs give the same bits."""
    first, *others = ([r.tobytes() for r in run_decode(kind, q, main, **more)] for _ in range(times))
    assert all(other == first for other in others)


def check_nan_of_a_named_row(kind: NumPy, fmt: oracle.Format, q: np.ndarray, main: Paged, num_splits: int) -> None:
    """Request 1 of three names a row of NaN: its results are NaN, and the others' what they would be."""
    out, lse = run_decode(kind, q, main, num_splits=num_splits)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    rest = Paged(main.cache, main.indices[::2])
    want = decode_oracle(fmt, q[::2], rest)
    oracle.assert_close(out[::2], want[0], "decode out")
    oracle.assert_close(lse[::2], want[1], "decode lse")
