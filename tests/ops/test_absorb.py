"""Weight absorption, against float64 einsums."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import absorb_q, split_kv_b_proj, v_up_proj

from ..kinds import BF16, E4M3, NumPy, gapped

T, H, D_NOPE, D_V, LATENT = 5, 3, 24, 16, 512
# One rounding of the result to bfloat16; sums of 512 float32 products stay far below it.
RELATIVE = {BF16: 1.01 / 256, np.dtype(np.float32): 1e-5}


def values(rng: np.random.Generator, *shape: int, dtype: np.dtype = BF16) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def assert_near(got: np.ndarray, want: np.ndarray, dtype: np.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=RELATIVE[dtype], atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("linear_order", [False, True], ids=["latent-first", "torch-Linear"])
def test_absorption_is_one_product_a_head(
    kind: NumPy, rng: np.random.Generator, dtype: np.dtype, linear_order: bool
) -> None:
    weight = values(rng, LATENT, H * (D_NOPE + D_V), dtype=dtype)
    if linear_order:  # the strides of `linear.weight.T`
        weight = np.ascontiguousarray(weight.T).T
    q_nope = gapped(values(rng, T, H, D_NOPE, dtype=dtype), 0, 2, 8)
    latent_out = gapped(values(rng, T, H, LATENT, dtype=dtype), 1, 0, 8)

    w_uk, w_uv = split_kv_b_proj(kind.put(weight), H, D_NOPE)
    absorbed, expanded = absorb_q(kind.put(q_nope), w_uk), v_up_proj(kind.put(latent_out), w_uv)

    by_head = weight.astype(np.float64).reshape(LATENT, H, D_NOPE + D_V)
    want_q = np.einsum("bnp,lnp->bnl", q_nope.astype(np.float64), by_head[..., :D_NOPE])
    want_v = np.einsum("bnl,lnv->bnv", latent_out.astype(np.float64), by_head[..., D_NOPE:])
    for got, want in ((absorbed, want_q), (expanded, want_v)):
        assert kind.is_mine(got)
        assert_near(kind.take(got), want, dtype)


def test_split_gives_views(rng: np.random.Generator) -> None:
    weight = values(rng, LATENT, H * (D_NOPE + D_V))
    w_uk, w_uv = split_kv_b_proj(weight, H, D_NOPE)
    assert w_uk.shape == (LATENT, H, D_NOPE)
    assert w_uv.shape == (LATENT, H, D_V)
    assert np.shares_memory(w_uk, weight)
    assert np.shares_memory(w_uv, weight)


@pytest.mark.long(sample=6)
@pytest.mark.parametrize("linear_order", [False, True], ids=["latent-first", "torch-Linear"])
@pytest.mark.parametrize("dtype", [E4M3, np.dtype(np.uint8)], ids=str)
@pytest.mark.parametrize(("heads", "d_nope", "d_v"), [(2, 128, 128), (3, 24, 16), (1, 192, 256)])
def test_fp8_weights(kind, rng, linear_order: bool, dtype: np.dtype, heads: int, d_nope: int, d_v: int) -> None:
    """Each 128 x 128 values under a scale, as checkpoints have them; a head need not begin where a block does."""
    width = heads * (d_nope + d_v)
    weight = rng.standard_normal((LATENT, width)).astype(E4M3)
    scales = rng.uniform(1e-3, 2, (4, -(-width // 128))).astype(np.float32)
    of_value = scales[np.arange(LATENT)[:, None] // 128, np.arange(width) // 128]
    want = (weight.astype(np.float32) * of_value).astype(BF16).reshape(LATENT, heads, d_nope + d_v)
    given = weight.view(dtype)
    if linear_order:  # the strides of `linear.weight.T`
        given, scales = (np.ascontiguousarray(a.T).T for a in (given, scales))
    w_uk, w_uv = split_kv_b_proj(kind.put(given), heads, d_nope, scales=kind.put(scales))
    for got, part in ((w_uk, want[..., :d_nope]), (w_uv, want[..., d_nope:])):
        assert kind.is_mine(got)
        np.testing.assert_array_equal(kind.take(got).view(np.uint16), part.view(np.uint16))
    assert absorb_q(kind.put(values(rng, T, heads, d_nope)), w_uk).shape == (T, heads, LATENT)


def test_fp8_weights_and_scales_go_together(kind, rng) -> None:
    weight, scales = rng.standard_normal((LATENT, 256)).astype(E4M3), np.ones((4, 2), np.float32)
    for w, s, error, message in (
        (weight, None, TypeError, "weight: expected dtype bfloat16 or float32, or scales with it, got .*8.* alone"),
        (weight.astype(BF16), scales, TypeError, "weight: expected dtype uint8 or float8_e4m3fn, got bfloat16"),
        (weight, scales[:, :1], ValueError, r"scales: expected shape \[4, 2\], got \[4, 1\]"),
        (weight, scales.T, ValueError, r"scales: expected shape \[4, 2\], got \[2, 4\]"),
        (weight, scales.astype(np.float64), TypeError, "scales: expected dtype float32"),
        (weight, 1.0, TypeError, "scales: expected a NumPy, CuPy or torch array"),
    ):
        given = kind.put(s) if isinstance(s, np.ndarray) else s
        with pytest.raises(error, match=f"^{message}"):
            split_kv_b_proj(kind.put(w), 2, 64, scales=given)


def test_no_tokens(rng: np.random.Generator) -> None:
    w_uk, w_uv = split_kv_b_proj(values(rng, LATENT, H * (D_NOPE + D_V)), H, D_NOPE)
    assert absorb_q(np.empty((0, H, D_NOPE), BF16), w_uk).shape == (0, H, LATENT)
    assert v_up_proj(np.empty((0, H, LATENT), BF16), w_uv).shape == (0, H, D_V)


def test_errors_name_the_argument(rng: np.random.Generator) -> None:
    weight = values(rng, LATENT, H * (D_NOPE + D_V))
    w_uk, w_uv = split_kv_b_proj(weight, H, D_NOPE)
    q_nope, x = values(rng, T, H, D_NOPE), values(rng, T, H, LATENT)
    with pytest.raises(TypeError, match="weight: expected dtype bfloat16 or float32, got float16"):
        split_kv_b_proj(weight.astype(np.float16), H, D_NOPE)
    for heads, d_nope in ((7, 8), (H, D_NOPE + D_V)):
        with pytest.raises(ValueError, match=f"weight: expected {heads} heads of more than {d_nope} columns"):
            split_kv_b_proj(weight, heads, d_nope)
    for heads, d_nope, name in ((0, 8, "num_heads"), (H, 0, "d_nope")):
        with pytest.raises(ValueError, match=f"^{name} must be >= 1"):
            split_kv_b_proj(weight, heads, d_nope)
    for heads, d_nope, name in ((3.0, 8, "num_heads"), (H, "24", "d_nope")):
        with pytest.raises(TypeError, match=f"^{name}: expected an integer"):
            split_kv_b_proj(weight, heads, d_nope)
    with pytest.raises(ValueError, match=r"w_uk: expected shape \[512, 3, 23\], got \[512, 3, 24\]"):
        absorb_q(q_nope[..., 1:], w_uk)
    with pytest.raises(TypeError, match="w_uk: expected dtype bfloat16, got float32"):
        absorb_q(q_nope, w_uk.astype(np.float32))
    with pytest.raises(ValueError, match=r"w_uv: expected shape \[512, 2, d_v\], got \[512, 3, 16\]"):
        v_up_proj(x[:, 1:], w_uv)


def test_other_latent_widths_and_untransposed_weights_are_refused(rng: np.random.Generator) -> None:
    """The weight of a `torch.nn.Linear` has its axes the other way round."""
    weight = values(rng, LATENT, H * (D_NOPE + D_V))
    w_uk, w_uv = split_kv_b_proj(weight, H, D_NOPE)
    q_nope, x = values(rng, T, H, D_NOPE), values(rng, T, H, LATENT)
    for wrong in (weight.T, weight[:256]):
        with pytest.raises(ValueError, match=r"^weight: expected shape \[512, num_heads \* \(d_nope \+ d_v\)\]"):
            split_kv_b_proj(wrong, H, D_NOPE)
    with pytest.raises(ValueError, match=r"^w_uk: expected shape \[512, 3, 24\]"):
        absorb_q(q_nope, w_uk[:256])
    with pytest.raises(ValueError, match=r"^x: expected shape \[T, h, 512\]"):
        v_up_proj(x[..., :256], w_uv[:256])
    with pytest.raises(ValueError, match=r"^w_uv: expected shape \[512, 3, d_v\]"):
        v_up_proj(x, w_uv.T)
