"""One attempt: run the agent, read its reward, name its failure. Pure: no Ray, no store, an injected clock."""

from __future__ import annotations

import asyncio
import math
import os
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

import raylight
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import RewardError
from raylight.types import AttemptStatus, Failure, FailureKind, Rollout, Span

OUR_FRAMES = tuple(os.path.join(os.path.dirname(os.path.abspath(raylight.__file__)), room, "") for room in ("runner", "agent"))
"""Folders whose frames say nothing about the agent."""
CLIENT_LIBRARIES = frozenset({"openai", "anthropic", "httpx", "httpx2", "httpcore", "httpcore2", "aiohttp", "requests", "urllib3"})
"""Exceptions of these packages that tell of a lost connection or a 5xx answer are failures of the infrastructure."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    status: AttemptStatus
    failure: Failure | None = None
    spans: list[Span] = field(default_factory=list)


def read_rewards(returned: Any) -> dict[str, float] | None:
    """Named rewards from what an agent returned, the primary one first; None if it scored nothing.

    Raises:
        RewardError: it is neither a finite number, nor a dict of such, nor None.
    """
    if returned is None:
        return None
    named = returned if isinstance(returned, dict) else {"reward": returned}
    if not named:
        raise RewardError("the agent returned an empty dict; return a number, named rewards, or None")
    for name, value in named.items():
        if not isinstance(value, Real | np.bool_):
            raise RewardError(
                f"the agent returned {returned!r:.80} of type {type(value).__name__} as a reward; "
                "return a float, a dict of floats, or None"
            )
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise RewardError(f"the agent's reward {name!r} is {value!s:.40}; a reward must be a finite float")
    return {str(name): float(value) for name, value in named.items()}


def classify(error: BaseException) -> FailureKind:
    """Whether an exception is the agent's own or tells that a service behind it is down."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RewardError):
            return "reward"
        if isinstance(seen, BaseExceptionGroup):
            kinds = {classify(inner) for inner in seen.exceptions}
            return kinds.pop() if len(kinds) == 1 else "agent"
        if type(seen).__module__.split(".")[0] in CLIENT_LIBRARIES:
            code = _status_code(seen)
            if code is not None:
                return "infrastructure" if code >= 500 else "agent"
            if any(word in type(seen).__name__ for word in ("Connect", "Timeout", "Disconnected", "Protocol", "ReadError")):
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
    shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not f.filename.startswith(OUR_FRAMES)][-8:])
    trace = "".join(shown.format(chain=False)) if shown.stack else ""
    try:
        message = " ".join(str(error).split())
    except Exception as broken:  # an exception of the user's whose own __str__ fails
        message = f"(its message cannot be read: {type(broken).__name__})"
    return Failure(kind=classify(error), error=f"{type(error).__name__}: {message}", trace=trace)


async def execute(
    agent: LitAgent,
    rollout: Rollout,
    resources: NamedResources,
    secret: str,
    threads: Executor,
    clock: Callable[[], float],
) -> Outcome:
    """Run one attempt to its end; whatever the agent does becomes an Outcome."""
    attempt = rollout.attempt
    assert attempt is not None
    scoped = {
        name: resource.for_attempt(attempt.rollout_id, attempt.attempt_id, secret) if isinstance(resource, LLM) else resource
        for name, resource in resources.items()
    }
    limit = rollout.config.timeout_seconds
    try:
        async with asyncio.timeout(limit) as deadline:
            if agent.is_async:
                returned = await agent.rollout_async(rollout.input, scoped, rollout)
            else:
                loop = asyncio.get_running_loop()
                returned, raised = await loop.run_in_executor(threads, _guarded, agent, rollout, scoped)
                if raised is not None:
                    raise raised
        rewards = read_rewards(returned)
    except TimeoutError as error:
        if not deadline.expired():
            return Outcome("failed", describe(error))
        return Outcome("timeout", Failure(kind="timeout", error=f"TimeoutError: the attempt took longer than {limit:g} s"))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the runner is being stopped; otherwise the agent cancelled itself
        return Outcome("failed", describe(error))
    except (Exception, SystemExit) as error:  # the agent is the user's code; whatever it raised is kept in the store
        return Outcome("failed", describe(error))
    spans = [Span.of_rewards(attempt, rewards, clock())] if rewards else []
    return Outcome("succeeded", spans=spans)


def _guarded(agent: LitAgent, rollout: Rollout, resources: NamedResources) -> tuple[Any, BaseException | None]:
    """Call a synchronous agent in a thread. What it raises is returned, because a future cannot carry a StopIteration."""
    try:
        return agent.rollout(rollout.input, resources, rollout), None
    except BaseException as error:  # raised again on the event loop
        return None, error
