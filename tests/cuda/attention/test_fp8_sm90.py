"""`fp8_sm90`, for FP8 rows, against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

import numpy as np
import pytest

from ... import oracle
from ...cases import (
    Paged,
    check_decode,
    check_nan_of_a_named_row,
    check_same_bits,
    entries,
    latent,
    off_zero,
    paged,
    queries,
    run_decode,
    sinks,
    with_holes,
)
from ...kinds import gapped

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize(
    "fmt", [oracle.V32, oracle.V4, oracle.V32_NVFP4, oracle.V4_NVFP4], ids=lambda fmt: fmt.name
)

KERNEL = "fp8_sm90"


@FORMATS
@pytest.mark.parametrize("num_splits", [1, 3, 17, None])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "block_size"),
    [
        (1, 1, 1, 1, 1),
        (3, 1, 7, 63, 2),
        (1, 2, 16, 64, 61),
        (3, 1, 33, 65, 64),
        (2, 2, 64, 129, 256),
        (1, 1, 128, 1000, 64),
        (2, 1, 64, 2100, 64),
        (150, 1, 64, 70, 64),
    ],
)
def test_sizes(hopper, rng, fmt, b, s_q, h_q, topk, block_size, num_splits):
    """17 splits are more than a cluster holds; 150 queries are more than a GPU has multiprocessors. Of 2100 rows three
    splits have 11 tiles each, without a partner for the last."""
    main = paged(rng, fmt, b, s_q, topk, block_size)
    check_decode(hopper, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, num_splits=num_splits)


@FORMATS
@pytest.mark.parametrize("num_splits", [1, 4])
def test_two_caches_sinks_lengths_and_strides(hopper, rng, fmt, num_splits):
    main = paged(rng, fmt, 9, 2, 130, 64, gap=1, lengths=True)
    extra = paged(rng, fmt, 9, 2, 70, 2, lengths=True)
    main.length[:2] = extra.length[1:3] = 0
    q = gapped(queries(rng, 9, 2, 72, fmt.d_qk), 0, 0, 0, 8)
    check_decode(hopper, fmt, q, main, extra, sink=sinks(rng, 72), num_splits=num_splits, out_gaps=(0, 1, 2, 3))


@FORMATS
@pytest.mark.parametrize("num_splits", [1, 5])
def test_all_invalid_rows_and_nan_of_a_named_one(hopper, rng, fmt, num_splits):
    main = paged(rng, fmt, 3, 1, 330, 64, invalid=0)
    main.indices[1, 0, 250] = main.dead[0]
    main.indices[2] = -1
    q = queries(rng, 3, 1, 64, fmt.d_qk)
    check_nan_of_a_named_row(hopper, fmt, q, main, num_splits)


@FORMATS
@pytest.mark.parametrize("num_splits", [1, 3, 17])
@pytest.mark.parametrize(("b", "s_q", "h_q", "topk"), [(5, 1, 64, 1100), (2, 3, 128, 2100), (70, 2, 33, 390)])
def test_empty_tiles(hopper, rng, fmt, b, s_q, h_q, topk, num_splits):
    main, extra = paged(rng, fmt, b, s_q, topk, 64), paged(rng, fmt, b, s_q, 300, 2, lengths=True)
    ends = main.indices[..., -1].copy()
    with_holes(rng, main)
    with_holes(rng, extra)
    main.indices[::2, :, -1] = ends[::2]  # what a list ends with says nothing of the rest
    q = off_zero(fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, extra)
    check_decode(hopper, fmt, q, main, extra, num_splits=num_splits)


def test_float32_scales_far_apart(hopper, rng):
    """Scales with all 24 bits, tiles of a row up to 10^4 apart, zero rows, and RoPE far above and below the rest."""
    codes = rng.integers(0, 256, (5, 16, 656), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    tiles = 10 ** (rng.uniform(-6, -4, (5, 16, 1)) + rng.uniform(-2, 2, (5, 16, 4)))
    codes[..., 512:528] = tiles.astype(np.float32).view(np.uint8)
    rope = latent(rng, 5, 16, 64) * (10 ** rng.uniform(-4, 1, (5, 16, 1))).astype(np.float32)
    codes[..., 528:] = rope.astype(latent(rng, 1).dtype).view(np.uint8)
    codes[0, :3, :512] = 0
    main = Paged(codes, entries(rng, (2, 1, 90), np.arange(80), 80))
    check_decode(hopper, oracle.V32, queries(rng, 2, 1, 64, 576), main)


@FORMATS
@pytest.mark.parametrize("sm_scale", [0.0, -0.03, 8.0])
def test_any_scale(hopper, rng, fmt, sm_scale):
    main = paged(rng, fmt, 1, 2, 300, 64)
    check_decode(hopper, fmt, queries(rng, 1, 2, 64, fmt.d_qk), main, sm_scale=sm_scale, num_splits=2)


@FORMATS
def test_logits_that_rise_from_tile_to_tile(hopper, rng, fmt):
    """References are raised again and again, in both warpgroups and in every split."""
    main = paged(rng, fmt, 1, 1, 640, 64, invalid=0)
    q = queries(rng, 1, 1, 64, fmt.d_qk)
    rows = oracle.named_rows(fmt, main.cache, main.indices[0, 0])
    order = np.argsort(rows @ q[0, 0, 0].astype(np.float64))
    main.indices[0, 0] = main.indices[0, 0][order]
    check_decode(hopper, fmt, q, main, sm_scale=2.0, num_splits=1)
    check_decode(hopper, fmt, q, main, sm_scale=2.0, num_splits=3)


@FORMATS
@pytest.mark.parametrize("num_splits", [2, 3, 4, 16])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "extra_topk", "lengths"),
    [
        (1, 1, 1, 1, 0, False),
        (3, 1, 7, 63, 2, False),
        (2, 1, 64, 1000, 0, False),
        (4, 1, 64, 3300, 0, True),  # of splits this long the producers look at the entries first
        (5, 1, 64, 3300, 0, False),
        (140, 1, 7, 1700, 0, True),  # of halves of some lists, too; several work items for a CTA
        (3, 2, 100, 500, 70, True),
        (140, 1, 33, 200, 130, True),  # several work items for a CTA
        (90, 1, 128, 400, 0, False),
    ],
)
def test_splits_in_turn(hopper, force, rng, fmt, b, s_q, h_q, topk, extra_topk, lengths, num_splits):
    """By one CTA for each work item: right, and to the bits of a cluster."""
    main = paged(rng, fmt, b, s_q, topk, 64, lengths=lengths)
    extra = paged(rng, fmt, b, s_q, extra_topk, 2, lengths=lengths) if extra_topk else None
    if lengths:
        main.length[:2], main.length[-1] = 0, topk
    if lengths and extra is not None:
        extra.length[1:3] = 0
    main.indices[b // 2, :, topk // 3 + 1 :] = -1  # a short context
    main.indices[-1, :, np.arange(topk) // 64 % 4 == 1] = -1  # all tiles of the second of 4 splits
    q, sink = off_zero(fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, extra), sinks(rng, h_q)
    more = {"sink": sink, "num_splits": num_splits}
    heads = rng.choice([16, 32, 64])
    force(division=f"clusters(heads={heads})")
    of_clusters = run_decode(hopper, q, main, extra, **more)
    force(division=f"segments(heads={heads})")
    in_turn = check_decode(hopper, fmt, q, main, extra, **more)
    assert [r.tobytes() for r in in_turn] == [r.tobytes() for r in of_clusters]


@FORMATS
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("gap", [1, 2, 8])
def test_alignment_of_results(hopper, force, rng, fmt, gap, in_turn):
    """Rows of 512 + `gap` values begin at multiples of 2, 4 and 16 bytes."""
    force(division="segments" if in_turn else "clusters")
    main, q = paged(rng, fmt, 5, 2, 390, 64), queries(rng, 5, 2, 72, fmt.d_qk)
    check_decode(hopper, fmt, q, main, num_splits=3, out_gaps=(0, 0, 0, gap))


@FORMATS
def test_same_bits_every_time(hopper, rng, fmt):
    main, q = paged(rng, fmt, 3, 1, 1000, 64), queries(rng, 3, 1, 64, fmt.d_qk)
    for splits in (1, 4):
        check_same_bits(hopper, q, main, num_splits=splits)


@FORMATS
@pytest.mark.parametrize("num_splits", [1, 2, None])
def test_where_entries_are_missing(hopper, rng, fmt, num_splits):
    """Lists of either cache that end with an entry are not looked at, all others are: behind a short context, within a
    list, and at its end, tiles without an entry add nothing."""
    main, extra = paged(rng, fmt, 30, 1, 1290, 64, invalid=0), paged(rng, fmt, 30, 1, 650, 2, invalid=0)
    for lists, missing in ((main, np.arange(30) % 5), (extra, np.arange(30) // 5 % 5)):
        at = np.arange(lists.indices.shape[-1])
        for b, what in enumerate(missing):
            gone = (at < 0, at >= 100, (at >= 128) & (at < 520), at == at[-1], at >= 0)[what]
            lists.indices[b, :, gone] = -1
    check_decode(hopper, fmt, queries(rng, 30, 1, 64, fmt.d_qk), main, extra, num_splits=num_splits)
