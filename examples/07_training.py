"""Train a small model through sparse attention, and compare it with attention of torch's own operations.

The model has two layers of Multi-head Latent Attention with absorbed weights, as in the sparse stage of DeepSeek-V3.2's
training: all heads of a token share one list of rows, and rows are keys and values at once. The task: each token equals
the token LAG places before it, so attention must find that one. Several sequences are packed into one array of rows,
and a token's list names only rows of its own sequence.

The gradients of the first step are compared. Then both models train from the same weights on the same tokens. The
gradients are deterministic: training again gives the same losses to the last digit.

Then an indexer learns where the first layer of the trained model looks, over all rows of a sequence. Its loss goes
down, and the few rows with its largest scores have more of the attention.

Needs torch. Runs on the GPU if there is one.

    python examples/07_training.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    import cupy_mla
    from cupy_mla.integrations.training import sparse_indexer_loss
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.[examples]'")

DEVICE = "cuda" if torch.cuda.is_available() and cupy_mla.cuda_available() else "cpu"
LATENT, ROPE = 512, 64  # values of a row: without RoPE, and with it
VOCABULARY, WIDTH, HEADS, LAYERS = 16, 64, 4, 2
SEQUENCES, LENGTH, LAG, TOPK = 6, 16, 2, 8
STEPS, RATE = 40, 2e-3
SCALE = (WIDTH // HEADS + ROPE) ** -0.5
CLOSE, LEFT = 0.999, 0.2  # least cosine of gradients; largest ratio of the last loss to the first
INDEX_HEADS, KEY = 4, 128  # the indexer's heads, and values of its keys
INDEX_STEPS, INDEX_RATE, CHOSEN = 60, 3e-3, 3

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def sparse(q: Tensor, kv: Tensor, lists: Tensor, scale: float) -> Tensor:
    """Attention of this package, which has a backward."""
    out, _, _ = cupy_mla.sparse_prefill(q, kv, lists, scale)
    return out


def plain(q: Tensor, kv: Tensor, lists: Tensor, scale: float) -> Tensor:
    """The same with torch's operations, in float32."""
    rows = kv[lists[:, 0].clamp(min=0).long(), 0].float()
    logits = scale * torch.einsum("ihd,ijd->ihj", q.float(), rows)
    weights = logits.masked_fill(lists < 0, -torch.inf).softmax(-1)
    return torch.einsum("ihj,ijd->ihd", weights, rows[..., :LATENT]).bfloat16()


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on the last axis, whose halves are the two coordinates."""
    angles = positions[:, None, None] * 100.0 ** -torch.linspace(0, 1, ROPE // 2, device=x.device)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Layer(nn.Module):
    """Attention over rows of LATENT + ROPE values, and a small MLP after it."""

    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.q, self.q_rope = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEADS * ROPE)
        self.row, self.row_rope = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, ROPE)
        self.absorbed = nn.Parameter(torch.randn(HEADS, each, LATENT) / math.sqrt(each))  # W_UK
        self.values = nn.Parameter(torch.randn(HEADS, LATENT, each) / math.sqrt(LATENT))  # W_UV
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.before, self.of_rows, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(LATENT), nn.LayerNorm(WIDTH)

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, HEADS, LATENT + ROPE] and rows [T, 1, LATENT + ROPE] of x [T, WIDTH]."""
        y = self.before(x)
        nope = torch.einsum("thc,hcl->thl", self.q(y).unflatten(-1, (HEADS, -1)), self.absorbed)
        rope = rotated(self.q_rope(y).unflatten(-1, (HEADS, ROPE)), positions)
        row_rope = rotated(self.row_rope(y)[:, None], positions)
        q, kv = torch.cat([nope, rope], -1), torch.cat([self.of_rows(self.row(y))[:, None], row_rope], -1)
        return q.bfloat16(), kv.bfloat16()

    def forward(self, x: Tensor, positions: Tensor, lists: Tensor, attend: Attend) -> Tensor:
        """Maps x [T, WIDTH] to the next layer's x."""
        latent = attend(*self.projected(x, positions), lists, SCALE).float()
        x = x + self.out(torch.einsum("thl,hlc->thc", latent, self.values).flatten(1))
        return x + self.mlp(self.behind(x))


class Model(nn.Module):
    """Maps token numbers to logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor, attend: Attend) -> Tensor:
        """The loss of the tokens [SEQUENCES, LENGTH] that can be predicted: all but the first LAG of a sequence."""
        x, lists = self.embedding(tokens.flatten()), packed_lists()
        for layer in self.layers:
            x = layer(x, packed_positions(), lists, attend)
        logits = self.head(x).unflatten(0, tokens.shape)[:, LAG - 1 : -1]
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, LAG:].flatten())


class Indexer(nn.Module):
    """Scores the rows of a layer for each token, with a few heads of its own. Half of a key has RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, INDEX_HEADS * KEY), nn.Linear(WIDTH, KEY)
        self.w = nn.Linear(WIDTH, INDEX_HEADS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, INDEX_HEADS, KEY], keys [T, KEY] and weights [T, INDEX_HEADS] of x [T, WIDTH]."""
        q, k = self.q(x).unflatten(-1, (INDEX_HEADS, KEY)), self.k(x)[:, None]
        q, k = (torch.cat([y[..., :-ROPE], rotated(y[..., -ROPE:], packed_positions())], -1) for y in (q, k))
        return q.bfloat16(), k[:, 0].bfloat16(), self.w(x) * (INDEX_HEADS * KEY) ** -0.5


def packed_positions() -> Tensor:
    return torch.arange(LENGTH, device=DEVICE).repeat(SEQUENCES)


def packed_lists(count: int = TOPK) -> Tensor:
    """The last `count` rows of each token's own sequence, as an indexer might choose them; -1 where there are fewer."""
    token = torch.arange(SEQUENCES * LENGTH, device=DEVICE, dtype=torch.int32)[:, None]
    rows = token - torch.arange(count, device=DEVICE, dtype=torch.int32)
    return torch.where(rows >= token - token % LENGTH, rows, -1)[:, None]


def batch(generator: torch.Generator) -> Tensor:
    """Sequences that repeat their first LAG tokens."""
    start = torch.randint(VOCABULARY, (SEQUENCES, LAG), generator=generator)
    return start.repeat(1, LENGTH // LAG + 1)[:, :LENGTH].to(DEVICE)


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().to(DEVICE)


def train(attend: Attend, steps: int) -> tuple[Model, list[float]]:
    """The model after `steps` steps, and the losses of these."""
    model, generator = model_of(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(batch(generator), attend)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train_indexer(model: Model) -> tuple[list[float], float, float]:
    """Trains an indexer. Returns the losses of its steps, and which part of the attention its CHOSEN best rows have, in
    the first step and in the last one."""
    torch.manual_seed(2)
    indexer, lists, generator = Indexer().to(DEVICE), packed_lists(LENGTH), torch.Generator().manual_seed(3)
    optimizer, losses, found = torch.optim.Adam(indexer.parameters(), INDEX_RATE), [], []
    for step in range(INDEX_STEPS):
        with torch.no_grad():  # the model stays as it is
            x = model.embedding(batch(generator).flatten())
            q, kv = model.layers[0].projected(x, packed_positions())
            _, _, lse = cupy_mla.sparse_prefill(q, kv, lists, SCALE)
        of_indexer = indexer(model.layers[0].before(x).detach())
        optimizer.zero_grad()
        loss = sparse_indexer_loss(*of_indexer, q, kv, lists, lse, SCALE)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step in (0, INDEX_STEPS - 1):
            found.append(share_of_chosen(of_indexer, cupy_mla.attention_target(q, kv, lists, lse, SCALE), lists))
    return losses, *found


def share_of_chosen(of_indexer: tuple[Tensor, Tensor, Tensor], target: Tensor, lists: Tensor) -> float:
    """The part of the attention on the CHOSEN rows with the largest scores of the indexer."""
    q, k, w = (x.detach().float() for x in of_indexer)
    keys = k[lists[:, 0].clamp(min=0).long()]
    scores = torch.einsum("ih,ihj->ij", w, torch.einsum("ihd,ijd->ihj", q, keys).relu())
    best = scores.masked_fill(lists[:, 0] < 0, -torch.inf).topk(CHOSEN).indices
    return (target.gather(1, best).sum() / target.sum()).item()


def first_gradients(attend: Attend) -> list[Tensor]:
    model = model_of()
    model.loss(batch(torch.Generator().manual_seed(1)), attend).backward()
    return [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    torch.set_num_threads(1)  # the matrix products are too small for more
    cosines = [
        functional.cosine_similarity(a, b, dim=0).item()
        for a, b in zip(first_gradients(sparse), first_gradients(plain), strict=True)
    ]
    print(f"gradients of {len(cosines)} parameters: cosine with those of torch's attention {min(cosines):.6f} or more")
    models, curves = {}, {}
    for name, attend in (("sparse_prefill", sparse), ("torch", plain)):
        start = time.perf_counter()
        models[name], curves[name] = train(attend, STEPS)
        shown = "  ".join(f"{loss:.3f}" for loss in curves[name][:: STEPS // 5])
        print(f"{name:>14}: loss {shown}  {curves[name][-1]:.3f}   {time.perf_counter() - start:.1f} s")
    _, again = train(sparse, STEPS // 5)
    print("training again gives", "the same losses" if again == curves["sparse_prefill"][: len(again)] else "others")
    if min(cosines) < CLOSE or again != curves["sparse_prefill"][: len(again)]:
        sys.exit("gradients are not what they should be")
    if any(curve[-1] > LEFT * curve[0] for curve in curves.values()):
        sys.exit("the models have not learned")
    losses, before, after = train_indexer(models["sparse_prefill"])
    shown = "  ".join(f"{loss:.3f}" for loss in losses[:: INDEX_STEPS // 5])
    print(f"{'indexer':>14}: loss {shown}  {losses[-1]:.3f}")
    print(f"the {CHOSEN} rows it scores highest have {after:.0%} of the attention, {before:.0%} before")
    if losses[-1] > LEFT * losses[0] or after < before:
        sys.exit("the indexer has not learned")


if __name__ == "__main__":
    main()
