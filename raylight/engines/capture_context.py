"""The capture context: one agent request within a replica, and the samples that an engine draws for it.

The capture middleware opens a context for each request within an attempt's scope. An engine that samples for
the request finds the context in `CURRENT` and adds a `Sample` per choice. At the end, the middleware passes
both to the recorder.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raylight.experience.trajectories.off_policy import is_replayable
from raylight.types import CallKey, FinishReason, HistoryNote, IntArray, JsonObject, RouteArray, TokenSets
from raylight.types.images import PlacedImage

CONSTRAINED = "constrained"
"""Key in a sample's `sampling`: True if a grammar or a list of allowed tokens restricts the response."""
OVERRIDDEN = "overridden"
"""Key in a generation's `sampling`: requested parameters that `override_sampling` replaced."""
REQUESTED_MODEL_KEY = "raylight.requested_model"
"""Key in the ASGI scope: the model name of a request that the served model answers in its place."""


@dataclass(frozen=True)
class AttemptScope:
    """The attempt that a request belongs to."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None
    """Name of the calling agent, if its URL has one."""
    trains: bool = field(default=False, compare=False)
    """True if the calls of its rollout are trained."""
    has_budgets: bool = field(default=False, compare=False)
    """True if its rollout has a budget."""


@dataclass
class Sample:
    """The tokens of one choice.

    The engine appends to it while it samples, so that an aborted choice is complete too.

    Invariant: `output_ids`, `logprobs` and `weight_versions` have equal length, one entry per token, in
        sampling order; so have `policy_logprobs` and `allowed`, if the request has a constraint, and
        `candidates`, if they are kept.
    """

    index: int
    """Index of the choice in the response."""
    prompt_ids: IntArray
    sampling: Mapping[str, object]
    """Sampling parameters: `temperature`, and all others that were requested (top_p, top_k, seed, ...)."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the distribution really sampled from: after temperature, constraint, top-k and top-p."""
    weight_versions: list[int] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    """Log-probs after temperature alone, if the request has a constraint (`raylight.types.Generation`)."""
    allowed: list[int] = field(default_factory=list)
    """Number of tokens that could have been sampled, if the request has a constraint; 0 where it did not
    change the distribution."""
    keeps_candidates: bool = False
    """True if the request truncates or penalises, and its tokens may be trained."""
    candidates: list[TokenSets] = field(default_factory=list)
    """Tokens that could have been sampled, a part for each output of the engine."""
    routes: list[RouteArray] = field(default_factory=list)
    """Parts of the routes of prompt and output, in the order of the tokens, if the engine records them."""
    finish_reason: FinishReason = "aborted"
    """"aborted" until the engine sets another reason."""

    @property
    def token_ids(self) -> IntArray:
        """Token ids of the prompt and of the sampled tokens so far, shape (tokens,)."""
        return np.concatenate([self.prompt_ids, np.array(self.output_ids, np.int32)])

    @property
    def routed_experts(self) -> RouteArray | None:
        """Routes of all tokens but the last, (tokens, layers, experts of a token); None if one is missing."""
        computed = len(self.prompt_ids) + len(self.output_ids) - 1
        if not self.output_ids or sum(map(len, self.routes)) < computed:
            return None
        return np.concatenate(self.routes)[:computed]


@dataclass
class CaptureContext:
    """A request within an attempt's scope, and its samples."""

    scope: AttemptScope
    dialect: str
    """Dialect of the incoming request. `body` is always the translated request."""
    body: JsonObject
    """The chat or completions request for the engine, without a prompt in tokens."""
    start_time: float
    keys: list[CallKey]
    """One key per requested choice, by index."""
    prompt: Literal["rendered", "spliced", "partly"] = "rendered"
    """Source of the prompt. "rendered": from the messages, by the engine; "spliced": the conversation's
    sampled tokens and the rendered new turns; "partly": sampled tokens up to an earlier answer, with rendered
    answers after it."""
    history: HistoryNote | None = None
    """Relation of the request to the attempt's conversations; None if nothing compared them."""
    overridden: Mapping[str, object] = field(default_factory=dict)
    """Requested sampling parameters that were replaced before the request reached the engine."""
    requested_model: str | None = None
    """Model name of the request, if it is none of this engine; None if it is."""
    max_tokens: int | None = None
    """Most tokens of a choice, in addition to the request's own limit; None for no further limit."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Choice index -> sample."""

    def sample(
        self,
        index: int,
        prompt_ids: Sequence[int] | IntArray,
        sampling: Mapping[str, object],
        images: tuple[PlacedImage, ...] = (),
    ) -> Sample:
        """Add the sample of a choice after `prompt_ids`, shape (tokens,), before the engine samples."""
        sample = self.samples[index] = Sample(index, np.asarray(prompt_ids, np.int32), sampling, images)
        sample.keeps_candidates = self.keeps_candidates(sampling)
        return sample

    def keeps_candidates(self, sampling: Mapping[str, object]) -> bool:
        """Return True if the tokens that could have been sampled are recorded, for a learner to replay."""
        return self.scope.trains and is_replayable(sampling)


CURRENT: ContextVar[CaptureContext | None] = ContextVar("raylight_capture", default=None)
"""Capture context of the running task; None if its request is not recorded."""
SCOPE: ContextVar[AttemptScope | None] = ContextVar("raylight_scope", default=None)
"""Attempt whose address the running task's request was sent to; None outside of attempts."""


def new_keys(scope: AttemptScope, count: int, request: str = "") -> list[CallKey]:
    """Return new call keys for the choices of a request.

    Args:
        request: digest of the request.
    """
    return [CallKey(scope.rollout_id, scope.attempt_id, secrets.token_hex(16), request) for _ in range(count)]
