"""Accuracy of a saved starter model, measured by sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raylight.experience.batches.demonstrations import DemonstrationRow

MAX_ANSWERS = 256
"""Answers that are sampled at most."""
BATCH = 64


def sampled_accuracy(folder: Path, rows: Sequence[DemonstrationRow], seed: int) -> float:
    """Return the part of the rows whose answers a saved model gives, each sampled at temperature 1.

    Every answer is sampled after the teacher's answers before it. Whole rows are taken until there are
    `MAX_ANSWERS` answers, but at least one row.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    taken: list[DemonstrationRow] = []
    answers = 0
    for row in rows:
        if taken and answers + len(row.answers) > MAX_ANSWERS:
            break
        taken.append(row)
        answers += len(row.answers)
    asked = [(number, row, start, end) for number, row in enumerate(taken) for start, end in row.answers]
    asked.sort(key=lambda entry: entry[2])
    wrong: set[int] = set()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for group in (asked[i : i + BATCH] for i in range(0, len(asked), BATCH)):
            prompts = [row.tokens[:start] for _, row, start, _ in group]
            longest = max(end - start for *_, start, end in group)
            sampled = _sample(model, tokenizer.pad_token_id, prompts, longest)
            for (number, row, start, end), tokens in zip(group, sampled, strict=True):
                if tokens[: end - start] != row.tokens[start:end]:
                    wrong.add(number)
    return 1 - len(wrong) / len(taken)


def _sample(model: Any, padding: int, prompts: list[list[int]], length: int) -> Iterator[list[int]]:
    """Yield an answer of up to `length` tokens for each prompt."""
    import torch

    width = max(map(len, prompts))
    tokens = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    mask = (torch.arange(width) >= width - lengths).long()
    answers = model.generate(tokens, attention_mask=mask, max_new_tokens=length)
    yield from answers[:, width:].tolist()
