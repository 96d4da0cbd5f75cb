"""No step of DeepSeek-V4 or V4.1 in vLLM needs a kernel that was not ready before the first request, whatever its
numbers of tokens and lengths: the plug-in's own calls, on an H200 that is none."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla import SparseMLAConfig  # noqa: E402
from cupy_mla.cuda import all_kernels  # noqa: E402
from cupy_mla.integrations import vllm as plugin  # noqa: E402
from cupy_mla.integrations import warm  # noqa: E402
from cupy_mla.selfcheck import warmup as warmup_module  # noqa: E402
from tests.integrations.stub_vllm import engine, loaded  # noqa: E402
from tests.selfcheck.test_warmup import Layer  # noqa: E402

WINDOW, TOPK, INDEX_HEADS, BLOCK = 128, 512, 64, {"v4": 256, "v41": 64}
MOST_SEQS, MOST_TOKENS = 2048, 8192
RATIOS, SOURCES, CANDIDATE_SOURCE, CANDIDATES = (0, 2, 2, 1, 1), (1, 3, 4), 3, 128  # of V4.1


def blank(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    """Memory that nobody reads."""
    return torch.empty(shape, dtype=dtype)


def numbers(*values: Any) -> Any:
    return torch.tensor(*values, dtype=torch.int32)


def cache(rows: int, width: int) -> Any:
    return torch.zeros(4, rows, width, dtype=torch.uint8)


class Model:
    """The layers that vLLM's model makes, with caches; those of V4 are all of one compress ratio.

    Args:
        kind: "v4" or "v41".
        ratio: of all layers of V4.
        guessed: tokens of a decode beyond the first.
        images: tokens of the largest image.
        most_len: tokens of the longest sequence.
    """

    def __init__(self, kind: str, ratio: int, heads: int, guessed: int, images: int, most_len: int) -> None:
        self.kind, self.ratio, self.images, self.guessed, self.most_len = kind, ratio, images, guessed, most_len
        self.lists = blank(MOST_TOKENS, TOPK, dtype=torch.int32)
        text = {
            "ratios": {"layer": ratio}, "compress_ratios": RATIOS, "kv_source_layer_ids": SOURCES[:2],
            "index_source_layer_ids": SOURCES, "candidate_source_layer_id": CANDIDATE_SOURCE,
            "candidate_topk_blocks": CANDIDATES, "candidate_block_size": 8, "vision_max_n_token": images,
        }  # fmt: skip
        of = engine(
            model_config=SimpleNamespace(
                max_model_len=most_len, get_num_attention_heads=lambda parallel: heads,
                hf_config=SimpleNamespace(sliding_window=WINDOW, index_topk=TOPK, **text),
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=MOST_SEQS, max_num_batched_tokens=MOST_TOKENS),
            parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
            speculative_config=SimpleNamespace(num_speculative_tokens=guessed) if guessed else None,
            attention_config=SimpleNamespace(backend=None), device_config=SimpleNamespace(device_type="cuda"),
        )  # fmt: skip
        suffix = {"v4": "V4", "v41": "V41"}[kind]
        importlib.import_module(f"{plugin.__name__}.deepseek_{kind}")
        made = getattr(loaded(f"vllm.models.deepseek_{kind}"), f"Deepseek{suffix}ForCausalLM")(vllm_config=of)
        self.layers = [layer.attn for layer in made.layers]
        for layer in self.layers:
            layer.swa_cache_layer.kv_cache = cache(64, 584)
            layer.kv_cache = cache(max(BLOCK[kind] // max(layer.compress_ratio, 1), 1), 584)
            layer.topk_indices_buffer = self.lists
            if layer.indexer is not None:
                self._index(layer, most_len)

    def _index(self, layer: Any, most_len: int) -> None:
        op, ratio = layer.indexer.indexer_op, layer.compress_ratio
        keys = cache(BLOCK[self.kind] // ratio, 132)
        if op.k_cache is None:
            op.k_cache = SimpleNamespace(prefix="keys")
        op.k_cache.kv_cache, op.topk_indices_buffer, op.topk_tokens, op.compress_ratio = keys, self.lists, TOPK, ratio
        op.max_model_len, op.max_total_seq_len = most_len // ratio, 4 * most_len // ratio

    def step(self, gpu: Any, decodes: int, prefills: list[int], seq_len: int, draft: bool) -> None:
        """A step of so many decodes and of prefills of so many query tokens, of sequences of a length.

        Args:
            draft: the decodes are a draft model's, which see all of their block.
        """
        each = 1 + self.guessed
        lens = [each] * decodes + prefills
        starts, first = numbers([0, *np.cumsum(lens).tolist()]), each * decodes
        tokens, seq_lens = int(starts[-1]), numbers([max(seq_len, n) for n in lens])
        swa = loaded("vllm.v1.attention.backends.mla.sparse_swa")
        width = -(-(WINDOW + self.guessed) // 64) * 64 if draft else WINDOW
        more = {}
        if self.images:
            seen = torch.zeros(tokens, dtype=torch.int32)
            more = {"prefill_left_visible": seen, "prefill_right_visible": seen}
        table = torch.zeros(len(lens), -(-self.most_len // BLOCK[self.kind]), dtype=torch.int32)
        windows = swa.DeepseekSparseSWAMetadata(
            table, 64, starts, starts, torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.int32),
            torch.zeros(first, 1, width, dtype=torch.int32), torch.zeros(first, dtype=torch.int32), decodes, first,
            len(prefills), seq_lens[decodes:], (seq_lens[decodes:]).clamp(max=WINDOW + max(prefills, default=0)),
            **more,
        )  # fmt: skip
        metadata: dict[str, Any] = {}
        for layer in self.layers:
            metadata[layer.swa_cache_layer.prefix] = windows
            if layer.compress_ratio > (1 if self.kind == "v4" else 0):
                metadata[layer.prefix] = self._compressed(table, first, tokens, seq_len)
            if layer.indexer is not None:
                op = layer.indexer.indexer_op
                metadata[op.k_cache.prefix] = self._keys(lens, decodes, starts, seq_lens, table, layer.compress_ratio)
        loaded("vllm.forward_context").context.attn_metadata = metadata
        for layer in self.layers:
            gpu.used = 0
            q = blank(tokens, layer.padded_heads, 512)
            if layer.indexer is not None:
                index_q = blank(tokens, INDEX_HEADS, 128, dtype=torch.float8_e4m3fn)
                w = blank(tokens, INDEX_HEADS, dtype=torch.float32)
                layer.indexer.indexer_op(q[:, 0], index_q, None, w)
            layer.forward_mqa(q, q[:, 0], starts, blank(*q.shape))

    def _compressed(self, table: Any, first: int, tokens: int, seq_len: int) -> Any:
        """vLLM's lists of all compressed rows are as wide as the batch's longest sequence needs."""
        metadata = loaded(f"vllm.models.deepseek_{self.kind}.sparse_mla").DeepseekV4FlashMLAMetadata
        if self.ratio != 128:
            return metadata(table, BLOCK[self.kind])
        widest = -(-self.most_len // 128 // 128) * 128
        width = min(max(1 << max(seq_len // 128 - 1, 0).bit_length(), 128), widest)
        lists = blank(tokens, widest, dtype=torch.int32)[:, :width]
        return metadata(table, 256, lists[:first, None], numbers([0] * first), lists[first:])

    def _keys(self, lens: list[int], decodes: int, starts: Any, seq_lens: Any, table: Any, ratio: int) -> Any:
        m, each = loaded("vllm.v1.attention.backends.mla.indexer"), 1 + self.guessed
        seen = (seq_lens[:decodes, None] // ratio).expand(decodes, each).contiguous()
        decode = m.DeepSeekV32IndexerDecodeMetadata(table[:decodes], seen, numbers(lens[:decodes]), False, None)
        chunks = []
        if len(lens) > decodes:
            ends = torch.cat([torch.zeros(1, dtype=torch.int32), (seq_lens[decodes:] // ratio).cumsum(0).int()])
            of_tokens = torch.zeros(int(starts[-1]) - int(starts[decodes]), dtype=torch.int32)
            chunks = [
                m.DeepseekV32IndexerPrefillChunkMetadata(
                    table[decodes:], of_tokens, of_tokens, ends, int(ends[-1]), int(starts[decodes]), int(starts[-1]),
                    False,
                )
            ]  # fmt: skip
        return m.DeepseekV32IndexerMetadata(
            seq_lens, int(seq_lens.max()), None, decodes, int(starts[decodes]), len(lens) - decodes, 0, decode,
            m.DeepseekV32IndexerPrefillMetadata(chunks),
        )  # fmt: skip


KINDS = [("v4", 1), ("v4", 4), ("v4", 128), ("v41", 0)]
LONG, SHORT = 160_000, 2 * TOPK  # tokens of a sequence; all keys of a short one are chosen


@pytest.mark.long(sample=3)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(("kind", "ratio"), KINDS)
@pytest.mark.parametrize("guessed", [0, 3])
def test_no_step_needs_another_kernel(
    vllm, gpu, monkeypatch, rng, kind: str, ratio: int, heads: int, guessed: int
) -> None:
    """Decodes, prefills and both, up to the engine's limits, with images and of a draft model, too."""
    monkeypatch.setattr(warm, "_ready", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loaded("vllm.envs"), "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", int(rng.choice([16, 64])))
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, SparseMLAConfig(heads)).cupy)
    images = int(rng.choice([0, 400])) if kind == "v4" else 0
    most_len = int(rng.choice([LONG, SHORT])) if ratio != 128 else LONG
    model = Model(kind, ratio, heads, guessed, images, most_len)
    ready = set(gpu.kernels.values())
    assert len(ready) > 30
    each = 1 + guessed
    most_decodes = min(MOST_SEQS, MOST_TOKENS // each)
    for _ in range(8):
        decodes = int(rng.choice([0, 1, 7, rng.integers(1, most_decodes + 1), most_decodes]))
        left = MOST_TOKENS - decodes * each
        prefills = rng.multinomial(rng.integers(0, left + 1), [0.7, 0.2, 0.1]).tolist() if left > 9 else []
        prefills = [n for n in prefills if n > each]
        if decodes or prefills:
            model.step(gpu, decodes, prefills, int(rng.integers(1, most_len + 1)), bool(guessed) and rng.random() < 0.5)
    model.step(gpu, 0, [MOST_TOKENS], most_len, draft=False)
    model.step(gpu, most_decodes, [], most_len, draft=False)
    assert set(gpu.kernels.values()) == ready <= set(all_kernels())
