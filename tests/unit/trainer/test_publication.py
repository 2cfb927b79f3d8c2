"""Replicas that join receive the weights as soon as the learners can send them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from unit_helpers import within

from raylight.config import EngineConfig
from raylight.errors import LearnerError, LearnerLostError, WeightSyncError
from raylight.trainer.publication import Publications
from raylight.weight_sync.keeper import CoordinatorKeeper
from raylight.weight_sync.orders import Snapshot


class Learners:
    """They serve all replicas that wait, unless they fail."""

    def __init__(self, keeper: CoordinatorKeeper) -> None:
        self.keeper = keeper
        self.failure: Exception | None = None
        self.served: list[tuple[int, list[str]]] = []
        self.called = asyncio.Event()

    async def publish_weights(self, version: int, token: str, settings: Any) -> None:
        self.called.set()
        if self.failure:
            raise self.failure
        self.served.append((version, sorted(self.keeper.lacking)))
        self.keeper.update(Snapshot(1))


class Bench:
    """Publications whose learners hold version `held`, while version 3 is the last published one."""

    def __init__(self) -> None:
        self.keeper = CoordinatorKeeper(None, print)
        self.learners: Any = Learners(self.keeper)
        running: Any = SimpleNamespace(keeper=self.keeper, client=None, handle=None)
        engine = EngineConfig(kind="transformers")
        self.publications = Publications(self.learners, running, engine, 5.0)
        self.publications.published = self.held = 3
        self.task = asyncio.create_task(self.publications.serve_joined(lambda: self.held))

    def join(self, *replicas: str) -> None:
        self.keeper.update(Snapshot(1, lacking=frozenset(replicas)))

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_a_replica_that_joins_is_served_each_time() -> None:
    async with within(5):
        bench = Bench()
        for _ in range(2):  # under the same name too, after a restart of the coordinator
            bench.join("a", "b")
            await bench.turns()
        assert bench.learners.served == [(3, ["a", "b"])] * 2
        bench.task.cancel()


async def test_a_replica_waits_until_restarted_learners_have_returned_to_the_version() -> None:
    async with within(5):
        bench = Bench()
        bench.held = 1
        bench.join("a")
        await bench.turns()
        assert not bench.learners.served
        bench.held = 3
        bench.publications.notice_version()
        await bench.turns()
        assert bench.learners.served == [(3, ["a"])]
        bench.task.cancel()


@pytest.mark.parametrize("error", [LearnerLostError("a rank died"), LearnerError("a bug")])
async def test_a_failure_of_the_learners_is_raised_and_the_replica_is_served_after_it(
    error: LearnerError,
) -> None:
    async with within(5):
        bench = Bench()
        bench.learners.failure = error
        bench.join("a")
        with pytest.raises(LearnerError, match=str(error)):
            await bench.publications.wait_for_failure()
        bench.learners.failure = None
        await bench.turns()
        assert not bench.learners.served  # until they have been restarted
        bench.publications.notice_version()
        await bench.turns()
        assert bench.learners.served == [(3, ["a"])]
        bench.task.cancel()


async def test_a_replica_that_cannot_be_reached_waits_for_the_next_publication() -> None:
    async with within(5):
        bench = Bench()
        bench.learners.failure = WeightSyncError("several transfers broke")
        bench.join("a")
        await bench.learners.called.wait()
        bench.learners.called.clear()
        bench.join("a")
        await bench.turns()
        assert not bench.learners.called.is_set()
        bench.learners.failure = None
        bench.join("a", "b")
        await bench.turns()
        assert bench.learners.served == [(3, ["a", "b"])]
        bench.task.cancel()
