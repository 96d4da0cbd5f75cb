"""`logits` on an emulated GPU: keys in rows and in pages, in whole and in compact rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupy_mla.calls.operation import forget_calls

from ..ops import test_candidates as of_candidates
from ..ops import test_logits as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .again import again
from .emulator import EmulatedGPU

OPERANDS = pytest.mark.parametrize("emulated", [90, 89], indirect=True)  # of f16, and of bytes


@pytest.fixture(params=[90])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rng_seed: int) -> Iterator[EmulatedGPU]:
    """An emulated GPU of the compute capability that the test's parameter says."""
    pytest.importorskip("torch")  # whose memory it has
    forget_calls()
    yield EmulatedGPU(monkeypatch, capability=request.param, seed=rng_seed)
    forget_calls()


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("CUPY_MLA_INDEXER_KERNELS", "logits")


test_rows = again(of_operation.test_ragged, (3, 70, 64, True), (5, 129, 24, True))
test_compact_rows = again(of_operation.test_compact_rows, (5, 129, 24, True))
test_pages = again(of_operation.test_paged, (4, 3, 64, 15, 90, True))


@OPERANDS
@pytest.mark.parametrize("e5m2", of_operation.E5M2)
def test_rows_of_e5m2(kind, rng, e5m2):
    of_operation.test_ragged_of_e5m2(kind, rng, 3, 70, 64, e5m2, True)


@OPERANDS
@pytest.mark.parametrize("token_bytes", [of_candidates.FP8, of_candidates.MXFP4])
def test_queries_unlike_keys(kind, rng, token_bytes):
    of_candidates.test_queries_unlike_keys(kind, rng, 3, 2, 32, 16, 100, token_bytes)


@OPERANDS
@pytest.mark.parametrize("apart", [15, 28])
def test_scales_far_apart(kind, rng, apart):
    of_mxfp4.test_logits_of_scales_far_apart(kind, rng, apart)


@pytest.mark.parametrize(("b", "n", "heads", "block_size", "longest"), [(3, 2, 32, 16, 100), (2, 7, 48, 7, 65)])
def test_pages_of_mxfp4(kind, rng, b, n, heads, block_size, longest):
    for exact in (False, True):
        of_candidates.test_logits_over_mxfp4(kind, rng, b, n, heads, block_size, longest, exact)


test_small_groups = again(of_candidates.test_small_groups_are_exact, (20,), (28,))
test_far_groups = again(of_candidates.test_far_groups)

FORMATS = (of_candidates.FP8, of_candidates.MXFP4)
SIZES = ((9, 64, 16, 3), (5, 8, 1, 1), (3, 32, 8, 30))

test_candidates = again(of_candidates.test_candidate_logits, *((*size, fmt) for size in SIZES for fmt in FORMATS))
test_hostile_candidates = again(of_candidates.test_hostile_candidates)
# Of all rows there are no logits.
test_rows_of_candidates = again(of_candidates.test_select_candidate_rows, *((k, FORMATS[1]) for k in (1, 20, 39)))
