"""`dense_whole_sm90` on an emulated GPU."""

from __future__ import annotations

import pytest

from .. import dense_hopper
from .emulator import needs_compiler

pytestmark = [needs_compiler, pytest.mark.parametrize("lines", [16, 32, 64])]  # of a work item
REQUESTS = 5


@pytest.fixture(autouse=True)
def runs_it(force, lines):
    force("dense_whole_sm90", f"whole(heads={lines})")


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_requests(kind, rng, lines, heads):
    dense_hopper.some_requests(kind, rng, REQUESTS, heads)


@pytest.mark.long(sample=1)
def test_blocks_that_are_not_there(kind, rng, lines):
    dense_hopper.blocks_that_are_not_there(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
def test_lengths_that_differ_by_a_thousand(kind, rng, lines):
    dense_hopper.lengths_that_differ_by_a_thousand(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
def test_a_call_again_with_other_lengths(kind, rng, lines):
    dense_hopper.a_call_again_with_other_lengths(kind, rng, REQUESTS)


@pytest.mark.long(sample=1)
def test_full_tiles_that_some_lines_see(kind, rng, lines):
    dense_hopper.full_tiles_that_some_lines_see(kind, rng, REQUESTS)
