"""Sampling a batch of next tokens, each row with its own settings, and the log-probabilities really sampled from."""

from __future__ import annotations

import torch

from raylight.serving.engine import SamplingParams


def sample(
    logits: torch.Tensor, params: list[SamplingParams], generators: list[torch.Generator | None], shared: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens and their log-probabilities.

    Args:
        logits: shape (rows, vocabulary).
        params: one per row.
        generators: one per row; None draws from `shared`.
        shared: the engine's own source of randomness.

    Returns:
        Token ids and log-probabilities, both of shape (rows,). Log-probabilities are of the distribution after temperature, top-k
        and top-p; for a greedy request they are those of temperature 1, as in vLLM.
    """
    logits = logits.float()
    greedy = torch.tensor([p.greedy for p in params], device=logits.device)
    if any(not p.greedy and p.temperature != 1 for p in params):
        temperatures = torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=logits.device)
        logits = logits / temperatures[:, None]
    if any(p.top_k or p.top_p < 1 for p in params):
        logits = truncate(logits, params)
    logprobs = logits.log_softmax(-1)
    tokens = _draw(logprobs, shared)
    for row, generator in enumerate(generators):
        if generator is not None:
            tokens[row] = _draw(logprobs[row : row + 1], generator)[0]
    if bool(greedy.any()):
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


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
