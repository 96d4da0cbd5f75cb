"""`sparse_prefill` differentiates by itself: eager, under torch.compile, with activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_mla
from tests.backward import inputs
from tests.cases import sinks
from tests.kinds import NumPy

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def arguments(kind: NumPy, rng: np.random.Generator, s_q: int = 5, h_q: int = 12, d_qk: int = 576) -> dict[str, Any]:
    """Of `sparse_prefill`; q, kv and attn_sink want gradients. No row is NaN, for a plain model reads all."""
    a = inputs(rng, s_q, h_q, d_qk, 40, 30, size=1.0)
    length = rng.integers(0, 33, s_q, dtype=np.int32)
    length[0] = 0
    kv, sink = rng.standard_normal(a.kv.shape, np.float32).astype(a.kv.dtype), sinks(rng, h_q)
    given = {
        "q": kind.put(a.q).requires_grad_(), "kv": kind.put(kv).requires_grad_(), "indices": kind.put(a.indices),
        "sm_scale": 0.1, "attn_sink": kind.put(sink).requires_grad_(), "topk_length": kind.put(length),
    }  # fmt: skip
    return given


def wanting(given: dict[str, Any]) -> list[Any]:
    return [given[name] for name in ("q", "kv", "attn_sink")]


def plain(q: Any, kv: Any, indices: Any, sm_scale: float, attn_sink: Any, topk_length: Any) -> tuple[Any, Any]:
    """out and lse of the same attention in float64, of torch's own operations."""
    q, kv, lists = q.double(), kv[:, 0].double(), indices[:, 0]
    there = (lists >= 0) & (lists < len(kv))
    there &= torch.arange(lists.shape[1], device=lists.device) < topk_length[:, None]
    rows = kv[lists.clamp(0, len(kv) - 1).long()]
    logits = torch.where(there[:, None], sm_scale * torch.einsum("ihd,ijd->ihj", q, rows), -torch.inf)
    some = there.any(1)
    logits = torch.where(some[:, None, None], logits, 0.0)
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("ihj,ijd->ihd", torch.softmax(logits, -1), rows[..., :512])
    out = out * torch.sigmoid(lse - attn_sink.double())[..., None]
    return torch.where(some[:, None, None], out, 0.0), torch.where(some[:, None], lse, 0.0)


def gradients(function: Callable[..., Any], given: dict[str, Any], weights: tuple[Any, Any]) -> list[Any]:
    """Of a sum of out and lse with these weights; where lse is infinite it does not count."""
    out, *_, lse = function(**given)
    lse = torch.where(torch.isinf(lse), 0.0, lse)
    return [*torch.autograd.grad((out * weights[0]).sum() + (lse * weights[1]).sum(), wanting(given))]


def weights_of(kind: NumPy, rng: np.random.Generator, given: dict[str, Any]) -> tuple[Any, Any]:
    s_q, h_q, _ = given["q"].shape
    weights = rng.standard_normal((s_q, h_q, 512), np.float32), rng.standard_normal((s_q, h_q), np.float32)
    return kind.put(weights[0]).bfloat16(), kind.put(weights[1])


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("function", [cupy_mla.sparse_prefill, cupy_mla.flash_mla_sparse_fwd])
def test_gradients(kind, rng, function, d_qk):
    """They are those of torch's own operations, to bfloat16's precision. Gradients of sinks are sums of out, which is
    rounded, times its gradient, and may be much smaller than what is summed."""
    given = arguments(kind, rng, d_qk=d_qk)
    weights = weights_of(kind, rng, given)
    found, wanted = gradients(function, given, weights), gradients(plain, given, weights)
    out, lse = plain(**given)
    summands = out * weights[0] * torch.sigmoid(given["attn_sink"].double() - lse)[..., None]
    rounding = 2**-8 * torch.linalg.vector_norm(summands)
    for got, want, more in zip(found, wanted, (0.0, 0.0, rounding), strict=True):
        assert got.dtype == want.dtype
        error = torch.linalg.vector_norm(got.double() - want.double())
        assert error < 0.01 * torch.linalg.vector_norm(want.double()) + more


def test_gradient_of_lse_in_base_2(kind, rng):
    given = arguments(kind, rng)
    found = []
    for function, more in ((cupy_mla.flash_mla_sparse_fwd, {"return_log2_lse": True}), (cupy_mla.sparse_prefill, {})):
        _, _, lse = function(**given, **more)
        found.append(torch.autograd.grad(lse[torch.isfinite(lse)].sum(), given["q"])[0].float())
    error = torch.linalg.vector_norm(found[0] - found[1] / np.log(2))
    assert error < 0.01 * torch.linalg.vector_norm(found[0])
    assert found[0].abs().max() > 0.1


def test_bits_are_those_of_the_operation(kind, rng):
    given = arguments(kind, rng)
    weights = weights_of(kind, rng, given)
    got = gradients(cupy_mla.sparse_prefill, given, weights)
    with torch.no_grad():
        out, _, lse = cupy_mla.sparse_prefill(**given)
        d_lse = torch.where(torch.isinf(lse), 0.0, weights[1])
        arrays = [given[name] for name in ("q", "kv", "indices")]
        want = cupy_mla.sparse_prefill_backward(
            *arrays, out, lse, weights[0], 0.1, attn_sink=given["attn_sink"], topk_length=given["topk_length"],
            d_lse=d_lse,
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_compiled_whole(kind, rng):
    """Forward and backward without a graph break, to the bits of eager calls."""
    compiled = torch.compile(
        lambda **given: cupy_mla.sparse_prefill(**given), fullgraph=True, backend="aot_eager"
    )  # fmt: skip
    for _ in range(2):
        given = arguments(kind, rng)
        weights = weights_of(kind, rng, given)
        got, want = (gradients(f, given, weights) for f in (compiled, cupy_mla.sparse_prefill))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_compiled_in_a_model(kind, rng):
    """Between layers that have gradients themselves, and without sinks, lengths and lse."""
    given = arguments(kind, rng)
    weight = kind.put(rng.standard_normal((576, 576), np.float32) / 24).bfloat16().requires_grad_()

    def model(q: Any, kv: Any) -> Any:
        out, _, _ = cupy_mla.sparse_prefill(q @ weight, kv, given["indices"], 0.1)
        return out.float().square().sum()

    found = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        loss = function(given["q"], given["kv"])
        found.append(torch.autograd.grad(loss, [given["q"], given["kv"], weight]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(g.abs().max() > 0 for g in found[0])


def test_weights_in_float32(kind, rng):
    """Under torch.autocast projections give bfloat16, and gradients reach their float32 weights."""
    given = arguments(kind, rng)
    hidden, rows = (kind.put(rng.standard_normal((n, 64), np.float32)) for n in (5, 40))
    shapes = (64, 12 * 576), (64, 576)
    wq, wkv = (kind.put(rng.standard_normal(shape, np.float32) / 8).requires_grad_() for shape in shapes)
    of = {name: given[name] for name in ("indices", "sm_scale", "attn_sink", "topk_length")}

    def loss(function: Callable[..., Any]) -> Any:
        with torch.autocast(kind.device, torch.bfloat16):
            q, kv = (hidden @ wq).view(5, 12, 576), (rows @ wkv)[:, None]
            assert q.dtype == kv.dtype == torch.bfloat16
            return function(q=q, kv=kv, **of)[0].double().square().sum()

    got, want = (torch.autograd.grad(loss(f), [wq, wkv]) for f in (cupy_mla.sparse_prefill, plain))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-2 * b.norm()


def test_checkpointing(kind, rng):
    """The forward is made again, and the bits stay."""
    given = arguments(kind, rng)
    weights = weights_of(kind, rng, given)
    calls = []

    def attend(**given: Any) -> Any:
        calls.append(1)
        return cupy_mla.sparse_prefill(**given)

    got = gradients(lambda **given: checkpoint(attend, use_reentrant=False, **given), given, weights)
    want = gradients(cupy_mla.sparse_prefill, given, weights)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["q", "kv", "attn_sink"])
def test_one_gradient(kind, rng, name):
    """Only one argument wants one; and only lse is looked at, or a sum of out, whose gradient is a number expanded."""
    given = arguments(kind, rng)
    alone = {n: a.detach() if n != name and isinstance(a, torch.Tensor) else a for n, a in given.items()}
    for pick in (lambda out, _, lse: out.sum(), lambda out, _, lse: lse[torch.isfinite(lse)].sum()):
        (got,) = torch.autograd.grad(pick(*cupy_mla.sparse_prefill(**alone)), alone[name])
        want = torch.autograd.grad(pick(*cupy_mla.sparse_prefill(**given)), given[name])
        assert torch.equal(got, want[0])
    assert name == "attn_sink" or got.abs().max() > 0


def test_what_has_no_gradient(kind, rng):
    given = arguments(kind, rng)
    out, max_logits, lse = cupy_mla.sparse_prefill(**given)
    assert (out.requires_grad, max_logits.requires_grad, lse.requires_grad) == (True, False, True)
    (dq,) = torch.autograd.grad(out.float().square().sum(), given["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^cupy_mla\.sparse_prefill_backward has no backward"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match=r"^q requires a gradient, and this call has no backward"):
        cupy_mla.sparse_prefill(**given, out=torch.empty_like(out))


def test_rows_without_a_backward(kind, rng):
    """Said by the forward, not by the backward."""
    given = arguments(kind, rng)
    given |= {"q": given["q"].detach(), "kv": given["kv"].detach().to(torch.float8_e4m3fn)}
    with pytest.raises(NotImplementedError, match=r"^cupy_mla\.sparse_prefill over e4m3 rows has no backward: call it"):
        cupy_mla.sparse_prefill(**given)
    with torch.no_grad():
        out, *_ = cupy_mla.sparse_prefill(**given)
    assert out[1:].isfinite().all()


def test_opcheck(kind, rng):
    """With inputs that require gradients: the backward's registration, and its trace."""
    given = arguments(kind, rng)
    cupy_mla.sparse_prefill(**given)  # registers the custom op
    torch.library.opcheck(torch.ops.cupy_mla.sparse_prefill.default, (), given)


def test_deterministic_algorithms(kind, rng):
    """There is one path, and it is deterministic: torch has nothing to say."""
    given = arguments(kind, rng)
    weights = weights_of(kind, rng, given)
    want = gradients(cupy_mla.sparse_prefill, given, weights)
    torch.use_deterministic_algorithms(True)
    try:
        got = gradients(cupy_mla.sparse_prefill, given, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
