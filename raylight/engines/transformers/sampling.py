"""Sampling a batch of next tokens, each row with its own settings, and the log-probabilities really sampled from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from raylight.engines.transformers.params import SamplingParams

History = tuple[list[int], list[int]]
"""Prompt and output tokens of a row."""


@dataclass(frozen=True)
class Drawn:
    """One token per row.

    Attributes:
        tops: per row the likeliest tokens and their log-probabilities, as many as the row that asked for the most of them; empty
            if none did.
    """

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    generators: list[torch.Generator | None],
    shared: torch.Generator,
) -> Drawn:
    """Next tokens and their log-probabilities.

    Args:
        logits: shape (rows, vocabulary).
        params: one per row.
        generators: one per row; None draws from `shared`.
        shared: the engine's own source of randomness.

    Returns:
        Tokens with log-probabilities of the distribution after temperature, top-k, top-p and min-p; for a greedy request they are
        those of temperature 1, as in vLLM.
    """
    logits = logits.float()
    if any(not p.greedy and p.temperature != 1 for p in params):
        temperatures = torch.tensor(
            [1.0 if p.greedy else p.temperature for p in params], device=logits.device
        )
        logits = logits / temperatures[:, None]
    if any(p.min_p for p in params):
        floor = torch.tensor(
            [p.min_p for p in params], device=logits.device
        ).log()  # of 0: -inf, so that all are kept
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], -torch.inf)
    if any(p.top_k or p.top_p < 1 for p in params):
        logits = truncate(logits, params)
    logprobs = logits.log_softmax(-1)
    tokens = _draw(logprobs, shared)
    for row, generator in enumerate(generators):
        if generator is not None:
            tokens[row] = _draw(logprobs[row : row + 1], generator)[0]
    greedy = [p.greedy for p in params]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    most = min(max(p.top_logprobs for p in params), logits.shape[-1])
    tops = logprobs.topk(most) if most else None
    rows = (
        []
        if tops is None
        else [list(zip(*row, strict=True)) for row in zip(tops[1].tolist(), tops[0].tolist(), strict=True)]
    )
    return Drawn(tokens.tolist(), chosen.tolist(), rows)


def adjust(
    logits: torch.Tensor, params: list[SamplingParams], histories: list[History], stop_ids: Iterable[int]
) -> torch.Tensor:
    """Logits after each row's bias and penalties, and without `stop_ids` where the row must not end yet."""
    logits = logits.float().clone()
    ends = list(stop_ids)
    for row, (p, (prompt, output)) in enumerate(zip(params, histories, strict=True)):
        if not p.adjusts:
            continue
        line = logits[row]
        if len(output) < p.min_tokens:
            line[ends] = -torch.inf
        if p.logit_bias:
            ids, bias = zip(*p.logit_bias, strict=True)
            line[list(ids)] += torch.tensor(bias, device=line.device)
        if p.repetition_penalty != 1:
            seen = torch.tensor(sorted({*prompt, *output}), device=line.device)
            old = line[seen]
            line[seen] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        if output and (p.presence_penalty or p.frequency_penalty):
            used, counts = torch.tensor(output, device=line.device).unique(return_counts=True)
            line[used] -= p.presence_penalty + p.frequency_penalty * counts
    return logits


def truncate(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Keep each row's top-k tokens and, of those, the smallest set whose probability reaches top-p."""
    ordered, order = logits.sort(-1, descending=True)
    size = logits.shape[-1]
    top_k = torch.tensor([p.top_k or size for p in params], device=logits.device)
    rank = torch.arange(size, device=logits.device)
    ordered = ordered.masked_fill(rank[None] >= top_k[:, None], -torch.inf)
    top_p = torch.tensor([p.top_p for p in params], device=logits.device)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all likelier tokens
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank[None] > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _draw(logprobs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token per row by the exponential race, which is `multinomial` without its synchronisation and size limits."""
    race = torch.empty_like(logprobs).exponential_(generator=generator)
    return (logprobs.exp() / race).argmax(-1)
