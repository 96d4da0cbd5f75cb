"""The lightning indexer in vLLM 0.22: keys into the cache, logits and exact top-k by our operations, no DeepGEMM.

In batches of decodes alone the top-k writes slots of the paged cache, not positions, so that attention has nothing to
convert (`ChosenSlots`). Where attention takes no lists (`short.py`), nothing is chosen; where no decode has more keys
than are chosen, nothing is scored.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import vllm.envs as envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import sparse_attn_indexer as stock
from vllm.utils.torch_utils import _encode_layer_name, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backends.mla import indexer as stock_metadata
from vllm.v1.worker.workspace import current_workspace_manager

from ...ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from ...ops.topk import select_rows, select_rows_paged
from ...typing import ScaleFormat
from . import short
from .rebound import rebound

if TYPE_CHECKING:
    from ..untyped import Untyped as StockBackend
    from ..untyped import Untyped as StockBuilder
    from ..untyped import Untyped as StockIndexer

    LayerNameType = Any
else:
    from vllm.utils.torch_utils import LayerNameType

    StockBackend = stock_metadata.DeepseekV32IndexerBackend
    StockBuilder = stock_metadata.DeepseekV32IndexerMetadataBuilder
    StockIndexer = stock.SparseAttnIndexer

# An op of our own, so that vLLM's stays as it is for models with another backend.
LIBRARY: torch.library.Library = torch.library.Library("cupy_mla_vllm", "DEF")
OP = "sparse_attn_indexer"


class ChosenSlots(NamedTuple):
    """Says that the rows of a buffer hold slots in place of positions, with -1 behind them.

    Attributes:
        block_table: by which positions became slots.
        lengths: [tokens] int32 tokens in the context of each query token. So many of its first
            entries (at most all) are not -1.
    """

    block_table: torch.Tensor
    lengths: torch.Tensor

    def checked(self, block_table: torch.Tensor) -> "ChosenSlots":
        """These slots, for attention with a block table. A layer that takes another layer's choice comes here, too."""
        if not _same(self.block_table, block_table):
            raise RuntimeError("the indexer chose slots of another block table than this layer's")
        return self


class NothingChosen(NamedTuple):
    """Says that the rows of a buffer hold nothing, for the attention of their layer takes no lists in this step."""

    def checked(self, block_table: torch.Tensor) -> ChosenSlots:
        """An error, for attention that does take lists."""
        raise RuntimeError("the indexer chose nothing, for its layer's attention takes all rows; this layer's does not")


chosen_slots: dict[int, ChosenSlots | NothingChosen] = {}  # by the buffer's address; what is not here holds positions
taking_slots: set[str] = set()  # the indexer caches of layers whose attention looks there


def of_single_tokens(builder: Any, batch: Any) -> bool:
    """Whether a batch is of decodes of one token each: then token i is request i's, also where both pad the batch.

    vLLM's metadata of it are known before the step. Computing them all the same, by small operations on both sides,
    takes a few percent of a step that the host bounds.

    Args:
        builder: vLLM's or ours. With speculative decoding it knows of longer decodes, and the answer is no.
        batch: vLLM's description of it.
    """
    single = batch.max_query_len == builder.reorder_batch_threshold == 1
    return single and batch.num_reqs == batch.num_actual_tokens


class CupyMLAIndexerBuilder(StockBuilder):
    """vLLM's metadata without DeepGEMM's schedule."""

    _build: Any = rebound(stock_metadata.DeepseekV32IndexerMetadataBuilder.build, has_deep_gemm=lambda: False)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        batch = common_attn_metadata
        if self.compress_ratio > 1 or not of_single_tokens(self, batch):
            return self._build(common_prefix_len, batch, fast_build)
        decode = stock_metadata.DeepSeekV32IndexerDecodeMetadata(
            block_table=batch.block_table_tensor,
            seq_lens=batch.seq_lens.unsqueeze(-1),
            decode_lens=None,  # asked for where they are unequal
            requires_padding=False,
            schedule_metadata=None,
        )
        return stock_metadata.DeepseekV32IndexerMetadata(
            seq_lens=batch.seq_lens,
            max_seq_len=batch.max_seq_len,
            slot_mapping=batch.slot_mapping,
            num_decodes=batch.num_reqs,
            num_decode_tokens=batch.num_reqs,
            num_prefills=0,
            num_prefill_tokens=0,
            decode=decode,
        )


class CupyMLAIndexerBackend(StockBackend):
    """What the indexer's cache says of itself."""

    @staticmethod
    def get_builder_cls() -> type[CupyMLAIndexerBuilder]:
        return CupyMLAIndexerBuilder


class CupyMLAIndexer(StockIndexer):
    """The layer that fills the buffer of chosen positions. It can be made where DeepGEMM is missing."""

    _stock_init: Any = rebound(stock.SparseAttnIndexer.__init__, has_deep_gemm=lambda: True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stock_init(*args, **kwargs)
        _end_graphs_before_the_op()

    def forward_cuda(
        self,
        hidden_states: torch.Tensor,
        q_quant: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        torch.ops.cupy_mla_vllm.sparse_attn_indexer(
            hidden_states,
            _encode_layer_name(self.k_cache.prefix),
            self.k_cache.kv_cache,
            q_quant,
            k,
            weights,
            self.scale_fmt,
            self.topk_tokens,
            self.max_model_len,
            self.max_total_seq_len,
            self.topk_indices_buffer,
            self.skip_k_cache_insert,
        )
        return self.topk_indices_buffer


def adopt(indexer: Any) -> None:
    """Make a layer's indexer run on our operations: its op becomes a `CupyMLAIndexer`, its cache gets our builder.

    Raises:
        ValueError: its keys are FP4, which our operations do not read.
    """
    op = indexer.indexer_op
    if op.use_fp4_cache:
        raise ValueError("cupy_mla has no FP4 indexer cache: leave use_fp4_indexer_cache off")
    op.__class__ = CupyMLAIndexer
    op._forward_method = op.forward_cuda
    indexer.k_cache.get_attn_backend = lambda: CupyMLAIndexerBackend
    taking_slots.add(indexer.k_cache.prefix)
    _end_graphs_before_the_op()


def replace_stock() -> None:
    """Have vLLM make a `CupyMLAIndexer` wherever it makes an indexer, for one that lacks DeepGEMM: its own raises."""
    if "SparseAttnIndexer" not in op_registry_oot:
        stock.SparseAttnIndexer.register_oot(CupyMLAIndexer)


def _end_graphs_before_the_op() -> None:
    """Metadata differ from step to step, so piecewise CUDA graphs must end before the op."""
    splitting_ops = get_current_vllm_config().compilation_config.splitting_ops
    name = f"{LIBRARY.ns}::{OP}"
    if splitting_ops and name not in splitting_ops:
        splitting_ops.append(name)


@eager_break_during_capture
def sparse_attn_indexer(
    hidden_states: torch.Tensor,
    k_cache_prefix: LayerNameType,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    scale_fmt: str,
    topk_tokens: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: torch.Tensor,
    skip_k_cache_insert: bool,
) -> None:
    """Fill the first rows of `topk_indices_buffer`, one a token, with positions in the token's request, -1 behind.

    Or with slots, and `chosen_slots` says so.
    """
    metadata = get_forward_context().attn_metadata
    max_logits_bytes = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20
    if not isinstance(metadata, dict):  # a profiling run: take the memory that the largest batch will
        _gathered(total_seq_lens, q_quant.dtype)
        hidden_states.new_empty(max_logits_bytes, dtype=torch.uint8)
        return
    name = _resolve_layer_name(k_cache_prefix)
    batch = metadata[name]
    chosen_slots.pop(topk_indices_buffer.data_ptr(), None)
    if not skip_k_cache_insert:
        tokens = len(batch.slot_mapping)
        indexer_k_quant_and_cache(k[:tokens], kv_cache, batch.slot_mapping, _scale_format(scale_fmt))
    attention = metadata.get(name.removesuffix(".indexer.k_cache") + ".attn")
    if short.dense_decodes_of(attention) is not None:
        chosen_slots[topk_indices_buffer.data_ptr()] = NothingChosen()
        return
    out = topk_indices_buffer[: len(hidden_states), :topk_tokens]
    decodes = batch.num_decode_tokens if batch.decode is not None else 0
    out[decodes:] = -1  # tokens that pad the batch, and prefills without keys
    if batch.prefill is not None:
        keys, scales = _gathered(total_seq_lens, q_quant.dtype)
        for chunk in batch.prefill.chunks:
            chunk_keys, chunk_scales = keys[: chunk.total_seq_lens], scales[: chunk.total_seq_lens]
            if not chunk.skip_kv_gather:
                cp_gather_indexer_k_quant_cache(
                    kv_cache, chunk_keys, chunk_scales, chunk.block_table, chunk.cu_seq_lens
                )
            part = slice(chunk.token_start, chunk.token_end)
            select_rows(
                q_quant[part], chunk_keys, chunk_scales, weights[part], chunk.cu_seqlen_ks, chunk.cu_seqlen_ke,
                topk_tokens, max_workspace_bytes=max_logits_bytes, out=out[part],
            )  # fmt: skip
    if decodes:
        slots = name in taking_slots and _same_decodes(attention, batch, kv_cache.shape[1])
        all_chosen = batch.max_seq_len <= topk_tokens and not short.captured()
        most_keys = min(max_model_len, topk_tokens) if all_chosen else max_model_len
        _decode(q_quant[:decodes], kv_cache, weights[:decodes], batch.decode, most_keys, max_logits_bytes, slots, out)
        if slots:
            chosen = ChosenSlots(batch.decode.block_table, batch.decode.seq_lens.view(-1))
            chosen_slots[topk_indices_buffer.data_ptr()] = chosen


def _same_decodes(attention: Any, batch: Any, block_size: int) -> bool:
    """Whether the layer's attention serves the same decodes and no others, with the same block table."""
    decode = batch.decode
    return (
        attention is not None
        and attention.num_actual_tokens == batch.num_decode_tokens
        and attention.block_size == block_size
        and getattr(attention.fp8_extra_metadata, "prefill", None) is None
        and not decode.requires_padding
        and decode.seq_lens.is_contiguous()
        and _same(attention.block_table, decode.block_table)
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether rows of block tables are the same memory; one may have more rows."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape[1] == b.shape[1]


def _decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    decode: Any,
    most_keys: int,
    max_logits_bytes: int,
    slots: bool,
    out: torch.Tensor,
) -> None:
    """The decodes of a batch. Where requests have unequal numbers of query tokens, each token is a request."""
    tokens = len(q)
    lens, table = decode.seq_lens, decode.block_table
    if decode.requires_padding:
        counts = decode.decode_lens
        request = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts, output_size=tokens)
        place = torch.arange(tokens, device=q.device) - (counts.cumsum(0) - counts)[request]
        lens, table = lens[request, place], table[request]
    select_rows_paged(
        q.view(len(table), -1, *q.shape[1:]), kv_cache, weights, lens, table, most_keys, out.shape[1],
        slots=slots, max_workspace_bytes=max_logits_bytes, out=out[:tokens],
    )  # fmt: skip


def _scale_format(name: str) -> ScaleFormat:
    return "ue8m0" if name == "ue8m0" else "fp32"  # as vLLM's kernel reads it


def _gathered(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Workspace for gathered keys [rows, 128] and their scales [rows]."""
    return current_workspace_manager().get_simultaneous(((rows, 128), dtype), ((rows,), torch.float32))


def _fake(
    hidden_states: torch.Tensor,
    k_cache_prefix: LayerNameType,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    scale_fmt: str,
    topk_tokens: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: torch.Tensor,
    skip_k_cache_insert: bool,
) -> None:
    return None


direct_register_custom_op(
    op_name=OP,
    op_func=sparse_attn_indexer,
    mutates_args=["topk_indices_buffer"],  # as vLLM's: were the cache among them, a compiled graph might copy it
    fake_impl=_fake,
    target_lib=LIBRARY,
)
