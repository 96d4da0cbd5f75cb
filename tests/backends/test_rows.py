"""The V3.2 backend over rows that calls must be told of: PLAIN_FP8, whose scale is each layer's, and V32_NOPE_FP8.

The rows are written by `concat_and_cache_mla`, step by step into one poisoned cache; the oracle reads its bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import SparseMLABackend, SparseMLAConfig, SparseMLAImpl, SparseMLAMetadataBuilder
from cupy_mla.arrays import HOST
from cupy_mla.backends.workspace import Workspace
from cupy_mla.bridges import Place
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import all_kernels
from cupy_mla.metadata.batch import BatchMetadata
from cupy_mla.ops.dense import faster_than_lists
from cupy_mla.selfcheck import warmup as warmup_module
from cupy_mla.warmup import warmup
from tests import oracle
from tests.cases import latent, queries, sinks
from tests.fake_gpu import FakeGPU
from tests.kinds import BF16, E4M3, NumPy, gapped, poisoned
from tests.selfcheck.test_warmup import Layer

BLOCK_SIZE, MAX_MODEL_LEN, TOPK, HEADS = 8, 48, 20, 6
SCALE = 0.07
HOSTILE = 1 << 20
FORMATS = (oracle.PLAIN_512, oracle.PLAIN_576, oracle.V32_NOPE)
# Query tokens and sequences of two steps: prompts that fill more than one chunk of the workspace; two decodes beside
# the next part of a prompt and a new one; decodes alone.
STEPS = (
    ([30, 20, 3, 40, 39, 40, 2], [30, 20, 3, 40, 39, 40, 2]),
    ([2, 2, 5, 6, 9], [32, 22, 8, 46, 48]),
    ([1, 1, 1], [33, 23, 9]),
)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
every_path = pytest.mark.parametrize("path", ["mixed", "separate"])


def name_of(fmt: oracle.Format) -> Any:
    """The name of a format's layout."""
    return fmt.name if fmt.scale is None else "plain_fp8"


class Served:
    """Layers over such rows, the engine's cache of one of them, and what a step of it should give."""

    def __init__(self, kind: NumPy, rng: np.random.Generator, fmt: oracle.Format, path: str, **config: Any) -> None:
        self.kind, self.rng = kind, rng
        self.of_call = fmt.scale is not None
        self.fmt = replace(fmt, scale=0.0009) if self.of_call else fmt
        name = name_of(fmt)
        self.config = SparseMLAConfig(
            HEADS, fmt.d_qk, cache_layout=name, topk=TOPK, block_size=BLOCK_SIZE, max_num_seqs=16, model="v32",
            max_num_batched_tokens=200, max_model_len=MAX_MODEL_LEN, num_speculative_tokens=1,
            mixed_below_heads={"mixed": 129, "separate": 0}[path], **config,
        )  # fmt: skip
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.builder = SparseMLAMetadataBuilder(self.config, place)
        self.workspace = Workspace(place)
        self.impl = SparseMLAImpl(self.config, SCALE, self.workspace)
        self.workspace.lock()
        width = MAX_MODEL_LEN // BLOCK_SIZE
        self.table = rng.permutation(8 * width + 1)[: 7 * width].reshape(7, width)
        shape = SparseMLABackend.get_kv_cache_shape(8 * width + 1, BLOCK_SIZE, 1, fmt.d_qk, name, "v32")
        cache = gapped(poisoned(shape, np.uint8), 0, 2).view(E4M3 if rng.random() < 0.5 else np.uint8)
        self.cache = kind.put(cache)
        self.sinks = sinks(rng, HEADS)

    def scale(self) -> dict[str, Any]:
        """The layer's scale as callers give it: a number, or on the device [1] or []."""
        if not self.of_call:
            return {}
        array = self.kind.put(np.full(1, self.fmt.scale, np.float32))
        return {"k_scale": [self.fmt.scale, array, array.reshape(())][self.rng.integers(3)]}

    def write(self, query_lens: list[int], seq_lens: list[int]) -> BatchMetadata:
        """Put a step's rows into the cache; its batch."""
        put = self.kind.put
        positions = np.concatenate([np.arange(s - n, s) for n, s in zip(query_lens, seq_lens, strict=True)])
        request = np.repeat(np.arange(len(query_lens)), query_lens)
        slots = self.slots(request, positions)
        rows = latent(self.rng, len(slots), self.fmt.d_qk)
        cupy_mla.concat_and_cache_mla(
            put(rows[:, :512].copy()), put(rows[:, 512:].copy()), self.cache, put(slots),
            layout=self.config.cache_layout, **self.scale(),
        )  # fmt: skip
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        return BatchMetadata(starts, seq_lens, self.table[: len(seq_lens)], slots, positions)

    def slots(self, request: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        return self.table[request, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def chosen(self, position: int, *, pools: bool) -> tuple[np.ndarray, int]:
        """The list of a token, and its count, both as vLLM makes them where keys stand for pools: the tail begins at
        column topk, the columns between the last pool and it are -1."""
        rng, kpool, width = self.rng, self.config.kpool, self.config.topk_width
        row, seen = np.full(width, -1, np.int32), position + 1
        if not pools:
            tokens = rng.permutation(seen)[:width]
            row[np.sort(rng.permutation(width)[: len(tokens)])] = tokens
            return row, len(tokens)
        whole = seen // kpool
        for i, pool in enumerate(rng.permutation(whole)[: TOPK // kpool]):
            row[i * kpool : (i + 1) * kpool] = np.arange(pool * kpool, (pool + 1) * kpool)
        row[TOPK : TOPK + seen % kpool] = np.arange(whole * kpool, seen)
        return row, seen if seen <= TOPK else TOPK + seen % kpool

    def check(self, query_lens: list[int], seq_lens: list[int], *, short: bool = False, pools: bool = False) -> None:
        """A step. Of short contexts lists would name all tokens, but nobody may look at them. Prefills in separate mode
        attend over rows that are rounded to bfloat16. Lists have gaps."""
        batch, put, take = self.write(query_lens, seq_lens), self.kind.put, self.kind.take
        metadata, rng = self.builder.build(batch), self.rng
        tokens, width = len(batch.positions), self.config.topk_width
        decode_tokens = tokens if self.config.use_mixed_batch else metadata.fp8_extra_metadata.num_decode_tokens
        request = np.repeat(np.arange(len(query_lens)), query_lens)
        cache = take(self.cache).view(np.uint8)
        q = queries(rng, tokens, HEADS, self.config.d_qk)
        lists, counts = np.full((tokens, width), -1, np.int32), np.zeros(tokens, np.int32)
        want, want_lse, with_sinks = np.empty((tokens, HEADS, 512)), np.empty((tokens, HEADS)), []
        for t, position in enumerate(batch.positions):
            lists[t], counts[t] = self.chosen(position, pools=pools)
            chosen = np.arange(position + 1) if short else lists[t, lists[t] >= 0]
            assert short or len(chosen) == counts[t]
            rows = oracle.named_rows(self.fmt, cache, self.slots(request[t], chosen))
            if t >= decode_tokens:
                rows = rows.astype(BF16).astype(np.float64)
            q[t, np.abs(oracle.attend(q[t], rows, SCALE, None)[2]) < 0.03] = 0  # as `cases.off_zero`
            want[t], _, want_lse[t] = oracle.attend(q[t], rows, SCALE, None)
            with_sinks.append(oracle.attend(q[t], rows, SCALE, self.sinks)[0])
        if short:
            lists[...] = HOSTILE
        assert (metadata.dense_decodes is not None) == short
        self.workspace.get_simultaneous(((self.workspace.size,), np.uint8))[0][...] = 0xFF
        given = put(q)
        if rng.random() < 0.5:
            given = put(q[..., :512].copy()), put(q[..., 512:].copy())
        told = {"valid_counts": put(counts)} if pools or (rng.random() < 0.5 and not short) else {}
        arguments = given, self.cache, metadata, put(lists)
        out, lse = self.impl.forward_mqa(*arguments, return_lse=True, **told, **self.scale())
        oracle.assert_close(take(out), want, "prefill out")
        oracle.assert_close(take(lse), want_lse, "decode lse")
        out = self.impl.forward_mqa(*arguments, sinks=put(self.sinks), **told, **self.scale())
        oracle.assert_close(take(out), np.array(with_sinks), "prefill out")


@every_format
@every_path
@pytest.mark.parametrize("kpool", [1, 4])
def test_steps_on_one_buffer(kind, rng, fmt: oracle.Format, path: str, kpool: int) -> None:
    """Prompts, decodes beside prompts, decodes; with lists of pools, too."""
    served = Served(kind, rng, fmt, path, kpool=kpool)
    for query_lens, seq_lens in STEPS:
        served.check(query_lens, seq_lens)
        if served.of_call:
            served.fmt = replace(served.fmt, scale=0.0011)  # of another layer: earlier rows read as others


@every_format
@every_path
def test_lists_of_pools_as_vllm_makes_them(kind, rng, fmt: oracle.Format, path: str) -> None:
    """With its counts every token of a tail is attended."""
    served = Served(kind, rng, fmt, path, kpool=4)
    for query_lens, seq_lens in STEPS:
        served.check(query_lens, seq_lens, pools=True)


@every_format
@every_path
def test_short_contexts(kind, rng, fmt: oracle.Format, path: str) -> None:
    """The dense way, where it is faster, is told, too; no list is read."""
    served = Served(kind, rng, fmt, path, dense_when_short=True)
    served.write([18, 5], [18, 5])
    place, shape = served.workspace.place, (2, 2, HEADS)
    dense = faster_than_lists(place, served.config.layout, shape, -(-TOPK // BLOCK_SIZE), BLOCK_SIZE)
    assert dense or kind.on_gpu
    served.check([2, 2], [20, 7], short=dense)


def test_scales_are_of_plain_rows_alone(rng) -> None:
    """What is wrong about a scale is said before anything is launched or written."""
    served, out = Served(NumPy(), rng, oracle.PLAIN_576, "mixed"), np.zeros((3, HEADS, 512), BF16)
    metadata = served.builder.build(served.write([3], [3]))
    given = queries(rng, 3, HEADS, 576), served.cache, metadata, np.zeros((3, TOPK), np.int32)
    for scale, error, message in (
        (0, ValueError, "k_scale: expected a positive number, got 0"),
        (-0.5, ValueError, "k_scale: expected a positive number"),
        ("1", TypeError, "k_scale: expected a number"),
        (np.ones(2, np.float32), ValueError, r"k_scale: expected shape \[1\]"),
        (np.ones(1), TypeError, "k_scale: expected dtype float32"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            served.impl.forward_mqa(*given, out=out, k_scale=scale)
    other = Served(NumPy(), rng, oracle.V32_NOPE, "separate")
    given = given[0][..., :512], other.cache, other.builder.build(other.write([3], [3])), given[3]
    with pytest.raises(ValueError, match=r"^k_scale was given, but the rows have the layout v32_nope_fp8: it is for"):
        other.impl.forward_mqa(*given, out=out, k_scale=1.0)
    with pytest.raises(TypeError, match=r"^q: expected dtype bfloat16, got float8_e4m3fn"):
        other.impl.forward_mqa(given[0].astype(E4M3), *given[1:], out=out)
    with pytest.raises(ValueError, match=r"^kv_cache: expected shape \[num_blocks, 8, 528\]"):
        other.impl.forward_mqa(given[0], other.cache[..., :512], *given[2:], out=out)
    assert not out.any()
    bf16 = replace(served.config, cache_layout="bf16")
    impl, metadata = SparseMLAImpl(bf16, SCALE, served.workspace), SparseMLAMetadataBuilder(bf16).build
    for query_len in (2, 3):  # a decode, and a prefill, whose operation is told of no scale
        step = metadata(served.write([query_len], [3]))
        arguments = np.zeros((query_len, HEADS, 576), BF16), np.zeros((8, BLOCK_SIZE, 576), BF16), step
        with pytest.raises(ValueError, match=r"^k_scale was given, but the rows have the layout bf16"):
            impl.forward_mqa(*arguments, np.zeros((query_len, TOPK), np.int32), k_scale=1.0)


@pytest.mark.parametrize(
    ("d_qk", "model", "name", "message"),
    [(576, "v32", "v32_nope_fp8", "cache_layout: rows of 'v32_nope_fp8' have 512 values, d_qk is 576"),
     (512, "v4", "v32_nope_fp8", "cache_layout: models of kind 'v4' have no caches 'v32_nope_fp8'"),
     (512, "v41", "v32_nope_fp8", "cache_layout: models of kind 'v41' have no caches 'v32_nope_fp8'"),
     (512, None, "plain_fp8", "cache_layout: models of kind 'v4' have no caches 'plain_fp8'"),
     (512, "v41", "fp8", "cache_layout: models of kind 'v41' have no caches 'fp8'")],
)  # fmt: skip
def test_layers_without_such_rows(d_qk: int, model: Any, name: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SparseMLAConfig(HEADS, d_qk, cache_layout=name, model=model)
    with pytest.raises(ValueError, match=f": {message}"):
        SparseMLABackend.get_kv_cache_shape(7, 64, 1, d_qk, name, model)


@pytest.mark.long(sample=2)
@every_format
@every_path
def test_no_step_compiles(monkeypatch, rng, fmt: oracle.Format, path: str) -> None:
    """After warming up for the layers, on an H200 that is none: cache writes, prefills, decodes and short contexts."""
    torch = pytest.importorskip("torch")
    heads, most = int(rng.choice([16, 64, 128])), 40
    config = SparseMLAConfig(
        heads, fmt.d_qk, cache_layout=name_of(fmt), model="v32", max_num_seqs=most, max_num_batched_tokens=300,
        max_model_len=6000, num_speculative_tokens=1, dense_when_short=True, kpool=4,
        mixed_below_heads={"mixed": 129, "separate": 0}[path],
    )  # fmt: skip
    steps = []
    for query_lens, seq_len in (
        ([1], 200), ([2] * most, 300), ([1] * int(rng.integers(2, most)), 2000), ([1] * 7, 5000), ([2] * most, 5000),
        ([2, 2, 100], 3000), ([2, 2, 100], 300), ([290], 290), ([1] * int(rng.integers(2, most)), 6000),
    ):  # fmt: skip
        requests, positions = len(query_lens), np.concatenate([np.arange(seq_len - n, seq_len) for n in query_lens])
        starts, table = np.concatenate([[0], np.cumsum(query_lens)]), np.zeros((requests, 94), int)
        batch = BatchMetadata(starts, [seq_len] * requests, table, np.arange(len(positions)), positions)
        steps.append(SparseMLAMetadataBuilder(config, ("torch", HOST)).build(batch))
    assert any(metadata.dense_decodes for metadata in steps)
    forget_calls()
    gpu = FakeGPU(monkeypatch)
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, config).cupy)
    warmup(config)
    ready = set(gpu.kernels.values())
    cache = torch.zeros(8, 64, config.layout.last_axis, dtype=torch.uint8)
    impl = SparseMLAImpl(config, SCALE, Workspace(Place.of(cache)))
    kept = gpu.used
    for metadata in steps:
        tokens = metadata.num_actual_tokens
        q = torch.zeros(tokens, heads, fmt.d_qk, dtype=torch.bfloat16)
        lists, counts = torch.zeros(tokens, config.topk_width).int(), torch.zeros(tokens).int()
        for scale in ({}, {"k_scale": 0.5}, {"k_scale": torch.ones(1)}) if fmt.scale else ({},):
            gpu.used = kept
            cupy_mla.concat_and_cache_mla(
                q[:, 0, :512], q[:, 0, 512:], cache, torch.arange(tokens), layout=config.layout.name, **scale
            )
            for told in ({}, {"valid_counts": counts}):
                gpu.used = kept
                impl.forward_mqa(q, cache, metadata, lists, **told, **scale)
    forget_calls()
    assert set(gpu.kernels.values()) == ready <= set(all_kernels())
