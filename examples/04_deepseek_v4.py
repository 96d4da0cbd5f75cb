"""DeepSeek V4 of Hugging Face transformers, its attention replaced by this package, on a real text.

The model is transformers' own `DeepseekV4ForCausalLM`, small and with random weights, but with the real head size (512,
of which 64 RoPE) and one layer of each kind: sliding window alone, compressed 4:1 with an indexer (C4A), and compressed
128:1 (C128A). The text is read as bytes. The model prefills it and decodes on; in our run its projections, compressors
and indexer feed paged caches in layout V4_FP8, and `DeepseekV4Impl` attends over them:

- eager float32, FP8 rows: the yardstick; the rows are rounded as the cache rounds them, everything else is float32;
- eager bfloat16, FP8 rows: the same in bfloat16, which shows what that costs;
- eager bfloat16: without the rounding, which shows what FP8 rows cost;
- ours: shuffled blocks, whose every byte is NaN until it is written.

The indexer chooses compressed rows by score, and one rounding earlier another row is chosen. So the logits are compared
twice: with all runs on the rows that the yardstick chose, and with each on its own.

    python examples/04_deepseek_v4.py [--text FILE] [--prompt 620] [--new 32] [--seed 0]

Takes 8 s on two CPU cores, after 10 for importing torch and transformers. Ends with an error when ours is further from
the yardstick than `BOUND` times eager bfloat16 with the same rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's idle threads sleep: spinning, they slow NumPy's down

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

import cupy_mla
from cupy_mla import (
    BatchMetadata,
    DeepseekV4Impl,
    DeepseekV4Layer,
    Place,
    SparseMLAConfig,
    SparseMLAMetadataBuilder,
    SparseSWAMetadataBuilder,
    Workspace,
    quantize_and_insert_k_cache,
)
from cupy_mla.layouts import V4_FP8

BOUND = 1.25
SWA_BLOCK, BLOCK = 64, 256  # tokens a block: of the sliding window's cache, and of the compressed ones
RATIOS = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
CONFIG = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 3, "layer_types": list(RATIOS),
    "num_attention_heads": 8, "head_dim": 512, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128,
    "sliding_window": 64, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 32, "hc_mult": 2,
    # Every expert works on every token: no choice that a rounding could change.
    "mlp_layer_types": ["moe"] * 3, "moe_intermediate_size": 256, "n_routed_experts": 2, "num_experts_per_tok": 2,
    "initializer_range": 0.05,  # large enough that some rows clearly weigh more than others
}  # fmt: skip
YARDSTICK, EAGER, UNROUNDED, OURS = "eager float32, FP8 rows", "eager bfloat16, FP8 rows", "eager bfloat16", "ours"
RUNS = (YARDSTICK, EAGER, UNROUNDED, OURS)

Rows = list[torch.Tensor]  # what the indexer chose: [1, tokens, topk] a call


def build(dtype: torch.dtype, device: str) -> DeepseekV4ForCausalLM:
    config = DeepseekV4Config(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").to(device).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)  # transformers starts with zeros
    return model


# --- our attention --------------------------------------------------------------------------------------------


def paged_cache(blocks: int, rows: int, device: str) -> torch.Tensor:
    """A cache [blocks, rows, 584] full of NaN, its blocks as far apart as FlashMLA wants them."""
    stride = V4_FP8.block_bytes(rows)
    whole = torch.full((blocks, stride), 0xFF, dtype=torch.uint8, device=device)
    return whole.as_strided((blocks, rows, V4_FP8.token_bytes), (stride, V4_FP8.token_bytes, 1))


class PagedAttention:
    """One request's caches for all layers of a model, and the metadata of the step at hand."""

    def __init__(self, config: DeepseekV4Config, max_model_len: int, device: str) -> None:
        place = Place.of(torch.empty(0, device=device))
        workspace = Workspace(place)
        self.topk, self.length = config.index_topk, 0
        self.builders: dict[int, Any] = {}
        self.impls, self.tables, self.metadata = {}, {}, {}
        for ratio in RATIOS.values():
            settings = SparseMLAConfig(
                config.num_attention_heads, d_qk=512, cache_layout="v4_fp8", topk=config.index_topk,
                block_size=SWA_BLOCK if ratio == 1 else BLOCK, max_num_seqs=1, max_num_batched_tokens=max_model_len,
                max_model_len=max_model_len, compress_ratio=ratio, window=config.sliding_window,
            )  # fmt: skip
            builder = SparseSWAMetadataBuilder if ratio == 1 else SparseMLAMetadataBuilder
            self.builders[ratio] = builder(settings, place)
            self.impls[ratio] = DeepseekV4Impl(settings, config.head_dim**-0.5, workspace)
            blocks = -(-max_model_len // settings.block_size)
            # A pool with room to spare: the request's blocks come from anywhere in it.
            self.tables[ratio] = np.random.default_rng(ratio).permutation(2 * blocks)[None, :blocks]
        self.caches: list[dict[int, torch.Tensor]] = []
        for layer_type in config.layer_types:
            kinds = {1, RATIOS[layer_type]}  # every layer has the sliding window's cache
            self.caches.append({
                ratio: paged_cache(2 * self.tables[ratio].size, self.builders[ratio].config.rows_per_block, device)
                for ratio in kinds
            })  # fmt: skip

    def step(self, new: int) -> torch.Tensor:
        """Plan the step of the next `new` tokens; returns their positions."""
        positions = np.arange(self.length, self.length + new)
        self.length += new
        for ratio, builder in self.builders.items():
            table, size = self.tables[ratio], builder.config.block_size
            slots = table[0, positions // size] * size + positions % size
            self.metadata[ratio] = builder.build(BatchMetadata([0, new], [self.length], table, slots, positions))
        return torch.from_numpy(positions)[None]

    def attend(
        self, layer: int, ratio: int, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor,
        compressed: torch.Tensor | None, chosen: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """q [T, h, 512] and the tokens' own rows kv [T, 512], all rows compressed so far, what the indexer chose."""
        swa, metadata, caches = self.metadata[1], self.metadata[ratio] if ratio > 1 else None, self.caches[layer]
        quantize_and_insert_k_cache(kv, caches[1], swa.slot_mapping)
        if metadata is not None and len(compressed):
            position = torch.arange(self.length - len(q), self.length, device=q.device)
            rows = compressed[(position // ratio).clamp(max=len(compressed) - 1)]
            quantize_and_insert_k_cache(rows, caches[ratio], metadata.slot_mapping)  # -1 where a token completes no row
        state = DeepseekV4Layer(caches[1], sinks.float(), caches.get(ratio) if ratio > 1 else None, chosen)
        return self.impls[ratio].forward(q, state, swa, metadata, torch.empty_like(q))


@contextmanager
def paged_attention(model: DeepseekV4ForCausalLM, paged: PagedAttention) -> Iterator[None]:
    """While the context lasts, the model attends over the paged caches."""

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: dict, position_ids: torch.Tensor,
        attention_mask: Any, past_key_values: DynamicCache, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """What `DeepseekV4Attention.forward` computes, on hidden_states [1, n, hidden]."""
        new, ratio = hidden_states.shape[1], RATIOS[self.layer_type]
        cos, sin = position_embeddings[self.rope_layer_type]
        q_latent = self.q_a_norm(self.q_a_proj(hidden_states))
        q = self.q_b_norm(self.q_b_proj(q_latent).view(1, new, self.num_heads, self.head_dim))
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
        kv = self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(2)
        kv = apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2)
        compressed = chosen = None
        if self.compressor is not None:
            with indexer_calls(self) as calls:
                rows, _ = self.compressor(hidden_states, q_latent, position_ids, past_key_values, self.layer_idx)
            compressed = rows[0, 0].to(q.dtype)
            if calls:
                chosen = torch.full((new, paged.topk), -1, dtype=torch.int32, device=q.device)
                chosen[:, : calls[0].shape[-1]] = calls[0][0]
        out = paged.attend(self.layer_idx, ratio, q[0], kv[0, :, 0], self.sinks, compressed, chosen)[None]
        out = apply_rotary_pos_emb(out, cos, -sin, unsqueeze_dim=2)
        groups = self.o_a_proj(out.reshape(1, new, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(groups), None

    layers = [layer.self_attn for layer in model.model.layers]
    for layer in layers:
        layer.forward = MethodType(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def indexer_calls(layer: torch.nn.Module) -> Iterator[Rows]:
    """Collects what a layer's indexer gives, -1 where fewer rows than topk are complete."""
    calls: Rows = []
    indexer = getattr(layer.compressor, "indexer", None)
    hooks = [indexer.register_forward_hook(lambda _m, _a, rows: calls.append(rows))] if indexer else []
    try:
        yield calls
    finally:
        for handle in hooks:
            handle.remove()


# --- the runs -------------------------------------------------------------------------------------------------


@contextmanager
def chosen_rows(model: DeepseekV4ForCausalLM, replay: Rows | None) -> Iterator[Rows]:
    """Collects what the model's indexer chooses, call after call; with `replay`, that is chosen instead."""
    chosen: Rows = []

    def hook(_module: torch.nn.Module, _arguments: tuple, own_choice: torch.Tensor) -> torch.Tensor:
        chosen.append(own_choice if replay is None else replay[len(chosen)])
        return chosen[-1]

    indexers = [layer.self_attn.compressor.indexer for layer in model.model.layers
                if layer.self_attn.layer_type == "compressed_sparse_attention"]  # fmt: skip
    hooks = [indexer.register_forward_hook(hook) for indexer in indexers]
    try:
        yield chosen
    finally:
        for handle in hooks:
            handle.remove()


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Latent rows with their NoPE part as the V4_FP8 cache holds it: e4m3 under a power of two for every 64 values."""
    tiles = rows[..., :448].float().unflatten(-1, (7, 64))
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    tiles = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([tiles.flatten(-2).to(rows.dtype), rows[..., 448:]], -1)


@contextmanager
def fp8_rows(model: DeepseekV4ForCausalLM) -> Iterator[None]:
    """While the context lasts, the model's own attention sees rounded rows, compressed ones too (RoPE comes after)."""
    attentions = [layer.self_attn for layer in model.model.layers]
    modules = attentions + [a.compressor for a in attentions if a.compressor is not None]
    hooks = [m.kv_norm.register_forward_hook(lambda _m, _a, rows: rounded(rows)) for m in modules]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


class Comparison:
    """The four runs over the same weights."""

    def __init__(self, longest: int, device: str) -> None:
        self.model, self.yardstick = build(torch.bfloat16, device), build(torch.float32, device)
        self.yardstick.load_state_dict(self.model.state_dict())
        self.longest, self.device = longest, device

    @torch.no_grad()
    def follow(self, name: str, tokens: torch.Tensor, prompt: int, replay: Rows | None) -> tuple[torch.Tensor, Rows]:
        """Logits [tokens, vocab] of a forced text, `prompt` tokens prefilled and the rest decoded; chosen rows."""
        model = self.yardstick if name == YARDSTICK else self.model
        cache, paged = DynamicCache(config=model.config), PagedAttention(model.config, self.longest, self.device)
        attention = {OURS: lambda: paged_attention(model, paged), UNROUNDED: lambda: chosen_rows(model, None)}
        logits, at = [], 0
        with chosen_rows(model, replay) as chosen, attention.get(name, lambda: fp8_rows(model))():
            for new in [prompt] + [1] * (tokens.shape[1] - prompt):
                positions = paged.step(new).to(self.device)
                part = tokens[:, at : at + new]
                logits.append(model(part, position_ids=positions, past_key_values=cache, use_cache=True).logits)
                at += new
        return torch.cat(logits, 1)[0].float(), chosen

    def all(self, tokens: torch.Tensor, prompt: int, replay: Rows | None) -> tuple[dict, dict]:
        """Every run's logits and chosen rows."""
        results = {name: self.follow(name, tokens, prompt, replay) for name in RUNS}
        return {n: r[0] for n, r in results.items()}, {n: r[1] for n, r in results.items()}


def relative(logits: torch.Tensor, to: torch.Tensor) -> float:
    return float((logits - to).norm() / to.norm())


def show_logits(logits: dict[str, torch.Tensor], prompt: int) -> None:
    columns = f"{'largest':>9s}{'relative':>11s}{'same token':>13s}  "
    print(f"{'':35s}{'from ' + YARDSTICK:^35s}{'from ' + EAGER:^35s}".rstrip())
    print(f"{'':35s}{columns}{columns}".rstrip())
    for part, span in (("prefill", slice(prompt)), ("decode", slice(prompt, None))):
        for name in RUNS[1:]:
            line = f"  {part:7s}  {name:24s}"
            for other in (YARDSTICK, EAGER) if name != EAGER else (YARDSTICK,):
                got, want = logits[name][span], logits[other][span]
                same = (got.argmax(-1) == want.argmax(-1)).float().mean()
                line += f"{(got - want).abs().max():9.4f}{relative(got, want):11.2%}{same:13.1%}  "
            print(line.rstrip())


def share(rows: Rows, other: Rows) -> float:
    """The part of the chosen rows that the other run chose as well."""
    pairs = [(set(a), set(b)) for x, y in zip(rows, other, strict=True)
             for a, b in zip(x[0].tolist(), y[0].tolist(), strict=True)]  # fmt: skip
    return sum(len((a & b) - {-1}) for a, b in pairs) / sum(len(a - {-1}) for a, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parent.parent / "README.md")
    parser.add_argument("--prompt", type=int, default=620, help="bytes of the text that are prefilled")
    parser.add_argument("--new", type=int, default=32, help="tokens that are decoded")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    arguments = parser.parse_args()
    prompt, new = arguments.prompt, arguments.new
    text = arguments.text.read_bytes()[: prompt + new]
    if len(text) < prompt + new:
        parser.error(f"{arguments.text} has {len(text)} bytes, --prompt and --new ask for {prompt + new}")

    started = time.perf_counter()
    torch.manual_seed(arguments.seed)
    gpu = torch.cuda.is_available() and cupy_mla.cuda_available()
    device = "cuda" if gpu else "cpu"
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, cupy_mla {cupy_mla.__version__} "
        f"on {torch.cuda.get_device_name() if gpu else 'the CPU (NumPy)'}\n"
        f"DeepseekV4ForCausalLM of {CONFIG['num_attention_heads']} heads of 512, window {CONFIG['sliding_window']}, "
        f"{CONFIG['index_topk']} of the 4:1 compressed rows a token; random weights, seed {arguments.seed}\n"
        f"layers: {', '.join(f'{kind} ({ratio}:1)' for kind, ratio in RATIOS.items())}\n"
        f"{arguments.text.name}: {prompt} bytes prefilled, {new} decoded; caches of 584 bytes a row"
    )
    tokens = torch.tensor([list(text)], device=device)
    comparison = Comparison(prompt + new, device)
    with Progress(console=Console(stderr=True)) as progress:
        passes = progress.add_task("forward passes", total=len(RUNS) * 2 * (1 + new))
        for model in (comparison.model, comparison.yardstick):
            model.register_forward_hook(lambda *_: progress.advance(passes))
        own, rows = comparison.all(tokens, prompt, None)
        same, _ = comparison.all(tokens, prompt, rows[YARDSTICK])
    print(f"\nLogits (the largest is {same[YARDSTICK].abs().max():.2f}), every run on the compressed rows "
          "that the yardstick chose")  # fmt: skip
    show_logits(same, prompt)
    print("\nLogits, every run on the rows that its own indexer chose")
    show_logits(own, prompt)
    shares = (f"{share(rows[name], rows[YARDSTICK]):.1%} ({name})" for name in RUNS[1:])
    print(f"  of these rows the yardstick chose too: {', '.join(shares)}")

    shown = min(new, 16)
    print(f"\nTokens chosen after each of {shown} decoded bytes, on their own rows (* is not what the yardstick chose)")
    for name in RUNS:
        chosen, expected = (own[n][prompt : prompt + shown].argmax(-1).tolist() for n in (name, YARDSTICK))
        marked = (f"{a:4d}{' ' if a == b else '*'}" for a, b in zip(chosen, expected, strict=True))
        print(f"  {name:24s}{''.join(marked)}".rstrip())

    ratio = relative(same[OURS], same[YARDSTICK]) / relative(same[EAGER], same[YARDSTICK])
    print(
        f"\nOurs is {ratio:.2f} times as far from the yardstick as {EAGER} is (at most {BOUND}): "
        f"{'agrees' if ratio <= BOUND else 'DISAGREES'}\n{time.perf_counter() - started:.0f} s"
    )
    sys.exit(ratio > BOUND)


if __name__ == "__main__":
    main()
