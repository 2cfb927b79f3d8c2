"""The transformers engine over a module that is trained where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from raylight.engines.transformers.choices import Choices
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams

T = TypeVar("T")


class TrainableEngine(TransformersEngine):
    """Samples from a module that is trained between two decoding steps: there is one copy of the weights and nothing to sync.

    Args:
        max_new_tokens: longest response, whatever a request asks for.
    """

    def __init__(self, path: str, model: str, *, max_new_tokens: int, **settings: Any) -> None:
        super().__init__(path, model, **settings)
        self._max_new_tokens = max_new_tokens

    @property
    def module(self) -> Any:
        """The model. Only the engine's thread may compute with it once requests come (`between_steps`, `train`)."""
        return self._decoder.module

    def begin(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        adapter: str | None = None,
        streams: bool = False,
    ) -> Choices:
        capped = [
            replace(requested, max_tokens=min(requested.max_tokens, self._max_new_tokens))
            for requested in params
        ]
        return super().begin(prompts, capped, adapter, streams)

    async def train(self, action: Callable[[int], T]) -> T:
        """Change the weights. Nothing is sampled meanwhile; afterwards tokens are of the next version, and what is in flight goes
        on with its cache computed again.

        Args:
            action: is given the version of the weights before.
        """

        def change() -> T:
            with torch.inference_mode(False):
                result = action(self._worker.version)
            self._worker.version += 1
            self._worker.recompute()
            return result

        return await self._run(change)

    async def between_steps(self, action: Callable[[], T]) -> T:
        """Have the engine's thread do something that leaves the weights as they are."""

        def act() -> T:
            with torch.inference_mode(False):
                return action()

        return await self._run(act)
