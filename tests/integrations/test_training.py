"""`indexer_loss` differentiates by itself, and `cupy_mla.integrations.training` makes a layer's loss of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_mla
from tests import backward, kinds
from tests.kinds import NumPy
from tests.oracle_training import Loss
from tests.training import inputs, with_everything

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
training = pytest.importorskip("cupy_mla.integrations.training")

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def arguments(kind: NumPy, a: Loss) -> dict[str, Any]:
    """Of `indexer_loss`; q_index, k_index and w want gradients."""
    given = {"q_index": a.q, "k_index": a.k, "w": a.w, "target": a.target, "indices": a.indices[:, None]}
    tensors = {name: kind.put(np.ascontiguousarray(array)) for name, array in given.items()}
    for name in ("q_index", "k_index", "w"):
        tensors[name].requires_grad_()
    return tensors


def plain(q: Any, k: Any, w: Any, target: Any, lists: Any, relu: bool = True) -> Any:
    """The same loss in float64, of torch's own operations; every token has an entry."""
    lists = lists[:, 0]
    there = (lists >= 0) & (lists < len(k))
    rows = k.double()[lists.clamp(0, len(k) - 1).long()]
    z = torch.einsum("ihd,ijd->ihj", q.double(), rows)
    scores = torch.einsum("ih,ihj->ij", w.double(), z.relu() if relu else z)
    log_pred = torch.where(there, scores, -torch.inf).log_softmax(-1)
    p = torch.where(there, target.double(), 0.0)
    p = p / p.sum(-1, keepdim=True)
    return torch.where(there, p * (p.clamp(min=1e-10).log() - log_pred), 0.0).sum() / len(q)


def gradients(loss: Any, given: dict[str, Any]) -> list[Any]:
    return [*torch.autograd.grad(loss, [given[name] for name in ("q_index", "k_index", "w")])]


@pytest.mark.parametrize("relu", [True, False])
def test_gradients(kind, rng, relu):
    """They are those of torch's own operations, times the gradient that arrives; eager, compiled, checkpointed."""
    a = inputs(rng, 5, 12, 40, 30)
    a = a._replace(k=np.nan_to_num(a.k.astype(np.float32)).astype(a.k.dtype))
    a.indices[:, 0] = 3
    given = arguments(kind, a)
    wanted = gradients(3 * plain(*given.values(), relu), given)

    def loss_of(*tensors: Any) -> Any:
        return cupy_mla.indexer_loss(*tensors, relu=relu)[0]

    eager = gradients(3 * loss_of(*given.values()), given)
    for got, want in zip(eager, wanted, strict=True):
        assert got.dtype == want.dtype
        assert torch.linalg.vector_norm(got.double() - want.double()) < 0.01 * torch.linalg.vector_norm(want.double())
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for loss in (compiled(*given.values()), checkpoint(loss_of, *given.values(), use_reentrant=False)):
        assert all(torch.equal(x, y) for x, y in zip(gradients(3 * loss, given), eager, strict=True))


def test_what_has_no_gradient(kind, rng):
    a = inputs(rng, 3, 4, 20, 10)
    given = arguments(kind, a)
    loss, *others = cupy_mla.indexer_loss(**given)
    assert [x.requires_grad for x in (loss, *others)] == [True, False, False, False]
    with pytest.raises(RuntimeError, match=r"^q_index requires a gradient, and this call has no backward"):
        cupy_mla.indexer_loss(**given, dw=torch.empty_like(given["w"]))
    loss, *nothing = cupy_mla.indexer_loss(**given, gradients=False)
    assert nothing == [None, None, None]
    with pytest.raises(RuntimeError, match=r"^gradients=False: the indexer's loss"):
        loss.backward()


def test_a_layer(kind, rng):
    """The indexer's loss rides on a layer's result: its gradients are its own, the attention's stay."""
    a, b = inputs(rng, 5, 4, 40, 30), backward.inputs(rng, 5, 12, 576, 40, 30, size=1.0)
    everything = with_everything(rng, a)
    counted, length = kind.put(everything.counted), kind.put(everything.length)
    given = arguments(kind, a._replace(q=np.nan_to_num(a.q.astype(np.float32)).astype(a.q.dtype)))
    q, kv, lists = (kind.put(x) for x in (b.q, b.kv, b.indices))
    given["k_index"] = kind.put(np.zeros((40, 128), a.k.dtype)).add_(0.5).requires_grad_()
    given["w"] = kind.put(rng.standard_normal(a.w.shape, np.float32)).requires_grad_()
    q.requires_grad_()
    kv.requires_grad_()
    out, _, lse = cupy_mla.sparse_prefill(q, kv, lists, 0.1, topk_length=length)
    learned = [given[name] for name in ("q_index", "k_index", "w")]
    loss = training.sparse_indexer_loss(
        *learned, q, kv, lists, lse, 0.1, topk_length=length, counted=counted, loss_coeff=0.5
    )  # fmt: skip
    want = torch.autograd.grad(out.float().square().sum(), (q, kv), retain_graph=True)
    of_loss = torch.autograd.grad(loss, learned, retain_graph=True)
    attached = training.attach_loss(out, loss, 4.0)
    assert torch.equal(attached, out)
    got = torch.autograd.grad(attached.float().square().sum(), (q, kv, *learned))
    assert all(torch.equal(x, y) for x, y in zip(got[:2], want, strict=True))
    for x, y in zip(got[2:], of_loss, strict=True):
        assert torch.equal(x, 4 * y)
        assert torch.isfinite(x.float()).all()
    target = cupy_mla.attention_target(q.detach(), kv.detach(), lists, lse.detach(), 0.1, topk_length=length)
    with torch.no_grad():
        again = cupy_mla.indexer_loss(
            *learned, target, lists, topk_length=length, counted=counted, loss_coeff=0.5
        )  # fmt: skip
    assert torch.equal(again[0], loss)


@pytest.mark.parametrize("per_token", [False, True])
def test_warm_up(kind, rng, per_token):
    """In parts, over packed sequences: the loss of all at once, and its gradients; of lse that is given, too."""
    tokens, packed = 23, np.array([0] * 9 + [9] * 14, np.int32)
    a, b = inputs(rng, tokens, 4, tokens, 5), backward.inputs(rng, tokens, 12, 576, tokens, 5, size=1.0)
    given = arguments(kind, a._replace(k=np.nan_to_num(a.k.astype(np.float32)).astype(a.k.dtype)))
    learned = [given[name] for name in ("q_index", "k_index", "w")]
    q, kv = kind.put(b.q), kind.put(np.nan_to_num(b.kv.astype(np.float32)).astype(b.kv.dtype))
    starts, ends = kind.put(packed), kind.put(np.arange(1, tokens + 1, dtype=np.int32))
    counted = kind.put(np.arange(tokens) != 4)
    of = {"counted": counted, "per_token": per_token, "loss_coeff": 0.5}
    lse = cupy_mla.dense_lse(q, kv, 0.1, starts, ends)
    target = cupy_mla.dense_attention_target(q, kv, lse, 0.1, starts, ends)
    loss, *_ = cupy_mla.dense_indexer_loss(*learned, target, starts, ends, **of)
    want = torch.autograd.grad(2 * loss, learned)
    for target_bytes, more in ((1 << 20, {}), (4 * tokens * 5, {"lse": lse})):
        got = training.warmup_loss(
            *learned, q.requires_grad_(), kv, 0.1, starts, ends, target_bytes=target_bytes, **of, **more
        )  # fmt: skip
        assert torch.allclose(got, loss, rtol=1e-5)
        for x, y in zip(torch.autograd.grad(2 * got, learned), want, strict=True):
            assert x.dtype == y.dtype
            assert (x.double() - y.double()).norm() < 0.01 * y.double().norm()


def test_compiled_whole(kind, rng):
    """A layer and its warm-up without a graph break, to the bits of eager calls."""
    tokens = 9
    a, b = inputs(rng, tokens, 4, tokens, 5), backward.inputs(rng, tokens, 12, 576, tokens, 5, size=1.0)
    given = arguments(kind, a._replace(k=np.nan_to_num(a.k.astype(np.float32)).astype(a.k.dtype)))
    learned = [given[name] for name in ("q_index", "k_index", "w")]
    q, lists = kind.put(b.q).requires_grad_(), kind.put(b.indices)
    kv = kind.put(np.nan_to_num(b.kv.astype(np.float32)).astype(b.kv.dtype))
    starts, ends = kind.put(np.zeros(tokens, np.int32)), kind.put(np.arange(1, tokens + 1, dtype=np.int32))

    def layer(q: Any, *learned: Any) -> Any:
        out, _, lse = cupy_mla.sparse_prefill(q, kv, lists, 0.1)
        loss = training.sparse_indexer_loss(*learned, q, kv, lists, lse, 0.1)
        warm = training.warmup_loss(*learned, q, kv, 0.1, starts, ends, target_bytes=4 * tokens * 5)
        return training.attach_loss(out, loss, 2.0).float().square().sum() + warm

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(q, *learned), (q, *learned)) for f in (compiled, layer))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert all(x.abs().max() > 0 for x in got)


RANK = """
import sys
import torch, torch.distributed as dist
from cupy_mla.integrations.training import sparse_indexer_loss

dist.init_process_group("gloo")
given, me = torch.load(sys.argv[1]), dist.get_rank()
heads = slice(6 * me, 6 * me + 6)
loss = sparse_indexer_loss(*given["learned"], given["q"][:, heads].contiguous(), given["kv"], given["lists"],
                           given["lse"][:, heads].contiguous(), 0.1, group=dist.group.WORLD)
assert abs(loss - given["loss"]) < 1e-5 * given["loss"], (loss, given["loss"])
dist.destroy_process_group()
"""


@pytest.mark.long
def test_heads_of_two_processes(rng, tmp_path):
    """Their targets are summed up: the loss is that of all heads."""
    kind = kinds.make("torch")
    a, b = inputs(rng, 5, 4, 40, 30), backward.inputs(rng, 5, 12, 576, 40, 30, size=1.0)
    learned = [t.detach() for t in list(arguments(kind, a).values())[:3]]
    q, kv, lists = (kind.put(x) for x in (b.q, b.kv, b.indices))
    learned[1] = torch.randn(40, 128).bfloat16()
    _, _, lse = cupy_mla.sparse_prefill(q, kv, lists, 0.1)
    loss = training.sparse_indexer_loss(*learned, q, kv, lists, lse, 0.1)
    given = {"learned": learned, "q": q, "kv": kv, "lists": lists, "lse": lse, "loss": loss}
    torch.save({n: t if n == "learned" else t.clone() for n, t in given.items()}, tmp_path / "given.pt")
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py"), str(tmp_path / "given.pt")], env=env, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
