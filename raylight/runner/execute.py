"""Execution of one attempt: call the agent inside its trace and hooks, read its reward, classify its failure.

No Ray, no store, and the clock is injected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from raylight._utils.agent_threads import AgentThreads
from raylight.agent.hooks import HookDispatcher
from raylight.agent.litagent import LitAgent, RolloutScope, TrainerView, rollout_scope
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import HookError
from raylight.runner.outcome import CANCELLED, Outcome, describe, one_line, read_result, truncate
from raylight.traces.context import SEND_BATCH, AttemptTrace
from raylight.traces.tracer import Tracer
from raylight.types import GREEDY, Budget, Failure, Rollout, Span

logger = logging.getLogger(__name__)

FindTruncation: TypeAlias = Callable[[Rollout], Awaitable[Budget | None]]
CANCEL_GRACE_S = 5.0
"""Time that a cancelled agent has to clean up; after it the agent is abandoned."""


@dataclass(frozen=True)
class RolloutContext:
    """Everything that a runner needs to execute attempts."""

    agent: LitAgent
    tracer: Tracer
    hooks: HookDispatcher
    secret: str
    """Secret of the run, from which each attempt's keys are derived."""
    threads: AgentThreads
    clock: Callable[[], float]
    runner: Any = None
    """The runner, for hooks that have a parameter of this name, and for the agent."""
    trainer: TrainerView | None = None
    """Settings of the Trainer, for the agent."""


async def execute(
    context: RolloutContext,
    rollout: Rollout,
    resources: NamedResources,
    trace: AttemptTrace,
    find_truncation: FindTruncation | None = None,
) -> Outcome:
    """Execute one attempt to its end; every error of the agent or of a hook becomes an Outcome.

    Args:
        trace: the current trace, which collects the attempt's spans.
        find_truncation: returns the budget that truncated the attempt; normally
            `StoreClient.find_truncation`. None: nothing truncates it.
    """
    hook_args = {
        "agent": context.agent,
        "runner": context.runner,
        "tracer": context.tracer,
        "rollout": rollout,
    }
    reward_spans: list[Span] = []
    with rollout_scope(RolloutScope(context.runner, context.trainer)):
        try:
            await context.hooks.call("on_rollout_start", **hook_args)
            await context.hooks.call("on_trace_start", **hook_args)
            outcome, reward_spans = await _run_agent(context, rollout, resources)
            if find_truncation and rollout.config.has_budgets and (budget := await find_truncation(rollout)):
                outcome, rewards = truncate(outcome, budget, rollout.config, context.clock)
                reward_spans += rewards
        except HookError as error:
            outcome = _hook_failure(error)
        except asyncio.CancelledError:  # hooks that opened something must close it
            try:
                async with asyncio.timeout(CANCEL_GRACE_S):
                    await _call_end_hooks(context.hooks, hook_args, trace, CANCELLED, reward_spans)
            except TimeoutError:
                logger.error(
                    "the hooks of cancelled rollout %s did not end within %g s",
                    rollout.rollout_id,
                    CANCEL_GRACE_S,
                )
            raise
        return await _call_end_hooks(context.hooks, hook_args, trace, outcome, reward_spans)


async def _call_end_hooks(
    hooks: HookDispatcher,
    hook_args: dict[str, object],
    trace: AttemptTrace,
    outcome: Outcome,
    reward_spans: list[Span],
) -> Outcome:
    """Call the hooks of the end; a strict hook that fails also fails an attempt that had succeeded.

    The last reward counts. The agent's own comes between the two hooks: it overrides a reward of
    `on_trace_end`, and a reward of `on_rollout_end` overrides it.
    """
    for event in ("on_trace_end", "on_rollout_end"):
        try:
            await hooks.call(event, **hook_args, spans=trace.spans)
        except HookError as error:
            outcome = outcome if outcome.failure else _hook_failure(error, outcome.truncated)
        for span in reward_spans:
            trace.add(span)
        reward_spans = []
    return outcome


def _hook_failure(error: HookError, truncated: Budget | None = None) -> Outcome:
    return Outcome("failed", Failure(kind="hook", error=one_line(f"HookError: {error}")), truncated)


async def _run_agent(
    context: RolloutContext, rollout: Rollout, resources: NamedResources
) -> tuple[Outcome, list[Span]]:
    """Call the agent under its time limit; returns the outcome, and the returned rewards as spans."""
    attempt, limit = rollout.attempt, rollout.config.timeout_seconds
    assert attempt is not None, "only a dequeued rollout is executed"
    trains = rollout.mode == "train" and not rollout.metadata.get(GREEDY)
    ids = (attempt.rollout_id, attempt.attempt_id, context.secret)
    has_budgets = rollout.config.has_budgets
    scoped = {
        name: resource.for_attempt(*ids, trains=trains, has_budgets=has_budgets)
        if isinstance(resource, LLM)
        else resource
        for name, resource in resources.items()
    }
    work = asyncio.create_task(_call(context, rollout, scoped))
    try:
        await asyncio.wait([work], timeout=limit)
    except asyncio.CancelledError:  # the runner stops, or the attempt is obsolete
        await _cancel_agent(work, context.threads)
        raise
    if not work.done():
        await _cancel_agent(work, context.threads)
        timeout = Failure(kind="timeout", error=f"TimeoutError: the attempt took longer than {limit:g} s")
        return Outcome("timeout", timeout), []
    if work.cancelled():
        return Outcome("failed", describe(asyncio.CancelledError("the agent cancelled itself"))), []
    error = work.exception()
    returned, raised = work.result() if error is None else (None, error)
    if raised is not None:
        return Outcome("failed", describe(raised)), []
    try:
        if isinstance(returned, list | tuple) and len(returned) > SEND_BATCH:
            # in a thread, because checking many spans takes seconds
            return Outcome("succeeded"), await asyncio.to_thread(read_result, returned, context.clock)
        return Outcome("succeeded"), read_result(returned, context.clock)
    except Exception as error:  # a wrong return value is a failure of the agent
        return Outcome("failed", describe(error)), []


async def _call(
    context: RolloutContext, rollout: Rollout, resources: NamedResources
) -> tuple[Any, BaseException | None]:
    """Call the agent; returns its return value and its error.

    Only errors that would end the event loop are caught here; others are raised.
    """
    agent, task = context.agent, rollout.input
    try:
        if not agent.is_async_for(rollout.mode):
            return await context.threads.run(agent.call, task, resources, rollout)
        return await agent.call_async(task, resources, rollout), None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


async def _cancel_agent(work: asyncio.Task[object], threads: AgentThreads) -> None:
    """Cancel the agent. An agent that ignores the cancellation is abandoned, and counted until it ends."""
    work.cancel()
    try:
        await asyncio.wait([work], timeout=CANCEL_GRACE_S)
    finally:  # even when this wait is cancelled
        if not work.done():
            threads.abandon(work)
