"""`kernels_cu/indexer/logits_sm90.cu`: the indexer's logits on Hopper, keys in rows or in an aligned paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from ..layouts import INDEXER_FP8, INDEXER_MXFP4, Layout
from . import structs
from .driver import Gpu
from .indexer import defines_of
from .kernel import Kernel
from .paging import ceil_div
from .program import Launch
from .structs import Packed

HEADS = (32, 64)  # index heads that kernels are compiled for; fewer are padded
UNIT = 64  # keys that a CTA works on at a time
# Limits by the units of an SM:
FEW_UNITS = 100  # up to so many, a second CTA of an SM costs more than it hides
LONG_UNITS = 30  # above, two queries of 64 heads with a schedule have the tile LONG
LATE_SHARES_UNITS = 600  # above, a schedule has shares that begin late


class Tile(NamedTuple):
    """The queries that a CTA works on at a time, and its pipeline.

    Attributes:
        rows: queries times heads of a warpgroup.
        warpgroups: warpgroups that multiply.
        together: each warpgroup has queries of its own, and all work on every unit of keys. Else they have the same
            queries and take turns with the units.
        stages: of the ring, one for each unit of keys that is copied or worked on.
        ctas: CTAs of an SM, where there is work for so many.
        underway: units whose copies a producer warp leaves in flight before it signals the oldest; 0: the copies signal
            by themselves.
    """

    rows: int
    warpgroups: int
    together: bool
    stages: int
    ctas: int = 1
    underway: int = 0

    def queries(self, heads: int) -> int:
        """Queries of the tile."""
        return self.rows // heads * (self.warpgroups if self.together else 1)


class Keys(NamedTuple):
    """The keys of a launch.

    Attributes:
        paged: they are in a paged cache, else in rows.
        layout: of the cache.
        e5m2: they are multiplied as e5m2, else as e4m3.
        candidates: requests are query tokens, which see candidate blocks of keys in the cache.
    """

    paged: bool
    layout: Layout = INDEXER_FP8
    e5m2: bool = False
    candidates: bool = False

    def defines(self) -> dict[str, int | str]:
        """The constants for such keys."""
        return {
            **defines_of(self.layout), "PAGED": int(self.paged), "E5M2_KEYS": int(self.e5m2),
            "CANDIDATES": int(self.candidates),
        }  # fmt: skip


ROWS, E5M2_ROWS = Keys(False), Keys(False, e5m2=True)
PAGED_FP8, PAGED_MXFP4 = Keys(True), Keys(True, INDEXER_MXFP4, e5m2=True)


class Work(NamedTuple):
    """What a launch computes: logits of requests of `queries` queries each over at most `width` keys.

    Attributes:
        heads: index heads of a query.
        compact: results start at the first key that a query sees.
        shares: shares of the schedule; None: there is none.
    """

    heads: int
    keys: Keys
    requests: int
    queries: int
    width: int
    compact: bool = False
    shares: int | None = None


MANY = Tile(128, 4, True, 10, underway=1)
FEW = (Tile(64, 2, False, 10, 2), Tile(128, 3, False, 20), Tile(192, 2, False, 18), Tile(256, 2, False, 16))
# With a schedule and two CTAs an SM: fewer stages leave room for CTAs of the next kernel.
BESIDE = FEW[0]._replace(stages=6)
# MXFP4 keys are A operands in registers. So an SM has one CTA, and requests of many queries have several tiles.
FEW_MXFP4 = (Tile(32, 4, False, 20), Tile(64, 4, False, 20), *FEW[1:3])
LONG = FEW[1]._replace(underway=1)  # saves the warpgroups that multiply a fence a unit, but the first units come later


def padded_heads(heads: int) -> int:
    """The number of heads that the kernel for a call with `heads` is compiled for."""
    return next(padded for padded in HEADS if heads <= padded)


@cache
def kernel(heads: int, tile: Tile, keys: Keys, compact: bool, alone: bool, scheduled: bool) -> Kernel:
    """The kernel for so many heads, of a call as `Work` describes it. Queries are of the same type as keys.

    Args:
        compact: results start at the first key that a query sees.
        alone: one CTA an SM, of a tile of which more would fit.
        scheduled: a schedule divides the work, and every unit of keys lies in one block.
    """
    defines = {
        **keys.defines(), "HEADS": heads, "QUERIES": tile.rows // heads, "WARPGROUPS": tile.warpgroups,
        "TOGETHER": int(tile.together), "STAGES": tile.stages, "CTAS_PER_SM": tile.ctas, "ALIGNED": 1,
        "COMPACT": int(compact), "UNDERWAY": tile.underway, "SCHEDULED": int(scheduled),
    }  # fmt: skip
    return Kernel("indexer/logits_sm90.cu", structs.LOGITS, defines, archs=("90a",), alone=alone, overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for heads in HEADS:
        for tile in FEW:
            for alone in (False, True)[: tile.ctas]:
                yield kernel(heads, tile, PAGED_FP8, False, alone, False)
                yield kernel(heads, BESIDE if tile == FEW[0] and not alone else tile, PAGED_FP8, False, alone, True)
        yield kernel(heads, LONG, PAGED_FP8, False, False, True)
        yield kernel(heads, MANY, PAGED_FP8, False, False, False)
        for tile, keys, compact in product((FEW[-1], MANY), (ROWS, E5M2_ROWS), (False, True)):
            yield kernel(heads, tile, keys, compact, False, False)
        tiles = [tile for tile in FEW_MXFP4 if tile.queries(heads)]
        for tile in tiles:
            yield kernel(heads, tile, PAGED_MXFP4, False, False, False)
        yield kernel(heads, tiles[0], PAGED_MXFP4._replace(candidates=True), False, False, False)
        for alone in (False, True):
            yield kernel(heads, FEW[0], PAGED_FP8._replace(candidates=True), False, alone, False)


def tile_for(heads: int, queries: int, keys: Keys = PAGED_FP8) -> Tile:
    """The tile for requests of so many queries each."""
    mxfp4 = keys.layout is INDEXER_MXFP4
    few = FEW_MXFP4 if mxfp4 else FEW if keys.paged else FEW[-1:]
    return next((tile for tile in few if queries <= tile.queries(heads)), FEW_MXFP4[-1] if mxfp4 else MANY)


def scheduled(heads: int, queries: int, block_size: int) -> bool:
    """Whether the kernel can take a schedule: a request's queries are one tile, and every unit lies in one block."""
    return tile_for(padded_heads(heads), queries) is not MANY and block_size % UNIT == 0


def shares_of_step(gpu: Gpu, queries: int, block_size: int) -> int | None:
    """The shares of a schedule that is made before heads and keys are known; None where no kernel takes schedules."""
    return gpu.sms if gpu.capability == 90 and scheduled(HEADS[0], queries, block_size) else None


def _units(padded: int, tile: Tile, requests: int, queries: int, width: int) -> int:
    """The units of all tiles if every request has `width` keys."""
    return requests * ceil_div(queries, tile.queries(padded)) * max(ceil_div(width, UNIT), 1)


def _usual_shares(gpu: Gpu, tile: Tile, units: int) -> int:
    """The CTAs of a launch without a schedule."""
    return min((1 if units <= FEW_UNITS * gpu.sms else tile.ctas) * gpu.sms, units)


def shares_of_schedule(gpu: Gpu, heads: int, requests: int, queries: int, width: int) -> int:
    """The shares of a schedule for requests of `queries` queries each over at most `width` keys.

    Where a launch has two CTAs an SM and many keys, there are four more shares an SM. Their CTAs begin when the first
    ones have ended.
    """
    padded = padded_heads(heads)
    tile = tile_for(padded, queries)
    units = _units(padded, tile, requests, queries, width)
    shares = _usual_shares(gpu, tile, units)
    return 3 * shares if shares > gpu.sms and units > LATE_SHARES_UNITS * gpu.sms else shares


def launch(gpu: Gpu, work: Work, params: Packed) -> Launch:
    """The launch of the fastest variant."""
    heads, keys, requests, queries, width, compact, shares = work
    padded = padded_heads(heads)
    tile = tile_for(padded, queries, keys)
    units, by_schedule = _units(padded, tile, requests, queries, width), shares is not None
    ctas = _usual_shares(gpu, tile, units) if shares is None else shares
    alone = tile.ctas > 1 and ctas <= gpu.sms
    if by_schedule and tile == FEW[0] and not alone:
        tile = BESIDE
    elif by_schedule and tile == FEW[1] and units > LONG_UNITS * gpu.sms:
        tile = LONG
    return Launch(kernel(padded, tile, keys, compact, alone, by_schedule), (ctas, 1, 1), params)
