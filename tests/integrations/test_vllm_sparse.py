"""The sparse backend for vLLM on stand-ins of its classes, on the CPU: attention, lse of a rank, cache write."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cupy_mla.integrations import vllm as plugin  # noqa: E402
from tests.backends.test_sparse_mla import BLOCK_SIZE, SCALE, TOPK, Step, assert_result, make_step  # noqa: E402
from tests.integrations.stub_vllm import engine, loaded  # noqa: E402
from tests.integrations.test_vllm import HOSTILE, as_torch, float32_backend, vllm_batch  # noqa: E402

CACHES = {"bf16": ("auto", "bf16"), "fp8": ("fp8_ds_mla", "v32_fp8")}


@pytest.fixture
def adapter(vllm: None) -> ModuleType:
    return importlib.import_module(f"{plugin.__name__}.sparse_mla")


def spread(cache: torch.Tensor, gap: int) -> torch.Tensor:
    """The same blocks with `gap` rows of another layer behind each."""
    blocks, size, width = cache.shape
    whole = cache.new_full((blocks, size + gap, width), 0xFF if cache.dtype == torch.uint8 else torch.nan)
    whole[:, :size] = cache
    return whole[:, :size]


def given(step: Step, layout: str, rope: bool, pair: bool) -> tuple[Any, torch.Tensor]:
    """The query, whole or in two parts, and the cache, of a model with RoPE or without."""
    q, rows = as_torch(step.q), as_torch(step.caches[layout])
    width = 576 if rope else 512
    if layout == "bf16":
        rows = rows[..., :width].contiguous()
    return (q[..., :512], q[..., 512:width].clone()) if pair else q[..., :width].contiguous(), rows


def metadata(step: Step, num_decode_tokens: int) -> SimpleNamespace:
    batch = step.batch
    requests = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
    return SimpleNamespace(
        block_size=BLOCK_SIZE, num_decode_tokens=num_decode_tokens, req_id_per_token=requests,
        block_table=batch.block_table, cp_kv_cache_interleave_size=1,
    )  # fmt: skip


def test_backend(adapter) -> None:
    backend = adapter.CupyMLASparseBackend
    capability = [(7, 5), (8, 0), (9, 0), (12, 1)]
    supported = [backend.supports_compute_capability(SimpleNamespace(major=a, minor=b)) for a, b in capability]
    assert supported == [False, True, True, True]
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert "nvfp4_ds_mla" not in backend.supported_kv_cache_dtypes
    assert backend.get_impl_cls() is adapter.CupyMLASparseImpl
    builder = builder_of(adapter, "bf16")
    assert builder.metadata_cls is adapter.common.SparseMLACommonMetadata
    assert builder._cudagraph_support.name == "UNIFORM_BATCH", "full graphs hold decodes, speculative ones too"


@contextmanager
def of_ranks(count: int) -> Iterator[None]:
    """Layers that are made meanwhile share rows with other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("vllm.v1.attention.backend"), "ranks", count)
        yield


def reasons(adapter, capability: tuple[int, int] = (9, 0), head_size: int = 576, **ranks: bool) -> list[str]:
    """Why vLLM does not take the backend for a layer."""
    gpu = SimpleNamespace(major=capability[0], minor=capability[1])
    layer = head_size, torch.bfloat16, "auto", None, True, False, True, False, False, gpu, "decoder"
    return adapter.CupyMLASparseBackend.validate_configuration(*layer, **ranks)


def test_prefill_and_decode_context_parallelism_together_are_refused(adapter) -> None:
    """Each alone is served: `test_the_parts_of_ranks_merge`."""
    assert reasons(adapter) == reasons(adapter, use_pcp=True) == reasons(adapter, use_dcp=True) == []
    (reason,) = reasons(adapter, use_pcp=True, use_dcp=True)
    assert reason.startswith("prefill together with decode context parallelism not supported")


@pytest.mark.parametrize(
    ("capability", "deep_gemm"),
    [((8, 0), False), ((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), True),
     ((11, 0), False), ((12, 0), True)],
    ids=str,
)  # fmt: skip
def test_gpus_on_which_all_of_a_layer_runs(adapter, capability, deep_gemm: bool) -> None:
    """The indexer of models without RoPE is vLLM's own; what it lacks is said, with what the GPU has."""
    assert reasons(adapter, capability) == []
    got = reasons(adapter, capability, 512)
    assert len(got) == (not deep_gemm)
    assert all("needs DeepGEMM" in why and why.endswith("this GPU has {}.{}".format(*capability)) for why in got)
    assert reasons(adapter, (7, 5)) == ["compute capability"]


@pytest.mark.parametrize(("rope", "taken"), [(0, True), (64, False)])
def test_heads_of_512_have_no_rope(adapter, rope: int, taken: bool) -> None:
    """GLM-5.3-Flash's have none; V4's have it within these 512, and another attention."""
    config = importlib.import_module("vllm.config")
    config.current = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(qk_rope_head_dim=rope)),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    got = reasons(adapter, (10, 0), 512), reasons(adapter, (9, 0), 512)
    assert got == (([], []) if taken else (["head size 512 is served for models without RoPE alone"],) * 2)
    assert reasons(adapter) == []


def test_rows_outside_of_the_cache_are_refused(adapter) -> None:
    loaded("vllm.config").current = SimpleNamespace(
        model_config=None, attention_config=SimpleNamespace(hisparse_config="on")
    )
    (reason,) = reasons(adapter)
    assert reason.startswith("HiSparse not supported")


@pytest.mark.parametrize(
    ("heads", "fields", "most"),
    [(16, {}, 128), (32, {}, 128), (64, {}, 256), (128, {}, 256), (8, {}, 256),
     (64, {"speculative": SimpleNamespace(num_speculative_tokens=300)}, 301), (64, {"ranks": 2}, 256),
     (64, {"ranks": 2, "interleave": 16}, 1)],
    ids=str,
)  # fmt: skip
def test_short_extends_are_decodes(adapter, heads: int, fields: dict[str, Any], most: int) -> None:
    """As in vLLM's own backends on Hopper."""
    assert builder_of(adapter, "bf16", heads=heads, **fields).reorder_batch_threshold == most


@pytest.mark.parametrize(
    ("query_lens", "speculative", "taken"),
    [([1, 1], 0, True), ([1, 1, 0], 0, True), ([3, 3], 2, True), ([3, 3], 1, False), ([3, 3], 0, False),
     ([3, 2, 1], 2, False), ([1, 6], 0, False)],
    ids=str,
)  # fmt: skip
def test_only_decodes_take_no_lists(adapter, rng, query_lens: list[int], speculative: int, taken: bool) -> None:
    """As long as one another; extends are none, however short. A request of no token pads the batch."""
    more = {"speculative": SimpleNamespace(num_speculative_tokens=speculative)} if speculative else {}
    tokens = sum(query_lens) if max(query_lens) > 1 else len(query_lens)
    batch = vllm_batch(make_step(rng, 12, query_lens, [TOPK, 6, 1][: len(query_lens)]).batch, tokens)
    found = adapter.short.dense_decodes_of(builder_of(adapter, "bf16", **more).build(0, batch))
    assert (found is not None) == taken


@pytest.mark.parametrize(
    ("query_lens", "tokens", "taken"),
    [([1, 1], 2, True), ([1, 1], 4, False), ([3, 3], 6, True), ([3, 3], 8, False), ([3, 2, 1], 9, False)],
    ids=str,
)  # fmt: skip
def test_tokens_that_pad_a_batch(adapter, rng, query_lens: list[int], tokens: int, taken: bool) -> None:
    """They are of no request, so a batch that has them can be no table of requests and their tokens."""
    batch = vllm_batch(make_step(rng, 12, query_lens, [TOPK, 6, 1][: len(query_lens)]).batch, tokens)
    builder = builder_of(adapter, "bf16", speculative=SimpleNamespace(num_speculative_tokens=2))
    assert (adapter.short.dense_decodes_of(builder.build(0, batch)) is not None) == taken


def test_rows_of_a_table_behind_the_requests_are_not_read(adapter, rng) -> None:
    """A step's block table may have more rows than the step has requests."""
    step = make_step(rng, 12, [1, 1], [TOPK, 6], all_listed=True)
    batch = vllm_batch(step.batch, 2)
    table = batch.block_table_tensor
    batch.block_table_tensor = torch.cat([table, torch.full_like(table, HOSTILE)])
    built = builder_of(adapter, "bf16").build(0, batch)
    impl = adapter.CupyMLASparseImpl(SCALE, "auto", 64, torch.full_like(as_torch(step.topk_indices), HOSTILE))
    got, _ = impl.forward_mqa(as_torch(step.q), as_torch(step.caches["bf16"]), built, None)
    assert_result(got.float().numpy(), step.want)


def test_a_captured_step_takes_lists(adapter, rng, monkeypatch) -> None:
    """vLLM says `max_model_len` of a step that it captures. Should one say less, the capture is seen."""
    batch = vllm_batch(make_step(rng, 12, [1, 1], [TOPK, 3]).batch, 2)
    builder = builder_of(adapter, "bf16")
    metadata = builder.build(0, batch)
    batch.max_seq_len = TOPK + 1
    assert adapter.short.dense_decodes_of(builder.build(0, batch)) is None
    assert adapter.short.dense_decodes_of(metadata) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert adapter.short.dense_decodes_of(metadata) is None


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [7], [1, 1, 6, 3]], ids=str)
@pytest.mark.parametrize("pair", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("gap", [0, 3])
def test_attention(adapter, rng, rope: bool, cache: str, query_lens: list[int], pair: bool, gap: int) -> None:
    """Against float64 attention over the chosen rows, with and without rows of other layers between blocks."""
    step = make_step(rng, 12, query_lens, rope=rope)
    cache_type, layout = CACHES[cache]
    q, rows = given(step, layout, rope, pair)
    impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64 if rope else 0, as_torch(step.topk_indices))
    decodes = len(step.q) if max(query_lens) == 1 else 0
    got, lse = impl.forward_mqa(q, spread(rows, gap), metadata(step, decodes), None)
    assert lse is None
    assert_result(got.float().numpy(), step.want)
    assert impl.supports_dense_mha_prefill == (rope or cache == "bf16")


def builder_of(adapter, cache: str, rope: bool = True, heads: int = 12, **fields: Any) -> Any:
    model = SimpleNamespace(qk_rope_head_dim=64 if rope else 0, get_num_attention_heads=lambda parallel: heads)
    parallel = SimpleNamespace(
        cp_kv_cache_interleave_size=fields.pop("interleave", 1), decode_context_parallel_size=fields.pop("ranks", 1)
    )
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, speculative_config=fields.pop("speculative", None)
    )  # fmt: skip
    spec = SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype_str=CACHES[cache][0])
    backend = fields.pop("backend", adapter.CupyMLASparseBackend)
    builder = backend.get_builder_cls()(spec, [], config, None)
    vars(builder).update(fields)
    return builder


@pytest.mark.parametrize(
    ("cache", "rope", "rows"), [("bf16", True, "bf16 576"), ("bf16", False, "bf16 512"), ("fp8", True, "v32_fp8 576")]
)
def test_the_dense_way_must_be_faster_over_the_caches_rows(
    adapter, rng, monkeypatch, cache: str, rope: bool, rows: str
) -> None:
    asked = []
    monkeypatch.setattr(
        adapter.short, "faster_than_lists", lambda place, of, *sizes: asked.append(f"{of.name} {of.d_qk}")
    )
    step = make_step(rng, 12, [1, 1], [TOPK, 3], rope=rope)
    built = builder_of(adapter, cache, rope).build(0, vllm_batch(step.batch, 2))
    assert adapter.short.dense_decodes_of(built) is None
    assert asked == [rows]


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("longest", [TOPK - 1, TOPK, TOPK + 1])
@pytest.mark.parametrize("pair", [True, False], ids=["parts", "whole"])
def test_short_contexts(adapter, rng, rope: bool, cache: str, longest: int, pair: bool) -> None:
    """Decodes of at most topk tokens attend over all rows; their lists are poisoned."""
    step = make_step(rng, 12, [1, 1, 1], [longest, 1, 9], rope=rope, all_listed=True)
    built = builder_of(adapter, cache, rope).build(0, vllm_batch(step.batch, 3))
    dense = adapter.short.dense_decodes_of(built)
    assert (dense is not None) == (longest <= TOPK)
    cache_type, layout = CACHES[cache]
    lists = as_torch(step.topk_indices)
    q, rows = given(step, layout, rope, pair)
    if dense is None:
        built = metadata(step, 3)
    else:
        lists.fill_(HOSTILE)
    impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64 if rope else 0, lists)
    got, lse = impl.forward_mqa(q, spread(rows, 3), built, None)
    assert lse is None
    assert_result(got.float().numpy(), step.want)


@pytest.mark.parametrize("fields", [{"dcp_world_size": 2}, {"use_pcp": True}], ids=str)
def test_ranks_take_lists(adapter, rng, fields: dict[str, Any]) -> None:
    batch = vllm_batch(make_step(rng, 12, [1, 1], [TOPK, 2]).batch, 2)
    assert adapter.short.dense_decodes_of(builder_of(adapter, "bf16").build(0, batch)) is not None
    assert adapter.short.dense_decodes_of(builder_of(adapter, "bf16", **fields).build(0, batch)) is None
    batch.causal = False
    assert adapter.short.dense_decodes_of(builder_of(adapter, "bf16").build(0, batch)) is None


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 6, 3]], ids=str)
def test_sinks(adapter, rng, cache: str, query_lens: list[int]) -> None:
    """Of HY-V4: as the keyword `sinks` of the impl. Such layers have neither dense prefills nor ranks that merge."""
    step = make_step(rng, 8, query_lens)
    cache_type, layout = CACHES[cache]
    arguments = SCALE, cache_type, 64, as_torch(step.topk_indices)
    impl = adapter.CupyMLASparseImpl(*arguments, sinks=as_torch(step.sinks))
    decodes = len(step.q) if max(query_lens) == 1 else 0
    got, _ = impl.forward_mqa(as_torch(step.q), as_torch(step.caches[layout]), metadata(step, decodes), None)
    assert_result(got.float().numpy(), step.want_with_sinks)
    assert adapter.CupyMLASparseBackend.supports_sink()
    assert (impl.supports_dense_mha_prefill, impl.supports_dcp) == (False, False)
    with of_ranks(2), pytest.raises(NotImplementedError, match="sinks with decode context parallelism"):
        adapter.CupyMLASparseImpl(*arguments, sinks=as_torch(step.sinks))
    short = make_step(rng, 8, [1, 1], [TOPK, 3], all_listed=True)  # decodes that take no lists
    built = builder_of(adapter, cache, heads=8).build(0, vllm_batch(short.batch, 2))
    assert adapter.short.dense_decodes_of(built) is not None
    other = adapter.CupyMLASparseImpl(*arguments, sinks=as_torch(short.sinks))
    got, _ = other.forward_mqa(as_torch(short.q), as_torch(short.caches[layout]), built, None)
    assert_result(got.float().numpy(), short.want_with_sinks)
    plain = adapter.CupyMLASparseImpl(*arguments)
    assert (plain.supports_dense_mha_prefill, plain.supports_dcp) == (True, True)


@pytest.mark.parametrize(
    ("block_size", "gap", "page"), [(64, 0, 64), (64, 64, 64), (128, 64, 64), (64, 8, 8), (64, 3, 1)]
)
@pytest.mark.parametrize("cache", CACHES)
def test_decodes_see_pages_of_64_rows(adapter, rng, monkeypatch, cache, block_size: int, gap: int, page: int) -> None:
    """Or of the largest power of two below that the memory from the first row to the last has whole. How rows are
    reached says that, so it holds for any blocks that vLLM takes."""
    pages = []
    decode = adapter.sparse_decode
    monkeypatch.setattr(
        adapter, "sparse_decode", lambda q, k, *a, **m: (pages.append(k.shape), decode(q, k, *a, **m))[1]
    )
    cache_type, layout = CACHES[cache]
    rows = as_torch(make_step(rng, 2, [1, 1]).caches[layout]).flatten(0, 1)[:1].expand(2 * block_size + gap, -1)
    blocks = spread(rows[: 2 * block_size].reshape(2, block_size, -1), gap)
    impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64, torch.tensor([[block_size + 1, 0]]))
    meta = SimpleNamespace(
        block_size=block_size, num_decode_tokens=1, req_id_per_token=[0], block_table=torch.tensor([[1, 0]]),
    )  # fmt: skip
    impl.forward_mqa(torch.zeros(1, 2, 576, dtype=torch.bfloat16), blocks, meta, None)
    total = 2 * block_size + gap
    assert pages == [(total // page, page, blocks.shape[-1])]


@pytest.mark.parametrize(
    ("cache", "decodes", "runs"),
    [("bf16", 7, "decode"), ("bf16", 1, "prefill"), ("bf16", 0, "prefill"), ("fp8", 7, "decode"), ("fp8", 0, "decode")],
)
def test_what_a_batch_runs_as(adapter, rng, monkeypatch, cache: str, decodes: int, runs: str) -> None:
    """By the number of its 7 query tokens that are of decodes."""
    ran = []
    for kind in ("decode", "prefill"):
        run = getattr(adapter, f"sparse_{kind}")
        monkeypatch.setattr(
            adapter, f"sparse_{kind}", lambda *a, kind=kind, run=run, **k: (ran.append(kind), run(*a, **k))[1]
        )
    step = make_step(rng, 12, [1, 6])
    cache_type, layout = CACHES[cache]
    impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64, as_torch(step.topk_indices))
    impl.forward_mqa(as_torch(step.q), as_torch(step.caches[layout]), metadata(step, decodes), None)
    assert ran == [runs]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("decode", [True, False])
def test_the_parts_of_ranks_merge(adapter, rng, cache: str, decode: bool) -> None:
    """Under context parallelism a rank has its rows' attention and lse: -inf, and zeros, where it has none."""
    step = make_step(rng, 5, [1, 1, 1], seq_lens=[1, 40, 37])
    cache_type, layout = CACHES[cache]
    with of_ranks(2):
        impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64, as_torch(step.topk_indices))
    assert impl.lse_base_on_e
    outs, lses = [], []
    for rank in range(2):
        impl.dcp_rank, meta = rank, metadata(step, 3 if decode else 0)
        out, lse = impl.forward_mqa(as_torch(step.q), as_torch(step.caches[layout]), meta, None)
        assert lse.shape == (3, 5)
        assert (out[lse == -torch.inf] == 0).all()
        outs.append(out.double())
        lses.append(lse.double())
    assert lses[1][0].eq(-torch.inf).all(), "position 0 is rank 0's"
    lse = torch.logaddexp(*lses)
    weights = [(part - lse).exp().nan_to_num(0)[..., None] for part in lses]
    assert_result(sum(w * o for w, o in zip(weights, outs, strict=True)).numpy(), step.want)
    want = np.where(step.want_lse == np.inf, -np.inf, step.want_lse)
    np.testing.assert_allclose(lse.numpy(), want, atol=2e-3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cache", CACHES)
def test_the_profiling_run_takes_the_memory_of_a_step(adapter, rng, monkeypatch, cache: str, ranks: int) -> None:
    """Of the largest batch, once. vLLM calls no attention there, and says what it calls instead by the lack of
    metadata, which later runs may lack, too."""
    step = make_step(rng, 12 * ranks, [30, 10])
    loaded("vllm.config").current = engine()
    cache_type, layout = CACHES[cache]
    with of_ranks(ranks):
        impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64, as_torch(step.topk_indices), 12)
    q, rows = given(step, layout, rope=True, pair=True)
    of, taken = metadata(step, 0), []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, dtype, device: taken.append(np.prod(shape) * dtype.itemsize))
        impl.prepare_for_batch(of)
        assert (impl.prepared, taken) == (of, [])
        impl.prepare_for_batch(None)
        impl.prepare_for_batch(None)
    out, _ = impl.forward_mqa(q, rows, of, None)
    used = sum(each.nbytes for each in (*q, adapter.whole(q, 576), out))
    assert used <= sum(taken) <= 1.2 * used
    with of_ranks(ranks):
        captured = adapter.CupyMLASparseImpl(SCALE, cache_type, 64, as_torch(step.topk_indices), 12)
    monkeypatch.setattr(adapter.short, "captured", lambda: True)  # which would keep the memory for the graph
    monkeypatch.setattr(captured, "reserve_workspace", None)
    captured.prepare_for_batch(None)


@pytest.mark.parametrize("cache_type", ["auto", "fp8_ds_mla"])
def test_cache_write(adapter, cache_type: str) -> None:
    from cupy_mla import concat_and_cache_mla

    impl = adapter.CupyMLASparseImpl(SCALE, cache_type, 64, None)
    fp8 = cache_type == "fp8_ds_mla"
    shape, dtype = ((3, 16, 656), torch.uint8) if fp8 else ((3, 16, 576), torch.bfloat16)
    got, want = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    kv_c, k_pe = torch.randn(3, 512).bfloat16(), torch.randn(3, 1, 64).bfloat16()
    slots = torch.tensor([5, -1, 40])
    impl.do_kv_cache_update(kv_c, k_pe, got, slots, cache_type, torch.ones(()), True)
    concat_and_cache_mla(kv_c, k_pe, want, slots)
    assert want.any()
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    impl.do_kv_cache_update(kv_c, k_pe, torch.zeros(0), slots, cache_type, torch.ones(()))
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: expected one of .*, got 'nvfp4_ds_mla'"):
        impl.do_kv_cache_update(kv_c, k_pe, got, slots, "nvfp4_ds_mla", torch.ones(()))


@pytest.mark.parametrize("cache", CACHES)
def test_the_benchmark_measures_against_exact_attention(adapter, rng, monkeypatch, cache: str) -> None:
    """Its float32 backend is float64 attention but for the rounding of the result, over lists in every step."""
    float32, (cache_type, layout) = float32_backend(monkeypatch), CACHES[cache]
    step = make_step(rng, 12, [1, 40, 3])
    impl = float32.get_impl_cls()(SCALE, cache_type, 64, as_torch(step.topk_indices))
    assert not impl.supports_dense_mha_prefill
    rows = as_torch(step.caches[layout])
    rows.view(torch.uint8)[(rows.view(torch.uint8) == 0xFF).all(-1)] = 0  # it multiplies rows that nobody names by 0
    of = metadata(step, 0)
    of.req_id_per_token, of.block_table = as_torch(of.req_id_per_token).int(), as_torch(of.block_table)
    q = as_torch(step.q)
    got, _ = impl.forward_mqa((q[..., :512], q[..., 512:]), rows, of, None)
    np.testing.assert_allclose(got.float().numpy(), step.want, rtol=1.01 / 256, atol=1e-6)
    batch = vllm_batch(make_step(rng, 12, [1, 1], [TOPK, 3]).batch, 2)
    builder = builder_of(adapter, cache, backend=float32)
    assert adapter.short.dense_decodes_of(builder.build(0, batch)) is None
