"""Model of rollouts and attempts for the state machine test of the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from store_helpers import LEASE_S

from raylight.types import Generation, Rollout, RolloutConfig

FINAL = ("succeeded", "failed", "timeout")
OVER = ("succeeded", "failed", "cancelled")
LIVE = ("preparing", "running")
CONFIGS = [
    RolloutConfig(),
    RolloutConfig(timeout_seconds=100, max_attempts=2, retry_condition={"timeout", "failed"}),
    RolloutConfig(
        unresponsive_seconds=30, max_attempts=3, retry_condition={"unresponsive"}, infrastructure_retries=0
    ),
    RolloutConfig(timeout_seconds=50, unresponsive_seconds=20, infrastructure_retries=1),
]


@dataclass(eq=False)
class Try:
    """Expected state of an attempt."""

    rollout: Known
    taken: Rollout
    worker: str | None
    leased: bool
    start: float
    status: str = "preparing"
    heard: float = 0.0
    """Time of its last heartbeat, span or call."""
    spoke: float = 0.0
    """Time of its last span."""
    timeout_from: float = 0.0
    silent_from: float = 0.0
    """Earliest times of its limits, after the store was away."""
    lost: bool = False
    charged: bool = False
    infrastructure: bool = False
    """True if its failure is one of the infrastructure."""
    ended: float | None = None
    spans: list[str] = field(default_factory=list)
    reward: float | None = None
    open: set[str] = field(default_factory=set)
    recorded: dict[str, Generation] = field(default_factory=dict)

    def silent_at(self) -> float | None:
        seconds = self.rollout.config.unresponsive_seconds
        return max(self.spoke + seconds, self.silent_from) if seconds else None

    def limit(self) -> float:
        return self.start + (self.rollout.config.timeout_seconds or 1e99)

    def timeout_at(self) -> float:
        return max(self.limit(), self.timeout_from)

    def what_ended(self, end: tuple[float, str, bool], now: float) -> tuple[float, str, bool]:
        """Return the end that counts: lost if its lease ended first, else by the most severe limit."""
        when, how, infrastructure = end
        if self.timeout_at() <= now:
            return when, "failed" if infrastructure else "timeout", infrastructure
        return when, how, infrastructure

    def end(self) -> tuple[float, str, bool] | None:
        """Deadline, final status, and True if the infrastructure is the cause; None without a deadline."""
        config, ends = self.rollout.config, []
        if self.status in FINAL:
            return None
        if config.timeout_seconds:
            ends.append((self.timeout_at(), 0, "timeout", self.lost))
        if self.status != "unresponsive":
            if (silent_at := self.silent_at()) is not None:
                ends.append((silent_at, 1, "unresponsive", False))
            if self.leased:
                ends.append((self.heard + LEASE_S, 2, "unresponsive", True))
        if not ends:
            return None
        when, _, how, infrastructure = min(ends)
        return when, how, infrastructure


@dataclass(eq=False)
class Known:
    """Expected state of a rollout."""

    config: RolloutConfig
    status: str = "queuing"
    tries: list[Try] = field(default_factory=list)
    lost: int = 0
    charged: int = 0
    """Number of lost attempts that are charged to the rollout."""
    suspect: bool = False
    held_until: float = 0.0
    """Time until which it is held back in the queue."""

    def verdict(self, status: str, infrastructure: bool) -> str:
        """Expected status after the failure of its latest attempt."""
        if infrastructure and self.charged <= self.config.infrastructure_retries:
            return "requeuing"
        innocent = self.lost - self.charged
        counted = len(self.tries) - innocent - min(self.charged, self.config.infrastructure_retries)
        return (
            "requeuing"
            if status in self.config.retry_condition and counted < self.config.max_attempts
            else "failed"
        )
