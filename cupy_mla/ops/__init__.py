"""The public operations. Each checks its arguments once and hands them to one of two twins of the same name:
`cupy_mla.reference` (NumPy) or `cupy_mla.cuda` (launchers of run-time compiled kernels).

What a module lists in its `__all__` is public: `cupy_mla` has it under the same name."""

# ruff: noqa: F403
from . import absorb, attention, cache, compressed, context_parallel, gather, indexer, indices, logits, quant, swa, topk
from .absorb import *
from .attention import *
from .cache import *
from .compressed import *
from .context_parallel import *
from .gather import *
from .indexer import *
from .indices import *
from .logits import *
from .quant import *
from .swa import *
from .topk import *

__all__: list[str] = []
__all__ += absorb.__all__
__all__ += attention.__all__
__all__ += cache.__all__
__all__ += compressed.__all__
__all__ += context_parallel.__all__
__all__ += gather.__all__
__all__ += indexer.__all__
__all__ += indices.__all__
__all__ += logits.__all__
__all__ += quant.__all__
__all__ += swa.__all__
__all__ += topk.__all__
