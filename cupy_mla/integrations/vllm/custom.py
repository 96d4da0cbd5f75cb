"""The backend that is registered as CUSTOM: the sparse one in models with an indexer, the dense one in all others.

vLLM knows a backend by the path of its class, and looks the path up for each layer that it creates. Then the model's
configuration is the current one. So the attribute of this module that is registered depends on the model.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKEND = "CupyMLABackend"


def __getattr__(name: str) -> Any:
    if name != BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if has_indexer():
        return import_module(f"{__package__}.sparse_mla").CupyMLASparseBackend
    return import_module(f"{__package__}.dense_mla").CupyMLADenseBackend


def has_indexer() -> bool:
    """Whether the model of vLLM's current configuration has an indexer; True without a configuration."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is None or config.model_config is None or hasattr(config.model_config.hf_text_config, "index_topk")
