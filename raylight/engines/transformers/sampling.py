"""Sampling parameters, and the sampling of the next token of each row with its log-prob."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import torch

from raylight.engines.capture_context import CONSTRAINED
from raylight.types import GREEDY_BELOW, NEVER_SAMPLED_BELOW, IntArray, JsonObject

History = tuple[IntArray, list[int]]
"""Prompt and output tokens of a row."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one response. Every default has no effect."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    """Tokens whose probability is below this share of the most probable token's are excluded."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value added to its logit."""
    min_tokens: int = 0
    """Tokens sampled before the response may end."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, in addition to the model's own; the response includes them."""
    top_logprobs: int = 0
    """Number of most probable tokens to report per position."""
    grammar: object = field(default=None, compare=False)
    """Compiled grammar that constrains the response, see `grammar.py`."""

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def constrained(self) -> bool:
        """True if a grammar, a bias, a penalty or `min_tokens` changes the policy's distribution."""
        return self.grammar is not None or self.adjusts_logits

    @property
    def adjusts_logits(self) -> bool:
        """True if a bias, a penalty or `min_tokens` changes the logits."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
        )

    def as_record(self) -> JsonObject:
        """Return temperature, max_tokens, and all other parameters that differ from their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "grammar"}
        defaults = vars(SamplingParams(self.max_tokens))
        record = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name in ("temperature", "max_tokens") or value != defaults[name]
        }
        return record | ({CONSTRAINED: True} if self.grammar is not None else {})


@dataclass(frozen=True)
class SampledTokens:
    """One sampled token per row.

    Attributes:
        tokens: token ids.
        logprobs: their log-probabilities.
        top_logprobs: per row, pairs of token id and log-probability of the most probable tokens. Every row
            has as many as the row that requested the most; empty if no row requested any.
        allowed: tokens that could have been sampled, and the sampled token's log-probability under the policy
            alone, by row; only rows with a constraint.
    """

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    allowed: dict[int, tuple[int, float]]


def distribution(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return the log-probabilities of all tokens after temperature, min-p, top-k and top-p.

    Args:
        logits: shape (rows, vocabulary).
        params: one per row. A greedy row has temperature 1, as in vLLM.
    """
    logits = _heat(logits.float(), params)
    if any(p.min_p for p in params):
        # log(0) is -inf, which excludes nothing
        floor = torch.tensor([p.min_p for p in params], device=logits.device).log()
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], -torch.inf)
    if any(p.top_k or p.top_p < 1 for p in params):
        logits = truncate(logits, params)
    return logits.log_softmax(-1)


def draw(
    logprobs: torch.Tensor,
    params: list[SamplingParams],
    generators: list[torch.Generator | None],
    shared: torch.Generator,
    policy_logits: torch.Tensor | None = None,
) -> SampledTokens:
    """Draw the next token of each row.

    Args:
        logprobs: the rows' distributions, shape (rows, vocabulary).
        params: one per row.
        generators: one per row; None draws from `shared`.
        shared: the engine's own random generator.
        policy_logits: the logits without the rows' constraints; None if no row has one.
    """
    tokens = _draw(logprobs, shared)
    for row, generator in enumerate(generators):
        if generator is not None:
            tokens[row] = _draw(logprobs[row : row + 1], generator)[0]
    greedy = [p.greedy for p in params]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logprobs.device), logprobs.argmax(-1), tokens)
    sampled = logprobs.gather(-1, tokens[:, None])[:, 0]
    top_count = min(max(p.top_logprobs for p in params), logprobs.shape[-1])
    top_rows: list[list[tuple[int, float]]] = []
    if top_count:
        values, ids = logprobs.topk(top_count)
        top_rows = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    allowed = {} if policy_logits is None else _allowed(logprobs, policy_logits, params, tokens)
    return SampledTokens(tokens.tolist(), sampled.tolist(), top_rows, allowed)


def _heat(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Divide each row of logits (rows, vocabulary) by its temperature, 1 for a greedy row."""
    if all(p.greedy or p.temperature == 1 for p in params):
        return logits
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    return logits / torch.tensor(temperatures, device=logits.device)[:, None]


def _allowed(
    logprobs: torch.Tensor, policy_logits: torch.Tensor, params: list[SamplingParams], tokens: torch.Tensor
) -> dict[int, tuple[int, float]]:
    """Return `SampledTokens.allowed`: the count is 0 where the constraint did not change the distribution."""
    rows = [row for row, p in enumerate(params) if p.constrained]
    sampled, chosen = logprobs[rows], tokens[rows][:, None]
    policy = _heat(policy_logits[rows].float(), [params[row] for row in rows]).log_softmax(-1)
    changed = ~torch.isclose(sampled, policy, rtol=0, atol=1e-5)
    counts = (sampled > NEVER_SAMPLED_BELOW).sum(-1).where(changed.any(-1), 0)
    values = policy.gather(-1, chosen)[:, 0]
    return dict(zip(rows, zip(counts.tolist(), values.tolist(), strict=True), strict=True))


def adjust_logits(
    logits: torch.Tensor, params: list[SamplingParams], histories: list[History], stop_ids: Iterable[int]
) -> torch.Tensor:
    """Apply each row's bias and penalties, and exclude stop tokens while a row has fewer than `min_tokens`.

    Args:
        logits: shape (rows, vocabulary); not modified.
    """
    logits = logits.float().clone()
    stops = list(stop_ids)
    for row, (p, (prompt, output)) in enumerate(zip(params, histories, strict=True)):
        if not p.adjusts_logits:
            continue
        line = logits[row]
        if len(output) < p.min_tokens:
            line[[*stops, *p.stop_token_ids]] = -torch.inf
        if p.logit_bias:
            ids, bias = zip(*p.logit_bias, strict=True)
            line[list(ids)] += torch.tensor(bias, device=line.device)
        if p.repetition_penalty != 1:
            seen = torch.tensor(sorted({*prompt.tolist(), *output}), device=line.device)
            old = line[seen]
            line[seen] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        if output and (p.presence_penalty or p.frequency_penalty):
            used, counts = torch.tensor(output, device=line.device).unique(return_counts=True)
            line[used] -= p.presence_penalty + p.frequency_penalty * counts
    return logits


def truncate(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Mask all logits, shape (rows, vocabulary), but each row's top-k and, of these, its top-p tokens."""
    ordered, order = logits.sort(-1, descending=True)
    size = logits.shape[-1]
    top_k = torch.tensor([min(p.top_k or size, size) for p in params], device=logits.device)
    rank = torch.arange(size, device=logits.device)
    ordered = ordered.masked_fill(rank[None] >= top_k[:, None], -torch.inf)
    top_p = torch.tensor([p.top_p for p in params], device=logits.device)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # total probability of more probable tokens
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank[None] > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _draw(logprobs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one token per row by an exponential race.

    Unlike `multinomial`, it does not synchronise, and has no size limit.
    """
    race = torch.empty_like(logprobs).exponential_(generator=generator)
    return (logprobs.exp() / race).argmax(-1)
