"""`SparseMLAConfig` and `DenseMLAConfig`: the numbers of a model and an engine that metadata builders, backends and
warming up need."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from . import layouts
from .checks.options import LARGEST_INT, require_bool, require_choice, require_integer
from .layouts import MAX_HEADS
from .typing import CacheLayout, DenseLayout, ModelKind, PagedLayout

C4A, C128A = 4, 128  # compress ratios of V4: an indexer chooses rows; all complete rows
# Compress ratios of the layers of each kind of model; in V4 and V4.1 the first is that of a sliding window alone. And
# those of the layers whose rows an indexer chooses.
RATIOS: dict[ModelKind | None, tuple[int, ...]] = {"v32": (1,), "v4": (1, C4A, C128A), "v41": (0, 1, 2)}
CHOSEN: dict[ModelKind | None, tuple[int, ...]] = {"v32": (1,), "v4": (C4A,), "v41": (1, 2)}


# All other integers of a config are positive.
MAY_BE_0 = ("num_speculative_tokens", "compress_ratio", "mixed_below_heads", "max_image_tokens")


def _require_integers(config: Any) -> None:
    """Check the integer fields of a config."""
    for field in fields(config):
        if field.type == "int":
            most = MAX_HEADS if field.name == "num_heads" else None
            value = require_integer(field.name, getattr(config, field.name), int(field.name not in MAY_BE_0), most)
            object.__setattr__(config, field.name, value)


def one_of(values: tuple[int, ...]) -> str:
    """Numbers for a message: "1, 4 or 128"."""
    return " or ".join(", ".join(map(str, values)).rsplit(", ", 1))


@dataclass(frozen=True)
class SparseMLAConfig:
    """A kind of sparse MLA layers on one rank, and the engine's maxima.

    Attributes:
        num_heads: query heads on this rank, 1 to 128.
        d_qk: row width for Q.K: 576 (V3.2, GLM-5) or 512 (V4, V4.1, and models of the V3.2 kind without RoPE).
        d_v: value width, 512.
        topk: KV tokens that the indexer chooses for each query token; a multiple of `kpool`.
        block_size: tokens a block of the paged cache; a multiple of `compress_ratio`, because a block holds whole rows.
        cache_layout: of the V3.2 kind "bf16", "v32_fp8", "v32_nvfp4" or "plain_fp8" (one scale for a layer's rows, see
            `SparseMLAImpl.forward_mqa`), and without RoPE also "v32_nope_fp8"; of V4 "bf16", "v4_fp8" or "v4_nvfp4"; in
            V4.1 also "v41_fp8" or "v41_fp8_split". vLLM's "fp8_ds_mla" is "v32_fp8" or, in V4 and V4.1, "v4_fp8"; its
            "nvfp4_ds_mla" is "v32_nvfp4", its "fp8" is "plain_fp8". Models of the V3.2 kind without RoPE have rows of
            512 in "bf16", "plain_fp8" and "v32_nope_fp8"; in other layouts V3.2's rows with a RoPE part of zeros.
        max_num_seqs: requests in the largest batch.
        max_num_batched_tokens: query tokens in the largest batch.
        max_model_len: tokens of the longest sequence.
        num_speculative_tokens: query tokens of a decode beyond the first.
        compress_ratio: tokens that a row of the compressed cache stands for. For "v32": 1 (no compression). For "v4":
            1 (a sliding window alone), 4 (C4A) or 128 (C128A). For "v41": 0 (a sliding window alone), 1 (C1A: a
            compressed cache with one row a token) or 2 (C2A).
        window: length of the sliding window of V4 and V4.1 layers, in tokens.
        mixed_below_heads: with fewer heads than this on the rank, whole batches of V3.2 layers over an FP8 cache run as
            `sparse_decode`. With more, their prefills run as `sparse_prefill` over gathered rows.
        model: kind of the model, "v32", "v4" or "v41"; None becomes "v4" if d_qk is 512, else "v32".
        max_workspace_bytes: limit of the memory for the indexer's logits.
        dense_when_short: for V3.2 layers whose index lists name every token that a query token sees if these are at
            most `topk`, as an indexer's lists do. Decodes of such contexts then attend over all rows, without lists, if
            that is faster: see `SparseMLAMetadata.dense_decodes`.
        max_image_tokens: tokens of the largest image, for V4.1 models that see images. Tokens of an image see one
            another in both directions, which makes the sliding window's lists longer by so many.
        kpool: tokens that a key of the indexer stands for, for V3.2 layers whose indexer chooses pools of tokens
            (GLM-5.3-Flash). A query token also attends over the tokens of its sequence that make no whole pool.
        compressed_layout: layout of V4.1's compressed caches: "v41_fp4" or "v41_fp4_split" beside `cache_layout`
            "v41_fp8", "v41_fp4_split" beside "v41_fp8_split"; None: that of `cache_layout`.

    Raises:
        TypeError, ValueError: a field has another type or is out of its range, or no model has such layers. The message
            names the field.
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
    dense_when_short: bool = False
    max_image_tokens: int = 0
    kpool: int = 1
    compressed_layout: PagedLayout | None = None

    def __post_init__(self) -> None:
        _require_integers(self)
        require_bool("dense_when_short", self.dense_when_short)
        if self.max_num_seqs * (1 + self.num_speculative_tokens) > LARGEST_INT:
            raise ValueError(
                f"num_speculative_tokens: int32 cannot count the query tokens of {self.max_num_seqs} decodes "
                f"(max_num_seqs) of 1 + {self.num_speculative_tokens} each"
            )
        if self.d_qk not in (576, 512):
            raise ValueError(f"d_qk must be 576 or 512, got {self.d_qk}")
        if self.d_v != layouts.D_V:
            raise ValueError(f"d_v must be {layouts.D_V}, got {self.d_v}")
        kind = self.model if self.model is not None else "v4" if self.d_qk == 512 else "v32"
        require_choice("model", kind, ("v32", "v4", "v41"))
        object.__setattr__(self, "model", kind)
        if self.is_v4 and self.d_qk != 512:
            raise ValueError(f"d_qk of a {'V4' if kind == 'v4' else 'V4.1'} model must be 512, got {self.d_qk}")
        self._require_layouts(kind)
        if self.is_v4 and self.dense_when_short:
            raise ValueError(f"dense_when_short: layers of models of kind {kind!r} have no lists of all tokens")
        ratio = self.compress_ratio
        if ratio not in RATIOS[kind]:
            listed = one_of(RATIOS[kind])
            raise ValueError(f"compress_ratio of models of kind {kind!r} must be {listed}, got {ratio}")
        if self.kpool > 1 and self.is_v4:
            raise ValueError(f"kpool of models of kind {kind!r} must be 1, got {self.kpool}")
        for field in ("topk", "block_size"):
            if getattr(self, field) % self.kpool:
                raise ValueError(f"{field}: expected a multiple of kpool {self.kpool}, got {getattr(self, field)}")
        if self.block_size % self.tokens_per_row:
            raise ValueError(f"block_size: expected a multiple of compress_ratio {ratio}, got {self.block_size}")

    def _require_layouts(self, kind: ModelKind) -> None:
        """Check that models of this kind have caches of these layouts."""
        of_v41 = self.layout in layouts.OF_V41
        if (self.layout.quantized and self.layout.of_v4 != self.is_v4) or (of_v41 and kind != "v41"):
            raise ValueError(f"cache_layout: models of kind {kind!r} have no caches {self.cache_layout!r}")
        if self.layout.d_qk < self.d_qk:
            raise ValueError(
                f"cache_layout: rows of {self.cache_layout!r} have {self.layout.d_qk} values, d_qk is {self.d_qk}"
            )
        if self.compressed_layout is not None:
            if not self.is_v4:
                raise ValueError(f"compressed_layout: models of kind {kind!r} have no compressed caches")
            beside = layouts.names((self.layout, *layouts.EXTRA_OF.get(self.layout, ())))
            name = f"compressed_layout beside cache_layout {self.cache_layout!r}"
            require_choice(name, self.compressed_layout, tuple(dict.fromkeys((self.cache_layout, *beside))))

    @property
    def layout(self) -> layouts.Layout:
        """The `Layout` of the cache."""
        return layouts.of_model(self.cache_layout, self.d_qk, self.is_v4)

    @property
    def layout_of_compressed(self) -> layouts.Layout:
        """The `Layout` of the compressed cache."""
        name = self.compressed_layout
        return self.layout if name in (None, self.cache_layout) else layouts.by_name(cast(str, name), self.d_qk)

    @property
    def is_v4(self) -> bool:
        """True for layers of DeepSeek V4 and V4.1: with a sliding window, and rows whose RoPE part is in V."""
        return self.model != "v32"

    @property
    def has_compressed_rows(self) -> bool:
        """True for layers that attend over a compressed cache beside their sliding window."""
        return self.compress_ratio > RATIOS[self.model][0]

    @property
    def has_topk(self) -> bool:
        """True for layers whose rows an indexer chooses, their own or another layer's: all of V3.2's kind, C4A of V4,
        C1A and C2A of V4.1."""
        return self.compress_ratio in CHOSEN[self.model]

    @property
    def topk_width(self) -> int:
        """Entries of a query token's list: tokens that the indexer chooses and, with pools, those that make no whole
        pool."""
        return self.topk + self.kpool - 1

    @property
    def index_topk(self) -> int:
        """Keys that the indexer chooses for each query token: rows or, with kpool, pools."""
        return self.topk // self.kpool

    @property
    def tokens_per_key(self) -> int:
        """Tokens that a key of the indexer stands for."""
        return self.tokens_per_row * self.kpool

    @property
    def keys_per_block(self) -> int:
        """Keys in a block of the indexer's cache."""
        return self.block_size // self.tokens_per_key

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row of the cache (in compressed layers: of the compressed cache) stands for."""
        return max(self.compress_ratio, 1)

    @property
    def rows_per_block(self) -> int:
        """Rows in a block of the cache: tokens, or compressed rows."""
        return self.block_size // self.tokens_per_row

    @property
    def max_compressed_rows(self) -> int:
        """Compressed rows of the longest sequence, with one that is not complete yet; 0 without compression."""
        return -(-self.max_model_len // self.tokens_per_row) if self.has_compressed_rows else 0

    @property
    def max_index_keys(self) -> int:
        """Keys of the indexer for the longest sequence: its tokens, complete compressed rows or whole pools."""
        return self.max_model_len // self.tokens_per_key

    @property
    def use_mixed_batch(self) -> bool:
        """True when whole batches run as `sparse_decode` over FP8 rows: see `mixed_below_heads`."""
        return self.layout.quantized and not self.is_v4 and self.num_heads < self.mixed_below_heads


@dataclass(frozen=True)
class DenseMLAConfig:
    """MLA layers without an indexer on one rank, for `cupy_mla.warmup`. Their decodes attend over all rows.

    Attributes:
        num_heads: query heads on this rank, 1 to 128.
        d_qk: row width for Q.K: 576, or 512 in models without RoPE.
        block_size: rows a block of the paged cache.
        cache_layout: the name of a layout that `dense_decode` takes.
        max_num_seqs: requests in the largest batch.
        max_model_len: tokens of the longest sequence.
        num_speculative_tokens: query tokens of a decode beyond the first.

    Raises:
        TypeError, ValueError: a field has another type or is out of its range. The message names the field.

    Example:
        >>> cupy_mla.DenseMLAConfig(16, cache_layout="plain_fp8").layout.token_bytes
        576
    """

    num_heads: int
    d_qk: int = 576
    block_size: int = 64
    cache_layout: DenseLayout = "bf16"
    max_num_seqs: int = 256
    max_model_len: int = 163840
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        _require_integers(self)
        require_choice("cache_layout", self.cache_layout, layouts.names(layouts.DENSE_LAYOUTS))
        if self.layout.d_qk != self.d_qk:
            raise ValueError(f"d_qk of a {self.layout.name} cache must be {self.layout.d_qk}, got {self.d_qk}")

    @property
    def layout(self) -> layouts.Layout:
        """The `Layout` of the cache."""
        return layouts.by_name(self.cache_layout, self.d_qk)


LayerConfig = SparseMLAConfig | DenseMLAConfig  # one kind of layers
