"""Steps of DeepSeek-V4's and V4.1's layers: batches, caches, lists, and what each layer should give.

The oracle is float64 attention over the rows of each token's window and over its compressed rows, which plain loops
find. The caches hold codes and scales whose products are exact, so that backend and oracle see the same numbers. Every
slot that no window of the step reaches and every compressed row that is not complete hold NaN. So does the whole
workspace before each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import ml_dtypes
import numpy as np

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
from tests.batches import queries
from tests.cases import empty_cache, normal, sinks
from tests.cases import queries as big
from tests.kinds import BF16, gapped, poisoned

SCALE = 0.05


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
        self, rng: np.random.Generator, requests: int, rows: int, block_size: int, gap: int, fmt: oracle.Format
    ) -> None:
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


@dataclass(frozen=True)
class Model:
    """The shapes of a model and its engine. Layers of the first one's ratio have a sliding window alone."""

    kind: str
    ratios: tuple[int, ...]  # of the layers
    kv_source: tuple[int | None, ...]  # the layer whose compressed cache a layer reads
    index_source: tuple[int | None, ...]  # the layer whose list a layer uses; None: it has no list
    max_model_len: int
    topk: int
    block: int  # tokens
    heads: int = 3
    window: int = 9
    speculative: int = 0
    swa_block: int = 4
    images: int = 0
    main: oracle.Format = oracle.V4  # rows of windows
    extra: oracle.Format = oracle.V4  # compressed ones
    gap: int = 0  # between blocks of caches

    @property
    def compressed(self) -> dict[int, int]:
        """The source of the compressed cache by ratio."""
        return {self.ratios[s]: s for s in self.kv_source if s is not None}

    def config(self, ratio: int) -> SparseMLAConfig:
        return SparseMLAConfig(
            self.heads, d_qk=512, topk=self.topk, block_size=self.block if ratio in self.compressed else self.swa_block,
            max_num_seqs=16, max_num_batched_tokens=90, max_model_len=self.max_model_len, window=self.window,
            num_speculative_tokens=self.speculative, compress_ratio=ratio, model=self.kind,
            max_image_tokens=self.images, cache_layout=self.main.name,
            compressed_layout=None if self.extra is self.main else self.extra.name,
        )  # fmt: skip


v4 = partial(Model, "v4", (1, 4, 128), layer_sources(3, [1, 2]), (None, 1, None), 397, 20, block=128)
# Layers share caches and lists.
v41 = partial(
    Model, "v41", (0, 2, 2, 2, 1, 1, 1, 0), layer_sources(8, [1, 4]), layer_sources(8, [1, 3, 4, 6]), 211, 12, block=8
)


@dataclass
class Step:
    """One step of all layers, and what each should give."""

    swa_batch: BatchMetadata
    batches: dict[int, BatchMetadata]  # by compress ratio
    decode_tokens: int
    q: np.ndarray
    sink: np.ndarray
    swa: list[Cache]  # of each layer
    compressed: dict[int, Cache]  # of each source
    chosen: dict[int, np.ndarray]  # of each source
    want: list[np.ndarray]  # of each layer


def make_step(
    rng, model: Model, query_lens: list[int], seq_lens=None, *, images=False, replay=False, padding=0.0
) -> Step:
    requests, longest, ratios = len(query_lens), model.max_model_len, model.ratios
    if seq_lens is None:
        seq_lens = [n + int(rng.integers(0, longest + 1 - n)) for n in query_lens]
    batch = queries(query_lens, seq_lens)
    decodes = next((r for r, n in enumerate(query_lens) if n > 1 + model.speculative), requests)
    decode_tokens = sum(query_lens[:decodes])
    start = np.array([rng.integers(0, n - q + 1) if replay else 0 for q, n in zip(query_lens, seq_lens, strict=True)])
    length = rng.integers(1, model.images + 1, batch.tokens) if images else np.ones(batch.tokens, int)
    left = np.minimum(rng.integers(0, length), batch.positions)
    visible = np.stack([left, length - 1 - left])

    swa = [Cache(rng, requests, longest, model.swa_block, model.gap, model.main) for _ in ratios]
    for one in swa[1:]:
        one.table = swa[0].table
    whole = -(-longest // model.block) * model.block  # tokens
    compressed = {
        s: Cache(rng, requests, whole // ratio, model.block // ratio, model.gap, model.extra)
        for ratio, s in model.compressed.items()
    }
    chosen = {s: np.full((batch.tokens, model.topk), -1, np.int32) for s in set(model.index_source) - {None}}
    padded = (rng.random(batch.tokens) < padding) & (np.arange(batch.tokens) < decode_tokens)
    q, sink = big(rng, batch.tokens, model.heads, 512), sinks(rng, model.heads)
    want = [np.zeros((batch.tokens, model.heads, 512)) for _ in ratios]
    slots, t = np.full(batch.tokens, -1), 0
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        prefix = max(seq_len - query_len - model.window + 1, start[r], 0)  # of a prefill's gathered rows
        reach = max(seq_len - query_len - model.window + 1 - model.images, start[r], 0)
        windows = [one.put(r, np.arange(reach, seq_len)) for one in swa]
        if query_len:
            swa[0].table[r, : reach // model.swa_block] = -1  # freed: no window reaches them any more
        rows = {s: one.put(r, np.arange(seq_len // ratios[s])) for s, one in compressed.items()}
        for p in range(seq_len - query_len, seq_len):
            slots[t] = int(swa[0].slots(r, np.array(p)))
            for s, lists in chosen.items():
                mine = rng.permutation((p + 1) // ratios[s])[: model.topk]
                lists[t, : len(mine)] = mine
            first = start[r] if t < decode_tokens else prefix
            seen = oracle_v4.window_of(
                p, model.window, tuple(visible[:, t]), first, seq_len, model.window + model.images
            )
            for layer, ratio in enumerate(ratios):
                if padded[t]:
                    continue
                attended = [windows[layer][[i - reach for i in seen]]]
                if ratio in model.compressed:
                    listed, source = np.arange((p + 1) // ratio), model.index_source[layer]
                    if source is not None:
                        listed = chosen[source][t]
                    attended.append(rows[model.compressed[ratio]][listed[listed >= 0]])
                want[layer][t], _, _ = oracle.attend(q[t], np.concatenate(attended), SCALE, sink)
            t += 1
    slots[padded] = -1
    more = {"replay_start": start} if replay else {}
    if images:
        more |= {"left_visible": visible[0], "right_visible": visible[1]}
    common = (batch.query_start_loc, batch.seq_lens)
    return Step(
        BatchMetadata(*common, swa[0].table, slots, batch.positions, **more),
        {ratio: BatchMetadata(*common, compressed[s].table, slots, batch.positions)
         for ratio, s in model.compressed.items()},
        decode_tokens, q, sink, swa, compressed, chosen, want,
    )  # fmt: skip


class Engine:
    """Builders and backends of all layers over one kind of array, after a warm-up."""

    def __init__(self, kind, model: Model) -> None:
        self.kind, self.model, self.alone = kind, model, model.ratios[0]
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.swa_builder = SparseSWAMetadataBuilder(model.config(self.alone), place)
        self.builders = {ratio: SparseMLAMetadataBuilder(model.config(ratio), place) for ratio in model.compressed}
        self.workspace = Workspace(place)
        self.impls = {ratio: DeepseekV4Impl(model.config(ratio), SCALE, self.workspace) for ratio in {*model.ratios}}
        listed = {model.ratios[s] for s in model.index_source if s is not None}
        self.groups = {ratio: IndexGroups(model.config(ratio), model.index_source, place) for ratio in listed}
        for impl in self.impls.values():
            q, out = (kind.put(poisoned((5, model.heads, 512), BF16)) for _ in range(2))
            assert impl.forward(q, None, None, None, out) is out
            assert (kind.take(out) == 0).all()
        self.workspace.lock()

    def build(self, step: Step):
        """The metadata of both sorts, for one step; the second by ratio."""
        compressed = {ratio: builder.build(step.batches[ratio]) for ratio, builder in self.builders.items()}
        return self.swa_builder.build(step.swa_batch), {self.alone: None, **compressed}

    def layers(self, step: Step) -> list[DeepseekV4Layer]:
        put, model = self.kind.put, self.model
        sink, compressed = put(step.sink), {s: put(cache.array) for s, cache in step.compressed.items()}
        chosen = {s: put(lists) for s, lists in step.chosen.items()}
        return [
            DeepseekV4Layer(
                put(step.swa[layer].array), sink, compressed.get(model.compressed.get(ratio)),
                chosen.get(model.index_source[layer]) if ratio != self.alone else None,
            )
            for layer, ratio in enumerate(model.ratios)
        ]  # fmt: skip

    def forward(
        self, layers: list[DeepseekV4Layer], q, swa, metadata, outs, shared: bool = False, poison: bool = False
    ) -> None:
        """All layers of a step.

        Args:
            shared: with the lists of the groups, else with those that each layer converts.
            poison: fill the workspace with NaN before each layer, which must find nothing of an earlier one.
        """
        for ratio, groups in self.groups.items() if shared else ():
            groups.build(metadata[ratio], swa)
        for number, (ratio, layer) in enumerate(zip(self.model.ratios, layers, strict=True)):
            if shared and layer.topk_indices is not None:
                if self.model.index_source[number] == number:
                    self.groups[ratio].put(number, layer.topk_indices)
                layer = replace(layer, topk_indices=self.groups[ratio].get(number))
            if poison:
                self.workspace.get_simultaneous(((self.workspace.size,), np.uint8))[0][...] = 0xFF
            assert self.impls[ratio].forward(q, layer, swa, metadata[ratio], outs[number]) is outs[number]

    def run(self, step: Step, shared: bool = False, out_gaps: tuple[int, ...] = ()) -> list[np.ndarray]:
        """What each layer gives, twice with the same bits: the second time the layers find the step's plans made."""
        swa, metadata = self.build(step)
        layers, q, results = self.layers(step), self.kind.put(step.q), []
        for _ in range(2):
            made = [self.kind.put_with_allocation(gapped(poisoned(step.q.shape, BF16), *out_gaps)) for _ in layers]
            self.forward(layers, q, swa, metadata, [out for out, _ in made], shared, poison=True)
            results.append([self.kind.take(out) for out, _ in made])
            for _, whole in made if out_gaps else ():
                gaps = self.kind.take(whole).view(np.uint16).reshape(
                    [n + g for n, g in zip(step.q.shape, out_gaps, strict=True)]
                )  # fmt: skip
                for axis, n in enumerate(step.q.shape):
                    assert (gaps.take(range(n, gaps.shape[axis]), axis) == 0xFFFF).all()
        assert_same_bits(*results)
        return results[0]


def assert_same_bits(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


def check(got: list[np.ndarray], step: Step) -> None:
    decodes, prefills = slice(step.decode_tokens), slice(step.decode_tokens, None)
    for out, want in zip(got, step.want, strict=True):
        for part, result in ((decodes, "decode out"), (prefills, "prefill out")):
            if want[part].size:
                oracle.assert_close(out[part], want[part], result)
