"""Weight absorption, against float64 einsums."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import absorb_q, split_kv_b_proj, v_up_proj

from ..kinds import BF16, NumPy, gapped

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
