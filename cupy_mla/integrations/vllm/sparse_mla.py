"""The backend for vLLM 0.22: FlashMLASparse's metadata and hooks, our kernels.

vLLM's builder goes on building the batches. What is ours: the cache write, the query's concatenation, index conversion,
gathering, and attention over FP8 and bf16 caches for any number of heads, none padded. Constructing a layer's impl
also hands the layer's indexer over (`indexer.adopt`), so a model that does not select this backend is not touched.

Our indexer puts -1 behind a token's positions only. So the number of valid entries tells where a token's list ends.
Attention skips what is behind it: most of the list where the cache holds few tokens. The layers of a step divide their
work alike, by a plan in the step's metadata. Where the indexer chose slots (`indexer.ChosenSlots`), nothing is
converted. Decodes of short contexts attend over all rows, without lists, where that is faster (`short.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla import flashmla_sparse as stock

from ...backends.sparse_mla import SparseMLABackend
from ...config import SparseMLAConfig
from ...cuda.program import Plan
from ...layouts import BF16_576, V32_FP8
from ...ops.attention import planned_decode, sparse_prefill
from ...ops.gather import concat_mla_q, cp_gather_and_upconvert_fp8_kv_cache
from ...ops.indices import convert_req_index_to_global_index
from ...typing import CacheLayout
from . import cache_write, short, warm
from .indexer import adopt, chosen_slots, of_single_tokens
from .rebound import rebound

if TYPE_CHECKING:
    from ..untyped import Untyped as StockBackend
    from ..untyped import Untyped as StockBuilder
    from ..untyped import Untyped as StockImpl
else:
    StockBackend = stock.FlashMLASparseBackend
    StockBuilder = stock.FlashMLASparseMetadataBuilder
    StockImpl = stock.FlashMLASparseImpl


class CupyMLASparseBackend(StockBackend):
    """Its name stays FLASHMLA_SPARSE: by that name vLLM knows that `fp8` means `fp8_ds_mla`."""

    @staticmethod
    def get_builder_cls() -> type[CupyMLASparseBuilder]:
        return CupyMLASparseBuilder

    @staticmethod
    def get_impl_cls() -> type[CupyMLASparseImpl]:
        return CupyMLASparseImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return SparseMLABackend.supports_compute_capability(capability.major, capability.minor)


def _no_schedule(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """Stands in for FlashMLA's schedule: our kernels divide their work themselves."""
    return None, None


class CupyMLASparseBuilder(StockBuilder):
    """vLLM's metadata without FlashMLA's schedules. Ranks of few heads give whole batches to the decode kernel."""

    _build: Any = rebound(
        stock.FlashMLASparseMetadataBuilder.build, MIN_HEADS_FOR_BF16_PREFILL=SparseMLAConfig.mixed_below_heads
    )
    _build_fp8_mixed_decode_prefill: Any = rebound(
        stock.FlashMLASparseMetadataBuilder._build_fp8_mixed_decode_prefill, get_mla_metadata=_no_schedule
    )
    _build_fp8_separate_prefill_decode: Any = rebound(
        stock.FlashMLASparseMetadataBuilder._build_fp8_separate_prefill_decode, get_mla_metadata=_no_schedule
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        buffer = self.req_id_per_token_buffer
        self.single_token_requests: torch.Tensor = torch.arange(len(buffer), dtype=buffer.dtype, device=buffer.device)
        self.whole_batch: Any = None
        if self.use_fp8_kv_cache:
            self.whole_batch = stock.FlashMLASparseMetadata.FP8KernelMetadata(
                scheduler_metadata=None, dummy_block_table=None, cache_lens=None
            )
        layout: CacheLayout = "v32_fp8" if self.use_fp8_kv_cache else "bf16"
        # vLLM makes builders before it captures graphs; it has no earlier hook for a backend.
        warm.up(warm.layers_of(self.vllm_config, self.num_heads, self.topk_tokens, layout), self.device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        built = self.build_lists(common_prefix_len, common_attn_metadata, fast_build)
        layout = V32_FP8 if self.use_fp8_kv_cache else BF16_576
        longest = self.reorder_batch_threshold
        setattr(built, short.NAME, short.dense_decodes(self, common_attn_metadata, layout, self.num_heads, longest))
        return built

    def build_lists(self, common_prefix_len: int, batch: Any, fast_build: bool) -> Any:
        """The metadata of attention over index lists."""
        if not of_single_tokens(self, batch):
            return self._build(common_prefix_len, batch, fast_build)
        return stock.FlashMLASparseMetadata(
            num_reqs=batch.num_reqs,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=batch.slot_mapping,
            block_table=batch.block_table_tensor,
            req_id_per_token=self.single_token_requests[: batch.num_actual_tokens],
            block_size=self.kv_cache_spec.block_size,
            topk_tokens=self.topk_tokens,
            fp8_extra_metadata=self.whole_batch,
            fp8_use_mixed_batch=self.use_fp8_kv_cache,
        )


class CupyMLASparseImpl(StockImpl):
    """One layer's attention. Buffers are those that vLLM's impl reserves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative = get_current_vllm_config().speculative_config
        self.decode_query_len: int = 1 + (speculative.num_speculative_tokens if speculative else 0)
        adopt(kwargs["indexer"])

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        cache_write.write(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(q, tuple):
            nope, rope = q
            q = self.q_concat_buffer[: nope.shape[0]]
            concat_mla_q(nope, rope, q)
        if (dense := short.dense_decodes_of(attn_metadata)) is not None:
            return short.attend(q, kv_c_and_k_pe_cache, dense, self.softmax_scale), None
        tokens = q.shape[0]
        extra = attn_metadata.fp8_extra_metadata
        prefill = getattr(extra, "prefill", None)
        slots, counts = self._slots(tokens, attn_metadata, prefill)
        out = q.new_empty((tokens, q.shape[1], self.kv_lora_rank))
        cache = kv_c_and_k_pe_cache
        plan = vars(attn_metadata).setdefault("cupy_mla_plan", Plan())
        if self.kv_cache_dtype != "fp8_ds_mla":
            self._attend_bf16(q, cache, slots, counts, out, plan, attn_metadata.max_query_len)
        elif isinstance(extra, stock.FlashMLASparseMetadata.FP8KernelMetadata):
            self._decode(q, cache, slots, counts, out, plan)
        else:
            if extra.num_decode_tokens:
                d = slice(extra.num_decode_tokens)
                self._decode(q[d], cache, slots[d], counts[d], out[d], plan)
            for chunk in prefill.chunks if prefill else ():
                self._attend_gathered(q, cache, slots, counts, out, chunk)
        return out, None

    def _slots(self, tokens: int, metadata: Any, prefill: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each token's rows lie, -1 behind them, and how many; a number beyond topk stands for all."""
        chosen = self.topk_indices_buffer[:tokens]
        if (found := chosen_slots.get(chosen.data_ptr())) is not None:
            return chosen, found.checked(metadata.block_table).lengths
        return convert_req_index_to_global_index(
            metadata.req_id_per_token,
            metadata.block_table,
            chosen,
            metadata.block_size,
            prefill.request_ids if prefill else None,
            prefill.workspace_starts if prefill else None,
            return_valid_counts=True,
        )

    def _decode(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor,
        plan: Plan,
    ) -> None:
        """Attention over cache slots. Each token is a request of its own: tokens' lists end at places of their own."""
        planned_decode(q[:, None], cache, slots[:, None], counts, self.softmax_scale, out[:, None], None, plan)

    def _attend_bf16(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor,
        plan: Plan,
        max_query_len: int,
    ) -> None:
        """Batches of decodes go to the kernel that splits rows, all others to the prefill kernel."""
        if max_query_len > self.decode_query_len and cache.is_contiguous():
            rows = cache.view(-1, 1, cache.shape[-1])
            sparse_prefill(q, rows, slots[:, None], self.softmax_scale, topk_length=counts, out=out)
        else:
            self._decode(q, cache, slots, counts, out, plan)

    def _attend_gathered(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor,
        chunk: Any,
    ) -> None:
        """Attention of one chunk of prefills over its rows, gathered as bfloat16."""
        rows, t = self.prefill_bf16_workspace[: int(chunk.chunk_tot_seqlen)], chunk.tokens_slice
        cp_gather_and_upconvert_fp8_kv_cache(cache, rows, chunk.block_table, chunk.seq_lens, chunk.workspace_starts)
        sparse_prefill(q[t], rows[:, None], slots[t][:, None], self.softmax_scale, topk_length=counts[t], out=out[t])
