"""Transformers engine whose module is trained in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from raylight.engines.transformers.engine import TransformersEngine

T = TypeVar("T")


class TrainableEngine(TransformersEngine):
    """Engine that samples from a module which is trained between two decoding steps, so weights are never
    copied."""

    fast_linear = False  # its log-probs must be those of the learner's passes to the last bit
    closing_s = None  # Python aborts if it ends during a backward pass of another thread

    @property
    def module(self) -> Any:
        """Model. After the first request, only the engine's thread may use it (`run_between_steps`,
        `change_weights`)."""
        return self._decoder.module

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
                if self._decoder.vision is not None:
                    self._decoder.vision.clear()
                self._worker.recompute()
            return result

        return await self._run(change)

    async def run_between_steps(self, action: Callable[[], T]) -> T:
        """Run an action that does not change the weights in the engine's thread and return its result."""

        def act() -> T:
            with torch.inference_mode(False):
                return action()

        return await self._run(act)
