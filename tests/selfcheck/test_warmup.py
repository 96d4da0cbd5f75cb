"""`cupy_mla.warmup` and `python -m cupy_mla warmup`."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla
from cupy_mla import BatchMetadata, DenseMLAConfig, SparseMLAConfig, SparseMLAMetadataBuilder, __main__
from cupy_mla.calls.operation import forget_calls, listing
from cupy_mla.cuda import all_kernels, driver
from cupy_mla.cuda.attention import choose
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.cuda.logits_sm90 import shares_of_step
from cupy_mla.layouts import DENSE_LAYOUTS, INDEXER_FP8
from cupy_mla.metadata.compressed import c128a_width
from cupy_mla.ops.swa import combined_width
from cupy_mla.selfcheck import report
from cupy_mla.selfcheck import warmup as warmup_module
from cupy_mla.warmup import warmup

from ..fake_gpu import FakeGPU
from ..kinds import BF16, make
from .stand_in import RUN, StandIn, python


def test_it_is_there_without_an_import_of_its_own():
    """As docs/from_flashmla_and_vllm.md calls it."""
    result = python("import cupy_mla; print(cupy_mla.warmup.warmup.__name__)")
    assert result.stdout == "warmup\n", result.stderr


def test_without_a_gpu():
    result = python(RUN.format(["warmup", "--heads", "16"]), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == report.NO_GPU
    assert "warmup needs" in result.stderr


def test_of_no_config(capsys):
    assert __main__.main(["warmup", "--heads", "129"]) == report.WRONG
    assert "num_heads must be in 1..128" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["v32_fp9", "indexer_fp8"])
def test_of_no_layout(capsys, name):
    """The indexer's keys have a layout, but no model's cache has it."""
    assert __main__.main(["warmup", "--heads", "16", "--layout", name]) == report.WRONG
    told = capsys.readouterr().err
    assert f"got '{name}'" in told
    assert told.count("indexer_fp8") == (name == "indexer_fp8")


def test_of_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(__main__, "require_cupy", lambda why: StandIn())
    monkeypatch.setattr(report, "nvrtc_version", lambda: "13.0")
    assert __main__.main(["warmup", "--heads", "16", "--device", "1"]) == report.WRONG
    assert "no GPU 1: this machine has 1, counted from 0" in capsys.readouterr().err


def test_the_command_line_names_every_kind_of_v4_layer():
    """Blocks of compressed caches hold whole rows by default: those of 64 tokens have none for 128 to one."""
    made = list(__main__.configs(__main__.parser().parse_args(["warmup", "--heads", "64", "--layout", "v4_fp8"])))
    assert [(config.compress_ratio, config.rows_per_block) for config in made] == [(1, 64), (4, 64), (128, 2)]
    asked = __main__.parser().parse_args(["warmup", "--heads", "64", "--layout", "v4_fp8", "--block-size", "128"])
    assert [config.block_size for config in __main__.configs(asked)] == [128] * 3


def test_the_command_line_names_other_kinds_of_models():
    parse = __main__.parser().parse_args
    v41 = list(__main__.configs(parse(["warmup", "--heads", "64", "--layout", "v4_fp8", "--model", "v41"])))
    assert {config.model for config in v41} == {"v41"}
    assert [(config.compress_ratio, config.rows_per_block) for config in v41] == [(0, 64), (1, 256), (2, 128)]
    more = ["--layout", "bf16", "v32_fp8", "--d-qk", "512", "--model", "v32", "--kpool", "4"]
    flash = list(__main__.configs(parse(["warmup", "--heads", "64", *more])))
    assert [(config.model, config.d_qk, config.topk_width) for config in flash] == [("v32", 512, 2051)] * 2
    for name, width in (("v32_nope_fp8", 512), ("plain_fp8", 576), ("fp8", 576), ("v32_fp8", 576)):
        (config,) = __main__.configs(parse(["warmup", "--heads", "64", "--layout", name]))
        assert (config.model, config.d_qk, config.cache_layout) == ("v32", width, name)
    own = ["--layout", "v41_fp8", "--compressed-layout", "v41_fp4"]
    for config in __main__.configs(parse(["warmup", "--heads", "64", *own])):
        assert (config.model, config.cache_layout, config.compressed_layout) == ("v41", "v41_fp8", "v41_fp4")
    wrong = parse(["warmup", "--heads", "64", "--layout", "v4_fp8", "--model", "v41", "--compress-ratio", "4"])
    with pytest.raises(ValueError, match="compress_ratio of models of kind 'v41' must be 0, 1 or 2, got 4"):
        list(__main__.configs(wrong))


def test_the_command_line_names_layers_without_an_indexer(capsys):
    parse = __main__.parser().parse_args
    rows = ["--layout", "fp16", "v4_fp8", "plain_fp8", "--speculative-tokens", "3", "--block-size", "16"]
    made = list(__main__.configs(parse(["warmup", "--heads", "16", "--dense", *rows])))
    assert made == [
        DenseMLAConfig(16, d_qk, 16, name, 256, num_speculative_tokens=3)
        for name, d_qk in (("fp16", 576), ("v4_fp8", 512), ("plain_fp8", 576))
    ]
    assert __main__.main(["warmup", "--heads", "16", "--layout", "fp16"]) == report.WRONG
    assert "got 'fp16'" in capsys.readouterr().err


WRONG = {
    "num_heads": (129, ValueError), "d_qk": (64, ValueError), "block_size": (0, ValueError),
    "cache_layout": ("indexer_fp8", ValueError), "max_num_seqs": ("4", TypeError), "max_model_len": (0, ValueError),
    "num_speculative_tokens": (-1, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_wrong_dense_layers_are_named(field):
    value, error = WRONG[field]
    with pytest.raises(error, match=rf"^{field}\b"):
        DenseMLAConfig(**{"num_heads": 16, field: value})
    with pytest.raises(ValueError, match=r"^d_qk of a v4_fp8 cache must be 512, got 576"):
        DenseMLAConfig(16, cache_layout="v4_fp8")


@pytest.fixture
def stand_in(monkeypatch) -> None:
    """NumPy in the place of CuPy; no kernel is loaded."""
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: StandIn())
    monkeypatch.setattr(Kernel, "load", lambda kernel, device: None)
    monkeypatch.setattr(driver, "gpu", lambda device: driver.Gpu(device, 132, 90, 227))


@pytest.mark.long(sample=3)
@pytest.mark.parametrize(
    ("layout", "d_qk", "more"),
    [
        ("bf16", 576, {}),
        ("v32_fp8", 576, {"num_speculative_tokens": 1}),
        ("v32_fp8", 576, {"mixed_below_heads": 1}),
        ("v4_fp8", 512, {"compress_ratio": 4, "block_size": 12}),
        ("v4_fp8", 512, {"compress_ratio": 128, "block_size": 256}),
        ("v4_fp8", 512, {"model": "v41", "compress_ratio": 0, "max_image_tokens": 9}),
        ("v4_fp8", 512, {"model": "v41", "compress_ratio": 2}),
        ("v41_fp8_split", 512, {"model": "v41", "compress_ratio": 0}),
        ("v41_fp8", 512, {"model": "v41", "compress_ratio": 1}),
        ("v41_fp8", 512, {"model": "v41", "compress_ratio": 2, "compressed_layout": "v41_fp4"}),
        ("bf16", 512, {"model": "v32", "topk": 4, "kpool": 4}),
    ],
)
def test_calls_are_right(stand_in, layout, d_qk, more):
    """Their arguments pass the operations' checks; nothing is compiled."""
    sizes = {"topk": 5, "max_num_seqs": 3, "max_num_batched_tokens": 6, "max_model_len": 300}
    config = SparseMLAConfig(3, d_qk, cache_layout=layout, **{**sizes, **more})
    before = [kernel for kernel in all_kernels() if kernel.loaded(0)]  # other tests of this process, on a GPU
    assert warmup(config) == before


def test_progress_is_told(stand_in):
    """Kernel by kernel, up to all."""
    told = []
    warmup(DenseMLAConfig(16, max_num_seqs=3), progress=lambda ready, known: told.append((ready, known)))
    ready, known = zip(*told, strict=True)
    assert [*ready] == [*range(1, len(told) + 1)]
    assert {*known} == {len(told)}
    assert len(told) > 3


def test_c128a_lists_have_the_width_of_the_metadata(stand_in, monkeypatch):
    """The forward's lists are those of the builder, whose width is rounded up."""
    config = SparseMLAConfig(
        3, 512, topk=5, cache_layout="v4_fp8", max_num_seqs=2, max_num_batched_tokens=4, max_model_len=300,
        compress_ratio=128, block_size=256,
    )  # fmt: skip
    widths = set()
    decode = warmup_module.sparse_decode

    def noted(*arguments, extra_indices=None, **more):
        if extra_indices is not None:
            widths.add(extra_indices.shape[-1])
        return decode(*arguments, extra_indices=extra_indices, **more)

    monkeypatch.setattr(warmup_module, "sparse_decode", noted)
    warmup(config)
    builder = SparseMLAMetadataBuilder(config)
    batch = BatchMetadata([0, 1], [300], [[0, 1]], [299], [299])
    assert widths == {builder.build(batch).c128a_global_decode_topk_indices.shape[-1]}


CONFIGS = {
    "v32": {"cache_layout": "v32_fp8"},
    "v32, prefills apart": {"cache_layout": "v32_fp8", "mixed_below_heads": 1, "num_speculative_tokens": 2},
    "bf16": {"cache_layout": "bf16", "block_size": 61},
    "C4A": {"cache_layout": "v4_fp8", "d_qk": 512, "topk": 512, "compress_ratio": 4, "block_size": 256},
    "C128A": {"cache_layout": "v4_fp8", "d_qk": 512, "compress_ratio": 128, "block_size": 256},
    "window": {"cache_layout": "v4_fp8", "d_qk": 512},
    "C2A": {
        "cache_layout": "v4_fp8", "d_qk": 512, "model": "v41", "topk": 512, "compress_ratio": 2, "block_size": 128,
        "max_image_tokens": 400,
    },
    "C1A of 528 bytes": {
        "cache_layout": "v41_fp8_split", "d_qk": 512, "model": "v41", "topk": 512, "compress_ratio": 1,
    },
    "C2A of 528 and 288 bytes": {
        "cache_layout": "v41_fp8", "compressed_layout": "v41_fp4", "d_qk": 512, "model": "v41", "topk": 512,
        "compress_ratio": 2, "block_size": 128,
    },
    "pools": {"cache_layout": "bf16", "d_qk": 512, "model": "v32", "kpool": 4},
    "one scale": {"cache_layout": "plain_fp8", "d_qk": 512, "model": "v32", "kpool": 4},
    "528 bytes": {"cache_layout": "v32_nope_fp8", "d_qk": 512, "model": "v32", "mixed_below_heads": 1},
}  # fmt: skip


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_step_needs_another_kernel(gpu, monkeypatch, rng, name, heads):
    """Whatever its size, on an H200: what steps would load is what warming up did."""
    sizes = {"max_num_batched_tokens": 16384, "max_model_len": int(rng.choice([1500, 163840, 10**6]))}
    layer = Layer(gpu, SparseMLAConfig(heads, max_num_seqs=256, **sizes, **CONFIGS[name]))
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: layer.cupy)
    warmup(layer.config)
    ready = set(gpu.kernels.values())
    most = layer.decode_tokens
    for tokens in {1, 67, 133, 199, most, *rng.integers(1, most + 1, 15).tolist()}:
        layer.decode(tokens)
        layer.prefill(tokens)
        layer.rows(tokens)
        layer.dense(int(rng.integers(1, 257)), int(rng.integers(1, 3000)))
        layer.choose(tokens, int(rng.integers(1, 100_000)))
        layer.convert(tokens)
    layer.prefill(int(rng.integers(most, 2049)))
    layer.convert(int(rng.integers(most, 16385)))
    layer.convert(16384)
    assert set(gpu.kernels.values()) == ready <= set(all_kernels())


@pytest.mark.long(sample=2)
@pytest.mark.parametrize("sms", [132, 78])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_tokens(monkeypatch, rng, name, sms):
    """Attention of each number up to a batch of 8192, on Hopper GPUs of two sizes; nothing is called."""
    forget_calls()
    gpu = FakeGPU(monkeypatch, sms=sms)
    heads = int(rng.choice([8, 16, 24, 32, 64, 128]))
    layer = Layer(gpu, SparseMLAConfig(heads, **{**CONFIGS[name], "mixed_below_heads": 129}))
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: layer.cupy)
    ready = set(warmup_module.kernels_of([layer.config], 0))
    numbers = {*range(1, 300), *range(300, 8193, 23), 8192}
    monkeypatch.setattr(warmup_module, "query_tokens", lambda most: sorted(n for n in numbers if n <= most))
    late = {}
    for call in warmup_module._attention(layer.cupy, layer.config):
        with listing() as found:
            call()
        late |= {kernel: call.args[0].shape for kernel in found if kernel not in ready}
    forget_calls()
    assert late == {}


@pytest.mark.parametrize("names", [("C1A of 528 bytes", "C2A of 528 and 288 bytes", "window"), ("v32", "dense")])
def test_kinds_of_layers_together(gpu, monkeypatch, names):
    """A call with several configs finds what calls with each of them find."""
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 3}
    kinds: list = [SparseMLAConfig(64, **sizes, **CONFIGS[name]) for name in names if name != "dense"]
    kinds += [DenseMLAConfig(16, cache_layout="plain_fp8", max_num_seqs=2)] * ("dense" in names)
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: Layer(gpu, kinds[0]).cupy)
    alone = [{*warmup_module.kernels_of([kind], 0)} for kind in kinds]
    assert {*warmup_module.kernels_of(kinds, 0)} == set.union(*alone)
    assert all(each - set.union(*alone[:i], *alone[i + 1 :]) for i, each in enumerate(alone))
    forget_calls()


@pytest.mark.parametrize("name", ["v32", "C2A"])
def test_no_layer_loads_another_models_selection(gpu, monkeypatch, name):
    """Keys of MXFP4 and candidates are V4.1's; bfloat16 logits are nobody's."""
    layer = Layer(gpu, SparseMLAConfig(64, max_num_seqs=1, max_num_batched_tokens=2, **CONFIGS[name]))
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: layer.cupy)
    warmup(layer.config)
    selecting = [k.defines for k in gpu.kernels.values() if k.name in ("logits", "logits_sm90", "topk")]
    found = {mark for mark in ("BF16", "MXFP4", "E5M2_KEYS", "CANDIDATES") if any(made.get(mark) for made in selecting)}
    assert found == ({"MXFP4", "E5M2_KEYS", "CANDIDATES"} if name == "C2A" else set())
    assert len(selecting) > 30


@pytest.mark.long(sample=3)
@pytest.mark.parametrize("capability", [90, 80, 89])
@pytest.mark.parametrize("layout", DENSE_LAYOUTS, ids=lambda layout: f"{layout.name} {layout.d_qk}")
def test_no_decode_over_all_rows_needs_another_kernel(monkeypatch, rng, layout, capability):
    """Of layers without an indexer, for which nothing else is loaded."""
    forget_calls()
    gpu = FakeGPU(monkeypatch, capability=capability)
    heads, most = int(rng.choice([16, 64, 128])), int(rng.integers(1, 5))
    config = DenseMLAConfig(heads, layout.d_qk, cache_layout=layout.name, num_speculative_tokens=most - 1)
    layer = Layer(gpu, config)
    monkeypatch.setattr(warmup_module, "require_cupy", lambda why: layer.cupy)
    warmup(config)
    ready = set(gpu.kernels.values())
    asked = {"fp8_sm90", "bf16_cluster_sm90"}  # how many of their clusters fit
    assert {kernel.name for kernel in ready} <= {*choose.DENSE_KERNELS, *asked, "dense_combine", "portable", "combine"}
    for width in (1, 2, 5, 16, 40, *rng.integers(1, 2561, 10).tolist()):
        for requests in (1, int(rng.integers(1, 257))):
            layer.dense(requests, width, int(rng.integers(1, most + 1)))
    forget_calls()
    assert set(gpu.kernels.values()) == ready


class Layer:
    """What a layer's steps call, with torch tensors of zeros on a GPU that is none.

    Attributes:
        cupy: makes such tensors.
    """

    def __init__(self, gpu, config):
        self.config, self._gpu, self._kind = config, gpu, make("torch")
        self.decode_tokens = config.max_num_seqs * (1 + config.num_speculative_tokens)
        self._chosen = 0  # beside a window
        if isinstance(config, SparseMLAConfig) and config.has_compressed_rows:
            self._chosen = config.topk if config.has_topk else c128a_width(config)
        self.cupy = StandIn(
            asarray=self._put, zeros=lambda shape, dtype: self._put(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype: self._put(np.full(shape, value, dtype)),
            broadcast_to=lambda array, shape: array.expand(shape),
        )  # fmt: skip

    def _put(self, array):
        self._gpu.used = 0  # what earlier calls have allocated is forgotten
        return self._kind.put(np.asarray(array))

    def _zeros(self, dtype, *shape):
        """Of which only one row exists."""
        return self._put(np.zeros(shape[-1:], dtype)).expand(shape)

    def _cache(self, layout, block_size):
        items = layout.block_bytes(block_size) // layout.dtype.itemsize
        whole = self._put(np.zeros((4, items), layout.dtype))
        return whole.as_strided((4, block_size, layout.last_axis), (items, layout.last_axis, 1))

    def _more(self, tokens):
        """Sinks and lengths, which V4's layers have; others may have lengths."""
        sink, lens = np.zeros(self.config.num_heads, np.float32), np.zeros(tokens, np.int32)
        if self.config.is_v4:
            return [{"attn_sink": self._put(sink), "topk_length": self._put(lens)}]
        return [{}, {"topk_length": self._put(lens)}]

    def decode(self, tokens):
        for more in self._more(tokens):
            self._decode(tokens, more)

    def _decode(self, tokens, more):
        config = self.config
        if config.has_compressed_rows:
            more["extra_k_cache"] = self._cache(config.layout_of_compressed, config.rows_per_block)
            more["extra_layout"] = config.layout_of_compressed.name
            more["extra_indices"] = self._zeros(np.int32, tokens, 1, self._chosen)
            more["extra_topk_length"] = more["topk_length"]
        q = self._zeros(BF16, tokens, 1, config.num_heads, config.layout.d_qk)
        width = config.window + config.max_image_tokens if config.is_v4 else config.topk_width
        indices = self._zeros(np.int32, tokens, 1, width)
        cache = self._cache(config.layout, config.block_size)
        cupy_mla.sparse_decode(q, cache, indices, 0.1, layout=config.layout.name, **more)

    def prefill(self, tokens):
        config = self.config
        q = self._zeros(BF16, tokens, config.num_heads, config.layout.d_qk)
        width = combined_width(self._chosen, config.window, config.max_image_tokens)
        width = width if config.is_v4 else config.topk_width
        rows = self._zeros(BF16, 5000 if tokens % 2 else 1 << 17, 1, config.layout.d_qk)
        for more in self._more(tokens):
            cupy_mla.sparse_prefill(q, rows, self._zeros(np.int32, tokens, 1, width), 0.1, **more)

    def rows(self, tokens):
        """Of V4's caches, packed and gathered."""
        config = self.config
        if not config.is_v4:
            return
        k, slots = self._zeros(BF16, tokens, 512), self._put(np.zeros(tokens, np.int64))
        out, lens = self._put(np.zeros((1, 9, 512), BF16)), self._put(np.zeros(1, np.int32))
        table = self._put(np.zeros((1, 4), np.int32))
        for layout in {config.layout, config.layout_of_compressed}:
            cache = self._cache(layout, config.rows_per_block)
            cupy_mla.quantize_and_insert_k_cache(k, cache, slots, layout=layout.name)
            for gather_lens in (None, lens):
                cupy_mla.dequantize_and_gather_k_cache(
                    out, cache, lens, gather_lens, table, config.rows_per_block, 0, layout=layout.name
                )

    def convert(self, tokens):
        """Lists of positions to slots, and lists of as many tokens with their requests' tables."""
        blocks = -(-self.config.max_model_len // self.config.block_size)
        requests, table = self._put(np.zeros(tokens, np.int32)), self._zeros(np.int32, 3, blocks)
        lists = self._zeros(np.int32, tokens, self.config.topk)
        for counted in (False, True):
            cupy_mla.convert_req_index_to_global_index(requests, table, lists, 64, return_valid_counts=counted)
        valid = self._put(np.ones(tokens, bool))
        cupy_mla.compute_global_topk_indices_and_lens(lists, requests, table, 64, valid)

    def dense(self, requests, width, tokens=0):
        """Over all rows of so many requests, which have at most so many blocks, and so many query tokens."""
        config = self.config
        tokens = tokens or 1 + config.num_speculative_tokens
        q = self._zeros(config.layout.values, requests, tokens, config.num_heads, config.d_qk)
        table, lens = (self._put(np.zeros(shape, np.int32)) for shape in ((requests, width), requests))
        cache = self._cache(config.layout, config.block_size)
        cupy_mla.dense_decode(q, cache, table, lens, 0.1, layout=config.layout.name)

    def choose(self, tokens, keys):
        """Of so many keys, in decode and in prefill; for layers without an indexer nothing."""
        config, n = self.config, 1 + self.config.num_speculative_tokens
        if config.is_v4 and (config.model, config.compress_ratio) not in (("v4", 4), ("v41", 1), ("v41", 2)):
            return
        requests = -(-tokens // n)
        lens, table = (self._put(np.zeros((requests, width), np.int32)) for width in (n, 4))
        shares, schedule = shares_of_step(driver.gpu(0), n, config.keys_per_block), None
        if shares is not None:
            schedule = cupy_mla.paged_indexer_schedule(lens, table, keys, config.keys_per_block, shares)
        for index_heads in (24, 64):
            q8 = self._zeros(np.uint8, requests, n, index_heads, 128)
            w = self._zeros(np.float32, requests * n, index_heads)
            cache = self._cache(INDEXER_FP8, config.keys_per_block)
            cupy_mla.select_rows_paged(q8, cache, w, lens, table, keys, config.index_topk, schedule=schedule)
            k8, ks = self._zeros(np.uint8, keys, 128), self._put(np.zeros(keys, np.float32))
            ends = lens.flatten()
            cupy_mla.select_rows(q8.flatten(0, 1), k8, ks, w, ends, ends, config.index_topk)


@pytest.mark.gpu
def test_nothing_is_compiled_after_warmup(rng):
    """In a process of its own: what the checks call at a config's heads is ready, and no memory is kept from others."""
    tokens = [1, 3, 67, 133, 199, *rng.integers(1, 201, 5).tolist()]
    code = f"""
import cupy, numpy as np, cupy_mla
from cupy_mla.warmup import warmup
from cupy_mla.cuda import all_kernels
ready = {{repr(k) for k in warmup(cupy_mla.SparseMLAConfig(64, cache_layout="v32_fp8", max_num_seqs=200))}}
assert len(ready) < len(all_kernels())
assert cupy.get_default_memory_pool().total_bytes() == 0, "an engine wants the memory"
cache, keys = (cupy.zeros((4, 64, width), np.uint8) for width in (656, 132))
k8, ks = cupy.zeros((9000, 128), np.uint8), cupy.zeros(9000, np.float32)
for b in {tokens}:
    q = cupy.zeros((b, 1, 64, 576), cupy_mla.dtypes.BFLOAT16)
    for more in {{}}, {{"topk_length": cupy.zeros(b, np.int32)}}:
        cupy_mla.sparse_decode(q, cache, cupy.zeros((b, 1, 2048), np.int32), 0.04, **more)
    q8, w = cupy.zeros((b, 1, 64, 128), np.uint8), cupy.zeros((b, 64), np.float32)
    ends, table = cupy.zeros(b, np.int32), cupy.zeros((b, 4), np.int32)
    cupy_mla.select_rows_paged(q8, keys, w, ends, table, 3000 + 97 * b, 2048)
    cupy_mla.select_rows(q8[:, 0], k8[: 3000 + 29 * b], ks[: 3000 + 29 * b], w, ends, ends, 2048)
assert {{repr(k) for k in all_kernels() if k.loaded(0)}} == ready
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
