"""One attempt: run the agent within its trace and hooks, read its reward, name its failure. No Ray, no store, an injected clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raylight.agent.hooks import HookDispatcher
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import HookError
from raylight.runner.outcome import CANCELLED, Outcome, describe, one_line, read_result
from raylight.runner.threads import AgentThreads
from raylight.traces.context import AttemptTrace
from raylight.traces.tracer import Tracer
from raylight.types import Failure, Rollout, Span

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""How long an agent may take to clean up after it was cancelled; then it is left alone."""


@dataclass(frozen=True)
class RolloutContext:
    """What a runner has to run attempts with."""

    agent: LitAgent
    tracer: Tracer
    hooks: HookDispatcher
    secret: str
    """The run's secret, from which each attempt's API key is derived."""
    threads: AgentThreads
    clock: Callable[[], float]
    runner: Any = None
    """Given to hooks that ask for it."""


async def execute(
    bench: RolloutContext, rollout: Rollout, resources: NamedResources, trace: AttemptTrace
) -> Outcome:
    """Run one attempt to its end; whatever the agent or a hook does becomes an Outcome.

    Args:
        trace: the current trace, which collects the attempt's spans.
    """
    known = {"agent": bench.agent, "runner": bench.runner, "tracer": bench.tracer, "rollout": rollout}
    result: list[Span] = []
    try:
        await bench.hooks.call("on_rollout_start", **known)
        await bench.hooks.call("on_trace_start", **known)
        outcome, result = await _run_agent(bench, rollout, resources)
    except HookError as error:
        outcome = _failed_by(error)
    except asyncio.CancelledError:  # what a hook opened, a hook closes
        try:
            async with asyncio.timeout(CANCEL_GRACE_S):
                await _end(bench.hooks, known, trace, CANCELLED, result)
        except TimeoutError:
            logger.error(
                "the hooks of cancelled rollout %s did not end within %g s",
                rollout.rollout_id,
                CANCEL_GRACE_S,
            )
        raise
    return await _end(bench.hooks, known, trace, outcome, result)


async def _end(
    hooks: HookDispatcher, known: dict[str, Any], trace: AttemptTrace, outcome: Outcome, result: list[Span]
) -> Outcome:
    """Call the hooks of the end; one that is strict fails an attempt that had succeeded.

    What the agent returned comes between them, so that it outweighs a reward of `on_trace_end`, and is outweighed by one of
    `on_rollout_end`.
    """
    for event in ("on_trace_end", "on_rollout_end"):
        try:
            await hooks.call(event, **known, spans=trace.spans)
        except HookError as error:
            outcome = outcome if outcome.failure else _failed_by(error)
        for span in result:
            trace.add(span)
        result = []
    return outcome


def _failed_by(error: HookError) -> Outcome:
    return Outcome("failed", Failure(kind="hook", error=one_line(f"HookError: {error}")))


async def _run_agent(
    bench: RolloutContext, rollout: Rollout, resources: NamedResources
) -> tuple[Outcome, list[Span]]:
    """Call the agent under its time limit; gives how that ended, and what it returned as spans."""
    attempt, limit = rollout.attempt, rollout.config.timeout_seconds
    assert attempt is not None, "only a dequeued rollout is executed"
    scoped = {
        name: resource.for_attempt(attempt.rollout_id, attempt.attempt_id, bench.secret)
        if isinstance(resource, LLM)
        else resource
        for name, resource in resources.items()
    }
    work = asyncio.create_task(_call(bench, rollout, scoped))
    try:
        await asyncio.wait([work], timeout=limit)
    except (
        asyncio.CancelledError
    ):  # the runner stops, or the store says that nobody needs this attempt any more
        await _give_up(work, bench.threads)
        raise
    if not work.done():
        await _give_up(work, bench.threads)
        late = Failure(kind="timeout", error=f"TimeoutError: the attempt took longer than {limit:g} s")
        return Outcome("timeout", late), []
    if work.cancelled():
        return Outcome("failed", describe(asyncio.CancelledError("the agent cancelled itself"))), []
    error = work.exception()
    returned, raised = work.result() if error is None else (None, error)
    if raised is not None:
        return Outcome("failed", describe(raised)), []
    try:
        return Outcome("succeeded"), read_result(returned, bench.clock)
    except Exception as error:  # what the agent returned is as much its own as what it raises
        return Outcome("failed", describe(error)), []


async def _call(
    bench: RolloutContext, rollout: Rollout, resources: NamedResources
) -> tuple[Any, BaseException | None]:
    """Call the agent; gives what it returned or raised. Caught here is only what would end the event loop if it left the task."""
    agent, task = bench.agent, rollout.input
    try:
        if not agent.is_async_for(rollout.mode):
            return await bench.threads.run(agent.call, task, resources, rollout)
        return await agent.call_async(task, resources, rollout), None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


async def _give_up(work: asyncio.Task[Any], threads: AgentThreads) -> None:
    """Cancel the agent; one that does not let itself be cancelled goes on alone, and is counted until it ends."""
    work.cancel()
    try:
        await asyncio.wait([work], timeout=CANCEL_GRACE_S)
    finally:  # also when this is cut short, because the runner stops or the store says that the attempt is over
        if not work.done():
            threads.abandon(work)
