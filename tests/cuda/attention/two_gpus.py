"""Decode on two GPUs in turn, against the oracle."""

from __future__ import annotations

import numpy as np

import cupy_mla

from ... import oracle
from ...cases import assert_decoded, decode_oracle, paged, queries
from ...kinds import CuPy


def check_two_gpus_in_turn(kind: CuPy, rng: np.random.Generator, fmt: oracle.Format, b: int = 70, s_q: int = 2) -> None:
    """Each has memory of its own for partial results, and says there what has been left."""
    main, q = paged(rng, fmt, b, s_q, 300, 64), queries(rng, b, s_q, 64, fmt.d_qk)
    wanted = decode_oracle(fmt, q, main, sm_scale=0.05)
    arrays = []
    for device in (0, 1):
        with kind.on(device):
            arrays.append([kind.put(a) for a in (q, main.cache, main.indices)])
    results = [(device, cupy_mla.sparse_decode(*arrays[device], 0.05)) for _ in range(3) for device in (0, 1)]
    for device, result in results:
        with kind.on(device):
            assert_decoded(kind, result, wanted)
