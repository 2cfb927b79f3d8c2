"""Rollouts and their attempts, and what the store keeps beside them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from raylight.config import Config
from raylight.types.states import AttemptStatus, RolloutMode, RolloutStatus, WorkerStatus

FailureKind = Literal["agent", "reward", "hook", "timeout", "unresponsive", "cancelled", "infrastructure"]
TRAINABLE_AGENTS = "trainable_agents"
"""Key of a rollout's metadata: the agents that the rollout itself marked as trainable."""
GREEDY = "greedy"
"""Key of a rollout's metadata: it is to take the most probable tokens, and others are compared with it."""


class Noun(BaseModel):
    """Base of the records that travel between actors."""

    model_config = ConfigDict(extra="forbid")


class Failure(Noun):
    """Why an attempt did not succeed. No failure is scored unless the algorithm says so."""

    kind: FailureKind
    error: str
    """`TypeName: message` on one line."""
    trace: str = ""
    """The agent's own part of the traceback."""


class RolloutConfig(Config):
    """How one rollout is run and retried."""

    timeout_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock limit of an attempt; None for no limit."""
    unresponsive_seconds: float | None = Field(default=None, gt=0)
    """Limit of the silence between two spans of an attempt (the first counts from its start); None for no limit."""
    max_attempts: int = Field(default=1, ge=1)
    """Attempts in all, the first one included; those lost to the infrastructure do not count."""
    retry_condition: frozenset[Literal["failed", "unresponsive", "timeout"]] = frozenset()
    """Attempts that end so are tried again while there are attempts left."""
    infrastructure_retries: int = Field(default=2, ge=0)
    """How often a rollout is tried again, whatever `retry_condition` says, because the infrastructure failed it: its runner died
    or was not heard of again, or the engine was down."""


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
    last_heartbeat_time: float | None = None
    """When its last span came, or its worker last said that it works on it."""
    failure: Failure | None = None
    metadata: dict[str, Any] | None = None


class EnqueueRolloutRequest(Noun):
    """What an algorithm asks for."""

    input: Any
    mode: RolloutMode | None = None
    group_id: str | None = None
    """Rollouts of the same task that are compared with one another (GRPO) share a group."""
    resources_id: str | None = None
    """Version of the resources; None takes the latest when the rollout is enqueued."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = Field(default_factory=dict)
    rollout_id: str | None = None
    """An id of one's own: enqueueing it again changes nothing and gives the rollout that is there."""

    @field_validator("metadata", mode="before")
    @classmethod
    def _none_is_empty(cls, metadata: Any) -> Any:
        return {} if metadata is None else metadata


class Rollout(EnqueueRolloutRequest):
    """One task given to the agent."""

    rollout_id: str
    resources_version: int | None = None
    """Of its resources, when this was read."""
    status: RolloutStatus = "queuing"
    start_time: float
    end_time: float | None = None
    attempt: Attempt | None = None
    """The latest attempt; it alone decides the rollout."""

    def mark_agent_as_trainable(self, agent_id: str) -> None:
        """Train on this agent's calls; as soon as one agent is marked, those of others are left out. Call it inside the rollout."""
        marked = self.metadata.setdefault(TRAINABLE_AGENTS, [])
        if agent_id not in marked:
            marked.append(agent_id)


class Worker(Noun):
    """What the store knows of a runner."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    """When it last began an attempt."""
    last_idle_time: float | None = None
    """When it last ended its only attempt."""
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    """The attempt that it began last, if that goes on."""


class ResourcesUpdate(Noun):
    """One version of the named resources."""

    resources_id: str
    version: int
    """1 for the first; `update_resources` raises it."""
    create_time: float
    update_time: float
    resources: dict[str, Any]
