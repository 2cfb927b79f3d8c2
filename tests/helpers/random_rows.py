"""Rows of random tokens, and their log-probs by plain transformers."""

from typing import Any

import numpy as np

from raylight.types import LogprobArray, TopLogprobs, Trajectory


def random_rows(count: int, longest: int = 40) -> list[Trajectory]:
    """Return rows of at least three tokens at two temperatures, whose prompts end at random places."""
    generator = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(generator.integers(3, longest, count, endpoint=True)):
        mask = np.zeros(length, np.int8)
        mask[generator.integers(1, length) :] = 1
        ids = generator.integers(0, 256, length)
        rows.append(
            Trajectory("r", ids, mask, np.zeros(length), np.where(mask, 0, -1), (1.0, 0.7)[number % 2])
        )
    return rows


def plain_logprobs(model: str, rows: list[Trajectory]) -> list[LogprobArray]:
    """Return the log-probs of the tokens after each row's prompt, at its temperature."""
    found = []
    for row, logprobs in zip(rows, _distributions(model, rows), strict=True):
        answer = row.token_ids[row.prompt_length :].astype(np.int64)
        found.append(np.take_along_axis(logprobs, answer[:, None], -1)[:, 0])
    return found


def plain_tops(model: str, rows: list[Trajectory], k: int) -> list[TopLogprobs]:
    """Return the k most probable tokens in the place of each token after a row's prompt."""
    found = []
    for logprobs in _distributions(model, rows):
        ids = np.argsort(-logprobs, -1)[:, :k]
        found.append(TopLogprobs(ids.astype(np.int32), np.take_along_axis(logprobs, ids, -1)))
    return found


def _distributions(model: str, rows: list[Trajectory]) -> list[Any]:
    """Return the log-probs of all tokens in the place of each token after a row's prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor(row.token_ids[None].tolist())
            logits = module(ids).logits[0, row.prompt_length - 1 : -1] / row.temperature
            found.append(logits.log_softmax(-1).numpy())
    return found
