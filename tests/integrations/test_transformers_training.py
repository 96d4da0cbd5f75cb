"""transformers' DeepSeek-V3.2, GLM-5 and DeepSeek-V4 in training, against their own eager attention in float32 on the
same rows: gradients of every parameter, and what the indexers learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", "5.17", reason="transformers 5.17 or later is not installed")

from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import (  # noqa: E402
    DeepseekV4Config,
    DeepseekV32Config,
    DynamicCache,
    GlmMoeDsaConfig,
)

import cupy_mla  # noqa: E402
from cupy_mla.integrations.transformers import (  # noqa: E402
    PagedLatentCache,
    PagedV4Cache,
    recorded_rows,
    sparse_attention,
)
from tests.integrations.test_transformers import SIZES, relative, two_models  # noqa: E402

TOPK = SIZES["index_topk"]
KINDS = ["compressed_sparse_attention", "sliding_attention", "heavily_compressed_attention"]
CONFIGS = {
    "v32": lambda: DeepseekV32Config(**SIZES, num_hidden_layers=2, index_n_heads=2, first_k_dense_replace=2),
    "glm": lambda: GlmMoeDsaConfig(
        **SIZES, num_hidden_layers=3, index_n_heads=8, first_k_dense_replace=3,
        indexer_types=["full", "shared", "full"],
    ),
    "v4": lambda: DeepseekV4Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=3, layer_types=KINDS, num_attention_heads=2, head_dim=512,
        q_lora_rank=64, o_groups=2, o_lora_rank=64, sliding_window=24, index_n_heads=4, index_head_dim=128,
        index_topk=TOPK, hc_mult=2, mlp_layer_types=["moe"] * 3, moe_intermediate_size=64, n_routed_experts=2,
        num_experts_per_tok=2, initializer_range=0.08,
    ),
}  # fmt: skip
LENGTH = {"v32": 41, "glm": 41, "v4": 150}
# ||ours - float32|| of a parameter's gradient, as parts of its norm and of that of all gradients: V4's hyperconnections
# have scalars whose gradients are differences of large sums.
BOUNDS = {
    ("v32", "float32"): (0.02, 0.0), ("glm", "float32"): (0.025, 0.0), ("v4", "float32"): (0.04, 1e-3),
    ("v32", "bfloat16"): (0.04, 0.0), ("glm", "bfloat16"): (0.045, 0.0), ("v4", "bfloat16"): (0.08, 4e-3),
}  # fmt: skip
# ||ours - float32|| / ||float32|| of an indexer's gradients: in the first layer, whose hidden states are the same, and
# in others, where one of 1000 heads' scores has another sign and loses or gets its gradient.
OF_INDEXER, OF_LATER_INDEXER = 0.03, 0.3

Gradients = dict[str, Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """On a GPU with torch's deterministic algorithms: its own sums over experts and tokens are made by atomics else."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    if request.param == "cuda":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def world_of(name: str, device: str, rng: np.random.Generator, dtype: str = "float32", **more: Any) -> SimpleNamespace:
    """A model in training, the same in float32, and random tokens of two requests."""
    torch.manual_seed(int(rng.integers(2**31)))
    config = CONFIGS[name]()
    for key, value in more.items():
        setattr(config, key, value)
    model, exact = (each.train().requires_grad_() for each in two_models(config, device, dtype))
    tokens = torch.randint(config.vocab_size, (2, LENGTH[name]), device=device)
    return SimpleNamespace(name=name, model=model, exact=exact, tokens=tokens, rows={})


@pytest.fixture(params=CONFIGS)
def world(request: pytest.FixtureRequest, device: str, rng: np.random.Generator) -> SimpleNamespace:
    return world_of(request.param, device, rng)


@pytest.fixture
def v32(device: str, rng: np.random.Generator) -> SimpleNamespace:
    return world_of("v32", device, rng)


def indexers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """By layer."""
    found = {i: layer.self_attn for i, layer in enumerate(model.model.layers)}
    found = {i: getattr(getattr(a, "compressor", a), "indexer", None) for i, a in found.items()}
    return {i: indexer for i, indexer in found.items() if indexer is not None}


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Of the parameters that have one; they have none afterwards."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(world: SimpleNamespace, model: Any = None, indexer_loss: float | None = None, **more: Any) -> Gradients:
    """Gradients of a step through sparse attention; the loss, and what indexers chose and lost, is in the world."""
    model = world.model if model is None else model
    named = {"labels": world.tokens, "use_cache": False} | more
    with sparse_attention(world.model, indexer_loss=indexer_loss), recorded_rows(world.model) as world.rows:
        world.loss = model(world.tokens, **named).loss
        world.loss.backward()
    return gradients_of(world.model)


def exact_step(world: SimpleNamespace, padding: Any = 0, **more: Any) -> Gradients:
    """Gradients of eager attention in float32 over the rows that the last step's indexers chose.

    `padding` [R, 1, 1] tokens stand before those of each request, or [R, n, 1] before the sequence of each token.
    """
    hooks = []
    for layer, indexer in indexers(world.exact).items():

        def in_columns(_module: Any, arguments: tuple, own: Any, rows: Any = world.rows[layer]) -> Any:
            """Where fewer are chosen than the model expects, columns that its mask forbids."""
            if world.name == "v4":
                return rows[..., : own.shape[-1]].to(own.dtype)
            mask = arguments[3]
            forbidden = mask.masked_fill(mask == 0, 1).argmin(-1, keepdim=True).expand(rows.shape)
            return (rows + padding).where(rows >= 0, forbidden).to(own.dtype)

        hooks.append(indexer.register_forward_hook(in_columns))
    named = {"labels": world.tokens, "use_cache": False} | more
    world.exact_loss = world.exact(world.tokens, **named).loss
    world.exact_loss.backward()
    for hook in hooks:
        hook.remove()
    return gradients_of(world.exact)


def check(world: SimpleNamespace, got: Gradients, want: Gradients, dtype: str = "float32") -> None:
    assert got.keys() == want.keys()
    of_own, of_all = BOUNDS[world.name, dtype]
    everything = float(sum(w.double().square().sum() for w in want.values()) ** 0.5)
    for name, g in want.items():
        error, size = float((got[name].double() - g.double()).norm()), float(g.double().norm())
        assert error <= of_own * size + of_all * everything, (name, error / size, error / everything)
    assert abs(float(world.loss.detach()) / float(world.exact_loss.detach()) - 1) < 5e-3


def same(got: Gradients, want: Gradients) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[n], g) for n, g in want.items())


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name: str, dtype: str, device: str, rng: np.random.Generator) -> None:
    """Of all parameters but the indexers', which do not learn."""
    world = world_of(name, device, rng, dtype)
    got, want = step(world), exact_step(world)
    assert len(got) == sum("indexer" not in n for n, _ in world.model.named_parameters())
    check(world, got, want, dtype)
    assert same(step(world), got), "another run gives other bits"


@pytest.mark.long(sample=1)
def test_autocast(world: SimpleNamespace, device: str) -> None:
    """Weights and their gradients stay float32; indexers learn, too."""
    with torch.autocast(device, torch.bfloat16):
        got = step(world, indexer_loss=0.1)
    assert all(g.dtype == torch.float32 for g in got.values())
    of_indexers = [g for n, g in got.items() if "indexer" in n]
    assert of_indexers
    assert all(g.isfinite().all() and g.any() for g in of_indexers)
    check(world, {n: g for n, g in got.items() if "indexer" not in n}, exact_step(world), "bfloat16")


# --- padding and packing --------------------------------------------------------------------------------------


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(
    ("name", "side", "attn_implementation"),  # of which one brings an additive, one a boolean mask
    [*product(["v32", "glm"], ["left", "right"], ["eager", "sdpa"]), ("v4", "right", "eager")],
)
def test_padding(name: str, side: str, attn_implementation: str, device: str, rng: np.random.Generator) -> None:
    """It is no part of what the others see or learn, whatever it holds."""
    world = world_of(name, device, rng)
    world.model.set_attn_implementation(attn_implementation)
    mask = torch.ones_like(world.tokens)
    padded = slice(None, 13) if side == "left" else slice(-13, None)
    mask[1, padded] = 0
    named = {"attention_mask": mask, "labels": world.tokens.masked_fill(mask == 0, -100)}
    named["labels"][1, 13] = -100  # padding would be asked for it
    if side == "left":
        named["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with cupy_mla.set_checks(True):
        got = step(world, indexer_loss=0.1, **named)
    losses = dict(world.model.indexer_losses)
    before = (mask == 0).sum(-1)[:, None, None] if side == "left" else 0
    want = exact_step(world, before, **named)
    check(world, {n: g for n, g in got.items() if "indexer" not in n}, want)
    assert all((rows[1, padded] == -1).all() for rows in world.rows.values())
    world.tokens[1, padded] = (world.tokens[1, padded] + 7) % 64
    again = step(world, indexer_loss=0.1, **named)
    bits = device == "cpu" and name != "v4"  # V4's experts multiply other numbers of tokens at once then
    for n, g in got.items():
        assert torch.equal(again[n], g) if bits else relative(again[n], g) < 2e-3, n
    for layer, loss in losses.items():
        assert abs(float(world.model.indexer_losses[layer]) - float(loss)) < 1e-4 * float(loss)


def masks_of_layers(mask: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """As a model makes them itself: by what its version of transformers calls the layers."""
    return dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), mask)


@pytest.mark.parametrize("name", ["v32", "glm"])
def test_packed_sequences(name: str, device: str, rng: np.random.Generator) -> None:
    """Positions that start over keep sequences apart, by transformers' mask or without one."""
    world = world_of(name, device, rng)
    world.tokens = world.tokens[:1]
    first = torch.tensor([0, 9, 10, 30], device=device)
    place = torch.arange(world.tokens.shape[1], device=device)
    start = first[torch.searchsorted(first, place, right=True) - 1]
    named = {"position_ids": (place - start)[None]}
    with cupy_mla.set_checks(True):
        got = step(world, indexer_loss=0.1, **named)
    assert all((rows <= named["position_ids"][..., None]).all() for rows in world.rows.values())
    want = exact_step(world, start[None, :, None], **named)
    check(world, {n: g for n, g in got.items() if "indexer" not in n}, want)
    assert same(step(world, indexer_loss=0.1, attention_mask=masks_of_layers(None), **named), got)


# --- the indexer ----------------------------------------------------------------------------------------------


class Scores(TorchFunctionMode):
    """Rounds the first product's factors to bfloat16, and keeps the scores of which the largest are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.topk:
            self.scores = args[0]
        if function is torch.matmul:
            self.products += 1
            if self.products == 1:
                args = tuple(x + (x.bfloat16().float() - x).detach() for x in args)
        return function(*args, **(kwargs or {}))


def losses_of_eager(world: SimpleNamespace) -> tuple[dict[int, float], Gradients]:
    """What the last step's indexers should have lost and learned: of the float32 model's own scores and weights."""
    scores, weights, hooks = {}, {}, []
    for layer, indexer in indexers(world.exact).items():

        def forward(*args: Any, layer: int = layer, indexer: Any = indexer, **kwargs: Any) -> Any:
            function = type(indexer).forward
            with torch.enable_grad(), Scores() as seen:
                chosen = getattr(function, "__wrapped__", function)(indexer, *args, **kwargs)
            scores[layer] = seen.scores
            return chosen

        def keep(_module: Any, _arguments: Any, result: tuple, layer: int = layer) -> None:
            weights[layer] = result[1].detach().double()

        indexer.forward = forward
        hooks.append(world.exact.model.layers[layer].self_attn.register_forward_hook(keep))
    exact_step(world)
    for hook in hooks:
        hook.remove()
    losses = {}
    for layer, indexer in indexers(world.exact).items():
        del indexer.forward
        rows = world.rows[layer].long()
        target, there = weights[layer], rows >= 0
        if world.name == "v4":  # without the sinks, of compressed rows
            target = (target / target.sum(-1, keepdim=True))[..., world.tokens.shape[1] :]
        columns = rows.clamp(min=0)
        target = target.sum(1).gather(-1, columns).where(there, 0.0)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-10)
        some = there.any(-1)
        score = scores[layer].double().gather(-1, columns).where(there, -torch.inf)
        prediction = score.where(some[..., None], 0.0).log_softmax(-1)
        divergence = (target * (target.clamp(min=1e-10).log() - prediction)).where(there, 0.0).sum()
        losses[layer] = divergence / some.sum()
    names, learned = zip(*((n, p) for n, p in world.exact.named_parameters() if "indexer" in n), strict=True)
    found = torch.autograd.grad(sum(losses.values()), learned)
    return {layer: loss.item() for layer, loss in losses.items()}, dict(zip(names, found, strict=True))


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("rows", ["chosen", "all"])
def test_indexers_learn(world: SimpleNamespace, rows: str) -> None:
    """From their own loss, times its coefficient; nothing else does. Over all rows that is the loss of the warm-up."""
    if rows == "all":
        for indexer in (*indexers(world.model).values(), *indexers(world.exact).values()):
            indexer.index_topk = LENGTH[world.name]
    without = step(world)
    assert not hasattr(world.model, "indexer_losses")
    got = step(world, indexer_loss=0.5)
    own = {n: g for n, g in got.items() if "indexer" in n}
    assert same({n: g for n, g in got.items() if "indexer" not in n}, without)
    losses, want = losses_of_eager(world)
    assert own.keys() == want.keys()
    assert world.model.indexer_losses.keys() == losses.keys()
    for layer, loss in losses.items():
        assert loss > 0.01
        assert abs(float(world.model.indexer_losses[layer]) - loss) < 0.02 * loss
    for name, g in want.items():
        assert relative(own[name], 0.5 * g) < (OF_INDEXER if ".layers.0." in name else OF_LATER_INDEXER), name


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("frozen", ["indexer", "model"])
def test_what_is_frozen_does_not_learn(world: SimpleNamespace, frozen: str) -> None:
    """The rest learns the same."""
    want = step(world, indexer_loss=0.5)
    losses = dict(world.model.indexer_losses)
    for name, parameter in world.model.named_parameters():
        parameter.requires_grad_(("indexer" in name) != (frozen == "indexer"))
    got = step(world, indexer_loss=0.5)
    assert same(got, {n: g for n, g in want.items() if ("indexer" in n) != (frozen == "indexer")})
    assert world.model.indexer_losses == losses


def test_losses_without_gradients(world: SimpleNamespace) -> None:
    """Validation has the losses, too, and the logits of training."""
    with sparse_attention(world.model, indexer_loss=1.0):
        trained = world.model(world.tokens, use_cache=False).logits
        losses = dict(world.model.indexer_losses)
        world.model.indexer_losses.clear()
        world.model.eval()
        with torch.no_grad():
            assert torch.equal(world.model(world.tokens, use_cache=False).logits, trained)
        assert world.model.indexer_losses == losses


# --- checkpointing, torch.compile -----------------------------------------------------------------------------


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(world: SimpleNamespace, use_reentrant: bool) -> None:
    """The same bits; also where another pass comes before the backward."""
    want = step(world, indexer_loss=0.1)
    losses = dict(world.model.indexer_losses)
    world.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert same(step(world, indexer_loss=0.1), want)
    assert world.model.indexer_losses == losses
    with sparse_attention(world.model, indexer_loss=0.1):
        loss = world.model(world.tokens, labels=world.tokens, use_cache=False).loss
        world.model(world.tokens.flip(1)[:, :20], use_cache=False)
        loss.backward()
    assert same(gradients_of(world.model), want)


@pytest.mark.long(sample=1)
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(("name", "layer"), [("v32", 0), ("glm", 1), ("v4", 0), ("v4", 1), ("v4", 2)])
def test_compiled(name: str, layer: int, device: str, rng: np.random.Generator) -> None:
    """An attention layer without a graph break, to the same bits."""
    world = world_of(name, device, rng)
    calls: list[tuple[tuple, dict]] = []
    attention = world.model.model.layers[layer].self_attn
    hook = attention.register_forward_hook(lambda _m, args, kwargs, _r: calls.append((args, kwargs)), with_kwargs=True)
    with sparse_attention(world.model, indexer_loss=0.1):
        world.model(world.tokens, use_cache=False)
        hook.remove()
        ((args, kwargs),) = calls
        args, kwargs = (torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, x) for x in (args, kwargs))

        def gradients(run: Callable[..., Any]) -> Gradients:
            run(*args, **kwargs)[0].square().sum().backward()
            return gradients_of(attention)

        want = gradients(attention)
        losses = dict(world.model.indexer_losses)
        world.model.indexer_losses.clear()
        got = gradients(torch.compile(attention, fullgraph=True, backend="aot_eager"))
        assert same(got, want)
        assert world.model.indexer_losses == {i: loss for i, loss in losses.items() if i == layer}


@pytest.mark.long
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_model(name: str, device: str, rng: np.random.Generator) -> None:
    """A whole model with its loss is one graph without a break, V4 with experts that do not read sizes back."""
    one_layer = {"num_hidden_layers": 1, "layer_types": KINDS[:1], "mlp_layer_types": ["moe"]}
    world = world_of(name, device, rng, **(one_layer if name == "v4" else {}))
    if name == "v4":
        world.model.set_experts_implementation("batched_mm")
    want = step(world, indexer_loss=0.1)
    losses = dict(world.model.indexer_losses)
    counters = torch._dynamo.utils.counters
    counters.clear()
    got = step(world, torch.compile(world.model, backend="aot_eager"), indexer_loss=0.1)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == 1
    assert got.keys() == want.keys()
    if name == "v4" or device == "cuda":  # torch's own operations may be others
        assert all(relative(got[n], g) < 1e-5 for n, g in want.items())
    else:
        assert same(got, want)
        assert world.model.indexer_losses == losses


# --- replay ---------------------------------------------------------------------------------------------------


def new_cache(world: SimpleNamespace) -> Any:
    device, config = world.tokens.device, world.model.config
    if world.name == "v4":
        tables = (torch.arange(2 * n, device=device).view(2, n) for n in (10, 2))
        return PagedV4Cache(config, *tables, swa_block_size=16, block_size=128, device=device)
    return PagedLatentCache(config, torch.arange(18, device=device).view(2, 9), block_size=5)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_replay(name: str, device: str, rng: np.random.Generator) -> None:
    """A pass attends to the rows that served passes chose, and to others that it is given; its indexers learn so."""
    world = world_of(name, device, rng, "bfloat16")
    cache, cuts = new_cache(world), [0, 7, 8, 30, 31, LENGTH[name]]
    with sparse_attention(world.model), recorded_rows(world.model) as rows, torch.no_grad():
        logits = [
            world.model(world.tokens[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in pairwise(cuts)
        ]
    assert rows.keys() == indexers(world.model).keys()
    got = step(world, indexer_loss=0.1, chosen_rows=rows)
    assert all(torch.equal(world.rows[i], r) for i, r in rows.items())
    check(world, {n: g for n, g in got.items() if "indexer" not in n}, exact_step(world), "bfloat16")
    with sparse_attention(world.model), torch.no_grad():
        trained = world.model(world.tokens, chosen_rows=rows, use_cache=False).logits
    assert relative(torch.cat(logits, 1), trained.float()) < (0.08 if name == "v4" else 0.02)
    others = {i: r.where(torch.arange(r.shape[-1], device=device) % 2 == 0, -1) for i, r in rows.items()}
    of_others = step(world, chosen_rows=others)
    assert all(torch.equal(world.rows[i], r) for i, r in others.items())
    check(world, of_others, exact_step(world), "bfloat16")
    # What a token does not see is left out.
    last = LENGTH[name] // 4 - 1 if name == "v4" else LENGTH[name] - 1
    assert same(step(world, indexer_loss=0.1, chosen_rows={i: r.where(r >= 0, last) for i, r in rows.items()}), got)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(("name", "side"), [*product(["v32", "glm"], ["none", "left"]), ("v4", "none")])
def test_rows_are_those_of_a_server(name: str, side: str, device: str, rng: np.random.Generator) -> None:
    """The first layer's indexer sees the same and chooses the same."""
    world, named = world_of(name, device, rng, "bfloat16"), {}
    if side == "left":
        mask = torch.ones_like(world.tokens)
        mask[1, :13] = 0
        named = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    found = []
    for cache in ({"past_key_values": new_cache(world)}, {"use_cache": False}):
        with sparse_attention(world.model), recorded_rows(world.model) as rows, torch.no_grad():
            world.model(world.tokens, **cache, **named)
        found.append(rows[0])
    assert (found[0].max(-1).values[:, -1] > TOPK).all(), "nothing was to be chosen"
    assert torch.equal(*found)


# --- errors ---------------------------------------------------------------------------------------------------


def test_errors(world: SimpleNamespace) -> None:
    model, tokens = world.model, world.tokens
    kind = "PagedV4Cache" if world.name == "v4" else "PagedLatentCache"
    with sparse_attention(model):
        with pytest.raises(ValueError, match=f"past_key_values: expected a {kind}, got DynamicCache; a pass without"):
            model(tokens)
        with pytest.raises(ValueError, match="past_key_values: expected a"):
            model(tokens, past_key_values=DynamicCache(config=model.config))
        cache = new_cache(world)
        with pytest.raises(RuntimeError, match="past_key_values: no gradient goes through a cache"):
            model(tokens, past_key_values=cache)
        assert cache.get_seq_length() == 0
        layer = min(indexers(model))
        rows = {layer: torch.zeros(2, 5, 3, dtype=torch.int32, device=tokens.device)}
        with pytest.raises(ValueError, match=rf"chosen_rows: expected \[2, {tokens.shape[1]}, k\] of layer {layer}"):
            model(tokens, chosen_rows=rows, use_cache=False)
        with pytest.raises(ValueError, match="chosen_rows: only a pass without a cache"), torch.no_grad():
            model(tokens, chosen_rows=rows, past_key_values=new_cache(world))
        model.model.layers[0].self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match=r"attention_dropout: expected 0 in training, got 0\.1"):
            model(tokens, use_cache=False)
        model.eval()(tokens, use_cache=False)


def test_weights_that_cannot_be_absorbed(v32: SimpleNamespace) -> None:
    """An adapter around the projection has a weight, too, and it is not what the projection multiplies by."""
    attention = v32.model.model.layers[1].self_attn
    adapter = torch.nn.Module()
    adapter.base, adapter.weight = attention.kv_b_proj, attention.kv_b_proj.weight
    attention.kv_b_proj = adapter
    with sparse_attention(v32.model), pytest.raises(TypeError, match=r"kv_b_proj: expected torch\.nn\.Linear"):
        v32.model(v32.tokens, use_cache=False)


def test_masks_and_positions_are_checked(device: str, rng: np.random.Generator) -> None:
    world = world_of("v32", device, rng)
    mask = torch.ones(2, 1, 41, 41, dtype=torch.bool, device=device).tril()
    mask[1, 0, 30, 3] = False
    with sparse_attention(world.model), cupy_mla.set_checks(True):
        with pytest.raises(ValueError, match="attention_mask: expected a causal one"):
            world.model(world.tokens, attention_mask=masks_of_layers(mask), use_cache=False)
        mask[1, 0, 30, 3] = True
        world.model(world.tokens, attention_mask=masks_of_layers(mask), use_cache=False)
        with pytest.raises(ValueError, match=r"attention_mask: expected \[R, 1, 41, 41\] or none"):
            world.model(world.tokens, attention_mask=masks_of_layers(mask[..., :40]), use_cache=False)
    world = world_of("v4", device, rng)
    mask = torch.ones_like(world.tokens)
    mask[1, :3] = 0
    with sparse_attention(world.model), cupy_mla.set_checks(True):
        with pytest.raises(ValueError, match="attention_mask: expected one without padding before tokens"):
            world.model(world.tokens, attention_mask=mask, use_cache=False)
        packed = torch.arange(LENGTH["v4"], device=device)[None] % 70
        for positions in ((mask.cumsum(-1) - 1).clamp(min=0), packed):
            with pytest.raises(ValueError, match="position_ids: expected those of one sequence, without padding befor"):
                world.model(world.tokens, position_ids=positions, use_cache=False)
