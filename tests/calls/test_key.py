"""What a call's key consists of, and how many keys are remembered."""

from __future__ import annotations

import gc
import random
import tracemalloc
from types import SimpleNamespace

import pytest

from cupy_mla.calls.key import Key, ReadArrays, Remembered, key_of, partition_of
from cupy_mla.cuda.program import Plan
from tests.operations import in_threads


@pytest.mark.long
def test_a_million_sizes_take_bounded_memory():
    """What is kept are the values that were asked for last, and nothing else."""
    remembered = Remembered(1000)

    def traffic(first: int) -> int:
        for size in range(first, first + 500_000):
            if remembered.get(("decode", size, (size, 64))) is None:
                remembered.put(("decode", size, (size, 64)), SimpleNamespace(size=size))
            if size % 100 == 0:
                assert remembered.get(("decode", 0, (0, 64))).size == 0
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before, after = traffic(0), traffic(500_000)
    finally:
        tracemalloc.stop()
    assert len(remembered) == 1000
    assert after < before + 50_000
    assert remembered.get(("decode", 999_999, (999_999, 64))).size == 999_999
    assert remembered.get(("decode", 500_000, (500_000, 64))) is None


def test_the_least_recently_used_goes_first():
    """As in a list that is kept by hand."""
    draw, remembered = random.Random(1), Remembered(7)
    kept: dict[int, int] = {}
    for step in range(5000):
        key = draw.randint(0, 12)
        assert remembered.get(key) == kept.get(key)
        if key in kept:
            kept[key] = kept.pop(key)
        elif draw.random() < 0.5:
            kept[key] = step + 1
            remembered.put(key, step + 1)
            if len(kept) > 7:
                kept.pop(next(iter(kept)))
    remembered.clear()
    assert len(remembered) == 0
    assert remembered.get(3) is None


def test_threads_share_what_is_remembered():
    remembered, wrong = Remembered(50), []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20_000):
            key = draw.randint(0, 99)
            found = remembered.get(key)
            if found is None:
                remembered.put(key, 2 * key + 1)
            elif found != 2 * key + 1:
                wrong.append((key, found))

    in_threads(work, range(4))
    assert not wrong
    assert len(remembered) == 50


def read(values: list[object]) -> tuple[Key, ReadArrays]:
    """A call's key, and what was read of its arrays."""
    return key_of((None, len(values)), partition_of(tuple(map(type, values))), values)


def test_settings_of_other_types_are_other_keys():
    """Though they are equal."""
    values = [1, True, 1.0, "1", None, (1, 2), (True, 2), (1.0, 2), [*"a"], Plan(), 2, 1 + 0j]
    keys = [read([value])[0] for value in values]
    for i, key in enumerate(keys):
        assert [key == other for other in keys] == [i == k for k in range(len(keys))]


def test_all_plans_are_one():
    assert read([Plan()]) == read([Plan()])


@pytest.mark.parametrize("name", ["dtype", "shape", "strides", "alignment", "class", "gradient"])
def test_what_a_key_has_of_a_tensor(name):
    torch = pytest.importorskip("torch")
    plain, whole = torch.zeros(4, 8), torch.zeros(8, 8)
    other = {
        "dtype": torch.zeros(4, 8, dtype=torch.int32), "shape": torch.zeros(5, 8), "strides": whole[::2],
        "alignment": whole.view(-1)[1:33].view(4, 8), "class": torch.nn.Parameter(plain, requires_grad=False),
        "gradient": torch.zeros(4, 8, requires_grad=True),
    }[name]  # fmt: skip
    assert read([plain])[0] == read([torch.ones(4, 8)])[0] != read([other])[0]
    with torch.no_grad():
        assert (read([plain])[0] == read([other])[0]) == (name == "gradient")
    _, (_, addresses, _) = read([plain, other])
    assert addresses == [plain.data_ptr(), other.data_ptr()]
