"""Kernels that pass over tiles without a valid entry, or over those at a list's end, on an emulated GPU, beside the
oracle: where the tiles are, how many follow one another, and lists of more tiles than are looked at together. Of
`bf16_few_heads_sm90` also how many tiles are multiplied."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import oracle
from ..cases import LIFT, Paged, check_decode, check_prefill, lift_logits, paged, prefill_inputs, queries, sinks
from ..cuda.attention import evenly

TILE_ROWS = 64
SCALE = 0.02  # with which no row outweighs the others: few of these lists have many rows
DECODERS = ["bf16_sm90", "bf16_cluster_sm90", "bf16_shares_sm90", "bf16_few_heads_sm90", "portable"]


def tiles_to_empty(rng: np.random.Generator, where: str, queries: int, tiles: int) -> np.ndarray:
    """Of each query [queries, tiles]: which tiles are to have no valid entry."""
    tile, query = np.arange(tiles), np.arange(queries)[:, None]
    first, last = np.sort(rng.integers(0, tiles, (2, queries, 1)), axis=0)
    return {
        "anywhere": rng.random((queries, tiles)) < 0.7,
        "between the ends": (tile > 0) & (tile < tiles - 1) & (query >= 0),
        "behind": tile >= rng.integers(0, tiles + 1, (queries, 1)),
        "but for the last": (tile < tiles - 1) & (query >= 0),
        "but for one query": (query != rng.integers(queries)) | (tile < 0),
        "every second": (tile + query + rng.integers(2)) % 2 == 0,
        "a run": (first <= tile) & (tile <= last),
        "all": (tile >= 0) & (query >= 0),
    }[where]


def emptied(rng: np.random.Generator, where: str, indices: np.ndarray, rows: int = TILE_ROWS) -> np.ndarray:
    """Lists [..., topk] with tiles of entries that name no row."""
    lists = indices.reshape(-1, indices.shape[-1])
    tiles = tiles_to_empty(rng, where, len(lists), -(-lists.shape[1] // rows))
    empty = np.repeat(tiles, rows, axis=1)[:, : lists.shape[1]]
    nothing = rng.choice([-1, 2**31 - 1], lists.shape) if where == "anywhere" else -1
    return np.where(empty, nothing, lists).reshape(indices.shape).astype(np.int32)


WHERE = ["anywhere", "behind", "between the ends", "but for the last", "but for one query"]
PLACES = [*WHERE, "every second", "a run", "all"]
everywhere = pytest.mark.parametrize("where", WHERE)


@pytest.mark.long(sample=3)
@everywhere
@pytest.mark.parametrize("name", DECODERS)
def test_decode(kind, emulated, rng, monkeypatch, force, name, where):
    """Of 3 to 36 tiles: `bf16_sm90` looks at 32 of them together, `bf16_few_heads_sm90` at 8."""
    monkeypatch.setenv(VARIABLE, name)
    if name == "bf16_shares_sm90":
        force(division=evenly.shares(64))
    topk, h_q = int(rng.choice([130, 700, 2300])), int(rng.integers(1, 9))
    main = paged(rng, oracle.BF16_576, 3, 1, topk, 64)
    main.indices = emptied(rng, where, main.indices)
    main.length = rng.choice([topk, topk + 5, topk - 1, 65, 0], 3).astype(np.int32)
    q = queries(rng, 3, 1, h_q, 576)
    lift_logits(q, main.cache, SCALE)
    splits = 2 if name == "bf16_cluster_sm90" else None
    check_decode(kind, oracle.BF16_576, q, main, sm_scale=SCALE, sink=sinks(rng, h_q) + LIFT, num_splits=splits)
    assert name in emulated.launched


@pytest.mark.long(sample=1)
@everywhere
@pytest.mark.parametrize("name", ["bf16_few_heads_sm90", "portable"])
def test_more_queries_than_sms(kind, emulated, rng, force, name, where):
    """A CTA has work items one after the other."""
    force(name, "whole")
    q, kv, indices = prefill_inputs(rng, 15, 5, 512, 300, int(rng.choice([130, 900])))
    lift_logits(q, kv, SCALE)
    check_prefill(kind, q, kv, emptied(rng, where, indices), SCALE, sinks(rng, 5) + LIFT)
    assert emulated.launched == {name}


@pytest.mark.long
def test_a_group_of_more_tiles_than_are_taken_together(kind, emulated, rng, monkeypatch):
    """The union of the lists of `bf16_grouped_sm90` has a valid entry in every tile; it has more than 32."""
    monkeypatch.setenv(VARIABLE, "bf16_grouped_sm90")
    q, kv, _ = prefill_inputs(rng, 3, 20, 512, 2800, 1, share=1)
    indices = np.stack([rng.permutation(2800)[:2200] for _ in range(3)]).astype(np.int32)[:, None]
    check_prefill(kind, q, kv, indices, SCALE)
    assert "bf16_grouped_sm90" in emulated.launched


# --- what is multiplied -----------------------------------------------------------------------------------------


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("name", [*DECODERS, "fp8_sm90"])
def test_tiles_without_a_valid_entry_are_not_multiplied(kind, emulated, rng, monkeypatch, force, name):
    """Of 32 tiles a few are left. They take their share of the products of all, and one tile more for each of six SMs:
    some kernels multiply tiles in pairs, `portable` takes no more. Clusters pass over pairs that lie side by side, and
    such pairs are the shares here."""
    monkeypatch.setenv(VARIABLE, name)
    if name == "bf16_shares_sm90":
        force(division=evenly.shares(64))
    fmt = oracle.V32 if name == "fp8_sm90" else oracle.BF16_576
    splits = {"bf16_cluster_sm90": 2, "bf16_shares_sm90": None}.get(name, 1)
    main, q = paged(rng, fmt, 1, 1, 32 * TILE_ROWS, 64), queries(rng, 1, 1, 8, fmt.d_qk)
    main.indices = np.where(main.indices < 0, main.indices.max(), main.indices)
    if fmt is oracle.BF16_576:
        lift_logits(q, main.cache, SCALE)
    left = rng.choice(32, rng.integers(1, 9), replace=False)
    listed = np.isin(np.arange(32 * TILE_ROWS) // TILE_ROWS, left)
    products = []
    for empty in (False, True):
        main.indices = np.where(listed | (not empty), main.indices, -1).astype(np.int32)
        check_decode(kind, fmt, q, main, sm_scale=SCALE, num_splits=splits)
        products.append(emulated.products.pop(name))
    in_pairs = name in ("bf16_cluster_sm90", "bf16_shares_sm90")
    multiplied = 2 * len(set(left // 2)) if in_pairs else len(left)
    more = 0 if name == "portable" else 6
    assert products[1] <= products[0] * (multiplied + more) / 32, (products, left)


all_places = pytest.mark.parametrize("where", PLACES)


def has_rows(indices: np.ndarray, slots: int, rows: int = TILE_ROWS, length: np.ndarray | None = None) -> np.ndarray:
    """Of each list [b, ..., topk]: which of its tiles have a valid entry."""
    topk = indices.shape[-1]
    ends = np.full(len(indices), topk) if length is None else length
    valid = (indices >= 0) & (indices < slots)
    valid &= np.arange(topk) < ends.reshape(-1, *[1] * (indices.ndim - 1))
    lists = np.pad(valid.reshape(-1, topk), ((0, 0), (0, -topk % rows)))
    return lists.reshape(len(lists), -1, rows).any(axis=2)


def has_rows_of(main: Paged, rows: int = TILE_ROWS) -> np.ndarray:
    return has_rows(main.indices, main.cache.shape[0] * main.cache.shape[1], rows, main.length)


def products_of_tile(d_qk: int) -> int:
    """Of `bf16_few_heads_sm90`: a step of 16 columns for S^T, 8 x 4 for O^T, in four warps."""
    return 4 * (d_qk // 16 + 32)


@pytest.mark.long(sample=3)
@all_places
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize(("b", "num_splits"), [(3, 1), (3, 2), (2, 17), (13, 1)])
def test_decode_multiplies_tiles_with_rows_alone(kind, emulated, rng, monkeypatch, where, extra, b, num_splits):
    """In a CTA, in a cluster, in more splits than a cluster has CTAs, and two queries a CTA."""
    monkeypatch.setenv(VARIABLE, "bf16_few_heads_sm90")
    h_q, caches = int(rng.integers(1, 9)), []
    for topk in (int(rng.choice([130, 700, 1300])), int(rng.choice([64, 300])))[: 1 + extra]:
        cache = paged(rng, oracle.BF16_576, b, 1, topk, 64)
        cache.indices = emptied(rng, where, cache.indices)
        if rng.integers(2):
            cache.length = rng.choice([topk, topk - 1, 65, 0], b).astype(np.int32)
        caches.append(cache)
    q = queries(rng, b, 1, h_q, 576)
    for cache in caches:
        lift_logits(q, cache.cache, SCALE)
    check_decode(kind, oracle.BF16_576, q, *caches, sm_scale=SCALE, sink=sinks(rng, h_q) + LIFT, num_splits=num_splits)
    assert "bf16_few_heads_sm90" in emulated.launched
    tiles = sum(has_rows_of(cache).sum() for cache in caches)
    assert emulated.products["bf16_few_heads_sm90"] == products_of_tile(576) * tiles


@pytest.mark.long(sample=2)
@all_places
@pytest.mark.parametrize("s_q", [3, 15])
def test_prefill_multiplies_tiles_with_rows_alone(kind, emulated, rng, monkeypatch, where, s_q):
    """One query a CTA, and two."""
    monkeypatch.setenv(VARIABLE, "bf16_few_heads_sm90")
    q, kv, indices = prefill_inputs(rng, s_q, 5, 512, 300, int(rng.choice([130, 900])))
    indices = emptied(rng, where, indices)
    lift_logits(q, kv, SCALE)
    check_prefill(kind, q, kv, indices, SCALE, sinks(rng, 5) + LIFT)
    assert emulated.products["bf16_few_heads_sm90"] == products_of_tile(512) * has_rows(indices, len(kv)).sum()
