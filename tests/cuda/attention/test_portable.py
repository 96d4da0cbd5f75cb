"""`portable`, both its shapes, on every cache layout: against the oracle on a GPU, and what its shapes promise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cupy_mla.cuda import driver
from cupy_mla.cuda.attention.choose import VARIABLE
from cupy_mla.cuda.attention.kernels import portable
from cupy_mla.layouts import ATTENTION_LAYOUTS

from ... import oracle
from ...cases import (
    Paged,
    check_decode,
    check_nan_of_a_named_row,
    check_prefill,
    check_same_bits,
    check_unequal_prefill,
    decode_oracle,
    entries,
    latent,
    paged,
    prefill_inputs,
    queries,
    run_decode,
    sinks,
    with_holes,
)
from ...kinds import CuPy, gapped
from .replays import check_replays_with_other_lengths

LIMITS = {"portable": portable.LARGE, "portable_99kb": portable.SMALL}
FORMATS = pytest.mark.parametrize("fmt", oracle.FORMATS, ids=lambda fmt: fmt.name)
gpu = pytest.mark.gpu


@pytest.fixture(params=LIMITS)
def kind(request, launched, monkeypatch) -> Iterator[CuPy]:
    """CuPy arrays whose calls are to run one of the shapes. A test that never launched the kernel fails."""
    found = CuPy()
    if driver.gpu(0).shared_kb < LIMITS[request.param]:
        pytest.skip(f"needs {LIMITS[request.param]} KB of shared memory")
    monkeypatch.setenv(VARIABLE, request.param)
    limits = set()
    kernel = portable.kernel
    monkeypatch.setattr(
        portable,
        "kernel",
        lambda layout, heads, limit, **more: limits.add(limit) or kernel(layout, heads, limit, **more),
    )
    yield found
    assert "portable" in launched
    assert limits == {LIMITS[request.param]}


@pytest.fixture
def evenly(force) -> None:
    """Rows are divided evenly, also where that is not the fastest."""
    force(division="shares")


@pytest.mark.parametrize("limit", LIMITS.values())
@pytest.mark.parametrize("heads", portable.HEADS)
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: layout.name)
def test_a_shape_fits_the_gpus_that_it_claims(layout, heads, limit):
    kernel = portable.kernel(layout, heads, limit)
    assert kernel.defines["SHARED_LIMIT"] == 1024 * limit
    assert ("86" in kernel.archs) == (limit == portable.SMALL)


@gpu
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk"),
    [(1, 1, 1), (3, 7, 15), (2, 16, 16), (1, 17, 17), (3, 33, 127), (2, 64, 128), (2, 65, 129), (200, 128, 300)],
)
def test_prefill_sizes(kind, rng, s_q, h_q, topk, d_qk):
    check_prefill(kind, *prefill_inputs(rng, s_q, h_q, d_qk, 97, topk), 0.05)


@gpu
@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("h_q", [9, 72])
def test_prefill_with_sinks_lengths_and_strides(kind, rng, h_q, d_qk):
    check_unequal_prefill(kind, rng, 40, h_q, d_qk)


@gpu
@pytest.mark.parametrize("gap", [1, 2])
def test_rows_that_are_not_aligned(kind, rng, gap):
    """Rows at multiples of 2 and of 4 bytes are read value by value."""
    check_prefill(kind, *prefill_inputs(rng, 5, 40, 576, 97, 200, q_gap=gap, kv_gap=gap), 0.05)


@gpu
@FORMATS
@pytest.mark.parametrize("num_splits", [1, 3, 17, None])
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "block_size"),
    [
        (1, 1, 1, 1, 1),
        (3, 1, 7, 31, 2),
        (1, 2, 16, 32, 61),
        (3, 1, 33, 65, 64),
        (2, 2, 64, 129, 256),
        (1, 1, 128, 1000, 64),
        (1, 1, 20, 2500, 64),
        (150, 1, 64, 70, 64),
        (70, 1, 128, 500, 64),
    ],
)
def test_decode_sizes(kind, rng, fmt, b, s_q, h_q, topk, block_size, num_splits):
    """Lists of 2500 entries let every ring of buffers come round; 150 queries are more than a GPU runs at a time.
    Without a number of splits, the rows of 70 queries are divided evenly."""
    main = paged(rng, fmt, b, s_q, topk, block_size)
    check_decode(kind, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, num_splits=num_splits)


@gpu
@FORMATS
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("h_q", [5, 30, 72])
def test_two_caches_sinks_lengths_and_strides(kind, rng, fmt, h_q, num_splits):
    main = paged(rng, fmt, 9, 2, 330, 64, gap=1, lengths=True)
    extra = paged(rng, fmt, 9, 2, 70, 2, lengths=True)
    main.length[:2] = extra.length[1:3] = 0
    q = gapped(queries(rng, 9, 2, h_q, fmt.d_qk), 0, 0, 0, 8)
    check_decode(kind, fmt, q, main, extra, sink=sinks(rng, h_q), num_splits=num_splits, out_gaps=(0, 1, 2, 3))


@gpu
@FORMATS
@pytest.mark.parametrize(("h_q", "num_splits"), [(16, 1), (64, 1), (64, 3), (72, None)])
def test_tiles_without_a_valid_entry(kind, rng, fmt, h_q, num_splits):
    """They are not multiplied: tests/emulator/test_portable.py counts."""
    main, extra = (paged(rng, fmt, 40, 1, topk, 64) for topk in (1900, 300))
    with_holes(rng, main)
    with_holes(rng, extra)
    check_decode(kind, fmt, queries(rng, 40, 1, h_q, fmt.d_qk), main, extra, num_splits=num_splits)


@gpu
@FORMATS
@pytest.mark.parametrize("num_splits", [1, 5])
def test_all_invalid_rows_and_nan_of_a_named_one(kind, rng, fmt, num_splits):
    main = paged(rng, fmt, 3, 1, 330, 64, invalid=0)
    main.indices[1, 0, 250] = main.dead[0]
    main.indices[2] = -1
    check_nan_of_a_named_row(kind, fmt, queries(rng, 3, 1, 64, fmt.d_qk), main, num_splits)


def scales_far_apart(rng: np.random.Generator) -> np.ndarray:
    """A V32 cache of 5 x 16 tokens. Rows have scales from 10^-9 to 10^-3, with all 24 bits, and RoPE far above and
    below the rest. Of three rows all quantized values are zero.

    Rows are no larger than those of `latent`, and a quarter of all scales are near the largest. If one row outweighed
    all others, the rounding of its P to bfloat16 alone would break the bound on the cosine difference.
    """
    codes = rng.integers(0, 256, (5, 16, 656), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = rng.uniform(0.5, 1, (5, 16, 4)) * 10 ** np.minimum(-3, rng.uniform(-9, -1, (5, 16, 4)))
    codes[..., 512:528] = scales.astype(np.float32).view(np.uint8)
    rope = latent(rng, 5, 16, 64).astype(np.float32) * 10 ** rng.uniform(-4, 0.3, (5, 16, 1))
    codes[..., 528:] = rope.astype(oracle.BF16).view(np.uint8)
    codes[0, :3, :512] = 0
    return codes


@gpu
@pytest.mark.parametrize("h_q", [16, 64])
def test_float32_scales_far_apart(kind, rng, h_q):
    main = Paged(scales_far_apart(rng), entries(rng, (4, 1, 90), np.arange(80), 80))
    check_decode(kind, oracle.V32, queries(rng, 4, 1, h_q, 576), main)


@gpu
@FORMATS
@pytest.mark.parametrize("h_q", [16, 64])
def test_lists_of_one_row_each(kind, rng, fmt, h_q):
    """Each list by itself keeps the bounds: no other rows' errors make up for a rounding of P or of its scale."""
    main = paged(rng, fmt, 100, 1, 100, 64, invalid=0)
    main.indices = main.indices[..., :1]
    q = queries(rng, 100, 1, h_q, fmt.d_qk)
    got, want = run_decode(kind, q, main)[0], decode_oracle(fmt, q, main)[0]
    for of_list, expected in zip(got, want, strict=True):
        oracle.assert_close(of_list, expected, "decode out")


@gpu
@FORMATS
@pytest.mark.parametrize("sm_scale", [0.0, -0.03, 8.0])
def test_any_scale(kind, rng, fmt, sm_scale):
    main = paged(rng, fmt, 1, 2, 300, 64)
    check_decode(kind, fmt, queries(rng, 1, 2, 64, fmt.d_qk), main, sm_scale=sm_scale, num_splits=2)


@gpu
@FORMATS
@pytest.mark.parametrize("h_q", [16, 64])
def test_logits_that_rise_from_tile_to_tile(kind, rng, fmt, h_q):
    """References are raised again and again, and O is rescaled."""
    main = paged(rng, fmt, 1, 1, 640, 64, invalid=0)
    q = queries(rng, 1, 1, h_q, fmt.d_qk)
    rows = oracle.named_rows(fmt, main.cache, main.indices[0, 0])
    order = np.argsort(rows @ q[0, 0, 0].astype(np.float64))
    main.indices[0, 0] = main.indices[0, 0][order]
    check_decode(kind, fmt, q, main, sm_scale=2.0, num_splits=1)
    check_decode(kind, fmt, q, main, sm_scale=2.0, num_splits=3)


@gpu
@FORMATS
@pytest.mark.parametrize(("waves", "h_q"), [(0.25, 16), (0.67, 64), (1.05, 72)])
def test_rows_of_unequal_lists_divided_evenly(kind, evenly, rng, fmt, waves, h_q):
    """Lists of all lengths, among them none and one that is far longer than the others, with sinks."""
    b = int(waves * driver.gpu(0).sms)
    main = paged(rng, fmt, b, 1, 1200, 64, lengths=True)
    main.length[:] = main.length % 150
    main.length[:4] = 0, 1200, 0, 1
    extra = paged(rng, fmt, b, 1, 70, 2, lengths=True)
    q = queries(rng, b, 1, h_q, fmt.d_qk)
    check_decode(kind, fmt, q, main, extra, sink=sinks(rng, h_q), out_gaps=(0, 1, 2, 3))


@gpu
@FORMATS
def test_shares_leave_the_same_bits_every_time(kind, evenly, rng, fmt):
    main, q = paged(rng, fmt, 100, 1, 600, 64), queries(rng, 100, 1, 64, fmt.d_qk)
    check_same_bits(kind, q, main)


@gpu
@FORMATS
def test_same_bits_every_time(kind, rng, fmt):
    main, q = paged(rng, fmt, 3, 1, 1000, 64), queries(rng, 3, 1, 64, fmt.d_qk)
    for splits in (1, 4):
        check_same_bits(kind, q, main, num_splits=splits)


@gpu
@FORMATS
def test_replays_with_other_lengths(kind, evenly, rng, fmt):
    """Each replay divides anew, by the lengths that then lie in memory."""
    main, extra = (paged(rng, fmt, 70, 2, topk, 64, lengths=True) for topk in (300, 130))
    check_replays_with_other_lengths(rng, fmt, queries(rng, 70, 2, 64, fmt.d_qk), main, extra)
