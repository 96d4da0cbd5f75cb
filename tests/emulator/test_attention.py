"""Every attention kernel on an emulated GPU, beside the oracle: a few small calls a kernel, drawn anew in each run.

On a machine with a GPU tests/cuda/attention asks for more of them; `--emulate=6` runs those tests on the emulator.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.cuda.attention.choose import KERNELS, VARIABLE

from .. import oracle
from ..cases import check_decode, check_unequal_prefill, off_zero, paged, queries, sinks

FORMATS = {
    "fp8_sm90": (oracle.V32, oracle.V4),
    "portable": oracle.FORMATS,
}
SPLITS = {"bf16_cluster_sm90": (2, 3), "bf16_shares_sm90": (None, 3), "bf16_sm90": (None, 1)}
BF16 = (oracle.BF16_576, oracle.BF16_512)
# portable_99kb is portable, in another shape; fp8_short_sm90 has lists of its own (test_fp8_short_sm90.py).
KERNELS = [name for name in KERNELS if name not in ("portable_99kb", "fp8_short_sm90")]
DECODERS = [(name, fmt) for name in KERNELS if name != "bf16_grouped_sm90" for fmt in FORMATS.get(name, BF16)]


def some_heads(rng: np.random.Generator, name: str) -> int:
    """As many as the kernel is for, and a tile that is not full."""
    return int(rng.integers(1, 20) if "few_heads" in name else rng.integers(33, 80))


@pytest.fixture
def forced(request, emulated, kind, monkeypatch):
    """The kind, with a kernel that calls are to run."""

    def force(name: str) -> None:
        monkeypatch.setenv(VARIABLE, name)
        request.addfinalizer(lambda: _assert_ran(name, emulated.launched))

    return force


def _assert_ran(name: str, launched: set[str]) -> None:
    assert name in launched, f"{name} was never launched, only {sorted(launched)}"


@pytest.mark.long(sample=6)
@pytest.mark.parametrize(("name", "fmt"), DECODERS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_decode(kind, forced, rng, name, fmt):
    """Lists with holes, of all lengths, one without a row, sinks, gaps, and splits as they come."""
    forced(name)
    b, h_q, topk = int(rng.integers(2, 5)), some_heads(rng, name), int(rng.integers(130, 400))
    main = paged(rng, fmt, b, 1, topk, int(rng.choice([1, 16, 64])), lengths=True)
    main.length[:2] = 0, topk
    splits = rng.choice(SPLITS.get(name, (None, 1, 2, 5)))
    q = off_zero(fmt, queries(rng, b, 1, h_q, fmt.d_qk), main)
    check_decode(kind, fmt, q, main, sink=sinks(rng, h_q), num_splits=splits, out_gaps=(0, 1, 2, 3))


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(("name", "fmt"), DECODERS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_full_lists_and_an_extra_cache(kind, forced, rng, name, fmt):
    """Without lengths and holes. The extra cache's lists end in -1."""
    forced(name)
    h_q = some_heads(rng, name)
    main = paged(rng, fmt, 2, 2, 192, 64, invalid=0)
    extra = None
    if name not in ("bf16_cluster_sm90", "bf16_shares_sm90", "bf16_sm90"):
        extra = paged(rng, fmt, 2, 2, 100, 16, gap=1, invalid=0)
        extra.indices[..., 50:] = -1
    splits = 2 if name == "bf16_cluster_sm90" else None
    check_decode(kind, fmt, queries(rng, 2, 2, h_q, fmt.d_qk), main, extra, num_splits=splits)


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("fp8_sm90", "bf16_cluster_sm90")])
def test_prefill(kind, forced, rng, name):
    """Lists of all lengths, sinks, and strides of q, kv and out."""
    forced(name)
    s_q = 24 if name == "bf16_grouped_sm90" else 5
    check_unequal_prefill(kind, rng, s_q, int(rng.integers(9, 17)), int(rng.choice([512, 576])))


@pytest.mark.long
def test_no_list_has_a_row(kind, rng, emulated):
    """Whichever kernels serve such calls."""
    for fmt in oracle.FORMATS:
        main = paged(rng, fmt, 3, 1, 130, 64)
        main.indices[...] = -1
        out, lse = check_decode(kind, fmt, queries(rng, 3, 1, 40, fmt.d_qk), main)
        assert not out.astype(np.float32).any()
        assert np.isposinf(lse).all()
    assert emulated.launched
