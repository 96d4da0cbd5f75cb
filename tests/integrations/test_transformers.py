"""transformers' DeepSeek-V3.2 and GLM-5 on our paged caches, against their own eager attention in float32 on the same
rows, and their rows against those of the models' own indexers.

In the models one layer has an indexer, the first: both attentions then see the same hidden states there.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", "5.17", reason="transformers 5.17 or later is not installed")

from transformers import AutoModelForCausalLM, DeepseekV32Config, GlmMoeDsaConfig, LlamaConfig  # noqa: E402

import cupy_mla  # noqa: E402
from cupy_mla.integrations.transformers import PagedLatentCache, sparse_attention  # noqa: E402

BLOCK, BLOCKS = 5, 24
# ||ours - float32|| / ||float32||: bfloat16 throughout, and e4m3 rows (3 mantissa bits) besides.
BOUNDS = {"bf16": 0.02, "v32_fp8": 0.08}
TOPK = 8
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": 64, "index_topk": TOPK, "qk_nope_head_dim": 32, "v_head_dim": 24, "initializer_range": 0.08,
}  # fmt: skip
CONFIGS = {
    "v32": lambda: DeepseekV32Config(**SIZES, num_hidden_layers=1, index_n_heads=2, first_k_dense_replace=1),
    "glm": lambda: GlmMoeDsaConfig(
        **SIZES, num_hidden_layers=2, index_n_heads=8, first_k_dense_replace=2, indexer_types=["full", "shared"]
    ),
}  # fmt: skip


def two_models(config: Any, device: str, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """One of this dtype, and the same in float32."""
    model, exact = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=d, attn_implementation="eager").to(device)
        for d in (getattr(torch, dtype), torch.float32)
    )
    for layer in model.model.layers if hasattr(model.model.layers[0].self_attn, "sinks") else ():
        torch.nn.init.normal_(layer.self_attn.sinks)
    exact.load_state_dict(model.state_dict())
    return tuple(each.eval().requires_grad_(False) for each in (model, exact))


def world_of(kind: str, device: str, rng: np.random.Generator) -> SimpleNamespace:
    """A model in bfloat16, the same in float32, and random tokens."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    torch.manual_seed(int(rng.integers(2**31)))
    model, exact = two_models(CONFIGS[kind](), device)
    tokens = torch.randint(model.config.vocab_size, (2, 41), device=device)
    table = torch.randperm(BLOCKS)[: 2 * 9].view(2, 9).to(device)
    return SimpleNamespace(model=model, exact=exact, tokens=tokens, table=table)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def world(request: pytest.FixtureRequest, rng: np.random.Generator) -> SimpleNamespace:
    return world_of("v32", request.param, rng)


@pytest.fixture(params=CONFIGS)
def any_world(request: pytest.FixtureRequest, device: str, rng: np.random.Generator) -> SimpleNamespace:
    return world_of(request.param, device, rng)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def new_cache(world: SimpleNamespace, layout: str) -> PagedLatentCache:
    """An empty cache full of NaN: what was never written must never be read."""
    cache = PagedLatentCache(world.model.config, world.table, num_blocks=BLOCKS, block_size=BLOCK, layout=layout)
    for layer in cache.layers:
        layer.kv_cache.view(torch.uint8).fill_(0xFF)
        if layer.indexer_cache is not None:
            layer.indexer_cache.fill_(0xFF)
    return cache


def indexer_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.model.layers[0].self_attn.indexer


def replayed(exact: torch.nn.Module, model: torch.nn.Module, padding: torch.Tensor | None = None) -> None:
    """From now on the float32 model attends to the rows that the bfloat16 model's indexer chose last.

    `padding` [R] tokens stand before those of each request, which only the float32 model counts.
    """
    chosen = []

    def in_columns(_module, arguments: tuple, own: torch.Tensor) -> torch.Tensor:
        """Where fewer are chosen than the model expects, columns that its mask forbids."""
        rows, mask = chosen.pop(0), arguments[3]
        forbidden = mask.masked_fill(mask == 0, 1).argmin(-1, keepdim=True).expand(rows.shape)
        before = 0 if padding is None else padding[:, None, None]
        return (rows + before).where(rows >= 0, forbidden).to(own.dtype)

    indexer_of(model).register_forward_hook(lambda _m, _a, rows: chosen.append(rows))
    indexer_of(exact).register_forward_hook(in_columns)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("layout", BOUNDS)
@pytest.mark.parametrize("calls", [[41], [6, 1, 1, 20, 1, 12]], ids=["one-prefill", "prefills-and-decodes"])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])  # they bring additive and boolean masks
def test_logits(any_world: SimpleNamespace, layout: str, calls: list[int], attn_implementation: str) -> None:
    world = any_world
    replayed(world.exact, world.model)
    world.model.set_attn_implementation(attn_implementation)
    cache, eager_cache, start = new_cache(world, layout), None, 0
    for new in calls:
        part = world.tokens[:, start : start + new]
        with sparse_attention(world.model):
            got = world.model(part, past_key_values=cache, use_cache=True).logits
        want = world.exact(part, past_key_values=eager_cache, use_cache=True)
        eager_cache = want.past_key_values
        assert relative(got, want.logits) < BOUNDS[layout]
        start += new
    assert cache.get_seq_length() == start


def test_left_padding(world: SimpleNamespace) -> None:
    mask = torch.ones_like(world.tokens)
    mask[1, :13] = 0
    replayed(world.exact, world.model, (mask == 0).sum(-1))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with sparse_attention(world.model):
        got = world.model(
            world.tokens, attention_mask=mask, position_ids=positions, past_key_values=new_cache(world, "bf16")
        ).logits
    want = world.exact(world.tokens, attention_mask=mask, position_ids=positions).logits
    assert relative(got[mask.bool()], want[mask.bool()]) < BOUNDS["bf16"]


def test_generate(any_world: SimpleNamespace) -> None:
    world = any_world
    prompt, length = world.tokens[:, :20], 30
    indexer_of(world.model).index_topk = length  # no choice that rounding could tip
    world.model.generation_config.eos_token_id = None
    with sparse_attention(world.model):
        text = world.model.generate(
            prompt, past_key_values=new_cache(world, "bf16"), max_length=length, do_sample=False
        )
        logits = world.model(text, past_key_values=new_cache(world, "bf16")).logits
    assert text.shape == (2, length)
    # Every token it chose must be (nearly) the likeliest after the tokens before it.
    steps = logits[:, prompt.shape[1] - 1 : -1]
    taken = steps.gather(-1, text[:, prompt.shape[1] :, None]).squeeze(-1)
    assert float((steps.max(-1).values - taken).max()) < 0.05 * float(logits.abs().max())


def test_the_model_gets_its_own_attention_back(world: SimpleNamespace) -> None:
    before = world.model(world.tokens).logits
    with pytest.raises(RuntimeError, match="on purpose"), sparse_attention(world.model):
        raise RuntimeError("on purpose")
    assert torch.equal(world.model(world.tokens).logits, before)


def test_reset_starts_over(world: SimpleNamespace) -> None:
    cache = new_cache(world, "bf16")
    with sparse_attention(world.model):
        first = world.model(world.tokens, past_key_values=cache).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(world.model(world.tokens, past_key_values=cache).logits, first)


def test_errors(world: SimpleNamespace) -> None:
    cache = new_cache(world, "bf16")
    with sparse_attention(world.model):
        world.model(world.tokens, past_key_values=cache)
        with pytest.raises(ValueError, match="block_table: has room for 45 tokens a request, got 46"):
            world.model(world.tokens[:, :5], past_key_values=cache)
    llama = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    ))  # fmt: skip
    with (
        pytest.raises(ValueError, match="model: expected one with layers of DeepseekV32Attention, Glm"),
        sparse_attention(llama),
    ):
        pass


# --- the indexer ----------------------------------------------------------------------------------------------


def chosen_by(world: SimpleNamespace, model: torch.nn.Module, calls: list[int], cache) -> torch.Tensor:
    """The rows that a model's own indexer chooses, [R, tokens, topk], what a token does not see as -1."""
    rows, start = [], 0
    hook = indexer_of(model).register_forward_hook(lambda _m, _a, own: rows.append(own))
    for new in calls:
        part = world.tokens[:, start : start + new]
        cache = model(part, past_key_values=cache, use_cache=True).past_key_values
        start += new
    hook.remove()
    rows = torch.cat([torch.nn.functional.pad(r, (0, TOPK - r.shape[-1]), value=-1) for r in rows], 1)
    return rows.where(rows <= torch.arange(start, device=rows.device)[:, None], -1)


def recall(rows: torch.Tensor, other: torch.Tensor) -> float:
    """The part of the chosen rows that the other chose as well, of tokens that see more than they choose."""
    pairs = zip(rows[:, TOPK:].flatten(0, 1).tolist(), other[:, TOPK:].flatten(0, 1).tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / TOPK for a, b in pairs]))


def test_rows_are_those_of_the_models_own_indexer(any_world: SimpleNamespace) -> None:
    """Nearly all where FP8 rounds, all where every row is chosen; the same whether prefilled or decoded."""
    world = any_world
    calls = [6, 1, 1, 20, 1, 12]
    own = chosen_by(world, world.exact, [41], None)
    with sparse_attention(world.model):
        prefilled = chosen_by(world, world.model, [41], new_cache(world, "bf16"))
        decoded = chosen_by(world, world.model, calls, new_cache(world, "bf16"))
    for rows in (prefilled, decoded):
        assert (rows.diff(dim=-1)[:, TOPK:] > 0).all()
        assert [set(a) for a in rows[0, :TOPK].tolist()] == [set(range(t + 1)) | {-1} for t in range(TOPK - 1)] + [
            set(range(TOPK))
        ]
    assert recall(prefilled, own) > 0.8
    assert recall(prefilled, decoded) > 0.95  # the model's products differ by roundings
    assert recall(prefilled, own.flip(0)) < 0.8


def test_padding_is_not_cached(world: SimpleNamespace) -> None:
    """Tokens after it stand as if it were not there; it chooses nothing."""
    mask = torch.ones_like(world.tokens)
    mask[0, :7], mask[1, :13] = 0, 0
    cache, rows = new_cache(world, "bf16"), []
    hook = indexer_of(world.model).register_forward_hook(lambda _m, _a, own: rows.append(own))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with sparse_attention(world.model), cupy_mla.set_checks(True):
        for part in (slice(0, 40), slice(40, 41)):
            world.model(
                world.tokens[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part],
                past_key_values=cache,
            )  # fmt: skip
    hook.remove()
    assert cache.get_seq_length() == 41
    for r, padding in ((0, 7), (1, 13)):
        assert (rows[0][r, :padding] == -1).all()
        assert rows[0][r, padding].tolist() == [0] + [-1] * (TOPK - 1)
        assert int(rows[1][r].max()) <= 40 - padding
        written = cache.layers[0].indexer_cache[world.table[r]].flatten()
        tokens = int((world.table[r].numel() * BLOCK * 132 - (written == 0xFF).sum()) / 132)
        assert tokens == 41 - padding


def test_masks_that_are_not_causal_are_refused_when_checked(world: SimpleNamespace) -> None:
    mask = torch.ones(2, 1, 41, 41, dtype=torch.bool, device=world.tokens.device).tril()
    mask[1, 0, 30, 3] = False
    masks = dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), mask)  # a layer's kind, by version
    with sparse_attention(world.model), cupy_mla.set_checks(True):
        with pytest.raises(ValueError, match="attention_mask: expected a causal one"):
            world.model(world.tokens, attention_mask=masks, past_key_values=new_cache(world, "bf16"))
        mask[1, 0, 30, 3] = True
        world.model(world.tokens, attention_mask=masks, past_key_values=new_cache(world, "bf16"))


@pytest.mark.parametrize(
    "sharing",
    [{"indexer_types": ["full", "shared", "full", "full", "shared", "shared"]}, {"index_topk_pattern": "FFSSSF"},
     {"index_topk_freq": 3}],
    ids=["types", "pattern", "frequency"],
)  # fmt: skip
def test_rows_go_from_an_indexer_to_the_layers_behind_it(device: str, rng: np.random.Generator, sharing: dict) -> None:
    """In prefill and decode; caches of keys are where the config says that indexers are."""
    config = GlmMoeDsaConfig(**SIZES, num_hidden_layers=6, index_n_heads=8, first_k_dense_replace=6, **sharing)
    kinds = config.indexer_types
    assert 1 < kinds.count("full") < 6
    torch.manual_seed(int(rng.integers(2**31)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model = model.to(device).eval().requires_grad_(False)
    world = SimpleNamespace(model=model, table=torch.randperm(BLOCKS)[: 2 * 9].view(2, 9).to(device))
    chosen: list[torch.Tensor] = []  # by the indexers
    attended: list[torch.Tensor] = []  # by the layers
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _m, _a, result: attended.append(result[2]))
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(lambda _m, _a, rows: chosen.append(rows))
    cache, tokens = new_cache(world, "bf16"), torch.randint(config.vocab_size, (2, 41), device=device)
    assert [layer.indexer_cache is not None for layer in cache.layers] == [kind == "full" for kind in kinds]
    for part in (tokens[:, :40], tokens[:, 40:]):
        chosen.clear()
        attended.clear()
        with sparse_attention(model):
            model(part, past_key_values=cache, use_cache=True)
        assert len(chosen) == kinds.count("full")
        assert not torch.equal(chosen[0], chosen[1])
        for i, rows in enumerate(attended):
            assert torch.equal(rows, chosen[kinds[: i + 1].count("full") - 1]), f"layer {i}"


def test_layers_that_share_rows(device: str, rng: np.random.Generator) -> None:
    """They have no keys of their own; without a layer before them they have no rows."""
    world = world_of("glm", device, rng)
    cache = new_cache(world, "bf16")
    assert cache.layers[0].indexer_cache is not None
    assert cache.layers[1].indexer_cache is None
    with pytest.raises(ValueError, match="this layer has no indexer"):
        cache.layers[1].update_indexer(torch.zeros(2, 1, 128, device=device))
    world.model.model.layers[0].self_attn.indexer = None
    with sparse_attention(world.model), pytest.raises(ValueError, match="prev_topk_indices: a layer without"):
        world.model(world.tokens, past_key_values=cache)


def test_keys_are_cached_in_fp8_alone(world: SimpleNamespace) -> None:
    cache = new_cache(world, "bf16")
    with sparse_attention(world.model):
        world.model(world.tokens, past_key_values=cache)
    assert cache.layers[0].indexer_keys is None
    assert cache.layers[0].indexer_cache.shape == (BLOCKS, BLOCK, 132)
