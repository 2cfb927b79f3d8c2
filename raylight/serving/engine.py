"""What every engine offers: tokens in, tokens out, each with its log-probability and the weight version that produced it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raylight.types import GREEDY_BELOW, FinishReason


class RequestError(Exception):
    """A request that the engine refuses; becomes an HTTP answer in the dialect's own error shape."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for no limit."""
    stop: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Always the most probable token."""
        return self.temperature < GREEDY_BELOW


@dataclass
class Sampled:
    """One response as it was sampled; lists have one entry per token, in the order of sampling."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "aborted"


class Engine(Protocol):
    """A model that samples. One engine lives in one replica."""

    model: str
    tokenizer: Any
    max_model_len: int

    async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Sampled:
        """Sample one response; cancelling the call frees its place.

        Raises:
            RequestError: the prompt does not fit, or too many requests wait.
        """
        ...

    async def load_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        """Take new weights (name to array in full precision); requests in flight go on with them.

        Raises:
            WeightSyncError: a tensor is missing, unknown or of another shape.
        """
        ...

    def close(self) -> None:
        """Stop computing; requests in flight, and any that come later, end with a RequestError of status 503."""
        ...
