"""One request of an agent on its way through a replica, and what the engine sampled for it.

The tap opens an exchange for each request within an attempt's scope; the engine, wherever it samples for the request, finds it in
`CURRENT` and adds a `Sample` per choice; the tap hands both to the recorder at the end.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.types import CallKey, FinishReason

CONSTRAINED = "constrained"
"""In a sample's `sampling`: a grammar or a list of tokens cut the distribution."""


@dataclass(frozen=True)
class AttemptScope:
    """The attempt that a request belongs to."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None
    """The agent that calls, if its URL names one."""


@dataclass
class Sample:
    """One choice as it is sampled. The engine appends to it while it samples, so that an aborted one has all there was.

    Invariant: `output_ids`, `logprobs` and `weight_versions` are equally long, one entry a token, in the order of sampling.
    """

    index: int
    """Of the choice in the answer."""
    prompt_ids: list[int]
    sampling: Mapping[str, Any]
    """At least `temperature`; what else was asked for (top_p, top_k, seed, ...)."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the distribution really sampled from: after temperature, top-k and top-p."""
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "aborted"
    """"aborted" until the engine says otherwise."""


@dataclass
class CaptureContext:
    """A request within an attempt's scope, and its samples."""

    scope: AttemptScope
    dialect: str
    """What the agent spoke; `body` is in the engine's words all the same."""
    body: dict[str, Any]
    """The chat or completions request as it goes to the engine, without a prompt in tokens."""
    start_time: float
    keys: list[CallKey]
    """One per choice that was asked for, in the order of their indices."""
    prompt: Literal["rendered", "spliced", "partly"] = "rendered"
    """Whether the engine rendered the messages itself, or was given the conversation's own tokens and the new turns; "partly": its
    own tokens only up to an earlier answer, and later ones rendered."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """By index."""

    def sample(self, index: int, prompt_ids: list[int], sampling: Mapping[str, Any]) -> Sample:
        """Begin a choice. The engine calls this before it samples."""
        found = self.samples[index] = Sample(index, prompt_ids, sampling)
        return found


CURRENT: ContextVar[CaptureContext | None] = ContextVar("raylight_exchange", default=None)
"""The exchange that the running task works for; None where nothing is to be recorded."""
SCOPE: ContextVar[AttemptScope | None] = ContextVar("raylight_scope", default=None)
"""The attempt whose address was called; None outside of any."""


def new_keys(scope: AttemptScope, count: int, request: str = "") -> list[CallKey]:
    """Fresh keys for the choices of a request, of which `request` is a digest."""
    return [CallKey(scope.rollout_id, scope.attempt_id, uuid.uuid4().hex, request) for _ in range(count)]
