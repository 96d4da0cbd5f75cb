"""DeepSeek-V4's and V4.1's backend of SGLang's wheel on our operation, part of what `wheel_sglang` drives: the wheel's
`_forward_attention` over its own pools takes decodes in each kind of layer, beside float64. The index lists, which
kernels build, are drawn."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests import oracle
from tests.backends.test_sparse_mla import assert_result
from tests.cases import latent, queries, sinks
from tests.integrations.test_vllm import as_torch

HEADS, WINDOW, PAGE, SCALE, TOKENS = 64, 128, 256, 512**-0.5, 3
# SGLang's name of the layout of rows, the ratios of the compressed caches, and the oracle's formats of both.
CASES = {
    "V4's rows": ("V4", (4, 128), oracle.V4, oracle.V4),
    "V4.1 on Hopper, in V4's rows": ("V4", (1, 2), oracle.V4, oracle.V4),
    "V4.1's rows, split": ("V41", (1, 2), oracle.V41_SPLIT, oracle.V41_FP4_SPLIT),
    "V4.1's rows": ("V41_NEW", (2,), oracle.V41, oracle.V41_FP4),
}


def filled(rng: np.random.Generator, pool: Any, fmt: oracle.Format) -> np.ndarray:
    """Write random rows into the second and third page of a pool's layer; its bytes [pages, rows, token bytes]."""
    size, buffer = pool.page_size, pool.kv_buffer[0].numpy()
    assert pool.kv_cache_total_dim == fmt.token_bytes
    for page in buffer[1:3]:
        for t, row in enumerate(latent(rng, size, 512)):
            oracle.write_token(fmt, page, size, t, row)
    return buffer[:3, : size * fmt.token_bytes].reshape(3, size, fmt.token_bytes)


def pools_of(rng: np.random.Generator, layout: Any, ratios: tuple[int, ...]) -> Any:
    """SGLang's pools: layer 0 has a sliding window alone, each other one a compressed cache, too."""
    module = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")

    def pool(size: int, of: Any) -> Any:
        return module.DeepSeekV4SingleKVPool(
            2 * size, size, torch.float8_e4m3fn, 448, 64, 1, "cpu", enable_memory_saver=False, kv_layout=of
        )

    made = module.DeepSeekV4TokenToKVPool.__new__(module.DeepSeekV4TokenToKVPool)
    vars(made).update(
        kv_layout=layout, compressed_kv_layout_option=None, sliding_window=WINDOW, swa_page_size=PAGE,
        swa_kv_pool=pool(PAGE, layout), request_window=None, uniform_fp8=False, present_ratios=ratios,
        layer_transfer_counter=None, _stage_start=0,
    )  # fmt: skip
    compressed = {ratio: pool(PAGE // ratio, made.compressed_kv_layout(ratio)) for ratio in ratios}
    made.layer_mapping = [(0, 0, None), *((ratio, 0, compressed[ratio]) for ratio in ratios)]
    made._swa_local_layer_id = lambda _: 0  # layers share the window's rows
    return made


def drive(rng: np.random.Generator) -> None:
    """Decodes of layers of each kind."""
    module = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    layouts = importlib.import_module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    for what, (layout, ratios, fmt, of_extra) in CASES.items():
        pool = pools_of(rng, layouts[layout], ratios)
        kind = "deepseek_v41" if max(ratios) < 4 else "deepseek_v4"
        model = SimpleNamespace(
            context_len=1024, head_dim=512, v_head_dim=512, num_attention_heads=HEADS,
            hf_text_config=SimpleNamespace(index_topk=64, model_type=kind),
        )  # fmt: skip
        no = SimpleNamespace(is_dspark=lambda: False)
        runner = SimpleNamespace(
            device="cpu", model_config=model, page_size=PAGE, token_to_kv_pool=pool, is_draft_worker=False,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 1024, dtype=torch.int32)),
            hisparse_coordinator=None, spec_algorithm=no,
        )  # fmt: skip
        backend = module.DeepseekV4AttnBackend(runner)
        batch = SimpleNamespace(forward_mode=modes.DECODE, attn_cp_metadata=None)
        window = filled(rng, pool.swa_kv_pool, fmt)
        for layer, (ratio, _, extra) in enumerate(pool.layer_mapping):
            caches = [(fmt, window)]
            if extra is not None:
                caches.append((of_extra, filled(rng, extra, of_extra)))
            lists, lens = np.full((2, TOKENS, 64), -1, np.int32), np.array([[31, 1, 17], [2, 4, 3]], np.int32)
            for slots, own, (_, rows) in zip(lists, lens, caches, strict=False):
                for row, n in zip(slots, own, strict=True):
                    row[:n] = rows.shape[1] + rng.permutation(2 * rows.shape[1])[:n]  # behind the first page
            core = module.DSV4AttnMetadata.__new__(module.DSV4AttnMetadata)
            vars(core).update(
                present_ratios=ratios, swa_page_indices=as_torch(lists[0]), swa_topk_lengths=as_torch(lens[0]),
                c128_page_indices=as_torch(lists[1]), c128_topk_lengths_clamp1=as_torch(lens[1]),
            )  # fmt: skip
            for each in (0, 1, 2, 4, 128):
                setattr(core, f"c{each}_flashmla_metadata", None)
                setattr(core, f"c{each}_sparse_page_indices", as_torch(lists[1]))
                setattr(core, f"c{each}_sparse_topk_lengths", as_torch(lens[1]))
            backend.forward_metadata = SimpleNamespace(core_attn_metadata=core, late_layer_tail=None)
            q, sink = queries(rng, TOKENS, HEADS, 512), sinks(rng, HEADS)
            k = torch.zeros(TOKENS, 512)
            out = backend.forward(
                as_torch(q), k, k, SimpleNamespace(layer_id=layer, tp_q_head_num=HEADS), batch, compress_ratio=ratio,
                save_kv_cache=False, attn_sink=as_torch(sink),
            )  # fmt: skip
            assert out.shape == (TOKENS, HEADS, 512)
            for t in range(TOKENS):
                rows = [oracle.named_rows(f, pages, lists[i, t, : lens[i, t]]) for i, (f, pages) in enumerate(caches)]
                want, _, _ = oracle.attend(q[t].astype(np.float64), np.concatenate(rows), SCALE, sink)
                assert_result(out[t].float().numpy(), want)
        print(f"decodes of {len(pool.layer_mapping)} kinds of layers: {what}")
