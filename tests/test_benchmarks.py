"""What the benchmark programs stand on: names of rows, records, where the peer is found, and how programs are run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import all_kernels
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.ops.table import TABLE
from cupy_mla.reference import attention, dense, logits, topk
from cupy_mla.selfcheck import warmup

from . import oracle_backward
from .fake_gpu import FakeGPU
from .kinds import make
from .selfcheck.test_warmup import Layer

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def harness(module) -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("cupy")
    return module("harness")


def on_cpu() -> Any:
    """Within it torch takes "cuda" for "cpu"."""
    torch = pytest.importorskip("torch")
    overrides = importlib.import_module("torch.overrides")

    class OnCpu(overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), settings=None):
            if function is torch.Tensor.cuda:
                return arguments[0]
            settings = dict(settings or {})
            return function(*arguments, **settings | ({"device": "cpu"} if settings.get("device") == "cuda" else {}))

    return OnCpu()


def set_names(monkeypatch: pytest.MonkeyPatch, *changed: tuple[Any, dict[str, Any]]) -> None:
    """Give names of modules or classes other values, until the test ends."""
    for of, values in changed:
        for name, value in values.items():
            monkeypatch.setattr(of, name, value)


def record_of(program: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, error: str = ""):
    """Run a program, with "cpu" for "cuda", and read the record that it writes.

    Args:
        error: the program must end with an error that this regular expression finds; "": it must not.
    """
    name = program.__name__
    monkeypatch.setattr(sys.modules["harness"], "environment", dict)
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with on_cpu(), pytest.raises(SystemExit, match=error) if error else contextlib.nullcontext():
        program.main()
    return json.loads((folder / f"{name}.part.json").read_text())


def test_numbers_of_a_name(module):
    numbers = module("cases").numbers
    assert numbers("V4 h 64 b 2 s_q 2 topk 128+512 extra block 2") == {
        "h": 64, "b": 2, "s_q": 2, "topk": 640, "block": 2,
    }  # fmt: skip
    assert numbers("prefill h 8 d 576 s_q 2048 s_kv 8192 topk 512 local")["s_kv"] == 8192


def test_groups_hold_the_rows_they_name(module):
    cases = module("cases")
    rows = [
        ("V32 h 128 b 64 s_q 1 topk 2048", 1.0),
        ("V32 h 128 b 32 s_q 1 topk 2048", 2.0),  # in no group
        ("V32 h 64 b 32 s_q 2 topk 2048", 3.0),
        ("V32 h 16 b 8 s_q 1 topk 2048", 4.0),  # in two
        ("V4 h 64 b 2 s_q 2 topk 128+512", 5.0),
        ("bf16 h 128 b 8 s_q 2 topk 2048", 6.0),
        ("bf16 h 16 b 32 s_q 1 topk 2048", 7.0),
    ]
    found = [cases.of_group(group, [{"case": c, "ratio": r} for c, r in rows]) for group in cases.DECODE]
    assert found == [[1.0], [3.0], [4.0], [4.0], [5.0], [6.0], [7.0]]


def test_groups_keep_rows_by_their_fields(module):
    """Short rows that bytes bound by the floor alone are in the first group only."""
    cases = module("cases")
    name = "v32_fp8 bytes dense h 8 b {} s_q 1 length 512 equal"
    rows = [
        {"case": name.format(1), "ratio": 1.0, "bf16_of_copy": 0.1},
        {"case": name.format(2), "ratio": 2.0, "bf16_of_copy": 0.7},
        {"case": name.format(3), "ratio": 3.0},
        {"case": "plain_fp8" + name.format(4)[7:], "ratio": 4.0, "bf16_of_copy": 0.9},
    ]
    assert [cases.of_group(group, rows) for group in cases.DENSE_FP8] == [[1.0, 2.0, 3.0], [2.0], [4.0]]


def test_rows_of_every_batch(harness, module):
    """24 at least of each kind and number of heads (short bf16 lists: 16), some of them small; each in a group."""
    program, cases = module("decode_batches"), module("cases")
    for seed in range(3):
        rows = [*program.rows(random.Random(seed), False)]
        names = [program.name_of(row) for row in rows]
        assert len(set(names)) == len(names)
        found = defaultdict(list)
        for row in rows:
            found[row["kind"], row["h"]].append(row["b"] * row["s_q"])
        kinds = {"V32", "V32 short", "V32 ragged", "V4", "V4 ragged", "bf16", "bf16 short"}
        assert {kind for kind, _ in found} == kinds
        for (kind, h), tokens in found.items():
            assert len(tokens) >= (16 if kind == "bf16 short" else 24), (kind, h)
            assert 1 <= min(tokens) <= max(tokens) <= 264
            assert (sum(n <= 8 for n in tokens) >= 2) == (kind != "V32 short")
        assert sorted({h for _, h in found}) == [8, 16, 32, 64, 128]
        for name in names:
            assert any(group.holds(name, cases.numbers(name)) for group in cases.BATCHES), name


def test_floors(module):
    """The performance notes: 128 x 2 queries of 2048 rows take 109 us to gather, 180 us to multiply with 128 heads."""
    floor = module("cases").decode_floor_us
    assert floor("V32 h 16 b 128 s_q 2 topk 2048", 4) == pytest.approx(110.9, abs=0.1)
    assert floor("V32 h 128 b 128 s_q 2 topk 2048", 4) == pytest.approx(179.8, abs=0.1)
    assert floor("V32 h 16 b 1 s_q 1 topk 2048", 4) == pytest.approx(2048 * 656 / 8.5e6, rel=0.01)


def test_rows_of_dense_decode(harness, module):
    """Of each number of heads, within the ranges that targets name; each in a group that it is judged with."""
    program, cases = module("dense_decode"), module("cases")
    for seed in range(3):
        rows = [*program.rows(random.Random(seed), False)]
        assert Counter(row["h"] for row in rows) == dict.fromkeys(program.HEADS, program.DRAWN)
        for row in rows:
            assert 1 <= row["b"] <= 264
            assert 64 <= row["length"] <= 131072
            assert 1 <= row["s_q"] <= 4
        for group in cases.DENSE:
            held = [row for row in rows if group.holds(name := program.name_of(row), cases.numbers(name))]
            assert len(held) >= 15


def test_calls_of_dense_decode_share_a_plan(harness, module, monkeypatch):
    """All of a graph share one, and each graph has its own. Any cache and queries may take the place of the sets'."""
    program = module("dense_decode")
    plans: list[Any] = []
    monkeypatch.setattr(program, "planned_dense_decode", lambda *given: plans.append(given[-1]) or given[:2])
    sets = [{name: f"{name} {n}" for name in ("q", "q8", "k_cache", "table", "lengths")} for n in range(4)]
    ours = program.our_calls(sets)
    assert [call() for call in ours] == [(f"q {n}", f"k_cache {n}") for n in range(4)]
    assert [call() for call in program.our_calls(sets, "rows", "q8")] == [(f"q8 {n}", "rows") for n in range(4)]
    for call in ours:
        call()
    assert [plans.index(plan) for plan in plans] == [0] * 4 + [4] * 4 + [8] * 4


def test_rows_over_a_gigabyte(harness, module):
    """Of each format: 16 heads, 1, 2 and 4 query tokens, more than 1 GB; each in the group that it is judged with."""
    program, cases = module("dense_bandwidth"), module("cases")
    for name, of in program.FORMATS.items():
        rows = [*program.full_rows(of.token_bytes, False)]
        assert {row["s_q"] for row in rows} == {1, 2, 4}
        for row in rows:
            assert row["h"] == 16
            assert row["b"] * row["length"] * of.token_bytes > 1 << 30
            assert row["length"] <= 131072
            case = f"full {name} {program.name_of(row)}"
            assert sum(group.holds(case, cases.numbers(case)) for group in cases.DENSE_BANDWIDTH) == 1, case


def test_bandwidth_of_every_format(harness, module, monkeypatch, tmp_path):
    """Small batches on the CPU. A copy moves as many bytes as rows have; float16 rows are those in bf16."""
    program, dense_decode = module("dense_bandwidth"), module("dense_decode")
    copied: list[int] = []

    def copy_of(moved: int) -> Any:
        copied.append(moved)
        return lambda: None

    def time_side_by_side(ours, theirs) -> list[float]:
        for calls in (ours, theirs):
            calls[0]()
        return [2.0, 3.0]

    def drawn_row(rng: random.Random, h: int, few: bool) -> dict[str, Any]:
        return {"h": h, "b": 2, "s_q": 2, "length": 90, "lengths": "drawn"}

    set_names(
        monkeypatch,
        (program, {"FULL": 1e5, "BATCHES": (2,), "TOKENS": 4096, "drawn_row": drawn_row, "copy_of": copy_of,
                   "time_side_by_side": time_side_by_side}),
        (dense_decode, {"TOKENS": 4096}),
    )  # fmt: skip
    record = record_of(program, monkeypatch, tmp_path, "--quick", "--seed", "7")
    assert record["seed"] == 7
    full = [row for row in record["rows"] if row["case"].startswith("full")]
    assert Counter(row["format"] for row in full) == dict.fromkeys(program.FORMATS, 3)
    assert copied == [row["b"] * row["length"] * program.FORMATS[row["format"]].token_bytes for row in full]
    assert min(copied) >= 1e5
    beside = [row for row in record["rows"] if row not in full]
    assert Counter(row["format"] for row in beside) == {"fp16": 2, "v4_fp8": 2}
    assert {row["ratio"] for row in record["rows"]} == {1.5}
    assert max(row["max_abs_err"] for row in beside if row["format"] == "fp16") < 0.01
    assert {row["max_abs_err"] for row in record["rows"] if row["format"] != "fp16"} == {None}


def test_rows_of_short_contexts(harness, module):
    """Within the ranges that the target names, under a name of their own."""
    program = module("short_contexts")
    for seed in range(3):
        rows = [*program.rows(random.Random(seed), False)]
        assert Counter((row["layout"], row["h"]) for row in rows) == {
            (layout, h): program.DRAWN for layout in ("v32_fp8", "bf16") for h in (16, 32, 64, 128)
        }
        for row in rows:
            assert 1 <= row["b"] <= 264
            assert 64 <= row["context"] <= 2048
            assert 1 <= row["s_q"] <= 4
        assert len({program.name_of(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("wrong", [False, True])
def test_short_contexts_in_both_ways(harness, module, monkeypatch, tmp_path, wrong):
    """Small batches on the CPU: the dense way reads no list, and lists give the same. Other results are told of."""
    program = module("short_contexts")
    dense, converted = program.SparseMLAImpl._attend_all, []
    sparse_mla = importlib.import_module("cupy_mla.backends.sparse_mla")
    to_slots = sparse_mla.to_slots

    def attend_all(impl, q, *others) -> None:
        dense(impl, q + wrong, *others)

    def time_side_by_side(*ways) -> list[float]:
        counts = []
        for calls in ways:
            converted.clear()
            for call in calls:
                call()
            counts.append(len(converted))
        assert counts == [0, harness.SETS]
        return [2.0, 3.0]

    def convert(*args) -> Any:
        converted.append(args)
        return to_slots(*args)

    set_names(
        monkeypatch,
        (sparse_mla, {"to_slots": convert}), (program.SparseMLAImpl, {"_attend_all": attend_all}),
        (program, {"PLACE": ("torch", -1), "LARGEST": 3, "SHORTEST": 8, "TOPK": 128, "HEADS": (8, 64),
                   "time_side_by_side": time_side_by_side}),
    )  # fmt: skip
    error = "differ by" if wrong else ""
    record = record_of(program, monkeypatch, tmp_path, "--quick", "--seed", "7", error=error)
    assert record["seed"] == 7
    assert Counter(row["layout"] for row in record["rows"]) == {"v32_fp8": 4, "bf16": 4}
    assert {(row["ratio"], row["taken"]) for row in record["rows"]} == {(1.5, "dense")}
    of_dense, of_lists = module("cases").SHORT_CONTEXTS
    rows = [*record["rows"], {**record["rows"][0], "taken": "lists"}]
    assert module("cases").of_group(of_dense, rows) == [1.5] * 8
    assert module("cases").of_group(of_lists, rows) == [2 / 3]


def test_rows_of_formats(harness, module):
    """Within the ranges that targets name, each in one group that it is judged with."""
    program, cases = module("formats"), module("cases")
    for seed in range(3):
        rng = random.Random(seed)
        rows = [size for of in program.MEASURED for size in program.sizes(rng, of, False)]
        names = [program.name_of(row) for row in rows]
        assert len({*names}) == len(names)
        for row in rows:
            assert 1 <= row["b"] <= 264
            assert 8 <= row["h"] <= 128
            assert row["lengths"] == (row["extra_topk"] > 0)
        names += [f"{work} {layout} tokens 9" for layout in program.MOVED for work in ("pack", "gather")]
        for name in names:
            assert sum(group.holds(name, cases.numbers(name)) for group in cases.FORMATS) == 1, name
        for size, name in zip(rows, names, strict=False):
            held = [group for group in cases.NEAREST if group.holds(name, cases.numbers(name))]
            assert len(held) == (size["format"].startswith(("v41_", "v32_nope"))), name
    row = {"case": "v41_fp8 h 8 b 4 topk 128+1024 lengths", "ours_us": 4.0, "near_us": 3.0, "ratio": 2.25}
    assert [ratio for group in cases.NEAREST for ratio in cases.of_group(group, [row])] == [0.75]


def run_formats(module, monkeypatch, tmp_path, only: str, error: str = "") -> list[dict[str, Any]]:
    """The rows of formats.py over small caches on the CPU, with ours in the place of the peer."""
    program, inputs, cache_ops = module("formats"), module("inputs"), module("cache_ops")

    def time_side_by_side(*candidates) -> list[float]:
        for calls in candidates:
            calls[0]()
        return [2.0, 3.0, 5.0][: len(candidates)]

    set_names(
        monkeypatch,
        (program, {"flash_mla_peer": lambda: program.flash_mla, "peer_name": lambda: "peer", "PLACE": ("torch", -1),
                   "TOKENS": 512, "LARGEST": 2, "PACKED": 256, "COMPARED": 128,
                   "attended": program.attended.__wrapped__, "time_side_by_side": time_side_by_side}),
        (inputs, {"PLACE": ("torch", -1)}), (cache_ops, {"time_side_by_side": time_side_by_side}),
    )  # fmt: skip
    return record_of(program, monkeypatch, tmp_path, "--quick", "--only", only, error=error)["rows"]


def test_formats_beside_the_nearest_rows(harness, module, monkeypatch, tmp_path):
    """Results are those of the unpacked rows in bf16; the ratio is to the peer where there is one."""
    rows = run_formats(module, monkeypatch, tmp_path, "^v41_fp8.v41_fp4 h 8 |^(v32|plain)_.*fp[48] h 8 |pack v4_")
    found = {row["format"]: row for row in rows}
    assert [*found] == ["v41_fp8+v41_fp4", "v32_nope_fp8", "v32_nvfp4", "v4_nvfp4"]
    for row in rows:
        assert row["ratio"] == {"v32_nvfp4": 1.5, "v4_nvfp4": 1.5}.get(row["format"], 2.5)
        assert row["max_abs_err"] < 0.01
    assert found["v32_nope_fp8"]["near"] == "v32_fp8"
    assert "peer" not in found["v32_nvfp4"]
    assert found["v4_nvfp4"]["peer"] == "copy"


def test_formats_that_are_read_wrongly_fail(harness, module, monkeypatch, tmp_path):
    program = module("formats")
    unpack = program.cupy_mla.unpack_rows
    monkeypatch.setattr(program.cupy_mla, "unpack_rows", lambda *args, **more: 2 * unpack(*args, **more))
    run_formats(module, monkeypatch, tmp_path, "^v32_nvfp4 h 8 ", error=r"v32_nvfp4 h 8 .* differ")


def test_rows_of_served(harness, module):
    """Within the ranges that targets name, under a name of their own, each in one group that it is judged with."""
    program, cases = module("served"), module("cases")
    for seed in range(3):
        rng = random.Random(seed)
        decodes = [*program.decodes(rng, False)]
        prefills, selections = [*program.prefills(rng, False)], [*program.selections(rng, False)]
        counts = Counter((row["kind"], row["h"]) for row in decodes)
        kinds = ("V4 swa", "V4 c4a", "V4 c128a")
        assert counts == {(kind, h): program.DRAWN for kind in kinds for h in program.HEADS}
        assert {row["s_q"] for row in decodes} == {1, 2, 3}
        assert {row["block"] for row in decodes} == {64, 256}
        for row in decodes:
            assert row["kind"] != "V4 c128a" or 64 <= row["extra_topk"] <= 1024
            assert row["extra_topk"] % 64 == 0
        assert {32 <= row["s_q"] <= 330 for row in prefills if row["kind"] == "prefill"} == {True}
        assert {16 <= row["h"] <= 32 for row in prefills if row["kind"] == "few heads"} == {True}
        assert {row["width"] <= row["k"] for row in selections} == {True, False}
        names = [program.name_of(row) for row in (*decodes, *prefills, *selections)]
        assert len({*names}) == len(names)
        for name in names:
            assert sum(group.holds(name, cases.numbers(name)) for group in cases.SERVED) == 1, name


def run_served(module, monkeypatch, tmp_path, only: str, error: str = "") -> dict[str, Any]:
    """The record of these rows of served.py over small caches on the CPU, ours in place of FlashMLA, no other peers."""
    program, rows = module("served"), module("rows")
    loaded: list[str] = []

    def time_side_by_side(*candidates) -> list[float]:
        for calls in candidates:
            calls[-1]()
        return [2.0, 3.0, 5.0][: len(candidates)]

    set_names(
        monkeypatch,
        (program, {"flash_mla_peer": lambda: program.flash_mla, "unpacked": list, "LARGEST": 2, "TOKENS": 1024,
                   "ROWS": 512, "load_kernels": loaded.append,
                   "cache_of": program.cache_of.__wrapped__, "time_side_by_side": time_side_by_side}),
        (rows, {"time_side_by_side": time_side_by_side}),
    )  # fmt: skip
    record = record_of(program, monkeypatch, tmp_path, "--quick", "--seed", "7", "--only", only, error=error)
    for name in () if error else ("attention/fp8_sm90.cu", "attention/bf16_sm90.cu", "indexer/short_rows.cu"):
        assert any(re.search(loaded[0], repr(kernel)) for kernel in all_kernels() if kernel.file == name)
    return record


def test_served_beside_the_best_peer(harness, module, monkeypatch, tmp_path):
    record = run_served(module, monkeypatch, tmp_path, "^V4 .* h 8 |^short rows .* width [0-9]{1,4} |^prefill")
    assert record["seed"] == 7
    rows = {row["kind"]: row for row in record["rows"]}
    assert {*rows} == {"V4 swa", "V4 c4a", "V4 c128a", "prefill", "short rows"}
    assert {row["ratio"] for row in rows.values()} == {1.5}
    assert max(row["max_abs_err"] for row in rows.values()) < 1e-3
    assert (rows["short rows"]["peer"], rows["short rows"]["us"]) == ("copy", {"copy": 3.0, "torch": 5.0})


def test_served_rows_that_are_chosen_wrongly_fail(harness, module, monkeypatch, tmp_path):
    program = module("served")
    choose = program.cupy_mla.topk_indices

    def wrong(*args, **more):
        choose(*args, **more)[:, 0] = 1

    monkeypatch.setattr(program.cupy_mla, "topk_indices", wrong)
    error = r"short rows .* entries are not the row's"
    run_served(module, monkeypatch, tmp_path, "^short rows .* width [0-9]{1,4} ", error)


def test_sizes_of_a_layer(harness, module):
    """Those that the target names and some drawn ones, each in the group that it is judged with."""
    program, (group,) = module("layer"), module("cases").LAYER
    for seed in range(3):
        rows = program.sizes(random.Random(seed), False)
        named = [(b, context) for b in (1, 8, 64) for context in (2048, 32768, 131072)]
        assert [(row["b"], row["context"]) for row in rows[:9]] == named
        for row in rows[9:]:
            assert 1 <= row["b"] <= 64
            assert 2048 <= row["context"] <= 131072
        names = [program.name_of(row) for row in rows]
        assert len({*names}) == len(names) > 9
        assert all(group.holds(name, {}) for name in names)


class VllmOnCpu:
    """Stands in for the operations of vLLM and DeepGEMM that a layer's peer calls, by ours."""

    names = ("per_row",)

    def __init__(self, torch, cupy_mla) -> None:
        self.torch, self.mla = torch, cupy_mla

    def cache_ops(self) -> SimpleNamespace:
        return SimpleNamespace(
            concat_and_cache_mla=lambda c, pe, rows, slots, kind, scale: self.mla.concat_and_cache_mla(
                c, pe, rows[:, :, None], slots, layout="v32_fp8"
            ),
            indexer_k_quant_and_cache=lambda k, keys, slots, group, scales: self.mla.indexer_k_quant_and_cache(
                k, keys, slots, scales
            ),
        )

    def quantize(self, x, codes, scales, group, eps, least, most, power_of_two, *flags) -> None:
        assert (flags, power_of_two, x.shape[1]) == ((False, False), True, group)
        scale = self.torch.exp2((x.float().abs().amax(1, keepdim=True) / most).log2().ceil())
        scales.copy_(scale)
        codes.copy_(x.float() / scale)

    quantize.default = SimpleNamespace(_schema=SimpleNamespace(arguments=range(10)))

    def schedule(self, lens):
        return None

    def paged_logits(self, q8, keys, w, lens, table, schedule, longest):
        return self.mla.paged_indexer_logits(q8, keys, w, lens.view(-1), table, longest)

    def topk_decode(self, name, logits, lens, out):
        return self.mla.topk_indices(logits, out.shape[1], None, lens.view(-1), out=out)


@pytest.mark.parametrize("wrong", [False, True])
def test_layer_beside_the_peers_chain(harness, module, monkeypatch, tmp_path, wrong):
    """Both chains choose the same rows of the same caches; a peer that chooses others is told of."""
    torch = pytest.importorskip("torch")
    program, indexer = module("layer"), module("indexer")
    vllm = VllmOnCpu(torch, program.cupy_mla)
    quantize = partial(vllm.quantize)
    quantize.default = VllmOnCpu.quantize.default
    monkeypatch.setattr(torch.ops, "_C_cache_ops", vllm.cache_ops(), raising=False)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(per_token_group_fp8_quant=quantize), raising=False)

    def time_side_by_side(*candidates) -> list[float]:
        for chains in candidates:
            for chain in chains:
                chain()
        return [2.0]

    def ask(row, deadline) -> dict[str, Any]:
        (said,) = program.measured(vllm, program.flash_mla, row, "0.0").values()
        slots = said.slots[::-1] if wrong else said.slots
        return {"chain (0.0)": said._replace(us=3.0, slots=slots, launches=9.0)}

    set_names(
        monkeypatch,
        (program, {"flash_mla_peer": lambda: program.flash_mla, "peer_name": lambda: "ours", "BATCHES": (2, 3),
                   "load_kernels": lambda which: None,
                   "unpacked": lambda: ["folder"], "ready": lambda processes, deadline: processes, "HEADS": 8,
                   "PeerProcess": lambda *a: SimpleNamespace(ask=ask, process=SimpleNamespace(kill=lambda: None)),
                   "CONTEXTS": (70, 190), "LONGEST": 256, "K": 64, "INDEX_HEADS": 8, "SETS": 2, "DRAWN": 0,
                   "kernels_of": lambda chains: 7 * len(chains), "time_side_by_side": time_side_by_side}),
        (program.driver, {"gpu": lambda device: None}),
        (program.logits_sm90, {"shares_of_schedule": lambda *a: 4}),
        (program.torch.cuda, {"empty_cache": lambda: None}), (indexer.torch.cuda, {"empty_cache": lambda: None}),
    )  # fmt: skip
    error = "chose|differ" if wrong else ""
    (row,) = record_of(program, monkeypatch, tmp_path, "--only", "b 2 context 190", error=error)["rows"]
    assert (row["ratio"], row["launches"], row["peer_launches"], row["layers"]) == (1.5, 7, 9, 2)
    assert row["peer"] == "chain (0.0), ours"
    assert (row["chosen_equal"] < 0.9) if wrong else (row["chosen_equal"] == 1 and row["max_abs_err"] < 0.05)


def test_layers_that_are_warmed_up(harness, module, monkeypatch):
    """All kinds of each model's layers. A time is of the calls that load their kernels, on a GPU that is none."""
    program, gpu = module("warm_up"), FakeGPU(monkeypatch)
    kinds = {case: [config.cache_layout for config in configs] for case, configs in program.CONFIGS.items()}
    layouts = {"V3.2, FP8 cache": ["v32_fp8"], "V3.2, bf16 cache": ["bf16"], "V3, bf16 cache": ["bf16"]}
    assert kinds == {**layouts, "V4": ["v4_fp8"] * 3, "V4.1": ["v4_fp8"] * 3}
    assert program.QUICK in kinds
    used = []
    on_device = SimpleNamespace(use=lambda: used.append("use"), synchronize=lambda: used.append("context"))
    monkeypatch.setattr(program, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda device: on_device)))
    small = [dataclasses.replace(config, max_num_seqs=2, max_num_batched_tokens=4) for config in program.CONFIGS["V4"]]
    monkeypatch.setitem(program.CONFIGS, "V4", small)
    monkeypatch.setattr(warmup, "require_cupy", lambda why: Layer(gpu, small[0]).cupy)
    monkeypatch.setattr(Kernel, "loaded", lambda kernel, device: id(kernel) in gpu.kernels)
    found = program.timed("V4")
    assert used == ["use", "context"]
    for config in small:
        warmup.warmup(config)
    assert found["kernels"] == len(gpu.kernels) > found["sources"] > 0
    assert found["seconds"] > 0
    forget_calls()


@pytest.mark.parametrize("wrong", ["", "compiles again", "other kernels", "no cache"])
def test_warm_up_with_and_without_a_disk_cache(harness, module, monkeypatch, tmp_path, wrong):
    """The first process of a row finds an empty folder, the second one what the first has left."""
    program, found = module("warm_up"), []

    def run(command, env, **more):
        assert command[:3] == [sys.executable, program.__file__, "--process"]
        folder = Path(env["CUPY_CACHE_DIR"])
        there = {path.name for path in folder.iterdir()}
        found.append((command[3], len(there)))
        for name in {"a", "b"} if wrong != "no cache" else ():
            (folder / name).touch()
        if wrong == "compiles again" and there:
            (folder / "c").touch()
        kernels = 1 if wrong == "other kernels" and there else 2
        answer = {"kernels": kernels, "sources": 2, "seconds": 1.5 if there else 9.25}
        return SimpleNamespace(stdout=f"a line\n{json.dumps(answer)}\n")

    monkeypatch.setattr(program, "subprocess", SimpleNamespace(run=run, PIPE=None))
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "none", "commit": "abc"})
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["warm_up.py", *(["--quick"] if wrong else [])])
    with pytest.raises(SystemExit, match="2 kernels, ") if wrong else contextlib.nullcontext():
        program.main()
    if not wrong:
        record = json.loads((tmp_path / "warm_up.json").read_text())
        times = {"kernels": 2, "cold_s": 9.25, "warm_s": 1.5, "cores": len(os.sched_getaffinity(0))}
        assert record["commit"] == "abc"
        assert record["rows"] == [{"case": case, **times} for case in program.CONFIGS]
    cases = [program.QUICK] if wrong else [*program.CONFIGS]
    assert found == [(case, n) for case in cases for n in (0, 0 if wrong == "no cache" else 2)]


def test_floor_of_dense_decode(module):
    """Copying the rows, or multiplying them, whichever takes longer; rows that fit into L2 come from there."""
    floor = module("cases").dense_floor_us
    us, bound = floor([1_000_000, 1_000_000], 16, 4.25e12)
    assert (round(us), bound) == (271, "bytes")  # 1.152 GB at 4.25 TB/s
    assert round(floor([1_000_000], 16, 3e12)[0]) == 384  # on a card that copies more slowly
    us, bound = floor([1_000_000], 512, 4.25e12)
    assert (round(us), bound) == (1372, "arithmetic")  # 2 x 10^6 x 512 x 1088 at 812 TFLOP/s
    assert floor([1000], 16, 4.25e12)[0] < floor([100_000], 16, 4.25e12)[0] / 180


def test_small_cases_are_of_every_operation(module, monkeypatch, rng):
    """Those of the table, with NumPy in the place of CuPy."""
    pytest.importorskip("cupy")
    small_cases = module("small_cases")
    device = SimpleNamespace(compute_capability="90")
    stand_in = SimpleNamespace(
        asarray=np.asarray, asnumpy=np.asarray, cuda=SimpleNamespace(Device=lambda: device)
    )  # fmt: skip
    monkeypatch.setattr(small_cases, "cupy", stand_in)
    monkeypatch.setattr(small_cases, "to_cupy", np.asarray)
    monkeypatch.setattr(small_cases.driver, "gpu", lambda _: SimpleNamespace(shared_kb=227, capability=90))
    acts = dict(small_cases.cases())
    assert len(acts) == len([*small_cases.cases()])
    for operation in TABLE:
        if operation.exact:
            acts[operation.name](rng)
        else:
            _, _, kind = operation.name.partition("_")
            assert any(small_cases.is_named(name, [kind]) for name in acts)


# Variants that no small case runs: of two queries a CTA in rows of 512, of heads a CTA that are the fastest in larger
# calls alone, of more queries a group, of addresses that are not aligned, and of GPUs with 163 KB of shared memory a
# CTA.
LEFT_OUT = {
    "attention/backward.cu": 2, "attention/bf16_few_heads_sm90.cu": 2,
    "attention/group_lists.cu": 5, "indexer/logits.cu": 4,
}  # fmt: skip


@pytest.mark.long
def test_small_cases_run_every_kernel(module, monkeypatch, rng, gpu):
    """On an H200; but for `LEFT_OUT`, sanitizers see all variants of kernels."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    small_cases, kind = module("small_cases"), make("torch")

    def asarray(array: np.ndarray) -> Any:
        gpu.used = 0  # what was allocated before is forgotten
        return kind.put(array)

    device = SimpleNamespace(compute_capability="90")
    monkeypatch.setattr(small_cases, "cupy", SimpleNamespace(
        asarray=asarray, uint8=torch.uint8, cuda=SimpleNamespace(Device=lambda: device),
        ndarray=lambda shape, dtype, memory, strides: kind.view(
            memory.view(torch.uint8).flatten(), np.dtype(dtype), shape, strides, 0
        ),
    ))  # fmt: skip
    monkeypatch.setattr(small_cases, "to_cupy", asarray)
    monkeypatch.setattr(small_cases, "compare", lambda *results: None)
    for twins, names in (
        (attention, ("sparse_prefill", "sparse_decode")),
        (logits, ("indexer_logits", "paged_indexer_logits", "candidate_logits")),
        (topk, ("topk_indices", "select_candidate_rows")), (dense, ("dense_decode",)),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(twins, name, lambda *arguments: None)
    monkeypatch.delenv(small_cases.VARIABLE, raising=False)
    for name, act in small_cases.cases():
        act(rng)
        os.environ.pop(small_cases.VARIABLE, None)
        assert small_cases.LOGITS_VARIABLE not in os.environ, name
    left_out = {kernel for kernel in all_kernels() if kernel.suits(90)} - set(gpu.kernels.values())
    assert Counter(kernel.file for kernel in left_out) == LEFT_OUT


def test_record(harness, monkeypatch, tmp_path, capsys):
    torch = sys.modules["torch"]
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "none"})
    record = harness.Record("name", harness.Options())
    assert record.wants("anything")
    record.add("a row", 2.0, 3.0, record.compare("a row", torch.ones(3), torch.ones(3)), floor_us=1.0)
    record.write()
    row = {"case": "a row", "ours_us": 2.0, "peer_us": 3.0, "ratio": 1.5, "max_abs_err": 0.0, "floor_us": 1.0}
    assert json.loads((tmp_path / "name.json").read_text()) == {"gpu": "none", "rows": [row]}

    part = harness.Record("name", harness.Options(only="b row"))
    assert not part.wants("a row")
    part.compare("b row", torch.ones(3), torch.tensor([1, 1, float("nan")]))
    with pytest.raises(SystemExit, match="b row: ours and the peer's results differ by nan"):
        part.write()
    assert (tmp_path / "name.part.json").exists()
    assert "WRONG b row" in capsys.readouterr().out

    late = harness.Record("late", harness.Options(limit=0))
    assert not late.wants("a row")
    late.write()
    assert json.loads((tmp_path / "late.part.json").read_text()) == {"gpu": "none", "left_out": ["a row"], "rows": []}


def test_shapes_of_the_portable_kernel_are_judged_apart(module):
    cases = module("cases")
    rows = [{"case": f"V32 h 64 b 3 s_q 1 topk 2048 shape {shape}", "ratio": shape} for shape in (99, 163)]
    rows.append({"case": "V32 h 64 b 3 s_q 1 topk 2048", "ratio": 1})  # of records from before there were shapes
    assert [found for group in cases.PORTABLE if (found := cases.of_group(group, rows))] == [[163, 1], [99]]


def write_module(folder: Path, name: str, functions: tuple[str, ...], parameters: str = "") -> None:
    folder.mkdir()
    (folder / f"{name}.py").write_text("".join(f"def {f}({parameters}): pass\n" for f in functions))


@pytest.fixture
def peers(harness, monkeypatch):
    """Nothing is installed that would be a peer, and nothing stays imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ("flash_mla_interface", "flash_mla")
    monkeypatch.setattr(harness, "PEERS", names)
    yield harness
    for name in names:
        sys.modules.pop(name, None)


def test_peer_in_a_folder(peers, monkeypatch, tmp_path):
    write_module(tmp_path / "peer", "flash_mla_interface", peers.PEER_FUNCTIONS)
    monkeypatch.setenv("CUPY_MLA_PEER", str(tmp_path / "peer"))
    assert peers.flash_mla_peer().__name__ == "flash_mla_interface"
    assert peers.peer_name() == "flash_mla_interface"


@pytest.mark.parametrize(
    ("functions", "parameters", "complaint"),
    [(2, "", "has no attribute 'flash_mla_sparse_fwd'"), (3, "cache_seqlens", "missing 1 required positional")],
)
def test_peer_that_is_installed(peers, monkeypatch, tmp_path, capsys, functions, parameters, complaint):
    """The first one found lacks a function, or is of an older interface, and is passed over."""
    write_module(tmp_path / "one", "flash_mla_interface", peers.PEER_FUNCTIONS[:functions], parameters)
    write_module(tmp_path / "two", "flash_mla", peers.PEER_FUNCTIONS)
    monkeypatch.setenv("CUPY_MLA_PEER", str(tmp_path / "one"))
    monkeypatch.syspath_prepend(str(tmp_path / "two"))
    assert peers.flash_mla_peer().__name__ == "flash_mla"
    assert re.search(f"flash_mla_interface cannot be used: .*{complaint}", capsys.readouterr().err)


def test_no_peer(peers, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("CUPY_MLA_PEER", str(tmp_path / "empty"))
    with pytest.raises(SystemExit) as end:
        peers.flash_mla_peer()
    assert end.value.code == peers.NO_PEER
    monkeypatch.setenv("CUPY_MLA_PEER", str(tmp_path / "missing"))
    with pytest.raises(SystemExit, match="no folder"):
        peers.find_peer()


@pytest.mark.long
def test_plots(module, tmp_path):
    pytest.importorskip("matplotlib")
    report = module("report")
    rows = [
        {"case": f"{layout} h 64 b {b} s_q 1 topk 2048", "ours_us": b, "peer_us": 2 * b, "ratio": 2, "floor_us": 1}
        for layout in ("V32", "bf16")
        for b in (1, 2, 8)
    ]
    (tmp_path / "sparse_decode.json").write_text(json.dumps({"rows": rows}))
    rows = [
        {"case": f"prefill h {h} d 576 s_q 2048 s_kv 8192 topk 2048", "ours_us": h, "peer_us": 2 * h, "ratio": 2}
        for h in (8, 64)
    ]
    (tmp_path / "sparse_prefill.json").write_text(json.dumps({"rows": rows}))
    rows = [
        {"case": f"{work} {m} x 8192", "work": work, "ours_us": m, "peer_us": 2 * m, "ratio": 2}
        for work in ("prefill_logits", "topk_prefill", "select_prefill")
        for m in (256, 4096)
    ]
    (tmp_path / "indexer.json").write_text(json.dumps({"rows": rows}))
    for path in (
        report.plot_indexer(tmp_path / "indexer.json"),
        report.plot_decode(tmp_path / "sparse_decode.json"), report.plot_prefill(tmp_path / "sparse_prefill.json"),
        report.plot_ratios(tmp_path / "ratios.png"),
    ):  # fmt: skip
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_of_the_records_show_every_row_and_label_every_axis(module, monkeypatch):
    """Every number of query tokens that was measured is a tick of its panel."""
    pytest.importorskip("matplotlib")
    report = module("report")
    monkeypatch.setattr(report, "_save", lambda figure, path: figure)
    decode = report.plot_decode(BENCHMARKS / "results" / "sparse_decode.json")
    panels = [axes for axes in decode.axes if axes.lines]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    rows = report.load("sparse_decode")["rows"]
    theirs, ours, _ = zip(*(axes.lines for axes in panels), strict=True)
    for lines, key in ((ours, "ours_us"), (theirs, "peer_us")):
        shown = [point for line in lines for point in zip(*map(list, line.get_data()), strict=True)]
        assert sorted(shown) == sorted((report._queries(row), row[key]) for row in rows)
    for axes, line in zip(panels, ours, strict=True):
        assert {int(label.get_text()) for label in axes.get_xticklabels()} == set(line.get_xdata())
    prefill = report.plot_prefill(BENCHMARKS / "results" / "sparse_prefill.json")
    assert all(axes.get_xlabel() for axes in prefill.axes)


@pytest.fixture
def indexer(harness, module) -> ModuleType:
    return module("indexer")


def test_shapes_of_the_indexer(indexer):
    """The important ones first, then five prefills, ten decodes and three of short contexts drawn anew."""
    one, same, other = (indexer.shapes(np.random.default_rng(seed), False) for seed in (1, 1, 2))
    fixed = {*indexer.PREFILLS, *indexer.DECODES}
    assert one == same != other
    assert one[: len(indexer.QUICK)] == indexer.shapes(np.random.default_rng(1), True) == [*indexer.QUICK]
    assert {*one[: len(fixed)]} == fixed
    assert [len(shape) for shape in one[len(fixed) :]].count(2) == 5
    assert [len(shape) for shape in one[len(fixed) :]].count(3) == 13
    for shape in one:
        assert all(size > 0 for size in shape)
        assert shape[-1] >= shape[-2]


def test_every_row_of_the_indexer_is_in_one_group(indexer, module):
    cases = module("cases")
    rows = [{"case": case.name, "ratio": 1} for shape in ((7, 90), (2, 1, 90)) for case in indexer.cases(shape)]
    assert len({row["case"] for row in rows}) == 8
    for row in rows:
        assert sum(len(cases.of_group(group, [row])) for group in cases.INDEXER) == 1


class FakePeer:
    """Its second window is disturbed."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.process = SimpleNamespace(kill=lambda: None)

    def ask(self, case, deadline) -> dict[str, float]:
        self.asked.append(case.name)
        fast = 9.0 if self.asked.count(case.name) == 2 else 3.0
        return {} if case.work == "topk_decode" else {"slow": 5.0, "fast": fast}


def run_indexer(indexer, harness, monkeypatch, tmp_path, *arguments: str) -> tuple[dict, FakePeer]:
    peer = FakePeer()
    monkeypatch.setattr(indexer, "started", lambda shapes, deadline: [peer])
    monkeypatch.setattr(indexer.Inputs, "of", lambda self, case: [()])
    monkeypatch.setattr(indexer.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(indexer, "ours", lambda case, sets: [lambda: case])
    monkeypatch.setattr(indexer, "check_logits", lambda *a: 1e-9)
    monkeypatch.setattr(indexer, "check_topk", lambda *a: 1)
    windows: list[str] = []

    def time_side_by_side(calls) -> list[float]:
        """Ours; the first window of a row of decode is disturbed."""
        name = calls[0]().name
        windows.append(name)
        return [7.0 if "decode" in name and windows.count(name) == 1 else 2.0]

    monkeypatch.setattr(indexer, "time_side_by_side", time_side_by_side)
    monkeypatch.setattr(harness, "environment", dict)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("CUPY_MLA_INDEXER_KERNELS", "")
    monkeypatch.setattr(sys, "argv", ["indexer.py", *arguments])
    indexer.main()
    return json.loads(next(tmp_path.glob("indexer*.json")).read_text()), peer


def test_rows_of_the_indexer(indexer, harness, monkeypatch, tmp_path):
    """The best peer counts; portable logits have the times of the others; rows without a peer are left out. Of a row
    of decode all is timed in several windows, of which one does not count that is unlike the others."""
    record, peer = run_indexer(indexer, harness, monkeypatch, tmp_path, "--seed", "3")
    works = {case.work for shape in ((7, 90), (2, 1, 90)) for case in indexer.cases(shape)}
    assert {row["work"] for row in record["rows"]} == works - {"topk_decode"}
    assert {(row["ours_us"], row["peer_us"], row["peer"], row["ratio"]) for row in record["rows"]} == {
        (2.0, 3.0, "fast", 1.5)
    }
    assert record["seed"] == 3
    assert record["left_out"]
    assert all(name.startswith("topk_decode") for name in record["left_out"])
    for name in peer.asked:
        served, decode = not name.startswith("topk_decode"), "decode" in name
        assert peer.asked.count(name) == (indexer.WINDOWS if served and decode else 1)
    assert not any(name.startswith("portable") for name in peer.asked)


def test_rows_of_the_indexer_that_a_limit_leaves_out(indexer, harness, monkeypatch, tmp_path):
    record, peer = run_indexer(indexer, harness, monkeypatch, tmp_path, "--limit", "-1", "--quick")
    assert record["rows"] == peer.asked == []
    assert len(record["left_out"]) == 4 * len(indexer.QUICK)


def test_a_peer_in_a_process(indexer):
    """Its times by its name; none where it has ended or answers too late."""
    process = object.__new__(indexer.PeerProcess)
    process.name = "version"
    process._pipe, theirs = indexer.SPAWN.Pipe()
    case = indexer.Case("prefill_logits", (7, 90))
    assert process.ask(case, time.monotonic()) == {}
    theirs.send({"kernel": 2.0})
    assert process.ask(case, time.monotonic() + 9) == {"kernel (version)": 2.0}
    assert theirs.recv() == case
    theirs.close()
    assert process.ask(case, time.monotonic() + 9) == {}


@pytest.mark.parametrize("kind", ["random", "ascending", "local", "all"])
def test_causal_lists(harness, module, monkeypatch, kind):
    """Each token lists as many different rows as there are, up to topk, none behind its own; also where scores are
    drawn in parts."""
    inputs = module("inputs")
    monkeypatch.setattr(inputs, "SCORES", 1 << 14)
    topk = 200 if kind == "all" else 32
    lists = inputs.causal_lists(kind, 200, topk, "cpu").numpy()
    assert lists.shape == (200, topk)
    found = [row[row >= 0] for row in lists]
    for token, row in enumerate(found):
        assert len(set(row)) == len(row) == min(token + 1, topk)
        assert (lists[token, len(row) :] == -1).all()
        assert row.max() <= token
        assert kind != "local" or row.min() > token - 2 * topk
    ordered = [bool((np.diff(row) > 0).all()) for row in found[1:]]
    assert all(ordered) == (kind in ("ascending", "all"))
    shared = len({*found[130]} & {*found[134]})
    assert (shared >= 20) == (kind in ("local", "all"))


class TrainingPeer:
    """A peer whose gradients are ours times a factor; it fails for two heads."""

    version = "1"

    def __init__(self, name: str, backward: Any, factor: float = 1.0) -> None:
        self.name, self._backward, self._factor = name, backward, factor

    def serves(self, heads: int) -> bool:
        return self.name != "cudnn" or heads == 4

    def backward(self, a: Any) -> Any:
        if a.q.shape[1] == 2:
            raise RuntimeError("two heads")
        return lambda: tuple(x * self._factor for x in self._backward(a))


@pytest.fixture
def training(harness, module, monkeypatch, tmp_path):
    """The program at small sizes on the CPU; the time of a call is its place."""
    program, torch = module("training"), sys.modules["torch"]
    monkeypatch.setattr(program, "normal", lambda *shape: torch.randn(*shape, dtype=torch.bfloat16))
    monkeypatch.setattr(program, "causal_lists", partial(module("inputs").causal_lists, device="cpu"))
    for name, value in (("TOPK", 16), ("SIZES", (40,)), ("SHORTER", (40,)), ("MANY", (4,)), ("FEW", (2, 3))):
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(program, "load_kernels", lambda *a, **kw: None)
    monkeypatch.setattr(program, "peak_bytes", lambda call: 5_000_000)
    monkeypatch.setattr(program, "times_in_turn", lambda calls, *_: [1e3 * (i + 1) for i in range(len(calls))])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "NVIDIA H100 80GB HBM3", "commit": "0123456789"})
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(program.backward_peers, "unpacked", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["training.py"])
    return program


def test_rows_of_training(training, module, monkeypatch, tmp_path):
    """The faster peer counts; one that fails is noted. Each row is in a group that it is judged with, and in docs."""
    peers = [TrainingPeer(name, training.backward) for name in ("tilelang", "cudnn")]
    monkeypatch.setattr(training.backward_peers, "peers", lambda folder: peers)
    training.main()
    record = json.loads((tmp_path / "training.json").read_text())
    rows = {row["case"]: row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 7
    assert "two heads" in record["tilelang fails"]
    first = rows["backward h 4 s 40 topk 16 random"]
    times = {name: first[f"{name}_us"] / 1e3 for name in ("ours", "tilelang", "cudnn", "portable", "peer")}
    assert times == {"ours": 1.0, "tilelang": 2.0, "cudnn": 3.0, "portable": 4.0, "peer": 2.0}
    assert (first["ratio"], first["dq"], first["dkv"], first["peak_gb"]) == (2.0, 0.0, 0.0, 0.005)
    assert first["tflops"] == pytest.approx(2 * 40 * 4 * 16 * (3 * 576 + 2 * 512) / 1e9, abs=0.05)
    assert first["same_bits"] == "ours, tilelang, cudnn, portable"
    assert "cudnn_us" not in rows["backward h 3 s 40 topk 16 local"]
    loss = rows["loss H 64 h 4 s 40 topk 16"]
    assert (loss["target_us"], loss["loss_us"], loss["peer_us"], loss["ratio"]) == (1e3, 2e3, 3e3, 1.0)
    assert "warm-up H 64 h 4 s 40" in rows
    report, cases = module("report"), module("cases")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = report.performance()
    assert "| backward h 4 s 40 topk 16 random | H100 | 0123456 | 1.00 | 4.00 | 3.00 | 2.00 |" in text
    for name in rows:
        assert any(group.holds(name, cases.numbers(name)) for group in cases.TRAINING)
        assert f"| {name} | H100 |" in text
    ratios = {group.title: cases.of_group(group, [{**first, "case": "backward h 64 s 40"}]) for group in cases.TRAINING}
    titles = ("beside TileLang's", "portable, beside the faster of cuDNN and TileLang")
    assert [ratios[f"backward, 64 and 128 heads, {title}"] for title in titles] == [[2.0], [0.5]]


def test_training_of_another_result_is_wrong(training, monkeypatch):
    peers = [TrainingPeer("tilelang", training.backward, 1.1)]
    monkeypatch.setattr(training.backward_peers, "peers", lambda folder: peers)
    with pytest.raises(SystemExit, match="h 3 s 40 topk 16 random: ours and tilelang differ by"):
        training.main()


@pytest.mark.parametrize("name", ["training", "training_accuracy"])
def test_training_without_packs(training, module, monkeypatch, tmp_path, name):
    program = module(name)
    monkeypatch.undo()
    monkeypatch.setattr(training.backward_peers, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == training.NO_PEER


@pytest.fixture
def training_accuracy(training, module, monkeypatch):
    """The program at small sizes on the CPU."""
    program = module("training_accuracy")
    monkeypatch.setattr(program, "causal_lists", training.causal_lists)
    few = {"TOPK": 16, "SIZES": (9, 40), "HEADS": (3, 4), "ELEMENTS": 7 * 4 * 40, "FARTHEST": {1: 2e-2, 4: 2e-2}}
    for name, value in few.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(program, "load_kernels", lambda *a, **kw: None)
    monkeypatch.setattr(sys, "argv", ["training_accuracy.py"])
    return program


def test_gradients_in_float64(training_accuracy, training):
    """In chunks, they are the oracle's, which has neither `out` nor `lse`."""
    a = training.inputs(training.causal_lists("random", 23, 16), 4)
    q, kv, dout = (x.float().numpy() for x in (a.q, a.kv, a.dout))
    want = oracle_backward.backward(
        oracle_backward.Inputs(q, kv, a.lists[:, None].numpy(), training_accuracy.SCALE, dout)
    )
    for got, of in zip(training_accuracy.in_float64(a), want[:2], strict=True):
        np.testing.assert_allclose(got.numpy(), of.value, rtol=0, atol=1e-12 * np.abs(of.value).max())
    assert training_accuracy.distance(1.25 * a.kv, a.kv[:, 0].double()) == pytest.approx(0.25, rel=1e-2)


def test_rows_of_the_accuracy_of_training(training_accuracy, training, module, monkeypatch, tmp_path):
    """A row has each kernel that serves its heads, and a line in docs/performance.md."""
    peers = [TrainingPeer("tilelang", training.backward), TrainingPeer("cudnn", training.backward, 1.125)]
    monkeypatch.setattr(training.backward_peers, "peers", lambda folder: peers)
    training_accuracy.main()
    record = json.loads((tmp_path / "training_accuracy.json").read_text())
    assert [row["case"] for row in record["rows"]] == [
        f"gradients h {h} s {s} topk 16 q {factor}x" for s, factor in ((9, 1), (40, 1), (40, 4)) for h in (3, 4)
    ]
    for row in record["rows"]:
        assert ("cudnn_dq" in row) == ("h 4" in row["case"])
        for name in ("dq", "dkv"):
            assert row[name] == row[f"portable_{name}"] == row[f"tilelang_{name}"]
            assert 1e-3 < row[name] < 2e-2
            assert row.get(f"cudnn_{name}", 0.125) == pytest.approx(0.125, abs=1e-2)
        assert row["float32_dkv"] < row["dkv"]
    report, last = module("report"), record["rows"][-1]
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    dq = [last[f"{name}dq"] for name in ("", "portable_", "cudnn_", "tilelang_")]
    assert f"| {last['case']} | H100 | 0123456 | " + " | ".join(f"{x:.2e}" for x in dq) in report.performance()


@pytest.mark.parametrize("result", ["as it is", "dq", "dkv", "float32_dkv"])
def test_gradients_far_from_float64_are_wrong(training_accuracy, training, monkeypatch, result):
    """And NaN, in each result."""
    monkeypatch.setattr(training.backward_peers, "peers", lambda folder: [])
    if result == "as it is":
        monkeypatch.setitem(training_accuracy.FARTHEST, 4, 1e-3)
    else:
        torch = sys.modules["torch"]
        name, number = {"dq": ("backward", 0), "dkv": ("backward", 1), "float32_dkv": ("float32_rows", 1)}[result]
        call = getattr(training_accuracy, name)
        spoiled = lambda a: tuple(x * (torch.nan if n == number else 1) for n, x in enumerate(call(a)[:2]))  # noqa: E731
        monkeypatch.setattr(training_accuracy, name, spoiled)
    with pytest.raises(SystemExit, match=r"h 4 s 40 topk 16 q 4x: farther from float64 than 0\."):
        training_accuracy.main()


def write_record(folder, name, gpu, *rows):
    folder.mkdir(exist_ok=True)
    record = {"gpu": gpu, "driver": "1", "commit": "0123456789", "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_performance_has_a_row_for_each_group_and_card_with_its_commits(module, monkeypatch, tmp_path):
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "| indexer: prefill top-k | not measured |" in report.performance()
    rows = [{"case": f"topk_prefill {m} x 9", "ratio": 2.0} for m in (3, 4)]
    write_record(tmp_path, "indexer", "NVIDIA H200", rows[0], {**rows[1], "commit": "abcdefabcdef"})
    write_record(tmp_path / "h100", "indexer", "NVIDIA H100 80GB HBM3", {**rows[0], "ratio": 1.5})
    assert "| indexer: prefill top-k | H200 | 0123456, abcdefa | 2 | 2.00 | 2.00 | 2.00 |" in report.performance()
    assert "| indexer: prefill top-k | H100 | 0123456 | 1 | 1.50 | 1.50 | 1.50 |" in report.performance()
    assert "indexer.png" in report.performance()
    assert "sparse_decode.png" not in report.performance()


def test_accuracy_and_host_time_name_card_and_commit(module, monkeypatch, tmp_path):
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = {"case": "normal", "ours": 0.1, "peer": 0.2, "ours_lse": 0.3, "peer_lse": 0.4}
    write_record(tmp_path, "accuracy", "NVIDIA H200", row)
    write_record(tmp_path / "h100", "accuracy", "NVIDIA H100 80GB HBM3", row)
    known = {"case": "decode b 1", "torch_us": 1.0, "cupy_us": 2.0, "peer_us": 3.0, "peer_operator_us": 4.0}
    new = {"case": "decode b 1 to 9", "torch_new_us": 5.0, "cupy_new_us": 6.0}
    write_record(tmp_path, "host_overhead", "NVIDIA H200", known, new)
    text = report.performance()
    for name in ("H200", "H100"):
        assert f"| normal | {name} | 0123456 | 1.0e-01 | 2.0e-01 | 3.0e-01 | 4.0e-01 |" in text
    assert "| decode b 1 | H200 | 0123456 | 1.0 | 2.0 | 3.0 | 4.0 |" in text
    assert "| decode b 1 to 9 | H200 | 0123456 | 5.0 | 6.0 |  |" in text


def test_warm_up_has_a_row_for_each_model_and_card(module, monkeypatch, tmp_path):
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert f"## Warm-up\n\n{report.WARM_UP}\n\n{report.NOT_MEASURED}" in report.performance()
    row = {"case": "V9", "kernels": 77, "cold_s": 18.06, "warm_s": 1.12, "cores": 16}
    write_record(tmp_path, "warm_up", "NVIDIA H200", row)
    write_record(tmp_path / "h100", "warm_up", "NVIDIA H100 80GB HBM3", {**row, "cold_s": 20.0})
    assert "| V9 | H200 | 0123456 | 77 | 16 | 18.1 | 1.1 |" in report.performance()
    assert "| V9 | H100 | 0123456 | 77 | 16 | 20.0 | 1.1 |" in report.performance()


def test_absolute_figures(module, monkeypatch, tmp_path):
    """Products of 2048 queries, rows of 128, at hand-worked rates; shares of 812 TFLOP/s, of a floor, of a copy."""
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    prefill = {"case": "prefill h 64 d 576 s_q 2048 s_kv 32768 topk 2048", "ours_us": 1000.0}
    decode = {"case": "V32 h 64 b 128 s_q 1 topk 2048", "ours_us": 100.0, "floor_us": 55.0}
    pack = {"case": "pack V4 tokens 1000000", "ours_us": 500.0, "peer_us": 450.0}
    write_record(tmp_path, "sparse_prefill", "NVIDIA H200", prefill)
    write_record(tmp_path / "h100", "sparse_prefill", "NVIDIA H100 80GB HBM3", {**prefill, "ours_us": 1100.0})
    write_record(tmp_path, "sparse_decode", "NVIDIA H200", decode, {**decode, "case": "V32 h 64 b 3 s_q 1 topk 2048"})
    write_record(tmp_path, "cache_ops", "NVIDIA H200", pack)
    text = report.absolute()
    assert "| 64 | 576 | 1,000.0 | 1,100.0 | 584 | 72 |" in text  # 2 * 2048 * 2048 * 64 * 1088
    assert "| V32 | 64 | 128 x 1 | 2048 | 100.0 | 365 | 1.72 | 55 |" in text  # 2 * 262144 * 64 * 1088; 656 bytes a row
    assert "| pack V4 tokens 1000000 | 500.0 | 3.22 | 90 |" in text  # 1024 + 584 bytes a token
    assert "3 x 1" not in text
    assert "Measured: H200 at 0123456, H100 at 0123456." in text


def test_the_readme_shows_eight_groups_of_the_first_gpu(module, monkeypatch, tmp_path):
    report = module("report")
    first, _, _ = report.readme().partition(report.ROW_FORMATS)
    assert len(re.findall(r"^\| [A-Za-z].* \| \w+ \| [0-9a-f]{7} \|", first, re.M)) == 8
    assert report.readme().count(".png") == 1
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = {"case": "select_decode 3 x 9", "ratio": 2.0}
    write_record(tmp_path, "indexer", "NVIDIA H200", row)
    write_record(tmp_path / "h100", "indexer", "NVIDIA H100 80GB HBM3", row)
    (line,) = re.findall(r"^\| indexer.*$", report.readme(), re.M)
    assert line == "| indexer: decode selection, logits to slots | H200 | 0123456 | 1 | 2.00 | 2.00 | 2.00 |"


class Engine:
    """Continues each text with a token and its gap by a table, and by another where it serves each alone."""

    def __init__(self, tokens: dict[tuple[int, ...], tuple[int, float]], alone: Any = None) -> None:
        self.tokens, self.alone = tokens, alone

    def ask(self, question: str, texts: dict[int, list[int]], alone: bool) -> dict[int, list[tuple[int, float]]]:
        assert question == "continuations"
        tokens = self.alone if alone else self.tokens
        found: dict[int, list[tuple[int, float]]] = {}
        for prompt, text in texts.items():
            for _ in range(3 - len(text)):
                so_far = (*text, *(token for token, _ in found.get(prompt, [])))
                found.setdefault(prompt, []).append(tokens.get((prompt, *so_far), (1, 5.0)))
        return found


def test_engines_are_compared_under_the_same_text(module):
    """Where they part the plug-in goes on from stock's text; the gap is that of the engine that was surer."""
    pytest.importorskip("torch")
    compare = partial(module("vllm_engine").compare, prompts=3, new_tokens=3)
    stock = Engine({(0,): (2, 1.0), (0, 2): (3, 0.25), (2, 1, 1): (7, 0.5)})
    assert compare(stock, stock) == {"tokens_equal": 9, "tokens": 9, "gap_apart": 0.0, "texts_equal": 3}
    ours = Engine({(0,): (9, 0.5), (0, 2): (8, 0.125), (0, 9): (77, 0), (0, 2, 3): (1, 5.0), (2, 1, 1): (6, 0.75)})
    assert compare(ours, stock) == {"tokens_equal": 6, "tokens": 9, "gap_apart": 1.0, "texts_equal": 1}


def test_an_engine_is_compared_with_itself(module):
    """Where it serves each prompt alone, which rounds otherwise."""
    pytest.importorskip("torch")
    itself = Engine({(0,): (2, 1.0)}, {(0,): (3, 1.75)})
    found = module("vllm_engine").compare(itself, itself, prompts=3, new_tokens=3, alone=True)
    assert found == {"tokens_equal": 8, "tokens": 9, "gap_apart": 1.75, "texts_equal": 2}


def test_errors_of_log_probabilities(module):
    """And how sure their difference is: of distances 0.5, 0, 1 and 0, 0.5, 0.25 those differ by 0.5, -0.5, 0.75.

    Those of the first token of each prompt by 0.5, 0.75.
    """
    pytest.importorskip("torch")
    ours, stock, exact = [[0.5, -1.0], [-4.0]], [[0.0, -1.5], [-3.25]], [[0.0, -1.0], [-3.0]]
    assert module("vllm_engine").logprob_errors(ours, stock, exact, 1) == {
        "logprob_error_ours": 0.5, "logprob_error_stock": 0.25, "logprob_error_noise": 0.381881,
        "logprob_error_within_topk_ours": 0.75, "logprob_error_within_topk_stock": 0.125,
        "logprob_error_within_topk_noise": 0.125,
    }  # fmt: skip


def test_speed_is_of_pairs_around_which_the_machine_was_fastest(module):
    """Two of four pairs count, whatever their own steps took; the ratio and the slowest and fastest are of all."""
    program = module("vllm_engine")
    loops = [(100.0, 120.0), (90.0, 300.0), (110.0, 110.0), (200.0, 90.0)]
    steps = [(0.002, 0.004), (0.001, 0.001), (0.004, 0.006), (0.008, 0.024)]
    blocks = {
        name: [program.Block(step[i], loop[i]) for step, loop in zip(steps, loops, strict=True)]
        for i, name in enumerate(("ours", "stock"))
    }
    found = program.speeds(3, blocks)
    assert found.pop("tokens_per_s_ratio_noise") > 0
    assert found == {
        "tokens_per_s_ours": 1000.0, "tokens_per_s_ours_low": 375.0, "tokens_per_s_ours_high": 3000.0,
        "tokens_per_s_stock": 600.0, "tokens_per_s_stock_low": 125.0, "tokens_per_s_stock_high": 3000.0,
        "loop_us_ours": 105.0, "loop_us_stock": 115.0, "tokens_per_s_ratio": 1.75,
    }  # fmt: skip


def test_settings_of_one_gpu_and_of_several(module):
    """GPUs that share rows are several, whose number theirs divides; what is compiled is the plug-in's own config."""
    pytest.importorskip("torch", reason="torch is not installed, which the plug-in imports")
    program = module("vllm_engine")
    one, two, three = (program.chosen_settings([""], gpus) for gpus in (1, 2, 3))
    assert {setting.sharing for setting in one} == {setting.sharing for setting in three} == {1}
    assert {setting.sharing for setting in two} == {1, 2}
    assert {setting.speculation for setting in one} > {0}
    assert any(setting.traffic and setting.layers > 1 and setting.topk == 2048 for setting in one)
    few, shared, bf16 = (setting for setting in two if setting.sharing == 2)
    assert [(each.cache, each.heads) for each in (few, shared, bf16)] == [("fp8", 16), ("fp8", 64), ("auto", 64)]
    assert program.layers_of(shared, 2) == program.layers_of(shared, 1), "each has the heads of both"
    assert program.layers_of(shared._replace(sharing=1), 2)[0].num_heads == 32
    assert program.chosen_settings(["share rows"], 2) == [few, shared, bf16]
    assert program.chosen_settings(["share rows", "graphs"], 2, ["share", "auto"]) == two[:1]
    assert [program.sharing_of(each, "ours", 2) for each in (few, shared, bf16)] == [2, 2, 2]
    assert [program.sharing_of(each, "stock", 2) for each in (few, shared, bf16)] == [2, 1, 1]
    assert program.sharing_of(few._replace(cache="auto"), "stock", 2) == program.sharing_of(bf16, "ours", 1) == 1


def test_settings_of_other_models(module, tmp_path):
    """Each is told by its name; DeepSeek-V4 has all kinds of layers, DeepSeek-V3 has no indexer."""
    pytest.importorskip("torch", reason="torch is not installed, which the plug-in imports")
    program = module("vllm_engine")
    of_v4 = program.chosen_settings(["DeepSeek-V4 "], 1)
    assert {setting.mode for setting in of_v4} == {"graphs", "eager"}
    assert all(setting.compared and setting.stands_in and not setting.has_exact for setting in of_v4)
    assert all(setting.place == "override" for setting in of_v4)
    configs = program.layers_of(of_v4[0], 1)
    assert [config.compress_ratio for config in configs] == [1, 4, 128]
    assert {(config.num_heads, config.cache_layout) for config in configs} == {(64, "v4_fp8")}
    written = program.v4_config(of_v4[0])
    assert len(set(written["layer_types"])) == len(written["mlp_layer_types"]) == written["num_hidden_layers"] == 3
    program.write_model(None, tmp_path / "v4", of_v4[0])
    assert json.loads((tmp_path / "v4" / "config.json").read_text()) == written
    dense = program.chosen_settings(["DeepSeek-V3 "], 1)
    assert {setting.cache for setting in dense} == {"auto", "fp8"}
    layouts = [program.layers_of(setting, 1)[0].cache_layout for setting in dense]
    assert layouts == ["bf16" if setting.cache == "auto" else "plain_fp8" for setting in dense]
    assert not any(setting in program.chosen_settings([""], 2) for setting in (*of_v4, *dense))
    names = [str(setting) for setting in program.SETTINGS]
    assert len(set(names)) == len(names)


def test_settings_of_v41(module, tmp_path):
    """Layers of all ratios, of which some share compressed rows, lists and candidate blocks."""
    pytest.importorskip("torch", reason="torch is not installed, which the plug-in imports")
    program = module("vllm_engine")
    (setting,) = program.chosen_settings(["DeepSeek-V4.1"], 1)
    assert (setting.compared, setting.stands_in, setting.has_exact, setting.place) == (True, True, False, "override")
    assert setting not in program.chosen_settings([""], 2)
    configs = program.layers_of(setting, 1)
    assert [(config.model, config.compress_ratio) for config in configs] == [("v41", 0), ("v41", 1), ("v41", 2)]
    program.write_model(None, tmp_path / "v41", setting)
    written = json.loads((tmp_path / "v41" / "config.json").read_text())
    text = written["text_config"]
    ratios, layers = text["compress_ratios"], text["num_hidden_layers"]
    assert len(ratios) == layers == setting.layers
    assert {*ratios} == {config.compress_ratio for config in configs}
    keys, lists = text["kv_source_layer_ids"], text["index_source_layer_ids"]
    assert {*keys} < {*lists} < {layer for layer, ratio in enumerate(ratios) if ratio}
    for layer, ratio in enumerate(ratios):  # each has the compressed rows of a source of its ratio
        assert not ratio or ratios[max(source for source in keys if source <= layer)] == ratio
    source = text["candidate_source_layer_id"]
    assert source in keys
    assert any(layer > source and layer not in keys for layer in lists), "one chooses among candidates"
    assert text["index_topk"] < 8 * text["candidate_topk_blocks"] < max(program.PROMPTS), "not all keys are candidates"
    assert text["candidate_block_size"] == 8


def test_kernels_of_all_layers_are_compiled_once(module, monkeypatch, capsys):
    from cupy_mla.selfcheck import warmup

    class Kernel:
        def __init__(self):
            self.loads = []

        def load(self, device):
            self.loads.append(device)

    both, first, second = Kernel(), Kernel(), Kernel()
    of = {"a": [both, first, both], "b": [second, both]}
    monkeypatch.setattr(warmup, "kernels_of", lambda configs, device: (k for config in configs for k in of[config]))
    module("vllm_engine").make_kernels(["a", "b"])
    assert both.loads == first.loads == second.loads == [0]
    assert "3 kernels of 2 kinds of layers" in capsys.readouterr().out


def test_traffic_is_of_three_rounds(module):
    """A text counts where it is the same in all; the longest step is that of any round."""
    program = module("vllm_engine")
    texts = [[1, 2], [3, 4]], [[1, 2], [3, 5]], [[1, 2], [3, 4]]
    ours = [program.Traffic(s, 0.01 * s, 0.1 * s, texts[0]) for s in (1.0, 4.0, 2.0)]
    stock = [program.Traffic(s, 0.02 * s, 0.2 * s, text) for s, text in zip((3.0, 1.0, 8.0), texts[::-1], strict=True)]
    assert program.traffic_fields({"ours": ours, "stock": [stock[1], stock[0], stock[2]]}) == {
        "traffic_requests": 2, "traffic_tokens_per_s_ours": 2.0, "traffic_tokens_per_s_stock": 1.3,
        "traffic_first_token_ms_ours": 20.0, "traffic_first_token_ms_stock": 60.0, "longest_step_ms_ours": 400.0,
        "longest_step_ms_stock": 1600.0, "texts_equal_thrice_ours": 2, "texts_equal_thrice_stock": 1,
        "traffic_texts_equal": 1,
    }  # fmt: skip


class Serving:
    """An engine that answers each request with a token a step, two steps after it came, and takes its time."""

    def __init__(self):
        self.llm_engine, self.live, self.added, self.resets = self, {}, [], 0

    def reset_prefix_cache(self):
        self.resets += 1
        return not self.live

    def has_unfinished_requests(self):
        return bool(self.live)

    def add_request(self, name, prompt, params):
        assert name not in self.live
        self.live[name] = 0
        self.added.append(prompt["prompt_token_ids"])

    def step(self):
        answers = []
        for name in list(self.live):
            self.live[name] += 1
            tokens = range(self.live[name] - 1)
            answers.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)]))
            if self.live[name] == 4:
                del self.live[name]
        return answers


def test_traffic(module, monkeypatch):
    """Requests come a few a step, share beginnings or repeat themselves, and start from an empty cache."""
    program = module("vllm_engine")
    params = SimpleNamespace(SamplingParams=SimpleNamespace)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(CUMULATIVE=0))
    monkeypatch.setitem(sys.modules, "vllm", params)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    engine = Serving()
    first, again = program.traffic(engine, None), program.traffic(engine, None)
    assert engine.resets == 2
    assert first.texts == again.texts == [[0, 1, 2]] * len(first.texts)
    assert 0 < first.first_token <= first.seconds
    assert 0 < first.longest_step <= first.seconds
    prompts, others = engine.added[: len(first.texts)], engine.added[len(first.texts) :]
    assert prompts == others
    assert len({tuple(prompt[:1024]) for prompt in prompts[::4]}) == 1
    assert len({tuple(prompt[:20]) for prompt in prompts[1:]}) > len(prompts) / 2
    assert all(prompt[:20] == prompt[20:40] for prompt in prompts[2::4] if len(prompt) >= 40)
    assert max(map(len, prompts)) + 24 < 4096


def test_engines_of_several_gpus_get_cores_that_leave_one_another_fast(module, monkeypatch):
    """Here 0 and 1 are threads of one physical core, and so on; a busy thread makes both slow."""
    program = module("vllm_engine")
    busy = []

    @contextlib.contextmanager
    def busy_core(core):
        busy.append(core)
        yield
        busy.remove(core)

    def fastest_cores(count):
        return sorted(range(8), key=lambda core: (core // 2 in {b // 2 for b in busy}, core in busy, core))[:count]

    monkeypatch.setattr(program, "busy_core", busy_core)
    monkeypatch.setattr(program, "fastest_cores", fastest_cores)
    assert program.undisturbed_cores(3) == [0, 2, 4]
    assert program.undisturbed_cores(1) == [0]
    assert busy == []


def test_a_busy_core_is_free_again(module):
    core = min(os.sched_getaffinity(0))
    with module("vllm_engine").busy_core(core) as pid:
        assert os.sched_getaffinity(pid) == {core}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_that_fails_costs_no_other_settings_rows(module, monkeypatch):
    program = module("vllm_engine")
    failing, other = program.SETTINGS[:2]
    engine = SimpleNamespace(last_lines=lambda: "its last lines")
    engines = {(setting, variant): engine for setting in (failing, other) for variant in ("ours", "stock")}

    def results(setting, engines, rows):
        if setting == failing:
            raise RuntimeError("its end")
        rows.append({"setting": str(setting)})

    asked = []
    monkeypatch.setattr(program, "compare_results", results)
    monkeypatch.setattr(program, "compare_speeds", lambda setting, *arguments, rows: asked.append(setting))
    monkeypatch.setattr(program, "profile_kernels", lambda *arguments, rows: asked.append("kernels"))
    monkeypatch.setattr(program, "alone", lambda every, pair: contextlib.nullcontext())
    rows = {failing: [], other: []}
    program.measure_all(engines, time.monotonic() + 100, 1, Path("kernels.txt"), rows)
    assert rows == {failing: [], other: [{"setting": str(other)}]}
    assert asked == [other, "kernels"]


def test_an_engine_that_hangs_is_not_waited_for(module):
    """An answer is there at once, or nothing comes within the time."""
    answer_of = module("vllm_engine").answer_of
    ours, theirs = multiprocessing.Pipe()
    theirs.send("its answer")
    assert answer_of(ours, 5) == "its answer"
    began = time.monotonic()
    assert answer_of(ours, 0.05) is None
    assert answer_of(ours, -1) is None
    assert time.monotonic() - began < 5


def test_time_that_overlaps_counts_once(module):
    alone_of = module("vllm_engine").alone_of
    launches = [("c", 6, 7), ("a", 0, 2), ("b", 1, 3), ("d", 1.5, 2.5), ("c", 3, 4)]
    assert alone_of(launches) == {"a": 2, "b": 1, "d": 0, "c": 2}
    assert alone_of([]) == {}


def test_rows_of_engines_take_the_place_of_those_of_as_many_gpus(module, monkeypatch, tmp_path, harness):
    """Of any version. A note stays as long as rows of its commit do."""
    program = module("vllm_engine")
    rows = [
        {"version": version, "tensor_parallel": gpus, "commit": commit, "setting": commit}
        for version, gpus, commit in (("0.33", 1, "a"), ("0.33", 2, "b"), ("0.32", 2, "d"))
    ]
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "environment", lambda: {"commit": "c"})
    (tmp_path / "vllm.json").write_text(json.dumps({"notes": {"a": "A", "b": "B"}, "rows": rows}))
    program.write(tmp_path, "0.33", 2, [{"setting": "new"}])
    assert json.loads((tmp_path / "vllm.json").read_text()) == {
        "commit": "c", "notes": {"a": "A"},
        "rows": [rows[0], {"version": "0.33", "tensor_parallel": 2, "setting": "new", "commit": "c"}],
    }  # fmt: skip


def test_engines_of_several_gpus_use_nccl_alone(module, monkeypatch, tmp_path):
    """vLLM's default between GPUs of a host is symmetric memory, which a machine lent by others may not have."""
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "setup_vllm.sh").write_text("echo 'export PYTHONPATH=/site${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1'\n")
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    module("vllm_engine").prepare(pack, tmp_path)
    found = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_USE_DIRECT", "VLLM_ALLRED"))}
    assert len(found) == 4
    assert set(found.values()) == {"0"} == {os.environ["NCCL_NVLS_ENABLE"]}
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    root, benchmarks, plugin, site = os.environ["PYTHONPATH"].split(os.pathsep)
    assert (benchmarks, site) == (f"{root}/benchmarks", "/site")
    assert "cupy_mla = " in (Path(plugin) / "cupy_mla-0.dist-info" / "entry_points.txt").read_text()


def test_runs_beside_each_other_make_one_record(module, monkeypatch, tmp_path, harness, capsys):
    """In the order of the settings. Of one measured twice the last counts, with all its rows; others' rows stay."""
    program = module("vllm_engine")
    names = [str(setting) for setting in program.SETTINGS]
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path))
    before = [
        {"tensor_parallel": gpus, "commit": "old", "setting": name}
        for gpus, name in ((2, f"{names[0]}, 1 request"), (2, names[1]), (4, names[0]))
    ]
    (tmp_path / "vllm.json").write_text(json.dumps({"notes": {"old": "O"}, "rows": before}))

    def measured(folder, gpus, *settings, commit="new"):
        monkeypatch.setattr(harness, "environment", lambda: {"gpu": folder, "commit": commit})
        (tmp_path / folder).mkdir()
        program.write(tmp_path / folder, "0.33", gpus, [{"setting": name} for name in settings])
        return str(tmp_path / folder)

    folders = [
        measured("a", 1, names[3], f"{names[1]}, 1 request"),
        measured("b", 2, names[0]),
        measured("c", 1, names[2], f"{names[1]}, 1 request", f"{names[1]}, 16 requests"),
    ]
    monkeypatch.setattr(sys, "argv", ["vllm_engine.py", "--merge", *folders])
    program.main()
    merged = json.loads((tmp_path / "vllm.json").read_text())
    assert {name: merged[name] for name in ("gpu", "commit", "notes")} == {
        "gpu": "c", "commit": "new", "notes": {"old": "O"},
    }  # fmt: skip
    assert merged["rows"][:2] == before[1:]
    assert [(row["tensor_parallel"], row["setting"]) for row in merged["rows"][2:]] == [
        (1, f"{names[1]}, 1 request"), (1, f"{names[1]}, 16 requests"), (1, names[2]), (1, names[3]), (2, names[0]),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["vllm_engine.py", "--merge", *folders, measured("d", 1, commit="other")])
    with pytest.raises(SystemExit, match="several commits"):
        program.main()
    monkeypatch.setattr(sys, "argv", ["vllm_engine.py"])
    with pytest.raises(SystemExit):
        program.main()
    assert "a pack, or --merge" in capsys.readouterr().err


def test_groups_that_no_gpu_has_measured_are_marked(module, monkeypatch, tmp_path):
    """And those of which the records have no call."""
    report, (group, other, *_) = module("report"), module("cases").DENSE_BANDWIDTH
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.ratio_table([group]).endswith(f"| {group.title} | not measured |  | 0 |  |  |  |")
    rows = [{"case": f"full bf16 dense h 16 b {b} s_q 1 length 70000 equal", "ratio": 0.5} for b in (16, 17)]
    write_record(tmp_path, "dense_bandwidth", "NVIDIA H200", *rows)
    assert report.ratio_table([group]).endswith(f"| {group.title} | H200 | 0123456 | 2 | 0.50 | 0.50 | 0.50 |")
    assert report.ratio_table([other]).endswith(f"| {other.title} | no such row |  | 0 |  |  |  |")


def test_readme_has_row_formats_once_there_is_a_record(module, monkeypatch, tmp_path):
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.ROW_FORMATS not in report.readme()
    rows = [{"case": f"v32_nvfp4 h 8 b {b} topk 512", "ratio": ratio} for b, ratio in ((1, 1.0), (2, 4.0))]
    write_record(tmp_path / "h100", "formats", "NVIDIA H100 80GB HBM3", *rows)
    _, _, formats = report.readme().partition(report.ROW_FORMATS)
    assert "| V32_NVFP4, beside our V32_FP8 | H100 | 0123456 | 2 | 2.00 | 1.00 | 4.00 |" in formats


def test_accuracy_of_rows_without_a_peer(module, monkeypatch, tmp_path):
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    write_record(tmp_path, "accuracy", "NVIDIA H200", {"case": "rows as stored", "ours": 0.5, "ours_lse": 0.25})
    assert "| rows as stored | H200 | 0123456 | 5.0e-01 |  | 2.5e-01 |  |" in report.accuracy_table()


def test_docs_show_engines_and_several_gpus_once_there_are_records(module, monkeypatch, tmp_path):
    report = module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.vllm() == report.context_parallel() == report.beside_copy("merge topk") == report.NOT_MEASURED
    speed = {f"tokens_per_s_{who}": 1000.0 * times for who, times in (("ours", 3), ("stock", 2))}
    spread = {f"{key}_{side}": speed[key] + more for key in speed for side, more in (("low", -5), ("high", 5))}
    results = {"tokens_equal": 191, "tokens": 192, "gap_apart": 0.0625}
    head = {"version": "0.33.0", "commit": "abc"}
    rows = [
        {**head, "tensor_parallel": 1, "setting": "fp8, 16 requests", **results, **speed},
        {**head, "tensor_parallel": 2, "setting": "fp8, 16 requests", **results, "tokens_equal_one_gpu_ours": 190,
         "tokens_equal_one_gpu_stock": 189, **speed, **spread, "loop_us_ours": 170.0, "loop_us_stock": 180.0,
         "tokens_per_s_ratio": 1.46, "tokens_per_s_ratio_noise": 0.01, "gpu_us_ours": 40.0, "gpu_us_stock": 50.0},
    ]  # fmt: skip
    (tmp_path / "vllm.json").write_text(json.dumps({"gpu": "G", "notes": {"abc": "First."}, "rows": rows}))
    one, two = report.vllm().split("vLLM 0.33.0, G, tensor parallel over 2, at abc. First.")
    assert one.startswith("vLLM 0.33.0, G, at abc. First.")
    assert "| fp8 | 191 of 192 | 0.0625 |\n" in one
    assert "| fp8, 16 requests | 3,000 | 2,000 | 1.50 |" in one
    assert "| fp8 | 191 of 192 | 0.0625 | 190 | 189 |\n" in two
    speeds = "| 3,000 (2,995 to 3,005) | 2,000 (1,995 to 2,005) | 1.50 | 1.460 ± 0.010 | 170 and 180 | 40 | 50 | 1.25 |"
    assert f"| fp8, 16 requests {speeds}" in two
    served = {f"{name}_{who}": 10.0 * i for i, name in enumerate(
        ("traffic_tokens_per_s", "traffic_first_token_ms", "longest_step_ms", "texts_equal_thrice"), 1
    ) for who in ("ours", "stock")}  # fmt: skip
    rows = [{**head, "tensor_parallel": 1, "setting": "S", "traffic_requests": 9, "traffic_texts_equal": 8, **served}]
    (tmp_path / "vllm.json").write_text(json.dumps({"gpu": "G", "rows": rows}))
    assert "| S | 10 | 10 | 20.0 | 20.0 | 30.0 | 30.0 | 40.0 | 40.0 | 8 of 9 |" in report.vllm()
    parts = ("one", "replicated", "two", "logits", "topk", "merge_topk", "localize", "gather_q", "attention",
             "merge_attention")  # fmt: skip
    row = {"case": "b 8 h 128 context 9 topk 2", **{f"{part}_us": float(i) for i, part in enumerate(parts)}}
    (tmp_path / "context_parallel.json").write_text(json.dumps({"rows": [row]}))
    assert "| 8 | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |" in report.context_parallel()
    rows = [{"case": f"merge {what} 4 x 2", "ours_us": 12.34, "ratio": 0.5} for what in ("topk", "attention")]
    (tmp_path / "cache_ops.json").write_text(json.dumps({"rows": rows}))
    assert report.beside_copy("merge topk").endswith("| merge topk 4 x 2 | 12.3 | 0.50 |")


def test_rows_of_a_part_take_the_place_of_their_kind(module, tmp_path):
    report = module("report")
    head = {"gpu": "none", "commit": "a", "date": "d", "seed": 1}
    rows = [{"case": "V4 1", "kind": "V4"}, {"case": "bf16 1", "kind": "bf16"}]
    part = [{"case": "bf16 2", "kind": "bf16"}, {"case": "bf16 3", "kind": "bf16"}]
    (tmp_path / "name.json").write_text(json.dumps({**head, "rows": rows}))
    (tmp_path / "name.part.json").write_text(json.dumps({**head, "commit": "b", "seed": 2, "rows": part}))
    report.take_part(tmp_path / "name.part.json")
    of_part = {"commit": "b", "date": "d", "seed": 2}
    assert json.loads((tmp_path / "name.json").read_text()) == {
        **head, "rows": [rows[0], *({**row, **of_part} for row in part)]
    }  # fmt: skip


def test_rows_of_a_part_without_kinds_take_the_place_of_their_case(module, tmp_path):
    report = module("report")
    head = {"gpu": "none", "commit": "a", "date": "d"}
    (tmp_path / "name.json").write_text(json.dumps({**head, "rows": [{"case": "pack"}, {"case": "merge", "us": 1}]}))
    rows = [{"case": "merge", "us": 2}, {"case": "new", "us": 3}]
    (tmp_path / "name.part.json").write_text(json.dumps({**head, "commit": "b", "rows": rows}))
    report.take_part(tmp_path / "name.part.json")
    of_part = {"commit": "b", "date": "d"}
    assert json.loads((tmp_path / "name.json").read_text())["rows"] == [
        {"case": "pack"}, *({**row, **of_part} for row in rows)
    ]  # fmt: skip


def test_plot_of_batches(module, tmp_path):
    """Panels of kinds that not all heads have, with a floor and without."""
    pytest.importorskip("matplotlib")
    report = module("report")
    rows = [
        {"case": f"{kind} h {h} b {b} s_q 1 topk 2048", "kind": kind, "h": h, "topk": 2048, "ours_us": b, "peer_us": b}
        for kind, h in (("V32", 8), ("V32", 64), ("V32 short", 64), ("V32 ragged", 64), ("bf16", 8))
        for b in (9, 3)
    ]
    for row in rows:
        row.update({"valid": 100} if row["kind"] == "V32 short" else {"floor_us": 1.0})
    (tmp_path / "record.json").write_text(json.dumps({"rows": rows}))
    path = report.plot_batches(tmp_path / "record.json")
    assert path == tmp_path / "record.png"
    assert path.stat().st_size > 1000
