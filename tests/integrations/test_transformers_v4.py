"""transformers' DeepSeek-V4 on our paged caches, against its own eager attention in float32 on the same rows.

One model a kind of layer: both attentions then see the same hidden states, and differ by bfloat16 and FP8 rows alone.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", "5.17", reason="transformers 5.17 or later is not installed")

from transformers import AutoModelForCausalLM, DeepseekV4Config, DynamicCache  # noqa: E402

import cupy_mla  # noqa: E402
from cupy_mla.integrations.transformers import PagedV4Cache, sparse_attention  # noqa: E402
from tests.integrations.test_transformers import recall, relative, two_models  # noqa: E402

BOUND = 0.08  # ||ours - float32|| / ||float32||: bfloat16 throughout, and e4m3 rows (3 mantissa bits)
TOPK, LENGTH = 8, 160
SWA_BLOCK, BLOCK = 16, 128
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
CALLS = {"one-prefill": [160], "prefills-and-decodes": [2, 1, 1, 37, 85, 1, 1, 1, 31]}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return request.param


def world_of(kind: str, device: str, rng: np.random.Generator) -> SimpleNamespace:
    """A model of one layer in bfloat16, the same in float32, and random tokens of two requests."""
    torch.manual_seed(int(rng.integers(2**31)))
    config = DeepseekV4Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=1, layer_types=[kind], num_attention_heads=2, head_dim=512,
        q_lora_rank=64, o_groups=2, o_lora_rank=64, sliding_window=24, index_n_heads=4, index_head_dim=128,
        index_topk=TOPK, hc_mult=2, mlp_layer_types=["moe"], moe_intermediate_size=64, n_routed_experts=2,
        num_experts_per_tok=2, initializer_range=0.08,
    )  # fmt: skip
    model, exact = two_models(config, device)
    tokens = torch.randint(config.vocab_size, (2, LENGTH), device=device)
    return SimpleNamespace(model=model, exact=exact, tokens=tokens, device=device)


def new_cache(world: SimpleNamespace) -> PagedV4Cache:
    """An empty cache in shuffled blocks, full of NaN: what was never written must never be read."""
    tables = (torch.randperm(2 * n + 3)[: 2 * n].view(2, n) for n in (-(-LENGTH // SWA_BLOCK), -(-LENGTH // BLOCK)))
    cache = PagedV4Cache(
        world.model.config, *tables, swa_block_size=SWA_BLOCK, block_size=BLOCK, max_num_batched_tokens=2 * LENGTH,
        device=world.device,
    )  # fmt: skip
    for layer in cache.layers:
        for part in (layer.swa_k_cache, layer.k_cache, layer.indexer_cache):
            if part is not None:
                part.as_strided((part.untyped_storage().nbytes(),), (1,), 0).fill_(0xFF)
    return cache


def indexer_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.model.layers[0].self_attn.compressor.indexer


def replayed(exact: torch.nn.Module, model: torch.nn.Module) -> None:
    """From now on the float32 model attends to the rows that the bfloat16 model's indexer chose last."""
    chosen = []
    indexer_of(model).register_forward_hook(lambda _m, _a, rows: chosen.append(rows))
    indexer_of(exact).register_forward_hook(lambda _m, _a, own: chosen.pop(0)[..., : own.shape[-1]].to(own.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_logits(device: str, rng: np.random.Generator, kind: str, calls: list[int]) -> None:
    world = world_of(kind, device, rng)
    if kind == "compressed_sparse_attention":
        replayed(world.exact, world.model)
    cache, own, start = new_cache(world), DynamicCache(config=world.exact.config), 0
    for new in calls:
        part = world.tokens[:, start : start + new]
        with sparse_attention(world.model), cupy_mla.set_checks(True):
            got = world.model(part, past_key_values=cache, use_cache=True).logits
        want = world.exact(part, past_key_values=own, use_cache=True).logits
        assert relative(got, want) < BOUND
        start += new
    assert cache.get_seq_length() == LENGTH


def chosen_by(world: SimpleNamespace, model: torch.nn.Module, calls: list[int], cache) -> torch.Tensor:
    """The rows that a model's own indexer chooses, [R, tokens, topk], -1 where there are fewer."""
    rows, start = [], 0
    hook = indexer_of(model).register_forward_hook(lambda _m, _a, own: rows.append(own))
    for new in calls:
        model(world.tokens[:, start : start + new], past_key_values=cache, use_cache=True)
        start += new
    hook.remove()
    return torch.cat([torch.nn.functional.pad(r, (0, TOPK - r.shape[-1]), value=-1) for r in rows], 1)


def test_rows_are_those_of_the_models_own_indexer(device: str, rng: np.random.Generator) -> None:
    """Nearly all where FP8 rounds, all where every row is chosen; the same whether prefilled or decoded."""
    world = world_of("compressed_sparse_attention", device, rng)
    own = chosen_by(world, world.exact, [LENGTH], DynamicCache(config=world.exact.config))
    with sparse_attention(world.model):
        prefilled, decoded = (chosen_by(world, world.model, calls, new_cache(world)) for calls in CALLS.values())
    all_chosen = 4 * TOPK + 3  # tokens that see topk rows at most
    for rows in (prefilled, decoded):
        for t in range(all_chosen):
            seen = (t + 1) // 4
            assert rows[0, t].tolist() == [*range(seen)] + [-1] * (TOPK - seen)
    choosing = [rows[:, all_chosen - TOPK :] for rows in (prefilled, decoded, own)]  # recall leaves out topk tokens
    assert recall(choosing[0], choosing[2]) > 0.8
    assert recall(choosing[0], choosing[1]) > 0.95  # the model's products differ by roundings
    assert recall(choosing[0], choosing[2].flip(0)) < 0.8


def test_a_model_of_all_kinds_starts_over(device: str, rng: np.random.Generator) -> None:
    """Every layer starts over with `reset`, and gets its own attention back afterwards."""
    torch.manual_seed(int(rng.integers(2**31)))
    config = copy.deepcopy(world_of(KINDS[0], device, rng).model.config)
    config.num_hidden_layers, config.layer_types, config.mlp_layer_types = 3, KINDS, ["moe"] * 3
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval().requires_grad_(False)
    world = SimpleNamespace(model=model, device=device)
    tokens = torch.randint(64, (2, LENGTH), device=device)
    before = model(tokens).logits
    cache = new_cache(world)
    with sparse_attention(model):
        first = model(tokens, past_key_values=cache).logits
        with pytest.raises(ValueError, match=f"block_table: has room for {LENGTH} tokens a request, got {LENGTH + 1}"):
            model(tokens[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(tokens, past_key_values=cache).logits, first)
    assert torch.equal(model(tokens).logits, before)


def test_generate(device: str, rng: np.random.Generator) -> None:
    """Every token it chooses must be (nearly) the likeliest after the tokens before it."""
    world = world_of("compressed_sparse_attention", device, rng)
    world.model.generation_config.eos_token_id = None
    prompt, length = world.tokens[:, :20], 34  # too short for a choice that rounding could tip
    with sparse_attention(world.model):
        text = world.model.generate(prompt, past_key_values=new_cache(world), max_length=length, do_sample=False)
        logits = world.model(text, past_key_values=new_cache(world)).logits
    assert text.shape == (2, length)
    steps = logits[:, prompt.shape[1] - 1 : -1]
    taken = steps.gather(-1, text[:, prompt.shape[1] :, None]).squeeze(-1)
    assert float((steps.max(-1).values - taken).max()) < 0.05 * float(logits.abs().max())


def test_padding_is_refused_when_checked(device: str, rng: np.random.Generator) -> None:
    world = world_of(KINDS[0], device, rng)
    positions = (torch.arange(LENGTH, device=device) - 3).clamp(min=0)[None]
    with (
        sparse_attention(world.model),
        cupy_mla.set_checks(True),
        pytest.raises(ValueError, match="position_ids: expected those of tokens without padding"),
    ):
        world.model(world.tokens, position_ids=positions, past_key_values=new_cache(world))
