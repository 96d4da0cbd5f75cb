"""The scratch memory of gradients' calls: within `max_workspace_bytes`, and as docs/training.md says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cupy_mla.arguments import IndexerLoss, PrefillBackward, Target
from cupy_mla.arrays import Array
from cupy_mla.bridges import describe
from cupy_mla.cuda import backward, training
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.program import Buffer, Clear, Launch, Pointer
from cupy_mla.dtypes import BFLOAT16, FLOAT32, INT32

LIMITS = (1, 40 << 20, 700 << 20, 2 << 30, 40 << 30)
FEW = 24  # bytes of a token, and of a call, that the documentation leaves out


def array(*shape: int, dtype: np.dtype = BFLOAT16) -> Array:
    """One of any size, which takes no memory."""
    return describe("array", np.broadcast_to(np.zeros((), dtype), shape))


def scratch_of(program: Sequence[Any]) -> set[Buffer]:
    """Of all steps."""
    found = set()
    for step in program:
        fields = [step.pointer] if isinstance(step, Clear) else step.params.values
        found |= {field.buffer for field in fields if isinstance(field, Pointer)}
    return found


def check(
    program: Sequence[Any], limit: int, tokens: int, of_call: int, of_token: int, of_sums: int, group: int = 1,
    wave: int = 1,
) -> int:  # fmt: skip
    """All that a program's steps name is at most the limit, or what one token needs, or one group, and nearly the limit
    where that makes chunks: another wave, or group if no wave fits, would be above it.

    Args:
        of_call, of_token, of_sums: bytes of the call, of each token of a chunk, and of calls with several chunks.
        group: tokens that stay in one chunk.
        wave: tokens of whose multiples chunks are, if so many fit.

    Returns:
        the number of chunks.
    """
    used = sum(buffer.nbytes for buffer in scratch_of(program))
    chunks = sum({*step.params.of.index} >= {"contributions", "counts"} for step in program if isinstance(step, Launch))
    of_call, of_token = of_call + FEW, of_token + FEW
    assert chunks > 0
    if chunks == 1:
        assert used <= of_call + tokens * of_token
        assert used <= max(limit, of_call + group * of_token)
        return 1
    assert limit < of_call + tokens * of_token, "one chunk is enough"
    least = of_call + of_sums + group * of_token
    assert used <= max(limit, least)
    multiple = wave if of_call + of_sums + wave * of_token <= limit else group
    assert used > max(limit, least) - (1 + multiple) * of_token, "chunks are smaller than they may be"
    return chunks


def takes_result_for_float32(step: Any) -> bool:
    """Whether a step adds up rows and writes or reads float32 where the call's result is."""
    if not isinstance(step, Launch) or "total" not in step.params.of.index:
        return False
    total, out, wide = (step.params.values[step.params.of.index[name]] for name in ("total", "out", "wide"))
    return bool(isinstance(total, int) and total) or bool(wide and isinstance(out, int))


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(
    ("s_q", "h_q", "d_qk", "s_kv", "topk"),
    [
        (300, 1, 576, 500, 100), (4096, 64, 576, 4096, 2048), (4096, 128, 512, 70000, 2048),
        (131072, 128, 576, 131072, 2048), (20000, 40, 512, 3000, 513), (420, 128, 576, 4096, 2048),
        (850, 16, 576, 4096, 2048),
    ],
)  # fmt: skip
def test_backward_keeps_to_the_limit(capability, sinks, dtype, s_q, h_q, d_qk, s_kv, topk) -> None:
    shared_kb = {80: 163, 86: 99, 90: 227}[capability]
    rows, heads = array(s_kv, d_qk), array(s_q, h_q, dtype=FLOAT32)
    chunks = []
    for limit in LIMITS[(s_q > 300) + (s_q > 5000) :]:
        a = PrefillBackward(
            q=array(s_q, h_q, d_qk), kv=rows, indices=array(s_q, topk, dtype=INT32), out=array(s_q, h_q, 512),
            lse=heads, dout=array(s_q, h_q, 512), sm_scale=1.0, sink=array(h_q, dtype=FLOAT32) if sinks else None,
            length=None, d_lse=None, accumulate=False, max_workspace_bytes=limit, dq=array(s_q, h_q, d_qk),
            dkv=array(s_kv, 1, d_qk, dtype=dtype), d_sink=array(h_q, dtype=FLOAT32) if sinks else None,
        )  # fmt: skip
        blocks = -(-h_q // (32 if shared_kb == 99 else 64))
        group = next(n for n in (8, 4, 2, 1) if n * h_q <= 64 or n == 1) if capability == 90 else 1
        of_token = 2 * topk * d_qk * blocks + (13 if group > 1 else 8) * topk + s_kv // (1 if group > 1 else 2)
        of_sums = 4 * s_kv * d_qk if dtype == BFLOAT16 else 0
        of_call = 4 * s_q * h_q * sinks + (s_q + s_kv if group > 1 else 0)
        program = backward.sparse_prefill_backward(Gpu(0, 132, capability, shared_kb), a)
        assert dtype == FLOAT32 or not any(map(takes_result_for_float32, program))
        chunks.append(check(program, limit, s_q, of_call, of_token, of_sums, group, 132 * group))
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == -(-s_q // group) or s_q > 300
    assert chunks[-1] == 1 or s_q > 5000


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("scale_format", [None, "fp32"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32, None], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "topk"),
    [(300, 1, 500, 100), (4096, 64, 4096, 2048), (3000, 20, 70000, 2048), (5000, 128, 3000, 513)],
)
def test_loss_keeps_to_the_limit(ranges, scale_format, dtype, tokens, heads, keys, topk) -> None:
    """Over lists and ranges of keys, with gradients of both dtypes and without."""
    width, gradients, quantized = keys if ranges else topk, dtype is not None, scale_format is not None
    given = {name: array(tokens, dtype=INT32) if ranges else None for name in ("starts", "ends")}
    chunks = []
    for limit in LIMITS[tokens > 300 :]:
        a = IndexerLoss(
            q_index=array(tokens, heads, 128), k_index=array(keys, 128), w=array(tokens, heads, dtype=FLOAT32),
            target=array(tokens, width, dtype=FLOAT32), length=None, loss_coeff=1.0, counted=None, per_token=False,
            indices=None if ranges else array(tokens, topk, dtype=INT32), relu=True, scale_format=scale_format,
            gradients=gradients, accumulate=False, max_workspace_bytes=limit, loss=array(dtype=FLOAT32),
            dq_index=array(tokens, heads, 128, dtype=dtype) if gradients else None,
            dk_index=array(keys, 128, dtype=dtype) if gradients else None,
            dw=array(tokens, heads, dtype=FLOAT32) if gradients else None, **given,
        )  # fmt: skip
        padded, signs = -(-width // 64) * 64, max(16, 1 << (heads - 1).bit_length()) // 8
        of_token = width * ((8 if ranges else 16) + 256 * gradients) + padded * (4 + 4 * quantized + signs) + keys // 2
        of_call = 4 * tokens + 260 * keys * quantized
        of_sums = 4 * keys * 128 if dtype == BFLOAT16 else 0
        program = training.indexer_loss(Gpu(0, 132, 90, 227), a)
        chunks.append(check(program, limit, tokens, of_call, of_token + 260 * heads * quantized, of_sums))
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == tokens or tokens > 300


def test_targets_need_no_scratch_memory() -> None:
    """Of `attention_target` and `dense_attention_target`, and `dense_lse`."""
    tokens, rows = 5000, 5000
    ranges, lse = array(tokens, dtype=INT32), array(tokens, 128, dtype=FLOAT32)
    lists = array(tokens, 2048, dtype=INT32)
    for indices, starts, width in ((lists, None, 2048), (None, ranges, rows)):
        out = array(tokens, width, dtype=FLOAT32)
        a = Target(
            array(tokens, 128, 576), array(rows, 576), 1.0, lse, None, indices, None, starts, starts, out
        )  # fmt: skip
        assert not scratch_of(training.attention_target(Gpu(0, 132, 90, 227), a))
    assert not scratch_of(training.dense_lse(Gpu(0, 132, 90, 227), a._replace(lse=None, out=lse)))
