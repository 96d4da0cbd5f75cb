"""`few_heads_sm90` on an emulated GPU, beside the oracle: tiles without a valid entry. Lists are drawn anew in each
run; tests/cuda/attention asks a GPU for more of them."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import oracle
from ..cases import Paged, check_decode, off_zero, paged, queries, sinks, with_holes
from .emulator import needs_compiler

pytestmark = needs_compiler

KERNEL = "few_heads_sm90"


@pytest.fixture(autouse=True)
def forced(emulated, monkeypatch):
    monkeypatch.setenv(VARIABLE, KERNEL)
    yield
    assert KERNEL in emulated.launched


def drawn(rng: np.random.Generator, fmt: oracle.Format, most_heads: int) -> tuple[np.ndarray, Paged]:
    """A batch of short lists with holes or lengths, or both."""
    b, s_q, topk = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.choice([1, 63, 65, 300, 390, 700]))
    main = paged(rng, fmt, b, s_q, topk, int(rng.choice([1, 61, 64])), lengths=bool(rng.integers(2)))
    if main.length is None or rng.integers(2):
        with_holes(rng, main)
    return off_zero(fmt, queries(rng, b, s_q, int(rng.integers(1, most_heads + 1)), fmt.d_qk), main), main


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
def test_tiles_without_an_entry(kind, rng, fmt):
    """By clusters, partial results and CTAs alone."""
    for num_splits in (1, 2, 17, None):
        q, main = drawn(rng, fmt, 16)
        check_decode(kind, fmt, q, main, sink=sinks(rng, q.shape[2]), num_splits=num_splits)
