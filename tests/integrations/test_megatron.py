"""Megatron-Core's hooks: lists, attention, loss and gradients against the oracle, over a batch whose tokens stand as
Megatron has them, [s, b, ...]; what is declined; and `install` into a Megatron of stand-ins."""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_mla
from tests import kinds, oracle, oracle_backward, oracle_training
from tests.cases import latent, queries
from tests.kinds import BF16, Torch
from tests.oracle import cosine_difference
from tests.oracle_backward import Inputs, assert_gradient
from tests.oracle_training import Loss

torch = pytest.importorskip("torch")
megatron = pytest.importorskip("cupy_mla.integrations.megatron")

S, B, H, H_INDEX, TOPK, SCALE = 21, 2, 5, 8, 6, 0.05
LEARNED = ("q", "k", "weights")
Mask = enum.Enum("Mask", ["padding", "causal"])


class Layer:
    """Inputs of a layer's attention and indexer, as NumPy arrays and as tensors; two packed sequences, causal."""

    def __init__(self, kind: Torch, rng: np.random.Generator) -> None:
        self.kind = kind
        self.starts = np.array([0] * 8 + [8] * (S - 8), np.int64)
        self.ends = np.arange(1, S + 1)
        self.valid = rng.random((B, S)) < 0.8
        self.host = {
            "query": 3 * queries(rng, S, B, H, 576), "key": latent(rng, S * B, 576).astype(BF16).reshape(S, B, 1, 576),
            "q": rng.standard_normal((S, B, H_INDEX, 128), np.float32).astype(BF16),
            "k": rng.standard_normal((S, B, 128), np.float32).astype(BF16),
            "weights": (0.05 * rng.standard_normal((S, B, H_INDEX), np.float32)).astype(BF16),
        }  # fmt: skip
        self.tensors = {name: kind.put(array) for name, array in self.host.items()}
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self.up = torch.randn(H, 7, 512).to(kind.device, torch.bfloat16)

    def choosing(self, **more: Any) -> dict[str, Any]:
        """Arguments of `run_fused_qk_topk`, with all that Megatron gives it."""
        t = self.tensors
        return {
            "q": t["q"], "k": t["k"], "weights": t["weights"], "index_topk": TOPK,
            "starts": self.kind.put(self.starts.astype(np.int32)), "ends": self.kind.put(self.ends.astype(np.int32)),
            "block_size": 8192, "use_relu": True, "use_local_indexer_varlen": False,
            "single_packed_thd_sequence": False, "local_packed_cp_rank": 0, "local_packed_cp_query_start": 0,
            "local_packed_cp_query_len": S, "packed_seq_params": object(), "cp_size": 1, **more,
        }  # fmt: skip

    def losing(self, **more: Any) -> dict[str, Any]:
        """Arguments of `run_fused_qk_topk_with_loss`."""
        return self.choosing(
            query=self.tensors["query"].detach(), key=self.tensors["key"].detach(), softmax_scale=SCALE,
            loss_coeff=0.7, pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)), config=object(),
            query_valid_rows=self.kind.put(self.valid), calculate_per_token_loss=False, **more,
        )  # fmt: skip

    def whole(self, **more: Any) -> dict[str, Any]:
        """Arguments of `run_fused_dsa_attention`."""
        given = self.losing()
        ranges = {f"varlen_{name}": given.pop(name).long() for name in ("starts", "ends")}
        for name in ("q", "k", "weights", "index_topk", "block_size"):
            del given[name]
        t = self.tensors
        return {
            **given, "query": t["query"], "key": t["key"], "value": None, "up_v_weight": self.up,
            "q_indexer": t["q"], "k_indexer": t["k"], "indexer_weights": t["weights"], "indexer_topk": TOPK,
            "sparse_loss": True, "absorbed_mla": True, "attn_mask_type": Mask.causal,
            "key_positions": None, "varlen_is_plain_causal": False, **ranges, **more,
        }  # fmt: skip

    def element(self, e: int, lists: np.ndarray | None = None) -> Loss:
        """What the loss of a batch element is made of, over lists [s, topk] or, without them, all that tokens see."""
        names, valid = {x: self.host[x][:, e] for x in self.host}, self.valid[e]
        seen = [np.arange(a, b) for a, b in zip(self.starts, self.ends, strict=True)]
        target = np.zeros((S, S if lists is None else lists.shape[1]))
        for i, rows in enumerate(seen):
            rows = rows if lists is None else lists[i][lists[i] >= 0]
            keys = names["key"][rows, 0]
            there = rows if lists is None else np.flatnonzero(lists[i] >= 0)
            lse = oracle_training.lse(names["query"][i], keys, SCALE)
            target[i, there] = oracle_training.target(names["query"][i], keys, lse, SCALE)
        ranges = np.stack([self.starts, self.ends], 1) if lists is None else None
        return Loss(
            names["q"], names["k"], names["weights"], target, lists, None, valid, 0.7 / max(self.valid.sum(), 1), True,
            ranges=ranges,
        )  # fmt: skip

    def check_loss(self, loss: Any, lists: np.ndarray | None) -> None:
        """Against the oracle: the number, and its gradients times 3."""
        every = [self.element(e, None if lists is None else lists[e]) for e in range(B)]
        assert loss.dtype == torch.float32
        assert loss.shape == ()
        np.testing.assert_allclose(loss.item(), sum(map(oracle_training.loss, every)), rtol=1e-4)
        got = torch.autograd.grad(3 * loss, [self.tensors[name] for name in LEARNED], retain_graph=True)
        wanted = [oracle_training.gradients(a) for a in every]
        for name, gradient in zip(("dq_index", "dk_index", "dw"), got, strict=True):
            values = self.kind.take(gradient).astype(np.float64)
            want = 3 * np.stack([of[name].value for of in wanted], 1)
            assert cosine_difference(values, want) < 1e-5
            assert np.linalg.norm(values - want) < 0.01 * np.linalg.norm(want)


@pytest.fixture
def layer(kind, rng) -> Layer:
    return Layer(kind, rng)


def test_rows_that_are_chosen(layer, rng):
    """Those with the largest scores of what a token sees: keys are one vector, times numbers that differ."""
    times = rng.permuted(np.tile(1.0 + np.arange(S), (B, 1)), axis=1)
    one = rng.standard_normal((128,), np.float32)
    given = {
        "q": np.broadcast_to(one, (S, B, H_INDEX, 128)), "k": times.T[..., None] * one,
        "weights": rng.random((S, B, H_INDEX), np.float32) + 0.1,
    }  # fmt: skip
    tensors = {name: layer.kind.put(np.ascontiguousarray(x).astype(BF16)) for name, x in given.items()}
    chosen, lengths = megatron.run_fused_qk_topk(**layer.choosing(**tensors))
    assert lengths is None
    assert chosen.dtype == torch.int32
    for e, i in np.ndindex(B, S):
        seen = np.arange(layer.starts[i], layer.ends[i])
        best = np.sort(seen[np.argsort(-times[e, seen])[:TOPK]])
        assert layer.kind.take(chosen)[e, i].tolist() == [*best, *[-1] * (TOPK - len(best))]


@pytest.mark.parametrize("lengths", [False, True])
def test_attention(layer, rng, lengths):
    lists = np.stack([[rng.permutation(i + 1)[:TOPK].tolist() + [-1] * max(0, TOPK - 1 - i) for i in range(S)]] * B)
    length = rng.integers(0, TOPK + 1, (B, S)) if lengths else None
    query, key = layer.tensors["query"], layer.tensors["key"]
    dout = rng.standard_normal((S, B, H, 512), np.float32).astype(BF16)
    out = megatron.run_fused_absorbed_sparse_attention(
        query, key, layer.kind.put(lists), SCALE, 512, layer.kind.put(length)
    )  # fmt: skip
    dq, dkv = (layer.kind.take(x) for x in torch.autograd.grad(out, (query, key), layer.kind.put(dout)))
    for e in range(B):
        a = Inputs(
            layer.host["query"][:, e], layer.host["key"][:, e], lists[e][:, None], SCALE, dout[:, e],
            length=None if length is None else length[e],
        )  # fmt: skip
        found = layer.kind.take(out)[:, e]
        want = [oracle_backward.forward(a, i)[0] if len(a.entries(i)) else np.zeros((H, 512)) for i in range(S)]
        oracle.assert_close(found, np.stack(want), "prefill out")
        wanted = oracle_backward.backward(a, found)
        assert_gradient(dq[:, e], wanted[0], "dq")
        assert_gradient(dkv[:, e, 0], wanted[1], "dkv bfloat16")


def test_loss_over_the_rows_that_are_chosen(layer):
    chosen, lengths, loss = megatron.run_fused_qk_topk_with_loss(**layer.losing())
    assert lengths is None
    assert torch.equal(chosen, megatron.run_fused_qk_topk(**layer.choosing())[0])
    layer.check_loss(loss, layer.kind.take(chosen))


@pytest.mark.parametrize("of", ["all tokens", "a token's sum"])
def test_what_the_loss_is_divided_by(layer, of):
    more = {"query_valid_rows": None} if of == "all tokens" else {"calculate_per_token_loss": True}
    layer.valid = np.ones_like(layer.valid) if of == "all tokens" else layer.valid
    _, _, loss = megatron.run_fused_qk_topk_with_loss(**{**layer.losing(), **more})
    chosen, _ = megatron.run_fused_qk_topk(**layer.choosing())
    factor = 1 if of == "all tokens" else layer.valid.sum()
    layer.check_loss(loss / factor, layer.kind.take(chosen))


def test_all_in_one(layer):
    """To the bits of the other hooks one after the other."""
    out, loss = megatron.run_fused_dsa_attention(**layer.whole())
    chosen, _, alone = megatron.run_fused_qk_topk_with_loss(**layer.losing())
    attended = megatron.run_fused_absorbed_sparse_attention(
        layer.tensors["query"], layer.tensors["key"], chosen, SCALE, 512
    )  # fmt: skip
    assert torch.equal(out, torch.einsum("sbhc,hvc->sbhv", attended, layer.up).reshape(S, B, -1))
    assert torch.equal(loss, alone)
    layer.check_loss(loss, layer.kind.take(chosen))
    gradients = torch.autograd.grad(out.float().sum() + loss, list(layer.tensors.values()))
    assert all(x.isfinite().all() and x.any() for x in gradients)


def test_loss_of_the_warm_up(layer):
    _, loss = megatron.run_fused_dsa_attention(**layer.whole(sparse_loss=False))
    layer.check_loss(loss, None)


def test_tokens_that_see_all_before_them(layer):
    """Without ranges, as with those of one causal sequence; and no loss where none is asked for."""
    causal = {"varlen_starts": torch.zeros(S), "varlen_ends": torch.arange(1, S + 1)}
    causal = {name: x.long().to(layer.kind.device) for name, x in causal.items()}
    nothing = {"varlen_starts": None, "varlen_ends": None, "packed_seq_params": None}
    want, got = (megatron.run_fused_dsa_attention(**layer.whole(**x)) for x in (causal, nothing))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    with torch.no_grad():
        out, loss = megatron.run_fused_dsa_attention(**layer.whole(**nothing))
    assert torch.equal(out, want[0])
    assert loss == 0


@pytest.mark.parametrize("sparse", [True, False])
def test_tokens_that_ranks_share(layer, sparse):
    """Context parallelism: each rank has some query tokens and all keys. Results are those of the whole, gradients of
    keys add up to them."""
    per_token = {"calculate_per_token_loss": True, "sparse_loss": sparse}
    out, loss = megatron.run_fused_dsa_attention(**layer.whole(**per_token))
    outs, losses = [], []
    for tokens in (slice(8), slice(8, 9), slice(9, S)):
        given = layer.whole(**per_token, cp_size=3)
        mine = ("query", "q_indexer", "indexer_weights", "varlen_starts", "varlen_ends")
        given |= {name: given[name][tokens] for name in mine}
        given["query_valid_rows"] = given["query_valid_rows"][:, tokens]
        of_rank = megatron.run_fused_dsa_attention(**given)
        outs.append(of_rank[0])
        losses.append(of_rank[1])
    assert torch.equal(torch.cat(outs), out)
    torch.testing.assert_close(sum(losses), loss, rtol=1e-5, atol=0)
    want, got = (torch.autograd.grad(x, layer.tensors["k"], retain_graph=True)[0] for x in (loss, sum(losses)))
    assert (got.float() - want.float()).norm() < 5e-3 * want.float().norm()


def test_heads_that_ranks_share(layer, monkeypatch):
    """Their targets are summed up before the loss divides by their sum."""
    group, summed = SimpleNamespace(size=lambda: 2), []

    def all_reduce(target: Any, group: Any) -> None:
        summed.append(group)
        target *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    groups = {"pg_collection": SimpleNamespace(tp=group)}
    *_, loss = megatron.run_fused_qk_topk_with_loss(**{**layer.losing(), **groups})
    lists = layer.kind.take(megatron.run_fused_qk_topk(**layer.choosing())[0])
    layer.check_loss(loss, lists)
    layer.check_loss(megatron.run_fused_dsa_attention(**layer.whole(**groups))[1], lists)
    layer.check_loss(megatron.run_fused_dsa_attention(**layer.whole(**groups, sparse_loss=False))[1], None)
    assert summed == [group] * 3


Change = Callable[[dict[str, Any]], dict[str, Any]]
NOT_CHOSEN: dict[str, Change] = {
    "no relu": lambda a: {"use_relu": False},
    "local order": lambda a: {"use_local_indexer_varlen": True},
    "something new": lambda a: {"window": 5},
}
NOT_TOPK = NOT_CHOSEN | {
    "float32": lambda a: {"q": a["q"].float()},
    "9 heads": lambda a: {"q": a["q"][:, :, :1].repeat(1, 1, 9, 1), "weights": a["weights"][..., :1].repeat(1, 1, 9)},
    "d 64": lambda a: {"q": a["q"][..., :64], "k": a["k"][..., :64]},
}
NOT_ATTENDED: dict[str, Change] = {
    "value": lambda a: {"value": a["key"]},
    "no absorbed weights": lambda a: {"absorbed_mla": False},
    "other mask": lambda a: {"attn_mask_type": Mask.padding},
    "no mask": lambda a: {"attn_mask_type": None},
    "other positions": lambda a: {"key_positions": a["varlen_ends"]},
    "latent of 256": lambda a: {"up_v_weight": a["up_v_weight"][..., :256]},
    "float16": lambda a: {"query": a["query"].half(), "key": a["key"].half()},
    "no ranges of packed sequences": lambda a: {"varlen_starts": None, "varlen_ends": None},
    "one range": lambda a: {"varlen_starts": None, "packed_seq_params": None},
}


@pytest.mark.parametrize(
    ("hook", "arguments", "change"),
    [("run_fused_qk_topk", "choosing", x) for x in NOT_TOPK.values()]
    + [("run_fused_qk_topk_with_loss", "losing", x) for x in NOT_TOPK.values()]
    + [("run_fused_dsa_attention", "whole", x) for x in (NOT_CHOSEN | NOT_ATTENDED).values()],
)
def test_what_is_declined(rng, hook, arguments, change):
    layer = Layer(kinds.make("torch"), rng)
    given, call = getattr(layer, arguments)(), getattr(megatron, hook)
    assert call(**given) is not None
    assert call(**given | change(given)) is None


def test_attention_that_is_declined(rng):
    layer = Layer(kinds.make("torch"), rng)
    query, key, lists = layer.tensors["query"], layer.tensors["key"], torch.zeros(B, S, TOPK, dtype=torch.int64)
    attend = megatron.run_fused_absorbed_sparse_attention
    assert attend(query, key, lists, SCALE, 512) is not None
    assert attend(query, key, lists, SCALE, 256) is None
    assert attend(query.float(), key, lists, SCALE, 512) is None
    assert attend(query, key.repeat(1, 1, H, 1), lists, SCALE, 512) is None
    assert attend(query, key, lists[:, 1:], SCALE, 512) is None
    assert attend(query, key, lists, SCALE, 512, torch.ones(B)) is None
    assert attend(query[..., :320], key[..., :320], lists, SCALE, 512) is None


# --- install --------------------------------------------------------------------------------------------------

STUB_KERNELS = """
from importlib import import_module
_BACKEND_MODULE_NAME_BY_BACKEND = {"tilelang": "gone", "cudnn": "gone"}
def run_fused_absorbed_sparse_attention(
    config, query, key, topk_indices, softmax_scale, v_channels, topk_length=None
):
    backend = import_module(_BACKEND_MODULE_NAME_BY_BACKEND[config])
    return backend.run_fused_absorbed_sparse_attention(query, key, topk_indices, softmax_scale, v_channels, topk_length)
def run_fused_qk_topk(config, q, k, weights, index_topk, starts, ends, block_size): ...
def run_fused_qk_topk_with_loss(config, q, k, weights, index_topk, starts, ends, block_size): ...
def run_fused_dsa_attention(*, config): ...
"""
STUB_UTILS = """
def _missing_tilelang_dsa_kernel_dependencies(): return ["TileLang"]
def _missing_cudnn_dsa_kernel_dependencies(): return ["cuDNN"]
def validate(backend): return globals()[f"_missing_{backend}_dsa_kernel_dependencies"]()
"""
STUB = {
    "__init__": "", "utils": STUB_UTILS, "transformer/__init__": "",
    "transformer/experimental_attention_variant/__init__": "",
    "transformer/experimental_attention_variant/dsa_kernels": STUB_KERNELS,
}  # fmt: skip


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a Megatron-Core of stand-ins, which is gone afterwards."""
    for name, text in STUB.items():
        file = tmp_path / "megatron" / "core" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path / "megatron" / "core"
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def imported(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{name}")


@pytest.mark.parametrize("backend", ["tilelang", "cudnn"])
def test_install(core, rng, backend):
    """Megatron finds our hooks under the backend's name, and no package missing; the other backend stays."""
    megatron.install(replaces=backend)
    utils, kernels = imported("utils"), imported("transformer.experimental_attention_variant.dsa_kernels")
    assert {name: utils.validate(name) == [] for name in ("tilelang", "cudnn")} == {
        name: name == backend for name in ("tilelang", "cudnn")
    }
    assert [*kernels._BACKEND_MODULE_NAME_BY_BACKEND.values()].count("gone") == 1
    layer, lists = Layer(kinds.make("torch"), rng), torch.zeros(B, S, TOPK, dtype=torch.int32)
    given = layer.tensors["query"], layer.tensors["key"], lists, SCALE, 512
    got = kernels.run_fused_absorbed_sparse_attention(backend, *given)
    assert torch.equal(got, megatron.run_fused_absorbed_sparse_attention(*given))


@pytest.mark.parametrize(
    ("file", "old", "lacks"),
    [
        ("utils", "_missing_tilelang_", "utils: _missing_tilelang_dsa_kernel_dependencies()"),
        ("transformer/experimental_attention_variant/dsa_kernels", "run_fused_dsa_", "run_fused_dsa_attention"),
        ("transformer/experimental_attention_variant/dsa_kernels", "v_channels", "run_fused_absorbed_sparse_attention"),
    ],
)
def test_what_a_megatron_lacks_is_named(core, file, old, lacks):
    path = core / f"{file}.py"
    path.write_text(path.read_text().replace(old, "another"))
    with pytest.raises(RuntimeError, match=r"^cupy_mla cannot serve this megatron\.core\. Missing: ") as error:
        megatron.install()
    assert lacks in str(error.value)
    assert not any(name.startswith("megatron.core.") for name in sys.modules)


def test_no_megatron(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match=r"^megatron\.core is not installed"):
        megatron.install()
    with pytest.raises(ValueError, match=r"^replaces must be one of \('tilelang', 'cudnn'\)"):
        megatron.install(replaces="none")


def test_every_hook_says_what_it_takes():
    assert all(inspect.getdoc(getattr(megatron, name)) for name in megatron.__all__)
    assert not hasattr(cupy_mla, "megatron")
