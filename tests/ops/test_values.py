"""Checks of what arrays hold: off, a wrong number changes nothing but results; on, it is an error that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import arrays
from tests import kinds
from tests.fake_gpu import FakeGPU, HostCuPy
from tests.kinds import NumPy, installed
from tests.operations import OPERATIONS, Call
from tests.test_docs import python


def entry(name: str, at: tuple[int, ...], value: int) -> dict[str, tuple[tuple[int, ...], int]]:
    return {name: (at, value)}


# An operation, entries of its arrays that are changed, the error and what it says. The calls are those of the table.
WRONG = {
    "index beyond the rows": ("sparse_prefill", entry("indices", (1, 0, 3), 128), IndexError,
                              r"^indices\[1, 0, 3\] is 128, there are 128 rows"),
    "negative length": ("sparse_prefill", entry("topk_length", (2,), -1), IndexError,
                        r"^topk_length\[2\] is -1, a length cannot be negative"),
    "length beyond topk": ("sparse_prefill", entry("topk_length", (0,), 65), IndexError,
                           r"^topk_length\[0\] is 65, the lists have a topk of 64"),
    "slot beyond the cache": ("sparse_decode", entry("indices", (1, 1, 4), 128), IndexError,
                              r"^indices\[1, 1, 4\] is 128, there are 128 rows"),
    "slot beyond the extra cache": ("sparse_decode",
                                    entry("extra_topk_length", (0,), 3) | entry("extra_indices", (0, 1, 0), 10**6),
                                    IndexError,
                                    r"^extra_indices\[0, 1, 0\] is 1000000, there are 128 rows"),
    "extra length beyond topk": ("sparse_decode", entry("extra_topk_length", (1,), 34), IndexError,
                                 r"^extra_topk_length\[1\] is 34, the lists have a topk of 33"),
    "FlashMLA: slot": ("flash_mla_with_kvcache", entry("indices", (1, 1, 4), 128), IndexError, r"^indices\[1, 1, 4\]"),
    "dense: length": ("dense_decode", entry("seq_lens", (1,), 161), IndexError,
                      "^seq_lens: request 1 has 161 tokens, its row of the block table holds 160"),
    "dense: negative": ("dense_decode", entry("seq_lens", (2,), -1), IndexError, r"^seq_lens\[2\] is -1"),
    "dense: block": ("dense_decode", entry("seq_lens", (2,), 70) | entry("block_table", (2, 2), 4), IndexError,
                     "^block_table: block 2 of request 2 is 4, the cache has 4 blocks"),
    "packing: slot": ("concat_and_cache_mla", entry("slot_mapping", (3,), 128), IndexError,
                      r"^slot_mapping\[3\] is 128, the cache has 128 slots"),
    "packing: twice": ("concat_and_cache_mla", entry("slot_mapping", (3, 5), 77), ValueError,
                       r"^slot_mapping: tokens \d+ and \d+ both go to slot 77"),
    "packing V4: twice": ("quantize_and_insert_k_cache", entry("slot_mapping", (3, 5), 77), ValueError,
                          r"^slot_mapping: tokens \d+ and \d+ both go to slot 77"),
    "packing keys: twice": ("indexer_k_quant_and_cache", entry("slot_mapping", (3, 5), 77), ValueError,
                            r"^slot_mapping: tokens \d+ and \d+ both go to slot 77"),
    "gather: negative length": ("cp_gather_and_upconvert_fp8_kv_cache", entry("seq_lens", (1,), -2), IndexError,
                                r"^seq_lens\[1\] is -2, a length cannot be negative"),
    "gather: block": ("cp_gather_and_upconvert_fp8_kv_cache", entry("block_table", (0, 0), 4), IndexError,
                      "^block_table: block 0 of request 0 is 4, the cache has 4 blocks"),
    "gather: no block": ("cp_gather_and_upconvert_fp8_kv_cache", entry("block_table", (0, 0), -1), IndexError,
                         "^block_table: block 0 of request 0 is -1"),
    "gather: outside": ("cp_gather_and_upconvert_fp8_kv_cache", entry("workspace_starts", (0,), -1), IndexError,
                        "^workspace_starts: request 0 takes rows -1 to 8, dst has 60"),
    "gather: overlap": ("cp_gather_and_upconvert_fp8_kv_cache", entry("workspace_starts", (0,), 1), ValueError,
                        "^workspace_starts: rows of requests 0 and 2 overlap"),
    "gather V4: block": ("dequantize_and_gather_k_cache", entry("block_table", (0, 0), 4), IndexError,
                         "^block_table: block 0 of request 0 is 4"),
    "gather V4: negative": ("dequantize_and_gather_k_cache", entry("gather_lens", (0,), -1), IndexError,
                            r"^gather_lens\[0\] is -1"),
    "gather keys: block": ("cp_gather_indexer_k_quant_cache", entry("block_table", (0, 0), -1), IndexError,
                           "^block_table: block 0 of request 0 is -1"),
    "gather keys: down": ("cp_gather_indexer_k_quant_cache", entry("cu_seq_lens", (1,), 59), IndexError,
                          r"^cu_seq_lens\[2\] is 9, offsets must"),
    "rotation": ("quantize_indexer_q", entry("positions", (3,), 40), IndexError,
                 r"^positions\[3\] is 40, the table of angles has 40 rows"),
    "logits: start": ("indexer_logits", entry("starts", (2,), -1), IndexError,
                      r"^starts\[2\] is -1, a range cannot start below 0"),
    "logits: end": ("indexer_logits", entry("ends", (6,), 301), IndexError, r"^ends\[6\] is 301, rows end at 300"),
    "paged logits: length": ("paged_indexer_logits", entry("context_lens", (1,), 96), IndexError,
                             r"^context_lens\[1\] is 96, max_context_len is 95"),
    "paged logits: block": ("paged_indexer_logits",
                            entry("context_lens", (2,), 70) | entry("block_table", (2, 1), 4), IndexError,
                            "^block_table: block 1 of request 2 is 4, the cache has 4 blocks"),
    "topk: end": ("topk_indices", entry("ends", (0,), 5001), IndexError, r"^ends\[0\] is 5001, rows end at 5000"),
    "select: request": ("select_rows", entry("req_id", (1,), 3), IndexError,
                        r"^req_id\[1\] is 3, there are 3 requests"),
    "select: start": ("select_rows", entry("starts", (0,), -4), IndexError, r"^starts\[0\] is -4"),
    "paged select: negative": ("select_rows_paged", entry("context_lens", (0,), -1), IndexError,
                               r"^context_lens\[0\] is -1, a length cannot be negative"),
    "request": ("convert_req_index_to_global_index", entry("req_id", (7,), 3), IndexError,
                r"^req_id\[7\] is 3, there are 3 requests"),
    "prefill": ("convert_req_index_to_global_index", entry("prefill_request_ids", (7,), 3), IndexError,
                r"^prefill_request_ids\[7\] is 3, there are 3 prefills"),
    "prefill's rows": ("convert_req_index_to_global_index", entry("prefill_workspace_starts", (1,), -1), IndexError,
                       r"^prefill_workspace_starts\[1\] is -1"),
    "window: offsets": ("compute_swa_indices_and_lens", entry("query_start_loc", (2,), 1), IndexError,
                        r"^query_start_loc\[2\] is 1, offsets must"),
    "window: length": ("compute_swa_indices_and_lens", entry("seq_lens", (1,), -1), IndexError,
                       r"^seq_lens\[1\] is -1"),
    "window: image": ("compute_swa_indices_and_lens", entry("left_visible", (4,), 50), IndexError,
                      r"^left_visible \+ right_visible\[4\] is \d+, the largest image has 50 tokens"),
    "window: visible": ("compute_swa_indices_and_lens", entry("right_visible", (4,), -1), IndexError,
                        r"^right_visible\[4\] is -1"),
    "gather lens": ("compute_prefill_gather_lens", entry("seq_lens", (2,), -1), IndexError, r"^seq_lens\[2\] is -1"),
    "combine": ("combine_topk_swa_indices", entry("gather_lens", (2,), -1), IndexError, r"^gather_lens\[2\] is -1"),
    "combine: image": ("combine_topk_swa_indices", entry("right_visible", (7,), 50), IndexError,
                       r"^left_visible \+ right_visible\[7\] is \d+, the largest image has 50 tokens"),
    "compressed slots": ("get_compressed_slot_mapping", entry("query_start_loc", (0,), -1), IndexError,
                         r"^query_start_loc\[0\] is -1"),
    "C128A: position": ("build_c128a_topk_metadata", entry("positions", (4,), -1), IndexError,
                        r"^positions\[4\] is -1"),
    "C128A: request": ("build_c128a_topk_metadata", entry("token_to_req", (4,), -1), IndexError,
                       r"^token_to_req\[4\] is -1"),
    "packing V4: slot": ("quantize_and_insert_k_cache", entry("slot_mapping", (3,), 2**40), IndexError,
                         r"^slot_mapping\[3\] is 1099511627776, the cache has 128 slots"),
    "packing keys: slot": ("indexer_k_quant_and_cache", entry("slot_mapping", (3,), 128), IndexError,
                           r"^slot_mapping\[3\] is 128, the cache has 128 slots"),
    "unpacking": ("unpack_rows", entry("slots", (1,), 128), IndexError, r"^slots\[1\] is 128, the cache has 128 slots"),
    "gather: beyond": ("cp_gather_and_upconvert_fp8_kv_cache", entry("workspace_starts", (0,), 55), IndexError,
                       "^workspace_starts: request 0 takes rows 55 to 64, dst has 60"),
    "gather V4: table": ("dequantize_and_gather_k_cache", entry("seq_lens", (1,), 65), IndexError,
                         "^seq_lens: request 1 has 65 tokens, its row of the block table holds 64"),
    "gather V4: room": ("dequantize_and_gather_k_cache", entry("gather_lens", (1,), 56) | entry("seq_lens", (1,), 60),
                        IndexError, "^gather_lens: 56 tokens of request 1 are asked for, out has room for 55"),
    "gather keys: end": ("cp_gather_indexer_k_quant_cache", entry("cu_seq_lens", (3,), 61), IndexError,
                         "^cu_seq_lens: ends at 61, dst_k has 60 rows"),
    "slots: position": ("slots_of", entry("positions", (1,), 64), IndexError,
                        r"^positions\[1\] is 64, a request's row of the block table holds 64"),
    "slots: request": ("slots_of", entry("request_ids", (0,), 3), IndexError, r"^request_ids\[0\] is 3, there are 3"),
    "candidates: request": ("candidate_logits", entry("req_id", (1,), 3), IndexError, r"^req_id\[1\] is 3"),
    "a rank's lengths": ("local_seq_lens", entry("seq_lens", (1,), -2), IndexError, r"^seq_lens\[1\] is -2"),
    "backward: row": ("sparse_prefill_backward", entry("indices", (1, 0, 3), 128), IndexError, r"^indices\[1, 0, 3\]"),
    "target: row": ("attention_target", entry("indices", (1, 0, 3), 128), IndexError, r"^indices\[1, 0, 3\] is 128"),
    "loss: key": ("indexer_loss", entry("indices", (1, 0, 3), 128), IndexError, r"^indices\[1, 0, 3\] is 128"),
    "dense lse: end": ("dense_lse", entry("ends", (1,), 129), IndexError, r"^ends\[1\] is 129, rows end at 128"),
    "dense loss: end": ("dense_indexer_loss", entry("ends", (1,), 129), IndexError, r"^ends\[1\] is 129"),
}  # fmt: skip


def wrong_call(case: str, rng: np.random.Generator) -> tuple[Call, type[Exception], str]:
    name, changes, error, message = WRONG[case]
    call = OPERATIONS[name](rng)
    for array, (at, value) in changes.items():
        call.arrays[array] = call.arrays[array].copy()
        call.arrays[array][list(at) if "slot_mapping" in array else at] = value
    return call, error, message


def copies(call: Call, kind: NumPy) -> dict[str, Any]:
    return {name: kind.put(array.copy()) for name, array in call.arrays.items()}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers_are_found_when_asked(kind: NumPy, rng: np.random.Generator, case: str) -> None:
    call, error, message = wrong_call(case, rng)
    call.operation(**copies(call, kind), **call.settings)
    given = copies(call, kind)
    with cupy_mla.set_checks(True), pytest.raises(error, match=message):
        call.operation(**given, **call.settings)
    for name in call.written:
        assert kind.take(given[name]).tobytes() == call.arrays[name].tobytes(), f"{name} was written"


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_on_a_gpu(gpu: FakeGPU, rng: np.random.Generator, case: str, library: str) -> None:
    """On a fake one: found before anything is launched, and never under capture."""
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    kind = HostCuPy() if library == "cupy" else kinds.make("torch")
    call, error, message = wrong_call(case, rng)
    given = {name: kind.put(np.ascontiguousarray(array)) for name, array in call.arrays.items()}
    if "cache" in " ".join(given):  # a cache's blocks stay as far apart as they are
        given |= {name: kind.put(array) for name, array in call.arrays.items() if "cache" in name}
    with cupy_mla.set_checks(True), pytest.raises(error, match=message):
        call.operation(**given, **call.settings)
    gpu.capturing = True
    with cupy_mla.set_checks(True), pytest.raises(RuntimeError, match=r"while a CUDA graph is captured.*set_checks"):
        call.operation(**given, **call.settings)
    assert not gpu.log


@pytest.mark.parametrize("name", OPERATIONS)
def test_right_numbers_pass(kind: NumPy, rng: np.random.Generator, name: str) -> None:
    """And give the same results."""
    call = OPERATIONS[name](rng)
    want = call.run(kind)
    with cupy_mla.set_checks(True):
        got = call.run(kind)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in want]


def test_entries_behind_a_length_are_not_looked_at(rng: np.random.Generator) -> None:
    call = OPERATIONS["sparse_prefill"](rng)
    call.arrays["topk_length"][:] = 40
    call.arrays["indices"][:, :, 40:] = 10**6
    with cupy_mla.set_checks(True):
        call.run(NumPy())


# --- the switch -----------------------------------------------------------------------------------------------


WORDS = {
    **dict.fromkeys(("1", "true", "Yes", "ON", " 1 "), "True"),
    **dict.fromkeys(("0", "False", "no", "off", ""), "False"),
    **{text: f"CUPY_MLA_CHECK must be 1, true, yes, on, or 0, false, no, off, got '{text}'" for text in ("2", "tru")},
}  # fmt: skip


def test_environment() -> None:
    """Read when the package is imported; another word is an error."""
    code = f"""
import importlib, os
from cupy_mla import arrays
for os.environ["CUPY_MLA_CHECK"] in {list(WORDS)}:
    try:
        print(importlib.reload(arrays).CHECK_VALUES)
    except ValueError as error:
        print(error)
"""
    result = python("-c", code)
    assert result.stdout.splitlines() == list(WORDS.values()), result.stderr


def test_the_switch_lasts_or_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "CHECK_VALUES", False)
    with cupy_mla.set_checks(True):
        assert arrays.CHECK_VALUES
        with cupy_mla.set_checks(False):
            assert not arrays.CHECK_VALUES
        assert arrays.CHECK_VALUES
    assert not arrays.CHECK_VALUES
    cupy_mla.set_checks(True)
    assert arrays.CHECK_VALUES
    for wrong in (1, "on", None):
        with pytest.raises(TypeError, match=r"^on: expected True or False"):
            cupy_mla.set_checks(wrong)
    assert arrays.CHECK_VALUES
