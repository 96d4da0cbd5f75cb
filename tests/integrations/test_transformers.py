"""transformers' DeepSeek-V3.2 on our paged caches, against its own eager attention in float32 on the same rows.

Models of one layer: both attentions then see the same hidden states, so their indexers choose the same rows.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", "5.17", reason="transformers 5.17 or later is not installed")

from transformers import AutoModelForCausalLM, DeepseekV32Config, LlamaConfig  # noqa: E402

from cupy_mla.integrations.transformers import PagedLatentCache, sparse_attention  # noqa: E402

BLOCK, BLOCKS = 5, 24
# ||ours - float32|| / ||float32||: bfloat16 throughout, and e4m3 rows (3 mantissa bits) besides.
BOUNDS = {"bf16": 0.02, "v32_fp8": 0.08}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest, rng: np.random.Generator) -> SimpleNamespace:
    """A model in bfloat16, the same in float32, and random tokens."""
    device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    torch.manual_seed(int(rng.integers(2**31)))
    config = DeepseekV32Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, q_lora_rank=64, index_n_heads=2, index_topk=8, first_k_dense_replace=1,
        qk_nope_head_dim=32, v_head_dim=24, initializer_range=0.08,
    )  # fmt: skip
    model, exact = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=d, attn_implementation="eager")
        .to(device)
        .eval()
        .requires_grad_(False)
        for d in (torch.bfloat16, torch.float32)
    )
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(config.vocab_size, (2, 41), device=device)
    table = torch.randperm(BLOCKS)[: 2 * 9].view(2, 9).to(device)
    return SimpleNamespace(model=model, exact=exact, tokens=tokens, table=table)


def new_cache(world: SimpleNamespace, layout: str) -> PagedLatentCache:
    """An empty cache full of NaN: what was never written must never be read."""
    cache = PagedLatentCache(world.model.config, world.table, num_blocks=BLOCKS, block_size=BLOCK, layout=layout)
    for layer in cache.layers:
        layer.kv_cache.view(torch.uint8).fill_(0xFF)
    return cache


def replayed(exact: torch.nn.Module, model: torch.nn.Module) -> None:
    """From now on the float32 model attends to the rows that the bfloat16 model's indexer chose last."""
    chosen = []
    model.model.layers[0].self_attn.indexer.register_forward_hook(lambda _m, _a, rows: chosen.append(rows))
    exact.model.layers[0].self_attn.indexer.register_forward_hook(lambda _m, _a, _own: chosen.pop(0))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("layout", BOUNDS)
@pytest.mark.parametrize("calls", [[41], [6, 1, 1, 20, 1, 12]], ids=["one-prefill", "prefills-and-decodes"])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])  # they bring additive and boolean masks
def test_logits(world: SimpleNamespace, layout: str, calls: list[int], attn_implementation: str) -> None:
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
    replayed(world.exact, world.model)
    mask = torch.ones_like(world.tokens)
    mask[1, :13] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with sparse_attention(world.model):
        got = world.model(
            world.tokens, attention_mask=mask, position_ids=positions, past_key_values=new_cache(world, "bf16")
        ).logits
    want = world.exact(world.tokens, attention_mask=mask, position_ids=positions).logits
    assert relative(got[mask.bool()], want[mask.bool()]) < BOUNDS["bf16"]


def test_generate(world: SimpleNamespace) -> None:
    prompt, length = world.tokens[:, :20], 30
    world.model.model.layers[0].self_attn.indexer.index_topk = length  # no choice that rounding could tip
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
    with pytest.raises(ValueError, match="model: expected one with DeepseekV32Attention"), sparse_attention(llama):
        pass
