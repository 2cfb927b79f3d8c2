"""Order of events where learners and engines are on the same GPUs. Only the device's calls are faked."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from coordinator_helpers import join
from run_settings import policy_settings
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.config import EngineConfig, LearnerConfig
from raylight.learner.ranks import actor as actors
from raylight.learner.ranks.actor import LearnerActor
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.components.learners import Learners
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.spec.resume import fresh_start
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator


class Events:
    """A component whose methods are recorded, and take a turn of the event loop."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> dict[str, float]:
            self._seen.append(f"{self._name}.{method}")
            await asyncio.sleep(0)
            self._seen.append(f"{self._name}.{method} done")
            return {}

        return call


def make_run(seen: list[str], learner: float, engine: float) -> PolicyComponents:
    """Return a run whose learners and engine record their events."""
    settings = policy_settings(
        str(STARTER_MODEL),
        EngineConfig(num_gpus=engine, sleep_while_learning=True),
        LearnerConfig(num_gpus=learner),
    )
    run = PolicyComponents(settings, lambda text: None, True)
    run.models, run.learners = [cast(Any, Events("engines", seen))], cast(Any, Events("learners", seen))
    run.endpoints = cast(Any, Events("endpoints", seen))
    run.runners = cast(Any, Events("runners", seen))
    return run


@pytest.mark.parametrize(("learner", "engine"), [(1, 1), (0, 0), (0, 0.4), (0.6, 0.4)])
async def test_all_start_at_once(learner: float, engine: float) -> None:
    seen: list[str] = []
    await make_run(seen, learner, engine)._start()
    assert seen.index("engines.start") < seen.index("learners.start done")
    assert seen[-4:] == ["learners.join", "learners.join done", "endpoints.offer", "endpoints.offer done"]


def make_learners(learner: float, engine: float) -> Learners:
    settings = make_run([], learner, engine).settings
    learners = Learners(settings, fresh_start(), lambda text: None)
    learners.publications = cast(Any, SimpleNamespace(learners_busy=asyncio.Lock()))
    return learners


async def test_engines_sleep_during_an_update() -> None:
    seen: list[str] = []
    learners = make_learners(1, 0.4)
    learners.learner, learners.replicas = (
        cast(Any, Events("learners", seen)),
        cast(Any, Events("engines", seen)),
    )
    await learners.update(cast(Any, None))
    assert learners.version == 1
    done = [event for event in seen if event.endswith("done")]
    assert done == ["engines.sleep done", "learners.update done", "engines.wake done"]


async def test_a_replica_that_dies_during_an_update_is_replaced_after_it() -> None:
    """Its replacement takes memory once the learners hold still; the engines wake, and the run continues."""
    coordinator, learners = ReplicaCoordinator(replacement_timeout_s=60.0), make_learners(0.6, 0.4)
    learners.replicas = CoordinatorClient(coordinator, replacement_timeout_s=60.0)
    entering: list[asyncio.Future[bool]] = []

    async def follow(name: str) -> None:
        replica = await join(coordinator, name)
        while True:
            await replica.do()

    async def update(batch: Any) -> dict[str, float]:
        followers.pop().cancel()
        await coordinator.leave("a")
        entering.append(asyncio.ensure_future(coordinator.enter_start("b", 60.0)))
        await asyncio.sleep(0.01)
        assert not entering[0].done()
        return {}

    async def replace() -> None:
        await until(lambda: bool(entering))
        assert await entering[0]
        await coordinator.end_start("b")
        followers.append(asyncio.ensure_future(follow("b")))

    learners.learner = cast(Any, SimpleNamespace(update=update))
    followers = [asyncio.ensure_future(follow("a"))]
    async with within():
        await coordinator.wait_for_replicas(1)
        replacing = asyncio.ensure_future(replace())
        await learners.update(cast(Any, None))
        await replacing
    assert learners.version == 1
    await cancel_all(followers)


@pytest.mark.parametrize(("gpus", "released"), [(0.6, True), (1, False), (0, False)])
def test_a_learner_returns_the_memory_of_an_update_to_a_shared_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: float, released: bool
) -> None:
    import torch

    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty_cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    actor: Any = LearnerActor(0, 1, LearnerConfig(num_gpus=gpus))
    actor._policy = SimpleNamespace(
        engine=SimpleNamespace(get_data_parallel_rank=lambda: 0),
        update_shard=lambda _: seen.append("update") or {},
    )
    monkeypatch.setattr(actors.ray, "get", lambda reference: reference)
    actor.update([None])
    assert seen == ["update", *["empty_cache"] * released]
