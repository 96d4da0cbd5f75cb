"""The rows of the formats' test vectors, and what a row's bytes are told by. Source: the specification's chapter 8."""

from __future__ import annotations

import hashlib

import numpy as np

from .kinds import BF16

VALUE, ROPE_VALUE = np.arange(512), np.arange(64)

LATENT = {
    "A": (((37 * VALUE + 11) % 101 - 50) / 16 * 2.0 ** (VALUE // 128 - 1)).astype(BF16),
    "B": np.zeros(512, BF16),
}
ROPE = {"A": (((29 * ROPE_VALUE + 7) % 61 - 30) / 8).astype(BF16), "B": np.zeros(64, BF16)}
LATENT["B"][[0, 5, 17, 300, 301]] = 1, -3.5, 2**-7, 448, 0.75
ROPE["B"][0] = 0.5


def told(row: bytes) -> tuple[str, str]:
    """The first 8 bytes, and the start of the hash of all."""
    return row[:8].hex(), hashlib.sha256(row).hexdigest()[:16]
