"""Factories of records and runners, shared by the unit tests."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from raylight._utils.agent_threads import AgentThreads
from raylight.agent.decorators import rollout as decorate
from raylight.agent.hooks import HookDispatcher
from raylight.agent.litagent import LitAgent
from raylight.runner.execute import FindTruncation, RolloutContext, execute
from raylight.runner.outcome import Outcome
from raylight.runner.runner import Runner
from raylight.store.client import StoreClient
from raylight.traces.tracer import DummyTracer, Tracer
from raylight.types import (
    Attempt,
    CallKey,
    EnqueueRolloutRequest,
    Failure,
    FinishedRollout,
    Generation,
    Rollout,
    RolloutConfig,
    Span,
)

DEADLINE_S = 60.0
"""Limit of every wait in a unit test, in seconds; a passing test waits for milliseconds."""

_numbers = itertools.count()


class ReachedRay(Exception):
    """Raised when a Trainer has passed all its checks (see the fixture `planned_runs`)."""


def within(seconds: float = DEADLINE_S) -> Any:
    return asyncio.timeout(seconds)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition without an event, such as the end of a thread."""
    async with within():
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def make_key(rollout_id: str = "ro-1", attempt_id: str = "at-1", call_id: str | None = None) -> CallKey:
    return CallKey(rollout_id, attempt_id, call_id or f"call-{next(_numbers)}")


def make_generation(
    prompt: list[int],
    output: list[int],
    *,
    key: CallKey | None = None,
    temperature: float = 1.0,
    logprobs: list[float] | None = None,
    versions: list[int] | None = None,
    start: float = 0.0,
    policy_logprobs: list[float] | None = None,
    allowed: list[int] | None = None,
) -> Generation:
    return Generation(
        key=key or make_key(),
        model="policy",
        prompt_ids=prompt,
        output_ids=output,
        logprobs=logprobs if logprobs is not None else [-1.0] * len(output),
        weight_versions=versions if versions is not None else [0] * len(output),
        finish_reason="stop",
        start_time=start,
        end_time=start + 1,
        sampling={"temperature": temperature},
        policy_logprobs=policy_logprobs or [],
        allowed=allowed or [],
    )


def make_rollout(
    rollout_id: str = "ro-1", *, attempt_id: str = "at-1", task: Any = None, **fields: Any
) -> Rollout:
    attempt = Attempt(rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, start_time=0.0)
    config = RolloutConfig(timeout_seconds=fields.pop("timeout", 600.0))
    return Rollout(
        input=task, rollout_id=rollout_id, start_time=0.0, attempt=attempt, config=config, **fields
    )


def make_finished(
    reward: float | None = None,
    *,
    failure: Failure | None = None,
    group: str | None = "g",
    calls: int = 1,
    rollout_id: str | None = None,
    status: str | None = None,
) -> FinishedRollout:
    """Return a finished rollout with `calls` independent calls, each of which becomes a row."""
    rollout_id = rollout_id or f"ro-{next(_numbers)}"
    rollout = make_rollout(
        rollout_id, group_id=group, status=status or ("failed" if failure else "succeeded")
    )
    attempt = rollout.attempt.model_copy(
        update={"failure": failure, "status": "failed" if failure else "succeeded"}
    )
    rollout = rollout.model_copy(update={"attempt": attempt})
    generations = [make_generation([1, 2], [3 + i], key=make_key(rollout_id)) for i in range(calls)]
    return FinishedRollout(rollout, reward, generations)


# running agents


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(BaseException):
    pass


class Endless:
    """An agent that runs until it is cancelled.

    Attributes:
        inside: set when it runs.
        cleaned: set when it was cancelled.
    """

    def __init__(self) -> None:
        self.inside, self.cleaned = asyncio.Event(), asyncio.Event()

    async def run(self, task: Any) -> None:
        self.inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaned.set()


def as_agent(agent: LitAgent | Callable[..., Any]) -> LitAgent:
    return agent if isinstance(agent, LitAgent) else decorate(agent)


def make_context(
    agent: Any, *, hooks: Iterable[Any] = (), threads: AgentThreads | None = None, runner: Any = None
) -> RolloutContext:
    """Return a rollout context whose clock stands at 7."""
    return RolloutContext(
        as_agent(agent),
        DummyTracer(),
        HookDispatcher(hooks),
        "secret",
        threads or AgentThreads(),
        lambda: 7.0,
        runner=runner,
    )


async def run_attempt(
    agent: Any,
    *,
    rollout: Rollout | None = None,
    hooks: Iterable[Any] = (),
    threads: AgentThreads | None = None,
    timeout: float | None = 5.0,
    find_truncation: FindTruncation | None = None,
    **resources: Any,
) -> tuple[Outcome, list[Span]]:
    """Execute one attempt without runner and store. Return its outcome and its spans."""
    context = make_context(agent, hooks=hooks, threads=threads, runner="the runner")
    given = rollout or make_rollout(task=3, timeout=timeout)
    with context.tracer.attempt(given) as trace:
        async with within():
            return await execute(context, given, resources, trace, find_truncation), trace.spans


async def enqueue(store: StoreClient, tasks: Iterable[Any], **config: Any) -> list[str]:
    """Enqueue a rollout for each task. Return their ids."""
    requests = [
        EnqueueRolloutRequest(input=task, mode="train", config=RolloutConfig(**config)) for task in tasks
    ]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


def make_runner(
    store: StoreClient,
    agent: Any,
    max_concurrent: int = 4,
    *,
    tracer: Tracer | None = None,
    hooks: Iterable[Any] = (),
    max_rollouts: int | None = None,
    heartbeat_s: float = 60.0,
) -> Runner:
    return Runner(
        "w",
        store,
        as_agent(agent),
        tracer or DummyTracer(),
        HookDispatcher(hooks),
        "secret",
        max_concurrent,
        max_rollouts,
        heartbeat_s,
    )


@asynccontextmanager
async def serving(
    store: StoreClient, agent: Any, max_concurrent: int = 4, **how: Any
) -> AsyncIterator[asyncio.Task[Any]]:
    """Run a runner, as a task, until the end of the block."""
    task = asyncio.create_task(make_runner(store, agent, max_concurrent, **how).serve())
    try:
        async with within():
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def run_all(
    store: StoreClient, tasks: Iterable[Any], agent: Any, how: dict[str, Any] | None = None, **config: Any
) -> list[Rollout]:
    """Run an agent on each task. Return the finished rollouts in the order of the tasks."""
    ids = await enqueue(store, tasks, **config)
    async with serving(store, agent, **(how or {})) as task:
        deciding = asyncio.create_task(store.wait_until_decided(rollout_ids=ids))
        await asyncio.wait([deciding, task], return_when=asyncio.FIRST_COMPLETED)
        if not deciding.done():
            deciding.cancel()
            raise AssertionError(f"the runner ended before its rollouts were decided: {task.result()}")
        return [await store.get_rollout_by_id(rollout_id) for rollout_id in deciding.result()]


async def wait_and_read(store: StoreClient, rollout_ids: list[str], **how: Any) -> list[Rollout]:
    """Wait for rollouts, and return the decided ones."""
    decided = await store.wait_until_decided(rollout_ids=rollout_ids, **how)
    return [await store.get_rollout_by_id(rollout_id) for rollout_id in decided]
