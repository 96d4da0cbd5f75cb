"""DeepSeek V4 of Hugging Face transformers on a real text; this package replaces its attention and its indexer.

The model is transformers' own `DeepseekV4ForCausalLM`, small and with random weights, but with the real head size (512,
of which 64 RoPE) and one layer of each kind: sliding window alone, compressed 4:1 with an indexer (C4A), and compressed
128:1 (C128A). The text is read as bytes. The model prefills its beginning and decodes the rest, in four variants:

- eager float32, FP8 rows: the yardstick. Rows are rounded as the cache rounds them, everything else is float32;
- eager bfloat16, FP8 rows: the same in bfloat16, which shows the error of bfloat16;
- eager bfloat16: without the rounding, which shows the error of FP8 rows;
- ours: the model's projections and compressors write paged caches, rows in layout V4_FP8 and the indexer's keys in
  INDEXER_FP8. `IndexerImpl` chooses rows and `DeepseekV4Impl` attends to them. Blocks are scattered over the caches,
  and every byte is NaN until it is written.

The indexer chooses compressed rows by score, and a rounding error may change the choice. So the logits are compared
twice: first all variants attend to the rows that the yardstick chose, then each to its own. The recall of an indexer is
the part of the yardstick's rows that it chooses.

    python examples/04_deepseek_v4.py [--text FILE] [--prompt 620] [--new 32] [--seed 0]

Takes 8 s on two CPU cores, and 10 s more to import torch and transformers. Ends with an error if, on the same rows,
ours is further from the yardstick than `BOUND` times eager bfloat16 with FP8 rows, or if the recall of its indexer is
less than `RECALL`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads of torch sleep; if they spin, NumPy is slower

try:
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import Progress
    from transformers import AutoModelForCausalLM, Cache, DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

    import cupy_mla
    from cupy_mla.integrations.transformers import PagedV4Cache, sparse_attention
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.[examples]'")

BOUND, RECALL = 1.25, 0.9
SWA_BLOCK, BLOCK = 64, 256  # tokens a block: of the sliding window's cache, and of the compressed ones
RATIOS = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
CONFIG = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 3, "layer_types": list(RATIOS),
    "num_attention_heads": 8, "head_dim": 512, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128,
    "sliding_window": 64, "index_n_heads": 8, "index_head_dim": 128, "index_topk": 32, "hc_mult": 2,
    # Every expert gets every token, so there is no choice that a rounding error could change.
    "mlp_layer_types": ["moe"] * 3, "moe_intermediate_size": 256, "n_routed_experts": 2, "num_experts_per_tok": 2,
    "initializer_range": 0.05,  # large enough that some rows clearly weigh more than others
}  # fmt: skip
YARDSTICK, EAGER, UNROUNDED, OURS = "eager float32, FP8 rows", "eager bfloat16, FP8 rows", "eager bfloat16", "ours"
RUNS = (YARDSTICK, EAGER, UNROUNDED, OURS)

Rows = list[torch.Tensor]  # rows that the indexer chose: [1, tokens, topk] for each call


def build(dtype: torch.dtype, device: str) -> DeepseekV4ForCausalLM:
    config = DeepseekV4Config(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").to(device).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)  # transformers starts with zeros
    return model


def paged_cache(config: DeepseekV4Config, longest: int, device: str) -> PagedV4Cache:
    """Caches of one request, filled with NaN, with twice the blocks that it needs; its blocks are anywhere in them."""
    blocks = (-(-longest // size) for size in (SWA_BLOCK, BLOCK))
    tables = [torch.randperm(2 * n)[None, :n] for n in blocks]
    cache = PagedV4Cache(config, *tables, swa_block_size=SWA_BLOCK, block_size=BLOCK, device=device)
    for layer in cache.layers:
        for part in filter(lambda part: part is not None, (layer.swa_k_cache, layer.k_cache, layer.indexer_cache)):
            part.as_strided((part.untyped_storage().nbytes(),), (1,), 0).fill_(0xFF)
    return cache


@contextmanager
def chosen_rows(model: DeepseekV4ForCausalLM, replay: Rows | None) -> Iterator[Rows]:
    """Collects the rows that the model's indexer chooses. With `replay` the model attends to those rows instead."""
    chosen: Rows = []

    def hook(_module: torch.nn.Module, _arguments: tuple, own_choice: torch.Tensor) -> torch.Tensor:
        chosen.append(own_choice)
        return own_choice if replay is None else replay[len(chosen) - 1]

    indexers = [layer.self_attn.compressor.indexer for layer in model.model.layers
                if layer.self_attn.layer_type == "compressed_sparse_attention"]  # fmt: skip
    hooks = [indexer.register_forward_hook(hook) for indexer in indexers]
    try:
        yield chosen
    finally:
        for handle in hooks:
            handle.remove()


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Latent rows, the NoPE part rounded as in a V4_FP8 cache: e4m3 with a power-of-two scale for 64 values."""
    tiles = rows[..., :448].float().unflatten(-1, (7, 64))
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    tiles = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([tiles.flatten(-2).to(rows.dtype), rows[..., 448:]], -1)


@contextmanager
def fp8_rows(model: DeepseekV4ForCausalLM) -> Iterator[None]:
    """Inside the context the model's own attention sees rounded rows, also compressed ones. RoPE is applied after."""
    attentions = [layer.self_attn for layer in model.model.layers]
    modules = attentions + [a.compressor for a in attentions if a.compressor is not None]
    hooks = [m.kv_norm.register_forward_hook(lambda _m, _a, rows: rounded(rows)) for m in modules]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


class Comparison:
    """The four variants, with the same weights."""

    def __init__(self, longest: int, device: str) -> None:
        self.model, self.yardstick = build(torch.bfloat16, device), build(torch.float32, device)
        self.yardstick.load_state_dict(self.model.state_dict())
        self.longest, self.device = longest, device

    @torch.no_grad()
    def follow(self, name: str, tokens: torch.Tensor, prompt: int, replay: Rows | None) -> tuple[torch.Tensor, Rows]:
        """Logits [tokens, vocab] of a given text, `prompt` tokens prefilled, the rest decoded; and the chosen rows."""
        model = self.yardstick if name == YARDSTICK else self.model
        cache: Cache = DynamicCache(config=model.config)
        if name == OURS:
            cache = paged_cache(model.config, self.longest, self.device)
        context = {OURS: sparse_attention, UNROUNDED: nullcontext}.get(name, fp8_rows)
        logits, at = [], 0
        with chosen_rows(model, replay) as chosen, context(model):
            for new in [prompt] + [1] * (tokens.shape[1] - prompt):
                logits.append(model(tokens[:, at : at + new], past_key_values=cache, use_cache=True).logits)
                at += new
        return torch.cat(logits, 1)[0].float(), chosen

    def all(self, tokens: torch.Tensor, prompt: int, replay: Rows | None) -> tuple[dict, dict]:
        """The logits and chosen rows of each variant."""
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


def recall(rows: Rows, wanted: Rows) -> float:
    """The part of the wanted rows that was chosen, for tokens that see more rows than they choose."""
    shared = total = seen = 0
    for mine, theirs in zip(rows, wanted, strict=True):
        for a, b in zip(mine[0].tolist(), theirs[0].tolist(), strict=True):
            seen += 1
            if seen // RATIOS["compressed_sparse_attention"] > CONFIG["index_topk"]:
                shared += len(set(a) & set(b))
                total += len(b)
    return shared / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    readme = Path(__file__).resolve().parent.parent / "README.md"
    parser.add_argument("--text", type=Path, default=readme, help="what is read (default: the README)")
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
        f"{arguments.text.name}: {prompt} bytes prefilled, {new} decoded; caches of 584 bytes a row and 132 a key"
    )
    tokens = torch.tensor([list(text)], device=device)
    comparison = Comparison(prompt + new, device)
    with Progress(console=Console(stderr=True)) as progress:
        passes = progress.add_task("forward passes", total=len(RUNS) * 2 * (1 + new))
        for model in (comparison.model, comparison.yardstick):
            model.register_forward_hook(lambda *_: progress.advance(passes))
        own, rows = comparison.all(tokens, prompt, None)
        wanted = rows[YARDSTICK]
        same, _ = comparison.all(tokens, prompt, wanted)
    print(f"\nLogits (the largest is {same[YARDSTICK].abs().max():.2f}), every run on the compressed rows "
          "that the yardstick chose")  # fmt: skip
    show_logits(same, prompt)
    print("\nLogits, every run on the rows that its own indexer chose")
    show_logits(own, prompt)
    print(
        f"\nWhere more than {CONFIG['index_topk']} rows are seen: recall of those that the yardstick chose, how far "
        f"own rows move the logits\n{'':29s}{'recall':>9s}{'logits, relative':>20s}"
    )
    found = {name: recall(rows[name], wanted) for name in RUNS[1:]}
    for name, of_run in found.items():
        print(f"  {name:27s}{of_run:9.1%}{relative(own[name], same[name]):20.2%}")

    shown = min(new, 16)
    print(f"\nTokens chosen after each of {shown} decoded bytes, on their own rows (* is not what the yardstick chose)")
    for name in RUNS:
        chosen, expected = (own[n][prompt : prompt + shown].argmax(-1).tolist() for n in (name, YARDSTICK))
        marked = (f"{a:4d}{' ' if a == b else '*'}" for a, b in zip(chosen, expected, strict=True))
        print(f"  {name:24s}{''.join(marked)}".rstrip())

    ratio = relative(same[OURS], same[YARDSTICK]) / relative(same[EAGER], same[YARDSTICK])
    agrees = ratio <= BOUND and found[OURS] >= RECALL
    print(
        f"\nOurs is {ratio:.2f} times as far from the yardstick as {EAGER} is (at most {BOUND}), its indexer's recall "
        f"{found[OURS]:.3f} (at least {RECALL}): {'agrees' if agrees else 'DISAGREES'}\n"
        f"{time.perf_counter() - started:.0f} s"
    )
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
