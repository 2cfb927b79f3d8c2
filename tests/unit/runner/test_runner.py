"""A runner with a store in this process: how many rollouts run at once, how they are retried, how it ends."""

import asyncio
import resource
import threading
from collections.abc import Awaitable
from typing import Any

import httpx
import openai
import pytest
from unit_helpers import Endless, Odd, enqueue, make_runner, run_all, serving, within

from raylight.errors import TracerError, UnknownIdError
from raylight.runner import runner as module
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables import transitions
from raylight.traces.tracer import DummyTracer
from raylight.types import Rollout

CONNECTION = openai.APIConnectionError(request=httpx.Request("POST", "http://engine"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> StoreClient:
    monkeypatch.setattr(transitions, "FIRST_BACKOFF_S", 0.01)
    return StoreClient(StoreService())


async def never(task: Any) -> None:
    await asyncio.Event().wait()


# at once


async def test_every_rollout_gets_its_own_task_and_reward(store: StoreClient) -> None:
    async def agent(task: int) -> float:
        return float(task)

    decided = await run_all(store, range(30), agent)
    assert {rollout.status for rollout in decided} == {"succeeded"}
    assert {rollout.attempt.worker_id for rollout in decided} == {"w"}
    found = await store.collect([rollout.rollout_id for rollout in decided])
    assert [(item.rollout.input, item.reward) for item in found] == [(n, float(n)) for n in range(30)]


async def test_rollouts_run_at_once_up_to_the_bound_and_no_further(store: StoreClient) -> None:
    bound, running, most = 5, 0, 0
    full, leave = asyncio.Event(), asyncio.Event()

    async def agent(task: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == bound:
            full.set()
        await leave.wait()
        running -= 1

    ids = await enqueue(store, range(20))
    async with serving(store, agent, bound):
        await full.wait()
        waiting = await store.statistics()
        assert waiting["rollouts_queuing"] == 15  # what does not run stays with the store, for other runners
        leave.set()
        await store.wait_until_decided(rollout_ids=ids)
    assert most == bound


async def test_a_runner_takes_a_few_at_once_so_that_others_get_some_too(store: StoreClient) -> None:
    class Counting(StoreClient):
        limits: list[int] = []  # noqa: RUF012

        async def dequeue_many_rollouts(self, *, limit: int = 1, **how: Any) -> list[Rollout]:
            self.limits.append(limit)
            return await super().dequeue_many_rollouts(limit=limit, **how)

    counting = Counting(store._channel.target)
    await run_all(counting, range(20), lambda task: None, {"max_concurrent": 64})
    first = module.FIRST_DEQUEUE
    assert counting.limits[:3] == [first, 2 * first, first]  # the second received less than it asked for


async def test_a_place_that_becomes_free_is_used_while_others_still_run(store: StoreClient) -> None:
    leave, quick_ones = asyncio.Event(), asyncio.Event()
    done = []

    async def agent(task: str) -> None:
        if task == "slow":
            await leave.wait()
        done.append(task)
        if len(done) == 6:
            quick_ones.set()

    ids = await enqueue(store, ["slow", *["quick"] * 6])
    async with serving(store, agent, 2):
        await quick_ones.wait()
        leave.set()
        await store.wait_until_decided(rollout_ids=ids)
    assert done == ["quick"] * 6 + ["slow"]


async def test_synchronous_agents_run_at_once_in_threads(store: StoreClient) -> None:
    meeting = threading.Barrier(4, timeout=60)
    decided = await run_all(store, [1, 2, 3, 4], lambda task: meeting.wait() * 0.0)
    assert {rollout.status for rollout in decided} == {"succeeded"}


# failure


@pytest.mark.parametrize(
    ("error", "failures", "config", "status", "attempts"),
    [
        (CONNECTION, 1, {}, "succeeded", [1, 2]),
        (CONNECTION, 9, {"infrastructure_retries": 2}, "failed", [1, 2, 3]),
        (ValueError("no"), 2, {"max_attempts": 3, "retry_condition": {"failed"}}, "succeeded", [1, 2, 3]),
    ],
    ids=["infrastructure", "as often as allowed", "as asked"],
)
async def test_a_failure_is_tried_again(
    store: StoreClient,
    error: Exception,
    failures: int,
    config: dict[str, Any],
    status: str,
    attempts: list[int],
) -> None:
    tries = []

    async def agent(task: int, rollout: Rollout) -> float:
        tries.append(rollout.attempt.sequence_id)
        if len(tries) <= failures:
            raise error
        return 1.0

    (decided,) = await run_all(store, [1], agent, **config)
    assert (decided.status, tries) == (status, attempts)
    if status == "failed":
        assert decided.attempt.failure.kind == "infrastructure"


async def test_an_agents_own_failure_is_final_and_harms_no_other_rollout(store: StoreClient) -> None:
    tries = []

    async def agent(task: int) -> float:
        tries.append(task)
        return 1.0 / task

    decided = await run_all(store, [0, 1, 0, 2], agent)
    assert [rollout.status for rollout in decided] == ["failed", "succeeded", "failed", "succeeded"]
    assert sorted(tries) == [0, 0, 1, 2]
    assert "ZeroDivisionError" in decided[0].attempt.failure.error
    assert decided[0].attempt.failure.kind == "agent"


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        SystemExit(1),
        KeyboardInterrupt(),
        Odd(),
        StopIteration(),
        GeneratorExit(),
        OSError("\udcff"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_no_exception_of_an_agent_ends_the_runner(
    store: StoreClient, error: BaseException, asynchronous: bool
) -> None:
    def blocking(task: int) -> float:
        if task == 0:
            raise error
        return 1.0

    async def agent(task: int) -> float:
        return blocking(task)

    chosen = agent if asynchronous else blocking
    decided = await run_all(store, [0, 1, 1, 0, 1], chosen, {"max_concurrent": 1})
    statuses = [rollout.status for rollout in decided]
    assert statuses == ["failed", "succeeded", "succeeded", "failed", "succeeded"]


async def test_an_attempt_that_takes_too_long_is_given_up(store: StoreClient) -> None:
    (decided,) = await run_all(store, [1], never, timeout_seconds=0.02)
    attempt = decided.attempt
    assert (decided.status, attempt.status, attempt.failure.kind) == ("failed", "timeout", "timeout")


# ends


async def test_a_runner_ends_after_its_rollouts_and_leaves_the_others(store: StoreClient) -> None:
    ids = await enqueue(store, range(5))
    async with within():
        assert await make_runner(store, lambda task: 1.0, 2, max_rollouts=3).serve() == "max_rollouts"
    statuses = [rollout.status for rollout in await store.query_rollouts(rollout_id_in=ids)]
    assert statuses == ["succeeded"] * 3 + ["queuing"] * 2


async def test_it_decides_what_it_has_before_it_ends(store: StoreClient) -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def agent(task: int) -> float:
        inside.set()
        await leave.wait()
        return 1.0

    await enqueue(store, [1])
    async with serving(store, agent, max_rollouts=1) as task:
        await inside.wait()
        assert not task.done()
        leave.set()
        assert await task == "max_rollouts"
    assert (await store.statistics())["rollouts_succeeded"] == 1


async def test_a_retry_counts_as_a_rollout_of_the_runner(store: StoreClient) -> None:
    await enqueue(store, [0], max_attempts=5, retry_condition=["failed"])
    async with within():
        assert await make_runner(store, lambda task: 1 / task, max_rollouts=3).serve() == "max_rollouts"
    assert (await store.statistics())["total_attempts"] == 3


async def test_cancelling_the_runner_cancels_its_agents_and_takes_nothing_more(store: StoreClient) -> None:
    agent = Endless()
    await enqueue(store, [1, 2])
    async with serving(store, agent.run, 1) as task:
        await agent.inside.wait()
        task.cancel()
        await agent.cleaned.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    counts = await store.statistics()
    # the pool gives back what a runner had
    assert (counts["rollouts_queuing"], counts["rollouts_preparing"]) == (1, 1)


async def test_a_lost_store_ends_the_runner(store: StoreClient) -> None:
    class LosingStore(StoreClient):
        async def finish_attempt(self, *args: Any, **kwargs: Any) -> Rollout:
            raise UnknownIdError("the store was restarted")

    losing: StoreClient = LosingStore(store._channel.target)
    await enqueue(store, [1, 2])
    done: Awaitable[Any]
    async with serving(losing, lambda task: None, 1) as done:
        with pytest.raises(UnknownIdError, match="restarted"):
            await done


@pytest.mark.parametrize(
    "method", ["add_many_spans", "heartbeat", "dequeue_many_rollouts", "get_resources_by_id"]
)
async def test_no_failing_call_of_the_store_is_overlooked(
    store: StoreClient, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*args: Any, **kwargs: Any) -> None:
        raise UnknownIdError("lost")

    monkeypatch.setattr(module, "FLUSH_S", 0.01)

    async def agent(task: int, rollout: Rollout) -> None:
        from raylight.agent.emit import emit_message

        emit_message("something to flush")
        await asyncio.Event().wait()

    await store.add_resources({"table": 1})
    await enqueue(store, [1])
    losing = StoreClient(store._channel.target)
    monkeypatch.setattr(losing, method, lost)
    runner = make_runner(losing, agent, 1, max_rollouts=None)
    async with within():
        with pytest.raises(UnknownIdError, match="lost"):
            await runner.serve()


async def test_the_tracer_is_set_up_before_the_first_rollout_and_torn_down_at_the_end(
    store: StoreClient,
) -> None:
    class Noting(DummyTracer):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def setup(self) -> None:
            self.notes.append("setup")

        def teardown(self) -> None:
            self.notes.append("teardown")

    tracer = Noting()
    await run_all(store, [1], lambda task: tracer.notes.append("agent"), {"tracer": tracer})
    assert (tracer.notes[0], tracer.notes[-2:]) == ("setup", ["agent", "teardown"])


async def test_a_tracer_that_cannot_be_set_up_ends_the_runner_at_once(store: StoreClient) -> None:
    class Broken(DummyTracer):
        def setup(self) -> None:
            raise TracerError("no provider")

    ids = await enqueue(store, [1])
    with pytest.raises(TracerError, match="no provider"):
        await make_runner(store, never, tracer=Broken()).serve()
    assert (await store.get_rollout_by_id(ids[0])).status == "queuing"


# limits of its process


async def test_a_limit_that_an_agent_lowered_is_raised_again(store: StoreClient) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)

    async def agent(task: int) -> float:
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        return 1.0

    try:
        assert {rollout.status for rollout in await run_all(store, range(3), agent)} == {"succeeded"}
        assert resource.getrlimit(resource.RLIMIT_CORE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


async def test_a_runner_whose_limits_stay_low_is_replaced_at_once(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root could raise them again."""

    def refuse(limit: int, values: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    async def agent(task: str) -> float:
        if task == "never":
            await asyncio.Event().wait()
        given = resource.getrlimit
        monkeypatch.setattr(resource, "setrlimit", refuse)
        monkeypatch.setattr(resource, "getrlimit", lambda limit: (given(limit)[0], 2**40))
        return 1.0

    first, *others = await enqueue(store, ["limits", "never", "never"])
    async with serving(store, agent, 2) as task:
        assert await task == "limited"
    states = await store.query_rollouts(rollout_id_in=[first, *others])
    assert sorted(rollout.status for rollout in states) in (
        ["preparing", "queuing", "succeeded"],
        ["preparing", "preparing", "succeeded"],
    )
