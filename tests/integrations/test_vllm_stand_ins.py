"""What stands in for packages that vLLM's engine needs beside attention, in benchmarks/vllm_stand_ins.py."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

PATH = Path(__file__).parents[2] / "benchmarks" / "vllm_stand_ins.py"
T, K, KEYS = 7, 6, 41


@pytest.fixture(scope="module")
def stand_ins():
    spec = importlib.util.spec_from_file_location("vllm_stand_ins", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen_of(logits: torch.Tensor) -> torch.Tensor:
    """Positions of the best logits of each row, the lower one of equals, -1 where there are too few."""
    best = logits.sort(dim=1, descending=True, stable=True)
    places = torch.where(best.values > -torch.inf, best.indices, -1)[:, :K].int()
    return torch.cat([places, torch.full((len(logits), K - places.shape[1]), -1, dtype=torch.int32)], 1)


@pytest.mark.parametrize(("ranks", "interleave", "starts"), [(2, 1, False), (2, 4, True), (3, 1, True)])
def test_ranks_choose_what_one_would(stand_ins, rng, ranks, interleave, starts):
    """Of many equal logits; some rows see fewer keys than they may choose, and a rank's may begin behind others'."""
    logits = torch.tensor(rng.integers(0, 9, (T, KEYS)), dtype=torch.float32)
    seen = torch.tensor([1, 2, K, 12, 30, KEYS, KEYS])
    logits.masked_fill_(torch.arange(KEYS) >= seen[:, None], -torch.inf)
    owner, parts = torch.arange(KEYS) // interleave % ranks, []
    for rank in range(ranks):
        own = logits[:, owner == rank]
        local = chosen_of(own)
        first = torch.tensor(rng.integers(0, 5, T), dtype=torch.int32) if starts else None
        if first is not None:  # columns of others stand before a row's own, and behind
            shifted = torch.full((T, own.shape[1] + 9), 99.0)
            for row, at in enumerate(first.tolist()):
                shifted[row, at : at + own.shape[1]] = own[row]
            own = shifted
        parts.append(stand_ins.candidates(own, local, rank, ranks, interleave, first))
    assert torch.equal(stand_ins.best(torch.cat(parts, 1), K), chosen_of(logits))


def test_a_rank_without_keys(stand_ins):
    none = stand_ins.candidates(torch.zeros(2, 0), torch.full((2, K), -1, dtype=torch.int32), 1, 2, 1, None)
    assert torch.equal(stand_ins.best(none, K), torch.full((2, K), -1, dtype=torch.int32))


def test_the_output_is_a_sum_of_streams(stand_ins, rng):
    """Against float64: gates of all streams' numbers, normed."""
    streams, fn, base = rng.standard_normal((T, 4, 16)), rng.standard_normal((4, 64)), rng.standard_normal(4)
    scale, rms_eps, eps = np.float64(0.7), 1e-6, 1e-3
    flat = streams.reshape(T, 64)
    mixes = flat @ fn.T / np.sqrt((flat**2).mean(1, keepdims=True) + rms_eps)
    gates = 1 / (1 + np.exp(-(mixes * scale + base))) + eps
    want = (gates[..., None] * streams).sum(1)
    given = [torch.tensor(each, dtype=torch.float32) for each in (streams, fn, [scale], base)]
    assert np.allclose(stand_ins.head(*given, rms_eps, eps).numpy(), want, atol=1e-4)


def test_the_first_layer_has_equal_streams(stand_ins, monkeypatch):
    """And its input is normed; the mixes are vLLM's own reference's, of which this has none."""

    def mixes(residual, fn, *coefficients):
        return "post", coefficients, residual.sum(1)

    monkeypatch.setattr(stand_ins, "reference", lambda part: mixes)
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    residual, post, comb, out = stand_ins.pre_of_one(x, torch.zeros(24, 8), 5, 6, norm_weight=weight, norm_eps=0.0)
    assert torch.equal(residual, torch.tensor([[[3.0, 4.0]] * 4]))
    assert (post, comb) == ("post", (5, 6))
    assert torch.allclose(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_inputs_are_mixed_as_the_sublayer_before_said(stand_ins, rng, monkeypatch):
    """DeepSeek-V4.1's, beside float64; the mixes are vLLM's own reference's, of which this has none."""

    def mixes(residual, fn, *, pre_mix=None, x=None):
        mixed = residual[:, 0] if pre_mix is None else (pre_mix[..., None] * residual).sum(1)
        return "post", "comb", mixed, "next"

    def post(x, residual, post_mix, comb_mix):
        return residual + x[:, None]

    monkeypatch.setattr(stand_ins, "reference", lambda part: {"pre_delayed": mixes, "post": post}[part])
    x, residual, weight = rng.standard_normal((T, 8)), rng.standard_normal((T, 4, 8)), rng.standard_normal(8)
    mix = rng.random((T, 4))
    given = [torch.tensor(each, dtype=torch.float32) for each in (x, residual, weight, mix)]
    streams, *parts, aux = stand_ins.delayed_post_and_pre(
        given[0], given[1], None, None, "fn", pre_mix=given[3], norm_weight=given[2], norm_eps=1e-3, capture_aux=True
    )
    assert (parts[0], parts[1], parts[3]) == ("post", "comb", "next")
    want = residual + x[:, None]
    mixed = (mix[..., None] * want).sum(1)
    normed = mixed / np.sqrt((mixed**2).mean(1, keepdims=True) + 1e-3) * weight
    assert np.allclose(streams.numpy(), want, atol=1e-6)
    assert np.allclose(parts[2].numpy(), normed, atol=1e-5)
    assert np.allclose(aux.numpy(), want.mean(1), atol=1e-6)
    *_, first, _ = stand_ins.delayed_pre(given[1], "fn", norm_weight=torch.ones(8), norm_eps=1e-3)
    mixed = residual[:, 0]
    assert np.allclose(first.numpy(), mixed / np.sqrt((mixed**2).mean(1, keepdims=True) + 1e-3), atol=1e-5)


def test_random_weights_are_the_same_everywhere(stand_ins):
    like = torch.empty(64, 256, dtype=torch.bfloat16)
    first, again, other = (stand_ins.weight_of(name, like) for name in ("a.weight", "a.weight", "b.weight"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == like.dtype
    assert abs(float(first.float().std()) * 16 - 1) < 0.1
    assert torch.equal(stand_ins.weight_of("layers.0.attn_norm.weight", torch.empty(8)), torch.ones(8))
    numbers = torch.arange(4)
    assert stand_ins.weight_of("gate.tid2eid", numbers) is numbers


def test_nothing_is_replaced_unless_asked_for(stand_ins, monkeypatch):
    monkeypatch.delenv("VLLM_STAND_INS", raising=False)
    before = set(sys.modules)
    stand_ins.register()
    assert set(sys.modules) == before
