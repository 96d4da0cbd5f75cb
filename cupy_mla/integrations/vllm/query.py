"""The query of a layer in one array, for sparse and for dense attention."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ...ops.gather import concat_mla_q


def whole(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], width: int) -> torch.Tensor:
    """The query as one array [T, h, width].

    Args:
        q: [T, h, d], or its parts without and with RoPE. The second has width 0 in a model without RoPE.
        width: of the cache's rows. A narrower query is padded with zeros: FP8 rows have a RoPE part even if the model
            has none.
    """
    if not isinstance(q, tuple):
        joined = q
    elif q[1].shape[-1]:
        nope, rope = q
        joined = nope.new_empty((*nope.shape[:2], nope.shape[-1] + rope.shape[-1]))
        concat_mla_q(nope, rope, joined)
    else:
        joined = q[0].contiguous()
    missing = width - joined.shape[-1]
    return pad(joined, (0, missing)) if missing else joined
