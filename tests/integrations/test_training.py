"""`indexer_loss` differentiates by itself, and `cupy_mla.integrations.training` makes a layer's loss of it."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_mla
from tests import backward, kinds
from tests import oracle_training as oracle
from tests.integrations import ranks
from tests.kinds import NumPy
from tests.oracle_training import Loss
from tests.training import inputs, with_everything

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
training = pytest.importorskip("cupy_mla.integrations.training")

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


def straight_through(x: Any, floor: float, scale_format: str = "fp32") -> Any:
    """x in float64 through e4m3; what it is rounded to has its gradient."""
    values = oracle.rounded(x.detach().float().cpu().numpy().reshape(-1, 128), floor, scale_format)
    return x.double() + (torch.from_numpy(values).to(x.device).view(x.shape) - x.detach().double())


def gradients(loss: Any, given: dict[str, Any]) -> list[Any]:
    return [*torch.autograd.grad(loss, [given[name] for name in ("q_index", "k_index", "w")])]


def test_opcheck(kind, rng):
    """With inputs that require gradients: the backward's registration, and its trace."""
    given = arguments(kind, inputs(rng, 4, 8, 60, 20))
    cupy_mla.indexer_loss(**given)  # registers the custom op
    torch.library.opcheck(torch.ops.cupy_mla.indexer_loss.default, (), given)


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


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_quantized_gradients(kind, rng, scale_format):
    """Straight through to queries and keys; eager and compiled."""
    a = inputs(rng, 5, 12, 40, 30)
    a = a._replace(k=np.nan_to_num(a.k.astype(np.float32)).astype(a.k.dtype))
    a.indices[:, 0] = 3
    given = arguments(kind, a)
    q, k, *others = given.values()
    rounded = straight_through(q, 1e-10, scale_format), straight_through(k, 1e-4, scale_format)
    wanted = gradients(plain(*rounded, *others), given)
    of_bf16 = gradients(plain(q, k, *others), given)

    def loss_of(*tensors: Any) -> Any:
        return cupy_mla.indexer_loss(*tensors, quantized=True, scale_format=scale_format)[0]

    eager = gradients(loss_of(*given.values()), given)
    for got, want, other in zip(eager, wanted, of_bf16, strict=True):
        assert torch.linalg.vector_norm(got.double() - want.double()) < 0.01 * torch.linalg.vector_norm(want.double())
        assert torch.linalg.vector_norm(got.double() - other.double()) > 0.02 * torch.linalg.vector_norm(want.double())
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(gradients(compiled(*given.values()), given), eager, strict=True))


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


@pytest.mark.parametrize(("per_token", "quantized"), [(False, False), (True, False), (False, True)])
def test_warm_up(kind, rng, per_token, quantized):
    """In parts, over packed sequences: the loss of all at once, and its gradients; of lse that is given, too."""
    tokens, packed = 23, np.array([0] * 9 + [9] * 14, np.int32)
    a, b = inputs(rng, tokens, 4, tokens, 5), backward.inputs(rng, tokens, 12, 576, tokens, 5, size=1.0)
    given = arguments(kind, a._replace(k=np.nan_to_num(a.k.astype(np.float32)).astype(a.k.dtype)))
    learned = [given[name] for name in ("q_index", "k_index", "w")]
    q, kv = kind.put(b.q), kind.put(np.nan_to_num(b.kv.astype(np.float32)).astype(b.kv.dtype))
    starts, ends = kind.put(packed), kind.put(np.arange(1, tokens + 1, dtype=np.int32))
    counted = kind.put(np.arange(tokens) != 4)
    of = {"counted": counted, "per_token": per_token, "loss_coeff": 0.5, "quantized": quantized}
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


class Layer(NamedTuple):
    """Of `SparseMLATraining`: q_index, k_index, w, q and kv, which want gradients; ranges of two packed sequences."""

    tensors: list[Any]
    sink: Any
    ranges: tuple[Any, Any]

    @classmethod
    def make(cls, kind: NumPy, rng: np.random.Generator, heads: int = 12) -> Layer:
        tokens, first = 21, np.array([0] * 9 + [9] * 12, np.int32)
        a, b = inputs(rng, tokens, heads, tokens, 5), backward.inputs(rng, tokens, 6, 576, tokens, 5, size=1.0)
        k, kv = (rng.standard_normal(x.shape, np.float32).astype(a.k.dtype) for x in (a.k, b.kv))
        tensors = [kind.put(x).requires_grad_() for x in (a.q, k, a.w, b.q, kv)]
        ranges = kind.put(first), kind.put(np.arange(1, tokens + 1, dtype=np.int32))
        return cls(tensors, kind.put(rng.standard_normal(6, np.float32)).requires_grad_(), ranges)

    def gradients(self, out: Any, loss: Any = None) -> list[Any]:
        """Of a sum of both; the last one is that of the sinks."""
        total = out.double().square().sum() + (0 if loss is None else 2 * loss)
        return [*torch.autograd.grad(total, [*self.tensors, self.sink])]

    def plain(self, lists: Any, quantized: bool) -> tuple[Any, Any]:
        """out and loss in float64, of torch's own operations."""
        q_index, k_index, w, q, kv = (x.double() for x in self.tensors)
        if quantized:
            q_index, k_index = straight_through(self.tensors[0], 1e-10), straight_through(self.tensors[1], 1e-4)
        there, rows = lists >= 0, kv[:, 0][lists.clamp(min=0).long()]
        logits = torch.where(there[:, None], 0.1 * torch.einsum("ihd,ijd->ihj", q, rows), -torch.inf)
        p, sigma = logits.softmax(-1), torch.sigmoid(logits.logsumexp(-1) - self.sink.double())
        out = torch.einsum("ihj,ijd->ihd", p, rows[..., :512]) * sigma[..., None]
        return out, plain(q_index, k_index, w, p.sum(1).detach(), lists[:, None])


@pytest.mark.parametrize(("heads", "quantized"), [(12, True), (16, False)])
def test_module(kind, rng, heads, quantized):
    """Over rows that the indexer chooses: gradients of everything against float64; compiled, checkpointed, attached to
    the bits of eager ones."""
    layer, topk = Layer.make(kind, rng, heads), 7
    module = training.SparseMLATraining(0.1, topk, quantized=quantized)

    def forward(*tensors: Any) -> tuple[Any, Any]:
        return module(*tensors, layer.ranges, attn_sink=layer.sink)

    out, loss = forward(*layer.tensors)
    lists = module.choose(*layer.tensors[:3], *layer.ranges)[:, 0]
    check_choice(layer, lists, topk)
    eager, want_out_loss = layer.gradients(out, loss), layer.plain(lists, quantized)
    assert torch.allclose(loss.double(), want_out_loss[1], rtol=1e-3)
    for got, want in zip(eager, layer.gradients(*want_out_loss), strict=True):
        assert (got.double() - want.double()).norm() < 0.01 * want.double().norm()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    attached = training.SparseMLATraining(0.1, topk, quantized=quantized, attach=2.0)
    out, known = attached(*layer.tensors, layer.ranges, attn_sink=layer.sink)
    assert torch.equal(known, loss.detach())
    for result in (compiled(*layer.tensors), checkpoint(forward, *layer.tensors, use_reentrant=False), (out, None)):
        assert all(torch.equal(x, y) for x, y in zip(layer.gradients(*result), eager, strict=True))


def check_choice(layer: Layer, lists: Any, topk: int) -> None:
    """The rows of the highest scores in float64 of what is rounded, each from its own sequence, ascending."""
    q, k = straight_through(layer.tensors[0], 1e-10), straight_through(layer.tensors[1], 1e-4)
    scores = torch.einsum("ih,ihj->ij", layer.tensors[2].double(), torch.einsum("ihd,jd->ihj", q, k).relu())
    for i, (start, end) in enumerate(zip(*(x.tolist() for x in layer.ranges), strict=True)):
        found = [row for row in lists[i].tolist() if row >= 0]
        want = scores[i, start:end].topk(min(topk, end - start)).indices + start
        assert found == sorted(want.tolist())


def test_module_over_given_lists(kind, rng):
    """As over those it chose, without a gradient of what does not learn; and what it cannot do."""
    layer = Layer.make(kind, rng)
    module = training.SparseMLATraining(0.1, 7, loss_coeff=0.5)
    lists, counted = module.choose(*layer.tensors[:3], *layer.ranges), kind.put(rng.random(21) < 0.7)
    want = module(*layer.tensors, layer.ranges, counted=counted)
    got = module(*layer.tensors, indices=lists, counted=counted)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert not torch.equal(module(*layer.tensors, indices=lists)[1], got[1])
    frozen = [x.detach() for x in layer.tensors[:3]]
    for attach in (None, 1.0):
        out, loss = training.SparseMLATraining(0.1, 7, loss_coeff=0.5, attach=attach)(
            *frozen, *layer.tensors[3:], indices=lists, counted=counted
        )
        assert torch.equal(loss, got[1])
        assert (out.requires_grad, loss.requires_grad) == (True, False)
    short = module(*layer.tensors, indices=lists, topk_length=torch.full_like(lists[:, 0, 0], 2))
    first = module(*layer.tensors, indices=lists[..., :2].contiguous())
    assert torch.equal(short[0], first[0])
    assert torch.allclose(short[1], first[1], rtol=1e-5)
    for more in ({}, {"ranges": layer.ranges, "indices": lists}):
        with pytest.raises(ValueError, match=r"^ranges, indices: expected one of them"):
            module(*layer.tensors, **more)
    without = training.SparseMLATraining(0.1, 7, relu=False)
    with pytest.raises(ValueError, match=r"^relu: "):
        without(*layer.tensors, layer.ranges)
    assert without(*layer.tensors, indices=lists)[1] != module(*layer.tensors, indices=lists)[1]


def test_weights_in_float32(kind, rng):
    """Under torch.autocast: to the bits of layers in bfloat16, and gradients reach float32 weights."""
    a = backward.inputs(rng, 5, 12, 576, 40, 30, size=1.0)
    q, kv, lists = (kind.put(x) for x in (a.q, a.kv, a.indices))
    _, _, lse = cupy_mla.sparse_prefill(q, kv, lists, 0.1)
    hidden, rows = (kind.put(rng.standard_normal((n, 64), np.float32)) for n in (5, 40))
    shapes = (64, 4 * 128), (64, 128), (64, 4)
    weights = [kind.put(rng.standard_normal(shape, np.float32) / 8).requires_grad_() for shape in shapes]
    found = []
    for cast in (torch.float32, torch.bfloat16):
        with torch.autocast(kind.device, torch.bfloat16, enabled=cast == torch.float32):
            x, y, (wq, wk, w) = hidden.to(cast), rows.to(cast), (weight.to(cast) for weight in weights)
            loss = training.sparse_indexer_loss(
                (x @ wq).view(5, 4, 128), y @ wk, (x @ w).float(), q, kv, lists, lse, 0.1
            )  # fmt: skip
        found.append([loss, *torch.autograd.grad(loss, weights)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert all(x.dtype == torch.float32 and x.abs().max() > 0 for x in found[0])


RANK = """
from cupy_mla.integrations.training import sparse_indexer_loss, warmup_loss

given = torch.load(f"{folder}/given.pt", map_location=place)
heads = slice(6 * me, 6 * me + 6)
q, out, lse, dout = (given[name][:, heads].contiguous() for name in ("q", "out", "lse", "dout"))
learned = [x.requires_grad_() for x in given["learned"]]
loss = sparse_indexer_loss(*learned, q, given["kv"], given["lists"], lse, 0.1, group=dist.group.WORLD)
warm = warmup_loss(*learned, q, given["dense"], 0.1, *given["ranges"], group=dist.group.WORLD)
dq, dkv, d_sink = cupy_mla.sparse_prefill_backward(
    q, given["kv"], given["lists"], out, lse, dout, 0.1, attn_sink=given["sink"][heads], dkv_dtype="float32")
dist.all_reduce(dkv)
learns = [y for x in (loss, warm) for y in (x, *torch.autograd.grad(x, learned))]
both, of_heads = [*learns, dkv], [dq, d_sink[None]]
torch.save([[x.detach().cpu() for x in results] for results in (both, of_heads)], f"{folder}/rank{me}.pt")
"""


def check_heads_of_two_processes(kind, rng, folder, backend):
    """Targets are summed up, so the losses and their gradients are those of all heads; so is dkv. dq and d_sink stay
    with their heads."""
    a, b = inputs(rng, 5, 4, 40, 30), backward.inputs(rng, 5, 12, 576, 40, 30, size=1.0)
    learned = list(arguments(kind, a).values())[:3]
    learned[1] = torch.randn(40, 128, device=kind.device).bfloat16().requires_grad_()
    q, kv, lists, dout = (kind.put(x) for x in (b.q, b.kv, b.indices, b.dout))
    sink = torch.randn(12, device=kind.device)
    out, _, lse = cupy_mla.sparse_prefill(q, kv, lists, 0.1, attn_sink=sink)
    loss = training.sparse_indexer_loss(*learned, q, kv, lists, lse, 0.1)
    dense, ranges = kv.nan_to_num(), kind.put(np.array([[0, 3, 0, 10, 39], [40, 4, 0, 30, 40]], np.int32))
    warm = training.warmup_loss(*learned, q, dense, 0.1, *ranges)
    dq, dkv, d_sink = cupy_mla.sparse_prefill_backward(
        q, kv, lists, out, lse, dout, 0.1, attn_sink=sink, dkv_dtype="float32"
    )
    given = {"q": q, "kv": kv, "lists": lists, "out": out, "lse": lse, "dout": dout, "sink": sink}
    given |= {"dense": dense, "ranges": ranges}
    torch.save(
        {"learned": [x.detach() for x in learned], **{name: x.clone() for name, x in given.items()}},
        folder / "given.pt",
    )
    ranks.run(RANK, folder, backend, 2)
    (both, first), (others, second) = (torch.load(folder / f"rank{rank}.pt") for rank in range(2))
    assert all(torch.equal(x, y) for x, y in zip(both, others, strict=True))
    found = [*both, *(torch.cat(pair, 1) for pair in zip(first, second, strict=True))]
    learns = [y for x in (loss, warm) for y in (x, *torch.autograd.grad(x, learned))]
    wants = [*learns, dkv, dq, d_sink[None]]
    for got, want, most in zip(found, wants, 2 * (1e-5, *3 * [5e-3]) + (5e-3, 5e-3, 5e-3), strict=True):
        want = want.detach().cpu().float()
        assert (got.float() - want).norm() < most * want.norm()


@pytest.mark.long
def test_heads_of_two_processes(rng, tmp_path):
    check_heads_of_two_processes(kinds.make("torch"), rng, tmp_path, "gloo")


@pytest.mark.gpu
def test_heads_of_two_gpus(rng, tmp_path):
    check_heads_of_two_processes(kinds.make("torch_cuda"), rng, tmp_path, "nccl")


class Sizes(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation returns, and any memory that is asked for."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.note(x)
        return results

    def note(self, x: Any) -> None:
        span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        self.largest = max(self.largest, span)


LONG = 1200  # tokens, more than a row has values: what is linear in them is smaller than their square


def long_layer() -> list[Any]:
    """q_index, k_index, w, q and kv of one head, which want gradients."""
    shapes = ((LONG, 1, 128), (LONG, 128), (LONG, 1), (LONG, 1, 576), (LONG, 1, 576))
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(shapes, dtypes, strict=True)]


def test_sparse_stage_has_no_array_of_all_pairs():
    """Attention and loss, forward and backward: no tensor has a number for each token and row."""
    given = long_layer()
    *learned, q, kv = given
    place, back = torch.arange(LONG)[:, None], torch.arange(8)
    lists = (place - back).int()[:, None]
    with Sizes() as sizes:
        out, _, lse = cupy_mla.sparse_prefill(q, kv, lists, 0.1)
        loss = training.sparse_indexer_loss(*learned, q, kv, lists, lse, 0.1)
        torch.autograd.grad(training.attach_loss(out, loss).float().square().sum(), given)
    assert LONG * 576 <= sizes.largest < LONG * LONG // 2


def test_warm_up_has_no_array_of_all_pairs(gpu, monkeypatch):
    """Neither among torch's tensors nor in what the calls allocate on a GPU, but for workspaces, whose limit
    `tests/cuda/test_row_sums.py` checks."""
    *learned, q, kv = long_layer()
    starts, ends = torch.zeros(LONG, dtype=torch.int32), torch.arange(1, LONG + 1, dtype=torch.int32)
    of_calls, empty = Sizes(), type(gpu)._empty

    def noted(fake: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        made = empty(fake, shape, strides, dtype)
        of_calls.note(made)
        return made

    monkeypatch.setattr(type(gpu), "_empty", noted)
    with Sizes() as sizes:
        loss = training.warmup_loss(*learned, q, kv, 0.1, starts, ends, target_bytes=4 * 40 * LONG)
        torch.autograd.grad(loss, learned)
    launches = Counter(launch.kernel.name for launch in gpu.log if launch.kernel)
    assert launches["attention_target"] == LONG // 40
    assert of_calls.largest == 40 * LONG
    assert sizes.largest < LONG * LONG // 2
