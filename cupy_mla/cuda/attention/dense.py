"""The launcher of dense decode: a block table names the rows of each request, and lengths lie on the device.

A call is a `DenseProblem`. The kernel and division that take the least time are chosen, as in `choose.py`.
"""

from __future__ import annotations

from functools import lru_cache
from math import isinf

from ...arguments import DenseDecode
from .. import structs
from ..driver import Gpu
from ..paging import block_table, divisor
from ..program import Program
from . import choose, times
from .call import ALIGNED_ROWS, DECODE, INVARIANT, PagedRows, decode_fields, fields_of
from .problem import DenseProblem, Problem

LARGEST = 2**31 - 1  # int32
MARGIN = 1024  # more than the rows of a tile


def dense_decode(gpu: Gpu, a: DenseDecode) -> Program:
    """Twin of `reference.dense.dense_decode`."""
    b, s_q, h_q, _ = a.q.shape
    if b == 0 or s_q == 0:
        return ()
    num_blocks, block_size, _ = a.cache.shape
    of_cache = PagedRows.of(a.layout, a.cache)
    capacity = min(a.block_table.shape[1] * block_size, LARGEST)
    # Kernels subtract a window from rows down to s_q before the first, and rows of a tile from that: in int32.
    window = a.window if a.window < LARGEST - s_q - MARGIN else 0
    rows = min(capacity, window + s_q) if window else capacity
    problem = DenseProblem(
        gpu, a.layout, h_q, s_q, b, capacity, rows, block_size,
        of_cache.aligned and a.q.aligned(16), a.num_splits or 0, a.batch_invariant, *choose.asked(),
    )  # fmt: skip
    main = structs.SOURCE(
        **of_cache.fields, cache=a.cache.ptr, indices=0, lengths=a.seq_lens.ptr, index_stride_b=0, index_stride_s=0,
        topk=problem.capacity,
    )  # fmt: skip
    flags = of_cache.aligned * ALIGNED_ROWS | DECODE | a.batch_invariant * INVARIANT
    # To the kernels a request is one query, whose heads are its lines.
    sizes = {**decode_fields(a), "s_q": 1, "h_q": problem.lines, "num_queries": b}
    params = structs.DENSE(
        **fields_of(problem, a, main, sizes, flags), table=block_table(a.block_table, block_size),
        num_blocks=num_blocks, tokens=s_q, heads=divisor(h_q), causal=int(a.causal), window=window, num_shares=0,
        shares=0,
    )  # fmt: skip
    chosen = choose_dense(problem)
    program: Program = choose.DENSE_KERNELS[chosen.kernel].launches(problem, chosen.division, params, a.plan)
    return program


@lru_cache(maxsize=1024)
def faster_than_lists(problem: DenseProblem) -> bool:
    """Whether a call should take less time than `sparse_decode` over index lists of all rows, and making those lists.

    True where only the portable kernel serves both, as on GPUs other than Hopper. It has no times for dense attention,
    but mostly took less time so on an H200 (benchmarks/log/portable.md). False where that kernel serves dense attention
    alone.
    """
    queries = problem.requests * problem.tokens
    lists = Problem(problem.gpu, problem.layout, False, problem.heads, queries, problem.rows, aligned=problem.aligned)
    dense, of_lists = choose_dense(problem), choose.choose(lists)
    if isinf(dense.us):
        return of_lists.kernel in choose.PORTABLE
    return dense.us < of_lists.us + times.lists_us(problem.gpu, queries)


@lru_cache(maxsize=choose.MAX_CHOICES)
def choose_dense(problem: DenseProblem) -> choose.Choice:
    """The kernel and division that take the least time if all requests are as long as the block table allows.

    Raises:
        ValueError: the kernel or the division that is forced does not exist, or cannot serve this call.
    """
    rivals: list[choose.Rival] = [
        (name, division, times.microseconds(problem.gpu, name, kernel.work(problem, division)))
        for name, kernel in choose.DENSE_KERNELS.items()
        if problem.kernel in ("", name) and kernel.serves(problem)
        for division in choose.offered(problem, kernel)
    ]
    if not rivals:
        raise ValueError(choose.why_not(problem, choose.DENSE_KERNELS))
    chosen = choose.Choice(*min(rivals, key=choose.TIME))
    choose.explain(problem, chosen, rivals)
    return chosen
