"""The V4 backend on DeepSeek-V4.1's layers: ratios 0, 1 and 2, compressed caches and lists that layers share.

The oracle is float64 attention over the rows of each token's window and over the chosen rows of the layer's source,
both told by plain loops. Caches hold NaN wherever no row was written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from cupy_mla import (
    BatchMetadata,
    DeepseekV4Impl,
    DeepseekV4Layer,
    IndexGroups,
    Place,
    SparseMLAConfig,
    SparseMLAMetadataBuilder,
    SparseSWAMetadataBuilder,
    Workspace,
    layer_sources,
)
from tests import oracle, oracle_v4
from tests.backends.test_deepseek_v4 import Cache
from tests.backends.test_sparse_mla import capture
from tests.batches import queries
from tests.cases import queries as big
from tests.cases import sinks
from tests.kinds import BF16, NumPy, poisoned

MAX_MODEL_LEN, TOPK, SCALE, TOKENS = 211, 12, 0.05, 90
RATIOS = (0, 2, 2, 2, 1, 1, 1, 0)  # of the model's layers
KV_SOURCE = layer_sources(len(RATIOS), [1, 4])  # whose compressed cache a layer reads
INDEX_SOURCE = layer_sources(len(RATIOS), [1, 3, 4, 6])  # whose list


@dataclass
class Model:
    heads: int = 3
    window: int = 9
    speculative: int = 0
    swa_block: int = 4
    block: int = 8  # tokens
    images: int = 0
    main: oracle.Format = oracle.V4  # rows of windows
    extra: oracle.Format = oracle.V4  # compressed ones
    gap: int = 0  # between blocks of caches

    def config(self, ratio: int) -> SparseMLAConfig:
        return SparseMLAConfig(
            self.heads, d_qk=512, topk=TOPK, block_size=self.block if ratio else self.swa_block,
            max_num_seqs=16, max_num_batched_tokens=TOKENS, max_model_len=MAX_MODEL_LEN, window=self.window,
            num_speculative_tokens=self.speculative, compress_ratio=ratio, model="v41", max_image_tokens=self.images,
            cache_layout=self.main.name, compressed_layout=None if self.extra is self.main else self.extra.name,
        )  # fmt: skip


@dataclass
class Step:
    """One step of all layers, and what each should give."""

    swa_batch: BatchMetadata
    batch: BatchMetadata
    decode_tokens: int
    q: np.ndarray
    sink: np.ndarray
    swa: list[Cache]  # of each layer
    compressed: dict[int, Cache]  # of each source
    chosen: dict[int, np.ndarray]  # of each source
    want: list[np.ndarray]


def make_step(
    rng, model: Model, query_lens: list[int], seq_lens=None, *, images=False, replay=False, padding=0.0
) -> Step:
    requests = len(query_lens)
    if seq_lens is None:
        seq_lens = [n + int(rng.integers(0, MAX_MODEL_LEN + 1 - n)) for n in query_lens]
    batch = queries(query_lens, seq_lens)
    decodes = next((r for r, n in enumerate(query_lens) if n > 1 + model.speculative), requests)
    decode_tokens = sum(query_lens[:decodes])
    start = np.array([rng.integers(0, n - q + 1) if replay else 0 for q, n in zip(query_lens, seq_lens, strict=True)])
    length = rng.integers(1, model.images + 1, batch.tokens) if images else np.ones(batch.tokens, int)
    left = np.minimum(rng.integers(0, length), batch.positions)
    visible = np.stack([left, length - 1 - left])

    def cache(rows: int, block: int, fmt: oracle.Format) -> Cache:
        return Cache(rng, requests, rows, block, model.gap, fmt)

    whole = -(-MAX_MODEL_LEN // model.block) * model.block  # tokens
    swa = [cache(MAX_MODEL_LEN, model.swa_block, model.main) for _ in RATIOS]
    compressed = {s: cache(whole // RATIOS[s], model.block // RATIOS[s], model.extra)
                  for s in set(KV_SOURCE) - {None}}  # fmt: skip
    for one in swa[1:]:
        one.table = swa[0].table
    for one in compressed.values():
        one.table = compressed[1].table
    chosen = {s: np.full((batch.tokens, TOPK), -1, np.int32) for s in set(INDEX_SOURCE) - {None}}
    padded = (rng.random(batch.tokens) < padding) & (np.arange(batch.tokens) < decode_tokens)
    q, sink = big(rng, batch.tokens, model.heads, 512), sinks(rng, model.heads)
    want = [np.zeros((batch.tokens, model.heads, 512)) for _ in RATIOS]
    slots, t = np.full(batch.tokens, -1), 0
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        reach = max(seq_len - query_len - model.window + 1 - model.images, start[r], 0)
        windows = [one.put(r, np.arange(reach, seq_len)) for one in swa]
        rows = {s: one.put(r, np.arange(seq_len // RATIOS[s])) for s, one in compressed.items()}
        prefix = max(seq_len - query_len - model.window + 1, start[r], 0)  # of a prefill's gathered rows
        for p in range(seq_len - query_len, seq_len):
            slots[t] = int(swa[0].slots(r, np.array(p)))
            for s, lists in chosen.items():
                mine = rng.permutation((p + 1) // RATIOS[s])[:TOPK]
                lists[t, : len(mine)] = mine
            first = start[r] if t < decode_tokens else prefix
            seen = oracle_v4.window_of(
                p, model.window, tuple(visible[:, t]), first, seq_len, model.window + model.images
            )
            for layer, ratio in enumerate(RATIOS):
                if padded[t]:
                    continue
                attended = [windows[layer][[i - reach for i in seen]]]
                if ratio:
                    listed = chosen[INDEX_SOURCE[layer]][t]
                    attended.append(rows[KV_SOURCE[layer]][listed[listed >= 0]])
                want[layer][t], _, _ = oracle.attend(q[t], np.concatenate(attended), SCALE, sink)
            t += 1
    slots[padded] = -1
    more = {"replay_start": start} if replay else {}
    if images:
        more |= {"left_visible": visible[0], "right_visible": visible[1]}
    common = (batch.query_start_loc, batch.seq_lens)
    return Step(
        BatchMetadata(*common, swa[0].table, slots, batch.positions, **more),
        BatchMetadata(*common, compressed[1].table, slots, batch.positions),
        decode_tokens, q, sink, swa, compressed, chosen, want,
    )  # fmt: skip


class Engine:
    """Builders and backends of all layers over one kind of array, after a warm-up."""

    def __init__(self, kind, model: Model) -> None:
        self.kind = kind
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.swa_builder = SparseSWAMetadataBuilder(model.config(0), place)
        self.builders = {ratio: SparseMLAMetadataBuilder(model.config(ratio), place) for ratio in (1, 2)}
        self.workspace = Workspace(place)
        self.impls = {ratio: DeepseekV4Impl(model.config(ratio), SCALE, self.workspace) for ratio in (0, 1, 2)}
        self.groups = {ratio: IndexGroups(model.config(ratio), INDEX_SOURCE, place) for ratio in (1, 2)}
        for impl in self.impls.values():
            out = kind.put(poisoned((5, model.heads, 512), BF16))
            impl.forward(kind.put(poisoned((5, model.heads, 512), BF16)), None, None, None, out)
            assert (kind.take(out) == 0).all()
        self.workspace.lock()

    def build(self, step: Step):
        return self.swa_builder.build(step.swa_batch), {
            0: None, **{ratio: builder.build(step.batch) for ratio, builder in self.builders.items()}
        }  # fmt: skip

    def arrays(self, step: Step):
        """Of each layer its window's cache; of each source its compressed cache, and its list."""
        put = self.kind.put
        return (
            [put(cache.array) for cache in step.swa], {s: put(cache.array) for s, cache in step.compressed.items()},
            {s: put(lists) for s, lists in step.chosen.items()},
        )  # fmt: skip

    def forward(self, step_arrays, q, sink, swa, metadata, outs, shared: bool) -> None:
        caches, compressed, chosen = step_arrays
        if shared:
            for ratio, groups in self.groups.items():
                groups.build(metadata[ratio], swa)
        for layer, ratio in enumerate(RATIOS):
            cache = lists = None
            if ratio:
                cache, lists = compressed[KV_SOURCE[layer]], chosen[INDEX_SOURCE[layer]]
                if shared and INDEX_SOURCE[layer] == layer:
                    self.groups[ratio].put(layer, lists)
                if shared:
                    lists = self.groups[ratio].get(layer)
            state = DeepseekV4Layer(caches[layer], sink, cache, lists)
            assert self.impls[ratio].forward(q, state, swa, metadata[ratio], outs[layer]) is outs[layer]

    def run(self, step: Step, shared: bool = False) -> list[np.ndarray]:
        swa, metadata = self.build(step)
        self.workspace.get_simultaneous(((self.workspace.size,), np.uint8))[0][...] = 0xFF
        outs = [self.kind.put(poisoned(step.q.shape, BF16)) for _ in RATIOS]
        q, sink = self.kind.put(step.q), self.kind.put(step.sink)
        self.forward(self.arrays(step), q, sink, swa, metadata, outs, shared)
        return [self.kind.take(out) for out in outs]


def check(got: list[np.ndarray], step: Step) -> None:
    for out, want in zip(got, step.want, strict=True):
        for part, result in (
            (slice(step.decode_tokens), "decode out"),
            (slice(step.decode_tokens, None), "prefill out"),
        ):
            if want[part].size:
                oracle.assert_close(out[part], want[part], result)


@pytest.mark.long(sample=16)
@pytest.mark.long(sample=10)
@pytest.mark.parametrize(
    "model",
    [Model(), Model(heads=8, window=128, swa_block=32, block=64), Model(heads=1, window=1, swa_block=1, block=2),
     Model(heads=20, window=61, swa_block=61, block=6, speculative=2)],
    ids=["small", "real", "least", "odd"],
)  # fmt: skip
@pytest.mark.parametrize("query_lens", [[], [1], [7], [1] * 5, [1, 1, 6, 4, 20], [2, 1, 3, 0, 1, 5]], ids=str)
def test_batches(kind, rng, model: Model, query_lens: list[int]) -> None:
    """Decodes alone, prefills alone, both; with lists that each layer converts, and with those of the groups."""
    step, engine = make_step(rng, model, query_lens), Engine(kind, model)
    plain, shared = engine.run(step), engine.run(step, shared=True)
    check(plain, step)
    for one, other in zip(plain, shared, strict=True):
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


OWN = (
    (oracle.V41, oracle.V41), (oracle.V41_SPLIT, oracle.V41_SPLIT), (oracle.V41, oracle.V41_FP4),
    (oracle.V41, oracle.V41_FP4_SPLIT), (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT),
)  # fmt: skip


@pytest.mark.long(sample=6)
@pytest.mark.parametrize(("main", "extra"), OWN, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("query_lens", [[1] * 5, [9], [1, 1, 6, 4, 20]], ids=str)
def test_rows_of_v41s_own_formats(kind, rng, query_lens: list[int], main, extra) -> None:
    """528 bytes, and 288 of compressed ones; in pages of several layers, whose blocks have gaps."""
    model = Model(heads=8, main=main, extra=extra, gap=int(rng.integers(3)))
    step = make_step(rng, model, query_lens)
    check(Engine(kind, model).run(step, shared=True), step)


def test_sequences_at_the_edges(kind, rng) -> None:
    """First tokens, whose pair is not complete, and both sides of pairs, windows and blocks."""
    model = Model(window=4)
    seq_lens = [1, 2, 3, 4, 5, 7, 8, 9, 16, MAX_MODEL_LEN, 8, 9]
    engine = Engine(kind, model)
    for query_lens in ([1] * 12, [1] * 10 + [8, 9], [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]):
        step = make_step(rng, model, query_lens, seq_lens)
        check(engine.run(step), step)


def test_chunks_of_many_prefills(kind, rng) -> None:
    """Short ones go into one chunk, of which there is room for few long ones."""
    model = Model()
    engine = Engine(kind, model)
    for query_lens, seq_lens in (([5] * 12, [9] * 12), ([5] * 12, [MAX_MODEL_LEN] * 12), ([5] * 8, [9, 200] * 4)):
        step = make_step(rng, model, query_lens, seq_lens)
        plan = engine.build(step)[0].get_prefill_chunk_plan(1, 4)
        assert (len(plan) == 1) == (max(seq_lens) == 9)
        check(engine.run(step), step)


def test_padding_tokens_give_zeros(kind, rng) -> None:
    step = make_step(rng, Model(speculative=2), [3, 2, 1, 3, 3, 9], padding=0.5)
    got = Engine(kind, Model(speculative=2)).run(step, shared=True)
    check(got, step)
    padded = step.swa_batch.slot_mapping[: step.decode_tokens] < 0
    assert all((out[: step.decode_tokens][padded] == 0).all() for out in got)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 9, 20]], ids=str)
def test_replayed_prefixes(kind, rng, query_lens: list[int]) -> None:
    """Sequences without rows of the window before some position: their windows begin there."""
    model = Model(window=20, speculative=1)
    step = make_step(rng, model, query_lens, replay=True)
    check(Engine(kind, model).run(step), step)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 9, 20], [40]], ids=str)
@pytest.mark.parametrize("window", [3, 20])
def test_tokens_of_images(kind, rng, query_lens: list[int], window: int) -> None:
    """They see their image in both directions, as far as its rows are there."""
    model = Model(window=window, speculative=1, images=12)
    for replay in (False, True):
        step = make_step(rng, model, query_lens, images=True, replay=replay)
        check(Engine(kind, model).run(step), step)


def test_errors(rng) -> None:
    model = Model()
    engine, step = Engine(NumPy(), model), make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    caches, compressed, chosen = engine.arrays(step)
    good = {"q": step.q, "swa_metadata": swa, "output": np.zeros_like(step.q)}
    c1a = DeepseekV4Layer(caches[4], step.sink, compressed[4], chosen[4])
    plain = DeepseekV4Layer(caches[0], step.sink, compressed[4])
    with pytest.raises(ValueError, match=r"^layer\.k_cache: expected None for layers of compress ratio 0"):
        engine.impls[0].forward(**good, layer=plain, metadata=None)
    with pytest.raises(ValueError, match=r"^layer\.k_cache: expected shape \[num_blocks, 4, 584\]"):
        engine.impls[2].forward(**good, layer=c1a, metadata=metadata[2])
    groups = engine.groups[1]
    groups.build(metadata[1], swa)
    shared = replace(c1a, topk_indices=groups.put(4, chosen[4]))
    engine.impls[1].forward(**good, layer=shared, metadata=metadata[1])
    later = engine.builders[1].build(step.batch)
    with pytest.raises(ValueError, match=r"^topk_indices: converted for another step than metadata's"):
        engine.impls[1].forward(**good, layer=shared, metadata=later)
    v4 = SparseSWAMetadataBuilder(replace(model.config(0), model="v4", compress_ratio=1)).build(step.swa_batch)
    with pytest.raises(ValueError, match=r"^swa_metadata: built for model v4|built for compress ratios"):
        engine.impls[1].forward(**{**good, "swa_metadata": v4}, layer=c1a, metadata=metadata[1])
    longer = SparseSWAMetadataBuilder(replace(model.config(0), max_model_len=500)).build(step.swa_batch)
    with pytest.raises(
        ValueError, match=r"^swa_metadata: built for max_model_len 500, these layers have 211 \(config\)"
    ):
        engine.impls[1].forward(**{**good, "swa_metadata": longer}, layer=c1a, metadata=metadata[1])


def test_caches_of_other_rows_are_refused(rng) -> None:
    """By their rows' size; an array does not tell V41_FP8 and V41_FP8_SPLIT apart."""
    model = Model(main=oracle.V41, extra=oracle.V41_FP4)
    engine, step = Engine(NumPy(), model), make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    caches, compressed, chosen = engine.arrays(step)
    good = DeepseekV4Layer(caches[4], step.sink, compressed[4], chosen[4])
    for name, others, rows in (("k_cache", (9, 8, 528), "8, 288"), ("swa_k_cache", (9, 4, 584), "4, 528")):
        layer = replace(good, **{name: np.zeros(others, np.uint8)})
        with pytest.raises(ValueError, match=rf"^layer\.{name}: expected shape \[num_blocks, {rows}\], got"):
            engine.impls[1].forward(step.q, layer, swa, metadata[1], np.zeros_like(step.q))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("main", "extra"), [(oracle.V4, oracle.V4), (oracle.V41, oracle.V41_FP4)], ids=lambda fmt: fmt.name
)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([2, 1, 2, 2, 1, 2], None), ([2, 1, 2, 5, 3], [20, 9, 190, 131, 3])],
    ids=["decode", "prefill"],
)  # fmt: skip
def test_a_captured_step_gives_the_same_bits(kind, rng, query_lens, seq_lens, shared: bool, main, extra) -> None:
    """All layers captured once, replayed with other batches of the same shapes, against eager runs."""
    if not kind.on_gpu:
        pytest.skip("CUDA graphs")
    model = Model(heads=16, window=128, swa_block=32, block=64, speculative=1, main=main, extra=extra)
    engine = Engine(kind, model)
    steps = [make_step(rng, model, query_lens, seq_lens) for _ in range(3)]
    swa, metadata = engine.build(steps[0])
    arrays, q, sink = engine.arrays(steps[0]), kind.put(steps[0].q), kind.put(steps[0].sink)
    outs = [kind.put(poisoned(steps[0].q.shape, BF16)) for _ in RATIOS]
    replay = capture(kind, lambda: engine.forward(arrays, q, sink, swa, metadata, outs, shared))
    for step in steps:
        engine.build(step)
        q[...], sink[...] = kind.put(step.q), kind.put(step.sink)
        fresh = engine.arrays(step)
        for old, new in zip(arrays[0], fresh[0], strict=True):
            old[...] = new
        for old_ones, new_ones in zip(arrays[1:], fresh[1:], strict=True):
            for s, new in new_ones.items():
                old_ones[s][...] = new
        for out in outs:
            out[...] = 0
        replay()
        replayed = [kind.take(out).copy() for out in outs]
        check(replayed, step)
        for eager, got in zip(engine.run(step, shared), replayed, strict=True):
            np.testing.assert_array_equal(eager.view(np.uint16), got.view(np.uint16))
