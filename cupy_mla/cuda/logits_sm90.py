"""`kernels_cu/indexer/logits_sm90.cu`: the indexer's logits on Hopper, keys in rows or in an aligned paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..layouts import INDEXER_FP8
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div
from .program import Launch
from .structs import Packed

HEADS = (32, 64)  # index heads that kernels are compiled for; fewer are padded
UNIT = 64  # keys
FEW_UNITS = 100  # an SM: up to so many, a second CTA of an SM costs more than it hides
LONG_UNITS = 30  # an SM: from more on, two queries of 64 heads by a schedule have a tile of their own
LATE_SHARES_UNITS = 600  # an SM: from more on, a schedule has shares that begin late


class Tile(NamedTuple):
    """What a CTA works on at a time.

    Attributes:
        rows: queries times heads of a warpgroup.
        warpgroups: that multiply.
        together: each warpgroup has queries of its own, and all work on the same keys.
        stages: units of keys that are under way or in work.
        ctas: that fit an SM, where there is work for so many.
        underway: units whose copies a producer warp leaves under way before it tells of the oldest; 0: the copies
            themselves tell.
    """

    rows: int
    warpgroups: int
    together: bool
    stages: int
    ctas: int = 1
    underway: int = 0

    def queries(self, heads: int) -> int:
        """Of the whole tile."""
        return self.rows // heads * (self.warpgroups if self.together else 1)


MANY = Tile(128, 4, True, 10, underway=1)
FEW = (Tile(64, 2, False, 10, 2), Tile(128, 3, False, 20), Tile(192, 2, False, 18), Tile(256, 2, False, 16))
BESIDE = FEW[0]._replace(stages=6)  # by a schedule, two CTAs an SM: the next kernel's CTAs find room beside them
LONG = FEW[1]._replace(underway=1)  # spares math warpgroups a fence each unit, but the first units are told of later


def padded_heads(heads: int) -> int:
    """The heads that a kernel is compiled for which serves a call of so many."""
    return next(padded for padded in HEADS if heads <= padded)


@cache
def kernel(heads: int, tile: Tile, paged: bool, compact: bool, alone: bool, scheduled: bool) -> Kernel:
    """The kernel for so many heads.

    Args:
        compact: results start at the first key that a query sees.
        alone: one CTA an SM, of a tile of which more fit.
        scheduled: by a schedule, and every unit of keys stands in one block.
    """
    defines = {
        **INDEXER_FP8.defines(), "HEADS": heads, "QUERIES": tile.rows // heads, "WARPGROUPS": tile.warpgroups,
        "TOGETHER": int(tile.together), "STAGES": tile.stages, "CTAS_PER_SM": tile.ctas, "PAGED": int(paged),
        "ALIGNED": 1, "COMPACT": int(compact), "UNDERWAY": tile.underway, "SCHEDULED": int(scheduled),
    }  # fmt: skip
    return Kernel(
        "indexer/logits_sm90.cu", structs.LOGITS, defines, archs=("90a",), target="90a", alone=alone, overlaps=True
    )  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for heads in HEADS:
        for tile in FEW:
            for alone in (False, True)[: tile.ctas]:
                yield kernel(heads, tile, True, False, alone, False)
                yield kernel(heads, BESIDE if tile == FEW[0] and not alone else tile, True, False, alone, True)
        yield kernel(heads, LONG, True, False, False, True)
        yield kernel(heads, MANY, True, False, False, False)
        for tile in (FEW[-1], MANY):
            for compact in (False, True):
                yield kernel(heads, tile, False, compact, False, False)


def tile_for(heads: int, queries: int, paged: bool) -> Tile:
    """The tile for requests of so many queries each, keys in rows or paged."""
    few = FEW if paged else FEW[-1:]
    return next((tile for tile in few if queries <= tile.queries(heads)), MANY)


def scheduled(heads: int, queries: int, block_size: int) -> bool:
    """Whether a schedule serves requests of so many queries: each is one tile, and every unit stands in one block."""
    return tile_for(padded_heads(heads), queries, True) is not MANY and block_size % UNIT == 0


def shares_of_step(gpu: Gpu, queries: int, block_size: int) -> int | None:
    """Shares of a schedule that is made before heads and keys are known; None where no kernel takes it."""
    return gpu.sms if gpu.capability == 90 and scheduled(HEADS[0], queries, block_size) else None


def _units(padded: int, tile: Tile, requests: int, queries: int, width: int) -> int:
    """At most, of all tiles."""
    return requests * ceil_div(queries, tile.queries(padded)) * max(ceil_div(width, UNIT), 1)


def _usual_shares(gpu: Gpu, tile: Tile, units: int) -> int:
    """The CTAs of a launch without a schedule."""
    return min((1 if units <= FEW_UNITS * gpu.sms else tile.ctas) * gpu.sms, units)


def shares_of_schedule(gpu: Gpu, heads: int, requests: int, queries: int, width: int) -> int:
    """The shares of a schedule for requests of `queries` queries each over at most `width` keys.

    Where the CTAs of a launch are two an SM, there are twice as many more, which begin when others have ended."""
    padded = padded_heads(heads)
    tile = tile_for(padded, queries, True)
    units = _units(padded, tile, requests, queries, width)
    shares = _usual_shares(gpu, tile, units)
    return 3 * shares if shares > gpu.sms and units > LATE_SHARES_UNITS * gpu.sms else shares


def launch(
    gpu: Gpu,
    heads: int,
    paged: bool,
    requests: int,
    queries: int,
    width: int,
    params: Packed,
    compact: bool = False,
    shares: int | None = None,
) -> Launch:
    """The launch for requests of `queries` queries each over at most `width` keys; `shares` of a schedule."""
    padded = padded_heads(heads)
    tile = tile_for(padded, queries, paged)
    by_schedule = shares is not None
    ctas = _usual_shares(gpu, tile, _units(padded, tile, requests, queries, width)) if shares is None else shares
    alone = tile.ctas > 1 and ctas <= gpu.sms
    if by_schedule and tile == FEW[0] and not alone:
        tile = BESIDE
    elif by_schedule and tile == FEW[1] and _units(padded, tile, requests, queries, width) > LONG_UNITS * gpu.sms:
        tile = LONG
    return Launch(kernel(padded, tile, paged, compact, alone, by_schedule), (ctas, 1, 1), params)
