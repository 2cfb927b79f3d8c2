"""Outcome of an attempt: its return value as spans, its error as a failure. Pure."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from raylight.agent.attributes import exception_message
from raylight.errors import CommandUnavailableError, RewardError
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.rows import span_row
from raylight.traces.rewards import named_rewards
from raylight.types import AttemptStatus, Failure, FailureKind, Rollout, Span, SpanCoreFields

PACKAGE = Path(__file__).absolute().parents[1]
HIDDEN_FRAMES = (f"{PACKAGE / 'runner'}/", f"{PACKAGE / 'agent'}/")
"""Folders whose frames are left out of a failure's traceback, because they are not the agent's code."""
CLIENT_LIBRARIES = frozenset(
    {"openai", "anthropic", "httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "urllib3"}
)
"""Packages whose exceptions are failures of the infrastructure if they report a lost connection or a 5xx
status."""


@dataclass(frozen=True)
class Outcome:
    """Final status of an attempt, and its failure."""

    status: AttemptStatus
    failure: Failure | None = None


CANCELLED = Outcome("failed", Failure(kind="cancelled", error="Cancelled: the attempt is obsolete"))


def read_result(returned: Any, clock: Callable[[], float]) -> list[Span]:
    """Convert the return value of an agent to spans.

    Args:
        returned: None, a number, named rewards (the primary one first), spans, or a Rollout whose
            `metadata["reward"]` is one of these.

    Raises:
        RewardError: it is none of these, or a reward is not a finite number.
        SpanError: a span cannot be stored.
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
            f"the agent returned a list with a {type(item).__name__} in it; return a float, named rewards, "
            "or spans"
        )
    span_row(item)  # raise SpanError now, while the agent that returned the span is known
    return item


def classify(error: BaseException) -> FailureKind:
    """Kind of failure of an exception: the agent's own, or of a service that it called."""
    current: BaseException | None = error
    visited: set[int] = set()
    while current is not None and id(current) not in visited:  # an exception may be its own cause
        visited.add(id(current))
        if isinstance(current, RewardError):
            return "reward"
        if isinstance(current, CommandUnavailableError):
            return "infrastructure"
        if isinstance(current, BaseExceptionGroup):
            kinds = {classify(inner) for inner in current.exceptions}
            return kinds.pop() if len(kinds) == 1 else "agent"
        if type(current).__module__.split(".")[0] in CLIENT_LIBRARIES:
            code = _status_code(current)
            if code is not None:
                return "infrastructure" if code >= 500 else "agent"
            if any(
                word in type(current).__name__
                for word in ("Connect", "Timeout", "Disconnected", "Protocol", "ReadError")
            ):
                return "infrastructure"
        current = current.__cause__
    return "agent"


def _status_code(error: BaseException) -> int | None:
    """HTTP status in an exception of a client library; each library has another attribute for it."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            if isinstance(code := getattr(holder, name, None), int):
                return code
    return None


def describe(error: BaseException) -> Failure:
    """Failure with the part of the traceback that lies outside raylight."""
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(
        [f for f in shown.stack if not f.filename.startswith(HIDDEN_FRAMES)][-8:]
    )
    notes = "\n".join(shown.__notes__ or [])
    trace = "".join(shown.format(chain=False)) if shown.stack else notes
    return Failure(
        kind=classify(error),
        error=one_line(f"{type(error).__name__}: {exception_message(error)}"),
        trace=_storable(trace),
    )


def one_line(text: str) -> str:
    """Text in one line, as a failure stores it."""
    return _storable(" ".join(text.split()))


def _storable(text: str) -> str:
    """Escape surrogates, which UTF-8 cannot encode; some file names and model responses contain them."""
    return text.encode("utf-8", "backslashreplace").decode()
