"""`SparseMLAConfig`: the few numbers of a model and an engine that the metadata builders and backends need."""

from __future__ import annotations

from dataclasses import dataclass

from . import layouts
from .checks.options import LARGEST_INT, require_choice, require_integer
from .typing import CacheLayout, ModelKind


@dataclass(frozen=True)
class SparseMLAConfig:
    """One sparse MLA layer kind on one rank.

    Attributes:
        num_heads: query heads on this rank, 1 to 128.
        d_qk: row width for Q.K: 576 (V3.2, GLM-5), 512 (V4, and models of the V3.2 kind without RoPE).
        d_v: value width, 512.
        topk: KV tokens the indexer chooses for each query token.
        block_size: tokens a block of the paged cache; with compression a multiple of `compress_ratio`, for a block
            holds whole rows.
        cache_layout: "bf16", "v32_fp8" or "v4_fp8"; vLLM's "fp8_ds_mla" is the FP8 layout of the model's kind. Models
            of the V3.2 kind without RoPE keep rows of 512 in bf16, and in FP8 V3.2's rows with a RoPE part of zeros.
        max_num_seqs: most requests in a batch.
        max_num_batched_tokens: most query tokens in a batch.
        max_model_len: longest sequence, in tokens.
        num_speculative_tokens: query tokens a decode has beyond its first.
        compress_ratio: 1 (no compression); of V4 layers also 4 (C4A) or 128 (C128A).
        window: length of the sliding window of V4 layers, in tokens.
        mixed_below_heads: V3.2 layers over an FP8 cache give whole batches to the decode kernel when the rank has fewer
            heads than this; with more, prefills go to the prefill kernel over gathered rows.
        model: kind of the model, "v32" or "v4"; None becomes "v4" where d_qk is 512, else "v32".
        max_workspace_bytes: most memory that the indexer's logits take at a time.

    Raises:
        TypeError, ValueError: a field is of another type or out of its range, or no model has such layers; the message
            names it.
    """

    num_heads: int
    d_qk: int = 576
    d_v: int = 512
    topk: int = 2048
    block_size: int = 64
    cache_layout: CacheLayout = "bf16"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 163840
    num_speculative_tokens: int = 0
    compress_ratio: int = 1
    window: int = 128
    mixed_below_heads: int = 64
    model: ModelKind | None = None
    max_workspace_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_heads", 1, 128), ("d_qk", 1, None), ("d_v", 1, None), ("topk", 1, None), ("block_size", 1, None),
            ("max_num_seqs", 1, None), ("max_num_batched_tokens", 1, None), ("max_model_len", 1, None),
            ("num_speculative_tokens", 0, None), ("compress_ratio", 1, None), ("window", 1, None),
            ("mixed_below_heads", 0, None), ("max_workspace_bytes", 1, None),
        ):  # fmt: skip
            object.__setattr__(self, name, require_integer(name, getattr(self, name), least, most))
        if self.max_num_seqs * (1 + self.num_speculative_tokens) > LARGEST_INT:
            raise ValueError(
                f"num_speculative_tokens: int32 cannot count the query tokens of {self.max_num_seqs} decodes "
                f"(max_num_seqs) of 1 + {self.num_speculative_tokens} each"
            )
        if self.d_qk not in (576, 512):
            raise ValueError(f"d_qk must be 576 or 512, got {self.d_qk}")
        if self.d_v != layouts.D_V:
            raise ValueError(f"d_v must be {layouts.D_V}, got {self.d_v}")
        if self.model is None:
            object.__setattr__(self, "model", "v4" if self.d_qk == 512 else "v32")
        require_choice("model", self.model, ("v32", "v4"))
        if self.is_v4 and self.d_qk != 512:
            raise ValueError(f"d_qk of a V4 model must be 512, got {self.d_qk}")
        if self.layout.scale_of_call or not self.layout.told:
            why = "whose scale each call brings" if self.layout.scale_of_call else "which each call must name"
            raise ValueError(f"cache_layout: layers have no {self.cache_layout!r}, {why}")
        if self.layout.quantized and self.layout.of_v4 != self.is_v4:
            raise ValueError(f"cache_layout: models of kind {self.model!r} have no caches {self.cache_layout!r}")
        if self.compress_ratio not in (1, 4, 128):
            raise ValueError(f"compress_ratio must be 1, 4 or 128, got {self.compress_ratio}")
        if self.compress_ratio > 1 and not self.is_v4:
            raise ValueError(f"compress_ratio of models of kind 'v32' must be 1, got {self.compress_ratio}")
        if self.block_size % self.compress_ratio:
            ratio = self.compress_ratio
            raise ValueError(f"block_size: expected a multiple of compress_ratio {ratio}, got {self.block_size}")

    @property
    def layout(self) -> layouts.Layout:
        """The cache layout as data."""
        return layouts.of_model(self.cache_layout, self.d_qk, self.is_v4)

    @property
    def is_v4(self) -> bool:
        """True for layers of DeepSeek V4."""
        return self.model == "v4"

    @property
    def rows_per_block(self) -> int:
        """Rows a block of the cache holds: tokens, or compressed rows."""
        return self.block_size // self.compress_ratio

    @property
    def max_compressed_rows(self) -> int:
        """Most compressed rows of a sequence, a row that is not complete yet included; 0 without compression."""
        return -(-self.max_model_len // self.compress_ratio) if self.compress_ratio > 1 else 0

    @property
    def max_index_keys(self) -> int:
        """Most keys that the indexer has of a sequence: its tokens, or its complete compressed rows."""
        return self.max_model_len // self.compress_ratio

    @property
    def use_mixed_batch(self) -> bool:
        """True when batches go to the FP8 decode kernel whole."""
        return self.layout.quantized and not self.is_v4 and self.num_heads < self.mixed_below_heads
