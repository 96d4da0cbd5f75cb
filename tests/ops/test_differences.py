"""What docs/from_flashmla_and_vllm.md says of operations whose results differ from vLLM's of the same name."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import cupy_mla
from tests.kinds import E4M3

BLOCK_SIZE, LARGEST = 4, 2**31 - 1


def i32(kind, *values) -> object:
    return kind.put(np.array(values, np.int32))


def test_blocks_that_are_missing(kind) -> None:
    """-1 whatever the offset, and not counted."""
    table, positions = i32(kind, [-1, 7]), i32(kind, [0, 3, 4, 8])
    slots, counts = cupy_mla.convert_req_index_to_global_index(
        i32(kind, 0), table, positions, BLOCK_SIZE, return_valid_counts=True
    )
    assert (kind.take(slots).tolist(), kind.take(counts).tolist()) == ([[28, -1, -1, -1]], [1])
    slots, lens = cupy_mla.compute_global_topk_indices_and_lens(
        positions, i32(kind, 0), table, BLOCK_SIZE, kind.put(np.array([True]))
    )
    assert (kind.take(slots).tolist(), kind.take(lens).tolist()) == ([[-1, -1, 28, -1]], [1])


def test_slots_beyond_int32(kind) -> None:
    table, position = i32(kind, [LARGEST // BLOCK_SIZE, LARGEST]), i32(kind, [3, 4])
    slots = cupy_mla.convert_req_index_to_global_index(i32(kind, 0), table, position, BLOCK_SIZE)
    assert kind.take(slots).tolist() == [[LARGEST, -1]]


def test_compressed_slots(kind) -> None:
    """Rows of two tokens: a block that is missing, positions outside the table, tokens from num_tokens on."""
    starts, table = i32(kind, 0, 4), i32(kind, [5, -1])
    out = kind.put(np.full(6, 77))
    for length, num_tokens, want in (
        (8, 4, [-1, 22, -1, 23]), (10, 4, [-1, 23, -1, -1]), (18, 4, [-1] * 4), (1, 4, [-1] * 4), (8, 2, [-1, 22]),
    ):  # fmt: skip
        got = cupy_mla.get_compressed_slot_mapping(num_tokens, starts, i32(kind, length), table, BLOCK_SIZE, 2, out)
        assert kind.take(got).tolist() == want
        assert kind.take(out).tolist() == want + [-1] * (6 - num_tokens)


def test_compressed_rows_that_are_not_there(kind) -> None:
    """-1, and the length has it all the same."""
    rows, lens = cupy_mla.combine_topk_swa_indices(
        i32(kind, [1, 2, -5]), i32(kind, 0, 1), i32(kind, 12), i32(kind, 2), 2, 4, 3, M=8, N=2
    )
    assert kind.take(rows)[0, :6].tolist() == [1, -1, -1, 2, 3, -1]
    assert kind.take(lens).tolist() == [5]


def test_a_scale_of_byte_255(kind) -> None:
    cache = np.zeros((1, BLOCK_SIZE, 584), np.uint8)
    cache.reshape(-1)[0] = 0x38  # 1.0 of token 0
    cache.reshape(-1)[576 * BLOCK_SIZE] = 255
    out = kind.put(np.zeros((1, 1, 512), ml_dtypes.bfloat16))
    one, block = i32(kind, 1), i32(kind, [0])
    cupy_mla.dequantize_and_gather_k_cache(out, kind.put(cache), one, None, block, BLOCK_SIZE, 0)
    assert np.isnan(kind.take(out)[0, 0, :64].astype(np.float32)).all()


def test_tensors_are_quantized_in_float32(kind, rng) -> None:
    """Not in x's dtype, in which some codes would be others."""
    x = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    codes, scale = map(kind.take, cupy_mla.dynamic_per_batched_tensor_quant(kind.put(x)))
    factor = np.float32(448) / np.abs(x.astype(np.float32)).max()
    np.testing.assert_array_equal(codes.view(np.uint8), (x.astype(np.float32) * factor).astype(E4M3).view(np.uint8))
    assert float(scale) == np.float32(1) / factor
