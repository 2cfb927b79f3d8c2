"""The nouns of a rollout's way through the house, and the tables of their states.

A *rollout* is one task given to the agent; an *attempt* is one try at it; a *generation* is one response sampled from the
engine, token for token; a *span* is anything else that happened; a *trajectory* is the sequence of tokens that a learner sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from raylight.config import Config
from raylight.semconv import ANNOTATION, REWARD_PREFIX, reward_attributes

RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "requeuing", "cancelled"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "unresponsive", "timeout"]

ROLLOUT_TRANSITIONS: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"running", "succeeded", "failed", "requeuing", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "requeuing", "cancelled"}),
    "requeuing": frozenset({"preparing", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
ATTEMPT_TRANSITIONS: dict[AttemptStatus, frozenset[AttemptStatus]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "unresponsive", "timeout"}),
    "running": frozenset({"succeeded", "failed", "unresponsive", "timeout"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
WAITING: frozenset[RolloutStatus] = frozenset({"queuing", "requeuing"})
FINISHED: frozenset[RolloutStatus] = frozenset(status for status, following in ROLLOUT_TRANSITIONS.items() if not following)
ATTEMPT_FINISHED: frozenset[AttemptStatus] = frozenset(s for s, following in ATTEMPT_TRANSITIONS.items() if not following)

FailureKind = Literal["agent", "reward", "timeout", "infrastructure"]


class Noun(BaseModel):
    """Base of the records that travel between actors."""

    model_config = ConfigDict(extra="forbid")


class Failure(Noun):
    """Why an attempt did not succeed. By default only `infrastructure` failures are retried, and no failure is scored."""

    kind: FailureKind
    error: str
    """`TypeName: message` on one line."""
    trace: str = ""
    """The agent's own part of the traceback."""


class RolloutConfig(Config):
    """How one rollout is run and retried."""

    timeout_seconds: float | None = Field(default=600.0, gt=0)
    """Wall-clock limit of an attempt; None for no limit."""
    max_attempts: int = Field(default=3, ge=1)
    retry_on: frozenset[FailureKind] = frozenset({"infrastructure"})


class Attempt(Noun):
    """One try at a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first attempt of a rollout."""
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    start_time: float
    end_time: float | None = None
    failure: Failure | None = None


class RolloutRequest(Noun):
    """What an algorithm asks for."""

    input: Any
    mode: RolloutMode | None = None
    group_id: str | None = None
    """Rollouts of the same task that are compared with one another (GRPO) share a group."""
    resources_id: str | None = None
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Rollout(RolloutRequest):
    """One task given to the agent."""

    rollout_id: str
    status: RolloutStatus = "queuing"
    start_time: float
    end_time: float | None = None
    attempt: Attempt | None = None
    """The latest attempt; it alone decides the rollout."""


class Span(Noun):
    """Something that happened during an attempt."""

    rollout_id: str
    attempt_id: str
    name: str
    attributes: dict[str, Any] = Field(default_factory=dict)
    start_time: float
    end_time: float

    @classmethod
    def of_rewards(cls, attempt: Attempt, rewards: dict[str, float], now: float) -> Span:
        """The span that carries an attempt's named rewards, the primary one first."""
        return cls(
            rollout_id=attempt.rollout_id, attempt_id=attempt.attempt_id, name=ANNOTATION,
            attributes=reward_attributes(rewards), start_time=now, end_time=now,
        )  # fmt: skip


def find_final_reward(spans: list[Span]) -> float | None:
    """The primary reward of the last span that carries one."""
    for span in reversed(spans):
        value = span.attributes.get(f"{REWARD_PREFIX}.0.value")
        if value is not None:
            return float(value)
    return None


GREEDY_BELOW = 1e-5
"""A lower temperature means the most probable token, as in vLLM; dividing by it would overflow."""

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class CallKey:
    """Names one call to the engine within an attempt."""

    rollout_id: str
    attempt_id: str
    call_id: str


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
    """What an algorithm gets back: the rollout, its latest attempt's reward, and the generations of that attempt."""

    rollout: Rollout
    reward: float | None
    generations: list[Generation]
