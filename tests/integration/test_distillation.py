"""The teacher of a distillation on a real cluster: its log-probs, also after its replica was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack

import numpy as np
import pytest
import ray
from random_rows import plain_logprobs, random_rows
from ray.util.state import list_actors
from ray_cluster import Cluster

from raylight.config import EngineConfig
from raylight.experience.batch import TrainBatch
from raylight.quickstart import STARTER_MODEL
from raylight.trainer.components.teacher import Teacher
from raylight.trainer.settings import ServingSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected():
        yield


def replica_pids(name: str) -> list[int]:
    address = ray.get_runtime_context().gcs_address
    alive = list_actors(address, filters=[("state", "=", "ALIVE")], detail=True, limit=1000)
    return [actor.pid for actor in alive if f"ServeReplica:{name}" in actor.class_name]


async def test_a_teacher_scores_as_plain_transformers_does_and_outlives_its_replica() -> None:
    rows = random_rows(24)
    batch = TrainBatch([0.0] * 24, ["g"] * 24, rows, list(range(24)))
    engine = EngineConfig(kind="transformers", num_cpus=0.1, max_model_len=64, max_concurrent=1)
    model = ServingSettings(STARTER_MODEL, engine, "teacher")
    async with AsyncExitStack() as stack:
        teacher = Teacher("distilled", model, 300.0, "secret", print, False)
        await teacher.open(stack)
        await teacher.start()
        scored, metrics = await teacher.score(batch)
        assert scored.teacher_logprobs is not None
        for found, expected in zip(scored.teacher_logprobs, plain_logprobs(STARTER_MODEL, rows), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert metrics["teacher/retries"] == 0
        (pid,) = replica_pids("distilled-teacher")
        os.kill(pid, signal.SIGKILL)
        again, _ = await teacher.score(batch)
    assert again.teacher_logprobs is not None
    assert all(map(np.array_equal, again.teacher_logprobs, scored.teacher_logprobs))
