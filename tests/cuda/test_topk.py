"""Which shape of the top-k kernel serves a call."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.bridges import describe
from cupy_mla.cuda import logits, topk
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.structs import LOGITS
from cupy_mla.cuda.topk import CLUSTERS, FEW, FEW_LONG, LEAST_CLUSTER_WIDTH, MANY, Shape, choose, kernel, kernels

SMS = 132


def held(threads: int, items: int, per_sm: int, clusters: bool = False, few: bool = False) -> Shape:
    return Shape(threads, items, per_sm, streamed=False, clusters=clusters, few=few)


@pytest.mark.parametrize(
    ("rows", "width", "shape", "cluster"),
    [
        (1, 1, held(512, 8, 2, few=True), 1),
        (SMS, 4097, held(512, 16, 2, few=True), 1),
        (93, 10944, held(1024, 12, 1, few=True), 1),
        (89, 23296, held(1024, 24, 1, few=True), 1),
        (SMS, 32768, FEW, 1),
        (SMS, 32769, FEW_LONG, 1),
        (12, 12864, held(1024, 4, 1, True), 4),
        (16, 17664, held(1024, 8, 1, True), 4),
        (8, 32768, held(1024, 4, 1, True), 8),
        (13, 32768, held(1024, 4, 1, True), 8),
        (14, 32768, held(1024, 8, 1, True), 4),
        (16, 131072, CLUSTERS, 4),
        (64, 17664, held(1024, 20, 1, few=True), 1),
        (64, 32768, FEW, 1),
        (64, 131072, FEW_LONG, 1),
        (64, 131073, CLUSTERS, 2),
        (1, 1 << 20, CLUSTERS, 8),
        (SMS + 1, 4096, held(512, 8, 2), 1),
        (8 * SMS, 8192, held(512, 16, 3), 1),
        (8 * SMS + 1, 8192, held(256, 32, 4), 1),
        (8192, 6145, held(256, 32, 4), 1),
        (8192, 6144, held(512, 12, 3), 1),
        (168, 4672, held(512, 12, 3), 1),
        (518, 9408, held(512, 20, 2), 1),
        (1207, 12672, held(512, 28, 2), 1),
        (1500, 16384, held(512, 32, 2), 1),
        (1047, 20032, MANY, 1),
    ],
)
def test_on_hopper(rows: int, width: int, shape: Shape, cluster: int) -> None:
    assert choose(rows, width, SMS, True) == (shape, cluster)


def test_any_call_has_a_kernel_that_holds_or_streams_its_rows() -> None:
    compiled = set(kernels())
    for rows in (1, 2, 7, 12, 13, 16, 17, 33, 66, 67, 108, 109, 132, 133, 5000):
        for width in (0, 1, 4096, 4097, 8192, 10240, 12288, 12289, 16384, 24576, 24577, 65536, 131072, 131073, 1 << 20):
            for sms in (16, 108, 132):
                for clusters in (False, True):
                    shape, cluster = choose(rows, width, sms, clusters)
                    assert kernel(shape, False) in compiled
                    assert shape.streamed or width <= shape.held * cluster
                    assert shape.clusters == (cluster > 1)
                    assert cluster == 1 or (clusters and rows * cluster <= sms and width > LEAST_CLUSTER_WIDTH)
                    if cluster > 1:
                        assert kernel(shape, False).max_cluster >= cluster


def all_chosen(program) -> list[int]:
    """Of the launches that make logits: queries that see so many keys get none."""
    return [step.params.values[LOGITS.index["all_chosen"]] for step in program if step.params.of is LOGITS]


def test_only_selections_make_no_logits_of_short_rows() -> None:
    gpu = Gpu(0, SMS, 90, 227)
    of = {
        "q8": np.zeros((6, 64, 128), np.uint8), "k8": np.zeros((40, 128), np.uint8), "ks": np.zeros(40, np.float32),
        "w": np.zeros((6, 64), np.float32), "starts": np.zeros(6, np.int32), "ends": np.zeros(6, np.int32),
    }  # fmt: skip
    rows = [describe(name, a) for name, a in of.items()]
    chosen = describe("out", np.zeros((6, 9), np.int32))
    program = topk.select_rows(gpu, *rows, 9, None, None, None, 4 * 40 * 4, chosen)
    assert all_chosen(program) == [9, 9]
    assert all_chosen(
        logits.indexer_logits(gpu, *rows, True, False, describe("out", np.zeros((6, 40), np.float32)))
    ) == [0]

    of = {
        "q8": np.zeros((3, 2, 64, 128), np.uint8), "kv_cache": np.zeros((5, 64, 132), np.uint8),
        "w": np.zeros((6, 64), np.float32), "lens": np.zeros(3, np.int32), "table": np.zeros((3, 1), np.int32),
    }  # fmt: skip
    pages = [describe(name, a) for name, a in of.items()]
    assert all_chosen(topk.select_rows_paged(gpu, *pages, 40, 9, True, 1 << 20, chosen)) == [9]
    out = describe("out", np.zeros((6, 40), np.float32))
    assert all_chosen(logits.paged_indexer_logits(gpu, *pages, True, out)) == [0]
