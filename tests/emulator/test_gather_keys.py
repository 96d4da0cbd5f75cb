"""`gather_keys` on an emulated GPU: every byte, numbers out of range, and more requests than a CTA has threads."""

from __future__ import annotations

import pytest

from ..ops import test_indexer as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize(("block_size", "lengths"), [(3, [5, 0, 17]), (64, [130, 1]), (1, [2] * 300)])
def test_bytes(kind, rng, block_size, lengths):
    of_operation.test_gather(kind, rng, block_size, lengths, as_fp8=True)


def test_hostile_numbers(kind, rng):
    of_operation.test_gather_of_hostile_numbers(kind, rng)


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize(("block_size", "lengths"), [(3, [5, 0, 17]), (64, [130, 1])])
def test_mxfp4(kind, rng, block_size, lengths, widened):
    of_mxfp4.test_gather(kind, rng, block_size, lengths, widened)
