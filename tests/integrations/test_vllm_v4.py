"""DeepSeek-V4 of the vLLM plug-in: the attention of vLLM's layers is ours, over several steps on one buffer."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests import oracle_v4  # noqa: E402
from tests.backends.test_sparse_mla import assert_result  # noqa: E402
from tests.integrations import steps_v4  # noqa: E402
from tests.integrations.steps_v4 import BLOCK, MAX_LEN, MAX_TOKENS, ORDER, RATIOS, WINDOW, WINDOW_BLOCK  # noqa: E402
from tests.integrations.stub_vllm import engine, loaded  # noqa: E402
from tests.integrations.test_vllm import HOSTILE  # noqa: E402

IMAGE = 40  # tokens of the longest image


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    return importlib.import_module(f"{plugin.__name__}.deepseek_v4")


def made(heads: int, ratio: int, backend: str | None = None) -> Any:
    """The attention of a layer that vLLM's model makes."""
    of = engine(
        model_config=SimpleNamespace(
            max_model_len=MAX_LEN, get_num_attention_heads=lambda parallel: heads,
            hf_config=SimpleNamespace(ratios={"layer": ratio}, sliding_window=WINDOW, index_topk=steps_v4.TOPK),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=MAX_TOKENS),
        attention_config=SimpleNamespace(backend=backend), device_config=SimpleNamespace(device_type="cpu"),
    )  # fmt: skip
    (layer,) = loaded("vllm.models.deepseek_v4").DeepseekV4ForCausalLM(vllm_config=of).layers
    return layer.attn


def window_metadata(asked: Any, block_size: int, replay: np.ndarray | None = None, **images: Any) -> Any:
    """What vLLM's builder of windows makes of a step. Behind a list's length stands something from an earlier step."""
    decodes, valid, as_torch = asked.num_decodes, asked.slots >= 0, torch.from_numpy
    first = len(valid) if decodes == len(asked.query_lens) else int(asked.starts[decodes])
    seq_lens = np.array(asked.seq_lens, np.int32)
    lists, lens = oracle_v4.swa_indices_and_lens(
        asked.starts, seq_lens, asked.requests, valid, asked.window_table, block_size, WINDOW, replay
    )
    lists[np.arange(WINDOW) >= lens[:, None]] = 3
    gathered = oracle_v4.prefill_gather_lens(seq_lens, asked.starts, decodes, WINDOW, replay)
    return loaded("vllm.v1.attention.backends.mla.sparse_swa").DeepseekSparseSWAMetadata(
        as_torch(asked.window_table), block_size, as_torch(asked.starts), as_torch(asked.starts), as_torch(valid),
        as_torch(asked.requests), as_torch(lists[:first, None]), as_torch(lens[:first]), decodes, first,
        len(asked.query_lens) - decodes, as_torch(seq_lens[decodes:]), as_torch(gathered), **images,
    )  # fmt: skip


def metadata_of(asked: steps_v4.Asked, ratio: int, **images: Any) -> dict[str, Any]:
    """What vLLM's builders make of a step."""
    swa, as_torch = window_metadata(asked, WINDOW_BLOCK, **images), torch.from_numpy
    if ratio == 1:
        return {"layer.swa_cache": swa}
    more: dict[str, Any] = {}
    if ratio == 128:
        widths = MAX_LEN // ratio, MAX_LEN // ratio
        slots, counts, rows = oracle_v4.c128a_lists(
            asked.positions, ratio, swa.num_decode_tokens, asked.requests, asked.table, BLOCK // ratio, asked.slots,
            widths, widths[0],
        )  # fmt: skip
        slots[np.arange(widths[0]) >= counts[:, None]] = 3
        more = {
            "c128a_global_decode_topk_indices": as_torch(slots[:, None]), "c128a_decode_topk_lens": as_torch(counts),
            "c128a_prefill_topk_indices": as_torch(rows),
        }  # fmt: skip
    compressed = loaded("vllm.models.deepseek_v4.sparse_mla").DeepseekV4FlashMLAMetadata
    return {"layer.swa_cache": swa, "layer": compressed(as_torch(asked.table), BLOCK, **more)}


def attended(layer: Any, held: steps_v4.Layer, asked: steps_v4.Asked, metadata: Any) -> np.ndarray:
    """The results for all tokens, of the heads that the model has. Behind the tokens stand those of a larger graph."""
    q = torch.nn.functional.pad(asked.q, (0, 0, 0, layer.padded_heads - held.heads, 0, 3))
    out = torch.full_like(q, torch.nan)
    loaded("vllm.forward_context").context.attn_metadata = metadata
    layer.forward_mqa(q, q[:, 0], torch.zeros(len(q), dtype=torch.int64), out)
    return out[: len(asked.q), : held.heads].float().numpy()


def holding(layer: Any, held: steps_v4.Layer) -> Any:
    """The layer, with caches and sinks."""
    layer.swa_cache_layer.kv_cache, layer.topk_indices_buffer = held.window, held.chosen
    layer.kv_cache = torch.tensor([]) if held.compressed is None else held.compressed
    layer.attn_sink[: held.heads] = held.sink
    return layer


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("heads", [3, 16])
def test_steps(adapter, rng, heads: int, ratio: int) -> None:
    """Beside float64: decodes, prefills, both, and requests that pad the batch, each behind the others."""
    held = steps_v4.Layer(rng, ratio, heads)
    layer = holding(made(heads, ratio), held)
    for name in ORDER:
        asked = held.step(name)
        assert_result(attended(layer, held, asked, metadata_of(asked, ratio)), asked.want)


def choosing(held: steps_v4.Layer) -> Any:
    """What a layer's indexer calls to choose rows."""
    op = made(held.heads, held.ratio).indexer.indexer_op
    op.k_cache = SimpleNamespace(prefix="keys", kv_cache=torch.from_numpy(held.keys))
    op.topk_indices_buffer, op.topk_tokens, op.compress_ratio = held.chosen.fill_(HOSTILE), steps_v4.TOPK, held.ratio
    op.max_model_len, op.max_total_seq_len = MAX_LEN // held.ratio, 4 * MAX_LEN
    return op


def choose(op: Any, asked: steps_v4.Asked, batch: Any) -> Any:
    loaded("vllm.forward_context").context.attn_metadata = None if batch is None else {"keys": batch}
    q = torch.from_numpy(asked.index_q).view(torch.float8_e4m3fn)
    return op(asked.q[:, 0], q, None, torch.from_numpy(asked.weights))


@pytest.mark.parametrize("padded", [False, True])
def test_the_choice_of_unequal_decodes(adapter, rng, padded: bool) -> None:
    """Requests with one query token and with more, as of guessed tokens. `wheel_v4` has all else."""
    held = steps_v4.Layer(rng, 4, 8)
    op, asked = choosing(held), held.step("guessed tokens")
    held.chosen.fill_(HOSTILE)
    keys = loaded("vllm.v1.attention.backends.mla.indexer")
    lens, seq_lens = torch.tensor(asked.query_lens), torch.tensor(asked.seq_lens, dtype=torch.int32)
    table = torch.from_numpy(asked.table)
    if padded:  # vLLM's builder has as many lengths a request as the longest has tokens
        seen = (seq_lens[:, None] - 2 + torch.arange(3)) // held.ratio
        decode = keys.DeepSeekV32IndexerDecodeMetadata(table, seen.int(), lens, True, None)
    else:  # or each token counts as a request
        seen = torch.from_numpy(asked.positions + 1).int()[:, None] // held.ratio
        own = torch.from_numpy(asked.requests).long()
        decode = keys.DeepSeekV32IndexerDecodeMetadata(table[own], seen, torch.ones(len(own)).int(), False, None)
    batch = keys.DeepseekV32IndexerMetadata(
        seq_lens, max(asked.seq_lens), None, len(lens), len(asked.positions), 0, 0, decode
    )  # fmt: skip
    assert choose(op, asked, batch) is held.chosen
    np.testing.assert_array_equal(held.chosen[: len(asked.lists)].numpy(), asked.lists)
    assert (held.chosen[len(asked.lists) :] == HOSTILE).all()


def test_prefills_without_complete_rows(adapter, rng) -> None:
    """vLLM makes no chunk of them; nothing is chosen."""
    held = steps_v4.Layer(rng, 4, 8)
    op, asked = choosing(held), held.step("decodes")
    keys = loaded("vllm.v1.attention.backends.mla.indexer")
    prefill = SimpleNamespace(chunks=[])
    held.chosen.fill_(HOSTILE)
    choose(op, asked, keys.DeepseekV32IndexerMetadata(torch.tensor([2]), 2, None, 0, 0, 1, 2, None, prefill))
    assert (held.chosen[:2] == -1).all()
    assert (held.chosen[2:] == HOSTILE).all()


@pytest.mark.parametrize(
    "lacking", [{"use_pcp": True}, {"dcp_world_size": 2}, {"use_fp4_cache": True}, {"topk_tokens": 4097}]
)
def test_vllms_indexer_stays(adapter, rng, caplog, lacking: dict[str, Any]) -> None:
    """In a profiling run, and with a warning where our operations lack what it needs."""
    held = steps_v4.Layer(rng, 4, 8)
    asked = held.step("decodes")
    assert choose(choosing(held), asked, None) == "stock"
    op = loaded("vllm.model_executor.layers.sparse_attn_indexer").SparseAttnIndexer(**lacking)
    assert caplog.records == []
    importlib.import_module(f"{plugin.__name__}.indexer").adopt_v4(op)
    assert choose(op, asked, SimpleNamespace()) == "stock"
    (record,) = caplog.records
    assert "leaves the indexer to vLLM" in record.getMessage()


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("shown", [False, True], ids=["no image", "image"])
def test_a_model_with_images(adapter, rng, shown: bool, ratio: int) -> None:
    """Prefill tokens see their image whole; lists are as wide as the longest makes them."""
    held = steps_v4.Layer(rng, ratio, 8)
    layer = holding(made(8, ratio), held)
    layer.max_image_tokens = IMAGE
    left, right = np.zeros((2, sum(query_len for _, query_len, _ in ORDER["both"])), np.int32)
    if shown:
        left[10:48], right[10:48] = np.arange(38), np.arange(38)[::-1]  # an image of request 4, longer than a window
    asked = held.step("both", (left, right) if shown else None)
    images = {"prefill_left_visible": left, "prefill_right_visible": right} if shown else {}
    metadata = metadata_of(asked, ratio, **{name: torch.from_numpy(each) for name, each in images.items()})
    assert_result(attended(layer, held, asked, metadata), asked.want)


def test_a_profiling_run_is_vllms(adapter, rng) -> None:
    """There are no metadata; vLLM reserves memory, and writes zeros."""
    held = steps_v4.Layer(rng, 4, 8)
    asked = held.step("both")
    assert not attended(made(8, 4), held, asked, None).any()


@pytest.mark.parametrize(("heads", "written"), [(1, 8), (8, 8), (12, 16), (16, 16), (32, 32), (96, 128), (128, 128)])
def test_heads(adapter, heads: int, written: int) -> None:
    """As many as there are, if vLLM's kernel can write queries of so many."""
    assert made(heads, 1).padded_heads == written


def test_too_many_heads(adapter) -> None:
    with pytest.raises(ValueError, match="at most 128 heads on a GPU, got 129"):
        made(129, 1)


def test_the_model_takes_our_attention(adapter) -> None:
    """Where vLLM would take FlashMLA's; its other choices stay. Only one name of vLLM's is bound to something else."""
    model = loaded("vllm.models.deepseek_v4.nvidia.model")
    assert type(made(16, 4)) is adapter.CupyMLADeepseekV4Attention
    assert type(made(16, 4, "FLASHINFER")) is model.DeepseekV4FlashInferMLAAttention
    assert adapter.DeepseekV4ForCausalLM is model.DeepseekV4ForCausalLM
    for module in ("model", "flashmla"):
        names = vars(loaded(f"vllm.models.deepseek_v4.nvidia.{module}"))
        ours = [name for name, value in names.items() if getattr(value, "__module__", "").startswith("cupy_mla")]
        assert ours == (["_select_dsv4_attn_cls"] if module == "model" else [])
