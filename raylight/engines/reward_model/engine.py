"""The engine of a reward model on plain transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp

from raylight.config import cpu_threads
from raylight.engines.protocol import EngineSettings, InferenceOnlyEngine
from raylight.errors import EngineStartError
from raylight.types import Tokenizer

BATCH_ROWS, BATCH_WAIT_S = 512, 0.005
"""Most rows that are computed together, and the time for which the first one waits for others. Rows that come
while a batch is computed are the next one."""


class RewardModelEngine(InferenceOnlyEngine):
    """Scores conversations; concurrent requests share forward passes. It answers no calls of agents.

    Args:
        max_batch_tokens: tokens of one forward pass, padding included.
    """

    tokenizer: Tokenizer
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
        """Return the output of the head for each row of token ids, before any activation."""
        return list(await asyncio.gather(*map(self._classify_one, rows)))

    @serve.batch(max_batch_size=BATCH_ROWS, batch_wait_timeout_s=BATCH_WAIT_S)
    async def _classify_one(self, rows: list[list[int]]) -> list[float]:
        return await asyncio.to_thread(self._classifier.scores, rows)


class Classifier:
    """`AutoModelForSequenceClassification` with one label.

    Args:
        path: folder of the model.
        dtype: data type of weights and computation.
        device: torch device.
        max_batch_tokens: tokens of one forward pass, padding included.

    Raises:
        EngineStartError: weights of the model are missing.
    """

    def __init__(self, path: str, dtype: str, device: str, max_batch_tokens: int) -> None:
        from transformers import AutoModelForSequenceClassification

        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True
        )
        self._model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise EngineStartError(
                f"the reward model {path} lacks {len(missing)} weights, such as {missing[0]}, which would be "
                "random; save it with its trained head"
            )
        self._model.eval().to(device)
        self._pad: int | None = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        self._max_batch_tokens = max_batch_tokens

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of token ids."""
        found = [0.0] * len(rows)
        # without a padding token, transformers computes one row at a time
        most = self._max_batch_tokens if self._pad is not None else 0
        for part in padded_batches([len(row) for row in rows], most):
            for index, score in zip(part, self._forward([rows[index] for index in part]), strict=True):
                found[index] = score
        return found

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest, pad = max(map(len, rows)), self._pad or 0
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        device = self._model.device
        logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits[:, 0].float().tolist()


def padded_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the indices of all rows in batches of similar lengths, each of at most so many tokens when padded
    to its longest row. A longer row is a separate batch."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
