"""What our attention layers of DeepSeek-V4 and V4.1 have in common: a sliding window, and in the same softmax rows of a
compressed cache."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.worker.workspace import current_workspace_manager

from ...config import CHOSEN
from ...ops.attention import sparse_decode, sparse_prefill
from ...ops.compressed import compute_global_topk_indices_and_lens
from ...ops.gather import dequantize_and_gather_k_cache
from ...ops.swa import combine_topk_swa_indices, combined_width
from ...typing import ModelKind
from . import indexer, warm

if TYPE_CHECKING:
    from ..untyped import Untyped as StockAttention
else:
    StockAttention = object  # vLLM's class comes behind ours

# Query heads with which vLLM's kernel can write queries (fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert).
WRITTEN_HEADS = (8, 16, 32, 64, 128)


class V4Attention(StockAttention):
    """Our `forward_mqa`, and our choice of rows in layers with an indexer. It stands before vLLM's attention layer in a
    class's bases.

    When the first one is created, before weights are loaded, the kernels of all kinds of layers are compiled.
    """

    model: ModelKind  # "v4" or "v41"
    max_image_tokens: int = 0  # tokens of an image that see one another in both directions

    def __init__(self, vllm_config: Any, *layer: Any, **more: Any) -> None:
        super().__init__(vllm_config, *layer, **more)
        kinds = warm.v4_layers_of(vllm_config, self.padded_heads, self.model, self.max_image_tokens)
        warm.up(kinds, torch.device(vllm_config.device_config.device_type))
        if self.indexer is not None:
            indexer.adopt_v4(self.indexer.indexer_op)

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Heads of queries and results. Only numbers that vLLM's own kernel cannot write are padded.

        Raises:
            ValueError: more heads than it can write, and than we attend with.
        """
        if num_heads > WRITTEN_HEADS[-1]:
            raise ValueError(f"cupy_mla serves DeepSeek-V4 with at most 128 heads on a GPU, got {num_heads}")
        return next(heads for heads in WRITTEN_HEADS if heads >= num_heads)

    @abstractmethod
    def compressed(self, step: dict[str, Any]) -> tuple[Any, Any]:
        """The step's metadata of the compressed cache that the layer reads, and that cache; None for layers without."""

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of a step's tokens, decodes first, over rows that vLLM has written already."""
        step = get_forward_context().attn_metadata
        if step is None:  # a profiling run, for which vLLM reserves memory as we do
            stock_layer: Any = super()
            stock_layer.forward_mqa(q, kv, positions, output)
            return
        swa = step[self.swa_cache_layer.prefix]
        compressed, rows = self.compressed(step)
        first = swa.num_decode_tokens
        if swa.num_prefills:
            self._prefills(q[first:], swa, compressed, rows, output[first:])
        if first:  # requests may have no query token
            self._decodes(q[:first], swa, compressed, rows, output[:first])

    def _decodes(self, q: torch.Tensor, swa: Any, compressed: Any, rows: Any, output: torch.Tensor) -> None:
        """Each token counts as a request; its rows are read in place.

        Args:
            swa: vLLM's metadata of the sliding windows.
            compressed: those of the compressed cache; None for layers without one.
            rows: the compressed cache.
        """
        more: dict[str, Any] = {}
        if compressed is not None and self.compress_ratio in CHOSEN[self.model]:
            slots, lens = compute_global_topk_indices_and_lens(
                self.topk_indices_buffer[: len(q)], swa.token_to_req_indices[: len(q)],
                compressed.block_table[: swa.num_decodes], compressed.block_size // self.compress_ratio,
                swa.is_valid_token[: len(q)],
            )  # fmt: skip
            more = {"extra_indices": slots[:, None], "extra_topk_length": lens}
        elif compressed is not None:
            more = {
                "extra_indices": compressed.c128a_global_decode_topk_indices,
                "extra_topk_length": compressed.c128a_decode_topk_lens,
            }
        sparse_decode(
            q[:, None], self.swa_cache_layer.kv_cache, swa.decode_swa_indices, self.scale, attn_sink=self.attn_sink,
            topk_length=swa.decode_swa_lens, extra_k_cache=None if compressed is None else rows, **more,
            out=output[:, None],
        )  # fmt: skip

    def _prefills(self, q: torch.Tensor, swa: Any, compressed: Any, rows: Any, output: torch.Tensor) -> None:
        """A few requests at a time, over rows that are gathered into vLLM's workspace; else as `_decodes`."""
        ratio, decodes = self.compress_ratio, swa.num_decodes
        chosen: Any = None
        if compressed is not None and ratio in CHOSEN[self.model]:
            chosen = self.topk_indices_buffer[swa.num_decode_tokens :]
        elif compressed is not None:
            chosen = compressed.c128a_prefill_topk_indices
        topk = 0 if chosen is None else chosen.shape[1]
        width = combined_width(topk, self.window_size, self.max_image_tokens)
        starts = swa.query_start_loc_cpu[decodes:].tolist()
        chunks = swa.get_prefill_chunk_plan(ratio, self.PREFILL_CHUNK_SIZE, compressed is not None)
        for begin, end, window_at, workspace_rows in chunks:
            kv, lists, counts = current_workspace_manager().get_simultaneous(
                ((end - begin, workspace_rows, q.shape[2]), torch.bfloat16),
                ((self.max_num_batched_tokens, width), torch.int32),
                ((self.max_num_batched_tokens,), torch.int32),
            )
            requests, tokens = slice(begin, end), slice(starts[begin] - starts[0], starts[end] - starts[0])
            if tokens.start == tokens.stop:
                continue
            lists, counts = lists[: tokens.stop - tokens.start], counts[: tokens.stop - tokens.start]
            lens, gathered = swa.prefill_seq_lens[requests], swa.prefill_gather_lens[requests]
            if compressed is not None:
                dequantize_and_gather_k_cache(
                    kv, rows, lens // ratio, None, compressed.block_table[decodes:][requests],
                    compressed.block_size // ratio, 0,
                )  # fmt: skip
            dequantize_and_gather_k_cache(
                kv, self.swa_cache_layer.kv_cache, lens, gathered, swa.block_table[decodes:][requests], swa.block_size,
                window_at,
            )  # fmt: skip
            images: dict[str, Any] = {}
            if swa.prefill_left_visible is not None:
                left, right = swa.prefill_left_visible, swa.prefill_right_visible
                first = swa.num_decode_tokens
                images = {"left_visible": left[first:][tokens], "right_visible": right[first:][tokens]}
            combine_topk_swa_indices(
                lists[:, :0] if chosen is None else chosen[tokens],
                swa.query_start_loc[decodes + begin : decodes + end + 1], lens, gathered, self.window_size, ratio, topk,
                workspace_rows, window_at, **images, max_image_tokens=self.max_image_tokens, out=lists, lens=counts,
            )  # fmt: skip
            sparse_prefill(
                q[tokens], kv.view(-1, 1, q.shape[2]), lists[:, None], self.scale, attn_sink=self.attn_sink,
                topk_length=counts, out=output[tokens],
            )  # fmt: skip
