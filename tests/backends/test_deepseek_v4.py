"""The V4 backend against float64 attention over the rows of each token's window and its compressed rows.

The caches' rows are e4m3 codes under power-of-two scales, so that backend and oracle see the same numbers. Every slot
that no window of the step reaches, every compressed row that is not complete and the whole workspace hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import SparseMLAConfig
from cupy_mla.backends.deepseek_v4 import DeepseekV4Impl, DeepseekV4Layer
from cupy_mla.backends.workspace import Workspace
from cupy_mla.bridges import Place, describe
from cupy_mla.metadata.batch import BatchMetadata
from cupy_mla.metadata.sparse_mla import SparseMLAMetadataBuilder
from cupy_mla.metadata.swa import SparseSWAMetadataBuilder
from tests import oracle
from tests.backends.test_sparse_mla import capture
from tests.batches import queries
from tests.cases import empty_cache, normal, sinks
from tests.cases import queries as big
from tests.kinds import BF16, NumPy, gapped, poisoned

MAX_MODEL_LEN, TOPK, SCALE = 397, 20, 0.05
KINDS = (1, 4, 128)


def exact_rows(
    rng: np.random.Generator, n: int, fmt: oracle.Format = oracle.V4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n latent rows that a format holds exactly: their values, float64 [n, 512], and their bytes, of data and, where
    they stand apart, of scales."""
    if fmt is not oracle.V4:
        return rows_of_v41(rng, n, fmt)
    exponents = rng.integers(-5, -2, (n, 7))
    codes = rng.standard_normal((n, 448)).astype(ml_dtypes.float8_e4m3fn)
    rope = (0.1 * normal(rng, n, 64).astype(np.float32)).astype(BF16)
    values = codes.astype(np.float64) * np.repeat(2.0**exponents, 64, axis=1)
    scales = np.concatenate([exponents + 127, np.zeros((n, 1))], axis=1).astype(np.uint8)
    return (
        np.concatenate([values, rope.astype(np.float64)], axis=1),
        np.concatenate([codes.view(np.uint8), rope.view(np.uint8)], axis=1),
        scales,
    )


def rows_of_v41(rng: np.random.Generator, n: int, fmt: oracle.Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`exact_rows` of V4.1's formats: e4m3 codes under powers of two, or e2m1 codes under e4m3 scales."""
    if fmt in oracle.V41_FP4S:
        codes, scales = rng.integers(0, 16, (n, 512)), rng.integers(8, 25, (n, 32))
        values, factors, data = oracle.E2M1[codes], oracle.E4M3[scales], codes[:, ::2] | codes[:, 1::2] << 4
    else:
        e4m3, scales = rng.standard_normal((n, 512)).astype(ml_dtypes.float8_e4m3fn), rng.integers(122, 125, (n, 16))
        values, factors, data = e4m3.astype(np.float64), 2.0 ** (scales - 127), e4m3.view(np.uint8)
    values, data, scales = values * np.repeat(factors, fmt.tile, axis=1), data.astype(np.uint8), scales.astype(np.uint8)
    if fmt in (oracle.V41, oracle.V41_FP4):
        return values, np.concatenate([data, scales], axis=1), scales[:, :0]
    return values, data, scales


class Cache:
    """A paged cache for requests of up to `rows` rows, each in blocks of its own; poison elsewhere."""

    def __init__(
        self, rng: np.random.Generator, requests: int, rows: int, block_size: int, gap: int,
        fmt: oracle.Format = oracle.V4,
    ) -> None:  # fmt: skip
        width = -(-rows // block_size)
        num_blocks = requests * width + 1
        self.rng = rng
        self.block_size = block_size
        self.fmt = fmt
        self.array = empty_cache(fmt, num_blocks, block_size, gap)
        self.table = rng.permutation(num_blocks)[: requests * width].reshape(requests, width)

    def slots(self, request: int, positions: np.ndarray) -> np.ndarray:
        return self.table[request, positions // self.block_size] * self.block_size + positions % self.block_size

    def put(self, request: int, positions: np.ndarray) -> np.ndarray:
        """Fill the slots of a request's positions with new rows; returns the rows."""
        rows, data, scales = exact_rows(self.rng, len(positions), self.fmt)
        (_, of_data), (_, of_scales) = data.shape, scales.shape
        raw = self.array.base
        while raw.base is not None:
            raw = raw.base
        for i, (block, t) in enumerate(np.transpose(np.divmod(self.slots(request, positions), self.block_size))):
            raw[block, of_data * t : of_data * (t + 1)] = data[i]
            start = of_data * self.block_size + of_scales * t
            raw[block, start : start + of_scales] = scales[i]
        return rows


@dataclass
class Step:
    """One step's batches, query, sinks, caches and chosen rows, and what each kind of layer should give."""

    swa: Cache
    compressed: dict[int, Cache]
    swa_batch: BatchMetadata
    batches: dict[int, BatchMetadata]
    decode_tokens: int
    q: np.ndarray
    sink: np.ndarray
    topk_indices: np.ndarray
    want: dict[int, np.ndarray]  # by compress ratio


@dataclass
class Model:
    """The shapes of a model and its engine."""

    heads: int = 3
    window: int = 9
    speculative: int = 0
    swa_block: int = 4
    block: int = 128  # tokens; 32 rows a block for C4A, 1 for C128A
    gap: int = 0

    def config(self, ratio: int) -> SparseMLAConfig:
        block_size = self.swa_block if ratio == 1 else self.block
        return SparseMLAConfig(
            self.heads, d_qk=512, cache_layout="v4_fp8", topk=TOPK, block_size=block_size,
            max_num_seqs=16, max_num_batched_tokens=90, max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=self.speculative, compress_ratio=ratio, window=self.window,
        )  # fmt: skip


def make_step(
    rng: np.random.Generator, model: Model, query_lens: list[int], seq_lens: list[int] | None = None, padding: float = 0
) -> Step:
    requests = len(query_lens)
    if seq_lens is None:
        seq_lens = [n + int(rng.integers(0, MAX_MODEL_LEN + 1 - n)) for n in query_lens]
    batch = queries(query_lens, seq_lens)
    decodes = next((r for r, n in enumerate(query_lens) if n > 1 + model.speculative), requests)
    decode_tokens = sum(query_lens[:decodes])
    swa = Cache(rng, requests, MAX_MODEL_LEN, model.swa_block, model.gap)
    compressed = {
        ratio: Cache(rng, requests, -(-MAX_MODEL_LEN // model.block) * model.block // ratio, model.block // ratio, 0)
        for ratio in KINDS[1:]
    }
    q, sink = big(rng, batch.tokens, model.heads, 512), sinks(rng, model.heads)
    topk_indices = np.full((batch.tokens, TOPK), -1, np.int32)
    padded = (rng.random(batch.tokens) < padding) & (np.arange(batch.tokens) < decode_tokens)
    slots = np.full(batch.tokens, -1)
    want = {ratio: np.zeros((batch.tokens, model.heads, 512)) for ratio in KINDS}
    t = 0
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = max(seq_len - query_len - model.window + 1, 0)
        live = np.arange(first, seq_len)
        window_rows = swa.put(r, live)
        if query_len:
            swa.table[r, : first // model.swa_block] = -1  # freed: no window reaches them any more
        rows = {ratio: cache.put(r, np.arange(seq_len // ratio)) for ratio, cache in compressed.items()}
        for p in range(seq_len - query_len, seq_len):
            slots[t] = swa.slots(r, np.array(p))
            chosen = rng.permutation((p + 1) // 4)[:TOPK]
            topk_indices[t, : len(chosen)] = chosen
            attended = {
                1: np.zeros((0, 512)), 4: rows[4][chosen], 128: rows[128][: (p + 1) // 128],
            }  # fmt: skip
            mine = window_rows[max(p - model.window + 1, 0) - first : p + 1 - first]
            for ratio in KINDS:
                if not padded[t]:
                    want[ratio][t], _, _ = oracle.attend(q[t], np.concatenate([mine, attended[ratio]]), SCALE, sink)
            t += 1
    slots[padded] = -1
    common = (batch.query_start_loc, batch.seq_lens)
    return Step(
        swa, compressed, BatchMetadata(*common, swa.table, slots, batch.positions),
        {ratio: BatchMetadata(*common, cache.table, slots, batch.positions) for ratio, cache in compressed.items()},
        decode_tokens, q, sink, topk_indices, want,
    )  # fmt: skip


class Engine:
    """Builders and backends of all kinds of layers over one kind of array, after a warm-up."""

    def __init__(self, kind, model: Model) -> None:
        self.kind = kind
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.swa_builder = SparseSWAMetadataBuilder(model.config(1), place)
        self.builders = {ratio: SparseMLAMetadataBuilder(model.config(ratio), place) for ratio in KINDS[1:]}
        self.workspace = Workspace(place)
        self.impls = {ratio: DeepseekV4Impl(model.config(ratio), SCALE, self.workspace) for ratio in KINDS}
        for impl in self.impls.values():
            q = kind.put(poisoned((5, model.heads, 512), BF16))
            out = kind.put(poisoned((5, model.heads, 512), BF16))
            assert impl.forward(q, None, None, None, out) is out
            assert (kind.take(out) == 0).all()
        self.workspace.lock()

    def build(self, step: Step):
        """The metadata of both sorts, for one step."""
        compressed = {ratio: self.builders[ratio].build(batch) for ratio, batch in step.batches.items()}
        return self.swa_builder.build(step.swa_batch), {1: None, **compressed}

    def layers(self, step: Step) -> dict[int, DeepseekV4Layer]:
        put = self.kind.put
        swa, sink = put(step.swa.array), put(step.sink)
        return {
            1: DeepseekV4Layer(swa, sink),
            4: DeepseekV4Layer(swa, sink, put(step.compressed[4].array), put(step.topk_indices)),
            128: DeepseekV4Layer(swa, sink, put(step.compressed[128].array)),
        }

    def run(self, step: Step, out_gaps: tuple[int, ...] = ()) -> dict[int, np.ndarray]:
        """What each kind of layer gives; two layers of a kind, which share its schedule."""
        swa, metadata = self.build(step)
        layers, q, results = self.layers(step), self.kind.put(step.q), {}
        for ratio, impl in self.impls.items():
            for _ in range(2):
                out, whole = self.kind.put_with_allocation(gapped(poisoned(step.q.shape, BF16), *out_gaps))
                self.workspace.get_simultaneous(((self.workspace.size,), np.uint8))[0][...] = 0xFF
                assert impl.forward(q, layers[ratio], swa, metadata[ratio], out) is out
                got = self.kind.take(out)
                if ratio in results:
                    np.testing.assert_array_equal(got.view(np.uint16), results[ratio].view(np.uint16))
                results[ratio] = got
            if out_gaps:
                gaps = self.kind.take(whole).view(np.uint16).reshape(
                    [n + g for n, g in zip(step.q.shape, out_gaps, strict=True)]
                )  # fmt: skip
                for axis, n in enumerate(step.q.shape):
                    assert (gaps.take(range(n, gaps.shape[axis]), axis) == 0xFFFF).all()
        return results


def check(got: dict[int, np.ndarray], step: Step) -> None:
    decodes, prefills = slice(step.decode_tokens), slice(step.decode_tokens, None)
    for ratio, want in step.want.items():
        for part, result in ((decodes, "decode out"), (prefills, "prefill out")):
            if want[part].size:
                oracle.assert_close(got[ratio][part], want[part], result)


@pytest.mark.long(sample=28)
@pytest.mark.parametrize(
    "model",
    [Model(), Model(heads=16, window=128, swa_block=64, block=256), Model(heads=1, window=1, swa_block=1, gap=1),
     Model(heads=8, window=64, swa_block=61, speculative=2, gap=1)],
    ids=["small", "real", "least", "odd"],
)  # fmt: skip
@pytest.mark.parametrize(
    "query_lens", [[], [1], [7], [1] * 5, [1, 1, 6, 4, 20], [5] * 9, [2, 1, 3, 0, 1, 5], [0, 0]], ids=str
)
def test_batches(kind, rng, model: Model, query_lens: list[int]) -> None:
    """Decodes alone, prefills alone, both; uneven decodes; more prefills than a chunk; requests without tokens."""
    step = make_step(rng, model, query_lens)
    check(Engine(kind, model).run(step), step)


@pytest.mark.parametrize("model", [Model(), Model(window=128, speculative=4)], ids=["short", "long"])
def test_sequences_at_the_edges(kind, rng, model: Model) -> None:
    """First tokens (no compressed row yet), windows longer than the sequence, both sides of compression boundaries."""
    seq_lens = [1, 2, 3, 4, 5, 127, 128, 129, 256, MAX_MODEL_LEN, 8, 9]
    engine = Engine(kind, model)
    for query_lens in ([1] * 12, [1] * 10 + [8, 9], [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]):
        step = make_step(rng, model, query_lens, seq_lens)
        check(engine.run(step), step)


def test_whole_prompts(kind, rng) -> None:
    """Prefills of new sequences, which see their first compressed rows come and go beyond the window."""
    model = Model(window=8)
    step = make_step(rng, model, [1, 40, 4, 3, 12], [1, 40, 4, 3, 12])
    check(Engine(kind, model).run(step), step)


def test_steps_one_after_the_other(kind, rng) -> None:
    """The same builders and workspace serve batches of changing shapes."""
    model = Model(speculative=1)
    engine = Engine(kind, model)
    for query_lens in ([1] * 16, [2, 1, 30, 40], [80], [2, 2], [1]):
        step = make_step(rng, model, query_lens)
        check(engine.run(step), step)


def test_padding_tokens_give_zeros(kind, rng) -> None:
    """Tokens without a slot attend nothing, whatever their request's rows."""
    model = Model(speculative=2)
    step = make_step(rng, model, [3, 2, 1, 3, 3, 9], padding=0.5)
    got = Engine(kind, model).run(step)
    check(got, step)
    padded = step.swa_batch.slot_mapping[: step.decode_tokens] < 0
    assert all((got[ratio][: step.decode_tokens][padded] == 0).all() for ratio in KINDS)


def test_strides(kind, rng) -> None:
    """A query with gaps, block strides beyond the block, an output with gaps that stay as they were."""
    model = Model(gap=1)
    step = make_step(rng, model, [1, 1, 6, 30])
    step.q = gapped(step.q, 0, 2, 24)
    check(Engine(kind, model).run(step, out_gaps=(0, 1, 8)), step)


def test_caches_with_a_head_axis(kind, rng) -> None:
    model = Model()
    step = make_step(rng, model, [1, 1, 6])
    for cache in (step.swa, *step.compressed.values()):
        cache.array = cache.array[:, :, None]
    check(Engine(kind, model).run(step), step)


def test_what_the_indexer_chose_beyond_the_rows_counts_for_nothing(kind, rng) -> None:
    model = Model()
    step = make_step(rng, model, [1, 1, 6], [3, 7, 6])
    empty = step.topk_indices == -1
    step.topk_indices[empty] = rng.choice([-1, -(2**31), 2**31 - 1, MAX_MODEL_LEN], empty.sum())
    check(Engine(kind, model).run(step), step)


def test_errors(rng) -> None:
    model = Model()
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    layers = engine.layers(step)
    output = np.zeros_like(step.q)
    good = {"q": step.q, "layer": layers[4], "swa_metadata": swa, "metadata": metadata[4], "output": output}
    c4a, plain, cache = layers[4], layers[1], layers[4].k_cache
    other = engine.build(make_step(rng, model, [1, 5]))
    wider = SparseSWAMetadataBuilder(Model(window=10).config(1)).build(step.swa_batch)
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
    model = Model(speculative=2)
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [3, 3, 5], [300, 200, 390])
    swa, metadata = engine.build(step)
    output, layers, torch = np.zeros_like(step.q), engine.layers(step), pytest.importorskip("torch")

    def forward(ratio: int, swa=swa, metadata=metadata, impl=engine.impls) -> None:
        impl[ratio].forward(step.q, layers[ratio], swa, metadata[ratio], output)

    for ratio in KINDS:
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
        for ratio in KINDS
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
    model = Model()
    engine = Engine(NumPy(), model)
    step = make_step(rng, model, [1, 5])
    swa, metadata = engine.build(step)
    workspace = Workspace(Place("numpy", -1))
    workspace.lock()
    impl = DeepseekV4Impl(model.config(4), SCALE, workspace)
    with pytest.raises(RuntimeError, match="the workspace is locked at 0 bytes"):
        impl.forward(step.q, engine.layers(step)[4], swa, metadata[4], np.zeros_like(step.q))


def test_addresses_survive_steps(kind, rng) -> None:
    """What a captured step reads and writes stays in its place from step to step."""
    model = Model(speculative=1)
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([2, 1, 2, 2, 1, 2], None), ([2, 1, 2, 5, 3], [20, 9, 390, 131, 3])],
    ids=["decode", "prefill"],
)  # fmt: skip
def test_a_captured_step_gives_the_same_bits(kind, rng, query_lens: list[int], seq_lens: list[int] | None) -> None:
    """All kinds of layers captured once, replayed with other batches of the same shapes, against eager runs."""
    if not kind.on_gpu:
        pytest.skip("CUDA graphs")
    model = Model(heads=16, window=128, swa_block=64, block=256, speculative=1)
    engine = Engine(kind, model)
    steps = [make_step(rng, model, query_lens, seq_lens) for _ in range(3)]
    swa, metadata = engine.build(steps[0])
    layers, q = engine.layers(steps[0]), kind.put(steps[0].q)
    outs = {ratio: kind.put(poisoned(steps[0].q.shape, BF16)) for ratio in KINDS}

    def forward() -> None:
        for ratio, impl in engine.impls.items():
            impl.forward(q, layers[ratio], swa, metadata[ratio], outs[ratio])

    replay = capture(kind, forward)
    for step in steps:
        engine.build(step)
        q[...] = kind.put(step.q)
        for ratio, fresh in engine.layers(step).items():
            for name in ("swa_k_cache", "attn_sink", "k_cache", "topk_indices"):
                if getattr(fresh, name) is not None:
                    getattr(layers[ratio], name)[...] = getattr(fresh, name)
            outs[ratio][...] = 0
        replay()
        replayed = {ratio: kind.take(outs[ratio]).copy() for ratio in KINDS}
        check(replayed, step)
        eager = engine.run(step)
        for ratio in KINDS:
            np.testing.assert_array_equal(eager[ratio].view(np.uint16), replayed[ratio].view(np.uint16))
