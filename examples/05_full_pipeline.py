"""One attention layer of DeepSeek-V3.2 in a decode step, from its weights to its output, compared with dense attention.

Three requests have their tokens in two paged FP8 caches: latent rows in layout V32_FP8, the indexer's keys in layout
INDEXER_FP8. Weights and hidden states are random. Weights have the names and axes of the checkpoint. A step:

    1. hidden states -> latent rows, RoPE parts and indexer keys, packed into the caches
    2. hidden states -> queries, absorbed into the latent space (absorb_q)
    3. the indexer scores every token of a request (quantize_indexer_q), and selects the slots of those with the
       largest scores (select_rows_paged)
    4. sparse_decode over these slots
    5. v_up_proj: latent output -> values, and o_proj

The result is compared with the attention that the model defines, in float64 and over the same chosen tokens: keys and
values are expanded for every head, and nothing is absorbed. This is done twice:

- with latent rows as they were computed. The relative distance is about 0.03, because e4m3 has 3 bits of mantissa: a
  stored value is off by up to 1/16 of itself, and by 0.026 on average (root mean square). A weighted mean of many
  values has the same relative error, because errors and values shrink alike;
- with latent rows as the cache holds them. The distance is then that of bfloat16.

The indexer scores e4m3 queries and keys. Its recall is the part of the tokens with the largest float scores that it
selects.

Needs NumPy and ml_dtypes. Runs on the GPU if CuPy finds one (with nvidia-cublas-cu12, for matrix products).

    python examples/05_full_pipeline.py
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import ml_dtypes
    import numpy as np

    import cupy_mla
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.'")

BF16 = ml_dtypes.bfloat16
HIDDEN, Q_LORA = 1024, 384  # the model: 7168, 1536
HEADS, INDEX_HEADS, TOPK = 16, 16, 128  # the model: 128, 64, 2048
LATENT, ROPE, NOPE, V, INDEX = 512, 64, 128, 128, 128  # the model's
SCALE = (NOPE + ROPE) ** -0.5  # the model's, without the square of its yarn factor
BLOCK_SIZE = 64
CONTEXTS = np.array([300, 650, 411])  # tokens of each request, with the one that is decoded
FP8_BOUND, STORED_BOUND, RECALL = 0.04, 0.008, 0.9

ON_GPU = cupy_mla.cuda_available()
PLACE = ("cupy", 0) if ON_GPU else ("numpy", -1)

# nn.Linear weights, [out, in].
SHAPES = {
    "q_a_proj": (Q_LORA, HIDDEN),
    "q_b_proj": (HEADS * (NOPE + ROPE), Q_LORA),
    "kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
    "kv_b_proj": (HEADS * (NOPE + V), LATENT),
    "o_proj": (HIDDEN, HEADS * V),
    "indexer.wq_b": (INDEX_HEADS * INDEX, Q_LORA),
    "indexer.wk": (INDEX, HIDDEN),
    "indexer.weights_proj": (INDEX_HEADS, HIDDEN),
}


def device(array: np.ndarray) -> Any:
    """The array on the GPU if there is one, else as it is."""
    return cupy_mla.to_cupy(array) if ON_GPU else array


def rms_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def layer_norm(x: np.ndarray) -> np.ndarray:
    return rms_norm(x - x.mean(-1, keepdims=True))


def cos_sin(positions: np.ndarray) -> np.ndarray:
    """32 cosines and 32 sines of each position, [T, 64]."""
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def rope(x: np.ndarray, positions: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotates pairs of x [T, ..., 64]: neighbours (interleaved, in attention), or i and i + 32 (in the indexer)."""
    cos, sin = np.split(cos_sin(positions).reshape(len(x), *[1] * (x.ndim - 2), ROPE), 2, -1)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : ROPE // 2], x[..., ROPE // 2 :])
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


class Layer:
    """Projections of one layer, in float32 on the host. Their results are rounded to bfloat16."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.weights = {name: rng.normal(0, s[1] ** -0.5, s).astype(np.float32) for name, s in SHAPES.items()}
        kv_b_proj = self.weights["kv_b_proj"].astype(BF16)
        self.w_uk, self.w_uv = cupy_mla.split_kv_b_proj(device(kv_b_proj.T), HEADS, NOPE)

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[name].T

    def rows(self, hidden: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is cached for each token: latent row [T, 512], RoPE part [T, 64], indexer key [T, 128]."""
        latent, k_pe = np.split(self.project("kv_a_proj_with_mqa", hidden), [LATENT], axis=-1)
        key = layer_norm(self.project("indexer.wk", hidden))
        key[:, :ROPE] = rope(key[:, :ROPE], positions, interleaved=False)
        return rms_norm(latent).astype(BF16), rope(k_pe, positions, interleaved=True).astype(BF16), key.astype(BF16)

    def queries(self, hidden: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """q_nope [T, h, 128], q_pe [T, h, 64], the indexer's queries [T, H, 128] before RoPE, weights [T, H]."""
        latent = rms_norm(self.project("q_a_proj", hidden))
        q = self.project("q_b_proj", latent).reshape(-1, HEADS, NOPE + ROPE)
        q_pe = rope(q[..., NOPE:], positions, interleaved=True)
        index_q = self.project("indexer.wq_b", latent).reshape(-1, INDEX_HEADS, INDEX)
        weights = self.project("indexer.weights_proj", hidden)
        return q[..., :NOPE].astype(BF16), q_pe.astype(BF16), index_q.astype(BF16), weights


class Caches:
    """Both caches of a layer, and the blocks of each request, which are scattered over them."""

    def __init__(self, rng: np.random.Generator) -> None:
        blocks = -(-CONTEXTS // BLOCK_SIZE)
        self.block_table = np.zeros((len(CONTEXTS), blocks.max()), np.int32)
        order = iter(rng.permutation(blocks.sum()))
        for row, count in zip(self.block_table, blocks, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        self.rows, self.keys = (
            cupy_mla.empty_cache(layout, blocks.sum(), BLOCK_SIZE, PLACE) for layout in ("v32_fp8", "indexer_fp8")
        )

    def write(self, request: int, positions: np.ndarray, latent: Any, k_pe: Any, key: Any) -> None:
        slots = device(cupy_mla.slots_of(self.block_table[[request]], positions[None], BLOCK_SIZE)[0])
        cupy_mla.concat_and_cache_mla(device(latent), device(k_pe), self.rows, slots)
        cupy_mla.indexer_k_quant_and_cache(device(key), self.keys, slots)

    def gather(self) -> np.ndarray:
        """The cached rows [tokens, 576] of all requests."""
        starts = np.concatenate([[0], np.cumsum(CONTEXTS)]).astype(np.int32)
        table = device(self.block_table)
        rows = device(np.zeros((starts[-1], LATENT + ROPE), BF16))
        lengths = device(CONTEXTS.astype(np.int32))
        cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(self.rows, rows, table, lengths, device(starts[:-1]))
        return cupy_mla.to_numpy(rows)

    def choose(self, index_q: np.ndarray, weights: np.ndarray) -> tuple[Any, np.ndarray]:
        """Slots [T, topk] that the last token of each request attends to, and their positions."""
        longest = int(CONTEXTS.max())
        angles = device(cos_sin(np.arange(longest)))
        q8, w = cupy_mla.quantize_indexer_q(
            device(index_q), device(weights), positions=device(CONTEXTS - 1), cos_sin_cache=angles
        )
        asked = q8[:, None], self.keys, w, device(CONTEXTS.astype(np.int32)), device(self.block_table), longest, TOPK
        slots, positions = (cupy_mla.select_rows_paged(*asked, slots=slots) for slots in (True, False))
        return slots, cupy_mla.to_numpy(positions)


def best(query: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The topk positions that the model itself would select, from a rotated query [H, 128] and keys [n, 128]."""
    scores = np.maximum(keys.astype(np.float64) @ query.astype(np.float64).T, 0) @ weights
    return np.argsort(-scores, kind="stable")[:TOPK]


def dense(q_nope: Any, q_pe: Any, rows: np.ndarray, w_uk: np.ndarray, w_uv: np.ndarray) -> np.ndarray:
    """Attention of one query over the rows [n, 576] of its tokens, as the model defines it, in float64: [h, 128]."""
    latent, k_pe = np.split(rows.astype(np.float64), [LATENT], axis=-1)
    keys, values = (np.einsum("nl,lhd->hnd", latent, w.astype(np.float64)) for w in (w_uk, w_uv))
    logits = np.einsum("hd,hnd->hn", q_nope.astype(np.float64), keys) + q_pe.astype(np.float64) @ k_pe.T
    weights = np.exp(SCALE * (logits - logits.max(1, keepdims=True)))
    return np.einsum("hn,hnd->hd", weights / weights.sum(1, keepdims=True), values)


def main() -> int:
    rng = np.random.default_rng()
    layer, caches = Layer(rng), Caches(rng)
    hidden = [rng.standard_normal((tokens, HIDDEN), np.float32) for tokens in CONTEXTS]

    # 1. Pack all tokens into the caches. In a server, earlier steps have packed all but the last token.
    computed, keys = [], []
    for request, x in enumerate(hidden):
        positions = np.arange(len(x))
        latent, k_pe, key = layer.rows(x, positions)
        caches.write(request, positions, latent, k_pe, key)
        computed.append(np.concatenate([latent, k_pe], -1))
        keys.append(key)

    # 2. The last token of each request is the query.
    q_nope, q_pe, index_q, index_weights = layer.queries(np.stack([x[-1] for x in hidden]), CONTEXTS - 1)
    q = device(np.zeros((len(CONTEXTS), HEADS, LATENT + ROPE), BF16))
    cupy_mla.concat_mla_q(cupy_mla.absorb_q(device(q_nope), layer.w_uk), device(q_pe), q)

    # 3. The indexer selects slots. Dense attention, for the comparison, needs their positions.
    slots, chosen = caches.choose(index_q, index_weights)

    # 4. and 5. Attention in the latent space, then values, then the output projection.
    latent_out, _ = cupy_mla.sparse_decode(q[:, None], caches.rows, slots[:, None], sm_scale=SCALE)
    values = cupy_mla.to_numpy(cupy_mla.v_up_proj(latent_out[:, 0], layer.w_uv)).astype(np.float32)
    out = layer.project("o_proj", values.reshape(len(CONTEXTS), -1))

    print(f"{len(CONTEXTS)} requests of {', '.join(map(str, CONTEXTS))} tokens, random weights, {HEADS} heads")
    print(f"each attends to {TOPK} tokens, on {'the GPU' if ON_GPU else 'the CPU (NumPy)'}")
    w_uk, w_uv = (cupy_mla.to_numpy(w) for w in (layer.w_uk, layer.w_uv))
    passed = True
    as_stored = np.split(caches.gather(), np.cumsum(CONTEXTS)[:-1])
    for name, rows, bound in (("computed", computed, FP8_BOUND), ("the FP8 cache holds them", as_stored, STORED_BOUND)):
        want = [dense(*query, r[c], w_uk, w_uv) for *query, r, c in zip(q_nope, q_pe, rows, chosen, strict=True)]
        want_out = layer.project("o_proj", np.reshape(want, (len(CONTEXTS), -1)))
        error = np.linalg.norm(out - want_out) / np.linalg.norm(want_out)
        passed &= bool(error < bound)
        print(f"relative distance to dense attention over rows as {name}: {error:.4f} (at most {bound})")
    index_q = np.concatenate([rope(index_q[..., :ROPE], CONTEXTS - 1, interleaved=False), index_q[..., ROPE:]], -1)
    wanted = [best(*of_request) for of_request in zip(index_q, index_weights, keys, strict=True)]
    recall = np.mean([np.isin(own, rows).mean() for own, rows in zip(wanted, chosen, strict=True)])
    passed &= bool(recall >= RECALL)
    print(f"the indexer chose {recall:.1%} of the tokens with the largest float scores (at least {RECALL:.0%})")
    print("within the bounds" if passed else "OUT OF THE BOUNDS")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
