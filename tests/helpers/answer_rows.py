"""Answers to prompts as rows, and their log-probs by plain transformers."""

from collections.abc import Sequence
from typing import Any

import torch

from raylight.types import Trajectory


def answer_row(
    name: str,
    prompt: Sequence[int],
    answer: Sequence[int],
    logprobs: Sequence[float],
    version: int = 0,
    **more: Any,
) -> Trajectory:
    """Return a row of a prompt and an answer, which was sampled under one version of the weights."""
    before = len(prompt)
    return Trajectory(
        name,
        [*prompt, *answer],
        [0] * before + [1] * len(answer),
        [0.0] * before + [*logprobs],
        [-1] * before + [version] * len(answer),
        **more,
    )


def answer_logprobs(
    model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of the answer's tokens."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor([*answer])[:, None])[:, 0]
