"""Resources of a runner's rollouts: the version that each names, fetched once, and a changed one by those
that come later."""

import asyncio
import os
from typing import Any

import pytest
from unit_helpers import enqueue, run_all, serving

from raylight.agent.resources import LLM
from raylight.runner import runner as module
from raylight.store.client import StoreClient
from raylight.types import EnqueueRolloutRequest, ResourcesUpdate, Rollout


class Counting(StoreClient):
    """Counts what is fetched."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.fetched: list[str] = []

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate:
        self.fetched.append(resources_id)
        await asyncio.sleep(0)
        return await super().get_resources_by_id(resources_id)


async def test_the_agent_gets_the_resources_that_the_rollout_names(store: StoreClient) -> None:
    given = []

    async def agent(task: int, table: str) -> None:
        given.append((task, table))

    old = (await store.add_resources({"table": "old"})).resources_id
    new = (await store.add_resources({"table": "new"})).resources_id
    requests = [
        EnqueueRolloutRequest(input=n, resources_id=which) for n, which in enumerate([old, new, None, old])
    ]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    async with serving(store, agent):
        await store.wait_until_decided(rollout_ids=ids)
    assert sorted(given) == [(0, "old"), (1, "new"), (2, "new"), (3, "old")]


async def test_models_of_the_run_are_called_without_a_proxy(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "intranet")
    served = LLM(endpoint="http://[fd00::1]:8000/v1", model="m", traced=True)
    upstream = LLM(endpoint="https://api.example.com/v1", model="m")
    await store.add_resources({"llm": served, "judge": upstream})
    seen: list[str] = []

    async def agent(task: int, llm: LLM) -> None:
        seen.extend(os.environ[name] for name in ("NO_PROXY", "no_proxy"))

    await run_all(store, [1], agent)
    assert seen == ["intranet,127.0.0.1,localhost,::1,fd00::1"] * 2


async def test_a_version_is_fetched_once_however_many_rollouts_ask_at_once(store: StoreClient) -> None:
    counting = Counting(store._channel.target)
    added = await store.add_resources({"table": 1})
    decided = await run_all(counting, range(50), lambda task, table: float(table), {"max_concurrent": 32})
    assert {rollout.status for rollout in decided} == {"succeeded"}
    assert counting.fetched == [added.resources_id]


async def test_a_version_that_was_changed_in_its_place_is_seen_by_later_rollouts(store: StoreClient) -> None:
    seen = []

    async def agent(task: int, table: str) -> None:
        seen.append(table)

    counting = Counting(store._channel.target)
    first = await store.add_resources({"table": "one"})
    async with serving(counting, agent, 1):
        for version in ("one", "two", "three"):
            if version != "one":
                await store.update_resources(first.resources_id, {"table": version})
            for _ in range(2):
                await store.wait_until_decided(rollout_ids=await enqueue(store, [1]))
    assert seen == ["one", "one", "two", "two", "three", "three"]
    assert len(counting.fetched) == 3


async def test_a_newer_version_than_the_rollout_knew_of_is_not_fetched_again(store: StoreClient) -> None:
    """It was changed between the dequeue and the fetch."""

    class Racing(Counting):
        async def dequeue_many_rollouts(self, **how: Any) -> list[Rollout]:
            found = await super().dequeue_many_rollouts(**how)
            return [rollout.model_copy(update={"resources_version": 1}) for rollout in found]

    added = await store.add_resources({"table": "one"})
    await store.update_resources(added.resources_id, {"table": "two"})
    seen: list[str] = []
    racing = Racing(store._channel.target)
    await run_all(racing, range(10), lambda task, table: seen.append(table), {"max_concurrent": 1})
    assert (seen, len(racing.fetched)) == (["two"] * 10, 1)


async def test_a_runner_keeps_no_more_than_a_few_versions(store: StoreClient) -> None:
    counting = Counting(store._channel.target)
    number = module.MAX_RESOURCES + 3
    added = [(await store.add_resources({"table": n})).resources_id for n in range(number)]
    seen: list[int] = []
    async with serving(counting, lambda task, table: seen.append(table), 1):
        for which in [*added, *added[-module.MAX_RESOURCES :], added[0]]:
            rollout = await store.enqueue_rollout(1, resources_id=which)
            await store.wait_until_decided(rollout_ids=[rollout.rollout_id])
    assert counting.fetched == [*added, added[0]]
    assert seen == [*range(number), *range(3, number), 0]


async def test_a_rollout_without_resources_has_none(store: StoreClient) -> None:
    def agent(task: int, resources: dict[str, Any]) -> float:
        return float(len(resources))

    (decided,) = await run_all(store, [1], agent)
    assert (await store.collect([decided.rollout_id]))[0].reward == 0.0


async def test_a_parameter_that_nothing_fills_fails_the_rollout_by_name(store: StoreClient) -> None:
    await store.add_resources({"table": 1})
    (decided,) = await run_all(store, [1], lambda task, tabel: 1.0)
    assert decided.attempt.failure.kind == "agent"
    assert "needs 'tabel'" in decided.attempt.failure.error
