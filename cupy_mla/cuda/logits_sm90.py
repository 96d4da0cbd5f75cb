"""`kernels_cu/indexer/logits_sm90.cu`: the indexer's logits on Hopper, keys in rows or in an aligned paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..layouts import INDEXER_FP8
from ..sizes import least
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div
from .program import Launch
from .structs import Packed

HEADS = (32, 64)  # index heads that kernels are compiled for; fewer are padded
WARPGROUP_KEYS = 64


class Tile(NamedTuple):
    """How the queries of a tile are divided.

    Attributes:
        rows: queries times heads of a warpgroup.
        warpgroups: of a CTA.
        query_groups: warpgroups that have queries of their own; the others share queries and have keys of their own.
        depth: units of keys that are under way.
    """

    rows: int
    warpgroups: int
    query_groups: int
    depth: int


# Few queries: the keys' way to the SMs bounds the work. From the fewest rows on.
FEW = (Tile(64, 4, 1, 2), Tile(128, 2, 1, 3), Tile(256, 2, 1, 1))
MANY = Tile(256, 2, 2, 1)


@cache
def kernel(heads: int, tile: Tile, paged: bool) -> Kernel:
    """The kernel for so many heads."""
    defines = {
        **INDEXER_FP8.defines(), "HEADS": heads, "QUERIES": tile.rows // heads, "WARPGROUPS": tile.warpgroups,
        "QUERY_GROUPS": tile.query_groups, "DEPTH": tile.depth, "PAGED": int(paged), "ALIGNED": 1,
    }  # fmt: skip
    return Kernel("indexer/logits_sm90.cu", structs.LOGITS, defines, archs=("90a",), target="90a", overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for heads in HEADS:
        yield kernel(heads, MANY, False)
        for tile in (*FEW, MANY):
            yield kernel(heads, tile, True)


def launch(gpu: Gpu, heads: int, paged: bool, requests: int, queries: int, width: int, params: Packed) -> Launch:
    """The launch for requests of `queries` queries each over at most `width` keys."""
    padded = next(padded for padded in HEADS if heads <= padded)
    tile = next((tile for tile in FEW if paged and queries * padded <= tile.rows), MANY)
    tiles = requests * ceil_div(queries, tile.rows // padded * tile.query_groups)
    unit = tile.warpgroups // tile.query_groups * WARPGROUP_KEYS
    blocks = least(gpu.sms, tiles * ceil_div(width, unit))
    return Launch(kernel(padded, tile, paged), (blocks, 1, 1), params)
