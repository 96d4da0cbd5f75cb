"""`pack_keys` on an emulated GPU: every byte, infinity and NaN."""

from __future__ import annotations

import pytest

from ..ops import test_indexer as of_operation
from ..ops import test_mxfp4 as of_mxfp4
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize(("tokens", "block_size"), [(1, 1), (63, 3), (130, 64)])
def test_bytes(kind, rng, tokens, block_size, scale_format):
    of_operation.test_pack(kind, rng, tokens, block_size, scale_format)


def test_infinity_and_nan(kind):
    of_operation.test_pack_infinities_and_nan(kind)


@pytest.mark.parametrize(("tokens", "block_size"), [(1, 1), (63, 3), (130, 64)])
def test_mxfp4(kind, rng, tokens, block_size):
    of_mxfp4.test_pack(kind, rng, tokens, block_size)


def test_every_bfloat16_as_mxfp4(kind):
    of_mxfp4.test_every_bfloat16(kind)
