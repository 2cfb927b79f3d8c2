"""A runner with a store in this process: how many rollouts run at once, how they are retried, how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from unit_helpers import within

from raylight.agent.litagent import rollout
from raylight.errors import UnknownIdError
from raylight.runner.runner import Runner
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import Rollout, RolloutConfig, RolloutRequest

CONNECTION = openai.APIConnectionError(request=httpx.Request("POST", "http://engine"))


@pytest.fixture
def store() -> StoreClient:
    return StoreClient(StoreService())


@asynccontextmanager
async def serving(store: StoreClient, agent: Callable[..., Any], max_concurrent: int = 4) -> Any:
    runner = Runner("w", store, rollout(agent), "secret", max_concurrent)
    task = asyncio.create_task(runner.serve())
    try:
        async with within():
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def enqueue(store: StoreClient, tasks: list[Any], **config: Any) -> list[str]:
    requests = [RolloutRequest(input=task, config=RolloutConfig(**config)) for task in tasks]
    return [r.rollout_id for r in await store.enqueue(requests)]


async def run_all(store: StoreClient, tasks: list[Any], agent: Callable[..., Any], **config: Any) -> list[Rollout]:
    ids = await enqueue(store, tasks, **config)
    async with serving(store, agent):
        return await store.wait_for_rollouts(ids)


async def test_every_rollout_gets_its_own_task_and_reward(store: StoreClient) -> None:
    async def agent(task: int) -> float:
        return float(task)

    decided = await run_all(store, list(range(30)), agent)
    assert {r.status for r in decided} == {"succeeded"}
    found = await store.collect([r.rollout_id for r in decided])
    assert [item.reward for item in found] == [float(item.rollout.input) for item in found] == list(map(float, range(30)))


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

    ids = await enqueue(store, list(range(20)))
    async with serving(store, agent, bound):
        await full.wait()
        waiting = await store.statistics()
        assert waiting["rollouts_queuing"] == 15  # what does not run stays with the store, for other runners
        leave.set()
        await store.wait_for_rollouts(ids)
    assert most == bound


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
        await store.wait_for_rollouts(ids)
    assert done == ["quick"] * 6 + ["slow"]


async def test_synchronous_agents_run_at_once_in_threads(store: StoreClient) -> None:
    meeting = threading.Barrier(4, timeout=5)
    decided = await run_all(store, [1, 2, 3, 4], lambda task: meeting.wait() * 0.0)
    assert {r.status for r in decided} == {"succeeded"}


async def test_a_failure_of_the_infrastructure_is_tried_again(store: StoreClient) -> None:
    tries = []

    async def agent(task: int, rollout: Rollout) -> float:
        tries.append(rollout.attempt.sequence_id)
        if len(tries) == 1:
            raise CONNECTION
        return 1.0

    (decided,) = await run_all(store, [1], agent)
    assert (decided.status, tries) == ("succeeded", [1, 2])


async def test_it_is_not_tried_more_often_than_allowed(store: StoreClient) -> None:
    tries = []

    async def agent(task: int) -> float:
        tries.append(1)
        raise CONNECTION

    (decided,) = await run_all(store, [1], agent, max_attempts=3)
    assert (decided.status, len(tries), decided.attempt.failure.kind) == ("failed", 3, "infrastructure")


async def test_an_agents_own_failure_is_final_and_harms_no_other_rollout(store: StoreClient) -> None:
    tries = []

    async def agent(task: int) -> float:
        tries.append(task)
        return 1.0 / task

    decided = await run_all(store, [0, 1, 0, 2], agent)
    assert [r.status for r in decided] == ["failed", "succeeded", "failed", "succeeded"]
    assert sorted(tries) == [0, 0, 1, 2]
    assert "ZeroDivisionError" in decided[0].attempt.failure.error


async def test_an_attempt_that_takes_too_long_is_given_up(store: StoreClient) -> None:
    async def agent(task: int) -> None:
        await asyncio.Event().wait()

    (decided,) = await run_all(store, [1], agent, timeout_seconds=0.02)
    assert (decided.status, decided.attempt.status) == ("failed", "timeout")


async def test_an_agent_that_cancels_itself_does_not_end_the_runner(store: StoreClient) -> None:
    async def agent(task: int) -> float:
        if task == 0:
            raise asyncio.CancelledError
        return 1.0

    ids = await enqueue(store, [0, 1, 1, 1, 1, 1])
    async with serving(store, agent, 1), within(2):
        decided = await store.wait_for_rollouts(ids)
    assert [r.status for r in decided] == ["failed"] + ["succeeded"] * 5


async def test_the_agent_gets_the_resources_that_the_rollout_names(store: StoreClient) -> None:
    given = []

    async def agent(task: int, table: str) -> None:
        given.append((task, table))

    old, new = await store.add_resources({"table": "old"}), await store.add_resources({"table": "new"})
    requests = [RolloutRequest(input=1, resources_id=old), RolloutRequest(input=2, resources_id=new), RolloutRequest(input=3)]
    ids = [r.rollout_id for r in await store.enqueue(requests)]
    async with serving(store, agent):
        await store.wait_for_rollouts(ids)
    assert sorted(given) == [(1, "old"), (2, "new"), (3, "new")]


async def test_cancelling_the_runner_cancels_its_agents_and_takes_nothing_more(store: StoreClient) -> None:
    inside, cleaned = asyncio.Event(), asyncio.Event()

    async def agent(task: int) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    await enqueue(store, [1, 2])
    async with serving(store, agent, 1) as task:
        await inside.wait()
        task.cancel()
        await cleaned.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await store.statistics())["rollouts_queuing"] == 1


async def test_a_lost_store_ends_the_runner(store: StoreClient) -> None:
    class LosingStore(StoreClient):
        async def finish_attempt(self, *args: Any, **kwargs: Any) -> Rollout:
            raise UnknownIdError("the store was restarted")

    losing: StoreClient = LosingStore(store._target)
    await enqueue(store, [1, 2])
    done: Awaitable[Any]
    async with serving(losing, lambda task: None, 1) as done:
        with pytest.raises(UnknownIdError, match="restarted"):
            await done
