"""Choices of kernels and divisions: what serves, what is forced, errors, and what a choice costs. Needs no GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

import cupy_mla
from cupy_mla.cuda import driver
from cupy_mla.cuda.attention.choose import EVERY_NAME, EXPLAIN, KERNELS, VARIABLE, asked, choose
from cupy_mla.cuda.attention.divide import Clusters, Segments, Shares, Teams, Whole
from cupy_mla.cuda.attention.kernels import bf16_grouped_sm90, fp8_sm90
from cupy_mla.cuda.attention.problem import Problem
from cupy_mla.cuda.attention.times import module_for, name_of
from cupy_mla.cuda.driver import Gpu
from cupy_mla.layouts import ATTENTION_LAYOUTS, BF16_576, EXTRA_OF, V4_FP8, V32_FP8, Layout

from .h200 import CLUSTERS_AT_ONCE, GPU

A100, L40 = Gpu(0, 108, 80, 163), Gpu(0, 142, 89, 99)


@pytest.fixture(autouse=True)
def h200(monkeypatch) -> Iterator[None]:
    """Clusters as on an H200, and choices that no one forces."""
    monkeypatch.setattr(driver, "clusters_at_once", lambda kernel, device: CLUSTERS_AT_ONCE)
    monkeypatch.delenv(VARIABLE, raising=False)
    choose.cache_clear()
    yield
    choose.cache_clear()


def prefill(heads: int, queries: int, entries: int = 2048, **more: Any) -> Problem:
    return Problem(GPU, BF16_576, True, heads, queries, entries)._replace(**more)


def decode(layout: Layout, heads: int, queries: int, entries: int = 2048, **more: Any) -> Problem:
    return Problem(GPU, layout, False, heads, queries, entries)._replace(**more)


def any_problem(rng: random.Random) -> Problem:
    layout = rng.choice(ATTENTION_LAYOUTS)
    of_prefill = not layout.quantized and rng.random() < 0.3
    found = Problem(
        rng.choice((GPU, GPU, A100, L40)), layout, of_prefill, rng.randint(1, 128),
        rng.choice((1, 2, rng.randint(1, 300), 5000)), rng.choice((0, 1, 100, 2048, rng.randint(1, 20000))),
        uneven=rng.random() < 0.4, aligned=rng.random() < 0.9, groupable=rng.random() < 0.8,
    )  # fmt: skip
    if of_prefill:
        return found
    extra = rng.choice((0, 0, rng.randint(1, 2000)))
    return found._replace(
        extra_entries=extra, flat=not extra and rng.random() < 0.8, batch_invariant=rng.random() < 0.3,
        num_splits=rng.choice((0, 0, 1, rng.randint(2, 16), rng.randint(17, 1024))),
    )  # fmt: skip


def test_every_call_has_a_choice_that_its_kernel_is_built_for():
    rng = random.Random(0)
    for _ in range(3000):
        problem = any_problem(rng)
        kernel, division, us = choose(problem)
        assert KERNELS[kernel].serves(problem), problem
        assert KERNELS[kernel].fits(problem, division), (problem, division)
        assert 0 <= us < float("inf"), problem


def test_whether_a_kernel_serves_does_not_depend_on_sizes():
    """It is looked up by all else."""
    rng = random.Random(4)
    for _ in range(500):
        problem = any_problem(rng)
        other = problem._replace(queries=rng.randint(1, 300), entries=rng.randint(0, 3000), extra_entries=0)
        assert other.kind == problem.kind
        for name, kernel in KERNELS.items():
            assert kernel.serves(problem) == kernel.serves(other), name


def test_all_kinds_of_work_have_times():
    """Of every kernel that is asked for, in all its divisions."""
    rng = random.Random(1)
    for _ in range(1000):
        problem = any_problem(rng)._replace(num_splits=0, batch_invariant=False)
        for name, kernel in KERNELS.items():
            if kernel.serves(problem):
                for division in kernel.candidates(problem._replace(kernel=name, division="any")):
                    words, _, _ = kernel.work(problem, division)
                    assert module_for(problem.gpu).TIMES[name][name_of(words)], (name, words)


@pytest.mark.parametrize("gpu", [A100, L40], ids=["A100", "L40"])
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: f"{layout.name} {layout.d_qk}")
def test_other_gpus_and_unaligned_rows_run_the_portable_kernel(layout, gpu):
    assert choose(decode(layout, 64, 8, gpu=gpu)).kernel == ("portable" if gpu is A100 else "portable_99kb")
    assert choose(decode(layout, 64, 8, aligned=False)).kernel == "portable"
    problem = decode(layout, 64, 8)
    for_hopper = [name for name, kernel in KERNELS.items() if "portable" not in name and kernel.serves(problem)]
    assert (choose(problem).kernel in for_hopper) == bool(for_hopper)


@pytest.mark.parametrize(("layout", "extra"), [(layout, extra) for layout, of in EXTRA_OF.items() for extra in of])
def test_what_reads_an_extra_cache_of_another_layout(layout, extra):
    problem = decode(layout, 64, 8, extra_entries=500, extra_layout=extra)
    able = {"fp8_sm90", "portable", "portable_99kb"}
    assert {name for name, kernel in KERNELS.items() if kernel.serves(problem._replace(kernel=name))} == able
    assert choose(problem).kernel == "fp8_sm90"
    assert choose(problem._replace(gpu=A100)).kernel == choose(problem._replace(aligned=False)).kernel == "portable"


def test_a_gpu_has_the_times_under_its_name():
    modules = {name: module_for(Gpu(0, 132, 90, 227, name)) for name in ("NVIDIA H100 PCIe", "GH200")}
    names = {name: module.__name__.rpartition(".")[2] for name, module in modules.items()}
    assert names == {"NVIDIA H100 PCIe": "h100", "GH200": "h200"}
    assert module_for(A100) is module_for(GPU)  # the nearest


def test_groups_are_for_prefills_of_few_heads_that_can_mask_rows():
    assert choose(prefill(16, 2048)).kernel == "bf16_grouped_sm90"
    for other in (prefill(33, 2048), prefill(16, 2048, groupable=False), decode(BF16_576, 16, 2048)):
        assert choose(other).kernel != "bf16_grouped_sm90"
    assert [bf16_grouped_sm90.group_queries(h) for h in (1, 7, 8, 9, 16, 24, 32)] == [8, 8, 8, 7, 4, 2, 2]


# --- splits that are asked for --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: f"{layout.name} {layout.d_qk}")
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_splits_that_the_caller_wants(layout, heads):
    for splits in (1, 2, 7, 16):
        division = choose(decode(layout, heads, 5, num_splits=splits)).division
        assert (1 if isinstance(division, Whole) else division.splits) == splits


def test_more_splits_than_a_cta_merges_are_fewer():
    assert choose(decode(V32_FP8, 64, 1, num_splits=1000, kernel="fp8_sm90")).division.splits == 256


@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: f"{layout.name} {layout.d_qk}")
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_invariant_choices_do_not_depend_on_the_batch(layout, heads):
    found = {choose(decode(layout, heads, queries, batch_invariant=True))[:2] for queries in (1, 8, 33, 132, 1000)}
    assert len({kernel for kernel, _ in found}) == 1
    assert len({division if isinstance(division, Whole) else division[:2] for _, division in found}) == 1


@pytest.mark.parametrize(
    ("layout", "heads", "kernel", "splits"),
    [
        (V4_FP8, 8, "fp8_sm90", 3),
        (V4_FP8, 128, "fp8_sm90", 3),
        (V32_FP8, 16, "fp8_sm90", 3),
        (V32_FP8, 17, "fp8_sm90", 3),
        (BF16_576, 16, "bf16_few_heads_sm90", 4),
        (BF16_576, 128, "bf16_few_heads_sm90", 4),
    ],
)
def test_kernels_and_splits_of_invariant_calls(layout, heads, kernel, splits):
    found = choose(decode(layout, heads, 50, batch_invariant=True))
    assert (found.kernel, found.division.splits) == (kernel, splits)


def test_splits_of_large_batches_are_taken_in_turn():
    """To the bits of clusters, which are for small ones."""
    small, large = (choose(decode(V32_FP8, 64, queries, batch_invariant=True)).division for queries in (3, 128))
    assert isinstance(small, Clusters)
    assert large == Segments(*small[:2])
    assert {*fp8_sm90.same_bits(small)} == {small, large}


# --- forcing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "division", "found"),
    [
        ("fp8_sm90", "shares", Shares),
        ("fp8_sm90", "clusters(splits=4, cluster=4)", Clusters),
        ("fp8_sm90", "teams(heads=64, splits=3)", Teams),
        (None, "segments(splits=5)", Segments),
        (None, Whole(32), Whole),
        ("portable", Clusters(64, 34, 1), Clusters),
        ("portable_99kb", None, object),
    ],
)
def test_what_is_forced_is_chosen(force, kernel, division, found):
    force(kernel, division)
    name, text = asked()
    chosen = choose(decode(V32_FP8, 64, 20, kernel=name, division=text))
    assert kernel in (None, chosen.kernel)
    assert isinstance(chosen.division, found)
    if not isinstance(division, str | None):
        assert chosen.division == division
    if isinstance(division, str):
        assert all(field in str(chosen.division) for field in division.partition("(")[2].strip(")").split(", "))


def test_forcing_ends_with_its_block(force, monkeypatch):
    monkeypatch.setenv(VARIABLE, "portable")
    force("fp8_sm90")
    with cupy_mla.forced(division="teams"):
        assert asked() == ("portable", "teams")
        with cupy_mla.forced("bf16_few_heads_sm90"):
            assert asked() == ("bf16_few_heads_sm90", "")
        assert asked() == ("portable", "teams")
    assert asked() == ("fp8_sm90", "")


@pytest.mark.parametrize("name", ["few_heads", "sm90", "Portable", "portable ", "0"])
def test_a_name_that_does_not_exist_is_an_error(name):
    with pytest.raises(ValueError, match=rf"^kernel must be one of {', '.join(EVERY_NAME)}, got '{name}'$"):
        cupy_mla.forced(name)
    with pytest.raises(ValueError, match=r"^kernel must be one of .*portable"):
        choose(decode(V32_FP8, 64, 1, kernel=name))


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("bf16_sm90", decode(V32_FP8, 64, 1)),
        ("bf16_sm90", decode(BF16_576, 64, 1, flat=False)),
        ("bf16_sm90", decode(BF16_576, 64, 1, num_splits=2)),
        ("bf16_cluster_sm90", decode(BF16_576, 64, 1, num_splits=1)),
        ("fp8_sm90", decode(BF16_576, 64, 1)),
        ("fp8_sm90", decode(V32_FP8, 64, 1, gpu=L40)),
        ("fp8_short_sm90", decode(V4_FP8, 64, 1)),
        ("bf16_few_heads_sm90", decode(V32_FP8, 8, 1)),
        ("bf16_grouped_sm90", prefill(33, 1000)),
        ("portable", decode(V32_FP8, 8, 1, gpu=L40)),
    ],
)
def test_a_kernel_that_cannot_serve_the_call_is_an_error(kernel, problem):
    """Which says what came and what would serve."""
    with pytest.raises(ValueError) as error:
        choose(problem._replace(kernel=kernel))
    text = str(error.value)
    kind = "prefill" if problem.prefill else "decode"
    assert text.startswith(f"kernel is {kernel}, which cannot serve this call: {kind} of {problem.heads} heads")
    assert text.endswith(" can")
    assert choose(problem).kernel in text


@pytest.mark.parametrize("division", ["whole(heads=48)", "teams(splits=17)", "shares(heads=128)", "clusters(splits=1)"])
def test_a_division_that_does_not_fit_is_an_error(division):
    with pytest.raises(
        ValueError, match=r"^division is .*, which does not fit this call: decode of 64 .*; .*whole\(heads=64\)"
    ):
        choose(decode(V32_FP8, 64, 20, kernel="fp8_sm90", division=division))


# --- what a choice says and costs -----------------------------------------------------------------------------


def test_a_choice_explains_itself_once(monkeypatch, capsys):
    monkeypatch.setenv(EXPLAIN, "1")
    problem = decode(V32_FP8, 64, 77)
    chosen = choose(problem)
    assert choose(problem) is chosen
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first == f"cupy_mla: {problem}"
    assert second == f"  {chosen} is chosen"
    times = [float(line.rsplit(None, 2)[1]) for line in others]
    assert len(times) >= 3
    assert times == sorted(times)
    assert times[0] >= round(chosen.us, 1)


def test_a_batch_invariant_choice_explains_both_of_its_steps(monkeypatch, capsys):
    """Among all candidates, for so many queries as every batch-invariant call is taken to have, then among those of the
    same bits."""
    monkeypatch.setenv(EXPLAIN, "1")
    problem = decode(BF16_576, 16, 300, batch_invariant=True)
    chosen = choose(problem)
    lines = capsys.readouterr().err.splitlines()
    usual, own = (i for i, line in enumerate(lines) if line.startswith("cupy_mla: "))
    assert (usual, lines[own]) == (0, f"cupy_mla: {problem}")
    assert lines[own + 1] == f"  {chosen} is chosen"
    assert own > 2, "no rivals"
    assert {line.split()[0] for line in lines[own + 1 :]} == {chosen.kernel}


def test_a_choice_takes_little_time_and_memory():
    """Loosely: 30 us on a server's host, and a bounded number is remembered."""
    rng = random.Random(2)
    problems = [decode(V32_FP8, 64, 1 + i % 500, rng.randint(1, 40) * 64) for i in range(500)]
    began = time.process_time()
    for problem in problems:
        choose(problem)
    assert (time.process_time() - began) / len(problems) < 1e-3
    assert choose.cache_info().maxsize is not None
