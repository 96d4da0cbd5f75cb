"""The check that a step's metadata fits the backend that gets it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..bridges import Place, describe
from ..config import SparseMLAConfig


class Step(NamedTuple):
    """What all kinds of metadata say about their step.

    Attributes:
        name: the argument's name, for error messages.
        requests, tokens: numbers of requests and query tokens.
        longest: tokens of the longest sequence; 0 where the metadata does not say.
        array: one of its arrays, which are all in one place.
    """

    name: str
    requests: int
    tokens: int
    longest: int
    array: Any

    def require(self, config: SparseMLAConfig, place: Place, **built_for: Any) -> None:
        """Check that the step is one of the layers that a backend serves.

        Args:
            config: of the layers.
            place: where the backend's workspace is.
            built_for: what the metadata was built for, by the names of the config's fields.

        Raises:
            ValueError: the step is none of these layers. The message names the metadata and what differs.
        """
        for field, value in built_for.items():
            wanted = getattr(config, field)
            if value != wanted:
                raise ValueError(f"{self.name}: built for {field} {value}, these layers have {wanted} (config)")
        for what, got, most in (
            ("requests", self.requests, config.max_num_seqs),
            ("query tokens", self.tokens, config.max_num_batched_tokens),
            ("tokens in a sequence", self.longest, config.max_model_len),
        ):
            if got > most:
                raise ValueError(f"{self.name}: expected at most {most} {what} (config), got {got}")
        there = describe(self.name, self.array).place
        if there != place:
            raise ValueError(f"{self.name}: expected it where the workspace is, {place}, got {there}")
