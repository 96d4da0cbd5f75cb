"""Decodes of contexts of at most topk tokens: `SparseMLAImpl` attends over all rows, without index lists.

Where it does, the lists that it is given are poisoned.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cupy_mla
from cupy_mla import SparseMLAConfig
from cupy_mla.arrays import HOST
from cupy_mla.backends.index_groups import IndexGroups, layer_sources
from cupy_mla.backends.sparse_mla import SparseMLAImpl
from cupy_mla.backends.workspace import Workspace
from cupy_mla.bridges import Place
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import driver
from cupy_mla.layouts import BF16_576, V32_FP8, V32_NVFP4, Layout
from cupy_mla.metadata.batch import BatchMetadata
from cupy_mla.metadata.sparse_mla import SparseMLAMetadata, SparseMLAMetadataBuilder
from cupy_mla.ops.dense import faster_than_lists
from tests import oracle
from tests.backends.test_sparse_mla import BLOCK_SIZE, PATHS, SCALE, TOPK, Engine, Step, assert_result, make_step
from tests.fake_gpu import FakeGPU
from tests.kinds import NumPy

HEADS = 6
HOSTILE = 1 << 20


def engine_of(kind: NumPy, path: str, **changes: object) -> Engine:
    """An engine whose lists are an indexer's."""
    engine = Engine(kind, path, HEADS, speculative=1)
    config = replace(engine.builder.config, dense_when_short=True, **changes)
    place = engine.workspace.place
    engine.builder = SparseMLAMetadataBuilder(config, place)
    engine.workspace = Workspace(place)
    engine.impl = SparseMLAImpl(config, SCALE, engine.workspace)
    return engine


def takes_dense(engine: Engine, requests: int, query_len: int) -> bool:
    """Whether short decodes should take the dense way: what `faster_than_lists` says. For the sizes of this file that
    is yes on the CPU and on an H200."""
    config, place = engine.builder.config, engine.workspace.place
    width, shape = -(-TOPK // BLOCK_SIZE), (requests, query_len, HEADS)
    faster = faster_than_lists(place, config.layout, shape, width, BLOCK_SIZE)
    assert faster or (place.on_gpu and "H200" not in driver.gpu(place.device).name)
    return faster


def step_of(rng: np.random.Generator, query_lens: list[int], longest: int) -> Step:
    """A step whose lists name all tokens that a query sees, up to topk; one request is as long as that, none longer."""
    lens = [int(rng.integers(n, longest + 1)) if n else 0 for n in query_lens]
    lens[int(rng.integers(np.count_nonzero(query_lens)))] = longest
    return make_step(rng, HEADS, query_lens, lens, all_listed=True)


def poisoned_lists(step: Step, metadata: SparseMLAMetadata) -> np.ndarray:
    """The step's lists, with rows for nobody in those of tokens that take the dense way."""
    lists = step.topk_indices.copy()
    if metadata.dense_decodes is not None:
        lists[: metadata.dense_decodes.num_tokens] = HOSTILE
    return lists


def attend(engine: Engine, step: Step, metadata: SparseMLAMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Results and lse; no list is read of a token that takes the dense way."""
    put = engine.kind.put
    lists = put(poisoned_lists(step, metadata))
    engine.poison_workspace()
    out, lse = engine.impl.forward_mqa(
        put(step.q), put(step.caches[engine.layout]), metadata, lists, return_lse=True
    )  # fmt: skip
    return engine.kind.take(out), engine.kind.take(lse)


def check(engine: Engine, step: Step, metadata: SparseMLAMetadata) -> None:
    out, lse = attend(engine, step, metadata)
    assert_result(out, step.want)
    oracle.assert_close(lse, step.want_lse, "decode lse")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("longest", [TOPK - 1, TOPK, TOPK + 1])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [2, 2, 2], [2], [2, 2, 0, 0], [1, 0]], ids=str)
def test_decodes(kind, rng, path: str, longest: int, query_lens: list[int]) -> None:
    """Of contexts about as long as a list. The longest decides for all; what is dense is as near float64 as lists."""
    step, engine = step_of(rng, query_lens, longest), engine_of(kind, path)
    metadata = engine.builder.build(step.batch)
    dense = longest <= TOPK and takes_dense(engine, sum(query_lens) // query_lens[0], query_lens[0])
    assert (metadata.dense_decodes is not None) == dense
    check(engine, step, metadata)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("longest", "padding"), [(TOPK, 2), (TOPK, 4), (TOPK, 3)])
def test_tokens_that_pad_decodes(kind, rng, path: str, longest: int, padding: int) -> None:
    """Whole decodes that stand for no request have results of 0. Others take lists, for they divide no token count."""
    step, engine = step_of(rng, [2, 2, 0], longest).padded(padding), engine_of(kind, path)
    metadata = engine.builder.build(step.batch)
    dense = padding % 2 == 0 and takes_dense(engine, (4 + padding) // 2, 2)
    assert (metadata.dense_decodes is not None) == dense
    check(engine, step, metadata)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("longest", [TOPK, TOPK + 1])
def test_decodes_beside_prefills(kind, rng, path: str, longest: int) -> None:
    """Only the decodes' contexts decide, and only where these are launched apart from the prefills."""
    query_lens = [2, 2, 5, 9]
    lens = [longest, 3, 40, 48]
    step, engine = make_step(rng, HEADS, query_lens, lens, all_listed=True), engine_of(kind, path)
    metadata = engine.builder.build(step.batch)
    dense = path == "separate" and longest <= TOPK and takes_dense(engine, 2, 2)
    assert (metadata.dense_decodes is not None) == dense
    assert not dense or metadata.dense_decodes.num_tokens == 4
    check(engine, step, metadata)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("query_lens", [[2, 2, 2], [2, 2, 5, 9]], ids=str)
def test_sinks_counts_and_shared_lists(kind, rng, path: str, query_lens: list[int]) -> None:
    """Sinks count in the dense way, too; a list that was converted for a group, or has counts, serves the others."""
    lens = [TOPK, 3, *([7] if len(query_lens) == 3 else [40, 48])]
    step, engine = make_step(rng, HEADS, query_lens, lens, all_listed=True), engine_of(kind, path)
    metadata, put = engine.builder.build(step.batch), kind.put
    lists = poisoned_lists(step, metadata)
    counts = np.array([max(np.flatnonzero(row >= 0), default=-1) + 1 for row in lists], np.int32)
    groups = cupy_mla.IndexGroups(engine.impl.config, [0], engine.workspace.place)
    groups.build(metadata)
    for given, more in (
        (put(lists), {}), (put(lists), {"valid_counts": put(counts)}), (groups.put(0, put(lists)), {})
    ):  # fmt: skip
        engine.poison_workspace()
        arguments = put(step.q), put(step.caches[engine.layout]), metadata, given
        out, lse = engine.impl.forward_mqa(*arguments, sinks=put(step.sinks), return_lse=True, **more)
        assert_result(kind.take(out), step.want_with_sinks)
        oracle.assert_close(kind.take(lse), step.want_lse, "decode lse")


@pytest.mark.parametrize("path", PATHS)
def test_decodes_of_unequal_numbers_of_tokens_take_lists(rng, path: str) -> None:
    step, engine = step_of(rng, [2, 1, 2], TOPK), engine_of(NumPy(), path)
    metadata = engine.builder.build(step.batch)
    dense = metadata.dense_decodes
    assert dense is None if path != "separate" else (dense is not None and dense.num_tokens == 2)
    check(engine, step, metadata)


@pytest.mark.parametrize("path", PATHS)
def test_lists_that_may_lack_tokens_are_read(rng, path: str) -> None:
    """Without `dense_when_short`: lists of any tokens count as they are."""
    step, engine = make_step(rng, HEADS, [1, 1], [TOPK, 5]), Engine(NumPy(), path, HEADS)
    step.topk_indices[:, ::2] = -1
    metadata = engine.builder.build(step.batch)
    assert metadata.dense_decodes is None
    listed = attend(engine, step, metadata)[0]
    short = engine_of(NumPy(), path).builder.build(step.batch)
    assert np.abs(listed - attend(engine, step, short)[0]).max() > 0.01


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bound", [TOPK, TOPK + 1])
def test_lengths_that_the_device_has(kind, rng, path: str, bound: int) -> None:
    """The host's upper bound decides; what is attended is what the device says."""
    step, engine = step_of(rng, [2, 2, 2], TOPK - 3), engine_of(kind, path)
    batch = step.batch
    loose = BatchMetadata(
        batch.query_start_loc, np.full(3, bound), batch.block_table, batch.slot_mapping, batch.positions
    )
    metadata = engine.builder.build(loose, seq_lens=kind.put(batch.seq_lens))
    assert (metadata.dense_decodes is not None) == (bound <= TOPK and takes_dense(engine, 3, 2))
    check(engine, step, metadata)


@pytest.mark.parametrize("path", PATHS)
def test_steps_one_after_the_other(kind, rng, path: str) -> None:
    """Nothing of a step is left in the next one's arrays."""
    engine = engine_of(kind, path)
    for query_lens, longest in (([2] * 5, TOPK), ([2, 2], TOPK - 5), ([1] * 3, TOPK + 9), ([1, 0, 0], TOPK)):
        step = step_of(rng, query_lens, longest)
        check(engine, step, engine.builder.build(step.batch))


@pytest.mark.parametrize("query_lens", [[2, 2], [2, 2, 5]], ids=str)
def test_layers_that_share_a_list(kind, rng, query_lens: list[int]) -> None:
    """With a sink: decodes leave the list alone, which `IndexGroups` has converted; prefills beside them read it."""
    step = make_step(rng, HEADS, query_lens, [TOPK, 7, 40][: len(query_lens)], all_listed=True)
    engine, put = engine_of(kind, "separate"), kind.put
    groups = IndexGroups(engine.impl.config, layer_sources(2, [0]), engine.workspace.place)
    metadata = engine.builder.build(step.batch)
    groups.build(metadata)
    groups.put(0, put(poisoned_lists(step, metadata)))
    got = engine.impl.forward_mqa(
        put(step.q), put(step.caches["v32_fp8"]), metadata, groups.get(1), sinks=put(step.sinks)
    )  # fmt: skip
    assert_result(kind.take(got), step.want_with_sinks)


def test_a_cache_and_results_with_gaps(kind, rng) -> None:
    step, engine = make_step(rng, HEADS, [2, 2], [TOPK, 7], block_gap=16, all_listed=True), engine_of(kind, "bf16")
    check(engine, step, engine.builder.build(step.batch))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("longest", [TOPK, TOPK + 1])
def test_a_captured_step_takes_the_way_that_always_holds(monkeypatch, rng, path: str, longest: int) -> None:
    """Of sequences that may become longer than a list: lists. Of others, what an eager step takes."""
    torch = pytest.importorskip("torch")
    forget_calls()
    layout = "bf16" if path == "bf16" else "v32_fp8"
    config = SparseMLAConfig(
        HEADS, cache_layout=layout, topk=TOPK, block_size=BLOCK_SIZE, max_num_seqs=3, max_num_batched_tokens=8,
        max_model_len=longest, mixed_below_heads=129 * (path == "mixed"), dense_when_short=True,
    )  # fmt: skip
    batch = BatchMetadata(range(4), [5, 3, 1], np.zeros((3, 3), int), [0, 1, 2], [4, 2, 0])
    metadata = SparseMLAMetadataBuilder(config, ("torch", HOST)).build(batch)
    gpu = FakeGPU(monkeypatch)
    q, cache = torch.zeros((3, HEADS, 576), dtype=torch.bfloat16), torch.zeros(4, BLOCK_SIZE, config.layout.last_axis)
    cache = cache.to(torch.bfloat16 if path == "bf16" else torch.uint8)
    impl = SparseMLAImpl(config, SCALE, Workspace(Place.of(q)))
    files = []
    for gpu.capturing in (False, True, False):
        gpu.log.clear()
        impl.forward_mqa(q, cache, metadata, torch.zeros((3, TOPK), dtype=torch.int32))
        files.append([launch.kernel.file for launch in gpu.log if launch.kernel is not None])
    forget_calls()
    eager, captured, again = (any("convert" in file for file in each) for each in files)
    assert (eager, captured, again) == (False, longest > TOPK, False), files


def test_where_the_dense_way_is_faster(gpu) -> None:
    """By what both ways are to take. Where a kernel is forced, lists are taken."""
    place = Place("torch", 0)
    assert faster_than_lists(place, BF16_576, (64, 8, 16), 32, 64), "eight queries share their rows"
    with cupy_mla.forced("portable"):
        assert not faster_than_lists(place, BF16_576, (64, 8, 16), 32, 64)
    assert faster_than_lists(Place("torch", HOST), V32_FP8, (1, 1, 1), 1, 64)


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
@pytest.mark.parametrize("layout", [BF16_576, V32_FP8, V32_NVFP4], ids=lambda layout: layout.name)
def test_where_the_portable_kernel_serves_both_ways(monkeypatch, capability: int, layout: Layout) -> None:
    """The dense way is taken, but not where a division is forced."""
    pytest.importorskip("torch")
    FakeGPU(monkeypatch, capability=capability)
    assert isinstance(driver.gpu(0), driver.Gpu)
    place, of_requests = Place("torch", 0), ((1, 1, 16), (64, 8, 16), (2, 2, 128))
    assert all(faster_than_lists(place, layout, shape, 32, 64) for shape in of_requests)
    with cupy_mla.forced(division="whole"):
        assert not any(faster_than_lists(place, layout, shape, 32, 64) for shape in of_requests)


def test_where_the_portable_kernel_serves_dense_attention_alone(monkeypatch) -> None:
    """NVFP4 rows on Hopper: lists have a kernel of their own, and are taken."""
    pytest.importorskip("torch")
    FakeGPU(monkeypatch, 132, 90)
    assert not faster_than_lists(Place("torch", 0), V32_NVFP4, (64, 8, 16), 32, 64)


def test_v4_layers_have_no_lists_of_all_tokens() -> None:
    with pytest.raises(ValueError, match=r"^dense_when_short: layers of models of kind 'v4'"):
        SparseMLAConfig(16, 512, cache_layout="v4_fp8", dense_when_short=True)
    with pytest.raises(TypeError, match=r"^dense_when_short"):
        SparseMLAConfig(16, dense_when_short=1)
