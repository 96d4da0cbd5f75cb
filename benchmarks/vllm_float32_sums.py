"""vLLM with row-parallel layers whose sum over GPUs is rounded once, as one GPU rounds it.

vLLM rounds each GPU's part of the sum to bfloat16, and their sum again. With `VLLM_FLOAT32_SUMS=1` the parts and the
sum are float32, so that several GPUs and one differ by the order of additions alone. `vllm_engine.py` has vLLM load
this as a plug-in, in the process of each GPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def register() -> None:
    if os.environ.get("VLLM_FLOAT32_SUMS") == "1":
        from vllm.model_executor.layers.linear import RowParallelLinear

        RowParallelLinear.forward = forward


def forward(layer: Any, x: torch.Tensor) -> Any:
    """`RowParallelLinear.forward` of a bfloat16 layer without bias."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    assert layer.input_is_parallel
    assert layer.reduce_results
    assert layer.bias is None
    out = torch.mm(x, layer.weight.T, out_dtype=torch.float32)
    if layer.tp_size > 1:
        out = tensor_model_parallel_all_reduce(out)
    return (out.to(x.dtype), None) if layer.return_bias else out.to(x.dtype)
