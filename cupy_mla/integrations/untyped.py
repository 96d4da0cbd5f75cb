"""A base class that type checkers see in place of classes from libraries without types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Untyped:
    """Stands for a base class whose attributes a type checker does not know::

    if TYPE_CHECKING:
        from .untyped import Untyped as Cache
    else:
        from transformers.cache_utils import Cache
    """

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...
