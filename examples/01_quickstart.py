"""Sparse MLA at DeepSeek-V3.2 sizes: decode and prefill, compared with float64 attention over the same rows.

Three requests have their tokens in one paged FP8 cache, in blocks scattered over it. Each decodes one query token,
which attends to 2048 of the request's tokens. A fourth request is a prefill of a few query tokens over flat bf16 rows.
Needs NumPy and ml_dtypes. Runs on the GPU if CuPy finds one.

    python examples/01_quickstart.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

try:
    import ml_dtypes
    import numpy as np

    import cupy_mla
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.'")

HEADS, D_QK, D_V, TOPK = 128, 576, 512, 2048
BLOCK_SIZE = 64
CONTEXTS = (3000, 5000, 4100)  # tokens of the decode requests
PROMPT, CHUNK = 4096, 4  # tokens of the prefill request, and how many of them are queries
SCALE = 192**-0.5  # as in DeepSeek-V3.2: a head has 128 + 64 values before absorption; without its yarn factor

# Largest errors allowed: each element must be within the absolute or the relative one; and the cosine difference.
BOUNDS = {"decode": (1e-3, 2.01 / 128, 5e-6), "prefill": (8e-4, 3.01 / 128, 7e-6)}

ON_GPU = cupy_mla.cuda_available()
PLACE = ("cupy", 0) if ON_GPU else ("numpy", -1)


def device(array: np.ndarray) -> Any:
    """The array on the GPU if there is one, else as it is."""
    return cupy_mla.to_cupy(array) if ON_GPU else array


def random_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def timed(call: Callable[[], tuple[Any, ...]]) -> tuple[np.ndarray, float]:
    """The first result of a call in NumPy, and its milliseconds. On the GPU a call before it compiles the kernels."""
    if ON_GPU:
        cupy_mla.to_numpy(call()[0])
    start = time.perf_counter()
    out = cupy_mla.to_numpy(call()[0])  # waits for the GPU
    return out, 1e3 * (time.perf_counter() - start)


def dense(q: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Attention of one query [heads, 576] over all of `rows` [n, 576], in float64."""
    logits = SCALE * q.astype(np.float64) @ rows.astype(np.float64).T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ rows[:, :D_V].astype(np.float64)


def decode(rng: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray, float]:
    """One decode step of three requests on a paged cache in layout V32_FP8."""
    blocks = [-(-tokens // BLOCK_SIZE) for tokens in CONTEXTS]
    block_tables = np.split(rng.permutation(sum(blocks)), np.cumsum(blocks)[:-1])
    slots = [
        cupy_mla.slots_of(table[None].astype(np.int32), np.arange(tokens)[None], BLOCK_SIZE)[0]
        for table, tokens in zip(block_tables, CONTEXTS, strict=True)
    ]

    cache = cupy_mla.empty_cache("v32_fp8", sum(blocks), BLOCK_SIZE, PLACE)
    latent, rope = random_rows(rng, sum(CONTEXTS), 512), random_rows(rng, sum(CONTEXTS), 64)
    cupy_mla.concat_and_cache_mla(device(latent), device(rope), cache, device(np.concatenate(slots)))

    # In a model the indexer chooses the tokens. Here they are random.
    chosen = np.stack([rng.choice(own, TOPK, replace=False) for own in slots])
    q, indices = random_rows(rng, len(CONTEXTS), 1, HEADS, D_QK), chosen[:, None].astype(np.int32)
    on_device = device(q), cache, device(indices)
    out, ms = timed(lambda: cupy_mla.sparse_decode(*on_device, SCALE))

    rows = [cupy_mla.to_numpy(cupy_mla.unpack_rows(cache, device(own))) for own in chosen]  # as they are cached
    want = np.stack([dense(*pair) for pair in zip(q[:, 0], rows, strict=True)])
    return f"{len(CONTEXTS)} queries x {HEADS} heads x {TOPK} FP8 rows", out[:, 0], want, ms


def prefill(rng: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray, float]:
    """The last tokens of a prompt over its bf16 rows, each attending to 2048 of those before it."""
    q, kv = random_rows(rng, CHUNK, HEADS, D_QK), random_rows(rng, PROMPT, 1, D_QK)
    positions = range(PROMPT - CHUNK, PROMPT)
    chosen = np.stack([rng.choice(position + 1, TOPK, replace=False) for position in positions])
    on_device = device(q), device(kv), device(chosen[:, None].astype(np.int32))
    out, ms = timed(lambda: cupy_mla.sparse_prefill(*on_device, SCALE))
    want = np.stack([dense(q[i], kv[own, 0]) for i, own in enumerate(chosen)])
    return f"{CHUNK} queries x {HEADS} heads x {TOPK} bf16 rows", out, want, ms


def main() -> int:
    rng = np.random.default_rng()
    backend = "CUDA" if ON_GPU else "NumPy"
    line = "{:<9} {:<38} {:>13} {:>18} {:>10}  {}"
    print(line.format("operation", "shape", "largest error", "cosine difference", "time", "backend"))
    passed = True
    for name, operation in (("decode", decode), ("prefill", prefill)):
        shape, out, want, ms = operation(rng)
        error = np.abs(out.astype(np.float64) - want)
        cosine = 1 - 2 * (out.astype(np.float64) * want).sum() / ((out.astype(np.float64) ** 2).sum() + (want**2).sum())
        absolute, relative, cosine_bound = BOUNDS[name]
        passed &= bool(((error < absolute) | (error < relative * np.abs(want))).all() and cosine < cosine_bound)
        print(line.format(name, shape, f"{error.max():.2e}", f"{cosine:.2e}", f"{ms:.1f} ms", backend))
    print("within the tolerances" if passed else "OUT OF THE TOLERANCES")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
