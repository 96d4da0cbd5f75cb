"""The V4 backend on DeepSeek-V4's and V4.1's layers, against float64 attention over windows and compressed rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_mla import (
    DeepseekV4Impl,
    DeepseekV4Layer,
    Place,
    SparseMLAConfig,
    SparseMLAMetadataBuilder,
    SparseSWAMetadataBuilder,
    Workspace,
)
from cupy_mla.bridges import describe
from tests import oracle
from tests.backends.test_sparse_mla import capture
from tests.backends.v4_steps import SCALE, Engine, Model, assert_same_bits, check, make_step, v4, v41
from tests.kinds import BF16, NumPy, gapped, poisoned

of_both = pytest.mark.parametrize("of", [v4, v41], ids=["v4", "v41"])


@pytest.mark.long(sample=20)
@pytest.mark.parametrize(
    "model",
    [v4(), v4(heads=16, window=128, swa_block=64, block=256), v4(heads=1, window=1, swa_block=1, gap=1),
     v4(heads=8, window=64, swa_block=61, speculative=2, gap=1), v41(),
     v41(heads=8, window=128, swa_block=32, block=64), v41(heads=1, window=1, swa_block=1, block=2),
     v41(heads=20, window=61, swa_block=61, block=6, speculative=2)],
    ids=[f"{kind}-{name}" for kind in ("v4", "v41") for name in ("small", "real", "least", "odd")],
)  # fmt: skip
@pytest.mark.parametrize(
    "query_lens", [[], [1], [7], [1] * 5, [1, 1, 6, 4, 20], [5] * 9, [2, 1, 3, 0, 1, 5], [0, 0]], ids=str
)
def test_batches(kind, rng, model: Model, query_lens: list[int]) -> None:
    """Decodes alone, prefills alone, both; uneven decodes; more prefills than a chunk; requests without tokens. With
    lists that each layer converts, and with those of the groups."""
    step, engine = make_step(rng, model, query_lens), Engine(kind, model)
    plain = engine.run(step)
    check(plain, step)
    assert_same_bits(plain, engine.run(step, shared=True))


OWN = (
    (oracle.V41, oracle.V41), (oracle.V41_SPLIT, oracle.V41_SPLIT), (oracle.V41, oracle.V41_FP4),
    (oracle.V41, oracle.V41_FP4_SPLIT), (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT),
)  # fmt: skip


@pytest.mark.long(sample=3)
@pytest.mark.parametrize(("main", "extra"), OWN, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("query_lens", [[1] * 5, [9], [1, 1, 6, 4, 20]], ids=str)
def test_rows_of_v41s_own_formats(kind, rng, query_lens: list[int], main, extra) -> None:
    """528 bytes, and 288 of compressed ones; in pages of several layers, whose blocks have gaps."""
    model = v41(heads=8, main=main, extra=extra, gap=int(rng.integers(3)))
    step = make_step(rng, model, query_lens)
    check(Engine(kind, model).run(step, shared=True), step)


@pytest.mark.parametrize(
    ("model", "edges"),
    [(v4(), [5, 127, 128, 129, 256]), (v4(window=128, speculative=4), [5, 127, 128, 129, 256]),
     (v41(window=4), [5, 7, 8, 9, 16])],
    ids=["v4-short", "v4-long", "v41"],
)  # fmt: skip
def test_sequences_at_the_edges(kind, rng, model: Model, edges: list[int]) -> None:
    """First tokens (no compressed row yet), windows longer than the sequence, both sides of compressed rows, windows
    and blocks."""
    seq_lens = [1, 2, 3, 4, *edges, model.max_model_len, 8, 9]
    engine = Engine(kind, model)
    for query_lens in ([1] * 12, [1] * 10 + [8, 9], [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]):
        step = make_step(rng, model, query_lens, seq_lens)
        check(engine.run(step), step)


def test_whole_prompts(kind, rng) -> None:
    """Prefills of new sequences, which see their first compressed rows come and go beyond the window."""
    model = v4(window=8)
    step = make_step(rng, model, [1, 40, 4, 3, 12], [1, 40, 4, 3, 12])
    check(Engine(kind, model).run(step), step)


def test_steps_one_after_the_other(kind, rng) -> None:
    """The same builders and workspace serve batches of changing shapes."""
    model = v4(speculative=1)
    engine = Engine(kind, model)
    for query_lens in ([1] * 16, [2, 1, 30, 40], [80], [2, 2], [1]):
        step = make_step(rng, model, query_lens)
        check(engine.run(step), step)


def test_chunks_of_many_prefills(kind, rng) -> None:
    """Short ones go into one chunk, of which there is room for few long ones."""
    model = v41()
    engine, longest = Engine(kind, model), model.max_model_len
    for query_lens, seq_lens in (([5] * 12, [9] * 12), ([5] * 12, [longest] * 12), ([5] * 8, [9, 200] * 4)):
        step = make_step(rng, model, query_lens, seq_lens)
        plan = engine.build(step)[0].get_prefill_chunk_plan(1, 4)
        assert (len(plan) == 1) == (max(seq_lens) == 9)
        check(engine.run(step), step)


@of_both
def test_padding_tokens_give_zeros(kind, rng, of) -> None:
    """Tokens without a slot attend nothing, whatever their request's rows."""
    model = of(speculative=2)
    step = make_step(rng, model, [3, 2, 1, 3, 3, 9], padding=0.5)
    got = Engine(kind, model).run(step, shared=of is v41)
    check(got, step)
    padded = step.swa_batch.slot_mapping[: step.decode_tokens] < 0
    assert all((out[: step.decode_tokens][padded] == 0).all() for out in got)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 9, 20]], ids=str)
def test_replayed_prefixes(kind, rng, query_lens: list[int]) -> None:
    """Sequences without rows of the window before some position: their windows begin there."""
    model = v41(window=20, speculative=1)
    step = make_step(rng, model, query_lens, replay=True)
    check(Engine(kind, model).run(step), step)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 9, 20], [40]], ids=str)
@pytest.mark.parametrize("window", [3, 20])
def test_tokens_of_images(kind, rng, query_lens: list[int], window: int) -> None:
    """They see their image in both directions, as far as its rows are there."""
    model = v41(window=window, speculative=1, images=12)
    for replay in (False, True):
        step = make_step(rng, model, query_lens, images=True, replay=replay)
        check(Engine(kind, model).run(step), step)


def test_strides(kind, rng) -> None:
    """A query with gaps, block strides beyond the block, an output with gaps that stay as they were."""
    model = v4(gap=1)
    step = make_step(rng, model, [1, 1, 6, 30])
    step.q = gapped(step.q, 0, 2, 24)
    check(Engine(kind, model).run(step, out_gaps=(0, 1, 8)), step)


def test_caches_with_a_head_axis(kind, rng) -> None:
    model = v4()
    step = make_step(rng, model, [1, 1, 6])
    for cache in (*step.swa, *step.compressed.values()):
        cache.array = cache.array[:, :, None]
    check(Engine(kind, model).run(step), step)


def test_what_the_indexer_chose_beyond_the_rows_counts_for_nothing(kind, rng) -> None:
    model = v4()
    step = make_step(rng, model, [1, 1, 6], [3, 7, 6])
    empty = step.chosen[1] == -1
    step.chosen[1][empty] = rng.choice([-1, -(2**31), 2**31 - 1, model.max_model_len], empty.sum())
    check(Engine(kind, model).run(step), step)


def test_errors(rng) -> None:
    model = v4()
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    plain, c4a, _ = engine.layers(step)
    output, cache = np.zeros_like(step.q), c4a.k_cache
    good = {"q": step.q, "layer": c4a, "swa_metadata": swa, "metadata": metadata[4], "output": output}
    other = engine.build(make_step(rng, model, [1, 5]))
    wider = SparseSWAMetadataBuilder(v4(window=10).config(1)).build(step.swa_batch)
    few = SparseSWAMetadataBuilder(model.config(1), compress_ratios=[1]).build(step.swa_batch)
    larger = SparseMLAMetadataBuilder(replace(model.config(4), block_size=256)).build(step.batches[4])
    longer = engine.builders[4].build(make_step(rng, model, [1, 6]).batches[4])
    cases = [
        ({"q": step.q[:5], "output": step.q[:5].copy()}, ValueError, "q: expected the 6 tokens of swa_metadata, got 5"),
        ({"q": step.q[:, :2]}, ValueError, r"q: expected shape \[T, 3, 512\]"),
        ({"output": np.zeros((6, 3, 448), BF16)}, ValueError, r"output: expected shape \[6, 3, 512\]"),
        ({"output": np.zeros((6, 3, 512), np.float32)}, TypeError, "output: expected dtype bfloat16"),
        ({"layer": plain}, ValueError, r"layer\.k_cache: expected one for layers of compress ratio 4"),
        ({"layer": DeepseekV4Layer(plain.swa_k_cache, plain.attn_sink, cache)}, ValueError,
         r"layer\.topk_indices: expected one"),
        ({"layer": DeepseekV4Layer(cache[:, :5], c4a.attn_sink, cache, c4a.topk_indices)}, ValueError,
         r"layer\.swa_k_cache: expected shape \[num_blocks, 4, 584\]"),
        ({"layer": DeepseekV4Layer(c4a.swa_k_cache, c4a.attn_sink, c4a.swa_k_cache, c4a.topk_indices)}, ValueError,
         r"layer\.k_cache: expected shape \[num_blocks, 32, 584\]"),
        ({"layer": DeepseekV4Layer(c4a.swa_k_cache, c4a.attn_sink, cache, c4a.topk_indices[:5])}, ValueError,
         r"layer\.topk_indices: expected shape \[6, 20\]"),
        ({"metadata": None}, ValueError, "metadata: expected one for layers of compress ratio 4"),
        ({"metadata": other[1][128]}, ValueError, "metadata: built for compress_ratio 128, these layers have 4"),
        ({"metadata": longer}, ValueError,
         "metadata: expected the 2 requests and 6 tokens of swa_metadata, got 2 and 7"),
        ({"metadata": larger}, ValueError, "metadata: built for block_size 256, these layers have 128"),
        ({"swa_metadata": wider}, ValueError, "swa_metadata: built for window 10, these layers have 9"),
        ({"metadata": swa}, TypeError, "metadata: expected a SparseMLAMetadata, got .*SparseSWAMetadata"),
        ({"swa_metadata": step.swa_batch}, TypeError, "swa_metadata: expected a SparseSWAMetadata, got .*BatchMeta"),
        ({"layer": (c4a.swa_k_cache, c4a.attn_sink)}, TypeError, "layer: expected a DeepseekV4Layer, got .*tuple"),
        ({"layer": replace(c4a, attn_sink=None)}, ValueError, r"layer\.attn_sink: expected one"),
        ({"swa_metadata": few}, ValueError, r"swa_metadata: built for compress ratios \(1,\), these layers have 4"),
    ]  # fmt: skip
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            engine.impls[4].forward(**{**good, **change})
    with pytest.raises(ValueError, match=r"layer\.k_cache: expected None for layers of compress ratio 1"):
        engine.impls[1].forward(**{**good, "metadata": None})
    with pytest.raises(ValueError, match=r"config: expected V4 layers with FP8 or FP4 rows, got layout 'bf16'"):
        DeepseekV4Impl(SparseMLAConfig(3, d_qk=512), SCALE, engine.workspace)
    torch = pytest.importorskip("torch")
    q = torch.zeros((6, 3, 512), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q: expected it where the workspace is"):
        engine.impls[4].forward(**{**good, "q": q, "output": q})


def test_both_metadata_are_of_one_step(rng) -> None:
    """Of other requests, decodes or maxima: C128A's lists would be those of other tokens, or end too early."""
    model = v4(speculative=2)
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [3, 3, 5], [300, 200, 390])
    swa, metadata = engine.build(step)
    output, torch = np.zeros_like(step.q), pytest.importorskip("torch")
    layers = dict(zip(model.ratios, engine.layers(step), strict=True))

    def forward(ratio: int, swa=swa, metadata=metadata, impl=engine.impls) -> None:
        impl[ratio].forward(step.q, layers[ratio], swa, metadata[ratio], output)

    for ratio in model.ratios:
        forward(ratio)
    config = model.config(128)
    for change, message in (
        ({"num_speculative_tokens": 0}, "expected the 6 decode tokens of swa_metadata, got 0"),
        ({"max_model_len": 128 * 200}, "built for lists of 256 rows, those of max_model_len 397"),
        ({"max_model_len": 128 * 300}, "built for lists of 384 rows, those of max_model_len 397"),
    ):
        other = SparseMLAMetadataBuilder(replace(config, **change)).build(step.batches[128])
        with pytest.raises(ValueError, match=f"^metadata: {message}"):
            forward(128, metadata={128: other})
    few = {
        ratio: DeepseekV4Impl(replace(model.config(ratio), max_num_batched_tokens=10), SCALE, engine.workspace)
        for ratio in model.ratios
    }
    short = {4: DeepseekV4Impl(replace(model.config(4), max_model_len=389), SCALE, engine.workspace)}
    with pytest.raises(ValueError, match=r"swa_metadata: expected at most 10 query tokens"):
        forward(1, impl=few)
    with pytest.raises(ValueError, match=r"^metadata: expected at most 389 tokens in a sequence .*, got 390"):
        forward(4, impl=short)
    split = make_step(rng, model, [3, 3, 3, 2], [300, 200, 390, 100])
    other = engine.builders[4].build(split.batches[4])
    with pytest.raises(ValueError, match=r"^metadata: expected the 3 requests and 11 tokens .*, got 4 and 11"):
        forward(4, metadata={4: other})
    place = Place.of(torch.zeros(1))
    for name, given in (
        ("swa_metadata", {"swa": SparseSWAMetadataBuilder(model.config(1), place).build(step.swa_batch)}),
        ("metadata", {"metadata": {4: SparseMLAMetadataBuilder(model.config(4), place).build(step.batches[4])}}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected it where the workspace is"):
            forward(4, **given)


def test_a_locked_workspace_must_have_been_warmed_up(rng) -> None:
    model = v4()
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    workspace = Workspace(Place("numpy", -1))
    workspace.lock()
    impl = DeepseekV4Impl(model.config(4), SCALE, workspace)
    with pytest.raises(RuntimeError, match="the workspace is locked at 0 bytes"):
        impl.forward(step.q, engine.layers(step)[1], swa, metadata[4], np.zeros_like(step.q))


def test_addresses_survive_steps(kind, rng) -> None:
    """What a captured step reads and writes stays in its place from step to step."""
    model = v4(speculative=1)
    engine = Engine(kind, model)
    addresses = set()
    for _ in range(2):
        step = make_step(rng, model, [2, 2, 5])
        swa, metadata = engine.build(step)
        engine.run(step)
        arrays = (
            swa.decode_swa_indices, swa.decode_swa_lens, swa.prefill_gather_lens, metadata[128].slot_mapping,
            metadata[128].c128a_global_decode_topk_indices, *engine.impls[4]._scratch(4, 5, 1),
        )  # fmt: skip
        addresses.add(tuple(describe("x", a).ptr for a in arrays))
    assert len(addresses) == 1


def test_errors_of_v41(rng) -> None:
    model = v41()
    engine, step = Engine(NumPy(), model), make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    good = {"q": step.q, "swa_metadata": swa, "output": np.zeros_like(step.q)}
    plain, *_, c1a, _, _, _ = engine.layers(step)
    with pytest.raises(ValueError, match=r"^layer\.k_cache: expected None for layers of compress ratio 0"):
        engine.impls[0].forward(**good, layer=replace(plain, k_cache=c1a.k_cache), metadata=None)
    with pytest.raises(ValueError, match=r"^layer\.k_cache: expected shape \[num_blocks, 4, 584\]"):
        engine.impls[2].forward(**good, layer=c1a, metadata=metadata[2])
    groups = engine.groups[1]
    groups.build(metadata[1], swa)
    shared = replace(c1a, topk_indices=groups.put(4, c1a.topk_indices))
    engine.impls[1].forward(**good, layer=shared, metadata=metadata[1])
    later = engine.builders[1].build(step.batches[1])
    with pytest.raises(ValueError, match=r"^topk_indices: converted for another step than metadata's"):
        engine.impls[1].forward(**good, layer=shared, metadata=later)
    of_v4 = SparseSWAMetadataBuilder(replace(model.config(0), model="v4", compress_ratio=1)).build(step.swa_batch)
    with pytest.raises(ValueError, match=r"^swa_metadata: built for model v4|built for compress ratios"):
        engine.impls[1].forward(**{**good, "swa_metadata": of_v4}, layer=c1a, metadata=metadata[1])
    longer = SparseSWAMetadataBuilder(replace(model.config(0), max_model_len=500)).build(step.swa_batch)
    with pytest.raises(
        ValueError, match=r"^swa_metadata: built for max_model_len 500, these layers have 211 \(config\)"
    ):
        engine.impls[1].forward(**{**good, "swa_metadata": longer}, layer=c1a, metadata=metadata[1])


def test_caches_of_other_rows_are_refused(rng) -> None:
    """By their rows' size; an array does not tell V41_FP8 and V41_FP8_SPLIT apart."""
    model = v41(main=oracle.V41, extra=oracle.V41_FP4)
    engine, step = Engine(NumPy(), model), make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    good = engine.layers(step)[4]
    for name, others, rows in (("k_cache", (9, 8, 528), "8, 288"), ("swa_k_cache", (9, 4, 584), "4, 528")):
        layer = replace(good, **{name: np.zeros(others, np.uint8)})
        with pytest.raises(ValueError, match=rf"^layer\.{name}: expected shape \[num_blocks, {rows}\], got"):
            engine.impls[1].forward(step.q, layer, swa, metadata[1], np.zeros_like(step.q))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "shared"),
    [(v4(swa_block=64, block=256), False), (v41(swa_block=32, block=64), False), (v41(swa_block=32, block=64), True),
     (v41(swa_block=32, block=64, main=oracle.V41, extra=oracle.V41_FP4), False),
     (v41(swa_block=32, block=64, main=oracle.V41, extra=oracle.V41_FP4), True)],
    ids=["v4", "v41", "v41-shared", "v41_fp8-v41_fp4", "v41_fp8-v41_fp4-shared"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([2, 1, 2, 2, 1, 2], None), ([2, 1, 2, 5, 3], [20, 9, 0, 131, 3])],
    ids=["decode", "prefill"],
)  # fmt: skip
def test_a_captured_step_gives_the_same_bits(kind, rng, query_lens, seq_lens, model: Model, shared: bool) -> None:
    """All layers captured once, replayed with other batches of the same shapes, against eager runs."""
    if not kind.on_gpu:
        pytest.skip("CUDA graphs")
    model = replace(model, heads=16, window=128, speculative=1)
    seq_lens = seq_lens and [n or model.max_model_len - 7 for n in seq_lens]
    engine = Engine(kind, model)
    steps = [make_step(rng, model, query_lens, seq_lens) for _ in range(3)]
    swa, metadata = engine.build(steps[0])
    layers, q = engine.layers(steps[0]), kind.put(steps[0].q)
    outs = [kind.put(poisoned(steps[0].q.shape, BF16)) for _ in layers]
    replay = capture(kind, lambda: engine.forward(layers, q, swa, metadata, outs, shared))
    for step in steps:
        engine.build(step)
        q[...] = kind.put(step.q)
        for layer, fresh in zip(layers, engine.layers(step), strict=True):
            for name in ("swa_k_cache", "attn_sink", "k_cache", "topk_indices"):
                if getattr(fresh, name) is not None:
                    getattr(layer, name)[...] = getattr(fresh, name)
        for out in outs:
            out[...] = 0
        replay()
        replayed = [kind.take(out).copy() for out in outs]
        check(replayed, step)
        assert_same_bits(engine.run(step, shared), replayed)
