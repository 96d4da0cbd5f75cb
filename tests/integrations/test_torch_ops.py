"""The operations as torch custom ops: their declarations hold, and torch.compile takes the public functions whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.cuda.program import Plan
from cupy_mla.ops.attention import planned_decode
from cupy_mla.ops.dense import planned_dense_decode
from tests import kinds, oracle
from tests.cases import normal, queries
from tests.dense import in_cache
from tests.kinds import BF16, E4M3, NumPy
from tests.operations import OPERATIONS, Call

torch = pytest.importorskip("torch")
torch_ops = pytest.importorskip("cupy_mla.integrations.torch_ops")

OTHER_NAMES = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")  # of operations that have custom ops

every_operation = pytest.mark.parametrize("name", OPERATIONS)
ways = pytest.mark.parametrize("given", [False, True], ids=["allocates", "writes"])
pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


def call_of(name: str, rng: np.random.Generator, given: bool) -> Call:
    call = OPERATIONS[name](rng)
    return call.with_outputs() if given else call


def custom_op(call: Call, given: bool) -> tuple[Any, list[str]]:
    """The custom op that a call turns into, and its parameters."""
    name = call.operation.__name__
    if call.settings.get("return_valid_counts"):
        name += "_and_count"
    op = getattr(torch.ops.cupy_mla, name + ("_out" if given and call.made else "")).default
    return op, [a.name for a in op._schema.arguments]


def test_schemas_stay_as_they_are():
    """Graphs that were exported name these custom ops and pass their arguments so."""
    expected = Path(__file__).with_name("schemas.txt").read_text().splitlines()
    registered = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("cupy_mla::")]
    ops = [getattr(torch.ops.cupy_mla, name.removeprefix("cupy_mla::")).default for name in registered]
    assert sorted(str(op._schema).removeprefix("cupy_mla::") for op in ops) == sorted(expected)


def test_what_is_written_has_no_default():
    """torch 2.11 drops a default that ends a call, and then looks for what is written by its place."""
    registered = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("cupy_mla::")]
    ops = [getattr(torch.ops.cupy_mla, name.removeprefix("cupy_mla::")).default for name in registered]
    written = [a for op in ops for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written
    assert not [a for a in written if a.has_default_value()]


@pytest.mark.long(sample=5)
@every_operation
@ways
def test_opcheck(kind, rng, name, given):
    if name in OTHER_NAMES:
        pytest.skip("an operation by another name")
    call = call_of(name, rng, given)
    op, parameters = custom_op(call, given)
    arguments = {n: kind.put(a) for n, a in call.arrays.items()} | call.settings
    if "q_scale" in parameters:  # opcheck multiplies what is floating, which torch cannot on the CPU
        e4m3 = {n: a.view(torch.uint8) for n, a in arguments.items() if getattr(a, "dtype", 0) == torch.float8_e4m3fn}
        arguments |= e4m3
    torch.library.opcheck(op, (), {n: v for n, v in arguments.items() if n in parameters})


@pytest.mark.long(sample=5)
@every_operation
@ways
def test_compiled_whole(kind, rng, name, given):
    """No graph break, the same results and the same writes, on two draws and in both of the graph's runs."""
    calls = [call_of(name, rng, given) for _ in range(2)]
    settings = calls[0].settings

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(arrays: dict[str, Any]) -> Any:
        return calls[0].operation(**arrays, **settings)

    for call in calls:
        want = call.run(kind)
        arrays = {n: kind.put(a) for n, a in call.arrays.items()}
        returned = compiled(arrays)
        returned = returned if isinstance(returned, tuple) else (returned,)
        got = [kind.take(a) for a in (*(r for r in returned if r is not None), *(arrays[n] for n in call.written))]
        for a, b in zip(got, want, strict=True):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def decode_inputs(kind: NumPy, rng: np.random.Generator) -> tuple[Any, ...]:
    arrays = OPERATIONS["flash_mla_with_kvcache"](rng).arrays
    return kind.put(arrays["q"].astype(BF16)), kind.put(arrays["k_cache"]), kind.put(arrays["indices"])


def test_one_graph_serves_many_lengths(kind, rng):
    """Symbolic shapes: no recompilation from one number of queries to the next."""
    compiled = torch.compile(
        lambda q, kv, indices: cupy_mla.sparse_prefill(q, kv, indices, 0.05), fullgraph=True, dynamic=True,
        backend="aot_eager",
    )  # fmt: skip
    arrays = {n: kind.put(a) for n, a in OPERATIONS["sparse_prefill"](rng).arrays.items()}
    for s_q in (3, 2):
        inputs = (arrays["q"][:s_q], arrays["kv"], arrays["indices"][:s_q])
        with torch._dynamo.config.patch(error_on_recompile=s_q != 3):
            got = compiled(*inputs)
        for a, b in zip(got, cupy_mla.sparse_prefill(*inputs, 0.05), strict=True):
            assert torch.equal(a, b)


def test_schedule_in_a_graph(kind, rng):
    """A schedule that was made is followed and kept; a graph makes none."""
    q, cache, indices = decode_inputs(kind, rng)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def decode(schedule: flash_mla.FlashMLASchedMeta) -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, schedule, is_fp8_kvcache=True, indices=indices
        )

    empty, _ = flash_mla.get_mla_metadata()
    scale = q.shape[-1] ** -0.5
    want = cupy_mla.sparse_decode(q, cache, indices, scale)
    assert torch.equal(decode(empty)[0], want[0])
    assert (empty.shapes, empty.num_splits) == (None, None)
    used, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, used, is_fp8_kvcache=True, indices=indices)
    shapes = used.shapes
    assert torch.equal(decode(used)[0], want[0])
    assert shapes is not None
    assert used.shapes == shapes
    three = flash_mla.FlashMLASchedMeta(num_splits=3)
    assert torch.equal(decode(three)[0], cupy_mla.sparse_decode(q, cache, indices, scale, num_splits=3)[0])
    with pytest.raises(ValueError, match=r"^is_fp8_kvcache is False"):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, empty, is_fp8_kvcache=False, indices=indices)


def test_dense_front_door_in_a_graph(kind, rng):
    of, q = in_cache(rng, oracle.V32, [70, 33], 64, 2), queries(rng, 2, 2, 8, 576)
    arrays = [*map(kind.put, (q, of.cache, of.table, of.lens))]
    empty, _ = flash_mla.get_mla_metadata()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def decode(**more: Any) -> Any:
        return flash_mla.flash_mla_with_kvcache(*arrays, 512, empty, causal=True, is_fp8_kvcache=True, **more)

    for got, want in zip(decode(), cupy_mla.dense_decode(*arrays, 576**-0.5), strict=True):
        assert torch.equal(got, want)
    out = torch.empty_like(arrays[0][..., :512])
    sink = torch.zeros(8, device=out.device)
    returned, _ = decode(attn_sink=sink, out=out, softmax_scale=0.04)
    assert returned is out
    assert torch.equal(out, cupy_mla.dense_decode(*arrays, 0.04, attn_sink=sink)[0])
    with pytest.raises(ValueError, match=r"^is_fp8_kvcache is False"):
        flash_mla.flash_mla_with_kvcache(*arrays, 512, empty, causal=True, is_fp8_kvcache=False)


def test_planned_decode_in_a_graph(kind, rng):
    """What the V3.2 backend calls: a graph makes no plan."""
    q, cache, indices = decode_inputs(kind, rng)
    plan, scale = Plan(), q.shape[-1] ** -0.5
    out = torch.empty_like(q[..., :512])
    compiled = torch.compile(planned_decode, fullgraph=True, backend="aot_eager")
    ends = torch.full((len(q),), indices.shape[-1] - 1, dtype=torch.int32, device=q.device)
    indices[..., -1] = -1
    returned, lse = compiled(q, cache, indices, scale, None, plan, padded=True, topk_length=ends, out=out)
    want, want_lse = cupy_mla.sparse_decode(q, cache, indices, scale)
    assert returned is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert plan.made == ()


def test_planned_dense_decode_in_a_graph(kind, rng):
    """What backends call for decodes over all rows."""
    of, q = in_cache(rng, oracle.V32, [70, 33], 64, 2), queries(rng, 2, 2, 8, 576)
    arrays, plan = [*map(kind.put, (q, of.cache, of.table, of.lens))], Plan()
    out = torch.empty_like(arrays[0][..., :512])
    compiled = torch.compile(planned_dense_decode, fullgraph=True, backend="aot_eager")
    returned, lse = compiled(*arrays, 0.04, plan, out=out)
    want, want_lse = cupy_mla.dense_decode(*arrays, 0.04)
    assert returned is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert plan.made == ()


def test_fp8_weights_are_split_in_a_graph(kind, rng):
    weight, scales = kind.put(rng.standard_normal((512, 320)).astype(E4M3)), kind.put(rng.random((4, 3), np.float32))
    want = cupy_mla.split_kv_b_proj(weight, 2, 96, scales=scales)
    split = torch.compile(cupy_mla.split_kv_b_proj, fullgraph=True, backend="aot_eager")
    for got, part in zip(split(weight, 2, 96, scales=scales), want, strict=True):
        assert torch.equal(got, part)


def test_weight_absorption_in_a_graph(kind, rng):
    """Products of torch's own, gradient and all."""
    q, weight = kind.put(normal(rng, 5, 4, 32)), kind.put(normal(rng, 512, 4 * (32 + 16)))
    q.requires_grad_()

    def attend(q: Any, weight: Any) -> Any:
        w_uk, w_uv = cupy_mla.split_kv_b_proj(weight, 4, 32)
        return cupy_mla.v_up_proj(cupy_mla.absorb_q(q, w_uk), w_uv)

    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, weight)
    want = attend(q, weight)
    assert torch.equal(got, want)
    for result in (got, want):
        (gradient,) = torch.autograd.grad(result.float().sum(), q)
        assert gradient.shape == q.shape


@every_operation
def test_no_backward(kind, rng, name):
    """An error that says so: of the public function at once, of the custom op when the gradient is asked for."""
    if name in ("sparse_prefill", "flash_mla_sparse_fwd", "indexer_loss", "dense_indexer_loss"):
        pytest.skip("has one: test_autograd.py")
    call = OPERATIONS[name](rng)
    arrays = {n: kind.put(a) for n, a in call.arrays.items()}
    wanting = next((n for n, a in arrays.items() if a.is_floating_point() and n not in call.written), None)
    if wanting is None:
        pytest.skip("takes integers only")
    arrays[wanting].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"^{wanting} requires a gradient, and this call has no backward"):
        call.operation(**arrays, **call.settings)
    with torch.no_grad():
        call.operation(**arrays, **call.settings)
    if name in OTHER_NAMES or call.written:
        return
    op, parameters = custom_op(call, False)
    results = op(**{n: v for n, v in (arrays | call.settings).items() if n in parameters})
    if not results[0].is_floating_point():  # torch itself knows that integers have no gradient
        assert not results[0].requires_grad
        return
    with pytest.raises(NotImplementedError, match=rf"^cupy_mla\.{name} has no backward"):
        results[0].float().sum().backward()


def test_fake_tensors_have_shapes(rng):
    """As torch.export sees them: no memory, no kernel."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        q = torch.empty(7, 2, 64, 576, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(9, 64, 656, dtype=torch.uint8, device="cuda")
        indices = torch.empty(7, 2, 100, dtype=torch.int32, device="cuda")
        out, lse = torch.ops.cupy_mla.sparse_decode(q, cache, indices, 0.04)
    assert (out.shape, out.dtype, out.device.type) == ((7, 2, 64, 512), torch.bfloat16, "cuda")
    assert (lse.shape, lse.dtype) == ((7, 64, 2), torch.float32)


@pytest.mark.gpu
def test_cuda_graph_trees(rng):
    """mode="reduce-overhead": captured after its warm-up, replayed with other inputs, and not skipped."""
    kind = kinds.make("torch_cuda")
    skips = torch._dynamo.utils.counters["inductor"]
    skips.clear()

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def step(q: Any, cache: Any, indices: Any) -> Any:
        out, lse = cupy_mla.sparse_decode(q * 2, cache, indices, 0.04)
        return out + 1, lse

    arrays = OPERATIONS["flash_mla_with_kvcache"](rng).arrays
    cache, indices = kind.put(arrays["k_cache"]), kind.put(arrays["indices"])
    with torch.no_grad():
        for _ in range(5):
            q = kind.put(normal(rng, *arrays["q"].shape))
            out, lse = (a.clone() for a in step(q, cache, indices))
            want, want_lse = cupy_mla.sparse_decode(q * 2, cache, indices, 0.04)
            torch.testing.assert_close(lse, want_lse, equal_nan=True)
            torch.testing.assert_close(out, want + 1)
    assert skips["cudagraph_skips"] == 0
