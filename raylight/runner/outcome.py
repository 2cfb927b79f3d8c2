"""Outcome of an attempt: its return value as spans, its error as a failure. Pure."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from raylight.agent.attributes import exception_message
from raylight.errors import RewardError, SpanError
from raylight.runner.service_errors import classify
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.rows import span_row
from raylight.traces.rewards import named_rewards
from raylight.types import (
    MAX_REWARD_SPANS,
    MAX_SPANS,
    AttemptStatus,
    Budget,
    Failure,
    Rollout,
    RolloutConfig,
    Span,
    SpanCoreFields,
)

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


CANCELLED = Outcome("failed", Failure(kind="cancelled", error="Cancelled: the attempt is obsolete"))


def read_result(returned: Any, clock: Callable[[], float]) -> list[Span]:
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
