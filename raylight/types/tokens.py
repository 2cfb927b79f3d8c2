"""What was sampled, token for token, and what a learner sees of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.types.rollouts import Rollout
from raylight.types.spans import Span

GREEDY_BELOW = 1e-5
"""A lower temperature means the most probable token, as in vLLM; dividing by it would overflow."""

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class CallKey:
    """Names one call to the engine within an attempt."""

    rollout_id: str
    attempt_id: str
    call_id: str
    request: str = field(default="", compare=False, repr=False)
    """A digest of what was asked. Where the replica that was asked died, the same request again tells that it had not answered."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response, exactly as the engine saw it.

    Invariants: `len(output_ids) == len(logprobs) == len(weight_versions)`; ids are the engine's own and were never re-tokenised;
    `logprobs` are of the distribution really sampled from.
    """

    key: CallKey
    model: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    start_time: float
    end_time: float
    sampling: dict[str, Any] = field(default_factory=dict)
    agent: str | None = None
    """The agent that called, where the rollout has several and names them (`llm.for_agent`)."""

    @property
    def temperature(self) -> float:
        """Temperature of the distribution that `logprobs` are of; 1 for the most probable token (temperature 0)."""
        temperature = self.sampling.get("temperature", 1.0)
        return temperature if temperature >= GREEDY_BELOW else 1.0

    def __post_init__(self) -> None:
        if not len(self.output_ids) == len(self.logprobs) == len(self.weight_versions):
            raise ValueError(
                f"generation {self.key.call_id}: {len(self.output_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.weight_versions)} weight versions must be equally many"
            )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A token sequence to be trained on: prompt, responses and the observations between them.

    All lists have one entry per token. Invariants: `mask[i] == 1` exactly where the token was sampled in this attempt and is
    trained here; `logprobs[i]` and `weight_versions[i]` are 0 and -1 where `mask[i] == 0`; `mask[0] == 0`.
    """

    rollout_id: str
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    temperature: float = 1.0
    """At which all its trained tokens were sampled."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.mask.index(1)

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """What an algorithm gets back: the rollout, and what its latest attempt left."""

    rollout: Rollout
    reward: float | None
    generations: list[Generation]
    """In the order in which the calls began."""
    spans: list[Span] = field(default_factory=list)
    """In the order of their sequence ids; empty where only tokens were asked for."""
    rewards: dict[str, float] = field(default_factory=dict)
    """All rewards that were given together with `reward`, by name, that one first; empty without a reward."""
