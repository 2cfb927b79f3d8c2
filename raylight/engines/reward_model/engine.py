"""The engine of a reward model on plain transformers."""

from __future__ import annotations

import asyncio

import torch
from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp

from raylight.config import cpu_threads
from raylight.engines.protocol import EngineSettings, InferenceOnlyEngine
from raylight.engines.reward_model.classifier import Classifier

BATCH_ROWS, BATCH_WAIT_S = 512, 0.005
"""Most rows that are computed together, and the time for which the first one waits for others. Rows that come
while a batch is computed are the next one."""


class RewardModelEngine(InferenceOnlyEngine):
    """Scores conversations; concurrent requests share forward passes. It answers no calls of agents.

    Args:
        max_batch_tokens: tokens of one forward pass, padding included.
    """

    not_trainable = "a reward model cannot be trained: it takes no weights"

    def __init__(self, settings: EngineSettings, *, max_batch_tokens: int) -> None:
        from transformers import AutoTokenizer

        super().__init__(settings)
        config = settings.config
        torch.set_num_threads(cpu_threads(config))
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
        self.max_model_len = config.max_model_len
        self._classifier = Classifier(settings.model_path, config.dtype, settings.device, max_batch_tokens)

    async def app(self) -> ASGIApp:
        return Starlette()

    async def classify(self, rows: list[list[int]]) -> list[float]:
        """Return the score of each row of token ids."""
        return list(await asyncio.gather(*map(self._classify_one, rows)))

    @serve.batch(max_batch_size=BATCH_ROWS, batch_wait_timeout_s=BATCH_WAIT_S)
    async def _classify_one(self, rows: list[list[int]]) -> list[float]:
        return await asyncio.to_thread(self._classifier.scores, rows)
