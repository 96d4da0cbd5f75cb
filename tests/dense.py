"""Requests in a paged cache for `dense_decode`, its oracle from the definition, and checks of a call against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_mla
from cupy_mla import flash_mla

from . import oracle
from .cases import Output, as_uint8, check_result, paged_rows, poisoned_outputs, queries, scale_of
from .kinds import BF16, NumPy, gapped

STRAYS = np.array([-1, -2, -(2**31), 2**30, 2**31 - 1])  # blocks that no cache has


@dataclass(frozen=True)
class Sees:
    """Which rows of its request a query sees."""

    causal: bool = True
    window: int | None = None

    def rows(self, length: int, s_q: int, i: int) -> range:
        """Of query i of s_q."""
        end = length - s_q + 1 + i if self.causal else length
        return range(0 if self.window is None else max(end - self.window, 0), max(end, 0))

    def keywords(self) -> dict[str, Any]:
        return {"causal": self.causal} | ({} if self.window is None else {"window": self.window})


def some_view(rng: np.random.Generator) -> Sees:
    """Causal or not, mostly with a window."""
    return Sees(bool(rng.integers(2)), [None, None, 1, 30, 200][rng.integers(5)])


@dataclass
class Requests:
    """Requests in a cache. All rows that no query of a request sees hold NaN, and blocks behind its last are strays."""

    cache: np.ndarray
    table: np.ndarray
    lens: np.ndarray
    s_q: int
    sees: Sees

    def slots(self, request: int, i: int) -> list[int]:
        """The slots of the rows that a query sees, in order, but for rows that table or cache have not."""
        num_blocks, block_size, _ = self.cache.shape
        table = [int(block) for block in self.table[request]]
        seen = self.sees.rows(int(self.lens[request]), self.s_q, i)
        rows = range(seen.start, min(seen.stop, len(table) * block_size))
        named = [(table[row // block_size], row % block_size) for row in rows]
        return [block * block_size + offset for block, offset in named if 0 <= block < num_blocks]


def in_cache(
    rng: np.random.Generator,
    fmt: oracle.Format,
    lens: Any,
    block_size: int,
    s_q: int = 1,
    sees: Sees | None = None,
    gap: int = 0,
) -> Requests:
    """Requests of these lengths, their blocks in any order, some blocks and columns of the table more than they need.

    Args:
        gap: of the cache's blocks, in units of the format, and of the table's rows.
    """
    lens, sees = np.array(lens, np.int32), sees or Sees()
    counts = [-(-max(int(n), 0) // block_size) for n in lens]
    width = max(counts, default=0) + int(rng.integers(3))
    num_blocks = sum(counts) + int(rng.integers(1, 4))
    table = rng.choice(np.append(STRAYS, num_blocks), (len(lens), width)).astype(np.int32)
    free = iter(rng.permutation(num_blocks))
    for request, count in enumerate(counts):
        table[request, :count] = [next(free) for _ in range(count)]
    requests = Requests(np.empty((num_blocks, block_size, 0)), gapped(table, 0, gap), lens, s_q, sees)
    live = sorted({slot for r in range(len(lens)) for i in range(s_q) for slot in requests.slots(r, i)})
    requests.cache = paged_rows(rng, fmt, num_blocks, block_size, np.array(live, np.int64), gap)
    return requests


def dense_oracle(
    fmt: oracle.Format, q: np.ndarray, of: Requests, sink: np.ndarray | None = None, sm_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What `dense_decode` should give, in float64."""
    b, s_q, heads, _ = q.shape
    out, lse = np.empty((b, s_q, heads, 512)), np.empty((b, heads, s_q))
    for r, i in np.ndindex(b, s_q):
        rows = oracle.named_rows(fmt, as_uint8(of.cache), of.slots(r, i))
        out[r, i], _, lse[r, :, i] = oracle.attend(q[r, i], rows, scale_of(q, sm_scale), sink)
    return out, lse


def run_dense(
    kind: NumPy, q: np.ndarray, of: Requests, *, sm_scale: float | None = None, sink: np.ndarray | None = None,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run `dense_decode` over one kind of array; returns the results as NumPy."""
    with poisoned_outputs():
        out, lse = cupy_mla.dense_decode(
            *map(kind.put, (q, of.cache, of.table, of.lens)), scale_of(q, sm_scale), attn_sink=kind.put(sink),
            **of.sees.keywords(), **more,
        )  # fmt: skip
    return check_result(kind, out, values_of(q)), check_result(kind, lse, np.dtype(np.float32))


def values_of(q: np.ndarray) -> np.dtype:
    """The item type of results."""
    return q.dtype if q.dtype == np.float16 else BF16


def dense_queries(rng: np.random.Generator, fmt: oracle.Format, *shape: int) -> np.ndarray:
    """Queries over rows of a format."""
    return queries(rng, *shape, fmt.d_qk).astype(fmt.dtype)


def check_dense(
    kind: NumPy, fmt: oracle.Format, q: np.ndarray, of: Requests, *, sink: np.ndarray | None = None,
    sm_scale: float | None = None, out_gaps: tuple[int, ...] | None = None, **more: Any,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Run `dense_decode` and compare it with the oracle; returns the results.

    Args:
        out_gaps: of a given `out`; it and a given `lse` then have guards round them.
    """
    given: dict[str, Output] = {}
    if out_gaps is not None:
        b, s_q, h_q, _ = q.shape
        given["out"] = Output(kind, (b, s_q, h_q, 512), out_gaps, values_of(q), guards=1)
        given["lse"] = Output(kind, (b, h_q, s_q), (0, *out_gaps[1:3][::-1]), np.dtype(np.float32), guards=1)
    arrays = {name: result.array for name, result in given.items()}
    got = run_dense(kind, q, of, sm_scale=sm_scale, sink=sink, layout=fmt.layout, **arrays, **more)
    for result in given.values():
        result.check_gaps()
    assert_dense(got, dense_oracle(fmt, q, of, sink, sm_scale))
    return got


def assert_dense(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> None:
    for result, a, b in zip(("out", "lse"), got, want, strict=True):
        oracle.assert_close(a, b, f"decode {result}")


def off_zero(fmt: oracle.Format, q: np.ndarray, of: Requests, **more: Any) -> np.ndarray:
    """As `cases.off_zero`, for the heads of a dense decode whose lse is near 0."""
    lse = dense_oracle(fmt, q, of, **more)[1]
    q = q.copy()
    q[np.abs(lse).swapaxes(1, 2) < 0.03] = 0
    return q


def check_case_of_flash_mla(
    kind: Any, rng: np.random.Generator, b: int, mean: int, s_q: int, h_q: int, *, causal: bool, varlen: bool
) -> None:
    """Inputs and bounds of FlashMLA's own test of dense decode, by its front door. Rows behind a request are NaN."""
    torch = kind.torch
    lens = np.maximum(rng.normal(mean, mean / 2, b), s_q) if varlen else np.full(b, mean)
    lens = lens.astype(np.int32)
    width = -(-int(lens.max()) // 64)
    generator = torch.Generator(kind.device).manual_seed(int(rng.integers(2**31)))
    new = {"generator": generator, "device": kind.device}
    q = torch.randn(b, s_q, h_q, 576, **new).bfloat16()
    cache = torch.randn(b * width, 64, 1, 576, **new).bfloat16()
    table = torch.randperm(b * width, **new).int().view(b, width)
    for i, n in enumerate(lens.tolist()):
        rows = cache[table[i].long()]
        rows.view(-1, 576)[n:] = torch.nan
        cache[table[i].long()] = rows
    meta, _ = flash_mla.get_mla_metadata(kind.put(lens), s_q * h_q, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, kind.put(lens), 512, meta, causal=causal)
    for i, n in enumerate(lens.tolist()):
        rows = cache[table[i].long()].view(-1, 576)[:n].double()
        logits = torch.einsum("shd,nd->hsn", q[i].double(), rows) * 576**-0.5
        if causal:
            hidden = torch.ones(s_q, n, dtype=torch.bool, device=kind.device).tril(n - s_q).logical_not()
            logits = logits.masked_fill(hidden, -torch.inf)
        want_lse = logits.logsumexp(-1)
        want = torch.einsum("hsn,nd->shd", (logits - want_lse[..., None]).exp(), rows[:, :512])
        assert torch.allclose(lse[i].double(), want_lse, rtol=1e-5, atol=1e-6)
        x = out[i].double()
        assert 1 - 2 * (x * want).sum() / (x * x + want * want).sum() < 5e-4
