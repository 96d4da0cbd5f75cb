"""DeepSeek-V3.2 of Hugging Face transformers on a real text; this package replaces its attention and its indexer.

The model is transformers' own `DeepseekV32ForCausalLM`, small and with random weights but with the real sizes of MLA
(latent 512, RoPE 64, keys and values of 128 a head). The text is read as bytes, so no tokenizer is needed. The model
prefills the beginning of the text and decodes the rest, in four variants:

- eager attention in float32: the yardstick;
- eager attention in bfloat16: the error of bfloat16 alone;
- ours with a paged bf16 cache, and ours with a paged FP8 cache. Both absorb weights, scatter blocks over the cache and
  read only the chosen rows. The indexer's queries and keys are FP8, and its keys are in a paged cache.

The indexer chooses rows by score. With random weights many scores are nearly equal, so a rounding error may change the
choice. So everything runs twice. First, all variants attend to the rows that the float32 model chose, which shows the
error of the attention alone. Then each attends to the rows that its own indexer chooses, as in real use. In both runs
the recall of an indexer is the part of the float32 model's rows that it chooses. In the first run it shows the
indexer's own error, in the second also that of the hidden states.

    python examples/02_transformers_deepseek_v32.py [--text FILE] [--prompt 768] [--new 16] [--seed 0]

Takes 12 s on two CPU cores, and 12 s more to import torch and transformers. Ends with an error if, on the same rows,
ours with the bf16 cache is further from float32 than `BOUND` times eager bfloat16, or if the recall of its indexer is
less than `RECALL`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads of torch sleep; if they spin, NumPy is slower

try:
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import Progress
    from transformers import AutoModelForCausalLM, Cache, DeepseekV32Config, DeepseekV32ForCausalLM

    import cupy_mla
    from cupy_mla.integrations.transformers import PagedLatentCache, sparse_attention
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.[examples]'")

BOUND, RECALL = 1.25, 0.9
BLOCK_SIZE = 64
CONFIG = {
    "vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 3, "first_k_dense_replace": 3,
    "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "index_n_heads": 8, "index_topk": 64,
    "initializer_range": 0.05,  # large enough that some rows clearly weigh more than others
}  # fmt: skip
YARDSTICK = "eager float32"
EAGER = "eager bfloat16"
OURS = {"ours, bf16 cache": "bf16", "ours, FP8 cache": "v32_fp8"}
RUNS = (YARDSTICK, EAGER, *OURS)

Rows = list[torch.Tensor]  # rows that the indexers chose: [1, tokens, topk] for each layer and call


def build(dtype: torch.dtype, device: str) -> DeepseekV32ForCausalLM:
    config = DeepseekV32Config(**CONFIG)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").to(device).eval()


@contextmanager
def chosen_rows(model: DeepseekV32ForCausalLM, replay: Rows | None = None) -> Iterator[Rows]:
    """Collects the rows that the model's indexers choose. With `replay` the model attends to those rows instead."""
    chosen: Rows = []

    def hook(_module: torch.nn.Module, _arguments: tuple, own_choice: torch.Tensor) -> torch.Tensor:
        chosen.append(own_choice)
        return own_choice if replay is None else replay[len(chosen) - 1]

    hooks = [layer.self_attn.indexer.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield chosen
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def follow(model: DeepseekV32ForCausalLM, tokens: torch.Tensor, prompt: int, cache: Cache | None) -> torch.Tensor:
    """Logits [tokens, vocab] of a given text: `prompt` tokens are prefilled, the rest are decoded one by one."""
    result = model(tokens[:, :prompt], past_key_values=cache, use_cache=True)
    logits = [result.logits]
    for i in range(prompt, tokens.shape[1]):
        result = model(tokens[:, i : i + 1], past_key_values=result.past_key_values, use_cache=True)
        logits.append(result.logits)
    return torch.cat(logits, 1)[0].float()


@torch.no_grad()
def generate(model: DeepseekV32ForCausalLM, prompt: torch.Tensor, new: int, cache: Cache | None) -> torch.Tensor:
    """`new` tokens that the model generates, always the likeliest."""
    result = model(prompt, past_key_values=cache, use_cache=True)
    tokens = [result.logits[:, -1:].argmax(-1)]
    while len(tokens) < new:
        result = model(tokens[-1], past_key_values=result.past_key_values, use_cache=True)
        tokens.append(result.logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)[0]


def relative(logits: torch.Tensor, to: torch.Tensor) -> float:
    return float((logits - to).norm() / to.norm())


def show_logits(logits: dict[str, torch.Tensor], prompt: int) -> None:
    columns = f"{'largest':>9s}{'relative':>11s}{'same token':>13s}  "
    print(f"{'':27s}{'difference from ' + YARDSTICK:^35s}{'difference from ' + EAGER:^35s}".rstrip())
    print(f"{'':27s}{columns}{columns}".rstrip())
    for part, span in (("prefill", slice(prompt)), ("decode", slice(prompt, None))):
        for name in RUNS[1:]:
            line = f"  {part:7s}  {name:16s}"
            for other in (YARDSTICK, EAGER) if name != EAGER else (YARDSTICK,):
                got, want = logits[name][span], logits[other][span]
                same = (got.argmax(-1) == want.argmax(-1)).float().mean()
                line += f"{(got - want).abs().max():9.4f}{relative(got, want):11.2%}{same:13.1%}  "
            print(line.rstrip())


def show_tokens(tokens: dict[str, torch.Tensor]) -> None:
    for name in RUNS:
        marks = ("*" if differs else " " for differs in (tokens[name] != tokens[EAGER]).tolist())
        line = "".join(f"{t:4d}{mark}" for t, mark in zip(tokens[name].tolist(), marks, strict=True))
        print(f"  {name:16s}{line}".rstrip())


def recall(rows: Rows, wanted: Rows) -> float:
    """The part of the wanted rows that was chosen, for tokens that see more rows than they choose."""
    shared = total = end = 0
    for i, (mine, theirs) in enumerate(zip(rows, wanted, strict=True)):
        queries, topk = theirs.shape[1:]
        end += queries if i % CONFIG["num_hidden_layers"] == 0 else 0
        last = torch.arange(end - queries, end, device=theirs.device)[:, None]  # the last row that each token sees
        a, b = (
            torch.zeros(queries, end + 1, device=r.device).scatter_(1, r[0].long().where(r[0] >= 0, end), 1)
            for r in (mine, theirs)
        )
        counted = (torch.arange(end + 1, device=theirs.device) <= last) & (last >= topk)
        shared += int((a * b * counted).sum())
        total += int((b * counted).sum())
    return shared / total


class Comparison:
    """The four variants: the same weights in bfloat16 and float32, eager or with this package's attention."""

    def __init__(self, prompt: int, new: int, device: str) -> None:
        self.model, self.yardstick = build(torch.bfloat16, device), build(torch.float32, device)
        self.yardstick.load_state_dict(self.model.state_dict())
        # The cache has twice the blocks that the request needs, and the request's blocks are anywhere in it.
        blocks = -(-(prompt + new) // BLOCK_SIZE)
        self.block_table = torch.randperm(2 * blocks)[:blocks].view(1, -1).to(device)

    @contextmanager
    def run(self, name: str) -> Iterator[tuple[DeepseekV32ForCausalLM, Cache | None]]:
        """The model and the empty cache of one variant (None: transformers makes its own)."""
        if name not in OURS:
            yield self.yardstick if name == YARDSTICK else self.model, None
            return
        with sparse_attention(self.model):
            yield (
                self.model,
                PagedLatentCache(self.model.config, self.block_table, block_size=BLOCK_SIZE, layout=OURS[name]),
            )

    def follow(self, tokens: torch.Tensor, prompt: int, replay: Rows | None) -> tuple[dict, dict]:
        """The logits of each variant for the given text, and the rows it chose."""
        logits, chosen = {}, {}
        for name in RUNS:
            with self.run(name) as (model, cache), chosen_rows(model, replay) as chosen[name]:
                logits[name] = follow(model, tokens, prompt, cache)
        return logits, chosen

    def generate(self, prompt: torch.Tensor, new: int) -> dict[str, torch.Tensor]:
        """The tokens that each variant generates."""
        tokens = {}
        for name in RUNS:
            with self.run(name) as (model, cache):
                tokens[name] = generate(model, prompt, new, cache)
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    readme = Path(__file__).resolve().parent.parent / "README.md"
    parser.add_argument("--text", type=Path, default=readme, help="what is read (default: the README)")
    parser.add_argument("--prompt", type=int, default=768, help="bytes of the text that are prefilled")
    parser.add_argument("--new", type=int, default=16, help="tokens that are decoded")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the cache's blocks")
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
        f"DeepseekV32ForCausalLM of {CONFIG['num_hidden_layers']} layers, {CONFIG['num_attention_heads']} heads, "
        f"latent 512 + RoPE 64, {CONFIG['index_topk']} rows a token; random weights, seed {arguments.seed}\n"
        f"{arguments.text.name}: {prompt} bytes prefilled, {new} decoded; blocks of {BLOCK_SIZE} tokens in random order"
    )

    tokens = torch.tensor([list(text)], device=device)
    comparison = Comparison(prompt, new, device)
    shown = min(new, 16)
    with Progress(console=Console(stderr=True)) as progress:
        passes = progress.add_task("forward passes", total=len(RUNS) * (2 * (1 + new) + shown))
        for model in (comparison.model, comparison.yardstick):
            model.register_forward_hook(lambda *_: progress.advance(passes))
        own, rows = comparison.follow(tokens, prompt, None)
        wanted = rows[YARDSTICK]
        same, rows_of_same = comparison.follow(tokens, prompt, wanted)
        alone = comparison.generate(tokens[:, :prompt], shown)
    print(f"\nLogits (the largest is {same[YARDSTICK].abs().max():.2f}), every run on the rows that {YARDSTICK} chose")
    show_logits(same, prompt)
    print("\nLogits, every run on the rows that its own indexer chose")
    show_logits(own, prompt)
    print(
        f"\nWhere more than {CONFIG['index_topk']} rows are seen: recall of those that {YARDSTICK} chose, how far own "
        f"rows move the logits\n{'':21s}{'on its hidden states':>22s}{'on own':>10s}{'logits, relative':>20s}"
    )
    found = {name: [recall(r[name], wanted) for r in (rows_of_same, rows)] for name in RUNS[1:]}
    for name, (alone_recall, own_recall) in found.items():
        print(f"  {name:19s}{alone_recall:22.1%}{own_recall:10.1%}{relative(own[name], same[name]):20.2%}")

    print(f"\nTokens chosen after each of {shown} bytes of the text (* is not what {EAGER} chose)")
    show_tokens({name: own[name][prompt : prompt + shown].argmax(-1) for name in RUNS})
    print(f"\nTokens chosen going on alone after the prompt (* is not what {EAGER} chose)")
    show_tokens(alone)

    bf16 = next(iter(OURS))
    ratio = relative(same[bf16], same[YARDSTICK]) / relative(same[EAGER], same[YARDSTICK])
    agrees = ratio <= BOUND and found[bf16][0] >= RECALL
    print(
        f"\nOurs with the bf16 cache is {ratio:.2f} times as far from {YARDSTICK} as {EAGER} is on the same rows "
        f"(at most {BOUND}), its indexer's recall {found[bf16][0]:.3f} (at least {RECALL}): "
        f"{'agrees' if agrees else 'DISAGREES'}\n{time.perf_counter() - started:.0f} s"
    )
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
