"""Rollouts, attempts, workers and resources: the records that the store keeps, and the tables of the allowed
transitions of their states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, Self, SupportsIndex, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_SECONDS
from raylight.base_config import Config
from raylight.types.json_object import JsonObject

FailureKind = Literal[
    "agent", "reward", "hook", "truncated", "timeout", "unresponsive", "cancelled", "infrastructure"
]
Budget = Literal["max_turns", "max_tokens", "max_seconds"]
"""Budget that a truncated attempt has spent."""
TRUNCATED = "truncated"
"""Metadata key of an attempt: the budget that truncated it."""
TRAINABLE_AGENTS = "trainable_agents"
"""Metadata key of a rollout: ids of the agents that the rollout marked as trainable."""
SOURCE = "source"
"""Metadata key of a rollout: name of the source of its task."""
DRAW = "draw"
"""Metadata key of a rollout: what the sampler of tasks needs to draw its task again."""
GREEDY = "greedy"
"""Metadata key of a rollout that is sampled greedily, as the baseline of others (ReMax)."""
RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "requeuing", "cancelled"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]

ROLLOUT_TRANSITIONS: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"running", "succeeded", "failed", "requeuing", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "requeuing", "cancelled"}),
    "requeuing": frozenset({"preparing", "running", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset({"running", "succeeded"}),
    "cancelled": frozenset(),
}
"""Allowed changes of a rollout's status.

A requeued or failed rollout returns to running, or succeeds, when its latest attempt, which was taken for
unresponsive, responds again.
"""

ATTEMPT_TRANSITIONS: dict[AttemptStatus, frozenset[AttemptStatus]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "unresponsive", "timeout"}),
    "running": frozenset({"succeeded", "failed", "unresponsive", "timeout"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
"""Allowed changes of an attempt's status."""

WAITING: frozenset[RolloutStatus] = frozenset({"queuing", "requeuing"})
"""Statuses of rollouts in the queue."""
FINISHED: frozenset[RolloutStatus] = frozenset({"succeeded", "failed", "cancelled"})
"""Final statuses of rollouts."""
LIVE: frozenset[AttemptStatus] = frozenset({"preparing", "running"})
"""Statuses of attempts that a worker is executing."""
ATTEMPT_FINISHED: frozenset[AttemptStatus] = frozenset(
    status for status, following in ATTEMPT_TRANSITIONS.items() if not following
)
"""Final statuses of attempts."""
RETRIED: frozenset[AttemptStatus] = frozenset({"failed", "unresponsive", "timeout"})
"""Statuses that a `retry_condition` may name."""
Task = TypeVar("Task", covariant=True)
Item = TypeVar("Item")


class StrictModel(BaseModel):
    """Base class of the records that actors exchange: unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


class Failure(StrictModel):
    """Reason why an attempt did not succeed.

    A failed rollout has no reward, unless the algorithm assigns one with `failure_reward`.
    """

    kind: FailureKind
    error: str
    """`TypeName: message` on one line."""
    trace: str = ""
    """Frames of the traceback that belong to the agent's code."""


class RolloutConfig(Config):
    """Limits, retries and budgets of one rollout.

    A budget limits one attempt, counting its calls of models whose tokens raylight records. Once it is spent,
    further calls are answered with status 400 and the code `rollout_truncated`, which SDKs do not retry.
    Calls that began before go on. So concurrent calls may exceed a budget, and so may a call that goes to
    another replica while the tokens of the last one are on their way to the store.
    """

    timeout_seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """Wall-clock limit of an attempt. None: no limit."""
    unresponsive_seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """Longest time between two spans of an attempt, and from its start to its first span. None: no limit."""
    max_attempts: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Maximum number of attempts, the first included. Attempts lost to the infrastructure do not count."""
    retry_condition: list[Literal["failed", "unresponsive", "timeout"]] = Field(default_factory=list)
    """Endings of an attempt after which the rollout is retried, while attempts are left."""
    infrastructure_retries: int = Field(default=2, ge=0, le=MAX_COUNT)
    """Maximum number of retries, regardless of `retry_condition`, after failures of the infrastructure: the
    runner died or stopped sending heartbeats, or the engine was down."""
    max_turns: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Maximum number of answered model calls. None: no limit."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Maximum number of sampled tokens of all calls. A call samples at most the rest, so that its answer may
    end with the finish reason "length". None: no limit."""
    max_seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """Seconds from the start of an attempt after which no further call begins. Unlike `timeout_seconds`, it
    leaves the agent time to end. None: no limit."""
    truncated: Literal["score", "mask", "fail"] = "score"
    """Treatment of an attempt that spent a budget. "score": the reward that the agent returns, or
    `truncated_reward` if it raises an error. "mask": the reward counts in the statistics of its group, and
    its tokens are not trained; without a reward the rollout is left out. "fail": the attempt has failed, and
    is not retried."""
    truncated_reward: float = Field(default=0.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Reward of an attempt whose agent raised an error after it spent a budget, for `truncated="score"`.
    Where rewards are costs, set it to the lowest: 0 would be the best of them."""

    @field_validator("timeout_seconds", "unresponsive_seconds", "max_seconds", mode="before")
    @classmethod
    def _read_infinity(cls, seconds: object) -> Any:
        """Return None for infinity, which means no limit too."""
        return None if isinstance(seconds, float) and seconds == math.inf else seconds

    @field_validator("retry_condition", mode="before")
    @classmethod
    def _sort_set(cls, condition: object) -> Any:
        return sorted(condition, key=str) if isinstance(condition, set | frozenset) else condition

    @property
    def has_budgets(self) -> bool:
        """True if a budget is set."""
        return not (self.max_turns is self.max_tokens is self.max_seconds is None)

    def __hash__(self) -> int:
        return hash(tuple(map(str, self.__dict__.values())))


class Attempt(StrictModel):
    """One execution of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first attempt of a rollout."""
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    start_time: float
    end_time: float | None = None
    last_heartbeat_time: float | None = None
    """Time of its last span, or of the last heartbeat of its worker for it."""
    failure: Failure | None = None
    metadata: JsonObject | None = None

    @property
    def truncated(self) -> Budget | None:
        """Budget that truncated the attempt; None if none did."""
        return (self.metadata or {}).get(TRUNCATED)


class EnqueueRolloutRequest(StrictModel):
    """Request of an algorithm for one rollout."""

    input: Any
    """The task, as the agent receives it."""
    mode: RolloutMode | None = None
    group_id: str | None = None
    """Group of rollouts of the same task, whose rewards are compared with one another (GRPO)."""
    resources_id: str | None = None
    """Version of the resources. None: the latest one at the time of enqueueing."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    """Time limits and retries. None: the defaults."""
    metadata: JsonObject = Field(default_factory=dict)
    rollout_id: str | None = None
    """Id chosen by the caller. None: the store assigns one. Enqueueing a known id returns the existing
    rollout."""

    @field_validator("config", "metadata", mode="before")
    @classmethod
    def _replace_none(cls, value: object) -> Any:
        return {} if value is None else value


class RolloutState(StrictModel):
    """Status of a rollout, without its input, its config and its metadata."""

    rollout_id: str
    mode: RolloutMode | None = None
    group_id: str | None = None
    resources_id: str | None = None
    resources_version: int | None = None
    """Version of its resources at the time of reading."""
    status: RolloutStatus = "queuing"
    start_time: float
    end_time: float | None = None
    attempt: Attempt | None = None
    """The latest attempt, which alone decides the rollout."""

    @property
    def failure(self) -> Failure | None:
        """Failure of the latest attempt; None if there is none."""
        return self.attempt.failure if self.attempt else None


class Rollout(RolloutState, EnqueueRolloutRequest):
    """One task given to the agent."""

    rollout_id: str

    def mark_agent_as_trainable(self, agent_id: str) -> None:
        """Mark an agent, so that its calls are trained on.

        Once one agent is marked, calls of unmarked agents are not trained on. Call it inside the rollout.
        """
        marked = self.metadata.setdefault(TRAINABLE_AGENTS, [])
        if agent_id not in marked:
            marked.append(agent_id)


class AttemptedRollout(Rollout):
    """A rollout that has an attempt, as a runner dequeues it."""

    attempt: Attempt
    """The latest attempt, which alone decides the rollout."""

    @model_validator(mode="after")
    def _check_attempt(self) -> Self:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(
                f"attempt {self.attempt.attempt_id} belongs to rollout {self.attempt.rollout_id}, not to "
                f"{self.rollout_id}"
            )
        return self


class RolloutTokens(NamedTuple):
    """Numbers of tokens that a decided rollout sampled."""

    latest: int
    """Tokens of its latest attempt, up to the decision."""
    earlier: int
    """Tokens of its earlier attempts, up to the decision."""
    late: int
    """Tokens of its latest attempt after the decision."""


class TokenTotals(NamedTuple):
    """Numbers of tokens that the rollouts of a run sampled."""

    sampled: int
    """Tokens up to the decision of their rollout."""
    open: int
    """Tokens among these of rollouts that no training step has taken."""
    late: int
    """Tokens after the decision of their rollout."""


class Worker(StrictModel):
    """State of a runner in the store."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: JsonObject | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    """Time at which it last began an attempt."""
    last_idle_time: float | None = None
    """Time at which it last finished its only running attempt."""
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    """The attempt that it began last, while that is running."""


class ResourcesUpdate(StrictModel):
    """One version of the named resources."""

    resources_id: str
    version: int
    """1 for the first version; `update_resources` increments it."""
    create_time: float
    update_time: float
    resources: JsonObject


class StepGroups(NamedTuple):
    """Numbers of the groups of rollouts that a training step took."""

    trained: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    """Groups that were too old to be trained."""

    @property
    def all(self) -> tuple[int, ...]:
        """Trained and dropped groups."""
        return self.trained + self.dropped


class Dataset(Protocol[Task]):
    """Protocol of datasets: a list, a `torch.utils.data.Dataset`, or any sequence of tasks. No class needs to
    inherit from it."""

    def __getitem__(self, index: SupportsIndex, /) -> Task: ...

    def __len__(self) -> int: ...


class PaginatedResult(list[Item]):
    """List of the results of a query, with the page that they are.

    Args:
        items: the results on the page.
        limit: maximum number of results that the query asked for; -1 for all.
        offset: number of results before the page.
        total: number of results on all pages. None: the page holds all of them.
    """

    def __init__(
        self, items: Iterable[Item] = (), *, limit: int = -1, offset: int = 0, total: int | None = None
    ) -> None:
        super().__init__(items)
        self.limit = limit
        self.offset = offset
        self.total = len(self) if total is None else total

    def __repr__(self) -> str:
        end = "" if self.limit == -1 else self.offset + self.limit
        first = "empty" if not self else f"[{self[0]!r}, ...]" if len(self) > 1 else f"[{self[0]!r}]"
        return f"<PaginatedResult ({self.offset}:{end} of {self.total}) {first}>"
