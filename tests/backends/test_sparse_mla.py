"""The V3.2 backend: its three paths against float64 attention over the chosen rows of the same batch.

The cache's rows are such that FP8 holds them exactly (e4m3 codes under power-of-two scales), so that all paths and the
oracle see the same numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import IndexGroups, SparseMLAConfig, layer_sources
from cupy_mla.backends import index_groups, sparse_mla
from cupy_mla.backends.sparse_mla import SparseMLABackend, SparseMLAImpl
from cupy_mla.backends.workspace import Workspace
from cupy_mla.bridges import Place, describe
from cupy_mla.calls.operation import forget_calls
from cupy_mla.metadata.batch import BatchMetadata
from cupy_mla.metadata.indexer import IndexerMetadataBuilder
from cupy_mla.metadata.sparse_mla import SparseMLAMetadataBuilder
from cupy_mla.ops.attention import planned_decode
from tests import oracle, oracle_indices
from tests.cases import latent, queries, sinks
from tests.fake_gpu import FakeGPU
from tests.kinds import BF16, NumPy, Torch, gapped, poisoned

BLOCK_SIZE, MAX_MODEL_LEN, TOPK = 8, 48, 20
SCALE = 0.07
PATHS = ("bf16", "mixed", "separate")
UNIFORM_DECODE = {0: [1, 1, 1], 1: [2, 2]}


def exact_rows(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n latent rows that e4m3 under power-of-two scales holds exactly: bf16 [n, 576] and V32_FP8 bytes [n, 656]."""
    scales = np.ldexp(np.float32(1), rng.integers(-6, -2, (n, 4)))  # rows of the size of cases.latent
    codes = rng.standard_normal((n, 512)).astype(ml_dtypes.float8_e4m3fn)
    rope = latent(rng, n, 64)
    values = codes.astype(np.float32) * np.repeat(scales, 128, axis=1)
    rows = np.concatenate([values.astype(BF16), rope], axis=1)
    packed = [codes.view(np.uint8), scales.astype("<f4").view(np.uint8), rope.view(np.uint8)]
    return rows, np.concatenate(packed, axis=1)


@dataclass
class Step:
    """One step's batch, its query, and the rows of both caches; all slots that hold no token are NaN."""

    batch: BatchMetadata
    q: np.ndarray  # [T, h, 576]
    topk_indices: np.ndarray
    caches: dict[str, np.ndarray]  # by cache layout
    want: np.ndarray  # float64 [T, h, 512]
    want_lse: np.ndarray  # float64 [T, h]
    want_with_sinks: np.ndarray  # float64 [T, h, 512]
    sinks: np.ndarray  # float32 [h]

    def padded(self, count: int) -> Step:
        """The same with tokens behind the last request's, whose queries are NaN."""
        batch, heads = self.batch, self.q.shape[1]
        more = {"slot_mapping": [-1] * count, "positions": [0] * count}
        per_token = {name: np.append(getattr(batch, name), values) for name, values in more.items()}
        return Step(
            BatchMetadata(batch.query_start_loc, batch.seq_lens, batch.block_table, **per_token),
            np.concatenate([self.q, poisoned((count, heads, 576), BF16)]),
            np.concatenate([self.topk_indices, np.full((count, TOPK), -1, np.int32)]),
            self.caches,
            np.concatenate([self.want, np.zeros((count, heads, 512))]),
            np.concatenate([self.want_lse, np.full((count, heads), np.inf)]),
            np.concatenate([self.want_with_sinks, np.zeros((count, heads, 512))]),
            self.sinks,
        )


def make_step(
    rng: np.random.Generator,
    heads: int,
    query_lens: list[int],
    seq_lens: list[int] | None = None,
    *,
    block_gap: int = 0,
    rope: bool = True,
    all_listed: bool = False,
) -> Step:
    """A batch over caches of random rows; without `rope` every RoPE part is zeros.

    Index lists name random tokens, some none; where `all_listed` as many as there are room for.
    """
    requests, tokens = len(query_lens), sum(query_lens)
    if seq_lens is None:
        seq_lens = [int(rng.integers(max(n, 1), MAX_MODEL_LEN + 1)) for n in query_lens]
    width = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    num_blocks = requests * width + 1
    table = rng.permutation(num_blocks)[: requests * width].reshape(requests, width)
    bf16 = gapped(poisoned((num_blocks, BLOCK_SIZE, 576), BF16), 0, block_gap)
    fp8 = gapped(poisoned((num_blocks, BLOCK_SIZE, 656), np.uint8), 0, block_gap)
    q = queries(rng, tokens, heads, 576)
    q[..., 512:] *= rope
    topk_indices = np.full((tokens, TOPK), -1, np.int32)
    slots, positions, want, want_lse = [], [], np.empty((tokens, heads, 512)), np.empty((tokens, heads))
    with_sinks, of_heads = np.empty_like(want), sinks(rng, heads)
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        rows, packed = exact_rows(rng, seq_len)
        rows[:, 512:] *= rope
        packed[:, 528:] *= rope
        block, offset = table[r, np.arange(seq_len) // BLOCK_SIZE], np.arange(seq_len) % BLOCK_SIZE
        bf16[block, offset], fp8[block, offset] = rows, packed
        for position in range(seq_len - query_len, seq_len):
            t = len(positions)
            chosen = rng.permutation(position + 1)[:TOPK]
            if rng.random() < 0.1 and not all_listed:
                chosen = chosen[:0]
            places = rng.permutation(TOPK)[: len(chosen)]  # -1 anywhere, not at the end alone
            topk_indices[t, places] = chosen
            values = rows[chosen].astype(np.float64)
            want[t], _, want_lse[t] = oracle.attend(q[t], values, SCALE, None)
            with_sinks[t], _, _ = oracle.attend(q[t], values, SCALE, of_heads)
            slots.append(int(block[position]) * BLOCK_SIZE + int(offset[position]))
            positions.append(position)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(int)
    batch = BatchMetadata(starts, seq_lens, table, slots, positions)
    return Step(batch, q, topk_indices, {"bf16": bf16, "v32_fp8": fp8}, want, want_lse, with_sinks, of_heads)


class Engine:
    """Builder and backend of one path over one kind of array."""

    def __init__(self, kind, path: str, heads: int, speculative: int = 0) -> None:
        self.kind = kind
        self.path = path
        self.layout = "bf16" if path == "bf16" else "v32_fp8"
        config = SparseMLAConfig(
            heads, cache_layout=self.layout, topk=TOPK, block_size=BLOCK_SIZE, max_num_seqs=16,
            max_num_batched_tokens=80, max_model_len=MAX_MODEL_LEN, num_speculative_tokens=speculative,
            mixed_below_heads={"mixed": 129, "separate": 0, "bf16": 32}[path],
        )  # fmt: skip
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.builder = SparseMLAMetadataBuilder(config, place)
        self.workspace = Workspace(place)
        self.impl = SparseMLAImpl(config, SCALE, self.workspace)
        self.workspace.lock()

    def poison_workspace(self) -> None:
        self.workspace.get_simultaneous(((self.workspace.size,), np.uint8))[0][...] = 0xFF

    def run(
        self, step: Step, *, pair: bool = False, out: np.ndarray | None = None, counts: np.ndarray | None = None
    ) -> np.ndarray:
        put = self.kind.put
        metadata = self.builder.build(step.batch)
        q = (put(step.q)[..., :512], put(step.q[..., 512:].copy())) if pair else put(step.q)
        self.poison_workspace()
        there, cache, lists = put(out), put(step.caches[self.layout]), put(step.topk_indices)
        got = self.impl.forward_mqa(q, cache, metadata, lists, valid_counts=put(counts), out=there)
        assert self.kind.is_mine(got)
        assert there is None or got is there
        return self.kind.take(got)


def assert_result(got: np.ndarray, want: np.ndarray) -> None:
    if got.size:
        oracle.assert_close(got, want, "prefill out")


@pytest.mark.long(sample=6)
@pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
@pytest.mark.parametrize("speculative", [0, 1])
def test_paths_agree(kind, rng, heads: int, speculative: int) -> None:
    """Decodes and prefills in one batch; the prefills' sequences take more than one chunk of the workspace."""
    decodes = UNIFORM_DECODE[speculative]
    query_lens = [*decodes, *rng.integers(3, 9, 9).tolist()]
    seq_lens = rng.integers(30, MAX_MODEL_LEN + 1, len(query_lens)).tolist()
    step = make_step(rng, heads, query_lens, seq_lens)
    results = {}
    for path in PATHS:
        engine = Engine(kind, path, heads, speculative)
        results[path] = engine.run(step)
        assert_result(results[path], step.want)
    separate = engine.builder.build(step.batch).fp8_extra_metadata
    assert separate.num_decodes == len(decodes)
    assert len(separate.prefill.chunks) > 1
    for path in PATHS[1:]:
        assert_result(results[path], results["bf16"].astype(np.float64))


@pytest.mark.parametrize(
    ("seq_lens", "chunks"), [([48] * 5 + [9], [5, 1]), ([48] * 4 + [47, 9], [5, 1]), ([48] * 4 + [40, 9], [5, 1]),
                             ([48] * 4 + [40, 8], [6]), ([48] * 10, [5, 5])],
)  # fmt: skip
def test_chunk_boundaries(kind, rng, seq_lens: list[int], chunks: list[int]) -> None:
    """Prefills that fill the workspace of 240 rows exactly, leave a row, and pass it by one."""
    step = make_step(rng, 16, [4] * len(seq_lens), seq_lens)
    engine = Engine(kind, "separate", 16)
    built = engine.builder.build(step.batch).fp8_extra_metadata
    assert [len(chunk.seq_lens) for chunk in built.prefill.chunks] == chunks
    assert_result(engine.run(step), step.want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "query_lens", [[], [1], [7], [1] * 5, [5, 5], [1, 1, 6, 3], [2, 2], [2, 2, 0, 0], [1, 0, 4], [0, 0]], ids=str
)
def test_every_kind_of_batch(kind, rng, path: str, query_lens: list[int]) -> None:
    engine = Engine(kind, path, 8, speculative=1)
    step = make_step(rng, 8, query_lens)
    assert_result(engine.run(step), step.want)


@pytest.mark.parametrize("path", PATHS)
def test_steps_one_after_the_other(kind, rng, path: str) -> None:
    """The same builder and workspace serve batches of changing shapes; the workspace was reserved for all of them."""
    engine = Engine(kind, path, 16)
    for query_lens in ([1] * 12, [1, 20, 30], [40, 40], [1]):
        step = make_step(rng, 16, query_lens)
        assert_result(engine.run(step), step.want)


@pytest.mark.parametrize("path", PATHS)
def test_a_query_in_two_parts(kind, rng, path: str) -> None:
    step = make_step(rng, 5, [1, 1, 6])
    engine = Engine(kind, path, 5)
    whole, parts = engine.run(step), engine.run(step, pair=True)
    np.testing.assert_array_equal(parts.view(np.uint16), whole.view(np.uint16))


@pytest.mark.parametrize("path", PATHS)
def test_strides(kind, rng, path: str) -> None:
    """A block stride beyond the block, a query with gaps, an output with gaps that stay as they were."""
    step = make_step(rng, 3, [1, 1, 6, 30], block_gap=16)
    step.q = gapped(step.q, 0, 2, 24)
    out = gapped(poisoned((38, 3, 512), BF16), 0, 1, 8)
    engine = Engine(kind, path, 3)
    assert_result(engine.run(step, out=out), step.want)


@pytest.mark.parametrize("path", PATHS)
def test_a_cache_with_a_head_axis(kind, rng, path: str) -> None:
    step = make_step(rng, 3, [1, 5])
    engine = Engine(kind, path, 3)
    step.caches = {name: cache[:, :, None] for name, cache in step.caches.items()}
    assert_result(engine.run(step), step.want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("query_lens", "padding"), [([1, 1, 1], 5), ([2, 2, 0], 4), ([2, 2], 3), ([0, 0], 2), ([1, 1, 6, 3], 2)], ids=str
)
def test_tokens_that_pad_the_batch(kind, rng, path: str, query_lens: list[int], padding: int) -> None:
    """They attend nothing. Where they are decodes their result is 0; behind prefills it is nobody's business."""
    step = make_step(rng, 8, query_lens).padded(padding)
    got = Engine(kind, path, 8, speculative=1).run(step)
    count = len(got) if max(query_lens) <= 2 else sum(query_lens)
    assert_result(got[:count], step.want[:count])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_lens", [[1, 1], [2, 2, 5, 9], [4, 4, 4, 4, 4, 4, 4]], ids=str)
def test_lengths_that_the_device_has(kind, rng, path: str, query_lens: list[int]) -> None:
    """With upper bounds on the host the result is the same."""
    step = make_step(rng, 8, query_lens)
    batch = step.batch
    bounds = batch.seq_lens + rng.integers(0, MAX_MODEL_LEN + 1 - batch.seq_lens)
    loose = BatchMetadata(batch.query_start_loc, bounds, batch.block_table, batch.slot_mapping, batch.positions)
    engine, put = Engine(kind, path, 8, speculative=1), kind.put
    metadata = engine.builder.build(loose, seq_lens=put(batch.seq_lens))
    engine.poison_workspace()
    got = engine.impl.forward_mqa(put(step.q), put(step.caches[engine.layout]), metadata, put(step.topk_indices))
    assert_result(kind.take(got), step.want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2], [1, 1, 6, 3], [9]], ids=str)
def test_lse(kind, rng, path: str, query_lens: list[int]) -> None:
    step = make_step(rng, 8, query_lens)
    engine, put = Engine(kind, path, 8, speculative=1), kind.put
    arguments = (put(step.q), put(step.caches[engine.layout]), engine.builder.build(step.batch), put(step.topk_indices))
    out, lse = engine.impl.forward_mqa(*arguments, return_lse=True)
    assert_result(kind.take(out), step.want)
    oracle.assert_close(kind.take(lse), step.want_lse, "decode lse")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads", [4, 8, 16, 32])
def test_sinks(kind, rng, path: str, heads: int) -> None:
    """Of HY-V4: 32 heads on one rank, 4 on each of eight. `lse` is without them."""
    for query_lens in ([1, 1, 1], [2, 2, 6, 3], [9]):
        step = make_step(rng, heads, query_lens)
        engine, put = Engine(kind, path, heads, speculative=1), kind.put
        metadata = engine.builder.build(step.batch)
        arguments = (put(step.q), put(step.caches[engine.layout]), metadata, put(step.topk_indices))
        out, lse = engine.impl.forward_mqa(*arguments, sinks=put(step.sinks), return_lse=True)
        assert_result(kind.take(out), step.want_with_sinks)
        oracle.assert_close(kind.take(lse), step.want_lse, "decode lse")
        none = put(np.full(heads, -np.inf, np.float32))
        assert_result(kind.take(engine.impl.forward_mqa(*arguments, sinks=none)), step.want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("counted", [False, True], ids=["found", "of the caller"])
def test_attention_is_told_where_lists_end(
    kind, rng, monkeypatch: pytest.MonkeyPatch, path: str, counted: bool
) -> None:
    """So a decode's time goes with the rows that exist. -1 may stand before the end if the caller told no count."""
    step = make_step(rng, 8, [1] * 7)
    counts = (step.topk_indices >= 0).sum(axis=1).astype(np.int32)
    ends = [max(np.flatnonzero(row >= 0), default=-1) + 1 for row in step.topk_indices]
    engine, put, told = Engine(kind, path, 8), kind.put, []

    def record(*args, topk_length, **others):
        told.extend(kind.take(topk_length).tolist())
        return planned_decode(*args, topk_length=topk_length, **others)

    monkeypatch.setattr(sparse_mla, "planned_decode", record)
    arguments = (put(step.q), put(step.caches[engine.layout]), engine.builder.build(step.batch), put(step.topk_indices))
    more = {"valid_counts": put(counts)} if counted else {}
    assert_result(kind.take(engine.impl.forward_mqa(*arguments, **more)), step.want)
    assert told == (counts.tolist() if counted else ends)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_lens", [[1] * 5, [1, 2, 9, 3]], ids=str)
def test_counts_of_lists_with_gaps(kind, rng, path: str, query_lens: list[int]) -> None:
    """A decode and a prefill attend exactly as many entries as the caller counts, in layers that share lists, too. With
    a count beyond them, as where they end, they attend all; with a smaller one the first."""
    step, put = make_step(rng, 8, query_lens), kind.put
    engine, valid = Engine(kind, path, 8), (step.topk_indices >= 0).sum(axis=1)
    groups = IndexGroups(engine.impl.config, layer_sources(2, [0]), engine.workspace.place)
    q, cache, metadata = put(step.q), put(step.caches[engine.layout]), engine.builder.build(step.batch)
    fewer, _ = oracle_indices.to_front(step.topk_indices, valid // 2)
    half = kind.take(engine.impl.forward_mqa(q, cache, metadata, put(fewer))).astype(np.float64)
    for counts, want in (
        (valid, step.want), (np.full(len(valid), TOPK), step.want), (valid + 2**30, step.want), (valid // 2, half)
    ):  # fmt: skip
        lists, told = put(step.topk_indices), put(counts.astype(np.int32))
        engine.poison_workspace()
        assert_result(kind.take(engine.impl.forward_mqa(q, cache, metadata, lists, valid_counts=told)), want)
        np.testing.assert_array_equal(kind.take(told), counts)
        np.testing.assert_array_equal(kind.take(lists), step.topk_indices)
        groups.build(metadata)
        shared = groups.put(0, lists, told)
        np.testing.assert_array_equal(kind.take(shared.lens), np.minimum(counts, valid))
        assert_result(kind.take(engine.impl.forward_mqa(q, cache, metadata, groups.get(1))), want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 6, 3], []], ids=str)
def test_groups_convert_once(kind, rng, monkeypatch: pytest.MonkeyPatch, path: str, query_lens: list[int]) -> None:
    """Layers of a group get what their index layer chose, with the same bits as where each converts it."""
    engine, converted = Engine(kind, path, 8, speculative=1), []
    groups = IndexGroups(engine.impl.config, layer_sources(7, [1, 4]), engine.workspace.place)
    to_slots = index_groups.to_slots
    for module in (index_groups, sparse_mla):
        monkeypatch.setattr(module, "to_slots", lambda *args: converted.append(1) or to_slots(*args))
    for _ in range(2):
        step, other = make_step(rng, 8, query_lens), None
        q, cache, metadata = kind.put(step.q), kind.put(step.caches[engine.layout]), engine.builder.build(step.batch)
        lists = {1: kind.put(step.topk_indices), 4: kind.put(np.roll(step.topk_indices, 1, axis=1))}
        groups.build(metadata)
        for layer in range(1, 7):
            if layer in lists:
                groups.put(layer, lists[layer])
            engine.poison_workspace()
            got = kind.take(engine.impl.forward_mqa(q, cache, metadata, groups.get(layer)))
            assert_result(got, step.want)
            want = kind.take(engine.impl.forward_mqa(q, cache, metadata, lists[1 if layer < 4 else 4]))
            np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
            other = groups.get(layer) if other is None else other
        assert other is not groups.get(6)
        assert (
            describe("slots", other.physical_topk_indices).ptr
            == describe("slots", groups.get(6).physical_topk_indices).ptr
        )
    # Of the groups, and of the layers that were given positions; for no tokens there is nothing to do.
    assert len(converted) == 2 * (2 + 6 * bool(query_lens))


@pytest.mark.gpu
def test_groups_convert_on_a_side_stream(kind, rng) -> None:
    """Which is busy: the layers' stream waits for what it will convert."""
    if not kind.on_gpu:
        pytest.skip("streams")
    engine, step = Engine(kind, "mixed", 16), make_step(rng, 16, [1] * 5)
    groups = IndexGroups(engine.impl.config, layer_sources(3, [0]), engine.workspace.place)
    q, cache, chosen = map(kind.put, (step.q, step.caches[engine.layout], step.topk_indices))
    metadata = engine.builder.build(step.batch)
    groups.build(metadata)
    kind.synchronize()
    _, side = kind.stream()
    with side:
        kind.keep_busy()
        groups.put(0, chosen)
    for layer in range(3):
        assert_result(kind.take(engine.impl.forward_mqa(q, cache, metadata, groups.get(layer))), step.want)


def test_groups_wait_where_streams_differ(rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is recorded on the stream of the conversion; each layer's `get` on another one waits for it."""
    pytest.importorskip("torch")
    step, kind, events = make_step(rng, 16, [1] * 5), Torch(), []
    engine = Engine(kind, "bf16", 16)
    metadata, chosen = engine.builder.build(step.batch), kind.put(step.topk_indices)
    gpu = FakeGPU(monkeypatch)
    runtime = SimpleNamespace(
        eventRecord=lambda event, stream: events.append(("record", event, stream)),
        streamWaitEvent=lambda stream, event: events.append(("wait", event, stream)),
    )
    cuda = SimpleNamespace(
        runtime=runtime, Device=lambda device: nullcontext(), Event=lambda disable_timing: SimpleNamespace(ptr=7)
    )
    monkeypatch.setattr(index_groups, "require_cupy", lambda why: SimpleNamespace(cuda=cuda))
    groups = IndexGroups(engine.impl.config, layer_sources(3, [0]), Place("torch", 0))
    groups.build(metadata)
    gpu.stream = 1
    groups.put(0, chosen)
    for layer, gpu.stream in enumerate((1, 2, 3)):
        groups.get(layer)
    forget_calls()
    assert events == [("record", 7, 1), ("wait", 7, 2), ("wait", 7, 3)]


def test_groups_refuse_what_does_not_fit(rng) -> None:
    engine, step = Engine(NumPy(), "mixed", 4), make_step(rng, 4, [1, 5])
    groups = IndexGroups(engine.impl.config, layer_sources(7, [1, 4]))
    metadata, chosen = engine.builder.build(step.batch), step.topk_indices
    for call, error, message in (
        (lambda: groups.put(1, chosen), ValueError, "layer: no step has begun, call build first"),
        (lambda: groups.get(2), ValueError, "layer: 2 uses the list of layer 1, this step has none yet"),
        (lambda: groups.build(step.batch), TypeError, "metadata: expected a SparseMLAMetadata"),
        (lambda: groups.build(metadata, metadata), ValueError, "swa_metadata: expected None"),
        (lambda: groups.build(metadata), None, ""),
        (lambda: groups.put(0, chosen), ValueError, "layer: 0 uses no list"),
        (lambda: groups.put(2, chosen), ValueError, "layer: 2 has no list of its own, it uses that of layer 1"),
        (lambda: groups.put(7, chosen), ValueError, r"layer must be in 0\.\.6, layers of the model, got 7"),
        (lambda: groups.put(1, chosen[:5]), ValueError, r"topk_indices: expected shape \[6, 20\]"),
        (lambda: groups.put(1, chosen, chosen[0]), ValueError, r"valid_counts: expected shape \[6\]"),
        (lambda: groups.put(1, chosen), None, ""),
        (lambda: groups.get(5), ValueError, "layer: 5 uses the list of layer 4, this step has that of layer 1"),
        (lambda: IndexGroups(SparseMLAConfig(8, 512), ()), ValueError, "config: layers of compress ratio 1 have no"),
        (lambda: layer_sources(4, [4]), ValueError, r"sources must be in 0\.\.3, layers of the model, got 4"),
        (lambda: layer_sources(4, 4), TypeError, "sources: expected numbers of layers"),
    ):  # fmt: skip
        if error is None:
            call()
            continue
        with pytest.raises(error, match=f"^{message}"):
            call()
    held, cache = groups.get(3), step.caches["v32_fp8"]
    with pytest.raises(ValueError, match=r"^valid_counts: expected None beside a list that IndexGroups has converted"):
        engine.impl.forward_mqa(step.q, cache, metadata, held, valid_counts=np.zeros(6, np.int32))
    with pytest.raises(ValueError, match=r"^topk_indices: converted for another step than metadata's"):
        engine.impl.forward_mqa(step.q, cache, engine.builder.build(step.batch), held)
    groups.build(metadata)
    with pytest.raises(ValueError, match=r"^layer: 3 uses the list of layer 1, this step has none yet"):
        groups.get(3)


def test_hostile_indices(kind, rng) -> None:
    """Positions beyond the sequence's blocks and far beyond everything count for nothing."""
    step = make_step(rng, 4, [1, 1, 5])
    empty = step.topk_indices == -1
    step.topk_indices[empty] = rng.choice([-1, -(2**31), 2**31 - 1, MAX_MODEL_LEN], empty.sum())
    for path in PATHS:
        assert_result(Engine(kind, path, 4).run(step), step.want)


def test_errors(rng) -> None:
    step = make_step(rng, 4, [1, 5])
    engine = Engine(NumPy(), "separate", 4)
    good = {
        "q": step.q, "kv_cache": step.caches["v32_fp8"], "metadata": engine.builder.build(step.batch),
        "topk_indices": step.topk_indices,
    }  # fmt: skip
    cases = [
        ({"q": step.q[:5]}, ValueError, r"q: expected shape \[6, 4, 576\]"),
        ({"q": step.q[:, :3]}, ValueError, r"q: expected shape \[6, 4, 576\]"),
        ({"q": (step.q[..., :512], step.q[..., 500:])}, ValueError, r"q_pe: expected shape \[6, 4, 64\]"),
        ({"kv_cache": step.caches["bf16"]}, TypeError, "kv_cache: expected dtype uint8 or float8_e4m3fn"),
        ({"kv_cache": step.caches["v32_fp8"][:, :4]}, ValueError, r"kv_cache: expected shape \[num_blocks, 8, 656\]"),
        ({"topk_indices": step.topk_indices[:, :19]}, ValueError, r"topk_indices: expected shape \[6, 20\]"),
        ({"out": np.zeros((6, 4, 576), BF16)}, ValueError, r"out: expected shape \[6, 4, 512\]"),
        ({"sinks": np.zeros(5, np.float32)}, ValueError, r"sinks: expected shape \[4\]"),
        ({"sinks": np.zeros(4)}, TypeError, "sinks: expected dtype float32"),
        ({"valid_counts": np.zeros(5, np.int32)}, ValueError, r"valid_counts: expected shape \[6\]"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            engine.impl.forward_mqa(**{**good, **change})
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="topk_indices: expected a numpy array"):
        engine.impl.forward_mqa(**{**good, "topk_indices": torch.from_numpy(step.topk_indices)})
    with pytest.raises(ValueError, match="kv_cache: expected it where the workspace is"):
        engine.impl.forward_mqa(**{
            **good, "topk_indices": torch.from_numpy(step.topk_indices),
            "kv_cache": torch.from_numpy(step.caches["v32_fp8"].copy()),
        })  # fmt: skip
    with pytest.raises(ValueError, match=r"config: expected layers of a model of kind 'v32', got 'v4'"):
        SparseMLAImpl(SparseMLAConfig(4, d_qk=512), SCALE, engine.workspace)


@pytest.mark.parametrize("path", PATHS)
def test_metadata_of_other_layers(rng, path: str) -> None:
    """Metadata that was built for another config, or is none. Blocks of another size gave wrong results."""
    step = make_step(rng, 4, [1, 5])
    engine = Engine(NumPy(), path, 4)
    config, torch = engine.impl.config, pytest.importorskip("torch")
    builders = {
        "built for block_size 16, these layers have 8": replace(config, block_size=16),
        "built for topk 19, these layers have 20": replace(config, topk=19),
        "built for (bf16|FP8) caches, these layers have": replace(
            config, cache_layout="bf16" if path != "bf16" else "v32_fp8"
        ),
    }
    for message, other in builders.items():
        metadata = SparseMLAMetadataBuilder(other).build(step.batch)
        with pytest.raises(ValueError, match=f"^metadata: {message}"):
            engine.impl.forward_mqa(step.q, step.caches[engine.layout], metadata, step.topk_indices)
    for field, most in {"max_num_seqs": 1, "max_num_batched_tokens": 5, "max_model_len": 1}.items():
        impl = SparseMLAImpl(replace(config, **{field: most}), SCALE, Workspace(engine.workspace.place))
        with pytest.raises(ValueError, match=rf"^metadata: expected at most {most} "):
            impl.forward_mqa(
                step.q, step.caches[engine.layout], engine.builder.build(step.batch), step.topk_indices
            )  # fmt: skip
    elsewhere = SparseMLAMetadataBuilder(config, Place.of(torch.zeros(1))).build(step.batch)
    with pytest.raises(ValueError, match=r"^metadata: expected it where the workspace is"):
        engine.impl.forward_mqa(step.q, step.caches[engine.layout], elsewhere, step.topk_indices)
    for other in (None, step.batch, (1, 2), IndexerMetadataBuilder(config).build(step.batch)):
        with pytest.raises(TypeError, match=r"^metadata: expected a SparseMLAMetadata, got "):
            engine.impl.forward_mqa(step.q, step.caches[engine.layout], other, step.topk_indices)
    assert_result(engine.run(step), step.want)


@pytest.mark.parametrize("path", ["bf16", "mixed", "separate"])
@pytest.mark.parametrize(("pair", "kpool"), [(False, 1), (True, 1), (False, 4)])
def test_models_without_rope(kind, rng, path: str, pair: bool, kpool: int) -> None:
    """Queries and bf16 rows of 512, FP8 rows with a RoPE part of zeros: the same results as with zeros everywhere. With
    pools of four tokens lists have three entries more."""
    step = make_step(rng, 5, [1, 1, 6, 3], rope=False)
    more = np.full((11, kpool - 1), -1, np.int32)
    columns = np.concatenate([step.topk_indices, more], axis=1).T
    step.topk_indices = np.ascontiguousarray(rng.permutation(columns).T)
    layout = "bf16" if path == "bf16" else "fp8_ds_mla"
    config = SparseMLAConfig(
        5, 512, cache_layout=layout, topk=TOPK, block_size=BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=80,
        max_model_len=MAX_MODEL_LEN, mixed_below_heads={"mixed": 129, "separate": 0, "bf16": 32}[path], model="v32",
        kpool=kpool,
    )  # fmt: skip
    assert not config.is_v4
    place = Place.of(kind.put(np.zeros(1, np.float32)))
    workspace = Workspace(place)
    impl = SparseMLAImpl(config, SCALE, workspace)
    workspace.lock()
    workspace.get_simultaneous(((workspace.size,), np.uint8))[0][...] = 0xFF
    cache = step.caches["bf16"][..., :512].copy() if path == "bf16" else step.caches["v32_fp8"]
    shape = SparseMLABackend.get_kv_cache_shape(len(cache), BLOCK_SIZE, 1, 512, layout.replace("bf16", "auto"), "v32")
    assert shape == cache.shape
    q = kind.put(step.q[..., :512].copy())
    given = (q, kind.put(np.zeros((*step.q.shape[:2], 0), BF16))) if pair else q
    metadata = SparseMLAMetadataBuilder(config, place).build(step.batch)
    assert_result(kind.take(impl.forward_mqa(given, kind.put(cache), metadata, kind.put(step.topk_indices))), step.want)


def test_what_the_backend_answers() -> None:
    backend = SparseMLABackend
    assert backend.is_mla()
    assert backend.is_sparse()
    assert backend.supports_block_size(64)
    assert not backend.supports_block_size(0)
    assert not backend.supports_compute_capability(7, 5)
    assert all(backend.supports_compute_capability(*c) for c in ((8, 0), (8, 9), (9, 0), (12, 0)))
    assert backend.get_kv_cache_shape(7, 64) == (7, 64, 576)
    assert backend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert backend.get_kv_cache_shape(7, 64, 1, 512, "bfloat16") == (7, 64, 512)
    assert backend.get_kv_cache_shape(7, 64, 1, 576, "fp8") == (7, 64, 576)
    assert backend.get_kv_cache_shape(7, 64, 1, 512, "fp8_ds_mla") == (7, 64, 584)
    assert backend.get_kv_cache_shape(7, 64, 1, 576, "nvfp4_ds_mla") == (7, 64, 352)
    assert "nvfp4_ds_mla" in backend.supported_kv_cache_dtypes
    assert backend.get_builder_cls() is SparseMLAMetadataBuilder
    assert backend.get_impl_cls() is SparseMLAImpl
    for arguments, message in (
        ((7, 64, 2), "num_kv_heads must be 1"),
        ((7, 64, 1, 128), "head_size must be one of"),
        ((7, 64, 1, 576, "fp4"), "cache_dtype must be one of"),
        ((7, 64, 1, 512, "fp8"), "head_size 512, cache_dtype .fp8. and model None do not go together"),
        ((7, 0), "block_size must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.get_kv_cache_shape(*arguments)


# --- CUDA graphs ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([2] * 6, None), ([2, 2, 5, 3], [20, 9, 48, 31])], ids=["decode", "prefill"]
)
def test_a_captured_step_gives_the_same_bits(
    kind, rng, path: str, query_lens: list[int], seq_lens: list[int] | None
) -> None:
    """Captured once, replayed with other batches of the same shapes in the same buffers, against eager runs."""
    if not kind.on_gpu:
        pytest.skip("CUDA graphs")
    engine = Engine(kind, path, 16, speculative=1)
    steps = [make_step(rng, 16, query_lens, seq_lens) for _ in range(3)]
    q, topk, cache, out = (
        kind.put(a) for a in (
            steps[0].q, steps[0].topk_indices, steps[0].caches[engine.layout], poisoned((12, 16, 512), BF16)
        )
    )  # fmt: skip
    metadata = engine.builder.build(steps[0].batch)

    def forward() -> None:
        engine.impl.forward_mqa((q[..., :512], q[..., 512:]), cache, metadata, topk, out=out)

    replay = capture(kind, forward)
    for step in steps:
        engine.builder.build(step.batch)
        q[...], topk[...] = kind.put(step.q), kind.put(step.topk_indices)
        cache[...] = kind.put(step.caches[engine.layout])
        out[...] = 0
        replay()
        replayed = kind.take(out).copy()
        assert_result(replayed, step.want)
        np.testing.assert_array_equal(engine.run(step).view(np.uint16), replayed.view(np.uint16))


def capture(kind, forward):
    """Capture a call into a CUDA graph, after a warm-up; returns what replays it on the current stream."""
    if kind.name == "torch_cuda":
        torch = kind.torch
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        return graph.replay
    import cupy

    # What a captured call allocates for itself is reused at every replay: a pool of its own keeps others out of it.
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(pool.malloc), stream:
        forward()
        stream.synchronize()
        stream.begin_capture()
        forward()
        graph = stream.end_capture()

    def replay() -> None:
        graph.launch(cupy.cuda.get_current_stream())
        assert pool is not None

    return replay


def test_addresses_survive_steps(kind, rng) -> None:
    """What a captured step reads and writes stays in its place from step to step."""
    engine = Engine(kind, "separate", 4)
    addresses = set()
    for query_lens in ([1, 1, 5, 5], [1, 1, 5, 5]):
        step = make_step(rng, 4, query_lens)
        metadata = engine.builder.build(step.batch)
        engine.run(step)
        scratch = engine.impl._scratch(12, True, 96)
        prefill = metadata.fp8_extra_metadata.prefill
        arrays = (metadata.block_table, metadata.req_id_per_token, prefill.request_ids, *scratch)
        addresses.add(tuple(describe("x", a).ptr for a in arrays))
    assert len(addresses) == 1
