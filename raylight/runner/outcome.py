"""Outcome of an attempt: its return value as spans, its error as a failure. Pure.

An answer of raylight's gateway has a mark. An answer without it, to a request to the attempt's own address,
comes from the ingress in front of the gateway, which sends 404, 500 or 503 while it reaches no replica. Such
an answer is a failure of the infrastructure, whatever its status.
"""

from __future__ import annotations

import contextlib
import re
import socket
import traceback
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from raylight.agent.attributes import exception_message
from raylight.errors import (
    CommandUnavailableError,
    EnvironmentUnavailableError,
    RewardError,
    SandboxUnavailableError,
    SpanError,
)
from raylight.semconv import ANNOTATION, REPLICA_HEADER, reward_attributes
from raylight.store.rows import span_row
from raylight.traces.reward_spans import named_rewards
from raylight.types import (
    MAX_REWARD_SPANS,
    MAX_SPANS,
    AttemptStatus,
    Budget,
    Failure,
    FailureKind,
    JsonObject,
    Rollout,
    RolloutConfig,
    Span,
    SpanCoreFields,
)

CLIENT_LIBRARIES = frozenset(
    {
        "openai",
        "anthropic",
        "litellm",
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "aiohttp",
        "requests",
        "urllib3",
        "urllib",
        "http",
    }
)
"""Packages whose exceptions are failures of the infrastructure if they report a lost connection or a 5xx
status."""
UNAVAILABLE = (CommandUnavailableError, EnvironmentUnavailableError, SandboxUnavailableError)
"""Errors of raylight that report a failure of the infrastructure."""
CONNECTION_WORDS = ("Connect", "Timeout", "Disconnected", "Protocol", "ReadError", "IncompleteRead")
"""Parts of the names of exceptions that report a lost connection."""
OWN_ADDRESS = re.compile(r"/rollout/[^/]+/attempt/[^/]+")
"""Part of the URL of each request to an attempt's address."""


def classify(error: BaseException) -> FailureKind:
    """Kind of failure of an exception: the agent's own, or of a service that it called."""
    if any(_is_from_ingress(link) for link in _chain(error)):
        return "infrastructure"
    current: BaseException | None = error
    visited: set[int] = set()
    while current is not None and id(current) not in visited:  # an exception may be its own cause
        visited.add(id(current))
        if isinstance(current, RewardError):
            return "reward"
        if isinstance(current, UNAVAILABLE):
            return "infrastructure"
        if isinstance(current, BaseExceptionGroup):
            kinds = {classify(inner) for inner in current.exceptions}
            return kinds.pop() if len(kinds) == 1 else "agent"
        if type(current).__module__.split(".")[0] in CLIENT_LIBRARIES:
            code = _status_code(current)
            if code is not None:
                return "infrastructure" if code >= 500 else "agent"
            if _lost_connection(current):
                return "infrastructure"
        current = current.__cause__
    return "agent"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that led to it: causes, exceptions that it was raised in the handling of, and
    members of groups."""
    pending, visited = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        pending += [link for link in (current.__cause__, current.__context__) if link is not None]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


def _is_from_ingress(error: BaseException) -> bool:
    """True if a request to the attempt's own address got no answer, or none of a replica."""
    response = _read(error, "response")
    requests = (_read(holder, name) for holder in (error, response) for name in ("request", "request_info"))
    holders = (error, response, *requests)
    urls = (_read(holder, name) for holder in holders for name in ("url", "real_url"))
    if not any(OWN_ADDRESS.search(str(url)) for url in urls if url is not None):
        return False
    if _status_code(error) is None:
        return _lost_connection(error)
    headers = _read(response, "headers") if response is not None else _read(error, "headers")
    return headers is None or REPLICA_HEADER not in headers


def _lost_connection(error: BaseException) -> bool:
    reason = _read(error, "reason")
    if isinstance(error, urllib.error.URLError) and isinstance(
        reason, ConnectionError | TimeoutError | socket.gaierror
    ):
        return True
    return any(word in type(error).__name__ for word in CONNECTION_WORDS)


def _status_code(error: BaseException) -> int | None:
    """HTTP status in an exception of a client library; each library has another attribute for it."""
    for holder in (error, _read(error, "response")):
        for name in ("status_code", "status", "code"):
            if isinstance(code := _read(holder, name), int):
                return code
    return None


def _read(holder: object, name: str) -> Any:
    """Return an attribute; None if it does not exist or was not set."""
    with contextlib.suppress(Exception):  # httpx raises a RuntimeError
        return getattr(holder, name, None)
    return None


PACKAGE = Path(__file__).absolute().parents[1]
HIDDEN_FRAMES = (f"{PACKAGE / 'runner'}/", f"{PACKAGE / 'agent'}/")
"""Folders whose frames are left out of a failure's traceback, because they are not the agent's code."""


@dataclass(frozen=True)
class Outcome:
    """Final status of an attempt, its failure, and its truncation."""

    status: AttemptStatus
    failure: Failure | None = None
    truncated: Budget | None = None
    """Budget that truncated the attempt."""
    metadata: JsonObject | None = None
    """The rollout's metadata, if the attempt has changed it."""


CANCELLED = Outcome("failed", Failure(kind="cancelled", error="Cancelled: the attempt is obsolete"))


def read_result(returned: object, clock: Callable[[], float]) -> list[Span]:
    """Convert the return value of an agent to spans.

    Args:
        returned: None, a number, named rewards (the primary one first), spans, or a Rollout whose
            `metadata["reward"]` is one of these.

    Raises:
        RewardError: it is none of these, or a reward is not a finite number.
        SpanError: a span cannot be stored, or there are too many.
    """
    if isinstance(returned, Rollout):
        returned = returned.metadata.get("reward")
    if returned is None:
        return []
    if isinstance(returned, list | tuple) and not (returned and isinstance(returned[0], Real)):
        if len(returned) > MAX_SPANS + MAX_REWARD_SPANS:
            raise SpanError(
                f"the agent returned {len(returned)} spans; an attempt has at most {MAX_SPANS}, and "
                f"{MAX_REWARD_SPANS} with a reward"
            )
        return [_as_span(item) for item in returned]
    return [_reward_span(named_rewards(returned), clock())]


def _reward_span(rewards: dict[str, float], now: float) -> Span:
    return Span.from_attributes(
        name=ANNOTATION, attributes=dict(reward_attributes(rewards)), start_time=now, end_time=now
    )


def truncate(
    outcome: Outcome, budget: Budget, config: RolloutConfig, clock: Callable[[], float]
) -> tuple[Outcome, list[Span]]:
    """Return the outcome of a truncated attempt, and its reward if that follows from the truncation.

    | agent            | "score"                       | "mask"                    | "fail" |
    |------------------|-------------------------------|---------------------------|--------|
    | returned         | succeeded                     | succeeded                 | failed |
    | raised an error  | succeeded, `truncated_reward` | succeeded, without reward | failed |

    An error of the agent is taken for a consequence of the truncation. A failure of another kind stays.
    """
    outcome = replace(outcome, truncated=budget)
    if outcome.failure is not None and outcome.failure.kind != "agent":
        return outcome, []
    if config.truncated == "fail":
        limit = getattr(config, budget)
        cause = f"; the agent raised {outcome.failure.error}" if outcome.failure else ""
        error = f"RolloutTruncated: the attempt spent its budget {budget}={limit:g}{cause}"
        trace = outcome.failure.trace if outcome.failure else ""
        return Outcome("failed", Failure(kind="truncated", error=error, trace=trace), budget), []
    if outcome.failure is None:
        return outcome, []
    scored = config.truncated == "score"
    rewards = [_reward_span({"reward": config.truncated_reward}, clock())] if scored else []
    return Outcome("succeeded", truncated=budget), rewards


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
