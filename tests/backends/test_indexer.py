"""The indexer's backend against float64 logits and a stable sort, over the keys of each token's own request.

Keys and queries are such that every sum is exact and ties abound, so chosen rows must be equal. Every slot that holds
no key is NaN, and so is the whole workspace.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest

from cupy_mla import IndexerImpl, IndexerMetadataBuilder, SparseMLAConfig, Workspace
from cupy_mla.arrays import HOST
from cupy_mla.bridges import Place, describe
from cupy_mla.calls.operation import forget_calls
from cupy_mla.metadata.batch import BatchMetadata
from tests import indexers, oracle_indexer, oracle_indices
from tests.backends.test_sparse_mla import capture
from tests.batches import queries
from tests.fake_gpu import FakeGPU
from tests.kinds import BF16, E4M3, NumPy, Torch, gapped, poisoned
from tests.ops.test_indexer import key_cache, pack_oracle, token_bytes
from tests.ops.test_pools import expanded

MAX_MODEL_LEN = 130
QUERY_LENS = [[], [1], [7], [1] * 5, [1, 1, 6, 4, 20], [5] * 9, [2, 1, 3, 0, 1, 5], [0, 0], [3, 3, 0]]


@dataclass(frozen=True)
class Model:
    """The shapes of a model and its engine."""

    ratio: int = 1
    heads: int = 8
    topk: int = 12
    speculative: int = 0
    block: int = 16  # tokens
    gap: int = 0
    scale_format: str = "fp32"
    max_workspace_bytes: int = 1 << 20
    longest: int = MAX_MODEL_LEN
    kpool: int = 1
    v41: bool = False

    @property
    def per_key(self) -> int:
        """Tokens that a key stands for."""
        return self.ratio * self.kpool

    @property
    def width(self) -> int:
        """Entries of a list."""
        return self.topk * self.kpool + self.kpool - 1

    def config(self) -> SparseMLAConfig:
        kind = {"d_qk": 512, "cache_layout": "v4_fp8"} if self.ratio > 1 or self.v41 else {}
        if self.v41:
            kind["model"] = "v41"
        return SparseMLAConfig(
            8, topk=self.topk * self.kpool, kpool=self.kpool, block_size=self.block, max_num_seqs=12,
            max_num_batched_tokens=90, max_model_len=self.longest, num_speculative_tokens=self.speculative,
            compress_ratio=self.ratio, max_workspace_bytes=self.max_workspace_bytes, **kind,
        )  # fmt: skip


V32 = Model(speculative=2, max_workspace_bytes=6000)
C4A = Model(ratio=4, topk=6, heads=32, speculative=1, scale_format="ue8m0")
SCHEDULED = Model(speculative=1, block=64)  # on Hopper decodes go by a schedule
C1A, C2A = (Model(ratio=ratio, topk=9, speculative=1, v41=True, scale_format="ue8m0") for ratio in (1, 2))
POOLED = Model(kpool=4, topk=5, speculative=1, scale_format="ue8m0")  # GLM-5.3-Flash
MODELS = [
    Model(), V32, C4A, Model(topk=200), Model(block=1, gap=1, max_workspace_bytes=1), SCHEDULED, C1A, C2A, POOLED,
    Model(kpool=3, topk=40, block=9, speculative=2),
]  # fmt: skip
NAMES = ["V3.2", "speculative", "C4A", "all", "least", "scheduled", "C1A", "C2A", "pools", "all pools"]


@dataclass
class Step:
    """One step's batch, its keys and queries, the cache before and after it, and the positions that are chosen."""

    batch: BatchMetadata
    k: np.ndarray
    q8: np.ndarray
    w: np.ndarray
    cache: np.ndarray
    packed: np.ndarray
    want: np.ndarray = field(default_factory=lambda: np.zeros(0))


def keys(rng: np.random.Generator, n: int) -> np.ndarray:
    """bfloat16 keys whose e4m3 codes are 0 and plus and minus one number."""
    return indexers.exact_codes(rng, n, 128).view(E4M3).astype(BF16)


def make_step(rng: np.random.Generator, model: Model, query_lens: list[int], seq_lens: list[int] | None = None) -> Step:
    requests, rows, ratio = len(query_lens), model.block // model.per_key, model.per_key
    if seq_lens is None:
        seq_lens = [n + int(rng.integers(0, model.longest + 1 - n)) for n in query_lens]
    batch = queries(query_lens, seq_lens)
    width = -(-model.longest // model.block)
    num_blocks = requests * width + 1
    table = rng.permutation(num_blocks)[: requests * width].reshape(requests, width).astype(np.int32)
    before, after = key_cache(num_blocks, rows, model.gap), key_cache(num_blocks, rows, model.gap)
    k, slots, t = gapped(poisoned((batch.tokens, 128), BF16), 0, 8), [], 0
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        own = keys(rng, seq_len // ratio)
        for i, key in enumerate(own):
            slot = oracle_indices.slot(table, r, i, rows)
            for cache in (before, after) if i < (seq_len - query_len) // ratio else (after,):
                for there, packed in zip(token_bytes(cache, slot), pack_oracle(key, model.scale_format), strict=True):
                    there[...] = np.frombuffer(packed, np.uint8)
        for p in range(seq_len - query_len, seq_len):
            if (p + 1) % ratio == 0:
                k[t] = own[p // ratio]
            slots.append(oracle_indices.slot(table, r, p, model.block))
            t += 1
    step = Step(
        BatchMetadata(batch.query_start_loc, batch.seq_lens, table, np.array(slots, int), batch.positions), k,
        indexers.exact_codes(rng, batch.tokens, model.heads, 128),
        indexers.exact_weights(rng, batch.tokens, model.heads), before, after,
    )  # fmt: skip
    step.want = chosen(step, model)
    return step


def padded(step: Step, count: int) -> Step:
    """The same with tokens behind the last request's."""
    batch = step.batch
    slots, positions = np.append(batch.slot_mapping, [-1] * count), np.append(batch.positions, [0] * count)
    arrays = {
        name: np.concatenate([value, poisoned((count, *value.shape[1:]), value.dtype)])
        for name, value in (("k", step.k), ("q8", step.q8), ("w", step.w))
    }
    want = np.concatenate([step.want, np.full((count, step.want.shape[1]), -1, np.int32)])
    longer = BatchMetadata(batch.query_start_loc, batch.seq_lens, batch.block_table, slots, positions)
    return dataclasses.replace(step, batch=longer, want=want, **arrays)


def chosen(step: Step, model: Model) -> np.ndarray:
    """What every query token should choose, from the keys as the cache holds them after the step."""
    rows, want, t = model.block // model.per_key, np.full((len(step.q8), model.topk), -1, np.int32), 0
    seen = []
    for r, (query_len, seq_len) in enumerate(zip(step.batch.query_lens, step.batch.seq_lens, strict=True)):
        slots = [oracle_indices.slot(step.batch.block_table, r, i, rows) for i in range(seq_len // model.per_key)]
        tokens = [oracle_indexer.token(step.packed, slot) for slot in slots]
        codes = np.array([code for code, _ in tokens], np.uint8).reshape(-1, 128)
        scales = np.array([scale for _, scale in tokens], np.float32).reshape(-1)
        for p in range(seq_len - query_len, seq_len):
            logits = oracle_indexer.logits(step.q8[t], codes, scales, step.w[t])
            want[t] = oracle_indexer.topk(logits, model.topk, 0, (p + 1) // model.per_key)
            seen.append(p + 1)
            t += 1
    return expanded(want, np.array(seen), model.kpool)[0]


def is_start(kind, part, whole, rows: int) -> bool:
    """Whether an array is the first rows of another one."""
    found = [describe("array", array) for array in (part, whole)]
    starts = rows == 0 or found[0].ptr == found[1].ptr  # an empty tensor has no address
    return kind.is_mine(part) and starts and found[0].shape == (rows, *found[1].shape[1:])


class Engine:
    """Builder and backend over one kind of array, after a warm-up."""

    def __init__(self, kind, model: Model) -> None:
        self.kind, self.model = kind, model
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.builder = IndexerMetadataBuilder(model.config(), place)
        self.workspace = Workspace(place)
        self.impl = IndexerImpl(model.config(), self.workspace, model.scale_format)
        inputs = (poisoned((5, 128), BF16), poisoned((5, model.heads, 128), np.uint8),
                  poisoned((5, model.heads), np.float32), key_cache(1, model.config().keys_per_block))  # fmt: skip
        out = kind.put(np.zeros((6, model.width), np.int32))
        assert is_start(kind, self.impl.forward(*map(kind.put, inputs), None, out), out, len(inputs[1]))
        assert (kind.take(out) == -1).all()
        self.workspace.lock()

    def run(
        self,
        step: Step,
        *,
        with_keys: bool = True,
        fp8: bool = False,
        head_axis: bool = False,
        seq_lens: np.ndarray | None = None,
    ) -> np.ndarray:
        """Chosen rows of a step, after checks of the cache and of the buffer's other rows."""
        kind, tokens = self.kind, len(step.q8)
        metadata = self.builder.build(step.batch, seq_lens=kind.put(seq_lens))
        self.workspace.get_simultaneous(((self.workspace.size,), np.uint8))[0][...] = 0xFF
        cache, whole = kind.put_with_allocation(step.cache if with_keys else step.packed)
        buffer = kind.put(gapped(poisoned((tokens + 3, self.model.width), np.int32), 0, 2))
        counts = kind.put(np.full(tokens, 77, np.int32)) if self.model.kpool > 1 else None
        k = kind.put(step.k) if with_keys else None
        q8 = kind.put(step.q8.view(E4M3) if fp8 else step.q8)
        given = cache[:, :, None] if head_axis else cache
        got = self.impl.forward(k, q8, kind.put(step.w), given, metadata, buffer, valid_counts=counts)
        if counts is not None:
            np.testing.assert_array_equal(kind.take(counts), (step.want >= 0).sum(axis=1))
        assert is_start(kind, got, buffer, len(step.q8))
        _, expected = NumPy().put_with_allocation(step.packed)
        np.testing.assert_array_equal(kind.take(whole), expected)
        got = kind.take(buffer)
        assert (got[tokens:] == poisoned((1,), np.int32)).all()
        return got[:tokens]


@pytest.mark.long(sample=14)
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
@pytest.mark.parametrize("query_lens", QUERY_LENS, ids=str)
def test_batches(kind, rng, model: Model, query_lens: list[int]) -> None:
    """Decodes alone, prefills alone, both; uneven decodes; several chunks; requests without tokens."""
    step = make_step(rng, model, query_lens)
    np.testing.assert_array_equal(Engine(kind, model).run(step), step.want)


@pytest.mark.parametrize("model", [V32, C4A, POOLED], ids=["V3.2", "C4A", "pools"])
def test_sequences_at_the_edges(kind, rng, model: Model) -> None:
    """First tokens (no compressed key yet), and both sides of topk and of the ends of blocks and groups."""
    seq_lens = [1, 2, 3, 4, 5, 11, 12, 13, 24, 27, 28, MAX_MODEL_LEN]
    engine = Engine(kind, model)
    for query_lens in ([1] * 12, [1] * 9 + [8, 9, 30], [1, 2, 2, 1, 2, 11, 12, 13, 24, 1, 2, 9]):
        step = make_step(rng, model, query_lens, seq_lens)
        np.testing.assert_array_equal(engine.run(step), step.want)


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(
    ("ratio", "topk", "heads"), [(4, 512, 64), (4, 1024, 32), (1, 2048, 64)], ids=["C4A 512", "C4A 1024", "V3.2"]
)
def test_as_many_rows_as_models_choose(kind, rng, ratio: int, topk: int, heads: int) -> None:
    """Decodes and prefills of sequences that have a key less, as many and more than are chosen."""
    longest = ratio * (topk + 70) + 1
    model = Model(ratio, heads, topk, 1, 64 * ratio, max_workspace_bytes=9 * 4 * (topk + 70), longest=longest)
    edge = ratio * topk
    step = make_step(rng, model, [1, 2, 2, 3, 9], [edge - 1, edge + ratio, longest, edge + ratio, longest])
    np.testing.assert_array_equal(Engine(kind, model).run(step), step.want)


@pytest.mark.parametrize("model", [V32, C4A, POOLED], ids=["V3.2", "C4A", "pools"])
def test_keys_are_gathered_once_for_the_chunks_of_a_request(rng, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_mla.backends import indexer

    model = Model(**{**vars(model), "max_workspace_bytes": 5 * 4 * (128 // model.per_key)})
    step = make_step(rng, model, [60, 20], [128, 128])
    calls = {"cp_gather_indexer_k_quant_cache": 0, "select_rows": 0}

    def counted(name: str, call):
        def wrapper(*arguments, **more):
            calls[name] += 1
            return call(*arguments, **more)

        return wrapper

    for name in calls:
        monkeypatch.setattr(indexer, name, counted(name, getattr(indexer, name)))
    np.testing.assert_array_equal(Engine(NumPy(), model).run(step), step.want)
    assert calls == {"cp_gather_indexer_k_quant_cache": 2, "select_rows": 12 + 4}


@pytest.mark.parametrize("model", [V32, C4A, POOLED], ids=["V3.2", "C4A", "pools"])
def test_nothing_is_scored_where_all_keys_are_chosen(kind, rng, model: Model) -> None:
    """Prefills that see no more than topk keys: not even NaN in queries, weights and keys makes a difference."""
    longest = model.topk * model.per_key + model.per_key - 1
    step = make_step(rng, model, [5, longest, 9], [12, longest, 9])
    for array in (step.q8, step.w.view(np.uint8)):
        array[...] = 0xFF
    np.testing.assert_array_equal(Engine(kind, model).run(step), step.want)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("query_lens", "padding"), [([1, 1, 1], 3), ([2, 1, 2], 2), ([2, 2, 0, 0], 4), ([0], 2), ([1, 2, 9, 5], 3)], ids=str
)
def test_tokens_that_pad_the_batch(kind, rng, model: Model, query_lens: list[int], padding: int) -> None:
    step = padded(make_step(rng, model, query_lens), padding)
    np.testing.assert_array_equal(Engine(kind, model).run(step), step.want)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 1, 2], [1, 2, 9, 5]], ids=str)
def test_lengths_that_the_device_has(kind, rng, model: Model, query_lens: list[int]) -> None:
    """With upper bounds on the host the same keys are chosen."""
    step = make_step(rng, model, query_lens)
    batch = step.batch
    bounds = batch.seq_lens + rng.integers(0, MAX_MODEL_LEN + 1 - batch.seq_lens)
    loose = BatchMetadata(batch.query_start_loc, bounds, batch.block_table, batch.slot_mapping, batch.positions)
    got = Engine(kind, model).run(dataclasses.replace(step, batch=loose), seq_lens=batch.seq_lens)
    np.testing.assert_array_equal(got, step.want)


def test_keys_that_are_there_already(kind, rng) -> None:
    for model in (V32, C4A):
        step = make_step(rng, model, [1, 3, 8, 30])
        np.testing.assert_array_equal(Engine(kind, model).run(step, with_keys=False), step.want)


def test_steps_one_after_the_other(kind, rng) -> None:
    """The same builder and workspace serve batches of changing shapes; the workspace was reserved for all of them."""
    engine = Engine(kind, V32)
    for query_lens in ([1] * 12, [3, 1, 30, 40], [80], [2, 2], [1]):
        step = make_step(rng, V32, query_lens)
        np.testing.assert_array_equal(engine.run(step), step.want)


def test_e4m3_and_a_head_axis(kind, rng) -> None:
    model = Model(speculative=1, gap=4)
    step = make_step(rng, model, [1, 2, 6])
    np.testing.assert_array_equal(Engine(kind, model).run(step, fp8=True, head_axis=True), step.want)


def test_errors(rng) -> None:
    model = Model()
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [1, 5])
    good = {
        "k": step.k, "q8": step.q8, "w": step.w, "kv_cache": step.cache, "metadata": engine.builder.build(step.batch),
        "topk_indices_buffer": np.zeros((6, 12), np.int32),
    }  # fmt: skip
    longer = IndexerMetadataBuilder(model.config()).build(make_step(rng, model, [1, 6]).batch)
    c4a = Engine(NumPy(), C4A).builder.build(make_step(rng, C4A, [1, 5]).batch)
    cases = [
        ({"k": step.k[:5]}, ValueError, r"k: expected the 6 tokens of metadata, got shape \[5, 128\]"),
        ({"q8": step.q8[:, :7]}, ValueError, r"q8: expected shape \[T, .*, 128\]"),
        ({"q8": step.q8[:5], "w": step.w[:5]}, ValueError, "q8: expected the 6 tokens of metadata, got 5"),
        ({"w": step.w[:5]}, ValueError, r"w: expected shape \[6, 8\]"),
        ({"kv_cache": step.cache[:, :8]}, ValueError, r"kv_cache: expected 16 rows a block \(config\), got 8"),
        ({"kv_cache": step.cache[..., :131]}, (TypeError, ValueError), "kv_cache: "),
        ({"metadata": longer}, ValueError, "q8: expected the 7 tokens of metadata, got 6"),
        ({"metadata": c4a}, ValueError, "metadata: built for topk 6, these layers have 12"),
        ({"metadata": step.batch}, TypeError, "metadata: expected an IndexerMetadata, got .*BatchMetadata"),
        ({"topk_indices_buffer": np.zeros((5, 12), np.int32)}, ValueError,
         "topk_indices_buffer: expected room for 6 tokens, got 5 rows"),
        ({"topk_indices_buffer": np.zeros((6, 11), np.int32)}, ValueError, r"topk_indices_buffer: expected shape"),
        ({"topk_indices_buffer": np.zeros((6, 12), np.int64)}, TypeError, "topk_indices_buffer: expected dtype int32"),
    ]  # fmt: skip
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            engine.impl.forward(**{**good, **change})
    with pytest.raises(ValueError, match="config: the indexer chooses at most 4096 rows, topk is 4097"):
        IndexerImpl(Model(topk=4097).config(), engine.workspace)
    with pytest.raises(ValueError, match="scale_format"):
        IndexerImpl(model.config(), engine.workspace, "fp8")
    for name, value in {"block_size": 32, "max_num_seqs": 1, "max_num_batched_tokens": 5}.items():
        impl = IndexerImpl(dataclasses.replace(model.config(), **{name: value}), engine.workspace)
        cache = step.cache if name != "block_size" else np.zeros((4, 32, 132), np.uint8)
        with pytest.raises(ValueError, match=rf"^metadata: (built for {name}|expected at most {value})"):
            impl.forward(**{**good, "kv_cache": cache})
    torch = pytest.importorskip("torch")
    elsewhere = IndexerMetadataBuilder(model.config(), Place.of(torch.zeros(1))).build(step.batch)
    with pytest.raises(ValueError, match="metadata: expected it where the workspace is"):
        engine.impl.forward(**{**good, "metadata": elsewhere})
    there = {name: torch.from_numpy(good[name].copy()) for name in ("q8", "w", "kv_cache", "topk_indices_buffer")}
    with pytest.raises(ValueError, match="q8: expected it where the workspace is"):
        engine.impl.forward(**{**good, **there, "k": None})


def test_a_locked_workspace_must_have_been_warmed_up(rng) -> None:
    model = Model()
    step = make_step(rng, model, [40], [90])
    workspace = Workspace(Place("numpy", -1))
    workspace.lock()
    impl = IndexerImpl(model.config(), workspace)
    metadata = IndexerMetadataBuilder(model.config()).build(step.batch)
    with pytest.raises(RuntimeError, match="the workspace is locked at 0 bytes"):
        impl.forward(step.k, step.q8, step.w, step.cache, metadata, np.zeros((40, 12), np.int32))


def test_addresses_survive_steps(kind, rng) -> None:
    """What a captured step reads and writes stays in its place from step to step."""
    engine, addresses = Engine(kind, V32), set()
    for _ in range(2):
        step = make_step(rng, V32, [3, 1, 3, 20], [50, 9, 90, 60])
        metadata = engine.builder.build(step.batch)
        engine.run(step)
        chunk = metadata.prefill_chunks[-1]
        arrays = (metadata.slot_mapping, metadata.decode.context_lens, metadata.decode.padded_rows, chunk.starts,
                  chunk.cu_seq_lens, *engine.impl._scratch(60, 9, 26))  # fmt: skip
        addresses.add(tuple(describe("array", array).ptr for array in arrays))
    assert len(addresses) == 1


@pytest.mark.parametrize("model", [V32, C4A, SCHEDULED], ids=["V3.2", "C4A", "scheduled"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_keys_about_as_many_as_are_chosen(kind, rng, model: Model, query_lens: list[int], more: int) -> None:
    """Short decodes are those of at most topk keys, and choose all."""
    longest = (model.topk + more) * model.per_key
    step = make_step(rng, model, query_lens, [longest, *query_lens[1:]])
    engine = Engine(kind, model)
    assert engine.builder.build(step.batch).decode.short == (more <= 0)
    np.testing.assert_array_equal(engine.run(step), step.want)


@pytest.mark.parametrize("model", [Model(), SCHEDULED, C4A], ids=["V3.2", "scheduled", "C4A"])
@pytest.mark.parametrize("more", [0, 1])
def test_short_decodes_are_not_scored(monkeypatch, rng, model: Model, more: int) -> None:
    """But in a captured step, which must hold for longer sequences."""
    pytest.importorskip("torch")
    forget_calls()
    step = make_step(rng, model, [1, 1], [(model.topk + more) * model.per_key, model.per_key])
    metadata = IndexerMetadataBuilder(model.config(), ("torch", HOST)).build(step.batch)
    gpu, put = FakeGPU(monkeypatch), Torch().put
    arrays = [put(np.ascontiguousarray(a)) for a in (step.k, step.q8, step.w, step.cache)]
    impl = IndexerImpl(model.config(), Workspace(Place.of(arrays[0])), model.scale_format)
    scored = []
    for gpu.capturing in (False, True):
        gpu.log.clear()
        impl.forward(*arrays, metadata, put(np.zeros((2, model.width), np.int32)))
        files = [launch.kernel.file for launch in gpu.log if launch.kernel is not None]
        assert {"indexer/topk.cu", "indexer/short_rows.cu"} & {*files}
        scored.append(any("logits" in file for file in files))
    forget_calls()
    assert scored == [more > 0, True]


@pytest.mark.gpu
@pytest.mark.parametrize("model", [V32, C4A, SCHEDULED], ids=["V3.2", "C4A", "scheduled"])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([2] * 6, None), ([2, 1, 2, 2, 1, 2], None), ([2, 1, 2, 9, 3], [20, 9, 120, 131, 97])],
    ids=["decode", "uneven", "prefill"],
)  # fmt: skip
def test_a_captured_step_chooses_the_same(
    kind, rng, model: Model, query_lens: list[int], seq_lens: list[int] | None
) -> None:
    """Captured once, replayed with other batches of the same shapes in the same buffers."""
    if not kind.on_gpu:
        pytest.skip("CUDA graphs")
    seq_lens = seq_lens and [min(n, MAX_MODEL_LEN) for n in seq_lens]
    engine = Engine(kind, model)
    steps = [make_step(rng, model, query_lens, seq_lens) for _ in range(3)]
    k, q8, w, cache = (kind.put(np.ascontiguousarray(getattr(steps[0], n))) for n in ("k", "q8", "w", "cache"))
    buffer = kind.put(poisoned((len(steps[0].q8), model.width), np.int32))
    metadata = engine.builder.build(steps[0].batch)
    replay = capture(kind, lambda: engine.impl.forward(k, q8, w, cache, metadata, buffer))
    for step in steps:
        engine.builder.build(step.batch)
        for there, name in ((k, "k"), (q8, "q8"), (w, "w"), (cache, "cache")):
            there[...] = kind.put(np.ascontiguousarray(getattr(step, name)))
        buffer[...] = 0
        replay()
        np.testing.assert_array_equal(kind.take(buffer), step.want)
