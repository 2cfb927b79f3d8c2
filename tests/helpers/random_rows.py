"""Rows of random tokens, and their log-probs by plain transformers."""

from __future__ import annotations

import numpy as np

from raylight.types import LogprobArray, Trajectory


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
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor(row.token_ids[None].tolist())
            logits = module(ids).logits[0, :-1] / row.temperature
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            found.append(logprobs.numpy()[row.prompt_length - 1 :])
    return found
