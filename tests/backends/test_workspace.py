"""The workspace: views that do not overlap, aligned, of an allocation that grows unless it is locked."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import DeepseekV4Impl, SparseMLAConfig, SparseMLAImpl, SparseMLAMetadataBuilder, SparseSWAMetadataBuilder
from cupy_mla.backends.workspace import Workspace
from cupy_mla.bridges import Place, describe
from tests.kinds import BF16


def workspace_of(kind) -> Workspace:
    return Workspace(Place.of(kind.put(np.zeros(1, np.float32))))


def test_views_do_not_overlap(kind) -> None:
    specs = (((3, 5), np.float32), ((0, 7), BF16), ((9,), np.int64), ((2, 2, 2), BF16))
    views = workspace_of(kind).get_simultaneous(*specs)
    assert [tuple(v.shape) for v in views] == [(3, 5), (0, 7), (9,), (2, 2, 2)]
    for i, view in enumerate(views):
        assert kind.is_mine(view)
        assert describe("view", view).ptr % 256 == 0 or 0 in view.shape
        view[...] = i
    for i, view in enumerate(views):
        assert (kind.take(view) == i).all()
    assert [kind.take(v).dtype for v in views] == [np.float32, BF16, np.int64, BF16]


def test_it_grows_and_keeps_its_place(kind) -> None:
    workspace = workspace_of(kind)
    assert workspace.size == 0
    (large,) = workspace.get_simultaneous(((1000,), np.float32))
    assert workspace.size == 4096
    start = describe("large", large).ptr
    for shape in ((10,), (1024,)):
        (again,) = workspace.get_simultaneous((shape, np.float32))
        assert describe("again", again).ptr == start
    workspace.get_simultaneous(((1025,), np.float32))
    assert workspace.size > 4096


def test_a_locked_workspace_does_not_grow(kind) -> None:
    workspace = workspace_of(kind)
    workspace.get_simultaneous(((100,), np.float32))
    workspace.lock()
    assert len(workspace.get_simultaneous(((50,), np.float32), ((50,), np.uint8))) == 2
    with pytest.raises(RuntimeError, match="the workspace is locked at 512 bytes, 768 were asked for"):
        workspace.get_simultaneous(((150,), np.float32))


def test_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    (view,) = Workspace(("torch", -1)).get_simultaneous(((3, 4), torch.bfloat16))
    assert view.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ((3, np.uint8), TypeError, r"^specs: expected pairs of a shape and a dtype"),
        (((3,),), TypeError, r"^specs: expected pairs of a shape and a dtype"),
        (((-3,), np.uint8), ValueError, r"^specs: a length must be >= 0, got -3"),
        (((2.5,), np.uint8), TypeError, r"^specs: a length: expected an integer"),
        (((3,), "x"), TypeError, r"^dtype: expected one that NumPy or torch has, got 'x'"),
    ],
)
def test_what_is_no_view_is_refused(spec, error, message) -> None:
    with pytest.raises(error, match=message):
        Workspace(("numpy", -1)).get_simultaneous(spec)


@pytest.mark.parametrize("place", ["numpy", ("numpy",), ("numpy", 3), ("jax", 0), ("torch", "cuda"), None])
def test_what_is_no_place_is_refused(place) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^(place|kind|device)\b"):
        Workspace(place)


def test_classes_of_arguments() -> None:
    workspace, config = Workspace(("numpy", -1)), SparseMLAConfig(4)
    for make, name in (
        (lambda: SparseMLAMetadataBuilder(None), "config"), (lambda: SparseSWAMetadataBuilder({}), "config"),
        (lambda: SparseMLAImpl(None, 0.1, workspace), "config"),
        (lambda: SparseMLAImpl(config, 0.1, None), "workspace"),
        (lambda: DeepseekV4Impl(config, 0.1, None), "workspace"),
        (lambda: SparseMLAMetadataBuilder(config, num_blocks="4"), "num_blocks"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"^{name}: expected a"):
            make()


def test_nothing_is_handed_out_before_anything_was(kind) -> None:
    workspace = Workspace(Place.of(kind.put(np.zeros(1, np.float32))))
    workspace.lock()
    (nothing,) = workspace.get_simultaneous(((0, 3), np.int32))
    assert kind.is_mine(nothing)
    assert tuple(nothing.shape) == (0, 3)
