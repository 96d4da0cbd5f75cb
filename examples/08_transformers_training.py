"""Fine-tune transformers' DeepSeek-V3.2, GLM-5 and DeepSeek-V4 through sparse attention, compared with eager attention.

Small models of each kind with random weights memorize four lines, byte by byte. This package computes the attention,
its backward and the indexers' loss. While the model learns, its indexers learn where the attention looks. For
comparison, the same models train with transformers' own attention in float32, from the same weights, on the same tokens
and over the same rows. Transformers' own indexers do not learn, so those models replay the rows that ours chose.

At first the attention is nearly even, and so is what an indexer predicts. As the model learns, the attention becomes
uneven faster than the indexers follow, so their loss may rise. At the end they train a few steps alone, and it falls.

The example prints both losses, the indexers' loss, and the distance of the first gradients from those of eager
attention.

Needs torch and transformers. Runs on the GPU if there is one.

    python examples/08_transformers_training.py
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable

try:
    import torch
    from torch import Tensor, nn
    from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV32Config, GlmMoeDsaConfig

    import cupy_mla
    from cupy_mla.integrations.transformers import recorded_rows, sparse_attention
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.[examples]'")

DEVICE = "cuda" if torch.cuda.is_available() and cupy_mla.cuda_available() else "cpu"
LINES = """
Each token looks at a few rows of many,
an indexer says which of them they are.
What it should say, it learns by looking
at where the heads of a token looked at."""
LENGTH, TOPK = 36, 8
STEPS, RATE, INDEXER_LOSS = 21, 2e-3, 1.0
FIXED_STEPS = 5  # of the indexers alone
FAR, LEFT = 0.02, 0.25  # largest ||ours - eager|| / ||eager|| of gradients; largest ratio of the last loss to the first

SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "index_topk": TOPK,
    "initializer_range": 0.05,
}  # fmt: skip
CONFIGS = {
    "DeepSeek-V3.2": DeepseekV32Config(**SIZES, num_hidden_layers=2, index_n_heads=8, first_k_dense_replace=2),
    "GLM-5": GlmMoeDsaConfig(
        **SIZES, num_hidden_layers=2, index_n_heads=8, first_k_dense_replace=2, indexer_types=["full", "shared"]
    ),
    "DeepSeek-V4": DeepseekV4Config(
        vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=512,
        layer_types=["compressed_sparse_attention", "sliding_attention"], q_lora_rank=64, o_groups=2, o_lora_rank=64,
        sliding_window=8, index_n_heads=8, index_head_dim=128, index_topk=TOPK // 4, hc_mult=2,
        mlp_layer_types=["moe"] * 2, moe_intermediate_size=64, n_routed_experts=2, num_experts_per_tok=2,
        initializer_range=0.05,
    ),
}  # fmt: skip


class Replay:
    """Makes the indexers of a model with eager attention choose the rows in `rows`, by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: dict[int, Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            indexer = getattr(getattr(attention, "compressor", attention), "indexer", None)
            if indexer is not None:
                indexer.register_forward_hook(self.hook(number))

    def hook(self, layer: int) -> Callable[..., Tensor]:
        def chosen(_module: nn.Module, arguments: tuple, own: Tensor) -> Tensor:
            rows = self.rows[layer]
            if (own < 0).any():  # V4: -1 is no row there, too
                return rows.to(own.dtype)
            last = rows.new_full((), LENGTH - 1)  # the causal mask hides the last row, so it stands for no row
            return rows.where(rows >= 0, last).to(own.dtype)

        return chosen


def tokens_of_lines() -> Tensor:
    """The first bytes of each line, [lines, LENGTH]."""
    return torch.tensor([list(line.encode()[:LENGTH]) for line in LINES.strip().splitlines()], device=DEVICE)


def gradients(model: nn.Module) -> Tensor:
    """The gradients of all parameters except the indexers', in one vector."""
    return torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "indexer" not in n])


def indexers_alone(model: nn.Module, tokens: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Trains the indexers a few steps more, with all other weights fixed. Returns the last step's loss of theirs."""
    for name, weight in model.named_parameters():
        weight.requires_grad_("indexer" in name)
    for _ in range(FIXED_STEPS):
        optimizer.zero_grad()  # fixed weights have no gradient, so the optimizer leaves them as they are
        with sparse_attention(model, indexer_loss=INDEXER_LOSS):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    return float(sum(model.indexer_losses.values()))


def train(name: str) -> str | None:
    """Trains a model and its eager twin. Returns what is wrong, if anything is."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation="eager")
    model = model.to(DEVICE).train()
    eager = copy.deepcopy(model)
    replay, tokens = Replay(eager), tokens_of_lines()
    optimizers = [torch.optim.AdamW(m.parameters(), RATE, weight_decay=0.0) for m in (model, eager)]
    curves: dict[str, list[float]] = {"sparse": [], "eager": [], "indexers": []}
    took, far = {"sparse": 0.0, "eager": 0.0}, None
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        start = time.perf_counter()
        with sparse_attention(model, indexer_loss=INDEXER_LOSS), recorded_rows(model) as replay.rows:
            loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        middle = time.perf_counter()
        eager_loss = eager(tokens, labels=tokens, use_cache=False).loss
        eager_loss.backward()
        took["sparse"] += middle - start
        took["eager"] += time.perf_counter() - middle
        if far is None:
            far = float((gradients(model) - gradients(eager)).norm() / gradients(eager).norm())
        for optimizer in optimizers:
            optimizer.step()
        curves["sparse"].append(loss.item())
        curves["eager"].append(eager_loss.item())
        curves["indexers"].append(float(sum(model.indexer_losses.values())))
    print(f"{name}: gradients differ by {far:.2%} of their norm (at most {FAR:.0%})")
    for kind, curve in curves.items():
        shown = "  ".join(f"{loss:.3f}" for loss in curve[:: STEPS // 4])
        print(f"  {kind:>8}: loss {shown}" + (f"   {took[kind]:.1f} s" if kind in took else ""))
    fixed = indexers_alone(model, tokens, optimizers[0])
    print(f"  The attention that indexers learn from changes meanwhile. With all other weights fixed: loss {fixed:.3f}")
    if far > FAR:
        return f"{name}: gradients are not those of eager attention"
    if any(curves[kind][-1] > LEFT * curves[kind][0] for kind in ("sparse", "eager")):
        return f"{name}: the loss has not gone down"
    if fixed >= curves["indexers"][-1]:
        return f"{name}: the indexers' loss does not go down where the attention stays as it is"
    return None


def main() -> None:
    torch.set_num_threads(1)  # the matrix products are too small for more
    wrong = [said for said in map(train, CONFIGS) if said]
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
