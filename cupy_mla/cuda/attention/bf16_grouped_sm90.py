"""`kernels_cu/attention/bf16_grouped_sm90.cu`: prefill of few heads on Hopper, in groups of neighbouring queries.

Three launches. `group_lists.cu` unites the index lists of the queries of a group: as many neighbouring queries as fill
a tile of 64 heads. This kernel works on the groups whose lists share enough rows. Another kernel works on the queries
that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ...arrays import Array
from ...dtypes import INT32
from ...layouts import BF16_512, BF16_576, Layout
from .. import structs
from ..kernel import Kernel
from ..paging import ceil_div, pointer
from ..program import Launch, Program, Slot
from . import bf16_few_heads_sm90, bf16_sm90
from .call import Call
from .lists import sorted_by_place

MAX_QUERIES = 8  # of a group
MAX_HEADS = 32  # of a call
QUERIES_PER_SM = 16  # whose lists `group_lists.cu` unites at a time
REST_FEW_HEADS = 16  # up to which the queries that are left are for `bf16_few_heads_sm90`, above for `bf16_sm90`

# A group is faster than its queries one by one where the union has at most this share of the lists' entries. Measured:
# a list entry takes 0.74 of the time of a row of the union on `bf16_few_heads_sm90`, and 0.95 on `bf16_sm90`. The
# limits lie between the shares of random lists, so that all groups of such a call go one way. These shares are, with 4
# and with 16 rows of the cache for each entry: 0.43 and 0.79 (groups of 8), 0.63 and 0.89 (of 4), 0.79 and 0.94 (of 2).
MOST_ROWS_FEW_HEADS, MOST_ROWS = 0.71, 0.86

LEAST_SCALE = 2.0**-60  # least sm_scale: the mask of -2^120, times it, must still take a row out of a softmax

SORTED_CACHE_BYTES = 1 << 26  # above so many bytes of rows, which L2 does not hold, lists that are left are sorted

SCRATCH_BYTES = 1 << 28  # memory for the united lists of one launch, about


@cache
def group_queries(h_q: int) -> int:
    """Queries of a group."""
    return min(bf16_sm90.HEADS // h_q, MAX_QUERIES)


@cache
def kernel(layout: Layout) -> Kernel:
    """The kernel for rows of one width."""
    return Kernel(
        "attention/bf16_grouped_sm90.cu", structs.GROUPED, {**bf16_sm90.defines(layout), "MAX_QUERIES": MAX_QUERIES},
        archs=("90a",), target="90a",
    )  # fmt: skip


@cache
def group_lists_kernel(queries: int) -> Kernel:
    """The kernel that unites the index lists of so many queries; it does not depend on the layout."""
    defines = {
        "QUERIES": queries, "CTAS_PER_SM": QUERIES_PER_SM // queries, "MAX_QUERIES": MAX_QUERIES,
        "TILE_ROWS": bf16_sm90.TILE_ROWS,
    }  # fmt: skip
    return Kernel("attention/group_lists.cu", structs.GROUPED, defines, archs=("90a",), target="90a")


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for queries in sorted({group_queries(h_q) for h_q in range(1, MAX_HEADS + 1)}):
        yield group_lists_kernel(queries)
    for layout in (BF16_576, BF16_512):
        yield kernel(layout)


def launches(
    call: Call, queries: int, most_rows: float, rest: tuple[str, int, int], lengths: Array | None, ordered: bool
) -> Program:
    """The launches for groups, and for the queries that are left.

    Args:
        queries: of a group.
        most_rows: see `Choice`.
        rest: the kernel for the queries that are left, with heads and queries of a CTA.
        lengths: the call's topk_length, or None.
        ordered: as for the kernel that takes the queries that are left.

    Without lengths the grids are the same for any number of queries, so one CUDA graph serves them all.
    """
    sms = call.gpu.sms
    capacity = queries * call.topk
    total = ceil_div(call.queries, queries)
    tile_bits = ceil_div(capacity, bf16_sm90.TILE_ROWS) * queries  # 64-bit words of a group in `twice`
    sizes = (8 * tile_bits, 4 * capacity, 4, capacity)  # bytes of a group in twice, rows, group_lengths, excluded
    most_groups = max(SCRATCH_BYTES // sum(sizes), 1)  # of a launch
    one_launch = total <= most_groups
    groups = total if one_launch else most_groups
    united = Slot("united lists", shape=(groups * sum(sizes),))
    twice, rows, group_lengths, excluded = (united.ptr + groups * sum(sizes[:i]) for i in range(4))
    left = Slot("lengths of what is left", shape=(call.queries,), dtype=INT32)
    params = call.params.replaced(**{"main.lengths": left.ptr})
    steps: list[Launch] = []
    for number in range(1 if one_launch else int(ceil_div(total, groups))):
        first = number * groups
        here = total if one_launch else min(total - first, groups)
        grouped = structs.GROUPED(
            params, list_lengths=pointer(lengths), rows=rows, excluded=excluded, twice=twice,
            group_lengths=group_lengths, left=left.ptr, queries=queries, first_group=first, num_groups=here,
            capacity=capacity, twice_capacity=tile_bits, most=most_rows,
        )  # fmt: skip
        steps.append(Launch(group_lists_kernel(queries), (QUERIES_PER_SM // queries * sms, 1, 1), grouped))
        ctas = here if lengths is not None else sms
        steps.append(Launch(kernel(call.layout), (ctas, 1, 1), grouped))
    if call.topk > 0 and 2 * call.layout.d_qk * call.num_slots > SORTED_CACHE_BYTES:
        sort, params = sorted_by_place(call._replace(params=params))
        steps.append(sort)
    return [*steps, *_rest(call._replace(params=params), rest, ordered)]


def _rest(call: Call, rest: tuple[str, int, int], ordered: bool) -> Program:
    name, heads, queries = rest
    if name == "bf16_sm90":
        return bf16_sm90.launches(call, ordered)
    return bf16_few_heads_sm90.launches(call, heads, queries, 1, 1, ordered)
