"""The front door: FlashMLA's signatures, its schedule object, and what it hands on."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.bridges import Place
from cupy_mla.calls.prepared import CallPlace

from . import oracle
from .cases import Paged, assert_decoded, decode_oracle, entries, flat_rows, off_zero, paged, queries, sinks, some
from .dense import Requests, Sees, assert_dense, check_case_of_flash_mla, dense_oracle, in_cache
from .kinds import BF16, E4M3, NumPy, make, poisoned

# Names and defaults of FlashMLA's Python interface, as vLLM 0.22.1 ships it, and what sgl-flash-mla 1.0 has beside.
REQUIRED = inspect.Parameter.empty
SPARSE_FWD = {
    "q": REQUIRED, "kv": REQUIRED, "indices": REQUIRED, "sm_scale": REQUIRED, "d_v": 512, "attn_sink": None,
    "topk_length": None, "out": None, "use_legacy": False, "return_log2_lse": False,
}  # fmt: skip
WITH_KVCACHE = {
    "q": REQUIRED, "k_cache": REQUIRED, "block_table": REQUIRED, "cache_seqlens": REQUIRED, "head_dim_v": REQUIRED,
    "tile_scheduler_metadata": REQUIRED, "num_splits": None, "softmax_scale": None, "causal": False,
    "is_fp8_kvcache": None, "indices": None, "attn_sink": None, "extra_k_cache": None,
    "extra_indices_in_kvcache": None, "topk_length": None, "extra_topk_length": None, "out": None,
    "enable_batch_invariant": False, "use_legacy": False, "kv_format": None, "descale_q": None, "descale_k": None,
}  # fmt: skip
WITH_KVCACHE_FP8 = {  # of vLLM
    "q": REQUIRED, "k_cache": REQUIRED, "block_table": REQUIRED, "cache_seqlens": REQUIRED, "head_dim_v": REQUIRED,
    "tile_scheduler_metadata": REQUIRED, "num_splits": REQUIRED, "softmax_scale": None, "causal": False,
    "descale_q": None, "descale_k": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (flash_mla.flash_mla_sparse_fwd, SPARSE_FWD),
        (flash_mla.flash_mla_with_kvcache, WITH_KVCACHE),
        (flash_mla.flash_mla_with_kvcache_fp8, WITH_KVCACHE_FP8),
    ],
)
def test_signature(function, expected):
    parameters = inspect.signature(function).parameters
    assert {name: p.default for name, p in parameters.items()} == expected
    assert list(parameters) == list(expected)
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_lse_in_base_2(kind, rng):
    """Without a valid row it is +inf in every base; out and max_logits stay."""
    kv, indices = flat_rows(rng, 50, 576, np.arange(50)), rng.integers(0, 50, (3, 1, 20), dtype=np.int32)
    indices[1] = -1
    arrays = [kind.put(a) for a in (queries(rng, 3, 8, 576), kv, indices)]
    natural = [kind.take(a) for a in flash_mla.flash_mla_sparse_fwd(*arrays, 0.1, use_legacy=True)]
    base_2 = [kind.take(a) for a in flash_mla.flash_mla_sparse_fwd(*arrays, 0.1, return_log2_lse=True)]
    for a, b in zip(natural[:2], base_2[:2], strict=True):
        assert a.tobytes() == b.tobytes()
    np.testing.assert_allclose(base_2[2], natural[2] / np.log(2), rtol=1e-6)
    assert np.isposinf(base_2[2][1]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_dense_decode_over_rows_of_one_scale(kind, rng, causal, d_qk):
    """FlashMLA's and vLLM's functions; scales are tensors of one."""
    fmt = replace(oracle.PLAIN_576 if d_qk == 576 else oracle.PLAIN_512, scale=0.001)
    of = in_cache(rng, fmt, [130, 3, 64], 64, 2, Sees(causal))
    q = (queries(rng, 3, 2, 16, d_qk).astype(np.float32) / 0.25).astype(E4M3)
    scales = {"descale_q": kind.put(np.full(1, 0.25, np.float32)), "descale_k": kind.put(np.full(1, 0.001, np.float32))}
    arrays = [kind.put(a) for a in (q, of.cache.view(E4M3)[:, :, None], of.table, of.lens)]
    want = dense_oracle(fmt, q.astype(np.float64) * 0.25, of, sm_scale=0.02)
    got = flash_mla.flash_mla_with_kvcache_fp8(*arrays, 512, None, None, 0.02, causal, **scales)
    assert_dense(tuple(map(kind.take, got)), want)
    schedule, _ = flash_mla.get_mla_metadata_dense_fp8(arrays[3], 32, 1)
    again = flash_mla.flash_mla_with_kvcache(*arrays, 512, schedule, None, 0.02, causal, **scales)
    for a, b in zip(got, again, strict=True):
        assert kind.take(a).tobytes() == kind.take(b).tobytes()


def test_rows_of_other_layouts_are_not_of_one_scale():
    q, cache = np.zeros((1, 1, 4, 576), BF16), np.zeros((2, 64, 656), np.uint8)
    table, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match=r"^kv_format: 'plain_fp8' was asked for, k_cache is v32_fp8 of 576"):
        flash_mla.flash_mla_with_kvcache_fp8(q, cache, table, lens, 512, None, None)


def test_get_mla_metadata_takes_anything():
    meta, nothing = flash_mla.get_mla_metadata(None, 4, num_heads_k=1, topk=2048)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta)
    assert nothing is None
    assert meta.num_splits is None
    assert flash_mla.get_mla_metadata()[0] is not meta


def test_names_are_those_of_the_module():
    for name in flash_mla.__all__:
        assert getattr(cupy_mla, name) is getattr(flash_mla, name)


def test_sparse_fwd(kind, rng):
    live = some(rng, 100)
    q, kv = queries(rng, 3, 8, 576), flat_rows(rng, 100, 576, live)
    indices, sink = entries(rng, (3, 1, 70), live, 100), sinks(rng, 8)
    length = np.array([70, 0, 33], np.int32)
    out = kind.put(poisoned((3, 8, 512), BF16))
    results = flash_mla.flash_mla_sparse_fwd(
        kind.put(q), kind.put(kv), kind.put(indices), 0.04, 512, kind.put(sink), kind.put(length), out
    )
    assert results[0] is out
    want = oracle.prefill(q, kv, indices, 0.04, sink, length)
    for name, g, w in zip(("out", "max_logits", "lse"), results, want, strict=True):
        assert kind.is_mine(g)
        oracle.assert_close(kind.take(g), w, f"prefill {name}")


def call(kind: NumPy, q: np.ndarray, main: Paged, meta: flash_mla.FlashMLASchedMeta, **more: object) -> tuple:
    """`flash_mla_with_kvcache` as FlashMLA's callers write it: caches [num_blocks, block_size, 1, last axis]."""
    arguments = {"is_fp8_kvcache": main.cache.dtype == np.uint8, "topk_length": kind.put(main.length)} | more
    cache, indices = kind.put(main.cache[:, :, None]), kind.put(main.indices)
    return flash_mla.flash_mla_with_kvcache(kind.put(q), cache, None, None, 512, meta, indices=indices, **arguments)


def check(kind: NumPy, fmt: oracle.Format, results: tuple, *inputs: object, **more: object) -> None:
    """Compare with the oracle, at FlashMLA's default scale unless another is given."""
    assert all(map(kind.is_mine, results))
    assert_decoded(kind, results, decode_oracle(fmt, *inputs, **{"sm_scale": fmt.d_qk**-0.5, **more}))


@pytest.mark.parametrize("fmt", oracle.FORMATS, ids=lambda fmt: fmt.name)
def test_with_kvcache(kind, rng, fmt):
    main, extra = paged(rng, fmt, 2, 2, 70, 64, lengths=True), paged(rng, fmt, 2, 2, 33, 2, lengths=True)
    q = off_zero(fmt, queries(rng, 2, 2, 16, fmt.d_qk), main, extra, sm_scale=0.03)
    sink, out = sinks(rng, 16), kind.put(poisoned((2, 2, 16, 512), BF16))
    results = call(
        kind, q, main, flash_mla.get_mla_metadata()[0], softmax_scale=0.03, attn_sink=kind.put(sink),
        extra_k_cache=kind.put(extra.cache[:, :, None]), extra_indices_in_kvcache=kind.put(extra.indices),
        extra_topk_length=kind.put(extra.length), out=out,
    )  # fmt: skip
    assert results[0] is out
    check(kind, fmt, results, q, main, extra, sm_scale=0.03, sink=sink)


@pytest.mark.parametrize("fmt", oracle.FORMATS, ids=lambda fmt: fmt.name)
def test_softmax_scale_has_flash_mlas_default(kind, rng, fmt):
    main, q = paged(rng, fmt, 1, 1, 40, 64), queries(rng, 1, 1, 8, fmt.d_qk)
    check(kind, fmt, call(kind, q, main, flash_mla.get_mla_metadata()[0]), q, main, sm_scale=fmt.d_qk**-0.5)


@pytest.mark.parametrize("scale", ["0.1", True, float("nan"), 1e300])
def test_softmax_scale_is_named(rng, scale):
    with pytest.raises((TypeError, ValueError), match=r"^softmax_scale: expected a "):
        flash_mla.flash_mla_with_kvcache(**wrong(rng, softmax_scale=scale))


def test_block_table_and_lengths_are_ignored(kind, rng):
    main, q = paged(rng, oracle.V32, 1, 1, 40, 64), queries(rng, 1, 1, 8, 576)
    meta, _ = flash_mla.get_mla_metadata()
    results = flash_mla.flash_mla_with_kvcache(
        kind.put(q), kind.put(main.cache), "not", "looked at", 512, meta, is_fp8_kvcache=True,
        indices=kind.put(main.indices),
    )  # fmt: skip
    check(kind, oracle.V32, results, q, main)


# --- dense decode ---------------------------------------------------------------------------------------------


def dense_call(kind: NumPy, q: np.ndarray, of: Requests, meta: flash_mla.FlashMLASchedMeta, **more: object) -> tuple:
    """`flash_mla_with_kvcache` without `indices`, as FlashMLA's callers write it."""
    arguments = {"is_fp8_kvcache": of.cache.dtype == np.uint8, "causal": of.sees.causal} | more
    arrays = map(kind.put, (q, of.cache[:, :, None], of.table, of.lens))
    return flash_mla.flash_mla_with_kvcache(*arrays, 512, meta, **arguments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fmt", oracle.FORMATS, ids=lambda fmt: fmt.name)
def test_dense(kind, rng, fmt, causal):
    """By the schedule that the old `get_mla_metadata` was asked for with lengths and heads, under FlashMLA's scale."""
    of, q = in_cache(rng, fmt, [130, 0, 64], 64, 2, Sees(causal)), queries(rng, 3, 2, 16, fmt.d_qk)
    meta, num_splits = flash_mla.get_mla_metadata(kind.put(of.lens), 2 * 16 // 1, 1)
    scale = fmt.d_qk**-0.5
    for _ in range(2):
        out, lse = dense_call(kind, q, of, meta, num_splits=num_splits)
        assert kind.is_mine(out)
        assert_dense((kind.take(out), kind.take(lse)), dense_oracle(fmt, q, of, sm_scale=scale))
    sink, place = sinks(rng, 16), kind.put(poisoned((3, 2, 16, 512), BF16))
    got = dense_call(kind, q, of, meta, softmax_scale=0.03, attn_sink=kind.put(sink), out=place)
    assert got[0] is place
    assert_dense(tuple(map(kind.take, got)), dense_oracle(fmt, q, of, sink, sm_scale=0.03))


@pytest.mark.parametrize("kv_format", [None, "fp16", "float16"])
def test_dense_over_float16_rows(kind, rng, kv_format):
    """Sparse mode has no such rows."""
    of, q = in_cache(rng, oracle.FP16_576, [130, 0], 64, 2), queries(rng, 2, 2, 16, 576).astype(np.float16)
    got = dense_call(kind, q, of, flash_mla.get_mla_metadata()[0], softmax_scale=0.03, kv_format=kv_format)
    assert_dense(tuple(map(kind.take, got)), dense_oracle(oracle.FP16_576, q, of, sm_scale=0.03))
    arrays, lists = [kind.put(a) for a in (q, of.cache)], kind.put(np.zeros((2, 2, 5), np.int32))
    with pytest.raises((TypeError, ValueError), match=r"^(kv_format|q)\b"):
        flash_mla.flash_mla_with_kvcache(
            *arrays, None, None, 512, flash_mla.get_mla_metadata()[0], indices=lists, kv_format=kv_format
        )


def test_dense_is_not_causal_unless_asked(kind, rng):
    of, q = in_cache(rng, oracle.BF16_576, [70, 33], 64, 3, Sees(False)), queries(rng, 2, 3, 8, 576)
    arrays = map(kind.put, (q, of.cache[:, :, None], of.table, of.lens))
    got = flash_mla.flash_mla_with_kvcache(*arrays, 512, flash_mla.get_mla_metadata()[0], None, 0.04)
    assert_dense(tuple(map(kind.take, got)), dense_oracle(oracle.BF16_576, q, of, sm_scale=0.04))


@pytest.mark.parametrize("by", ["schedule", "argument"])
@pytest.mark.parametrize("dense", [False, True])
def test_batch_invariant_calls(kind, rng, by, dense):
    """Asked for in either way, a request has the same bits alone and beside others."""
    b = 200 if kind.on_gpu else 4
    schedule, argument = {"batch_invariant": by == "schedule"}, {"enable_batch_invariant": by == "argument"}
    q = queries(rng, b, 1, 16, 576)
    of = in_cache(rng, oracle.V32, rng.integers(1, 400, b), 64) if dense else paged(rng, oracle.V32, b, 1, 300, 64)

    def run(n):
        meta, _ = flash_mla.get_mla_metadata(**schedule)
        if not dense:
            return call(kind, q[:n], Paged(of.cache, of.indices[:n]), meta, **argument)
        return dense_call(kind, q[:n], Requests(of.cache, of.table[:n], of.lens[:n], 1, of.sees), meta, **argument)

    (out, lse), (one, one_lse) = (map(kind.take, run(n)) for n in (b, 1))
    assert (one.tobytes(), one_lse.tobytes()) == (out[:1].tobytes(), lse[:1].tobytes())


def test_batch_invariance_is_asked_of_the_kernels(monkeypatch, gpu, rng):
    """Splits of a small call are then not those that are fastest."""
    kind = make("torch")
    of, q = in_cache(rng, oracle.V32, [300], 64), queries(rng, 1, 1, 16, 576)
    grids = []
    for more in ({}, {"enable_batch_invariant": True}):
        dense_call(kind, q, of, flash_mla.get_mla_metadata()[0], **more)
        grids.append([launch.grid for launch in gpu.log])
        gpu.log.clear()
    dense_call(kind, q, of, flash_mla.get_mla_metadata(batch_invariant=True)[0])
    assert grids[0] != grids[1] == [launch.grid for launch in gpu.log]


@pytest.mark.parametrize("library", ["torch", pytest.param("torch_cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_q", [16, 32, 64, 128])
@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("length", [4096, 8192])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.long(sample=4)
def test_cases_of_flash_mla(rng, library, causal, h_q, s_q, length, varlen):
    """On the CPU fewer and shorter requests."""
    kind = make(library)
    b, mean = (128, length) if kind.on_gpu else (3, length // 32)
    check_case_of_flash_mla(kind, rng, b, mean, s_q, h_q, causal=causal, varlen=varlen)


# --- the schedule ---------------------------------------------------------------------------------------------


@pytest.fixture
def splits(monkeypatch, checked) -> list[int | None]:
    """The `num_splits` that each call hands to its twin, None: to be chosen; checked calls all run their body."""
    seen = []

    def counted(call):
        def counted_call(place, launcher, reference, *arguments):
            seen.append(arguments[0].num_splits)
            call(place, launcher, reference, *arguments)

        return counted_call

    for place in (Place, CallPlace):
        monkeypatch.setattr(place, "call", counted(place.call))
    return seen


def test_schedule_is_planned_once_and_reused(kind, rng, splits):
    """Splits that are asked for are followed; the schedule does not keep those that a call chooses."""
    meta, _ = flash_mla.get_mla_metadata()
    for turn in range(3):
        main, q = paged(rng, oracle.V32, 2, 1, 70, 64, invalid=0), queries(rng, 2, 1, 8, 576)
        check(kind, oracle.V32, call(kind, q, main, meta), q, main)
        assert meta.num_splits == (None if turn == 0 else 3)
        assert meta.shapes is not None
        meta.num_splits = 3
    assert splits == [None, 3, 3]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("q", {"b": 3}),
        ("q", {"s_q": 2}),
        ("q", {"h_q": 16}),
        ("block_size", {"block_size": 32}),
        ("topk", {"topk": 71}),
        ("q", {"fmt": oracle.V4}),
        ("is_fp8_kvcache", {"fmt": oracle.BF16_576}),
        ("extra_block_size", {"extra": True}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else next(iter(value)),
)
def test_schedule_refuses_other_shapes(rng, name, shapes):
    def arguments(fmt=oracle.V32, b=2, s_q=1, h_q=8, topk=70, block_size=64, extra=False):
        more = {}
        if extra:
            second = paged(rng, fmt, b, s_q, 5, 2)
            more = {"extra_k_cache": second.cache, "extra_indices_in_kvcache": second.indices}
        return (queries(rng, b, s_q, h_q, fmt.d_qk), paged(rng, fmt, b, s_q, topk, block_size)), more

    meta, _ = flash_mla.get_mla_metadata()
    inputs, _ = arguments()
    call(NumPy(), *inputs, meta)
    before = meta.num_splits, meta.shapes
    other, more = arguments(**shapes)
    with pytest.raises(ValueError, match=rf"^tile_scheduler_metadata was planned for {name} = .*get_mla_metadata$"):
        call(NumPy(), *other, meta, **more)
    assert (meta.num_splits, meta.shapes) == before
    call(NumPy(), *other, flash_mla.get_mla_metadata()[0], **more)


def test_schedule_of_dense_calls(rng):
    """It refuses other shapes, the other mode and the other mask, and takes other lengths and wider tables."""
    of, q = in_cache(rng, oracle.V32, [70, 33], 64, 2), queries(rng, 2, 2, 8, 576)
    meta, _ = flash_mla.get_mla_metadata()
    dense_call(NumPy(), q, of, meta)
    planned = meta.shapes
    of.lens[:], of.table = 20, np.pad(of.table, ((0, 0), (0, 3)))
    dense_call(NumPy(), q, of, meta)
    for name, wrong_call in {
        "q": lambda: dense_call(NumPy(), q[:, :, :4], of, meta),
        "causal": lambda: dense_call(NumPy(), q, of, meta, causal=False),
        "topk": lambda: call(NumPy(), q, paged(rng, oracle.V32, 2, 2, 9, 64), meta),
    }.items():
        with pytest.raises(ValueError, match=rf"^tile_scheduler_metadata was planned for {name} = "):
            wrong_call()
    assert meta.shapes == planned


def test_schedule_of_a_failed_call_stays_empty(rng):
    meta, _ = flash_mla.get_mla_metadata()
    main, q = paged(rng, oracle.V32, 2, 1, 70, 64), queries(rng, 2, 1, 8, 576)
    with pytest.raises(ValueError, match=r"^attn_sink\b"):
        call(NumPy(), q, main, meta, attn_sink=np.zeros(3, np.float32))
    assert (meta.num_splits, meta.shapes) == (None, None)


# --- hostile inputs -------------------------------------------------------------------------------------------


DENSE = {"block_table": np.zeros((2, 3), np.int32), "cache_seqlens": np.full(2, 9, np.int32)}


def wrong(rng: np.random.Generator, **change: object) -> dict[str, object]:
    main = paged(rng, oracle.V32, 2, 1, 9, 64)
    return {
        "q": queries(rng, 2, 1, 8, 576), "k_cache": main.cache, "block_table": None, "cache_seqlens": None,
        "head_dim_v": 512, "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0], "is_fp8_kvcache": True,
        "indices": main.indices, "out": poisoned((2, 1, 8, 512), BF16),
    } | change  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": None}, ValueError, r"^indices is None.*dense decode: block_table and cache_seqlens must be given"),
        ({"indices": None, "cache_seqlens": np.zeros(2, np.int32)}, ValueError, r"^indices is None.*dense"),
        (
            {"indices": None, **DENSE, "topk_length": np.zeros(2, np.int32)},
            ValueError,
            r"^topk_length was given, but indices is None",
        ),
        (
            {"indices": None, **DENSE, "extra_k_cache": np.zeros((2, 64, 656), np.uint8)},
            ValueError,
            r"^extra_k_cache was given, but indices is None",
        ),
        ({"indices": None, **DENSE, "is_fp8_kvcache": False}, ValueError, r"^is_fp8_kvcache is False"),
        ({"indices": None, **DENSE, "head_dim_v": 128}, ValueError, r"^head_dim_v must be 512, got 128"),
        ({"indices": None, **DENSE, "causal": 1}, TypeError, r"^causal\b"),
        ({"indices": None, **DENSE, "cache_seqlens": np.zeros(2, np.int64)}, TypeError, r"^cache_seqlens\b"),
        ({"indices": None, **DENSE, "block_table": np.zeros((3, 2), np.int32)}, ValueError, r"^block_table\b"),
        ({"indices": None, **DENSE, "num_splits": 2}, ValueError, r"^num_splits\b"),
        ({"enable_batch_invariant": 1}, TypeError, r"^enable_batch_invariant\b"),
        ({"causal": True}, ValueError, r"^causal\b"),
        ({"num_splits": 2}, ValueError, r"^num_splits\b"),
        ({"head_dim_v": 128}, ValueError, r"^head_dim_v must be 512, got 128"),
        ({"tile_scheduler_metadata": None}, TypeError, r"^tile_scheduler_metadata must come from get_mla_metadata"),
        ({"is_fp8_kvcache": False}, ValueError, r"^is_fp8_kvcache is False"),
        ({"k_cache": np.zeros((2, 64, 576), BF16)}, ValueError, r"^is_fp8_kvcache is True"),
        ({"k_cache": np.zeros((2, 64, 584), np.uint8)}, ValueError, r"^k_cache\b"),
        (
            {"extra_k_cache": np.zeros((2, 64, 656), np.uint8)},
            ValueError,
            r"^extra_k_cache\b.*\bextra_indices_in_kvcache\b",
        ),
        (
            {"extra_topk_length": np.ones(2, np.int32)},
            ValueError,
            r"^extra_topk_length\b.*\bextra_indices_in_kvcache\b",
        ),
    ],
)
def test_wrong_arguments_are_named(rng, change, error, message):
    arguments = wrong(rng, **change)
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**arguments)
    assert (arguments["out"].view(np.uint8) == 0xFF).all()
