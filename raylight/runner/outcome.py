"""How an attempt ended: its result read as spans, its failure named. Pure."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import raylight
from raylight.agent.attributes import exception_message
from raylight.errors import RewardError
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.rows import span_row
from raylight.traces.rewards import named_rewards
from raylight.types import AttemptStatus, Failure, FailureKind, Rollout, Span, SpanCoreFields

OUR_FRAMES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(raylight.__file__)), room, "")
    for room in ("runner", "agent")
)
"""Folders whose frames say nothing about the agent."""
CLIENT_LIBRARIES = frozenset(
    {"openai", "anthropic", "httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "urllib3"}
)
"""Exceptions of these packages that tell of a lost connection or a 5xx answer are failures of the infrastructure."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    status: AttemptStatus
    failure: Failure | None = None


CANCELLED = Outcome(
    "failed", Failure(kind="cancelled", error="Cancelled: nobody needs this attempt any more")
)


def read_result(returned: Any, clock: Callable[[], float]) -> list[Span]:
    """Spans from what an agent returned: None, a number, named rewards with the primary one first, spans, or a Rollout whose
    `metadata["reward"]` is one of the former.

    Raises:
        RewardError: it is none of these, or a reward is not a finite number.
        SpanError: a span holds something that cannot be stored.
    """
    if isinstance(returned, Rollout):
        returned = returned.metadata.get("reward")
    if returned is None:
        return []
    if isinstance(returned, list | tuple) and not (returned and isinstance(returned[0], Real)):
        return [_as_span(item) for item in returned]
    rewards = named_rewards(returned)
    now = clock()
    return [
        Span.from_attributes(
            name=ANNOTATION, attributes=dict(reward_attributes(rewards)), start_time=now, end_time=now
        )
    ]


def _as_span(item: Any) -> Span:
    if isinstance(item, SpanCoreFields):
        item = Span.from_core_fields(item)
    elif not isinstance(item, Span) and hasattr(item, "get_span_context"):
        item = Span.from_opentelemetry(item, "", "")
    if not isinstance(item, Span):
        raise RewardError(
            f"the agent returned a list with a {type(item).__name__} in it; return a float, named rewards, or spans"
        )
    span_row(item)  # raises SpanError now, while it can still be told whose span it is
    return item


def classify(error: BaseException) -> FailureKind:
    """Whether an exception is the agent's own or tells that a service behind it is down."""
    seen: BaseException | None = error
    looked_at: set[int] = set()
    while seen is not None and id(seen) not in looked_at:  # an exception may be its own cause
        looked_at.add(id(seen))
        if isinstance(seen, RewardError):
            return "reward"
        if isinstance(seen, BaseExceptionGroup):
            kinds = {classify(inner) for inner in seen.exceptions}
            return kinds.pop() if len(kinds) == 1 else "agent"
        if type(seen).__module__.split(".")[0] in CLIENT_LIBRARIES:
            code = _status_code(seen)
            if code is not None:
                return "infrastructure" if code >= 500 else "agent"
            if any(
                word in type(seen).__name__
                for word in ("Connect", "Timeout", "Disconnected", "Protocol", "ReadError")
            ):
                return "infrastructure"
        seen = seen.__cause__
    return "agent"


def _status_code(error: BaseException) -> int | None:
    """The HTTP status that an exception of a client library tells of; each has its own place for it."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            if isinstance(code := getattr(holder, name, None), int):
                return code
    return None


def describe(error: BaseException) -> Failure:
    """A failure with the part of the traceback that lies outside raylight."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(
        [f for f in shown.stack if not f.filename.startswith(OUR_FRAMES)][-8:]
    )
    trace = "".join(shown.format(chain=False)) if shown.stack else ""
    return Failure(
        kind=classify(error),
        error=one_line(f"{type(error).__name__}: {exception_message(error)}"),
        trace=_storable(trace),
    )


def one_line(text: str) -> str:
    """Text as a failure holds it."""
    return _storable(" ".join(text.split()))


def _storable(text: str) -> str:
    """UTF-8 has no half characters, which are in the names of some files and in what some models answer."""
    return text.encode("utf-8", "backslashreplace").decode()
