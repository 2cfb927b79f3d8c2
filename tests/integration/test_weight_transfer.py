"""Weights on their way from two learners to two replicas: processes die amid a broadcast."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_cluster import Cluster
from served_replicas import Served, replica_pid, served
from test_learner_faults import gang, make_batch, pids

from raylight._utils.aio import cancel_all
from raylight.config import EngineConfig, LearnerConfig
from raylight.errors import LearnerLostError
from raylight.learner.ranks.actor import LearnerActor
from raylight.learner.ranks.group import LearnerGroup
from raylight.trainer.components.publication import Publications

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
DEADLINE_S = 300
TIMEOUT_S = 60.0
IDS = [5, 9, 12, 7, 20, 31]
GATE = "gate"


@pytest.fixture
def connected(cluster: Cluster) -> Any:
    with ray.init(address=cluster.address, log_to_driver=False):
        yield
    cluster.assert_clean()


class Gate:
    """Actor at which a sender waits until the test opens it."""

    def __init__(self) -> None:
        self._reached, self._open = asyncio.Event(), asyncio.Event()

    async def wait_reached(self) -> None:
        await self._reached.wait()

    async def open(self) -> None:
        self._open.set()

    async def enter(self) -> None:
        self._reached.set()
        await self._open.wait()


class GatedLearner(LearnerActor):
    """A learner whose first broadcast of version 2 stops at the gate after a layer group."""

    def publish_weights(self, version: int, *args: Any) -> None:
        from raylight.weights.gloo_group import GlooGroup

        real, sent = GlooGroup.broadcast, []

        def broadcast(group: GlooGroup, tensors: Any) -> None:
            real(group, tensors)
            sent.append(len(tensors))
            if version == 2 and len(sent) == 1:
                ray.get(ray.get_actor(GATE, GATE).enter.remote())

        GlooGroup.broadcast = broadcast  # type: ignore[method-assign]
        try:
            super().publish_weights(version, *args)
        finally:
            GlooGroup.broadcast = real  # type: ignore[method-assign]


@asynccontextmanager
async def publishing(
    folder: Path, overlap: bool = False
) -> AsyncIterator[tuple[Served, LearnerGroup, Publications, Any]]:
    """Start two replicas, two learners and a gate; publish version 1."""
    gate: Any = ray.remote(Gate).options(name=GATE, namespace=GATE, num_cpus=0).remote()
    config = LearnerConfig(n=2, num_cpus=0.1)
    async with served(folder, replicas=2, num_cpus=0) as model, gang(config, GatedLearner) as learners:
        engine = EngineConfig(kind="transformers", replicas=2, weight_transfer="gloo", start_timeout_s=120)
        publications = Publications(
            learners, model.coordinator, engine, TIMEOUT_S, probe=IDS, tolerance=1e-5, during_updates=overlap
        )
        await learners.update(make_batch())
        await publications.publish(1)
        await assert_parity(model, learners, 2)
        await learners.update(make_batch())
        yield model, learners, publications, gate
    ray.kill(gate)


async def assert_parity(model: Served, learners: LearnerGroup, replicas: int) -> set[str]:
    """Compare the log-probs of all replicas with the learners'; return the replicas' names."""
    return await assert_logprobs(model, await learners.logprobs(IDS), replicas)


async def assert_logprobs(model: Served, expected: list[float], replicas: int) -> set[str]:
    """Compare the log-probs of all replicas with the expected ones; return the replicas' names."""
    probed = await model.coordinator.probe(IDS, TIMEOUT_S)
    assert len(probed) == replicas
    for logprobs in probed.values():
        assert logprobs == pytest.approx(expected, abs=1e-5)
    return set(probed)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_a_replica_that_dies_amid_a_broadcast_is_left_out_and_its_replacement_gets_the_weights(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(DEADLINE_S), publishing(tmp_path) as (model, learners, publications, gate):
        serving_joined = asyncio.create_task(publications.serve_joined(lambda: 2))
        doomed, survivor = sorted(await assert_parity_of_version_1(model))
        second = asyncio.create_task(publications.publish(2))
        await gate.wait_reached.remote()
        os.kill(replica_pid(doomed), signal.SIGKILL)
        await gate.open.remote()
        await second
        assert survivor in await assert_parity(model, learners, 1)
        await model.coordinator.handle.wait_for_replicas.remote(2)  # the replacement, with version 2
        assert doomed not in await assert_parity(model, learners, 2)
        await cancel_all([serving_joined])


async def assert_parity_of_version_1(model: Served) -> set[str]:
    """Probe both replicas, which have equal weights."""
    first, second = (await model.coordinator.probe(IDS, TIMEOUT_S)).items()
    assert first[1] == second[1]
    return {first[0], second[0]}


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_a_sender_that_dies_amid_a_broadcast_leaves_engines_that_the_next_one_completes(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(DEADLINE_S), publishing(tmp_path) as (model, learners, publications, gate):
        (sender, _) = await pids(learners)
        second = asyncio.create_task(publications.publish(2))
        await gate.wait_reached.remote()
        os.kill(sender, signal.SIGKILL)
        with pytest.raises(LearnerLostError):
            await second
        await gate.open.remote()
        await learners.restart()
        for _ in range(2):
            await learners.update(make_batch())
        await publications.publish(2)
        await assert_parity(model, learners, 2)
        assert model.coordinator.evictions == 0


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_an_update_runs_while_a_snapshot_of_the_version_before_is_sent(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        publishing(tmp_path, True) as (model, learners, publications, gate),
    ):
        expected = await learners.logprobs(IDS)
        second = asyncio.create_task(publications.publish(2))
        await gate.wait_reached.remote()
        async with publications.learners_busy:
            await learners.update(make_batch())
        changed = await learners.logprobs(IDS)
        assert not second.done()
        assert publications.published == 1
        await gate.open.remote()
        parity = await second
        assert parity is not None
        assert parity.max_abs < 1e-5
        await assert_logprobs(model, expected, 2)
        assert max(abs(a - b) for a, b in zip(changed, expected, strict=True)) > 1e-3
        await publications.publish(3)
        await assert_parity(model, learners, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("connected")
async def test_a_rank_that_dies_while_it_sends_ends_the_update_too(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        publishing(tmp_path, True) as (model, learners, publications, gate),
    ):
        second = asyncio.create_task(publications.publish(2))
        await gate.wait_reached.remote()
        (sender, other) = await pids(learners)
        os.kill(other, signal.SIGSTOP)  # the update waits for it
        updating = asyncio.create_task(learners.update(make_batch()))
        os.kill(sender, signal.SIGKILL)
        for call in (second, updating):
            with pytest.raises(LearnerLostError):
                await call
        await learners.restart()
        publications.notice_version()
        await gate.open.remote()
        for _ in range(2):
            await learners.update(make_batch())
        await publications.publish(2)
        await assert_parity(model, learners, 2)
