"""`benchmarks/dense_candidates.py` beside a fake GPU, and what is read from its record."""

from __future__ import annotations

import json
import re
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cupy_mla.cuda import all_kernels, driver
from cupy_mla.cuda.attention.choose import DENSE_KERNELS
from cupy_mla.cuda.attention.dense import choose_dense
from cupy_mla.cuda.attention.problem import DenseProblem

from .cuda.attention.h200 import CLUSTERS_AT_ONCE
from .fake_gpu import FakeGPU
from .test_benchmarks import on_cpu, set_names

ROWS = 8


def run(monkeypatch, program: ModuleType, changes: list[tuple[ModuleType, dict[str, Any]]], out: Path) -> None:
    """Run a program to the end of its rows, with other values of names of modules; its record goes to a folder."""
    set_names(monkeypatch, *changes)
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", "--seconds", "1e9"])
    with on_cpu():
        program.main()


def measured(module, monkeypatch, tmp_path: Path) -> tuple[ModuleType, list[set[str]], set[Any]]:
    """The program after a run over a small cache: its module, the kernels of each graph, and all that were launched."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    program, candidates = module("dense_candidates"), module("candidates")
    gpu = FakeGPU(monkeypatch, 132, 90)
    graphs: list[set[str]] = []
    used: set[Any] = set()

    def graph_of(calls: Any) -> int:
        gpu.log.clear()
        gpu.used = 0
        for call in calls:
            call()
        launched = {launch.kernel for launch in gpu.log if launch.kernel is not None}
        used.update(launched)
        graphs.append({kernel.name for kernel in launched})
        return len(graphs)

    drawn, cache_of = program.drawn, program.cache_of.__wrapped__
    changes = [
        (driver, {"clusters_at_once": lambda kernel, device: CLUSTERS_AT_ONCE}),
        (candidates, {"graph_of": graph_of, "environment": lambda: {"gpu": "NVIDIA H200"},
                      "replay_times": lambda graphs, repeats: [400.0 + graph for graph in graphs],
                      "load_kernels": lambda which: None}),
        (program, {"TOKENS": 1024, "drawn": lambda rng: islice(drawn(rng), ROWS), "cache_of": cache_of}),
        (module("dense_decode"), {"TOKENS": 1024}), (torch.cuda, {"memory_reserved": lambda: 0}),
    ]  # fmt: skip
    run(monkeypatch, program, changes, tmp_path)
    return program, graphs, used


def test_each_candidate_runs_the_kernel_that_it_names(module, monkeypatch, tmp_path):
    """And all kernels are compiled before anything is measured."""
    program, graphs, used = measured(module, monkeypatch, tmp_path)
    rows = json.loads((tmp_path / "dense_candidates.json").read_text())["rows"]
    names = [(us, way.split()[0]) for row in rows for way, us in row["us"].items()]
    assert len(rows) == ROWS
    assert len(names) == len(graphs) > 3 * ROWS
    for us, name in names:
        launched = graphs[round(4 * us) - 401]
        assert launched - {"dense_combine"} == {name}
    compiled = {kernel for kernel in all_kernels() if re.search(program.KERNELS, repr(kernel))}
    assert used <= compiled


def test_the_record_is_read_as_calls_of_dense_attention(module, monkeypatch, tmp_path):
    measured(module, monkeypatch, tmp_path)
    recorded = module("recorded")
    monkeypatch.setitem(recorded.FOLDERS, "h200", tmp_path)
    found = list(recorded.candidates("h200", "dense_candidates"))
    assert len(found) == ROWS
    data = module("fit_times").Candidates(found)
    for row in found:
        assert isinstance(row.problem, DenseProblem)
        assert choose_dense(row.problem)[:2] in row.us
        for kernel, division in row.us:
            assert DENSE_KERNELS[kernel].fits(row.problem, division)
    assert sum(data.offered) >= ROWS


def test_another_gpu_needs_no_more_than_these_programs(module, monkeypatch, tmp_path):
    """Of another generation, too: the portable kernel is measured, and gets times of that GPU."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    program, recorded, fit_times = module("candidates"), module("recorded"), module("fit_times")
    gpu = FakeGPU(monkeypatch, 108, 80)
    times = iter(range(100, 10**6))

    def graph_of(calls: Any) -> None:
        gpu.used = 0
        for call in calls:
            call()

    calls = ((kind, h, n) for n in (1, 2, 3) for kind, h in (("V32", 64), ("bf16", 8), ("bf16", 16)))
    (folder := tmp_path / "a100").mkdir()
    changes = [
        (program, {"graph_of": graph_of, "environment": lambda: {"gpu": "NVIDIA A100-SXM4-80GB"}, "TOKENS": 2048,
                   "replay_times": lambda graphs, repeats: [float(next(times)) for _ in graphs],
                   "load_kernels": lambda which: None,
                   "drawn": lambda rng: (program.decode_row(rng, *call) for call in calls)}),
        (torch.cuda, {"memory_reserved": lambda: 0}), (recorded, {"FOLDERS": {"a100": folder}}),
        (fit_times, {"FOLDERS": {"a100": folder}, "TIMES": tmp_path, "STEPS": 5}),
    ]  # fmt: skip
    run(monkeypatch, program, changes, folder)
    rows = list(recorded.candidates("a100"))
    assert {row.problem.gpu.capability for row in rows} == {80}
    assert {kernel for row in rows for kernel, _ in row.us} == {"portable"}
    monkeypatch.setattr(sys, "argv", ["fit_times.py"])
    fit_times.main()
    written: dict[str, Any] = {}
    exec((tmp_path / "a100.py").read_text(), written)
    assert list(written["TIMES"]) == ["portable"]
