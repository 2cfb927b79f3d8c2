"""Transformers engine whose module is trained in place."""

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
    """Engine that samples from a module which is trained between two decoding steps, so weights are never
    copied.

    Args:
        max_new_tokens: limit of tokens of a response; a request can only lower it.
    """

    def __init__(self, path: str, model: str, *, max_new_tokens: int, **settings: Any) -> None:
        super().__init__(path, model, **settings)
        self._max_new_tokens = max_new_tokens

    @property
    def module(self) -> Any:
        """Model. After the first request, only the engine's thread may use it (`run_between_steps`,
        `change_weights`)."""
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

    async def change_weights(self, action: Callable[[], tuple[int, T]]) -> T:
        """Change the weights in the engine's thread.

        Sampling pauses. Later tokens have the new weight version; requests in flight continue with a
        recomputed cache.

        Args:
            action: changes the weights; returns their new version, and the result of this method.
        """

        def change() -> T:
            try:
                with torch.inference_mode(False):
                    self._worker.version, result = action()
            finally:
                self._worker.recompute()
            return result

        return await self._run(change)

    async def run_between_steps(self, action: Callable[[], T]) -> T:
        """Run an action that does not change the weights in the engine's thread and return its result."""

        def act() -> T:
            with torch.inference_mode(False):
                return action()

        return await self._run(act)
