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
    """What a CTA works on at a time.

    Attributes:
        rows: queries times heads.
        warpgroups: each has keys of its own.
    """

    rows: int
    warpgroups: int


MANY = Tile(256, 2)
FEW = (Tile(64, 4), Tile(128, 3))  # for fewer rows: more keys are under way


@cache
def kernel(heads: int, tile: Tile, paged: bool) -> Kernel:
    """The kernel for so many heads."""
    defines = {
        **INDEXER_FP8.defines(), "HEADS": heads, "QUERIES": tile.rows // heads, "WARPGROUPS": tile.warpgroups,
        "PAGED": int(paged), "ALIGNED": 1,
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
    tiles = requests * ceil_div(queries, tile.rows // padded)
    blocks = least(gpu.sms, tiles * ceil_div(width, tile.warpgroups * WARPGROUP_KEYS))
    return Launch(kernel(padded, tile, paged), (blocks, 1, 1), params)
