"""`portable` multiplies no tile that has no valid entry, wherever it stands: the products of its launches are
counted."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.cuda.attention.choose import VARIABLE
from cupy_mla.cuda.attention.kernels import portable
from cupy_mla.cuda.paging import fitting

from .. import oracle
from ..cases import check_decode, check_prefill, paged, prefill_inputs, queries, sinks
from .test_tiles_without_rows import PLACES, emptied, has_rows, has_rows_of

TILE_ROWS = {"portable": 32, "portable_99kb": 16}
FIRST_TILES = 6  # of a split, which are copied before a CTA has looked for valid entries: at most
MARKED_TILES = 1024  # of a split, behind which all tiles count
SMS = 6  # of the emulated GPU
SHAPES = pytest.mark.parametrize("name", TILE_ROWS)
EVERYWHERE = pytest.mark.parametrize("where", [*PLACES, "the first few"])


def empty(rng: np.random.Generator, where: str, indices: np.ndarray, rows: int) -> None:
    """Take all valid entries out of some tiles of lists [..., topk]."""
    if where != "the first few":
        indices[...] = emptied(rng, where, indices, rows)
        return
    few = rows * rng.integers(1, FIRST_TILES + 1, (len(indices), *[1] * (indices.ndim - 1)))
    indices[np.arange(indices.shape[-1]) < few] = -1


def mmas_of_tile(h_q: int, d_qk: int, rows: int) -> int:
    """S and O of a tile and all heads of a query."""
    heads = fitting(portable.HEADS, h_q)
    return -(-h_q // heads) * (heads // 16) * (rows // 8 * d_qk // 16 + rows // 16 * 512 // 8)


def mmas_of_lost(h_q: int, rows: int) -> int:
    """Of a split with one tile, V32_FP8: O a second time."""
    heads = fitting(portable.HEADS, h_q)
    return -(-h_q // heads) * (heads // 16) * (rows // 16 * 512 // 8)


def mmas_of_splits(tiles: np.ndarray, fmt: oracle.Format, h_q: int, rows: int) -> int:
    """Of splits with so many tiles each."""
    alone = (tiles == 1).sum() if fmt is oracle.V32 else 0
    return tiles.sum() * mmas_of_tile(h_q, fmt.d_qk, rows) + alone * mmas_of_lost(h_q, rows)


def some_entries(rng: np.random.Generator, rows: int) -> int:
    """A list's length: some tiles, as often no more than are copied first."""
    return int(rng.integers(1, rows * rng.choice([FIRST_TILES + 1, 80])))


@pytest.mark.long(sample=3)
@SHAPES
@EVERYWHERE
@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4, oracle.BF16_576], ids=lambda fmt: fmt.name)
def test_decode(kind, emulated, rng, monkeypatch, force, fmt, where, name):
    """Whole items, splits, and equal shares of more queries than a GPU has SMs; sometimes with an extra cache."""
    monkeypatch.setenv(VARIABLE, name)
    b, h_q, rows = int(rng.choice([2, 7])), int(rng.choice([5, 20, 40])), TILE_ROWS[name]
    num_splits = rng.choice([1, 3, None])
    force(division="shares" if num_splits is None else None)
    caches = [paged(rng, fmt, b, 1, some_entries(rng, rows), 64) for _ in range(rng.integers(1, 3))]
    for cache in caches:
        empty(rng, where, cache.indices, rows)
    check_decode(kind, fmt, queries(rng, b, 1, h_q, fmt.d_qk), *caches, sink=sinks(rng, h_q), num_splits=num_splits)
    assert "portable" in emulated.launched
    tiles = sum(has_rows_of(cache, rows).sum() for cache in caches)
    splits = b * num_splits if num_splits else b + SMS
    again, rest = divmod(
        emulated.products["portable"] - tiles * mmas_of_tile(h_q, fmt.d_qk, rows), mmas_of_lost(h_q, rows)
    )
    assert rest == 0
    assert 0 <= again <= (splits if fmt is oracle.V32 else 0)


@pytest.mark.long(sample=1)
@SHAPES
@EVERYWHERE
def test_prefill(kind, emulated, rng, monkeypatch, where, name):
    """More queries than a GPU has SMs."""
    monkeypatch.setenv(VARIABLE, name)
    queries, d_qk, h_q, rows = 9, int(rng.choice([512, 576])), int(rng.choice([5, 20, 40])), TILE_ROWS[name]
    q, kv, indices = prefill_inputs(rng, queries, h_q, d_qk, 300, some_entries(rng, rows))
    empty(rng, where, indices, rows)
    check_prefill(kind, q, kv, indices, 0.05, sinks(rng, h_q))
    assert "portable" in emulated.launched
    tiles = has_rows(indices, len(kv), rows).sum()
    assert emulated.products["portable"] == tiles * mmas_of_tile(h_q, d_qk, rows)


@pytest.mark.long(sample=1)
@SHAPES
@pytest.mark.parametrize("h_q", [5, 64])
@pytest.mark.parametrize("fmt", oracle.FORMATS, ids=lambda fmt: fmt.name)
def test_few_tiles(kind, emulated, rng, monkeypatch, fmt, h_q, name):
    """Lists of 1 to 7 tiles, of which each has others, and some have none."""
    monkeypatch.setenv(VARIABLE, name)
    b, rows = 3 * SMS, TILE_ROWS[name]
    tiles = rng.integers(1, FIRST_TILES + 2)
    cache = paged(rng, fmt, b, 1, int(tiles * rows), 64)
    lists = cache.indices.reshape(b, tiles, rows)
    lists[rng.random((b, tiles)) < 0.5] = -1
    check_decode(kind, fmt, queries(rng, b, 1, h_q, fmt.d_qk), cache, num_splits=1)
    assert emulated.products["portable"] == mmas_of_splits(has_rows_of(cache, rows).sum(axis=1), fmt, h_q, rows)


@pytest.mark.long(sample=1)
@SHAPES
@pytest.mark.parametrize(
    ("fmt", "marked"),
    [(oracle.V32, False), (oracle.BF16_576, False), *((fmt, True) for fmt in oracle.FORMATS)],
    ids=lambda value: {False: "beyond the marks", True: "marked"}[value] if isinstance(value, bool) else value.name,
)
def test_many_holes(kind, emulated, rng, monkeypatch, fmt, marked, name):
    """Every product is counted. Lists at which a split looks in many rounds; also of more tiles than have marks, of
    which those behind are multiplied up to the last that has a row."""
    monkeypatch.setenv(VARIABLE, name)
    rows = TILE_ROWS[name]
    tiles = int(rng.integers(70, 700)) if marked else MARKED_TILES + 50
    caches = [paged(rng, fmt, 2, 1, tiles * rows - int(rng.integers(rows)), 64)]
    if marked:
        caches.append(paged(rng, fmt, 2, 1, some_entries(rng, rows), 64))
    for cache in caches:
        lists = cache.indices.reshape(2, -1)
        kept = rng.random((2, -(-lists.shape[1] // rows))) < 0.02
        kept[:, MARKED_TILES + 10 :] = False
        kept[0, MARKED_TILES - 1 : MARKED_TILES + 5] = [True, True, False, False, True, False][
            : kept[0, MARKED_TILES - 1 :].size
        ]
        lists[~np.repeat(kept, rows, axis=1)[:, : lists.shape[1]]] = -1
    check_decode(kind, fmt, queries(rng, 2, 1, 5, fmt.d_qk), *caches, num_splits=1)
    worked = [has_rows_of(cache, rows) for cache in caches]
    for of_list in worked[0]:
        of_list[MARKED_TILES : len(np.trim_zeros(of_list, "b"))] = True
    tiles = np.sum([of_cache.sum(axis=1) for of_cache in worked], axis=0)
    assert emulated.products["portable"] == mmas_of_splits(tiles, fmt, 5, rows)
