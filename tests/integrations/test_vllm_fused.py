"""Norms, RoPE, quantization and cache writes of the vLLM plug-in for GPUs below 8.9, against float64.

`wheel_vllm` compares their bytes with those of the wheel's own kernels.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import unpack_rows  # noqa: E402
from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests.integrations.stub_vllm import loaded  # noqa: E402

T, BLOCK_SIZE, POSITIONS, K, EPS = 13, 16, 50, 24, 1e-6
LAYERS = "vllm.models.deepseek_v32.attention"


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    importlib.import_module(LAYERS)
    return importlib.import_module(f"{plugin.__name__}.sparse_mla")


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """The process has such a GPU."""
    gpu = None if capability is None else SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(loaded("vllm.platforms").current_platform, "get_device_capability", lambda: gpu)


def layer_of(adapter: ModuleType, **op: Any) -> Any:
    lists = torch.zeros(1, K, dtype=torch.int32)
    indexer = loaded(LAYERS).DeepseekV32Indexer("layer.indexer", lists, **op)
    return adapter.CupyMLASparseImpl(0.1, "auto", 64, lists, indexer=indexer)


@pytest.mark.parametrize(
    ("capability", "ours"),
    [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((12, 0), False), (None, False)],
    ids=str,
)
def test_gpus_below_8_9_get_ours(adapter, monkeypatch, capability, ours: bool) -> None:
    """And vLLM compiles nothing of e4m3 before the first request there."""
    on(monkeypatch, capability)
    layer_of(adapter)
    layers, kernels = loaded(LAYERS), loaded("vllm.models.deepseek_v32.common.kernels")
    assert layers.sparse_attn_indexer is adapter.indexer.sparse_attn_indexer
    assert (layers.fused_norm_rope is not kernels.fused_norm_rope) == ours
    assert (layers.fused_q is not kernels.fused_q) == ours
    keys = loaded("vllm.v1.attention.ops.common")._PACK_SEQ_TRITON_KERNEL.get_warmup_keys(dtype=None, pad_value=0)
    assert (keys == []) == ours


@pytest.mark.parametrize(
    ("op", "why"),
    [({"use_pcp": True}, "context parallelism"), ({"dcp_world_size": 2}, "context parallelism"),
     ({"use_fp4_cache": True}, "FP4"), ({"candidate_blocks": 3}, "candidate blocks")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("capability", [(8, 0), (8, 9)], ids=str)
def test_without_deep_gemm_an_indexer_of_vllms_is_refused(adapter, monkeypatch, capability, op, why: str) -> None:
    on(monkeypatch, capability)
    with pytest.raises(NotImplementedError, match=rf"DeepGEMM.* capability 8\.\d; .*{why}"):
        layer_of(adapter, **op)


def test_without_deep_gemm_an_indexer_of_another_model_is_refused(adapter, monkeypatch) -> None:
    on(monkeypatch, (8, 0))
    with pytest.raises(NotImplementedError, match=r"layers other than DeepSeek-V3\.2's"):
        adapter.CupyMLASparseImpl(0.1, "auto", 64, torch.zeros(1, K, dtype=torch.int32), indexer=SimpleNamespace())
    adapter.CupyMLASparseImpl(0.1, "auto", 64, torch.zeros(1, K, dtype=torch.int32))  # takes another layer's choice


def turned(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """The first 64 values of x [T, ..., d], by cosines and sines [T, 64]."""
    out = x.copy()
    for t, row in enumerate(angles):
        for i in range(32):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 32)
            out[t, ..., a] = x[t, ..., a] * row[i] - x[t, ..., b] * row[32 + i]
            out[t, ..., b] = x[t, ..., b] * row[i] + x[t, ..., a] * row[32 + i]
    return out


class Step:
    """Arguments of a layer's step, and what float64 makes of them."""

    def __init__(self, rng: np.random.Generator, interleaved: bool) -> None:
        def of(*shape: int, size: float = 1) -> torch.Tensor:
            return torch.tensor(rng.standard_normal(shape) * size, dtype=torch.bfloat16)

        self.positions = torch.tensor(rng.integers(0, POSITIONS, T))
        angle = rng.uniform(0, 6, (POSITIONS, 32))
        self.cos_sin = torch.tensor(np.concatenate([np.cos(angle), np.sin(angle)], 1), dtype=torch.float32)
        projected = of(T, 40 + 512 + 64)
        self.q_c, self.kv_c, self.k_pe = projected.split([40, 512, 64], -1)
        self.key = of(T, 128 + 8)[:, :128]
        self.weights = of(40), of(512), of(128).float(), of(128).float()
        self.interleaved = interleaved
        angles = self.cos_sin[self.positions].double().numpy()
        q, kv, rope, key, *weights = (
            x.double().numpy() for x in (self.q_c, self.kv_c, self.k_pe, self.key, *self.weights)
        )
        norm = [x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w for x, w in ((q, weights[0]), (kv, weights[1]))]
        self.q, self.latent = norm
        self.rope = turned(rope, angles, True)
        centred = key - key.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS) * weights[2] + weights[3]
        self.keys = turned(normed, angles, interleaved)

    def run(self, fused: Any, slots: torch.Tensor, cache: Any, keys: Any, lists: torch.Tensor, **more: Any) -> Any:
        return fused.fused_norm_rope(
            self.positions, self.q_c, self.weights[0], EPS, self.kv_c, self.weights[1], EPS, self.k_pe, self.cos_sin,
            self.key, self.weights[2], self.weights[3], EPS, self.cos_sin, lists, slot_mapping=slots,
            indexer_k_cache=keys, mla_kv_cache=cache, index_rope_interleave=self.interleaved, mla_k_scale=None,
            **more,
        )  # fmt: skip


def filled(rng: np.random.Generator, blocks: int, width: int, gap: int) -> torch.Tensor:
    """A cache of random bytes, with a gap between its blocks."""
    whole = torch.tensor(rng.integers(0, 120, (blocks, BLOCK_SIZE * width + gap), dtype=np.uint8))
    return whole[:, : BLOCK_SIZE * width].view(blocks, BLOCK_SIZE, width)


def close(got: Any, want: np.ndarray, digits: int) -> bool:
    """Within half a step of numbers of so many digits, and of the least number of a scale."""
    error = np.abs(np.asarray(got, np.float64) - want)
    return bool((error <= np.abs(want) * 2.0**-digits + np.abs(want).max(-1, keepdims=True) * 2.0**-17).all())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("skipped", ["some", "the first", "all", "none"])
def test_norm_rope(adapter, rng, fp8: bool, interleaved: bool, skipped: str) -> None:
    step, fused = Step(rng, interleaved), importlib.import_module(f"{plugin.__name__}.fused")
    cache = filled(rng, 3, 656, 32) if fp8 else filled(rng, 3, 1152, 64).view(torch.bfloat16)
    keys = filled(rng, 3, 132, 12)
    before = cache.clone(), keys.clone()
    slots = torch.tensor(rng.permutation(3 * BLOCK_SIZE)[: T + 2])
    if skipped == "the first":  # and one behind the token that goes to the cache's first row
        slots = torch.cat([slots[slots > 0].new_tensor([-1, 0, -1]), slots[slots > 0][: T - 1]])
    elif skipped != "none":
        of = {"some": rng.permutation(T)[:5], "all": range(T + 2)}[skipped]
        slots[list(of)] = -1
    lists, outs = torch.full((T + 1, K), 7, dtype=torch.int32), [torch.zeros(T, n).bfloat16() for n in (512, 64)]
    q = step.run(fused, slots, cache, keys, lists, kv_c_out=outs[0], k_pe_out=outs[1])
    assert close(q.double(), step.q, 8)
    assert close(outs[0].double(), step.latent, 8)
    assert close(outs[1].double(), step.rope, 8)
    assert (lists[:T] == -1).all()
    assert (lists[T] == 7).all()
    there = slots[:T][slots[:T] >= 0]
    written = (slots[:T] >= 0).numpy()
    rows = unpack_rows(cache, there).numpy()
    assert close(rows[:, 512:], step.rope[written], 8)
    for tile in range(4):
        part = slice(128 * tile, 128 * tile + 128)
        assert close(rows[:, part], step.latent[written][:, part], 4 if fp8 else 8)
    assert close(unpack_rows(keys, there).numpy(), step.keys[written], 4)
    others = np.setdiff1d(np.arange(3 * BLOCK_SIZE), there.numpy())
    block, offset = np.divmod(others, BLOCK_SIZE)
    assert torch.equal(cache[block, offset], before[0][block, offset])
    for part in (slice(0, 128), slice(128, 132)):  # a block has all codes, then all scales
        width = part.stop - part.start
        of_blocks = [
            x.flatten(1)[:, part.start * BLOCK_SIZE : part.stop * BLOCK_SIZE].unflatten(1, (BLOCK_SIZE, width))
            for x in (keys, before[1])
        ]
        assert torch.equal(of_blocks[0][block, offset], of_blocks[1][block, offset])


def test_scales_of_tiny_values(adapter, rng) -> None:
    """vLLM floors the scale itself of latent rows, and the largest magnitude of keys and queries."""
    step, fused = Step(rng, False), importlib.import_module(f"{plugin.__name__}.fused")
    step.weights = tuple(weight * 1e-9 for weight in step.weights)
    cache, keys, lists = filled(rng, 1, 656, 0), filled(rng, 1, 132, 0), torch.zeros(T, K, dtype=torch.int32)
    step.run(fused, torch.arange(T), cache, keys, lists)
    assert (cache[0, :T, 512:528].contiguous().view(torch.float32) == 2.0**-13).all()
    assert (keys.flatten()[BLOCK_SIZE * 128 :].view(torch.float32)[:T] == 2.0**-22).all()
    q, weights = torch.full((T, 8, 128), 1e-9).bfloat16(), torch.ones(T, 8)
    _, scaled, _ = fused.fused_q(
        step.positions, q[..., :64], step.cos_sin, q, step.cos_sin, q, torch.ones(1), weights, 1.0, 1.0,
        quantize_mqa=False,
    )  # fmt: skip
    assert (scaled == 2.0**-22).all()


def test_layers_without_an_indexer_leave_the_lists(adapter, rng) -> None:
    step, fused = Step(rng, False), importlib.import_module(f"{plugin.__name__}.fused")
    cache, lists = filled(rng, 3, 656, 0), torch.full((T, K), 7, dtype=torch.int32)
    keys = filled(rng, 3, 132, 0)
    before, slots = keys.clone(), torch.arange(T)
    assert close(step.run(fused, slots, cache, keys, lists, has_indexer=False).double(), step.q, 8)
    assert (lists == 7).all()
    assert torch.equal(keys, before)
    assert close(unpack_rows(cache, slots).numpy()[:, 512:], step.rope, 8)


def test_a_profiling_run_has_no_caches(adapter, rng) -> None:
    step, fused = Step(rng, False), importlib.import_module(f"{plugin.__name__}.fused")
    lists = torch.full((T, K), 7, dtype=torch.int32)
    assert close(step.run(fused, None, None, None, lists).double(), step.q, 8)
    assert (lists == -1).all()


def test_keys_have_slots_of_their_own(adapter, rng) -> None:
    """A token that is in no cache of latent rows is in none of keys."""
    step, fused = Step(rng, False), importlib.import_module(f"{plugin.__name__}.fused")
    cache, keys, lists = filled(rng, 3, 656, 0), filled(rng, 3, 132, 0), torch.zeros(T, K, dtype=torch.int32)
    before = keys.clone()
    slots = torch.arange(T)
    slots[3] = -1
    step.run(fused, slots, cache, keys, lists, indexer_slot_mapping=torch.arange(T) + BLOCK_SIZE)
    kept = [t for t in range(T) if t != 3]
    assert close(unpack_rows(keys, torch.tensor(kept) + BLOCK_SIZE).numpy(), step.keys[kept], 4)
    assert torch.equal(keys[[0, 2]], before[[0, 2]])
    of_3 = torch.tensor([BLOCK_SIZE + 3])
    assert torch.equal(unpack_rows(keys, of_3), unpack_rows(before, of_3))


def test_rows_of_another_format_are_an_error(adapter, rng) -> None:
    step, fused = Step(rng, False), importlib.import_module(f"{plugin.__name__}.fused")
    with pytest.raises(NotImplementedError, match="cache rows of 352 values"):
        step.run(fused, torch.arange(T), filled(rng, 3, 352, 0), None, torch.zeros(T, K, dtype=torch.int32))


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries(adapter, rng, interleaved: bool) -> None:
    step, fused = Step(rng, interleaved), importlib.import_module(f"{plugin.__name__}.fused")
    q = torch.tensor(rng.standard_normal((T, 3, 192)), dtype=torch.bfloat16)
    index_q = torch.tensor(rng.standard_normal((T, 8, 128)), dtype=torch.bfloat16)
    weights = torch.tensor(rng.standard_normal((T, 136)), dtype=torch.bfloat16)[:, 128:]
    arguments = q[..., 128:], step.cos_sin, index_q, step.cos_sin, q[..., :128], torch.ones(1), weights, 0.3, 0.7
    codes, scaled, q_pe = fused.fused_q(
        step.positions, *arguments, index_rope_interleave=interleaved, quantize_mqa=False
    )
    angles = step.cos_sin[step.positions].double().numpy()
    assert close(q_pe.double(), turned(q[..., 128:].double().numpy(), angles, True), 8)
    want = turned(index_q.double().numpy(), angles, interleaved)
    scale = scaled / (weights.float() * 0.3 * 0.7)
    assert close(codes.double() * scale.double()[..., None], want, 4)
    assert torch.frexp(scale)[0].sub(0.5).abs().max() < 1e-5, "powers of two"
    assert codes.float().abs().amax(-1).min() >= 224, "no larger than needed"
    *none, alone = fused.fused_q(step.positions, *arguments, has_indexer=False, quantize_mqa=False)
    assert none == [None, None]
    assert torch.equal(alone, q_pe)
    with pytest.raises(NotImplementedError, match="FP8 queries"):
        fused.fused_q(step.positions, *arguments)
